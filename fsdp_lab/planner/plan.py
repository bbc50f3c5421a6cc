"""`Plan`: what is predicted of a Spec on a machine before it is measured. `plan` makes one, in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fsdp_lab.model_shape import ModelShape
from fsdp_lab.planner.compute import USUAL, Software
from fsdp_lab.planner.devices import Machine, machine
from fsdp_lab.planner.pressure import pressed
from fsdp_lab.planner.rates import PUBLISHED, Rates
from fsdp_lab.planner.step import StepModel, StepTime
from fsdp_lab.spec import Spec, SpecError

BOUND = 0.2  # of a step: more exposed communication than this, and communication is what binds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One prediction. Rates are per rank unless the name says otherwise; `assumed` names what nobody said."""

    spec: Spec
    shape: ModelShape
    machine: Machine
    step: StepTime
    comm_s: Mapping[str, float]  # by kind: of a step, by itself
    link_bytes: Mapping[str, int]
    assumed: Mapping[str, Any]

    @property
    def step_time_s(self) -> float:
        return self.step.seconds

    @property
    def tokens(self) -> int:
        """Of all ranks in a step."""
        return self.spec.global_batch * self.shape.tokens(self.spec.workload.seq_len)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.step_time_s

    @cached_property
    def model_flops(self) -> float:
        """Of a rank in a step: forward and backward, recompute not counted."""
        samples = self.spec.workload.micro_batch * self.spec.workload.accumulate
        return 3 * samples * self.shape.forward_flops(self.spec.workload.seq_len)

    @property
    def flops_per_s(self) -> float:
        return self.model_flops / self.step_time_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1, of the data sheet's peak in the compute dtype."""
        return self.flops_per_s / self.machine.device.flops_per_s(self.spec.strategy.dtypes.param)

    @property
    def exposed_share(self) -> float:
        """Of the step: exposed communication."""
        return self.step.exposed_comm_s / self.step_time_s

    @property
    def binding(self) -> str:
        """What makes a step as long as it is: "communication", "computing" or "the loop"."""
        if self.exposed_share > BOUND:
            return "communication"
        return "computing" if self.step.computing_s > self.step_time_s / 2 else "the loop"


def plan(
    spec: Spec, shape: ModelShape, where: Machine, *, rates: Rates = PUBLISHED, software: Software = USUAL
) -> Plan:
    """Predicts a step.

    Args:
        shape: the model, in the units of `spec.strategy.wrap`.
        where: with as many ranks as the Spec has.

    Raises:
        SpecError: ranks that differ, a dtype that the device has not.
    """
    if where.ranks != spec.world_size:
        raise SpecError("ranks", f"the machine has {where.ranks} and the Spec {spec.world_size}", "give both the same")
    overlaps = not pressed(spec, shape, where)
    model = StepModel(spec, shape.units, shape.tokens(spec.workload.seq_len), where, rates, software, overlaps=overlaps)
    step = model.step()
    comm_s, link_bytes = model.communicated(loud=step.loud, quiet=step.quiet)
    assumed = {**where.device.assumed, **where.assumed, "attention": software.attention.value}
    return Plan(spec=spec, shape=shape, machine=where, step=step, comm_s=comm_s, link_bytes=link_bytes, assumed=assumed)


def scaling(spec: Spec, shape: ModelShape, where: Machine, ranks: Sequence[int], **options: Any) -> list[Plan]:
    """The same work of each rank on other numbers of ranks in such hosts; those that the Spec cannot have are left out."""
    found = []
    for count in ranks:
        hosts = -(-count // where.per_host)
        if count > where.per_host and count % where.per_host:
            continue
        fewer = machine(where.device, count, hosts=hosts, network_gbit_per_s=where.network_bytes_per_s * 8 / 1e9)
        refusal = spec.refusal(world_size=count, devices=None)
        if refusal is None:
            there = replace(fewer, assumed=where.assumed)
            found.append(plan(spec.replace(world_size=count, devices=None), shape, there, **options))
    return found


def limit(plans: Sequence[Plan]) -> str:
    """What binds along a scaling curve, in one sentence."""
    bound = next((p for p in plans if p.binding == "communication"), None)
    network = plans[-1].machine.network_bytes_per_s * 8 / 1e9
    if bound is None:
        return f"bound by {plans[-1].binding} up to {plans[-1].machine.ranks:,} GPUs at {network:,.0f} Gb/s a host"
    before = [p for p in plans if p.machine.ranks < bound.machine.ranks]
    if not before:
        return f"bound by communication from {bound.machine.ranks:,} GPUs on at {network:,.0f} Gb/s a host"
    return f"bound by communication above {before[-1].machine.ranks:,} GPUs at {network:,.0f} Gb/s a host"
