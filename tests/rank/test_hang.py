"""Ranks that hang, without a kernel: who is missing is said on all ranks, they are freed and go on. And what beats tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

from fsdp_lab.base.hang import Heartbeat, LongWork
from fsdp_lab.rank import Session, lifecycle
from fsdp_lab.rank.heartbeat import PERIOD_S, STILL_S, LongWorkLog
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, session, spec

LIMIT_S = 1.5


def _hangs(place: Place, changes: dict[str, Any], whom: int) -> Any:
    """Rank `whom` stalls in its third step until it is told to give up. What each said, and when, and how they went on."""
    s = session(place, hang_s=LIMIT_S)
    s.apply("run", spec(place.world_size, **changes).to_dict())
    s.train(2)
    trainer = s.trainer
    assert trainer is not None
    inner = trainer.batches.batch
    if place.rank == whom:
        trainer.batches.batch = lambda *a: (_stall_here(s), inner(*a))[1]  # type: ignore[method-assign]
    start_s, said = time.perf_counter(), "nothing"
    try:
        s.train(1)
    except RuntimeError as e:
        said = f"{type(e).__name__}: {e}"
    seconds = time.perf_counter() - start_s
    trainer.batches.batch = inner  # type: ignore[method-assign]
    steps = [e["step"] for e in s.train(2)["events"]]
    s.close()
    return said, seconds, steps


def _stall_here(s: Session) -> None:
    while s.context.aborted is None:
        threading.Event().wait(0.02)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, "all_gather"),
        (DDP, "all_reduce"),
        pytest.param({"backend": "fsdp1"}, "all_gather", marks=pytest.mark.slow),
        pytest.param({"backend": "fsdp2"}, "all_gather", marks=pytest.mark.slow),
    ],
    ids=["lab", "ddp", "fsdp1", "fsdp2"],
)
def test_a_rank_that_does_not_come_is_named_on_all_ranks(pool: Pool, changes: dict[str, Any], what: str) -> None:
    for said, seconds, steps in pool.run(_hangs, 2, changes, 1, reduction=None):
        assert said.startswith(f"RankAborted: rank 1 did not join {what} "), said
        assert " of " in said.partition(" (group ")[0], "the unit is named"
        assert "rank 1 is here:" in said and "in _stall_here" in said
        assert LIMIT_S < seconds < LIMIT_S + 2.5, "found within 2 s; then the ranks settle"
        assert steps == [2, 3], "no step is lost"


def _is_slow(place: Place) -> list[int]:
    """Rank 1 comes late to each step, but before the limit."""
    s = session(place, hang_s=LIMIT_S)
    s.apply("run", spec().to_dict())
    trainer = s.trainer
    assert trainer is not None
    inner = trainer.batches.batch
    if place.rank == 1:
        trainer.batches.batch = lambda *a: (threading.Event().wait(0.6 * LIMIT_S), inner(*a))[1]  # type: ignore[method-assign]
    steps = [e["step"] for e in s.train(3)["events"]]
    s.close()
    return steps


def test_a_rank_that_is_only_slow_is_left_in_peace(pool: Pool) -> None:
    assert pool.run(_is_slow, 2, reduction=None) == [[0, 1, 2]] * 2


WIRE_S = 2 * LIMIT_S  # the timeout of the wire
LONG_S = 1.6 * WIRE_S


def _works_long(place: Place, compiles: bool) -> tuple[list[int], set[str]]:
    """Rank 1 draws initial values, or compiles in its fourth step, for longer than the hang limit and the wire's timeout.
    The steps that were made, and what beats named."""
    beats: list[dict[str, Any]] = []
    s = Session(
        rank=place.rank, world_size=2, device="cpu", store=place.store, threads=1, timeout_s=WIRE_S, hang_s=LIMIT_S
    )
    read = s._heartbeat._read
    s._heartbeat._read = lambda *a, **k: (h := read(*a, **k), beats.append(h.to_dict()))[0]  # type: ignore[method-assign]
    fill, slow = lifecycle.fill, place.rank == 1 and not compiles

    def drawn(*args: Any) -> None:
        threading.Event().wait(LONG_S if slow else 0.0)
        fill(*args)

    with mock.patch.object(lifecycle, "fill", drawn), mock.patch.object(torch.nn.Module, "compile", lambda self: None):
        s.apply("run", spec(compile=compiles).to_dict())
    steps = [e["step"] for e in s.train(3)["events"]]
    trainer = s.trainer
    assert trainer is not None
    inner = trainer.batches.batch

    def compiling(*args: Any) -> Any:
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0"):
            threading.Event().wait(LONG_S)
        trainer.batches.batch = inner  # type: ignore[method-assign]
        return inner(*args)

    if compiles and place.rank == 1:
        trainer.batches.batch = compiling  # type: ignore[method-assign]
    steps += [e["step"] for e in s.train(2)["events"]]
    s.close()
    return steps, {beat["work"] for beat in beats}


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True], ids=["draws", "compiles"])
def test_a_rank_at_long_work_is_waited_for(pool: Pool, compiles: bool) -> None:
    text = (LongWork.COMPILE if compiles else LongWork.DRAW).text
    for rank, (steps, works) in enumerate(pool.run(_works_long, 2, compiles, reduction=None)):
        assert steps == [0, 1, 2, 3, 4]
        assert text in works or rank != 1, "its beats name it"


def _beats(place: Place) -> list[dict[str, Any]]:
    """Rank 1 stalls in its third step until it has said so a few times; then both go on to the end."""
    told: list[dict[str, Any]] = []
    s = session(place, on_heartbeat=told.append)
    s.apply("run", spec().to_dict())
    s.train(2)
    trainer = s.trainer
    assert trainer is not None
    inner = trainer.batches.batch
    if place.rank == 1:
        trainer.batches.batch = lambda *a: (_stall_for_beats(told), inner(*a))[1]  # type: ignore[method-assign]
    s.train(1)
    trainer.batches.batch = inner  # type: ignore[method-assign]
    s.train(2)
    assert _comes(lambda: told[-1]["step"] == 5 and not told[-1]["working"])
    s.close()
    after = len(told)
    threading.Event().wait(2.5 * PERIOD_S)
    assert len(told) == after, "no beat comes after the end"
    return told


def _stall_for_beats(told: list[dict[str, Any]]) -> None:
    before = len(told)
    assert _comes(lambda: sum(bool(b["stack"]) for b in told[before:] if b["working"]) > 2)


def _comes(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not true() and time.monotonic() < end:
        threading.Event().wait(0.02)
    return true()


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
    assert log.read() == ("", pytest.approx(0.1 * longest))


@pytest.mark.slow
def test_beats_tell_what_a_blocked_rank_waits_for_and_where_the_other_is(pool: Pool) -> None:
    zero, one = ([Heartbeat.from_dict(b) for b in told] for told in pool.run(_beats, 2, reduction=None))
    for rank, beats in enumerate((zero, one)):
        assert [b.number for b in beats] == list(range(len(beats))) and {b.rank for b in beats} == {rank}
        assert beats[-1].pending is None and beats[-1].last is not None and beats[-1].last.kind == "control"
    waits = [b for b in zero if b.pending is not None and b.step == 2]
    blocked = [b for b in waits if b.pending == waits[0].pending][-1]  # then rank 1 comes, and another wait may be seen
    pending, world = blocked.pending, blocked.pending.group if blocked.pending else ""
    assert pending is not None and blocked.working and blocked.step == 2 and blocked.pending_s > STILL_S
    assert (pending.kind, pending.unit, pending.size) == ("all_gather", "root", 2) and blocked.peers == (0, 1)
    assert blocked.counts[world] == pending.ordinal + 2 and blocked.recent[-2] == pending  # one is gathered ahead
    assert "in wait" in blocked.stack, "where it waits"
    away = [b for b in one if b.working and "in _stall_for_beats" in b.stack][-1]
    assert away.pending is None and away.counts[world] == pending.ordinal, "one behind"
    assert away.recent == blocked.recent[:-2][-len(away.recent) :]


@pytest.mark.slow
def test_a_beat_that_cannot_be_told_ends_nothing(pool: Pool) -> None:
    assert pool.run(_bad_teller, 1, reduction=None) == [[0, 1, 2]]


def _bad_teller(place: Place) -> list[int]:
    told: list[int] = []

    def tell(beat: dict[str, Any]) -> None:
        told.append(beat["number"])
        raise OSError("the kernel is gone")

    s = session(place, on_heartbeat=tell)
    assert _comes(lambda: len(told) > 2)
    s.close()
    return told[:3]
