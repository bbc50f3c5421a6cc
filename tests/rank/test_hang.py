"""Ranks that hang, without a kernel: who is missing is said on all ranks, they are freed and go on. And what beats tell."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

from fsdp_lab.base.hang import Heartbeat, LongWork
from fsdp_lab.rank import Session, lifecycle
from fsdp_lab.rank.heartbeat import STILL_S, LongWorkLog
from fsdp_lab.wire import WireTimeout
from tests.pool import Place, Pool
from tests.rank.test_session import answers, before_batches, fails, running, session, spec, train

LIMIT_S = 1.5  # the reports of a rank have its stack a second after it stands still


def _hangs(place: Place, changes: dict[str, Any], whom: int) -> Any:
    """Rank `whom` stalls in its third step until it is told to give up. What each said, and when, and how they went on."""
    with running(place, spec(place.world_size, **changes), steps=2, hang_s=LIMIT_S) as s:
        start_s = time.perf_counter()
        with before_batches(s, lambda: _stall_here(s) if place.rank == whom else None):
            (said,) = answers(s, [fails(train(1))])
        seconds = time.perf_counter() - start_s
        return said, seconds, [e["step"] for e in s.train(2)["events"]]


def _stall_here(s: Session) -> None:
    while s.context.aborted is None:
        threading.Event().wait(0.02)


def test_a_rank_that_does_not_come_is_named_on_all_ranks(pool: Pool) -> None:
    """Under DDP: tests/rank/test_faults.py."""
    for said, seconds, steps in pool.run(_hangs, 2, {}, 1, reduction=None):
        assert said.startswith("RankAborted: rank 1 did not join all_gather "), said
        assert " of " in said.partition(" (group ")[0], "the unit is named"
        assert "rank 1 is here:" in said and "in _stall_here" in said
        assert seconds > LIMIT_S and steps == [2, 3], "no step is lost"


def _never_joined(place: Place) -> str:
    """Rank 1 does not come to a collective, and nobody looks for hangs."""
    said = ""
    if place.rank == 0:
        place.context.timeout_s = 1.0
        with pytest.raises(WireTimeout) as late:
            place.world.all_gather_single(torch.empty(4), torch.ones(2)).wait()
        said = str(late.value)
        place.store.set("given up", "1")
    place.store.wait(["given up"])
    place.context.abort("given up")
    return said


def test_a_collective_that_a_rank_does_not_join_ends_in_its_time(pool: Pool) -> None:
    said, _ = pool.run(_never_joined, 2)
    assert "all_gather" in said and said.endswith(" did not complete in 1 s: a rank did not join it")


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


def test_the_time_of_inner_work_is_not_the_outer_s_and_progress_renews_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
    longest = LongWork.TOKENISE.limit_s
    with log.during(LongWork.READ):
        for _ in range(3):  # work that makes progress is never too long
            now_s[0] += 0.9 * longest
            log.renew(LongWork.TOKENISE)
            assert log.changed.is_set() and log.read() == ("makes its data into tokens", 0.0)
        now_s[0] += 1.1 * longest
        assert log.read() == (LongWork.TOKENISE.text, pytest.approx(0.1 * longest))


def _beats(place: Place) -> list[dict[str, Any]]:
    """Rank 1 stalls in its second step until three of its beats have its stack. Whoever is told of a beat raises."""
    told: list[dict[str, Any]] = []

    def tell(beat: dict[str, Any]) -> None:
        told.append(beat)
        raise OSError("the kernel is gone")

    def stall_for_beats() -> None:
        before = len(told)
        while place.rank == 1 and sum(bool(b["stack"]) for b in told[before:] if b["working"]) < 3:
            threading.Event().wait(0.02)

    with running(place, spec(), steps=1, on_heartbeat=tell) as s, before_batches(s, stall_for_beats):
        s.train(1)
    return told


@pytest.mark.slow
def test_beats_tell_what_a_blocked_rank_waits_for_and_where_the_other_is(pool: Pool) -> None:
    """One that cannot be told ends nothing."""
    zero, one = ([Heartbeat.from_dict(b) for b in told] for told in pool.run(_beats, 2, reduction=None))
    for rank, beats in enumerate((zero, one)):
        assert [b.number for b in beats] == list(range(len(beats))) and {b.rank for b in beats} == {rank}
    waits = [b for b in zero if b.pending is not None and b.step == 1]
    blocked = [b for b in waits if b.pending == waits[0].pending][-1]  # then rank 1 comes, and another wait may be seen
    pending = blocked.pending
    assert pending is not None and blocked.working and blocked.pending_s > STILL_S and "in wait" in blocked.stack
    assert (pending.kind, pending.unit, pending.size) == ("all_gather", "root", 2) and blocked.peers == (0, 1)
    away = [b for b in one if b.working and "in stall_for_beats" in b.stack][-1]
    assert away.pending is None and away.counts[pending.group] == pending.ordinal, "one behind"
