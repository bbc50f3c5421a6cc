"""The engine on a simulated device (simulated.py): every wait that it needs is there, each is needed, and a table says what
a step asks of a device. On groups that order nothing else; and over the wire (tests/wire/simulated_wire.py): over NCCL,
metered, or staged through the host, or in a GPU's memory."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fsdp_lab.base.streams import CommStreams, Streams
from fsdp_lab.engine import full_state, no_sync, sharded_parameters, unshard
from fsdp_lab.engine.collectives import CommHandle
from fsdp_lab.spec.spec import Strategy
from tests.engine.simulated import SimulatedDevice, Wait
from tests.engine.toys import Net, batch, by_block, make, update
from tests.pool import Place, Pool
from tests.wire.simulated_wire import Over, wire_on_device


@dataclasses.dataclass(frozen=True)
class Case:
    """A training. `keeps`: micro-batches of a step that do not communicate, before the one that does."""

    fields: dict[str, Any]  # of its strategy
    ranks: int = 2
    micro_batches: int = 1
    keeps: bool = False
    flat: bool = False  # the optimizer is given flat parameters
    asks: bool = False  # for parameters ahead of the forward


PREFETCH = {"forward_prefetch": 2, "backward_prefetch": 2, "limit_all_gathers": 0, "limit_reductions": 2}
HYBRID = {"sharding": "hybrid_shard", "shard_size": 2}
CASES = {"full_shard": Case({}), "prefetch": Case(PREFETCH),
         "two reductions, offload": Case({"offload": "all", "limit_reductions": 2}, micro_batches=2),
         "shard_grad_op": Case({"sharding": "shard_grad_op"}, flat=True),
         "zero1": Case({"sharding": "zero1", "forward_prefetch": 0, "backward_prefetch": 0}),
         "hybrid_shard": Case(HYBRID, ranks=4),
         "hybrid_shard_zero2": Case({**HYBRID, "sharding": "hybrid_shard_zero2", "precision": "bf16"}, ranks=4),
         "post forward": Case({"reshard_size": 2}, ranks=4), "fp16": Case({"precision": "fp16"}),
         "offload all": Case({"offload": "all"}), "offload optimizer, asked": Case({"offload": "optimizer"}, asks=True),
         "offload, alone": Case({"offload": "all"}, ranks=1),
         "offload, hybrid": Case({**HYBRID, "offload": "all"}, ranks=4),
         "offload, replicated": Case({"sharding": "no_shard", "offload": "all"}),
         "accumulation, kept": Case({}, micro_batches=2, keeps=True),
         "accumulation, hybrid": Case(HYBRID, ranks=4, micro_batches=2)}  # fmt: skip
Values = dict[str, torch.Tensor]


def train(place: Place, name: str, device: SimulatedDevice | None = None) -> tuple[Values, Counter[Wait], Counter[str]]:
    """Two steps. Returns all parameters, and what the second one asked of the device."""
    which = CASES[name]
    model = by_block(make(Net), Strategy(**which.fields))
    held = sharded_parameters(model) if which.flat else list(model.parameters())
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    for step in range(2):
        if device is not None:
            device.waits.clear()
            device.counts.clear()
        for micro in range(which.micro_batches):
            x = batch(10 * step + micro, place.rank)
            if which.asks:
                unshard(model, async_op=True)
            is_kept = which.keeps and micro < which.micro_batches - 1
            with no_sync(model) if is_kept else nullcontext():
                model(x).float().square().mean().backward()
        update(optimizer)
    asked = (Counter(device.waits), Counter(device.counts)) if device is not None else (Counter(), Counter())
    return {name: t.clone() for name, t in full_state(model)}, *asked


def _plainly(place: Place, name: str) -> Values:
    return train(place, name)[0]


# Of four units, in the second step: collectives (all-gathers, reduce-scatters, all-reduces); copies between host and
# device; events; how often the compute stream waits for another, and how often the host waits for the device.
ASKED = {
    #                            gather reduce all-reduce  copies  events  compute waits  host waits
    "full_shard": (6, 4, 0, 0, 10, 10, 0),
    "shard_grad_op": (4, 4, 0, 0, 8, 8, 0),
    "hybrid_shard": (6, 4, 4, 0, 14, 13, 0),
    "hybrid_shard_zero2": (4, 4, 4, 0, 12, 11, 0),
    "post forward": (6, 4, 0, 0, 10, 10, 0),
    "offload all": (6, 4, 0, 10, 20, 9, 5),
    "offload, hybrid": (6, 4, 4, 10, 24, 9, 5),
    "offload, replicated": (0, 0, 4, 8, 16, 4, 5),
    "accumulation, kept": (12, 4, 0, 0, 16, 16, 0),
    "accumulation, hybrid": (12, 8, 8, 0, 28, 23, 0),
}


WITH_A_WIRE = ("prefetch", "two reductions, offload", "offload, alone")  # or left out below
ROWS = [*((name, "") for name in CASES if name not in WITH_A_WIRE), ("full_shard", Over.NCCL),
        ("full_shard", Over.HOST), ("hybrid_shard", Over.NCCL), ("hybrid_shard", Over.HOST), ("prefetch", Over.GPU),
        ("prefetch", Over.NCCL), ("two reductions, offload", Over.GPU)]  # fmt: skip


def _simulated(place: Place, name: str, over: str = "", without: Wait | None = None) -> Any:
    """What `train` returns; or the first race that was found."""
    device = SimulatedDevice(without=without)
    if not over:
        with device.installed():
            trained = train(place, name, device)
    else:
        with wire_on_device(place, over) as wire, wire.on(device):
            place.context.start_timing()
            trained = train(place, name, device)
            place.context.end_timing()()
    return device.races[0] if device.races else trained


@pytest.mark.slow
@pytest.mark.parametrize(("name", "over"), ROWS)
def test_every_wait_is_there(ran: Callable[..., Any], name: str, over: str) -> None:
    """And a step asks of the device what is known."""
    ranks = CASES[name].ranks
    plain = ran(_plainly, ranks, name, reduction="native" if over == Over.NCCL else "auto")
    simulated = ran(_simulated, ranks, name, over, reduction=None if over else "auto")
    for rank, one in enumerate(simulated):
        assert not isinstance(one, str), one
        assert one[0].keys() == plain[rank].keys()
        for key, value in one[0].items():
            assert torch.equal(value, plain[rank][key]), key
    if name in ASKED and over != Over.GPU:
        _, waits, counts = simulated[0]
        _asks_what_is_known(ASKED[name], over, waits, counts)


def _asks_what_is_known(asked: tuple[int, ...], over: str, waits: Counter[Wait], counts: Counter[str]) -> None:
    """Over NCCL with metering on, a step asks for two marks for each collective more, and a lane waits for NCCL once. Staged
    through the host, where metering asks nothing of the device: for two copies and two waits of the host for each. There is
    no more stream and no other event: the engine asks for no futures."""
    *collectives, copies, events, by_compute, by_host = asked
    n, staged = sum(collectives), 2 * sum(collectives) * (over == Over.HOST)
    assert over or [counts["all_gather"], counts["reduce_scatter"], counts["all_reduce"]] == collectives
    assert sum(k for wait, k in waits.items() if wait.waiting == "compute") == by_compute
    assert (counts["streams"], counts["events"]) == (0, events)
    assert (counts["copies"], counts["synchronisations"]) == (copies + staged, by_host + staged)
    for_nccl = sum(k for wait, k in waits.items() if wait.waited_for.startswith("nccl"))
    assert (counts["marks"], for_nccl) == ((2 * n, n) if over == Over.NCCL else (0, 0))


# -- a wait is left out -----------------------------------------------------------------------------------------------

# Where another wait implies one here, it is needed elsewhere among these.
LEFT_OUT = ("full_shard", "offload optimizer, asked", "offload all", "offload, replicated", "offload, alone",
            "hybrid_shard")  # fmt: skip


def _without_each(place: Place, name: str, needed: set[Wait]) -> dict[Wait, bool]:
    """By wait of a step that is not known to be needed: whether a race is seen without it."""
    whole = _simulated(place, name)
    assert not isinstance(whole, str), whole
    return {w: isinstance(_simulated(place, name, without=w), str) for w in whole[1] if w not in needed}


@pytest.mark.slow
def test_a_wait_that_is_left_out_is_found(pool: Pool) -> None:
    """Each wait that the engine makes in a step, wherever it makes it."""
    needed: set[Wait] = set()
    others: set[Wait] = set()
    for name in LEFT_OUT:
        seen = pool.run(_without_each, CASES[name].ranks, name, needed)[0]
        needed |= {wait for wait, is_seen in seen.items() if is_seen}
        others |= seen.keys()
    assert len(needed) >= 10 and others <= needed, others - needed


def _without_references(place: Place, name: str) -> Any:
    """Handles keep nothing until they have been waited for."""

    def forgetful(handle: Any, stream: Any, work: Any, keeps: Any = (), *rest: Any, **options: Any) -> None:
        made(handle, stream, work, (), *rest, **options)

    made = CommHandle.__init__
    with patch.object(CommHandle, "__init__", forgetful):
        return _simulated(place, name)


def test_memory_that_is_freed_too_early_is_found(pool: Pool) -> None:
    assert "accesses memory that was freed" in pool.run(_without_references, 2, "offload all")[0]


def test_communication_on_a_gpu_has_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's FSDP gives its own: a gather must not wait behind a product that fills the GPU."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, **options: made.append(options))
    CommStreams.of(Streams(torch.device("cuda:0")))
    assert made == [{"priority": -1}] * len(dataclasses.fields(CommStreams))
