"""What a Spec needs before anything is built: `Preparation` (data, FLOPs, checks) and `LinkEmulation` (its emulated link).

Either all ranks refuse a Spec, or none does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from fsdp_lab.backends import check
from fsdp_lab.backends.base import DTYPES
from fsdp_lab.backends.state import gather_json
from fsdp_lab.backends.wrapping import recomputed
from fsdp_lab.core.errors import FieldError, SpecError
from fsdp_lab.core.hang import LongWork
from fsdp_lab.core.link import LinkError, LinkSpec, format_latency, format_rate
from fsdp_lab.core.spec import Spec
from fsdp_lab.models import Batches, BestPeak, Flops, build_skeleton, count_flops, device_peak, resolve
from fsdp_lab.models.flops import Peak
from fsdp_lab.models.presets import facts_of
from fsdp_lab.rank.heartbeat import LongWorkLog
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.trainer import StepCost
from fsdp_lab.wire import Link, Wire


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """A Spec that is ready to be built."""

    spec: Spec
    skeleton: nn.Module
    batches: Batches
    cost: StepCost


class Preparation:
    """Prepares Specs, and caches what is slow to find: the device's peaks, and the FLOPs of a sample."""

    def __init__(self, info: RankInfo, work: LongWorkLog) -> None:
        self._info, self._work = info, work
        self._peaks: dict[torch.dtype, BestPeak] = {}
        self._flops: dict[str, Flops] = {}

    def prepare(self, spec: Spec, before: tuple[Spec, Batches] | None, evaluated: int = 0) -> PreparedTraining:
        """Check a Spec and read its data; collective. If one rank refuses, all raise SpecError, and nothing has changed.

        `before`: the training until now, whose data is not read again if it is the same. `evaluated`: how many samples
        must be held out.
        """
        error, prepared, mine = None, None, None
        dtype = DTYPES[spec.strategy.dtypes.param]
        try:
            with self._work.during(LongWork.READ):
                mine = self._peaks.get(dtype) or BestPeak(device_peak(self._info.device, dtype))
                prepared = self._prepare_local(spec, before, mine)
                prepared.batches.check_held_out(evaluated)
        except FieldError as e:
            error = e
        fingerprint = prepared.batches.source.fingerprint if prepared else ""
        by_rank = gather_json((error and error.to_dict(), fingerprint, mine and mine.given))
        for refusal, _, _ in by_rank:
            if refusal is not None:
                raise FieldError.from_dict(refusal)
        assert prepared is not None and mine is not None
        self._check_same_text([f for _, f, _ in by_rank], spec)
        common = self._common_peak([p and Peak(*p) for _, _, p in by_rank], mine.given)
        peak = self._peaks[dtype] = mine if mine.given == common else BestPeak(common)
        return dataclasses.replace(prepared, cost=dataclasses.replace(prepared.cost, peak=peak))

    def _prepare_local(self, spec: Spec, before: tuple[Spec, Batches] | None, peak: BestPeak) -> PreparedTraining:
        """All checks that need no other rank."""
        if spec.world_size != self._info.world_size:
            raise SpecError("world_size", f"the Spec needs {spec.world_size} ranks and there are {self._info.world_size}",
                            "start as many ranks")  # fmt: skip
        config = resolve(spec.workload.model)
        source = None
        if before is not None and not set(before[0].difference(spec)) & {"data", "seq_len", "seed", "model"}:
            source = before[1].source
        batches = Batches(spec.workload, config, rank=self._info.rank, world_size=self._info.world_size, source=source)
        w, flops = spec.workload, self._sample(spec, config)
        samples = w.micro_batch * w.accumulate
        cost = StepCost(
            flops=samples * flops.model,
            recompute_flops=samples * flops.recompute,
            tokens=samples * facts_of(config).tokens_per_sample(w.seq_len),
            peak=peak,
        )
        skeleton = build_skeleton(config)
        check(skeleton, spec, self._info.device)
        return PreparedTraining(spec=spec, skeleton=skeleton, batches=batches, cost=cost)

    def _sample(self, spec: Spec, config: Any) -> Flops:
        w, s = spec.workload, spec.strategy
        key = json.dumps([spec.to_dict()["workload"]["model"], w.seq_len, s.recompute], sort_keys=True)
        if key not in self._flops:
            self._flops[key] = count_flops(config, w.seq_len, lambda model: recomputed(model, s))
        return self._flops[key]

    def _common_peak(self, peaks: list[Peak | None], mine: Peak) -> Peak:
        """A measured CPU peak is the best of all ranks, so that MFU has one scale."""
        if self._info.device.type == "cuda":
            return mine
        return max((p for p in peaks if p is not None), key=lambda p: p.flops_per_s or 0.0)

    def _check_same_text(self, fingerprints: list[str], spec: Spec) -> None:
        other = next((rank for rank, f in enumerate(fingerprints) if f != fingerprints[0]), None)
        if other is not None:
            raise SpecError("workload.data", f"rank {other} and rank 0 read different texts from {spec.workload.data!r}",
                            "give a path with the same files on every machine")  # fmt: skip


# -- the emulated link -----------------------------------------------------------------------------------------------


_PROBE_BYTES = 4 << 20  # of an all-gather's output
_PROBES = 7
_INSTEAD = "100 Gb/s of h100"  # proposed instead of a link that is too fast


@dataclass(frozen=True, kw_only=True)
class EmulatedLink:
    """The link of collectives in training steps, which is the real one if `link` is None."""

    link: Link | None = None
    notes: tuple[str, ...] = ()  # on the effect on timings


class LinkEmulation:
    """Scales links, and caches the speed of the real wire, which is measured for the first Spec with a link."""

    def __init__(self, info: RankInfo) -> None:
        self._info = info
        self._wire_bytes_per_s: float | None = None

    def of(self, spec: Spec, peak_flops_per_s: float | None, world: Wire) -> EmulatedLink:
        """The emulated link of a Spec; collective. Raises SpecError on every rank for a link that is faster than the wire,
        or cannot be scaled here, and over NCCL. `peak_flops_per_s`: of this rank in the Spec's compute dtype, None if
        unknown."""
        if spec.link is None:
            return EmulatedLink()
        if world.context.nccl is not None:
            raise _over_nccl()
        wanted, dtype = LinkSpec.parse(spec.link), spec.strategy.dtypes.param
        compute, wire = self._minimum(peak_flops_per_s or 0.0, self.measure(world))
        try:
            scale = wanted.scale(compute, dtype)
        except LinkError as e:
            raise SpecError("link", e.reason, e.hint, {"link": None}) from None
        bytes_per_s = wanted.bytes_per_s * scale
        if bytes_per_s > wire:
            raise _too_fast(wanted, bytes_per_s, wire)
        link = Link(bytes_per_s=bytes_per_s, latency_s=wanted.latency_s)
        return EmulatedLink(link=link, notes=(_note(wanted, link, scale, dtype),))

    def measure(self, world: Wire) -> float:
        """Bytes/s of this rank's link, measured at the first call, which is collective; infinite for one rank."""
        if self._wire_bytes_per_s is None:
            self._wire_bytes_per_s = measured_speed(world, self._info.device)
        return self._wire_bytes_per_s

    def _minimum(self, *values: float) -> list[float]:
        """The minimum of each value over the ranks."""
        reduced = torch.tensor(values, dtype=torch.float64)
        if self._info.world_size > 1:
            dist.all_reduce(reduced, op=dist.ReduceOp.MIN)
        minimum: list[float] = reduced.tolist()
        return minimum


def measured_speed(world: Wire, device: torch.device) -> float:
    """Bytes/s over one rank's link, in one direction: the median of some large all-gathers over the real wire, infinite
    for one rank. Collective."""
    if world.size() == 1:
        return math.inf
    part = torch.zeros(_PROBE_BYTES // 4 // world.size(), device=device)
    whole = torch.empty(part.numel() * world.size(), device=device)
    rates = []
    for _ in range(_PROBES):
        start_s = time.perf_counter()
        world.all_gather_single(whole, part).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rates.append((whole.nbytes - part.nbytes) / (time.perf_counter() - start_s))
    return statistics.median(rates[1:])  # the first opens connections


def _over_nccl() -> SpecError:
    reason = ("these collectives go over NCCL, on the GPUs' own streams: a link that the host emulates would hold the "
              "host up, and what overlaps without it would not")  # fmt: skip
    return SpecError("link", reason, "leave it out, or start ranks that share a GPU or are on a CPU", {"link": None})


def _too_fast(wanted: LinkSpec, bytes_per_s: float, wire: float) -> SpecError:
    faster = f"faster than the wire of these ranks, which moves {format_rate(wire)}"
    if wanted.gpu is None:
        return SpecError("link", f"{wanted.text} is {faster}", "use a slower one, or one of a GPU, which is scaled to "
                         f'what is computed here, such as "{_INSTEAD}"', {"link": _INSTEAD})  # fmt: skip
    return SpecError("link", f"{wanted.text} comes to {format_rate(bytes_per_s)} here, {faster}", "use a slower one",
                     {"link": None})  # fmt: skip


def _note(wanted: LinkSpec, link: Link, scale: float, dtype: str) -> str:
    """A note on how the link was emulated."""
    what = format_rate(link.bytes_per_s) + (f", {format_latency(link.latency_s)} latency" if link.latency_s else "")
    if wanted.gpu is None:
        return f"Emulated link: {what}."
    _, kind = wanted.reference(dtype)
    of = wanted.text.partition(",")[0]
    return f"Emulated link: {what} ({of}, scaled by {scale:.2g}: computing here in {dtype} to its in {kind})."
