"""`planned`: a Spec on hardware that need not be here, predicted. It finds the model's shape and the machine, and asks the
planner (`fsdp_lab.planner`), which knows neither models by name nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp_lab.core.errors import ArgumentError, SpecError
from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.core.spec import Spec
from fsdp_lab.models.check import check_shapes
from fsdp_lab.models.facts import facts_of
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.calibration import Calibration
from fsdp_lab.planner.devices import Device, Machine, machine
from fsdp_lab.planner.memory import MemoryPlan, memory
from fsdp_lab.planner.plan import Plan, limit, plan, scaling
from fsdp_lab.planner.rates import PUBLISHED, Rates
from fsdp_lab.planner.search import Search, fewest, largest, search
from fsdp_lab.planner.shapes.presets import shape_for
from fsdp_lab.planner.shapes.rewrapping import deepened

MOST_RANKS = 1 << 17
MOST_TOKENS = 1 << 27  # of one micro-batch
PER_HOST = 8  # devices that a host usually has
CURVE = tuple(1 << i for i in range(13))  # 1 to 4,096 ranks


@dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware in words: a device, its hosts or how many it shares one with, the network of each. None: what is usual, and
    said in `Plan.assumed`."""

    hardware: str | Device
    hosts: int | None = None
    per_host: int | None = None  # devices; where `hosts` is None
    network_gbit_per_s: float | None = None

    def machine(self, ranks: int) -> Machine:
        """Raises ArgumentError: an unknown device, ranks that the hosts do not divide, a rate that cannot be."""
        found = machine(self.hardware, ranks, hosts=self.hosts, network_gbit_per_s=self.network_gbit_per_s)
        if self.per_host is None or self.hosts is not None:
            return found
        if self.per_host < 1 or (ranks > self.per_host and ranks % self.per_host):
            nearest = min(
                (n for n in range(1, ranks + 1) if ranks % n == 0), key=lambda n: abs(n - (self.per_host or 0))
            )
            raise ArgumentError("per_host", f"{ranks} GPUs cannot be divided among hosts of {self.per_host}",
                            f"use {nearest}", {"per_host": nearest})  # fmt: skip
        said = {name: words for name, words in found.assumed.items() if name not in ("hosts", "network")}
        if self.network_gbit_per_s is None and ranks > self.per_host:
            said["network"] = f"{found.network_bytes_per_s * 8 / 1e9:.0f} Gb/s a host"
        return replace(found, per_host=min(self.per_host, ranks), assumed=said)

    def whole_host(self, ranks: int) -> Machine:
        """As `machine`; but fewer ranks than a host has are a part of one, and not all of a smaller one."""
        return self.machine(ranks if self.hosts is not None else max(ranks, self.per_host or PER_HOST))


def planned(spec: Spec, where: Target, rates: Rates = PUBLISHED) -> Plan:
    """Predicts one step.

    Raises:
        FieldError: a model that nothing is known of, a sequence longer than it takes, hardware that is unknown or does not
            have as many ranks, numbers beyond all reason.
    """
    shape = shape_of(spec)
    return plan(spec, shape, where.machine(spec.world_size), rates=rates)


def planned_here(spec: Spec, here: Calibration) -> Plan:
    """Predicts one step of the ranks that were calibrated.

    Raises:
        FieldError: another number of ranks, and what `planned` raises.
    """
    if spec.world_size != here.ranks:
        raise SpecError("world_size", f"{here.ranks} ranks were calibrated, and the Spec has {spec.world_size}",
                        "calibrate again with as many, or name hardware")  # fmt: skip
    return plan(spec, shape_of(spec), here.machine, rates=here.rates)


def planned_memory(spec: Spec, *, device: str) -> MemoryPlan:
    """Of a rank, by class; `device` is "cpu" or "cuda". It needs no rates, so it can be had of any machine."""
    return memory(spec, shape_of(spec), device=device)


def curve(spec: Spec, where: Target, rates: Rates = PUBLISHED) -> tuple[list[Plan], str]:
    """The same work of each rank on 1 to 4,096 of them, and what binds along the curve, in a sentence."""
    shape, there = shape_of(spec), where.whole_host(spec.world_size)
    ranks = sorted({*CURVE, spec.world_size})
    plans = scaling(spec, shape, there, ranks, rates=rates)
    return plans, limit(plans)


def searched(spec: Spec, where: Target, *, limit_bytes: int | None = None, rates: Rates = PUBLISHED) -> Search:
    """The Strategies that make a step shortest, of those that fit. Raises FieldError as `planned` does."""
    return search(spec, shape_of(spec), where.machine(spec.world_size), limit_bytes=limit_bytes, rates=rates)


def largest_model(spec: Spec, where: Target, *, limit_bytes: int | None = None) -> ModelShape | None:
    """With as many more, or fewer, blocks of the Spec's model as fit. Raises FieldError as `planned` does."""
    base = shape_of(spec.replace(wrap="block"))
    grown = partial(deepened, base)
    return largest(spec.replace(wrap="block"), grown, where.machine(spec.world_size), limit_bytes=limit_bytes)


def fewest_ranks(spec: Spec, where: Target, *, limit_bytes: int | None = None) -> Machine | None:
    """On which the model fits at the Spec's global batch. Raises FieldError as `planned` does."""
    return fewest(spec, shape_of(spec), where.machine(spec.world_size), limit_bytes=limit_bytes)


def shape_of(spec: Spec) -> ModelShape:
    """The model of a Spec in its units, after a look at what nothing could run. Raises SpecError."""
    w = spec.workload
    if spec.world_size > MOST_RANKS:
        raise SpecError("world_size", f"{spec.world_size:,} ranks are refused", f"give {MOST_RANKS:,} or fewer")
    if w.seq_len * w.micro_batch > MOST_TOKENS:
        raise SpecError("workload.micro_batch", f"{w.micro_batch:,} samples of {w.seq_len:,} tokens are refused",
                        f"give a micro-batch of {MOST_TOKENS:,} tokens or fewer")  # fmt: skip
    facts = facts_of(_config(w.model))
    check_shapes(spec.replace(data="stdlib" if facts.is_text else "images").workload, facts)
    return shape_for(w.model, spec.strategy.wrap)


def _config(model: str | Mapping[str, Any]) -> Any:
    preset = PRESETS.get(model) if isinstance(model, str) else None
    if preset is not None:
        return preset.config
    from fsdp_lab.models.configs import resolve  # only here: it needs transformers

    return resolve(model)
