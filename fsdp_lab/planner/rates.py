"""`Rates`: the free parameters of the planner's physics. They are few, global, and found by one documented procedure
(`fsdp_lab.planner.calibrate`); none is of a single published row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares are of what the device or the link can do at best, 0 to 1."""

    matrix: float  # matrix products inside a model, beside one large product alone
    attention: Mapping[str, float]  # fused attention's own FLOPs (half of the pairs where causal), by generation
    memory: float  # of the memory's bandwidth; not fitted
    operands: float  # how often a matrix product moves its operands through memory
    link: float  # inside a host
    network: float  # between hosts
    latency_s: float  # of a collective, for each rank that its ring passes
    jitter_s: float  # how far apart ranks come to a collective: its standard deviation
    interference: float  # how much a collective in flight slows computing down, of its own time
    step_s: float  # what a step costs beside its micro-batches: the loop, the optimizer's launches, logging

    def attention_share(self, generation: str) -> float:
        """Of another generation than those that were calibrated: the newest of them."""
        return self.attention.get(generation, self.attention["hopper"])


# Of all usable rows of data/fsdp_measurements.csv. A test holds them against the procedure.
PUBLISHED = Rates(
    matrix=0.8703, attention={"ampere": 0.32, "hopper": 0.173}, memory=0.9, operands=1.125, link=0.6016,
    network=0.7028, latency_s=2.068e-6, jitter_s=1.108e-4, interference=0.2658, step_s=0.02879,
)  # fmt: skip
