"""What the parity tests run in each rank: a plain loop over a backend, with nothing of the trainer's."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_lab.backends import build, carry, fill
from fsdp_lab.backends.base import Backend
from fsdp_lab.backends.carry import _stream
from fsdp_lab.models import Batches, Initializer, build_skeleton, resolve
from fsdp_lab.spec import Spec
from tests.pool import Place


def start(place: Place, spec: Spec, before: Backend | None = None) -> Backend:
    config = resolve(spec.workload.model)
    skeleton = build_skeleton(config)
    initial = Initializer(skeleton, spec.workload.seed)
    backend = build(skeleton, spec, place.seat.device)
    if before is None:
        fill(backend, initial)
    else:
        carry(before, backend)
        before.release()
    return backend


def steps(place: Place, spec: Spec, backend: Backend, first: int, count: int) -> list[float]:
    w = spec.workload
    batches = Batches(w, resolve(w.model), rank=place.rank, world_size=place.world_size)
    losses = []
    for step in range(first, first + count):
        total = 0.0
        for micro in range(w.accumulate):
            last = micro == w.accumulate - 1
            with backend.micro_batch(communicate=last or spec.strategy.sync == "every"):
                loss = backend.loss(batches.batch(step * spec.global_batch, micro)) / w.accumulate
                loss.backward()
            total += loss.item()
        backend.optimizer.step()
        backend.optimizer.zero_grad()
        losses.append(total)
    return losses


def whole(backend: Backend) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank."""
    shapes = {p.name: p.shape for p in backend.pieces()}
    return {name: flat.clone().view(shapes[name]) for name, _, flat in _stream(backend, ("param",))}


def train(place: Place, plan: list[tuple[dict[str, Any], int]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run each Spec of the plan for its steps, carrying the state from one to the next."""
    backend: Backend | None = None
    losses: list[float] = []
    for given, count in plan:
        spec = Spec.from_dict(given)
        backend = start(place, spec, backend)
        losses += steps(place, spec, backend, len(losses), count)
    assert backend is not None
    result = whole(backend)
    backend.release()
    return losses, result
