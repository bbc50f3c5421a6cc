"""The wire on a simulated device (simulated_wire.py): every wait that it needs is there, each is needed, and memory lives
long enough. What a step asks of a device is in tests/engine/test_streams.py."""

import enum
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_lab.backends import ddp
from fsdp_lab.wire import ReductionOrder, Wire
from fsdp_lab.wire.work import WireWork
from tests.covering import tiered
from tests.engine.simulated import SimulatedDevice, Stream, Wait
from tests.pool import Place, Pool
from tests.wire.simulated_wire import Over, WireOnDevice, wire_on_device

N = 6  # elements of a rank's part
W = 3
TURNS = 2
EACH = [Over.NCCL, Over.HOST, Over.LINK]


class How(enum.Enum):
    """On which streams a collective is issued and its results are used. A `lane` first waits for the compute stream."""

    LANE = "issued and waited for on a lane, for which the compute stream waits"
    ACROSS = "issued on a lane, waited for on the compute stream"
    TWICE = "waited for on a lane, then on the compute stream"
    FUTURE = "a future, on the compute stream; inputs are dropped at once"
    LANE_FUTURE = "a future, asked for on a lane"
    FUTURE_AND_WAIT = "a future, asked for on a lane, and a wait on the compute stream"
    WAIT_AND_FUTURE = "a wait on a lane, then a future on the compute stream"


def _avg(options: Any) -> Any:
    options.reduceOp = dist.ReduceOp.AVG
    return options


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Inputs have so many elements, or W times so many; `outputs` are made by `empty`, or are the inputs."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    issue: Callable[[Wire, list[Tensor], list[Tensor]], Any]
    gives: Callable[[list[list[Tensor]], int], list[Tensor]]  # from the inputs of all ranks, on one of them


def _mean(given: list[list[Tensor]], i: int = 0) -> Tensor:
    return torch.stack([of_rank[i] for of_rank in given]).sum(0) / len(given)


def _own(t: Tensor, rank: int) -> Tensor:
    return t.view(W, -1)[rank]


OPERATIONS = {
    "all_gather": Operation(
        inputs=(N,), outputs=(W * N,),
        issue=lambda world, ins, outs: world.all_gather_single(outs[0], ins[0]),
        gives=lambda given, rank: [torch.cat([own for (own,) in given])],
    ),
    "reduce_scatter": Operation(
        inputs=(W * N,), outputs=(N,),
        issue=lambda world, ins, outs: world.reduce_scatter_single(outs[0], ins[0], _avg(c10d.ReduceScatterOptions())),
        gives=lambda given, rank: [_own(_mean(given), rank)],
    ),
    "reduce_scatter of a list": Operation(
        inputs=(N,) * W, outputs=(N,),
        issue=lambda world, ins, outs: world.reduce_scatter(outs, [ins], _avg(c10d.ReduceScatterOptions())),
        gives=lambda given, rank: [_mean(given, rank)],
    ),
    "all_reduce of several": Operation(
        inputs=(N, 2), outputs=(),
        issue=lambda world, ins, outs: world.allreduce_coalesced(ins, _avg(c10d.AllreduceOptions())),
        gives=lambda given, rank: [_mean(given, 0), _mean(given, 1)],
    ),
    "broadcast": Operation(
        inputs=(N,), outputs=(),
        issue=lambda world, ins, outs: world.broadcast(ins, c10d.BroadcastOptions()),
        gives=lambda given, rank: given[0],
    ),
    "all_to_all": Operation(
        inputs=(W * N,), outputs=(W * N,),
        issue=lambda world, ins, outs: world.all_to_all_single(outs[0], ins[0], [], []),
        gives=lambda given, rank: [torch.cat([_own(whole, rank) for (whole,) in given])],
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    operation: str
    how: How
    order: ReductionOrder

    def __str__(self) -> str:
        return f"{self.operation}, {self.how.name}, {self.order.name}"


NATIVE, ORDERED = ReductionOrder.NATIVE, ReductionOrder.RANK_ORDERED
# Every operation in every way; those that sum in rank order too, in two of the ways.
CASES = [*(Case(operation, how, NATIVE) for operation, how in itertools.product(OPERATIONS, How)),
         *(Case(o, how, ORDERED) for o in OPERATIONS if "reduce" in o for how in (How.TWICE, How.LANE_FUTURE))]  # fmt: skip


def _given(operation: Operation, rank: int, turn: int) -> list[Tensor]:
    """Whole numbers, so that every order of sums is the same."""
    return [torch.arange(float(n)) * (rank + 1) + (100 * turn + 10 * i) for i, n in enumerate(operation.inputs)]


def _turn(wire: WireOnDevice, device: SimulatedDevice, lane: Stream, case: Case, turn: int) -> list[Tensor]:
    """Issue and use it once. Returns the results, copied on the compute stream."""
    operation, how = OPERATIONS[case.operation], case.how
    lane.wait_stream(device.compute)
    with nullcontext() if how is How.FUTURE else device.entered(lane):
        inputs = _given(operation, wire.world.rank(), turn)
        outputs = [torch.empty(n) for n in operation.outputs]
        work = operation.issue(wire.world, inputs, outputs)
        results = outputs or inputs
        if how in (How.LANE, How.TWICE, How.WAIT_AND_FUTURE):
            work.wait()
        if how in (How.FUTURE, How.LANE_FUTURE, How.FUTURE_AND_WAIT):
            future = work.get_future()
        if how is How.LANE:
            device.compute.wait_stream(lane)
    if how is How.FUTURE:
        del inputs, work
        _allocate()
    if how in (How.ACROSS, How.TWICE, How.FUTURE_AND_WAIT):
        work.wait()
    if how is How.WAIT_AND_FUTURE:
        future = work.get_future()
    if how in (How.FUTURE, How.LANE_FUTURE, How.WAIT_AND_FUTURE):
        future.wait()
    with device.entered(lane):
        _allocate()  # the lane has waited for nothing; what is used there is still referenced here
    return [t.clone() for t in results]


def _allocate() -> None:
    torch.zeros(1)


def _run(place: Place, wire: WireOnDevice, case: Case, device: SimulatedDevice) -> list[Tensor]:
    """In a metered step. Returns the results of the last turn; the device's `waits` are of that turn alone."""
    place.context.reduction = case.order
    with wire.on(device):
        lane = device.new("lane")
        place.context.start_timing()
        for turn in range(TURNS):
            device.waits.clear()
            found = _turn(wire, device, lane, case, turn)
        place.context.end_timing()()
    return found


def _wrong(place: Place, wire: WireOnDevice, case: Case, device: SimulatedDevice) -> str:
    """A race, or a wrong result, or ""."""
    found = _run(place, wire, case, device)
    operation = OPERATIONS[case.operation]
    wanted = operation.gives([_given(operation, rank, TURNS - 1) for rank in range(W)], place.rank)
    same = all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    return next(iter(device.races), "" if same else f"{found} is not {wanted}")


def _all_wrong(place: Place, over: str) -> dict[str, str]:
    with wire_on_device(place, over) as wire:
        found = {str(case): _wrong(place, wire, case, SimulatedDevice()) for case in CASES}
    return {case: wrong for case, wrong in found.items() if wrong}


@pytest.mark.slow
@pytest.mark.parametrize("over", EACH)
def test_every_wait_is_there(pool: Pool, over: str) -> None:
    for found in pool.run(_all_wrong, W, over, reduction=None):
        assert found == {}


class Bucket:
    """Of DDP's reducer."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def index(self) -> int:
        return 0

    def buffer(self) -> Tensor:
        return self._buffer


def _buckets(place: Place, over: str, dtype: torch.dtype | None) -> list[Any]:
    """Two buckets of a backward whose gradients are computed on a lane. Returns the first race, and the gradients."""
    device = SimulatedDevice()

    def issue(t: Tensor, op: Any, group: Any, async_op: bool) -> Any:
        """The dispatcher would hide its operations from the mode."""
        return group.allreduce([t], _avg(c10d.AllreduceOptions()))

    with wire_on_device(place, over) as wire, wire.on(device), patch.object(ddp.dist, "all_reduce", issue):
        lane = device.new("lane")
        with device.entered(lane):
            futures = []
            for i in range(2):
                gradients = torch.arange(float(N)) * (place.rank + 1) + i
                futures.append(ddp._sum_then_divide((wire.world, dtype), Bucket(gradients)))
                _allocate()
            found = [future.wait() * 2 for future in futures]  # as at the end of its backward
        device.compute.wait_stream(lane)
        total = sum(t.clone() for t in found)
    return [*device.races[:1], total.tolist()]


@pytest.mark.parametrize("over", tiered(EACH, lambda over: over != Over.LINK))
def test_ddp_s_buckets(pool: Pool, over: str) -> None:
    wanted = [2 * (2 * 1.5 * i + 1) for i in range(N)]
    for dtype in (None, torch.bfloat16):
        assert pool.run(_buckets, 2, over, dtype, reduction=None) == [[wanted]] * 2


NOT_FOR_ORDER = "group.unstage"  # the host waits, so that the time of a wait has the copy in it


def _without_each(place: Place, over: str) -> dict[Wait, str]:
    """By wait of the wire, what is found without it; "" for nothing."""
    found: dict[Wait, str] = {}
    with wire_on_device(place, over) as wire:
        for case in CASES:
            device = SimulatedDevice()
            _run(place, wire, case, device)
            for wait in device.waits:
                if wait.at and not found.get(wait):
                    found[wait] = _wrong(place, wire, case, SimulatedDevice(without=wait))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("over", "least"), [(Over.NCCL, 6), (Over.HOST, 3)])
def test_a_wait_that_is_left_out_is_found(pool: Pool, over: str, least: int) -> None:
    found = pool.run(_without_each, W, over, reduction=None)[0]
    assert {wait for wait, wrong in found.items() if not wrong} == {w for w in found if w.at == NOT_FOR_ORDER}
    assert sum(map(bool, found.values())) >= least


def _dropped(place: Place, told: bool) -> list[str]:
    """A future over NCCL that is dropped with its tensors, before the side stream has written them."""
    device = SimulatedDevice()
    left_out = nullcontext() if told else patch.object(WireWork, "_keep_memory", lambda work: None)
    with wire_on_device(place, Over.NCCL) as wire, wire.on(device), left_out:
        tensors = [torch.ones(N), torch.ones(2)]
        wire.world.allreduce_coalesced(tensors, _avg(c10d.AllreduceOptions())).get_future()
        del tensors
        _allocate()
    return device.races


def test_memory_of_what_nobody_waits_for(pool: Pool) -> None:
    assert not pool.run(_dropped, 2, True, reduction=None)[0]
    assert "on side accesses memory that was freed" in pool.run(_dropped, 2, False, reduction=None)[0][0]
