"""Steps over a simulated NCCL (tests/wire/simulated_nccl.py) that are given up: ranks that wait for their device are freed
in bounded time, and lose nothing."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.backends.transfer import StateTransfer
from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.rank import Session
from fsdp_lab.rank.trainer import checksum
from fsdp_lab.spec.checkpoint_format import begin, finish
from fsdp_lab.wire import RankAborted
from tests.covering import tiered
from tests.pool import Place, Pool, RankError
from tests.rank.test_hang import LIMIT_S, _hangs
from tests.rank.test_not_finite import said_by
from tests.rank.test_session import BACKENDS, DDP, _fails, _follow, _interrupted, follow, session, spec
from tests.wire.simulated_nccl import simulated, simulated_deaf

KILL_LIMIT_S = 4.0  # three ranks build their models meanwhile
WAITED_S = 12.0  # in which ranks, also on a busy machine, get to the wait in which they stay
NO_SHARD = {"sharding": "no_shard"}  # what one rank holds is the whole model


@pytest.fixture(scope="module")
def undisturbed(pool: Pool) -> Callable[..., list[float]]:
    """The losses of six steps over Gloo."""
    found: dict[str, list[float]] = {}

    def losses(world_size: int = 2, **changes: Any) -> list[float]:
        key = json.dumps([world_size, changes], sort_keys=True)
        if key not in found:
            (steady, *_), _ = follow(pool, [(spec(world_size, **changes), 6)])
            found[key] = [e.mean_loss for e in steady]
        return found[key]

    return losses


@pytest.mark.parametrize("name", tiered(list(BACKENDS), lambda name: name == "lab"))
def test_it_trains_what_is_trained_over_gloo(pool: Pool, undisturbed: Callable[..., list[float]], name: str) -> None:
    plan = [(spec(**BACKENDS[name]).to_dict(), 4)]
    for events, _ in pool.run(simulated, 2, _follow, plan, reduction=None):
        assert [e["mean_loss"] for e in events] == undisturbed(**BACKENDS[name])[:4]
        assert all(t["seconds"] > 0 for t in events[-1]["comm"].values()), "the device's times"


@pytest.mark.parametrize(
    ("name", "whom"),
    tiered([("lab", "0"), ("ddp", "1"), ("fsdp2", "all"), ("fsdp1", "0")], lambda name, whom: name == "lab"),
)
def test_sigint_frees_ranks_that_wait_for_their_device(
    pool: Pool, undisturbed: Callable[..., list[float]], name: str, whom: str
) -> None:
    for stopped, step, losses, seconds in pool.run(simulated, 2, _interrupted, BACKENDS[name], whom, reduction=None):
        assert stopped and step == 2 and seconds < 5
        assert losses == undisturbed(**BACKENDS[name])[:5]


def test_a_rank_that_raises_frees_the_others(pool: Pool) -> None:
    (zero, steps), (one, _) = pool.run(simulated, 2, _fails, reduction=None)
    assert zero == "RankAborted: rank 1 failed: ZeroDivisionError: division by zero"
    assert one == "ZeroDivisionError: division by zero" and steps == [2, 3]


@pytest.mark.parametrize(
    ("changes", "what"), tiered([({}, "all_gather"), (DDP, "all_reduce")], lambda changes, what: not changes)
)
def test_a_rank_that_does_not_come_is_named(pool: Pool, changes: dict[str, Any], what: str) -> None:
    for said, seconds, steps in pool.run(simulated, 2, _hangs, changes, 1, reduction=None):
        assert said.startswith(f"RankAborted: rank 1 did not join {what} ") and "in _stall_here" in said
        assert LIMIT_S < seconds < LIMIT_S + 3.5 and steps == [2, 3]


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


def kill(
    pool: Pool, run: Callable[..., Any], world_size: int, changes: dict[str, Any], folder: str, victim: int
) -> None:
    with pytest.raises(RankError, match="process ended while it worked"):
        pool.run(run, world_size, _killed, changes, folder, victim, reduction=None, timeout_s=40)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "victim"), [("ddp", 1), ("lab", 0)])
def test_survivors_of_a_kill_are_freed_and_the_run_goes_on_from_what_they_hold(
    pool: Pool, undisturbed: Callable[..., list[float]], tmp_path: Path, name: str, victim: int
) -> None:
    """Rank 0 is no different: its store outlives it."""
    changes = {**BACKENDS[name], **NO_SHARD}
    partial = begin(tmp_path, 2)
    kill(pool, simulated, 3, changes, str(partial), victim)
    told = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in range(3) if rank != victim]
    for one in told:
        assert one["said"].startswith("RankAborted: ") and f"rank {victim}" in one["said"], one
        assert one["intact"] and one["seconds"] < KILL_LIMIT_S + 6
    saved = finish(partial, [one["part"] for one in told], kind="rescue")
    restored = pool.run(simulated, 3, _restored, spec(3, **changes).to_dict(), str(saved.path), reduction=None)
    assert restored == [undisturbed(3, **changes)[2:5]] * 3


def _nccl_fails(place: Place, timeout_s: float, how: str) -> Any:
    """In its third step a collective of rank 1 fails in NCCL, or rank 1 comes too late to one. No rank looks for hangs."""
    s = Session(rank=place.rank, world_size=place.world_size, device="cpu", store=place.store, threads=1,
                timeout_s=timeout_s, reduction="rank_ordered", on_heartbeat=lambda beat: None)  # fmt: skip
    s.apply("run", spec().to_dict())
    losses = [e["mean_loss"] for e in s.train(2)["events"]]
    trainer, device = s._lifecycle.require(), s.context.nccl
    inner = trainer.batches.batch
    if place.rank == 1 and how == "fails":
        device.fail_after(3)  # type: ignore[union-attr]
    elif place.rank == 1:
        trainer.batches.batch = lambda *a: (_until_aborted(s), inner(*a))[1]  # type: ignore[method-assign]
    start_s = time.perf_counter()
    said = said_by(s)
    seconds = time.perf_counter() - start_s
    trainer.batches.batch = inner  # type: ignore[method-assign]
    losses += [e["mean_loss"] for e in s.train(3)["events"]]
    s.close()
    return said, seconds, losses


def _until_aborted(s: Session) -> None:
    while s.context.aborted is None:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("how", "timeout_s", "words"),
    [
        ("fails", 20.0, "rank 1: collective .* failed in NCCL"),
        pytest.param("late", 3.0, "rank 0: collective .* a rank did not join it", marks=pytest.mark.slow),
    ],
)
def test_what_nccl_s_watchdog_finds_late_ends_the_step(
    pool: Pool, undisturbed: Callable[..., list[float]], how: str, timeout_s: float, words: str
) -> None:
    for said, seconds, losses in pool.run(simulated, 2, _nccl_fails, timeout_s, how, reduction=None):
        assert re.match(f"RankAborted: {words}", said), said
        assert seconds < 6 and losses == undisturbed()[:5]


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
def test_a_switch_that_is_aborted_keeps_the_old_model(pool: Pool, undisturbed: Callable[..., list[float]]) -> None:
    """The host has issued all transfers long before the device has made them."""
    assert pool.run(simulated, 2, _switched, reduction=None) == [undisturbed()[:5]] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "args"),
    [
        (_interrupted, ({}, "0")),
        (_fails, (2.0,)),
        (_hangs, ({}, 1)),
        (_nccl_fails, (20.0, "fails")),
    ],
    ids=["stop", "raise", "hang", "nccl"],
)
def test_without_nccl_s_abort_the_ranks_would_stay(
    pool: Pool, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """So the tests above see that it is called, and that the simulation blocks as a GPU does."""
    with pytest.raises(RankError, match=r"did not answer(.|\n)*simulated_nccl.py.* in wait"):
        pool.run(simulated_deaf, 2, function, *args, reduction=None, timeout_s=WAITED_S)


@pytest.mark.slow
def test_without_nccl_s_abort_no_survivor_of_a_kill_would_be_freed(pool: Pool, tmp_path: Path) -> None:
    partial = begin(tmp_path, 2)
    with pytest.raises(RankError, match="did not answer"):
        pool.run(
            simulated_deaf, 3, _killed, NO_SHARD, str(partial), 1, reduction=None, timeout_s=KILL_LIMIT_S + WAITED_S
        )
    assert not list(tmp_path.glob("told*"))


def _slowed(place: Place) -> list[Any]:
    s = session(place)
    s.apply("run", spec().to_dict())
    said: list[str] = []
    with pytest.raises(SpecError) as e:
        s.apply("run", spec(link="1 MB/s").to_dict())
    said.append(str(e.value))
    with pytest.raises(ArgumentError) as refused:
        s.arm({"kind": "slow", "ranks": [1], "factor": 2})
    said.append(str(refused.value))
    steps = [event["step"] for event in s.train(1)["events"]]
    s.close()
    return [said, steps]


def test_an_emulated_link_is_refused(pool: Pool) -> None:
    for (link, slow), steps in pool.run(simulated, 2, _slowed, reduction=None):
        assert link.startswith("link: ") and "NCCL" in link and "leave it out" in link
        assert slow.startswith("fault.kind: ") and "NCCL" in slow and steps == [0]
