"""A GPU without tensor cores for bf16, such as Colab's and Kaggle's T4, is named beside the times of a run in bf16."""

from __future__ import annotations

from contextlib import closing
from typing import Any
from unittest import mock

import pytest

from fsdp_lab.rank import lifecycle
from fsdp_lab.rank.measure import precision_notes
from tests.pool import Place, Pool
from tests.rank.test_session import session, spec


@pytest.mark.parametrize(
    ("name", "noted"),
    [
        ("Tesla T4", {"bf16"}),
        ("Tesla V100-SXM2-16GB", {"bf16"}),
        ("NVIDIA A100-SXM4-80GB", {"fp32"}),
        ("A GPU that is not in the table", set()),
        ("CPU", set()),
    ],
)
def test_only_where_the_data_sheet_has_none(name: str, noted: set[str]) -> None:
    assert {dtype for dtype in ("bf16", "fp16", "fp32") if precision_notes(name, dtype)} == noted


def _notes(place: Place, plan: list[dict[str, Any]]) -> list[list[str]]:
    with mock.patch.object(lifecycle, "device_name", lambda device: "Tesla T4"), closing(session(place)) as s:
        return [s.apply("run", given)["notes"] for given in plan]


def test_the_note_comes_and_goes_with_the_precision(pool: Pool) -> None:
    plan = [spec(1, precision=p).to_dict() for p in ("fp32", "bf16", "fp16")]
    ((fp32, bf16, fp16),) = pool.run(_notes, 1, plan, reduction=None)
    note = "Tesla T4 has no tensor cores for bf16: it may be slower than fp32; precision fp16 uses them."
    assert note in bf16 and note not in fp32 and note not in fp16
