"""What the parity tests run in each rank: a plain loop over a backend, with nothing of the trainer's."""

import math
from typing import Any

import torch
from torch import distributed as dist

from fsdp_lab.backends import build, fill, transfer_state
from fsdp_lab.backends.base import Backend
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.build import Initializer
from fsdp_lab.models.configs import resolve
from fsdp_lab.spec.spec import Spec
from tests import remembered
from tests.pool import Place


def start(place: Place, spec: Spec, before: Backend | None = None) -> Backend:
    skeleton = remembered.skeleton(resolve(spec.workload.model))
    initial = Initializer(skeleton, spec.workload.seed)
    backend = build(skeleton, spec, place.info.device)
    if before is None:
        fill(backend, initial)
    else:
        transfer_state(before, backend)
        before.release()
    return backend


def steps(place: Place, spec: Spec, backend: Backend, first: int, count: int) -> list[float]:
    w = spec.workload
    batches = Batches(w, resolve(w.model), rank=place.rank, world_size=place.world_size)
    losses = []
    for step in range(first, first + count):
        total = 0.0
        for micro in range(w.accumulate):
            with backend.micro_batch(communicate=spec.communicates(micro)):
                loss = backend.loss(batches.batch(step * spec.global_batch, micro)) / w.accumulate
                loss.backward()
            total += loss.item()
        backend.optimizer.step()
        backend.optimizer.zero_grad()
        losses.append(total)
    return losses


def whole(backend: Backend) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank."""
    # torch's take long to send
    mine = {p.name: (p.start, p.stop, p.local.clone().numpy()) for p in backend.param_shards()}
    everybodys = [mine] * dist.get_world_size()
    if len(everybodys) > 1:
        dist.all_gather_object(everybodys, mine)
    found = {p.name: torch.full(p.shape, math.nan) for p in backend.param_shards()}
    for held in everybodys:
        for name, (start, stop, values) in held.items():
            found[name].view(-1)[start:stop] = torch.from_numpy(values)
    return found


def carried(place: Place, before: dict[str, Any], after: dict[str, Any]) -> tuple[int, int]:
    """Bytes that this rank sends for a transfer_state, by what the wire counted, and those of all parameters."""
    one, other = Spec.from_dict(before), Spec.from_dict(after)
    old = start(place, one)
    steps(place, one, old, 0, 1)
    new = start(place, other)
    place.world.context.meter.take()
    transfer_state(old, new)
    sent = sum(c.link_bytes for c in place.world.context.meter.take() if c.kind == "all_to_all")
    whole = sum(4 * p.shape.numel() for p in old.param_shards())
    old.release()
    new.release()
    return sent, whole
