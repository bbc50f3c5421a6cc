"""The planner's functions for the command line and the dashboard: plans and searches, for models by name.

They look up the model's shape and the machine; the rest of the planner needs neither model names nor torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_lab.base.errors import ArgumentError, FieldError, SpecError, check_whole
from fsdp_lab.base.formatting import size
from fsdp_lab.models.check import check_shapes, model_facts
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.bands import MEMORY_ERRORS
from fsdp_lab.planner.calibration import Calibration
from fsdp_lab.planner.devices import Device, Machine, machine
from fsdp_lab.planner.memory import MemoryPlan, memory
from fsdp_lab.planner.model_shape import ModelShape
from fsdp_lab.planner.plan import Plan, Training, limit, plan, scaling
from fsdp_lab.planner.search import Search, fewest, fits_somehow, on_ranks, search
from fsdp_lab.planner.shapes import is_packaged, shape_of_workload
from fsdp_lab.spec.spec import Spec

MOST_RANKS = 1 << 17
MOST_TOKENS = 1 << 27  # of one micro-batch
PER_HOST = 8  # devices that a host usually has
SURE = 0.95  # level of the band below which a Spec does not fit
LESS = 'a smaller micro_batch or seq_len, more sharding, recompute="full", or more ranks'
CURVE = tuple(1 << i for i in range(13))  # 1 to 4,096 ranks


@dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware as a user names it. None: the usual value, which `Plan.assumed` lists."""

    hardware: str | Device
    hosts: int | None = None
    per_host: int | None = None  # devices; only if `hosts` is None
    network_gbit_per_s: float | None = None
    training: Training | None = None  # a whole one, of which plans have the time and the cost

    def machine(self, ranks: int) -> Machine:
        """Raises ArgumentError: an unknown device, ranks that the hosts do not divide, a rate out of range."""
        rate = self.network_gbit_per_s
        return machine(self.hardware, ranks, hosts=self.hosts, per_host=self.per_host, network_gbit_per_s=rate)

    def whole_host(self, ranks: int) -> Machine:
        """As `machine`, but with at least one full host."""
        return self.machine(ranks if self.hosts is not None else max(ranks, self.per_host or PER_HOST))


def on_hosts(spec: Spec, target: Target) -> Spec:
    """The Spec with the shard size of hybrid sharding: the devices of a host, unless it is given. Raises ArgumentError."""
    ranks, per_host = spec.world_size, target.machine(spec.world_size).per_host
    is_open = spec.strategy.is_hybrid and spec.strategy.shard_size is None
    return spec.replace(shard_size=per_host) if is_open and 1 < per_host < ranks and ranks % per_host == 0 else spec


def planned(spec: Spec, target: Target) -> Plan:
    """Predicts one step. Raises FieldError: an unknown model, a sequence longer than its positions, hardware that is unknown
    or does not have as many ranks, numbers out of range."""
    return replace(plan(spec, shape_of(spec), target.machine(spec.world_size)), training=target.training)


def planned_here(
    spec: Spec, calibration: Calibration, hosts: int | None = None, network_gbit_per_s: float | None = None
) -> Plan:
    """Predicts one step on the calibrated machine, or on so many hosts like it. Raises FieldError for another number of
    ranks, and as `planned`."""
    if hosts is None and network_gbit_per_s is not None:
        reason = "one machine was calibrated, and has no network"
        raise ArgumentError("network_gbit_per_s", reason, "give hosts as well")
    if hosts is not None:
        check_whole("hosts", hosts)
    shape, ranks = shape_of(spec), calibration.ranks
    if spec.world_size != ranks * (hosts or 1):
        were = "1 rank was" if ranks == 1 else f"{ranks} ranks were"
        reason = f"{were} calibrated, and the Spec has {spec.world_size}"
        hint = "calibrate again with as many, give hosts that have as many together, or name hardware"
        raise SpecError("world_size", reason, hint)
    if hosts in (None, 1):
        return plan(spec, shape, calibration.machine, rates=calibration.rates)
    where, rates = calibration.on_hosts(hosts or 1, network_gbit_per_s)
    return plan(spec, shape, where, rates=rates)


def planned_memory(spec: Spec, *, device: str) -> MemoryPlan:
    """Memory of a rank on any machine; `device` is "cpu" or "cuda"."""
    return memory(spec, shape_of(spec), device=device)


class DoesNotFit(SpecError):
    """A Spec that surely needs more memory than there is."""

    def with_way_out(self, way: str = "") -> "DoesNotFit":
        """The same error, which names a way to start it all the same, if there is one."""
        return DoesNotFit(self.field, self.reason, f"give {LESS}" + (f"; or {way}" if way else ""))


def require_memory(
    spec: Spec, ranks: Sequence[tuple[str, str, int, int]], call: str = "", former: Spec | None = None
) -> None:
    """Raises DoesNotFit if even the low end of the plan's memory is more than there is. Takes milliseconds: models that
    would be recorded first are let pass. `ranks`: of each the host, the device, the bytes that the device has for it, and
    its host's. `call`: the function that takes it with `anyway=True`; "": none does. `former`: what trains; no more than
    that takes is refused, whatever the plan says."""
    w, s = spec.workload, spec.strategy
    if s.is_yours or s.gather != "copy" or not ranks or w.is_own:
        return
    if not is_packaged(w.model, s.wrap, w.freeze, w.adapters, w.dropout):
        return
    device = "cpu" if ranks[0][1] == "cpu" else "cuda"
    try:
        plan = planned_memory(spec, device=device)
        if former is not None and plan.peak_bytes <= planned_memory(former, device=device).peak_bytes:
            return
    except FieldError:  # the ranks say what is wrong with it
        return
    hosts, low = {host: nbytes for host, _, _, nbytes in ranks}, math.exp(-MEMORY_ERRORS[device].at(SURE))
    of_host = min(hosts.values()) * len(hosts) / spec.world_size
    of_gpu = min(nbytes for _, _, nbytes, _ in ranks)
    of_device = (plan.peak_bytes, of_host, "host") if device == "cpu" else (plan.peak_bytes, of_gpu, "GPU")
    for needed, room, where in (of_device, (plan.host_bytes, of_host, "host")):
        if low * needed > room:
            share = f"its share of the {where}'s memory is {size(int(room))}"
            reason = f"a rank needs {size(int(low * needed))} or more, and {share}"
            way = f"call {call}(..., anyway=True)" if call else ""
            raise DoesNotFit("workload.micro_batch", reason, "").with_way_out(way)


def curve(spec: Spec, target: Target) -> tuple[list[Plan], str]:
    """Plans for 1 to 4,096 ranks with the same work per rank, and a sentence about the bottleneck along the curve."""
    plans = scaling(spec, shape_of(spec), target.whole_host(spec.world_size), sorted({*CURVE, spec.world_size}))
    return [replace(p, training=target.training) for p in plans], limit(plans)


def searched(spec: Spec, target: Target, *, limit_bytes: int | None = None) -> Search:
    """The fastest Strategies that fit. Raises FieldError as `planned`."""
    found = search(spec, shape_of(spec), target.machine(spec.world_size), limit_bytes=limit_bytes)
    top = (replace(one, plan=replace(one.plan, training=target.training)) for one in found.top)
    return replace(found, top=tuple(top))


def largest_model(spec: Spec, target: Target, *, limit_bytes: int | None = None) -> ModelShape | None:
    """The largest preset of the model's family that fits; None if not one does. Raises FieldError as `planned`, and for a
    model that is no preset."""
    of = PRESETS.get(spec.workload.model) if isinstance(spec.workload.model, str) else None
    if of is None:
        reason = "the largest model is sought among those of a preset's family"
        raise SpecError("workload.model", reason, "name a preset, such as llama-7b")
    machine = target.machine(spec.world_size)
    for one in sorted(PRESETS.values(), key=lambda preset: -preset.parameters):
        if one.family == of.family:
            found = spec.replace(model=one.name)
            if fits_somehow(found, shape := shape_of(found), machine.limited(limit_bytes)):
                return shape
    return None


def fewest_ranks(
    spec: Spec, target: Target, *, global_batch: int | None = None, limit_bytes: int | None = None
) -> Machine | None:
    """The smallest machine on which the model fits, with so many samples a step; None: each rank has the work that it has in
    the Spec, so the batch grows with the ranks. Raises FieldError as `planned`."""
    return fewest(spec, shape_of(spec), target.whole_host(spec.world_size).limited(limit_bytes), global_batch)


def cheapest(
    spec: Spec,
    targets: Sequence[Target],
    *,
    ranks: Sequence[int] = CURVE,
    global_batch: int | None = None,
    limit_bytes: int | None = None,
    limit_s: float = math.inf,
) -> list[Plan]:
    """The fastest strategy that fits on each of these numbers of ranks of each target, the cheapest training first; without
    prices, that of the fewest GPU hours. A plan that may not fit counts as dearer by as much. Those that take longer than
    `limit_s` are left out. `global_batch`: as for `fewest_ranks`. Raises FieldError as `planned`."""
    shape, found = shape_of(spec), list[Plan]()
    for target in targets:
        whole = target.whole_host(max(ranks))
        for one in [on_ranks(spec, n, global_batch) for n in ranks if whole.allows(n)]:
            if one is not None:
                best = search(one, shape, whole.with_ranks(one.world_size), limit_bytes=limit_bytes).top[:1]
                found += [replace(candidate.plan, training=target.training) for candidate in best]
    name = "cost" if all("cost" in p.bill for p in found) else "gpu_hours"
    quick = [p for p in found if p.bill["training_s"][0] <= limit_s]
    return sorted(quick, key=lambda p: p.bill[name][0] / p.fits_probability)


def shape_of(spec: Spec) -> ModelShape:
    """The model of a Spec in its units. Raises SpecError for a workload that cannot run, and for an engine of the user's,
    of which nothing can be predicted."""
    w = spec.workload
    if spec.strategy.is_yours:
        reason = "what your own engine takes cannot be predicted, only measured"
        hint = "plan the same sharding with backend lab or fsdp2"
        raise SpecError("strategy.backend", reason, hint, {"backend": "lab"})
    if spec.world_size > MOST_RANKS:
        raise SpecError("world_size", f"{spec.world_size:,} ranks are refused", f"give {MOST_RANKS:,} or fewer")
    if w.seq_len * w.micro_batch > MOST_TOKENS:
        reason = f"{w.micro_batch:,} samples of {w.seq_len:,} tokens are refused"
        raise SpecError("workload.micro_batch", reason, f"give a micro-batch of {MOST_TOKENS:,} tokens or fewer")
    if w.is_own:
        return shape_of_workload(w, spec.strategy.wrap)
    facts = model_facts(w.model)
    check_shapes(spec.replace(data="stdlib" if facts.is_text else "images").workload, facts)
    return shape_of_workload(w, spec.strategy.wrap)
