"""scratch"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_lab.events import Classes
from fsdp_lab.model_shape import ModelShape
from fsdp_lab.spec import Spec

CONTEXT_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    held: Classes
    at_peak: Classes
    peak_phase: str
    peak_unit: str
    host_bytes: int
    reserved_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.at_peak.total_bytes


def memory(spec: Spec, shape: ModelShape, *, device: str) -> MemoryPlan:
    n = shape.parameters // spec.shard_factor
    size = 2 if spec.strategy.dtypes.param != "fp32" else 4
    tokens = shape.tokens(spec.workload.seq_len)
    kept = sum(
        (
            u.saved[spec.strategy.dtypes.param].bytes_of(tokens)
            if spec.strategy.recompute == "none"
            else 2 * tokens * u.boundary_elements
        )
        for u in shape.units
    )
    c = Classes(
        parameters_bytes=4 * n,
        gradients_bytes=4 * n,
        optimizer_bytes=8 * n,
        unsharded_bytes=2 * size * max(u.numel for u in shape.units),
        activations_bytes=int(kept * spec.workload.micro_batch),
    )
    return MemoryPlan(
        held=c,
        at_peak=c,
        peak_phase="backward",
        peak_unit="root",
        host_bytes=0,
        reserved_bytes=int(1.1 * c.total_bytes),
    )


def margin_bytes(plan: MemoryPlan, limit_bytes: int) -> int:
    return limit_bytes - plan.reserved_bytes - CONTEXT_BYTES
