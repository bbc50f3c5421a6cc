"""The vote of a device, whose result the host reads when the next step begins: the same training, whatever ends it in
between, over a simulated NCCL (tests/wire/simulated_nccl.py). And for what the host waits, on a simulated device."""

import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from fsdp_lab.rank import Session, measure, rendezvous
from fsdp_lab.rank.rendezvous import own_connection
from fsdp_lab.rank.trainer import Trainer
from tests.covering import tiered
from tests.engine.simulated import Event, SimulatedDevice, tensors_in
from tests.pool import Place, Pool, RankError
from tests.rank.test_not_finite import WAY_OUT, held, said_by
from tests.rank.test_session import DDP, running, spec, trainer_of
from tests.wire import simulated_nccl
from tests.wire.simulated_nccl import SimulatedGroup, simulated
from tests.wire.simulated_wire import COLLECTIVES, NcclOnDevice

FUSED = {"optimizer_args": {"fused": True}}
SGD = {"optimizer": "sgd", "optimizer_args": {"fused": True, "momentum": 0.9}}
BEGUN = 3  # steps before, whose votes are read at once
AT = BEGUN + 1  # the step that something happens to
CAST, UPDATE, LAND = Trainer._loss_and_norm, Trainer._update_guarded, SimulatedGroup._land
TOLIST, ELAPSED = torch.Tensor.tolist, Event.elapsed_time
Told = list[tuple[Any, ...]]


def told(events: list[dict[str, Any]]) -> Told:
    return [tuple(e[f] for f in ("step", "samples", "loss", "mean_loss", "grad_norm", "skipped")) for e in events]


@contextmanager
def begun(place: Place, changes: Any = FUSED, **options: Any) -> Iterator[Session]:
    with running(place, spec(place.world_size, **changes), steps=BEGUN, reduction="rank_ordered", **options) as s:
        yield s


@contextmanager
def voting(s: Session) -> Iterator[Trainer]:
    """Within it votes are the simulated device's too, and to read one waits for it."""
    trainer, nccl = trainer_of(s), cast(Any, s.context.nccl)
    streams: Any = SimpleNamespace(
        current=lambda: nccl.current, entered=lambda stream: mock.patch.object(nccl, "current", stream),
        used_on=lambda *_: None, host_memory=lambda n, dtype: torch.empty(n, dtype=dtype), holds=nccl.carries,
        mark=nccl.record, synchronize=nccl.synchronize, future=torch.futures.Future,
    )  # fmt: skip
    on_device = (*simulated_nccl.ON_DEVICE, torch.float64)
    with (mock.patch.object(simulated_nccl, "ON_DEVICE", on_device),
          mock.patch.object(torch.Tensor, "tolist", lambda t: TOLIST(t.clone()))):  # fmt: skip
        s.context.streams = trainer.meter._streams = streams
        s.context.alive = torch.ones(1, dtype=torch.float64)
        try:
            yield trainer
        finally:
            s.context.streams = None


def _undisturbed(place: Place) -> tuple[Told, list[list[torch.Tensor]]]:
    """Events, and shards and optimizer state before each step and after the last. Every vote is the host's."""
    states, events = [], list[dict[str, Any]]()
    with begun(place) as s:
        for _ in range(5):
            states.append(held(s))
            events += s.train(1)["events"]
        return told(events), [*states, held(s)]


@pytest.fixture(scope="module")
def undisturbed(pool: Pool) -> list[tuple[Told, list[list[torch.Tensor]]]]:
    return pool.run(simulated, 2, _undisturbed, reduction=None)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _trained(place: Place, changes: dict[str, Any], late: bool) -> Any:
    """And which votes were read late. One step is checked, and another one is the last."""
    numbers: list[int] = []

    def update(trainer: Trainer, vote: torch.Tensor) -> None:
        numbers.append(trainer.progress.step)
        UPDATE(trainer, vote)

    with (begun(place, changes) as s, voting(s), mock.patch.object(Trainer, "_update_guarded", update),
          mock.patch.object(Trainer, "_reads_late", Trainer._reads_late if late else lambda trainer: False)):  # fmt: skip
        return told(s.train(5, checks=[AT])["events"]), held(s), numbers


CASES = {"lab": FUSED, "sgd": SGD, "fsdp1": FUSED | {"backend": "fsdp1"}, "fsdp2": FUSED | {"backend": "fsdp2"},
         "ddp": FUSED | DDP}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_training(pool: Pool, undisturbed: list[Any], case: str) -> None:
    at_once, late = (pool.run(simulated, 2, _trained, CASES[case], late, reduction=None) for late in (False, True))
    for one, other, (events, states) in zip(at_once, late, undisturbed, strict=True):
        assert other[2] == [BEGUN, AT + 1, AT + 2] and other[0] == one[0] and equal(other[1], one[1])
        assert case != "lab" or (one[0] == events and equal(one[1], states[-1])), "as the host's votes"


def _disturbed(place: Place, what: str, file: str = "") -> Any:
    """Something happens on rank 1. What training says, the step and state in which it ends, events, and the next step's."""
    store, events = own_connection(place.store), list[dict[str, Any]]()

    def happens(*any_of: str) -> bool:
        return what in any_of and trainer.progress.step == AT

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert s.context._abort_event.wait(20) and s.context.alive.isnan()

    def loss_and_norm(trainer: Trainer, total: torch.Tensor) -> torch.Tensor:
        if place.rank == 1 and happens("killed, vote not cast"):
            os._exit(0)
        if place.rank == 1 and happens("stopped, before its device votes"):
            s.context.alive.fill_(torch.nan)
        return CAST(trainer, total * torch.nan if place.rank == 1 and happens("nan", "nan, read at once") else total)

    def update(trainer: Trainer, vote: torch.Tensor) -> None:
        UPDATE(trainer, vote)
        if place.rank == 1 and happens("killed, vote cast"):
            vote.clone()  # its device has come so far
            os._exit(0)
        if place.rank == 1 and happens("stopped, before its device votes", "stopped"):
            interrupt()

    def land(group: SimulatedGroup, outputs: Any, copies: Any) -> None:
        is_vote = happens("stopped, in the vote") and tensors_in(outputs)[0].dtype == torch.float64
        if is_vote and place.rank == 1:
            store.wait(["landed"], timedelta(seconds=20))
            interrupt()
            group._aborted.wait(20)
        LAND(group, outputs, copies)
        if is_vote and place.rank == 0:
            store.set("landed", "")

    with begun(place, on_event=events.append, hang_s=1.5) as s:
        events.clear()
        if what == "nan, read at once" and place.rank == 1:
            s.arm({"kind": "nan", "ranks": [1], "at_step": 100})  # whatever is armed may need it
        with (voting(s) as trainer, mock.patch.multiple(Trainer, _loss_and_norm=loss_and_norm, _update_guarded=update),
              mock.patch.object(SimulatedGroup, "_land", land)):  # fmt: skip
            found = said_by(s, 5), trainer.progress.step, held(s), told(events)
        if file and place.rank == 0:
            Path(file).write_bytes(pickle.dumps(found))
        return None if file else (*found, told(s.train(1)["events"]))


NAN = (f"RankAborted: rank 1 failed: NotFinite: its loss in step {AT} is not finite",
       f"NotFinite: its loss in step {AT} is nan{WAY_OUT}")  # fmt: skip
ENDS = {  # what is said, and how many steps are committed
    "nan": (NAN, AT),
    "nan, read at once": (NAN, AT),
    "stopped, before its device votes": (("nothing", "nothing"), AT),
    "stopped, in the vote": (("nothing", "nothing"), AT + 1),
    "stopped": (("nothing", "nothing"), AT + 1),
}


@pytest.mark.parametrize("what", tiered(ENDS, lambda what: what in ("nan", "stopped")))
def test_all_ranks_end_after_the_same_step(pool: Pool, undisturbed: list[Any], what: str) -> None:
    """A step that is not finite is applied on none, and found when the next one begins; what one has applied, all have."""
    said, ends = ENDS[what]
    for rank, found in enumerate(pool.run(simulated, 2, _disturbed, what, reduction=None)):
        all_events, states = undisturbed[rank]
        assert found[:2] == (said[rank], ends) and equal(found[2], states[ends - BEGUN])
        assert found[4] == all_events[ends - BEGUN : ends - BEGUN + 1]
        told_of = AT if rank == 1 and what == "stopped, in the vote" else ends  # it did not read that vote itself
        assert found[3] == all_events[: told_of - BEGUN]


@pytest.mark.parametrize(
    ("what", "ends"), tiered([("killed, vote not cast", AT), ("killed, vote cast", AT + 1)], lambda _, ends: ends > AT)
)
def test_a_killed_rank_leaves_whole_steps(pool: Pool, undisturbed: list[Any], tmp_path: Path, what: str, ends: int):
    with pytest.raises(RankError, match="process ended"):
        pool.run(simulated, 2, _disturbed, what, str(tmp_path / "found"), reduction=None)
    said, step, state, events = pickle.loads((tmp_path / "found").read_bytes())
    assert said.startswith("RankAborted: rank 1 did not ") and step == ends
    assert equal(state, undisturbed[0][1][ends - BEGUN]) and events == undisturbed[0][0][: ends - BEGUN]


# -- what is asked of a device ----------------------------------------------------------------------------------------
class WatchedDevice(SimulatedDevice):
    """Notes in `log` whether the host drains it, or waits for a mark behind which it has more to do. A read of memory of
    its own drains it; one of the host's memory is a race if the host has not waited for what was copied there."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def holds(self, tensor: torch.Tensor) -> bool:
        return not self._of(tensor).is_host  # also shards, whose storage was there before

    def wait(self, waiting: Any, event: Event) -> None:
        if waiting is self.host and not event.query():
            at = self.compute.name
            self.log.append("waits" if event.clock[at] < self.compute.clock[at] else "drains")
        super().wait(waiting, event)

    def synchronize(self) -> None:
        self.log.append("drains")
        super().synchronize()

    def read(self, t: torch.Tensor) -> Any:
        if self.holds(t):
            self.mark().synchronize()
        self._access(self.host, "tolist", [t], [])
        return TOLIST(t)


def _asked(place: Place, changes: dict[str, Any], fails: bool) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Of five steps: what the device's log has, between the begin of a step, its update, and events; these, and races."""
    device, nccl = WatchedDevice(), NcclOnDevice()
    nccl.use(device)
    events: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any]) -> None:
        device.log.append(f"tells {event['step']}")
        events.append(event)

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(rendezvous, "nccl_of", lambda info: nccl))
        for module in (rendezvous, measure):
            enter(mock.patch.object(module, "streams_of", lambda kind: device))
        enter(mock.patch.object(Event, "elapsed_time", lambda begin, end: ELAPSED(begin, end) + 1.0))
        enter(mock.patch.object(torch.Tensor, "tolist", lambda t: device.read(t)))
        enter(device.installed(COLLECTIVES))
        s = enter(begun(place, changes, on_event=on_event))
        trainer = trainer_of(s)
        accumulate, update = trainer._accumulate, trainer._update

        def begins() -> torch.Tensor:
            device.log.append(f"begins {trainer.progress.step}")
            if fails and trainer.progress.step == AT:
                raise RuntimeError("injected")
            return accumulate()

        trainer._accumulate = begins  # type: ignore[method-assign]
        trainer._update = lambda: (device.log.append("updates"), update())[1]  # type: ignore[method-assign]
        device.log.clear()
        events.clear()
        said_by(s, 5)
        return device.log[:], events, device.races


@pytest.mark.parametrize(
    ("ranks", "changes"), tiered([(1, {}), (2, {}), (2, {"clip_norm": 1.0})], lambda ranks, _: ranks == 1), ids=str
)
def test_the_host_drains_a_device_only_to_read_what_it_needs(pool: Pool, ranks: int, changes: dict[str, Any]) -> None:
    """Once in a step that clips, and in the last one. In others it waits behind an update, also for their events, which come
    a step later and are timed by the device."""
    wanted = ["drains"]
    for step in range(BEGUN, last := BEGUN + 4):
        reads, tells = ["drains"] * bool(changes), [f"tells {step - 1}"] * (step > BEGUN)
        wanted += [f"begins {step}", *reads, "updates", *tells]
    wanted += [f"begins {last}", "drains", "updates", "drains", f"tells {last - 1}", f"tells {last}"]
    for log, events, races in pool.run(_asked, ranks, FUSED | changes, False, reduction=None):
        assert not races and [entry for entry in log if entry != "waits"] == wanted
        assert all(after != "waits" for entry, after in pairwise(log) if entry.startswith("begins"))
        assert all(e["step_time_s"] == 1e-3 and e["grad_norm"] > 0 for e in events)
        assert [bool(e["spans"]) for e in events] == [False] * 4 + [True]
        assert sorted(events, key=lambda e: float(e["begin_s"])) == events


def test_a_step_that_fails_takes_no_event_of_another_with_it(pool: Pool) -> None:
    (log, events, _), *_ = pool.run(_asked, 2, FUSED, True, reduction=None)
    assert [e["step"] for e in events] == [BEGUN]
    assert log[log.index(f"begins {AT}") + 1 :] == [f"tells {BEGUN}"], "a device that may hang is not waited for"
