"""A GPU without tensor cores for bf16, such as Colab's and Kaggle's T4, is named beside the times of a run in bf16."""

from __future__ import annotations

import pytest

from fsdp_lab.rank.measure import precision_notes


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
