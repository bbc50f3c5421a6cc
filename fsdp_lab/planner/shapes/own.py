"""`own_shape`: the `ModelShape` of a module of the user's own, recorded in a process that has its code.

A sample counts as one token, as an image does in a convolutional network. What grows with samples is told by a prime
number of them; a model whose sizes it divides is refused, as is what the planner cannot repeat.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.model_shape import ModelShape, SizeFormula
from fsdp_lab.core.spec import Strategy
from fsdp_lab.core.user_code import code_name
from fsdp_lab.core.workload import Workload
from fsdp_lab.engine.tensors import map_tensors, tensors_in
from fsdp_lab.models.freezing import freeze
from fsdp_lab.models.own import OwnModel, OwnSource, objective
from fsdp_lab.planner.shapes.recorded import recorded_shape, unit_modules
from fsdp_lab.planner.shapes.rewrapping import rewrapped
from fsdp_lab.planner.shapes.tape import NO_LENGTH, SAMPLES


class OwnInputs:
    """The samples and the loss of a Workload. Raises SpecError."""

    image_tokens: int | None = 1

    def __init__(self, workload: Workload) -> None:
        self._samples, self._loss = OwnSource(workload).first(SAMPLES), objective(workload)
        self.batch_size = SizeFormula(((1, 0, sum(t.nbytes for t in tensors_in(self._samples)) / SAMPLES),))

    def length(self, model: nn.Module) -> int:
        return NO_LENGTH

    def batch(self, seq_len: int) -> Any:
        return map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype), self._samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._loss(model, batch)


def own_shape(workload: Workload, wrap: str) -> ModelShape:
    """The model in the units of a `Strategy.wrap`. Takes seconds. Raises SpecError if it cannot be planned, or its code is
    not here."""
    Strategy(wrap=wrap)  # validates it
    joined = wrap.startswith(("block", "whole", "every:"))
    skeleton, name = OwnModel(workload).skeleton(), code_name(workload.model)
    if other := next((n for n, p in skeleton.named_parameters() if p.numel() % SAMPLES == 0), ""):
        raise _unknown(f"the planner tells samples by the number {SAMPLES}, which divides the size of {other}")
    freeze(skeleton, workload.freeze)
    units = unit_modules(skeleton, "block" if joined else wrap)
    shape = recorded_shape(skeleton, units, OwnInputs(workload), name, f"a step of {name}")
    _check(shape)
    return rewrapped(shape, wrap) if joined else shape


def _check(shape: ModelShape) -> None:
    if (calls := sum(unit == 0 for unit, _ in shape.calls)) != 1:
        raise _unknown(f"its loss calls the model {calls} times")
    sizes = (c.size for tape in shape.tapes.values() for segment in tape for c in segment.changes)
    if any(b and c % SAMPLES == 0 for size in sizes for b, _, c in size.terms if c):
        raise _unknown("its memory may grow with the square of the number of samples")


def _unknown(reason: str) -> SpecError:
    return SpecError("workload.model", f"it cannot be planned: {reason}", "measure it: a run needs no plan")
