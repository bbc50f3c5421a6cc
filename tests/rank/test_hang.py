"""Ranks that hang, without a kernel: who is missing is said on all ranks, they are freed and go on. And what beats tell.

Over a simulated NCCL (tests/wire/simulated_nccl.py) ranks that wait for their device are freed in bounded time as well.
Kills and drills, over Gloo, are in tests/lab/test_recovery.py."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.callback import CallbackTrigger, callback_handler

from fsdp_lab.backends.transfer import StateTransfer
from fsdp_lab.base.hang import Heartbeat, LongWork
from fsdp_lab.rank import Session, lifecycle
from fsdp_lab.rank.heartbeat import STILL_S, LongWorkLog
from fsdp_lab.wire import RankAborted
from tests.pool import Place, Pool, RankError
from tests.rank import test_session as sessions
from tests.rank.test_not_finite import said_by
from tests.rank.test_session import _stall, answers, apply, before_batches, call, fails, running, session, spec, train
from tests.wire.simulated_nccl import simulated

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


WIRE_S = 2 * LIMIT_S  # the timeout of the wire
LONG_S = 1.3 * WIRE_S


def _works_long(place: Place) -> tuple[list[int], set[str]]:
    """Rank 1 draws values, and compiles in its second step, for longer than the limit. Steps, and what beats named."""
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


# -- over NCCL -------------------------------------------------------------------------------------------------------
WAITED_S = 12.0  # in which ranks, also on a busy machine, get to the wait in which they stay


def test_it_trains_what_is_trained_over_gloo(pool: Pool, steady: list[float]) -> None:
    for events, _ in pool.run(simulated, 2, sessions._follow, [(spec().to_dict(), 4)], reduction=None):
        assert [e["mean_loss"] for e in events] == steady[:4]
        assert all(t["seconds"] > 0 for t in events[-1]["comm"].values()), "the device's times"


def _on_rank_1(place: Place, s: Session, do: Callable[[], object]) -> AbstractContextManager[None]:
    return before_batches(s, lambda: do() if place.rank == 1 else None)


def _given_up(place: Place) -> Any:
    """What is said of links that cannot be emulated, and of steps that SIGINT, an error and a hang end; and all losses."""
    said: list[Any] = []
    with closing(session(place, reduction="rank_ordered", hang_s=LIMIT_S)) as s:
        slow = call("arm", {"kind": "slow", "ranks": [1], "factor": 50})
        said += answers(s, [apply(spec()), fails(apply(spec(link="1 MB/s"))), fails(slow)])[1:]
        losses = [e["mean_loss"] for e in s.train(2)["events"]]
        if place.rank == 0:
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
        with _on_rank_1(place, s, lambda: _stall(s)):
            said.append(s.train(50)["stopped"])
        for disturb in (lambda: 1 / 0, lambda: _stall_here(s)):
            losses += [e["mean_loss"] for e in s.train(1)["events"]]
            with _on_rank_1(place, s, disturb):
                said += answers(s, [fails(train(1))])
        losses += [e["mean_loss"] for e in s.train(2)["events"]]
    return said, losses


@pytest.mark.slow
def test_ranks_that_wait_for_their_device_are_freed_and_told(pool: Pool, steady: list[float]) -> None:
    for rank, (said, losses) in enumerate(pool.run(simulated, 2, _given_up, reduction=None)):
        link, slow, stopped, raised, hung = said
        assert link.startswith("SpecError: link: these collectives go over NCCL") and "refused over NCCL" in slow
        assert stopped is True and losses == steady[:6]
        error = "ZeroDivisionError: division by zero"
        assert raised == (error if rank else f"RankAborted: rank 1 failed: {error}")
        assert hung.startswith("RankAborted: rank 1 did not join all_gather ") and "in _stall_here" in hung


def _found_by_nccl(place: Place) -> Any:
    """A transfer of a switch never ends, and is aborted: what it has not moved must still be in the old model. Then a
    collective of rank 1 fails in NCCL, and rank 1 comes too late to one. No rank looks for hangs."""
    with running(place, spec(), timeout_s=5.0, reduction="rank_ordered", on_heartbeat=lambda beat: None) as s:
        losses = [e["mean_loss"] for e in s.train(2)["events"]]
        receive = StateTransfer._receive

        def receives(transfer: StateTransfer, names: Sequence[str]) -> None:
            receive(transfer, names)
            if place.rank == 0:
                s.world.all_gather_single(torch.empty(16), torch.ones(8)).wait()
                threading.Timer(0.5, s._protocol.monitor.announce, ("stopped",)).start()

        with mock.patch.object(StateTransfer, "_receive", receives), pytest.raises(RankAborted):
            s.apply("run", spec(sharding="shard_grad_op").to_dict())
        losses += [e["mean_loss"] for e in s.train(1)["events"]]
        if place.rank == 1:
            s.context.nccl.fail_after(3)  # type: ignore[union-attr]
        said = [said_by(s)]
        losses += [e["mean_loss"] for e in s.train(1)["events"]]
        with _on_rank_1(place, s, lambda: _stall(s)):
            said.append(said_by(s))
        losses += [e["mean_loss"] for e in s.train(1)["events"]]
    return said, losses


@pytest.mark.slow
def test_what_nccl_s_watchdog_finds_late_ends_the_step_and_an_aborted_switch_keeps_the_old_model(
    pool: Pool, steady: list[float]
) -> None:
    """The host has issued all transfers long before the device has made them."""
    for (failed, late), losses in pool.run(simulated, 2, _found_by_nccl, reduction=None):
        assert re.match("RankAborted: rank 1: collective .* failed in NCCL", failed), failed
        assert re.match("RankAborted: rank 0: collective .* a rank did not join it", late), late
        assert losses == steady[:5]


@pytest.mark.nightly
def test_without_nccl_s_abort_the_ranks_would_stay(pool: Pool) -> None:
    """So the tests above see that it is called, and that the simulation blocks as a GPU does."""
    with pytest.raises(RankError, match=r"did not answer(.|\n)*simulated_nccl.py.* in wait"):
        pool.run(partial(simulated, deaf=True), 2, sessions._interrupted, {}, "0", reduction=None, timeout_s=WAITED_S)
