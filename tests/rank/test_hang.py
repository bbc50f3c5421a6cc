"""Ranks that hang, without a kernel: who is missing is said on all ranks, they are freed and go on. And what beats tell."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

from fsdp_lab.base.hang import LongWork
from fsdp_lab.rank import Session, lifecycle
from fsdp_lab.rank.heartbeat import LongWorkLog
from tests.covering import tiered
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, answers, before_batches, fails, session, spec, train

LIMIT_S = 1.5  # the reports of a rank have its stack a second after it stands still


def _hangs(place: Place, changes: dict[str, Any], whom: int) -> Any:
    """Rank `whom` stalls in its third step until it is told to give up. What each said, and when, and how they went on."""
    with closing(session(place, hang_s=LIMIT_S)) as s:
        s.apply("run", spec(place.world_size, **changes).to_dict())
        s.train(2)
        start_s = time.perf_counter()
        with before_batches(s, lambda: _stall_here(s) if place.rank == whom else None):
            (said,) = answers(s, [fails(train(1))])
        seconds = time.perf_counter() - start_s
        return said, seconds, [e["step"] for e in s.train(2)["events"]]


def _stall_here(s: Session) -> None:
    while s.context.aborted is None:
        threading.Event().wait(0.02)


@pytest.mark.parametrize(
    ("changes", "what"), tiered([({}, "all_gather"), (DDP, "all_reduce")], lambda changes, what: not changes)
)
def test_a_rank_that_does_not_come_is_named_on_all_ranks(pool: Pool, changes: dict[str, Any], what: str) -> None:
    for said, seconds, steps in pool.run(_hangs, 2, changes, 1, reduction=None):
        assert said.startswith(f"RankAborted: rank 1 did not join {what} "), said
        assert " of " in said.partition(" (group ")[0], "the unit is named"
        assert "rank 1 is here:" in said and "in _stall_here" in said
        assert seconds > LIMIT_S and steps == [2, 3], "no step is lost"


WIRE_S = 2 * LIMIT_S  # the timeout of the wire
LONG_S = 1.3 * WIRE_S


def _works_long(place: Place) -> tuple[list[int], set[str]]:
    """Rank 1 draws initial values, and then compiles in its second step, for longer than the hang limit and the wire's
    timeout. The steps that were made, and what beats named."""
    beats: list[dict[str, Any]] = []
    s = session(place, timeout_s=WIRE_S, hang_s=LIMIT_S)
    read = s._heartbeat._read
    s._heartbeat._read = lambda *a, **k: (h := read(*a, **k), beats.append(h.to_dict()))[0]  # type: ignore[method-assign]
    fill = lifecycle.fill

    def drawn(*args: Any) -> None:
        threading.Event().wait(LONG_S if place.rank == 1 else 0.0)
        fill(*args)

    with mock.patch.object(lifecycle, "fill", drawn), mock.patch.object(torch.nn.Module, "compile", lambda self: None):
        s.apply("run", spec(compile=True).to_dict())
    steps = [e["step"] for e in s.train(1)["events"]]

    def compiling() -> None:
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0"):
            threading.Event().wait(LONG_S if place.rank == 1 else 0.0)

    with before_batches(s, compiling):
        steps += [e["step"] for e in s.train(1)["events"]]
    s.close()
    return steps, {beat["work"] for beat in beats}


@pytest.mark.slow
def test_a_rank_at_long_work_is_waited_for(pool: Pool) -> None:
    (steps, _), (others, works) = pool.run(_works_long, 2, reduction=None)
    assert steps == others == [0, 1]
    assert {LongWork.COMPILE.text, LongWork.DRAW.text} <= works, "its beats name it"


def test_the_time_of_inner_work_is_not_the_outer_s(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    log, longest = LongWorkLog(), LongWork.FIRST_STEP.limit_s
    assert log.read() == ("", None)
    with log.during(LongWork.FIRST_STEP):
        now_s[0] += 0.9 * longest
        with log.during(LongWork.COMPILE):
            now_s[0] += 0.9 * LongWork.COMPILE.limit_s
            assert log.read() == ("compiles", 0.0)
        assert log.read() == (LongWork.FIRST_STEP.text, 0.0)
        now_s[0] += 0.3 * longest
        assert log.read() == (LongWork.FIRST_STEP.text, pytest.approx(0.2 * longest))
    now_s[0] += 1.0
    assert log.read() == ("", pytest.approx(0.2 * longest + 1.0)), "what it worked beyond its limit is not excused"


def test_work_that_makes_progress_is_never_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    log, longest = LongWorkLog(), LongWork.TOKENISE.limit_s
    with log.during(LongWork.READ):
        for _ in range(3):
            now_s[0] += 0.9 * longest
            log.renew(LongWork.TOKENISE)
            assert log.changed.is_set() and log.read() == ("makes its data into tokens", 0.0)
        now_s[0] += 1.1 * longest
        assert log.read() == (LongWork.TOKENISE.text, pytest.approx(0.1 * longest))


@pytest.mark.slow
def test_a_beat_that_cannot_be_told_ends_nothing(pool: Pool) -> None:
    assert pool.run(_bad_teller, 1, reduction=None) == [[0, 1, 2]]


def _bad_teller(place: Place) -> list[int]:
    told: list[int] = []
    enough = threading.Event()

    def tell(beat: dict[str, Any]) -> None:
        told.append(beat["number"])
        if len(told) == 3:
            enough.set()
        raise OSError("the kernel is gone")

    with closing(session(place, on_heartbeat=tell)):
        assert enough.wait(20)
    return told[:3]
