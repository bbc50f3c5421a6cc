"""Steps over a simulated NCCL (tests/wire/simulated_nccl.py) that are given up: ranks that wait for their device are freed
in bounded time, and lose nothing. Kills and drills, over Gloo, are in tests/lab/test_recovery.py."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.backends.transfer import StateTransfer
from fsdp_lab.rank.trainer import checksum
from fsdp_lab.wire import RankAborted
from tests.covering import tiered
from tests.pool import Place, Pool, RankError
from tests.rank.test_hang import _hangs
from tests.rank.test_not_finite import said_by
from tests.rank.test_session import (
    _fails,
    _follow,
    _interrupted,
    _stall,
    answers,
    apply,
    before_batches,
    call,
    fails,
    follow,
    session,
    spec,
    train,
)
from tests.wire.simulated_nccl import simulated, simulated_deaf

KILL_LIMIT_S = 4.0  # ranks build their models meanwhile
WAITED_S = 12.0  # in which ranks, also on a busy machine, get to the wait in which they stay
NO_SHARD = {"sharding": "no_shard"}  # what one rank holds is the whole model


@pytest.fixture(scope="module")
def undisturbed(pool: Pool) -> list[float]:
    """The losses of six steps over Gloo."""
    (steady, _), _ = follow(pool, [(spec(), 6)])
    return [e.mean_loss for e in steady]


def test_it_trains_what_is_trained_over_gloo(pool: Pool, undisturbed: list[float]) -> None:
    for events, _ in pool.run(simulated, 2, _follow, [(spec().to_dict(), 4)], reduction=None):
        assert [e["mean_loss"] for e in events] == undisturbed[:4]
        assert all(t["seconds"] > 0 for t in events[-1]["comm"].values()), "the device's times"


def test_sigint_frees_ranks_that_wait_for_their_device(pool: Pool, undisturbed: list[float]) -> None:
    for stopped, step, losses, seconds in pool.run(simulated, 2, _interrupted, {}, "0", reduction=None):
        assert stopped and step == 2 and seconds < 10 and losses == undisturbed[:5]


@pytest.mark.slow
def test_a_rank_that_raises_frees_the_others(pool: Pool) -> None:
    (zero, steps), (one, _) = pool.run(simulated, 2, _fails, reduction=None)
    assert zero == "RankAborted: rank 1 failed: ZeroDivisionError: division by zero"
    assert one == "ZeroDivisionError: division by zero" and steps == [2, 3]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(pool: Pool) -> None:
    for said, _, steps in pool.run(simulated, 2, _hangs, {}, 1, reduction=None):
        assert said.startswith("RankAborted: rank 1 did not join all_gather ") and "in _stall_here" in said
        assert steps == [2, 3]


def _killed(place: Place, changes: dict[str, Any], folder: str, victim: int) -> Any:
    """The victim is killed in its third step. Others write what they hold into a checkpoint, and what they saw to a file."""
    s = session(place, reduction="rank_ordered", hang_s=KILL_LIMIT_S)
    s.apply("run", spec(place.world_size, **changes).to_dict())
    s.train(2)
    before = checksum(s._lifecycle.require().backend)
    s.arm({"kind": "kill", "ranks": [victim], "at_step": 2, "phase": "backward"})
    start_s = time.perf_counter()
    said = said_by(s)
    seconds = time.perf_counter() - start_s
    after, root = checksum(s._lifecycle.require().backend), Path(folder)
    writers = [rank for rank in range(place.world_size) if rank != victim]
    part = s.rescue(folder, writers)
    told = {"said": said, "seconds": seconds, "intact": before == after, "part": part}
    (root.parent / f"told{place.rank}").write_text(json.dumps(told))


def _restored(place: Place, given: dict[str, Any], path: str) -> list[float]:
    s = session(place, reduction="rank_ordered")
    s.restore("run", given, path)
    losses = [e["mean_loss"] for e in s.train(3)["events"]]
    s.close()
    return losses


def _nccl_fails(place: Place, timeout_s: float, how: str) -> Any:
    """In its third step a collective of rank 1 fails in NCCL, or rank 1 comes too late to one. No rank looks for hangs."""
    s = session(place, timeout_s=timeout_s, reduction="rank_ordered", on_heartbeat=lambda beat: None)
    s.apply("run", spec().to_dict())
    losses = [e["mean_loss"] for e in s.train(2)["events"]]
    if place.rank == 1 and how == "fails":
        s.context.nccl.fail_after(3)  # type: ignore[union-attr]
    with before_batches(s, lambda: _stall(s) if place.rank == 1 and how == "late" else None):
        said = said_by(s)
    losses += [e["mean_loss"] for e in s.train(3)["events"]]
    s.close()
    return said, losses


def _slowed(place: Place) -> list[Any]:
    with closing(session(place)) as s:
        slow = fails(call("arm", {"kind": "slow", "ranks": [1], "factor": 50}))
        return answers(s, [apply(spec()), slow, train(1)])


@pytest.mark.slow
def test_a_slow_link_is_refused_and_training_goes_on(pool: Pool, undisturbed: list[float]) -> None:
    for _, said, trained in pool.run(simulated, 2, _slowed, reduction=None):
        assert "refused over NCCL" in said and trained["events"][0]["mean_loss"] == undisturbed[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "timeout_s", "words"),
    tiered(
        [
            ("fails", 20.0, "rank 1: collective .* failed in NCCL"),
            ("late", 3.0, "rank 0: collective .* a rank did not join it"),
        ],
        lambda how, timeout_s, words: how == "fails",
    ),
)
def test_what_nccl_s_watchdog_finds_late_ends_the_step(
    pool: Pool, undisturbed: list[float], how: str, timeout_s: float, words: str
) -> None:
    for said, losses in pool.run(simulated, 2, _nccl_fails, timeout_s, how, reduction=None):
        assert re.match(f"RankAborted: {words}", said), said
        assert losses == undisturbed[:5]


def _switched(place: Place) -> list[float]:
    """A transfer of a switch never ends, and is aborted: what it has not moved must still be in the old model."""
    s = session(place, reduction="rank_ordered")
    s.apply("run", spec().to_dict())
    losses = [e["mean_loss"] for e in s.train(2)["events"]]
    receive = StateTransfer._receive

    def receives(transfer: StateTransfer, names: Sequence[str]) -> None:
        receive(transfer, names)
        if place.rank == 0:
            s.world.all_gather_single(torch.empty(16), torch.ones(8)).wait()
            threading.Timer(0.5, s._protocol.monitor.announce, ("stopped",)).start()

    with mock.patch.object(StateTransfer, "_receive", receives), pytest.raises(RankAborted):
        s.apply("run", spec(sharding="shard_grad_op").to_dict())
    losses += [e["mean_loss"] for e in s.train(3)["events"]]
    s.close()
    return losses


@pytest.mark.slow
def test_a_switch_that_is_aborted_keeps_the_old_model(pool: Pool, undisturbed: list[float]) -> None:
    """The host has issued all transfers long before the device has made them."""
    assert pool.run(simulated, 2, _switched, reduction=None) == [undisturbed[:5]] * 2


@pytest.mark.slow
def test_without_nccl_s_abort_the_ranks_would_stay(pool: Pool) -> None:
    """So the tests above see that it is called, and that the simulation blocks as a GPU does."""
    with pytest.raises(RankError, match=r"did not answer(.|\n)*simulated_nccl.py.* in wait"):
        pool.run(simulated_deaf, 2, _interrupted, {}, "0", reduction=None, timeout_s=WAITED_S)
