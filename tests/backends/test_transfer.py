"""Routes from one layout to another, for any of them, and that what stays is not sent; state that moves to another
backend, or to the host and back, on a simulated device (tests/wire/simulated_wire.py)."""

from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fsdp_lab.backends import transfer
from fsdp_lab.backends.state import Layout, resume_state, suspend_state
from fsdp_lab.backends.transfer import plan_transfers
from fsdp_lab.spec.spec import Spec
from tests.backends.train import carried, start, steps
from tests.engine.parity import spec
from tests.engine.simulated import SimulatedDevice, Wait
from tests.pool import Place, Pool
from tests.wire.simulated_wire import Over, wire_on_device

Case = tuple[dict[str, int], list[Layout], list[Layout]]


@st.composite
def changes(draw: st.DrawFn) -> Case:
    """Sizes of parameters, and two layouts of them on the same ranks: each in shards of any size, held by replicas."""
    sizes = {f"p{i}": n for i, n in enumerate(draw(st.lists(st.integers(1, 30), min_size=1, max_size=4)))}
    shards, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def layout() -> list[Layout]:
        ranks: list[dict[str, tuple[int, int]]] = [{} for _ in range(shards * replicas)]
        whole = draw(st.booleans())
        for name, size in sizes.items():
            cuts = sorted(draw(st.lists(st.integers(0, size), min_size=shards - 1, max_size=shards - 1)))
            ranges = [(0, size)] * shards if whole else list(pairwise([0, *cuts, size]))
            for rank, held in enumerate(ranks):
                held[name] = ranges[rank % shards]
        return list(ranks)

    return sizes, layout(), layout()


@given(changes())
def test_everybody_gets_each_element_once_from_one_that_holds_it(case: Case) -> None:
    sizes, held, wanted = case
    found: dict[tuple[int, str], list[int]] = {}
    for m in plan_transfers(sizes, held, wanted):
        assert m.start < m.stop
        start, stop = held[m.source][m.name]
        assert start <= m.start and m.stop <= stop
        found.setdefault((m.target, m.name), []).extend(range(m.start, m.stop))
        mine = range(*held[m.target][m.name])
        assert m.source == m.target or not set(mine) & set(range(m.start, m.stop))  # what it has it keeps
    for rank, want in enumerate(wanted):
        for name, bounds in want.items():
            assert found.get((rank, name), []) == list(range(*bounds))


def test_replicas_share_the_giving_and_what_nobody_holds_is_named() -> None:
    """Two shards on two replicas; everybody wants all: each asks another."""
    held: list[Layout] = [{"p": (0, 4)}, {"p": (4, 8)}] * 2
    asked = [(m.source, m.target) for m in plan_transfers(["p"], held, [{"p": (0, 8)}] * 4) if m.source != m.target]
    assert asked == [(1, 0), (2, 1), (3, 2), (0, 3)]
    with pytest.raises(ValueError, match=r"no rank holds p\[2:4\]"):
        plan_transfers(["p"], [{"p": (0, 2)}, {"p": (0, 0)}], [{"p": (0, 4)}, {"p": (0, 0)}])


@pytest.mark.parametrize(("before", "after", "share"), [
    ({"sharding": "full_shard"}, {"sharding": "shard_grad_op"}, 0.0),
    ({"sharding": "no_shard"}, {"backend": "fsdp2", "sharding": "full_shard"}, 0.0),
    ({"sharding": "full_shard"}, {"backend": "ddp", "sharding": "no_shard"}, 0.5),
], ids=str)  # fmt: skip
def test_a_carry_sends_what_is_missing_and_no_more(pool: Pool, before: Any, after: Any, share: float) -> None:
    """Of parameters and two slots of AdamW, on two ranks; a shard has some bytes of padding."""
    base = Spec(world_size=2).replace(model="gpt2-1m", seq_len=8, micro_batch=1)
    for sent, whole in pool.run(carried, 2, base.replace(**before).to_dict(), base.replace(**after).to_dict()):
        assert sent == pytest.approx(3 * share * whole, rel=0.01)


BATCH = Wait("host", "compute", "transfer._await_all")
SPECS = [{}, {"sharding": "no_shard"}, {"offload": "all"}, {"sharding": "shard_grad_op"}]


def _trained(place: Place, device: SimulatedDevice | None = None) -> list[float]:
    """Losses of a step under each Spec, by switches; then to the host, and a step of a backend that resumes there."""
    backend, losses = None, list[float]()
    for changes in SPECS:
        one = spec("gpt2", place.world_size, backend="lab", **changes)
        backend = start(place, one, backend)
        losses += steps(place, one, backend, len(losses), 1)
    suspended = suspend_state(backend)
    total = sum(float(t.sum()) for t in suspended.values.values())
    backend.release()
    backend = start(place, one)
    resume_state(suspended, backend)
    return [*losses, total, *steps(place, one, backend, len(losses), 1)]


def _on_device(place: Place, without: Wait | None = None) -> tuple[list[str], bool, list[float]]:
    """Races; whether all batches had arrived whenever the ranks met for it; and the losses."""
    device, arrived = SimulatedDevice(without=without), []
    with wire_on_device(place, Over.NCCL) as wire, ExitStack() as stack:
        world = wire.world
        meet = world.barrier

        def exchange(output: Tensor, input: Tensor, *, output_split_sizes: Any, input_split_sizes: Any) -> None:
            world.all_to_all_single(output, input, output_split_sizes, input_split_sizes).wait()

        def barrier(*given: Any) -> Any:
            arrived.append(device.compute.record_event().query())
            return meet(*given)

        stack.enter_context(patch.object(transfer, "streams_of", lambda _: device))
        stack.enter_context(patch.object(transfer.dist, "all_to_all_single", exchange))
        stack.enter_context(wire.on(device))
        world.allreduce([torch.zeros(1)]).wait()  # NCCL's own meeting, of which `barrier` is a part
        stack.enter_context(patch.object(world, "barrier", barrier))
        losses = _trained(place)
    assert arrived
    return device.races[:1], all(arrived), losses


@pytest.mark.slow
def test_every_wait_is_there_and_one_that_is_left_out_is_found(pool: Pool) -> None:
    plain = pool.run(_trained, 2, reduction="native")
    assert pool.run(_on_device, 2, reduction=None) == [([], True, losses) for losses in plain]
    races, arrived, _ = pool.run(_on_device, 2, BATCH, reduction=None)[0]
    assert races == [] and not arrived
