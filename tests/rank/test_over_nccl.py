"""Steps over a simulated NCCL (tests/wire/simulated_nccl.py) that are given up: ranks that wait for their device are freed
in bounded time, and lose nothing. Kills and drills, over Gloo, are in tests/lab/test_recovery.py."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.backends.transfer import StateTransfer
from fsdp_lab.rank import Session
from fsdp_lab.wire import RankAborted
from tests.pool import Place, Pool, RankError
from tests.rank.test_hang import LIMIT_S, _stall_here
from tests.rank.test_not_finite import said_by
from tests.rank.test_session import (
    _follow,
    _interrupted,
    _stall,
    answers,
    apply,
    before_batches,
    call,
    fails,
    running,
    session,
    spec,
    train,
)
from tests.wire.simulated_nccl import simulated, simulated_deaf

WAITED_S = 12.0  # in which ranks, also on a busy machine, get to the wait in which they stay


def test_it_trains_what_is_trained_over_gloo(pool: Pool, steady: list[float]) -> None:
    for events, _ in pool.run(simulated, 2, _follow, [(spec().to_dict(), 4)], reduction=None):
        assert [e["mean_loss"] for e in events] == steady[:4]
        assert all(t["seconds"] > 0 for t in events[-1]["comm"].values()), "the device's times"


def _on_rank_1(place: Place, s: Session, do: Callable[[], object]) -> AbstractContextManager[None]:
    return before_batches(s, lambda: do() if place.rank == 1 else None)


def _given_up(place: Place) -> Any:
    """What is said of links that cannot be emulated, and of steps that SIGINT on rank 0, an error and a hang end; and all
    losses."""
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
        pool.run(simulated_deaf, 2, _interrupted, {}, "0", reduction=None, timeout_s=WAITED_S)
