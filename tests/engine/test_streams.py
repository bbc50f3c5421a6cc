"""The engine on a simulated device (simulated.py): every wait that it needs is there, each is needed, and a table says what
a step asks of a device. On groups that order nothing else; and over the wire (tests/wire/simulated_wire.py): over NCCL,
metered, or staged through the host, or in a GPU's memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fsdp_lab.base.streams import CommStreams, CudaStreams
from fsdp_lab.engine import full_state, no_sync, sharded_parameters, unshard
from fsdp_lab.engine.collectives import CommHandle
from fsdp_lab.spec.spec import Strategy
from tests.covering import tiered
from tests.engine.simulated import Mode, SimulatedDevice, Wait
from tests.engine.toys import Net, batch, by_block, make
from tests.pool import Place, Pool
from tests.wire.simulated_wire import Over, wire_on_device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training. `keeps`: micro-batches of a step that do not communicate, before the one that does."""

    strategy: Strategy
    ranks: int = 2
    micro_batches: int = 1
    keeps: bool = False
    flat: bool = False  # the optimizer is given flat parameters
    asks: bool = False  # for parameters ahead of the forward


def case(ranks: int = 2, *, micro_batches: int = 1, keeps: bool = False, flat: bool = False, asks: bool = False,
         **fields: Any) -> Case:  # fmt: skip
    return Case(
        strategy=Strategy(**fields), ranks=ranks, micro_batches=micro_batches, keeps=keeps, flat=flat, asks=asks
    )


CASES = {
    "full_shard": case(),
    "prefetch": case(forward_prefetch=2, backward_prefetch=2, limit_all_gathers=0, limit_reductions=2),
    "two reductions, hybrid": case(ranks=4, sharding="hybrid_shard", shard_size=2, limit_reductions=2),
    "two reductions, offload": case(offload="all", micro_batches=2, limit_reductions=2),
    "shard_grad_op": case(sharding="shard_grad_op", flat=True),
    "zero1": case(sharding="zero1", forward_prefetch=0, backward_prefetch=0),
    "no_shard": case(sharding="no_shard"),
    "hybrid_shard": case(ranks=4, sharding="hybrid_shard", shard_size=2),
    "hybrid_shard_zero2": case(ranks=4, sharding="hybrid_shard_zero2", shard_size=2, precision="bf16"),
    "post forward": case(ranks=4, reshard_size=2),
    "fp16": case(precision="fp16"),
    "offload all": case(offload="all"),
    "offload all, bf16": case(offload="all", precision="bf16", forward_prefetch=1),
    "offload optimizer, asked": case(offload="optimizer", asks=True),
    "offload, alone": case(ranks=1, offload="all"),
    "offload, hybrid": case(ranks=4, sharding="hybrid_shard", shard_size=2, offload="all"),
    "offload, replicated": case(sharding="no_shard", offload="all"),
    "accumulation, kept": case(micro_batches=2, keeps=True),
    "accumulation, hybrid": case(ranks=4, micro_batches=2, sharding="hybrid_shard", shard_size=2),
}
QUICK = ("full_shard", "offload all")
Values = dict[str, torch.Tensor]


def train(
    place: Place, which: Case, device: SimulatedDevice | None = None
) -> tuple[Values, Counter[Wait], Counter[str]]:
    """Three steps. Returns all parameters, and what the last step asked of the device."""
    model = by_block(make(Net), which.strategy)
    held = sharded_parameters(model) if which.flat else list(model.parameters())
    optimizer = torch.optim.SGD(held, lr=0.1, momentum=0.9)
    for step in range(3):
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
        optimizer.step()
        optimizer.zero_grad()
    asked = (Counter(device.waits), Counter(device.counts)) if device is not None else (Counter(), Counter())
    return {name: t.clone() for name, t in full_state(model)}, *asked


def _plainly(place: Place, which: Case) -> Values:
    return train(place, which)[0]


# Of four units, in the last of three steps: collectives (all-gathers, reduce-scatters, all-reduces); copies between host and
# device; events; how often the compute stream waits for another, and how often the host waits for the device.
ASKED = {
    #                            gather reduce all-reduce  copies  events  compute waits  host waits
    "full_shard": (6, 4, 0, 0, 10, 10, 0),
    "two reductions, hybrid": (6, 4, 4, 0, 14, 12, 0),
    "shard_grad_op": (4, 4, 0, 0, 8, 8, 0),
    "no_shard": (0, 0, 4, 0, 8, 8, 0),
    "hybrid_shard": (6, 4, 4, 0, 14, 13, 0),
    "hybrid_shard_zero2": (4, 4, 4, 0, 12, 11, 0),
    "post forward": (6, 4, 0, 0, 10, 10, 0),
    "offload all": (6, 4, 0, 10, 20, 9, 5),
    "offload, hybrid": (6, 4, 4, 10, 24, 9, 5),
    "offload, replicated": (0, 0, 4, 8, 16, 4, 5),
    "accumulation, kept": (12, 4, 0, 0, 16, 16, 0),
    "accumulation, hybrid": (12, 8, 8, 0, 28, 23, 0),
}


EAGER, LATE = Mode
ROWS = [
    *((name, "", EAGER) for name in CASES),
    *((name, "", LATE) for name in (*QUICK, "hybrid_shard", "offload optimizer, asked")),
    ("full_shard", Over.NCCL, EAGER),
    ("full_shard", Over.GPU, EAGER),
    ("full_shard", Over.HOST, LATE),
    ("hybrid_shard", Over.NCCL, EAGER),
    ("hybrid_shard", Over.HOST, EAGER),
    ("prefetch", Over.GPU, LATE),
    ("prefetch", Over.NCCL, LATE),
    ("offload all", Over.NCCL, EAGER),
    ("offload all", Over.HOST, EAGER),
    ("two reductions, offload", Over.GPU, EAGER),
    ("fp16", Over.HOST, EAGER),
]


def _simulated(place: Place, which: Case, mode: Mode, over: str = "", without: Wait | None = None) -> Any:
    """What `train` returns; or the first race that was found."""
    device = SimulatedDevice(mode, without=without)
    if not over:
        with device.installed():
            found = train(place, which, device)
    else:
        with wire_on_device(place, over) as wire, wire.on(device):
            place.context.start_timing()
            found = train(place, which, device)
            place.context.read_timing()
    return device.races[0] if device.races else found


def _is_quick(name: str, over: str, mode: Mode) -> bool:
    return name == "full_shard" if over else name in QUICK


@pytest.mark.slow
@pytest.mark.parametrize(("name", "over", "mode"), tiered(ROWS, _is_quick))
def test_every_wait_is_there(ran: Callable[..., Any], name: str, over: str, mode: Mode) -> None:
    """And a step asks of the device what is known."""
    which = CASES[name]
    plain = ran(_plainly, which.ranks, which, reduction="native" if over == Over.NCCL else "auto")
    found = ran(_simulated, which.ranks, which, mode, over, reduction=None if over else "auto")
    for rank, one in enumerate(found):
        assert not isinstance(one, str), one
        assert one[0].keys() == plain[rank].keys()
        for key, value in one[0].items():
            assert torch.equal(value, plain[rank][key]), key
    if name in ASKED and mode is EAGER and over != Over.GPU:
        _, waits, counts = found[0]
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
LEFT_OUT = (
    "full_shard",
    "offload optimizer, asked",
    "offload all",
    "offload, replicated",
    "offload, alone",
    "hybrid_shard",
)


def _without_each(place: Place, which: Case) -> dict[Wait, str]:
    """By wait of a step, which race is found without it; "" for none."""
    whole = _simulated(place, which, EAGER)
    assert not isinstance(whole, str), whole
    found = {wait: _simulated(place, which, EAGER, without=wait) for wait in whole[1]}
    return {wait: one if isinstance(one, str) else "" for wait, one in found.items()}


@pytest.mark.slow
def test_a_wait_that_is_left_out_is_found(pool: Pool) -> None:
    """Each wait that the engine makes in a step, wherever it makes it."""
    needed: dict[Wait, bool] = {}
    for which in map(CASES.__getitem__, LEFT_OUT):
        for wait, race in pool.run(_without_each, which.ranks, which)[0].items():
            needed[wait] = needed.get(wait, False) or bool(race)
    assert len(needed) >= 10
    assert [wait for wait, is_needed in needed.items() if not is_needed] == []


def _without_references(place: Place, which: Case) -> Any:
    """Handles keep nothing until they have been waited for."""

    def forgetful(handle: Any, stream: Any, work: Any, keeps: Any = (), then: Any = None) -> None:
        made(handle, stream, work, (), then)

    made = CommHandle.__init__
    with patch.object(CommHandle, "__init__", forgetful):
        return _simulated(place, which, EAGER)


def test_memory_that_is_freed_too_early_is_found(pool: Pool) -> None:
    assert "accesses memory that was freed" in pool.run(_without_references, 2, CASES["offload all"])[0]


def test_communication_on_a_gpu_has_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's FSDP gives its own: a gather must not wait behind a product that fills the GPU."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, **options: made.append(options))
    CommStreams.of(CudaStreams(torch.device("cuda:0")))
    assert made == [{"priority": -1}] * len(dataclasses.fields(CommStreams))
