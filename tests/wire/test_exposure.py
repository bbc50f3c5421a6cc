"""Exposed communication: known answers of the definition, and of real collectives."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from fsdp_lab.wire import traffic
from fsdp_lab.wire.meter import Collective, exposed
from tests.pool import Place, Pool


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
    assert exposed(collectives) == wanted
    assert exposed(collectives[::-1]) == wanted
    told = {kind: t.exposed_seconds for kind, t in traffic(collectives).items() if t.exposed_seconds}
    assert told == wanted


def _joins_late(place: Place) -> dict[str, float]:
    """Rank 1 comes when rank 0 has issued, and has then had something else to do."""
    place.world.barrier().wait()
    place.context.meter.take()
    if place.rank == 1:
        place.store.wait(["busy"])
        time.sleep(0.2)
    work = place.world.all_gather_single(torch.empty(8), torch.ones(4))
    if place.rank == 0:
        time.sleep(0.3)
        place.store.set("busy", "")
    work.wait()
    (told,) = traffic(place.context.meter.take()).values()
    return {"seconds": told.seconds, "exposed": told.exposed_seconds}


def test_what_overlaps_is_not_exposed(pool: Pool) -> None:
    zero, one = pool.run(_joins_late, 2)
    assert zero["seconds"] >= 0.5 and 0.2 <= zero["exposed"] <= zero["seconds"] - 0.3 + 1e-3
    assert one["exposed"] <= one["seconds"] < zero["seconds"]
