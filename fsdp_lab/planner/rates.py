"""`Rates`: the free parameters of the planner's physics. They are few, global, and found by one documented procedure
(`fsdp_lab.planner.calibrate`); none is of a single published row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class HostOverhead:
    """What Python, autograd and a backend take beside the work, where computing waits for them: on a CPU. On a GPU the host
    runs ahead."""

    step_s: float = 0.0  # of a step
    send_s: float = (
        0.0  # of a gather or a reduction beside the collective: hooks, Python; below 0 where a step saves some
    )
    tensor_s: float = 0.0  # of a parameter tensor in a step: the operators that use it, its place in the optimizer
    stretch: float = 1.0  # a collective in a step, of one by itself: cold memory, ranks that are late


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares are of what the device or the link can do at best, 0 to 1."""

    matrix: float  # matrix products inside a model, beside one large product alone
    attention: Mapping[str, float]  # fused attention's own FLOPs (half of the pairs where causal), by generation
    memory: float  # of the memory's bandwidth; not fitted
    operands: float  # how often a matrix product moves its operands through memory
    link: float  # inside a host
    network: float  # between hosts
    latency_s: float  # of a collective, for each rank that its ring passes; of data/collective_timings.csv, not fitted
    jitter_s: float  # by how much each rank more makes the last rank later to a collective
    interference: float  # how much a collective in flight slows computing down, of its own time
    step_s: float  # what a step costs beside its micro-batches: the loop, the optimizer's launches, logging
    hosts: Mapping[str, HostOverhead] = field(default_factory=dict)  # by backend; none: the host is not waited for
    # By dtype, where it was measured: bytes moved each way by what is no product, of those that the forward keeps.
    traffic_of: Mapping[str, float] = field(default_factory=dict)

    def attention_share(self, generation: str) -> float:
        """Of another generation than those that were calibrated: the newest of them."""
        return self.attention.get(generation, self.attention["hopper"])

    def host(self, backend: str) -> HostOverhead:
        return self.hosts.get(backend, HostOverhead())


# Of all usable rows of data/fsdp_measurements.csv. A test holds them against the procedure.
PUBLISHED = Rates(
    matrix=0.874, attention={"ampere": 0.3178, "hopper": 0.1714}, memory=0.9, operands=1.228, link=0.5735, network=0.7396,
    latency_s=3e-6, jitter_s=1.957e-6, interference=0.2708, step_s=0.03017,
)  # fmt: skip
