"""Exposed communication: known answers of the definition."""

from typing import Any

import pytest

from fsdp_lab.wire import traffic
from fsdp_lab.wire.meter import Collective, exposed


def collective(kind: str, issue_s: float, end_s: float, *waits: tuple[float, float], **more: Any) -> Collective:
    return Collective(sequence=0, kind=kind, group="g", size=2, link_bytes=8, issue_s=issue_s, end_s=end_s,
                      waits=list(waits), **more)  # fmt: skip


KNOWN: dict[str, tuple[list[Collective], dict[str, float]]] = {
    "nothing": ([], {}),
    "overlapped": ([collective("all_gather", 0, 5)], {}),
    "waited for": ([collective("all_gather", 0, 5, (2, 5))], {"all_gather": 3}),
    "twice, and the rest of it": ([collective("all_gather", 0, 9, (1, 2), (4, 9))], {"all_gather": 6}),
    "two at once count once": (
        [collective("all_gather", 0, 5, (2, 5)), collective("reduce_scatter", 1, 6, (3, 6))],
        {"all_gather": 3, "reduce_scatter": 1},
    ),
    "one within another": (
        [collective("all_gather", 0, 9, (1, 9)), collective("reduce_scatter", 2, 4, (3, 4))], {"all_gather": 8}),
    "a reducer's, after the last gradient": (
        [collective("all_reduce", 0, 4, by_future=True), collective("all_reduce", 3, 7, by_future=True)], {"all_reduce": 4}),
    "a reducer's, landed before it": (
        [collective("all_reduce", 0, 2, by_future=True), collective("all_reduce", 3, 4, by_future=True)], {"all_reduce": 1}),
    "a reducer's, in two backwards": (
        [collective("all_reduce", 0, 2, by_future=True), collective("all_reduce", 5, 6, by_future=True, backward=1)],
        {"all_reduce": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_known_answers(case: str) -> None:
    collectives, wanted = KNOWN[case]
    assert exposed(collectives) == wanted and exposed(collectives[::-1]) == wanted
    assert {kind: t.exposed_seconds for kind, t in traffic(collectives).items() if t.exposed_seconds} == wanted
