"""The vote of a device, which its host reads when the next step begins: the same training, whatever ends it in between.
Over a simulated NCCL (tests/wire/simulated_nccl.py), whose votes are the device's here."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.rank import Session
from fsdp_lab.rank.rendezvous import own_connection
from fsdp_lab.rank.trainer import Trainer
from tests.pool import Place, Pool, RankError
from tests.rank.test_not_finite import held, said_by
from tests.rank.test_session import DDP, running, spec, trainer_of
from tests.wire import simulated_nccl
from tests.wire.simulated_nccl import SimulatedGroup, SimulatedNccl, Stream, simulated

FUSED = {"optimizer_args": {"fused": True}}
BEGUN = 3  # steps before: the first ones read at once
AT = BEGUN + 1  # the step that something happens to
Held = list[torch.Tensor]


class Streams:
    """Those of a simulated NCCL, as `base/streams.py` has them."""

    def __init__(self, nccl: SimulatedNccl) -> None:
        self._nccl = nccl
        self.holds, self.mark, self.synchronize = nccl.carries, nccl.record, nccl.synchronize
        self.future = torch.futures.Future

    def current(self) -> Stream:
        return self._nccl.current

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before, self._nccl.current = self._nccl.current, stream
        yield
        self._nccl.current = before

    def used_on(self, tensor: torch.Tensor, stream: Stream) -> None:
        pass

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)


@contextmanager
def voting(s: Session) -> Iterator[Trainer]:
    """Within it votes are the device's. The first session of all, or after it, is as ever."""
    trainer, nccl = trainer_of(s), s.context.nccl
    assert isinstance(nccl, SimulatedNccl)
    with mock.patch.object(simulated_nccl, "ON_DEVICE", (*simulated_nccl.ON_DEVICE, torch.float64)):
        s.context.streams = trainer.meter._streams = Streams(nccl)  # type: ignore[assignment]
        try:
            yield trainer
        finally:
            s.context.streams = trainer.meter._streams = None


def told(events: list[dict[str, Any]]) -> list[Any]:
    return [(e["step"], e["samples"], e["loss"], e["mean_loss"], e["grad_norm"], e["skipped"]) for e in events]


def _steady(place: Place, on_device: bool, changes: dict[str, Any]) -> tuple[list[Any], list[Held], list[int]]:
    """Events, shards and optimizer state after each step, and the steps whose votes were read late."""
    late: list[int] = []
    update = Trainer._update_guarded

    def noted(trainer: Trainer, vote: torch.Tensor) -> None:
        late.append(trainer.progress.step)
        update(trainer, vote)

    with running(place, spec(**{**FUSED, **changes}), steps=BEGUN, reduction="rank_ordered") as s:
        states = [held(s)]
        if not on_device:
            events = []
            for _ in range(5):
                events += s.train(1)["events"]
                states.append(held(s))
        else:
            with voting(s), mock.patch.object(Trainer, "_update_guarded", noted):
                events = s.train(5, checks=[AT])["events"]
                states.append(held(s))
    return told(events), states, late


@pytest.fixture(scope="module")
def undisturbed(pool: Pool) -> list[tuple[list[Any], list[Held], list[int]]]:
    return pool.run(simulated, 2, _steady, False, {}, reduction=None)


def equal(one: Held, other: Held) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_it_is_the_same_training(pool: Pool, undisturbed: list[Any]) -> None:
    """A step whose parameters are asked for, and the last one, are read at once."""
    for rank, (events, (_, state), late) in enumerate(pool.run(simulated, 2, _steady, True, {}, reduction=None)):
        assert late == [BEGUN, AT + 1, AT + 2]
        assert events == undisturbed[rank][0] and equal(state, undisturbed[rank][1][-1])


SGD = {"optimizer": "sgd", "optimizer_args": {"fused": True, "momentum": 0.9}}
OTHERS = {"fsdp2": {"backend": "fsdp2"}, "fsdp1": {"backend": "fsdp1"}, "ddp": DDP, "sgd": SGD}


@pytest.mark.slow
@pytest.mark.parametrize("of", OTHERS)
def test_so_it_is_under_other_backends(pool: Pool, of: str) -> None:
    at_once, late = (pool.run(simulated, 2, _steady, on, OTHERS[of], reduction=None) for on in (False, True))
    for (events, states, _), (others, state, numbers) in zip(at_once, late, strict=True):
        assert numbers == [BEGUN, AT + 1, AT + 2]
        assert others == events and equal(state[-1], states[-1])


def _poisoned(place: Place, late: list[int]) -> Any:
    """A loss of rank 1 is nan; ranks of `late` read it when the next step begins."""
    begun: list[int] = []
    with running(place, spec(**FUSED), steps=BEGUN, reduction="rank_ordered") as s:
        with voting(s) as trainer:
            inner = trainer.backend.loss

            def loss(batch: Any) -> torch.Tensor:
                begun.append(trainer.progress.step)
                is_bad = place.rank == 1 and trainer.progress.step == AT
                return inner(batch) * (torch.nan if is_bad else 1.0)

            trainer.backend.loss = loss  # type: ignore[method-assign]
            if place.rank not in late:
                s.arm({"kind": "nan", "ranks": [place.rank], "at_step": 100})  # it may be needed at once then
            said, state = said_by(s, 5), held(s)
        return said, state, begun, told(s.train(1)["events"])


@pytest.mark.parametrize("late", [[0, 1], [0]], ids=["all late", "one late"])
def test_a_step_that_is_not_finite_is_applied_on_no_rank(pool: Pool, undisturbed: list[Any], late: list[int]) -> None:
    found = pool.run(simulated, 2, _poisoned, late, reduction=None)
    assert [said.partition(";")[0] for said, *_ in found] == [
        f"RankAborted: rank 1 failed: NotFinite: its loss in step {AT} is not finite",
        f"NotFinite: its loss in step {AT} is nan",
    ]
    assert "was applied on no rank" in found[1][0]
    for (_, state, begun, after), (events, states, _) in zip(found, undisturbed, strict=True):
        assert begun == [BEGUN, AT] and equal(state, states[AT - BEGUN])
        assert after == events[AT - BEGUN : AT - BEGUN + 1]


def _interrupted(place: Place, where: str) -> Any:
    """SIGINT comes to rank 1 when both ranks have cast their votes, or when rank 0 alone has the result; or its device meets
    the abort before its vote, which its host has issued."""
    store, cast, land = own_connection(place.store), Trainer._loss_and_norm, SimulatedGroup._land
    update = Trainer._update_guarded

    def is_at(there: str) -> bool:
        return (where, trainer_of(s).progress.step) == (there, AT)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        s.context._abort_event.wait(20)

    def casting(trainer: Trainer, total: torch.Tensor) -> torch.Tensor:
        if is_at("before") and place.rank == 1:
            assert s.context._alive is not None
            s.context._alive.fill_(torch.nan)
        return cast(trainer, total)

    def issued(trainer: Trainer, vote: torch.Tensor) -> None:
        update(trainer, vote)
        if (is_at("before") or is_at("after")) and place.rank == 1:
            interrupt()

    def landing(group: SimulatedGroup, outputs: Any, copies: Any) -> None:
        is_vote = is_at("in a vote") and simulated_nccl._tensors(outputs)[0].dtype == torch.float64
        if is_vote and place.rank == 1:
            store.wait(["landed"], timedelta(seconds=20))
            interrupt()
            group._aborted.wait(20)
        land(group, outputs, copies)
        if is_vote and place.rank == 0:
            store.set("landed", "")

    with running(place, spec(**FUSED), steps=BEGUN, reduction="rank_ordered") as s:
        patched = {"_loss_and_norm": casting, "_update_guarded": issued}
        with (
            voting(s),
            mock.patch.multiple(Trainer, **patched),
            mock.patch.object(SimulatedGroup, "_land", landing),
        ):
            result, state = s.train(5), held(s)
        return result["stopped"], result["step"], told(result["events"]), state, told(s.train(1)["events"])


@pytest.mark.parametrize(("where", "ends"), [("before", AT), ("in a vote", AT + 1), ("after", AT + 1)])
def test_ranks_that_stop_in_between_stop_after_the_same_step(
    pool: Pool, undisturbed: list[Any], where: str, ends: int
) -> None:
    """A rank whose device has not applied the step does it with what another one has; the training goes on."""
    found = pool.run(simulated, 2, _interrupted, where, reduction=None)
    for (stopped, step, events, state, after), (all_events, states, _) in zip(found, undisturbed, strict=True):
        made = ends - BEGUN
        assert (stopped, step) == (True, ends)
        assert equal(state, states[made]) and after == all_events[made : made + 1]
        assert events in (all_events[:made], all_events[: AT - BEGUN])
    assert found[0][2] == undisturbed[0][0][: ends - BEGUN], "all that rank 0's device has applied"


def _killed(place: Place, file: str, cast_first: bool) -> None:
    """Rank 1 ends before or after it has cast its vote. Rank 0 writes what it has then."""
    cast, update = Trainer._cast, Trainer._update_guarded

    def ends(call: Callable[..., None], first: bool) -> Callable[..., None]:
        def ending(trainer: Trainer, vote: torch.Tensor) -> None:
            if first:
                call(trainer, vote)
            if place.rank == 1 and trainer.progress.step == AT and first == cast_first:
                float(vote.clone().sum())  # its device has come so far
                os._exit(0)
            if not first:
                call(trainer, vote)

        return ending

    with (
        running(place, spec(**FUSED), steps=BEGUN, reduction="rank_ordered", hang_s=1.5) as s,
        voting(s) as trainer,
        mock.patch.object(Trainer, "_cast", ends(cast, False)),
        mock.patch.object(Trainer, "_update_guarded", ends(update, True)),
    ):
        said = said_by(s, 5)
        Path(file).write_bytes(pickle.dumps((said, trainer.progress.step, held(s))))


@pytest.mark.parametrize("cast", [False, True])
def test_a_rank_that_is_killed_in_between_leaves_a_whole_step(
    pool: Pool, undisturbed: list[Any], tmp_path: Path, cast: bool
) -> None:
    with pytest.raises(RankError, match="process ended"):
        pool.run(simulated, 2, _killed, str(tmp_path / "found"), cast, reduction=None)
    said, step, state = pickle.loads((tmp_path / "found").read_bytes())
    assert said.startswith("RankAborted: rank 1 did not ") and step == AT + cast
    assert equal(state, undisturbed[0][1][step - BEGUN])
