"""The engine on a simulated device (simulated.py): every wait that it needs is there, each is needed, and a table says what
a step asks of a device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
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
    "prefetch": case(forward_prefetch=2, backward_prefetch=2, limit_all_gathers=0),
    "two reductions": case(limit_reductions=2),
    "two reductions, hybrid": case(ranks=4, sharding="hybrid_shard", shard_size=2, limit_reductions=2),
    "two reductions, offload": case(offload="all", micro_batches=2, limit_reductions=2),
    "no prefetch": case(forward_prefetch=0, backward_prefetch=0),
    "shard_grad_op": case(sharding="shard_grad_op", flat=True),
    "zero1": case(sharding="zero1"),
    "no_shard": case(sharding="no_shard"),
    "hybrid_shard": case(ranks=4, sharding="hybrid_shard", shard_size=2),
    "hybrid_shard_zero2": case(ranks=4, sharding="hybrid_shard_zero2", shard_size=2, precision="bf16"),
    "post forward": case(ranks=4, reshard_size=2),
    "bf16": case(precision="bf16"),
    "fp16": case(precision="fp16"),
    "offload all": case(offload="all"),
    "offload all, bf16": case(offload="all", precision="bf16", forward_prefetch=1),
    "offload optimizer": case(offload="optimizer"),
    "offload optimizer, asked": case(offload="optimizer", asks=True),
    "offload, alone": case(ranks=1, offload="all"),
    "offload, hybrid": case(ranks=4, sharding="hybrid_shard", shard_size=2, offload="all"),
    "offload, replicated": case(sharding="no_shard", offload="all"),
    "accumulation": case(micro_batches=2),
    "accumulation, kept": case(micro_batches=2, keeps=True),
    "accumulation, offload": case(micro_batches=2, offload="all"),
    "accumulation, hybrid": case(ranks=4, micro_batches=2, sharding="hybrid_shard", shard_size=2),
}


QUICK = ("full_shard", "offload all")
Values = dict[str, torch.Tensor]


def some_quick(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in names]


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


def _rows() -> list[tuple[str, Mode]]:
    """Those of QUICK in both modes, the others by turns."""
    return [(n, m) for i, n in enumerate(CASES) for j, m in enumerate(Mode) if n in QUICK or (i + j) % 2]


def _simulated(place: Place, which: Case, mode: Mode, without: Wait | None = None) -> Any:
    """What `train` returns; or the first race that was found."""
    device = SimulatedDevice(mode, without=without)
    with device.installed():
        found = train(place, which, device)
    return device.races[0] if device.races else found


@pytest.mark.parametrize(("name", "mode"), tiered(_rows(), lambda name, mode: name in QUICK))
def test_every_wait_is_there(ran: Callable[..., Any], name: str, mode: Mode) -> None:
    which = CASES[name]
    plain = ran(_plainly, which.ranks, which)
    for rank, found in enumerate(ran(_simulated, which.ranks, which, mode)):
        assert not isinstance(found, str), found
        assert found[0].keys() == plain[rank].keys()
        for key, value in found[0].items():
            assert torch.equal(value, plain[rank][key]), key


# -- what a step asks of the device ------------------------------------------------------------------------------------

# Of four units, in the last of three steps: collectives (all-gathers, reduce-scatters, all-reduces); copies between host and
# device; events; how often the compute stream waits for another, and how often the host waits for the device.
ASKED = {
    #                            gather reduce all-reduce  copies  events  compute waits  host waits
    "full_shard": (6, 4, 0, 0, 10, 10, 0),
    "two reductions": (6, 4, 0, 0, 10, 10, 0),
    "two reductions, hybrid": (6, 4, 4, 0, 14, 12, 0),
    "shard_grad_op": (4, 4, 0, 0, 8, 8, 0),
    "zero1": (4, 4, 0, 0, 8, 8, 0),
    "no_shard": (0, 0, 4, 0, 8, 8, 0),
    "hybrid_shard": (6, 4, 4, 0, 14, 13, 0),
    "hybrid_shard_zero2": (4, 4, 4, 0, 12, 11, 0),
    "post forward": (6, 4, 0, 0, 10, 10, 0),
    "bf16": (6, 4, 0, 0, 10, 10, 0),
    "offload all": (6, 4, 0, 10, 20, 9, 5),
    "offload optimizer": (6, 4, 0, 8, 18, 9, 5),
    "offload, hybrid": (6, 4, 4, 10, 24, 9, 5),
    "offload, replicated": (0, 0, 4, 8, 16, 4, 5),
    "accumulation": (12, 8, 0, 0, 20, 20, 0),
    "accumulation, kept": (12, 4, 0, 0, 16, 16, 0),
    "accumulation, offload": (12, 8, 0, 20, 40, 18, 10),
    "accumulation, hybrid": (12, 8, 8, 0, 28, 23, 0),
}


@pytest.mark.parametrize("name", some_quick(ASKED))
def test_what_a_step_asks_of_the_device(ran: Callable[..., Any], name: str) -> None:
    which = CASES[name]
    found = ran(_simulated, which.ranks, which, Mode.EAGER)[0]
    assert not isinstance(found, str), found
    _, waits, counts = found
    collectives = (counts["all_gather"], counts["reduce_scatter"], counts["all_reduce"])
    by_compute = sum(n for wait, n in waits.items() if wait.waiting == "compute")
    asked = (*collectives, counts["copies"], counts["events"], by_compute, counts["synchronisations"])
    assert asked == ASKED[name]


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
    whole = _simulated(place, which, Mode.EAGER)
    assert not isinstance(whole, str), whole
    found = {wait: _simulated(place, which, Mode.EAGER, wait) for wait in whole[1]}
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
        return _simulated(place, which, Mode.EAGER)


def test_memory_that_is_freed_too_early_is_found(pool: Pool) -> None:
    assert "accesses memory that was freed" in pool.run(_without_references, 2, CASES["offload all"])[0]


def test_communication_on_a_gpu_has_streams_of_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's FSDP gives its own: a gather must not wait behind a product that fills the GPU."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, **options: made.append(options))
    CommStreams.of(CudaStreams(torch.device("cuda:0")))
    assert made == [{"priority": -1}] * len(dataclasses.fields(CommStreams))
