"""One rank of `bench wire`: collectives over shared memory and over Gloo, in turns.

Note: what is timed. A barrier, then collectives of 4 MiB in all, one after the other, or a larger one, each from its issue
to the end of its wait, through `Wire` either way. Each round does all forms of a size one after the other, every second
round in the opposite order. The whole tensor is in memory of the group's own where it has any, as our engine's are and
FSDP2's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fsdp_lab.bench.plan import BenchError
from fsdp_lab.engine.buffers import empty
from fsdp_lab.wire import ReductionOrder, Wire
from fsdp_lab.wire.group import BACKEND

SIZES_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # of the whole tensor
WAIT_S = 1.0
BATCH_BYTES = 4 << 20  # smaller ones are repeated
SHARED, AGAIN = "shared", "shared-again"
KINDS: Mapping[str, tuple[str, ...]] = {  # forms of each; those over Gloo differ in how it is asked
    "all_gather": (SHARED, "gloo", AGAIN, "gloo-list"),
    "reduce_scatter": (SHARED, "gloo", AGAIN, "gloo-native"),
}


def time_collectives(world: Wire, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of this rank by "kind/bytes" and form, one per round, after one to warm up. Collective. Raises BenchError if
    the ranks share no memory."""
    shared, gloo = (beside(world, shared_memory=on) for on in (True, False))
    seconds: dict[str, dict[str, list[float]]] = {}
    tensors = {group: {nbytes: _tensors(group, nbytes) for nbytes in SIZES_BYTES} for group in (shared, gloo)}
    for i in range(rounds + 1):
        for kind, forms in KINDS.items():
            for nbytes in SIZES_BYTES:
                of_size = seconds.setdefault(f"{kind}/{nbytes}", {form: [] for form in forms})
                for form in forms if i % 2 else forms[::-1]:
                    group = shared if form in (SHARED, AGAIN) else gloo
                    issue = partial(_collective, group, kind, form, *tensors[group][nbytes])
                    of_size[form].append(_timed(shared, issue, max(1, BATCH_BYTES // nbytes)))
    world.barrier().wait()
    return {name: {form: found[1:] for form, found in of_size.items()} for name, of_size in seconds.items()}


def time_a_wait(world: Wire) -> float:
    """The share of a core that rank 0 takes while it waits for another rank's collective, for `WAIT_S`. Collective. 0 on
    other ranks. Raises BenchError if the ranks share no memory."""
    shared = beside(world, shared_memory=True)
    shared.barrier().wait()
    if shared.rank():
        time.sleep(WAIT_S)
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    shared.barrier().wait()
    return 0.0 if shared.rank() else (time.process_time() - cpu_s) / (time.perf_counter() - begun_s)


def beside(world: Wire, *, shared_memory: bool) -> Wire:
    """A second group of all ranks, over shared memory or over Gloo. Raises BenchError if the ranks share no memory."""
    before, world.context.shared_memory = world.context.shared_memory, shared_memory
    try:
        group = dist.new_group(backend=BACKEND, timeout=world.context.timeout)
    finally:
        world.context.shared_memory = before
    if shared_memory and (why := next(iter(world.context.not_shared.values()), "")):
        raise BenchError(f"the ranks share no memory: {why}")
    assert isinstance(group, Wire)
    return group


def _tensors(group: Wire, nbytes: int) -> tuple[Tensor, Tensor]:
    """The whole, [W * n], and a rank's part, [n], in fp32."""
    n = nbytes // 4 // group.size()
    whole = empty(group.buffer_pool, group.size() * n, torch.float32, torch.device("cpu"))
    return whole.normal_(), torch.randn(n)


def _collective(group: Wire, kind: str, form: str, whole: Tensor, part: Tensor) -> Any:
    group.context.reduction = ReductionOrder.NATIVE if form == "gloo-native" else ReductionOrder.AUTO
    if kind == "reduce_scatter":
        return group.reduce_scatter_single(part, whole)
    if form == "gloo-list":
        return group.allgather([list(whole.chunk(group.size()))], [part])
    return group.all_gather_single(whole, part)


def _timed(shared: Wire, issue: Callable[[], Any], times: int) -> float:
    """Seconds of one."""
    shared.barrier().wait()
    begun_s = time.perf_counter()
    for _ in range(times):
        issue().wait()
    return (time.perf_counter() - begun_s) / times
