"""What a Spec needs before anything is built: `Preparation` (data, FLOPs, checks) and `LinkEmulation` (its emulated link).

Either all ranks refuse a Spec, or none does.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig

from fsdp_lab.backends import check
from fsdp_lab.backends.base import DTYPES
from fsdp_lab.backends.state import Values, gather_json
from fsdp_lab.backends.wrapping import recomputed
from fsdp_lab.base.errors import FieldError, SpecError
from fsdp_lab.base.events import Carrier
from fsdp_lab.base.hang import LongWork
from fsdp_lab.engine import ShardMesh
from fsdp_lab.models import (
    Batches,
    BestPeak,
    Flops,
    Pretrained,
    Weights,
    build_skeleton,
    count_flops,
    device_peak,
    initial_values,
    resolve,
    weights_folder,
)
from fsdp_lab.models.batches import SOURCE_FIELDS
from fsdp_lab.models.cache import Progresses
from fsdp_lab.models.flops import Peak
from fsdp_lab.models.lora import AdaptedValues, adapted
from fsdp_lab.models.own import OwnCost, OwnModel, OwnSource, signature
from fsdp_lab.models.presets import CACHE_ALWAYS, facts_of
from fsdp_lab.rank.heartbeat import LongWorkLog
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.trainer import StepCost
from fsdp_lab.spec.link import LinkError, LinkSpec, format_latency, format_rate
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import Link, Wire

Require = Callable[[Spec, Batches], object]  # raises FieldError of what is to be trained


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """A Spec that is ready to be built."""

    spec: Spec
    skeleton: nn.Module
    batches: Batches
    cost: StepCost
    weights: Weights | None = None  # to begin with; None: random values, or it continues

    def initial(self, check: Callable[[], object]) -> Values:
        """The initial values; call it before the skeleton is wrapped. `check` is called between pieces of them."""
        w = self.spec.workload
        if w.is_own:
            return OwnModel(w).initial(self.skeleton)
        if w.lora is None:
            return initial_values(self.skeleton, w, self.weights, check)
        base = build_skeleton(resolve(w.model))
        return AdaptedValues(initial_values(base, w, self.weights, check), self.skeleton, w.seed, check)


class Preparation:
    """Prepares Specs, and caches what is slow to find: the device's peaks, and the FLOPs of a sample."""

    def __init__(self, info: RankInfo, work: LongWorkLog, check: Callable[[], None]) -> None:
        """`check`: raises after an abort; called while another rank makes this one's data."""
        self._info, self._work = info, work
        self._progress = Progresses(made=partial(work.renew, LongWork.TOKENISE),
                                    awaited=partial(work.renew, LongWork.AWAIT_TOKENS), check=check)  # fmt: skip
        self._peaks: dict[torch.dtype, BestPeak] = {}
        self._flops: dict[str, Flops] = {}
        self.own_costs: dict[str, OwnCost] = {}

    def prepare(self, spec: Spec, before: tuple[Spec, Batches] | None, *,
                require: Require = lambda spec, batches: None, begins: bool = False) -> PreparedTraining:  # fmt: skip
        """Check a Spec and read its data; collective. If one rank refuses, all raise SpecError, and nothing has changed.

        `before`: the training until now, whose data is not read again if it is the same. `require`: raises FieldError
        of a Spec with data that do not suffice. `begins`: from initial values, so that its weights are checked too,
        without reading all values.
        """
        error, prepared, mine = None, None, None
        dtype = DTYPES[spec.strategy.dtypes.param]
        try:
            with self._work.during(LongWork.READ):
                mine = self.peak(dtype)
                prepared = self._prepare_local(spec, before, mine, begins=begins)
                require(spec, prepared.batches)
        except FieldError as e:
            error = e
        data = prepared.batches.source.fingerprint if prepared else ""
        files = prepared.weights.fingerprint if prepared and prepared.weights else ""
        built = signature(prepared.skeleton) if prepared and spec.workload.is_own else ""
        by_rank = gather_json((error and error.to_dict(), data, files, mine and mine.given, built))
        for refusal, *_ in by_rank:
            if refusal is not None:
                raise FieldError.from_dict(refusal)
        assert prepared is not None and mine is not None
        self._check_same([f for _, f, *_ in by_rank], "data", f"data from {spec.workload.data!r}")
        self._check_same([f for _, _, f, *_ in by_rank], "weights", "files of weights")
        self._check_same_module([b for *_, b in by_rank])
        common = self._common_peak([p and Peak(*p) for *_, p, _ in by_rank], mine.given)
        peak = self._peaks[dtype] = mine if mine.given == common else BestPeak(common)
        return dataclasses.replace(prepared, cost=dataclasses.replace(prepared.cost, peak=peak))

    def peak(self, dtype: torch.dtype) -> BestPeak:
        """The device's, as its MFU is relative to."""
        return self._peaks.get(dtype) or BestPeak(device_peak(self._info.device, dtype))

    def _prepare_local(self, spec: Spec, before: tuple[Spec, Batches] | None, peak: BestPeak, *,
                       begins: bool) -> PreparedTraining:  # fmt: skip
        """All checks that need no other rank."""
        if spec.world_size != self._info.world_size:
            raise SpecError("world_size", f"the Spec needs {spec.world_size} ranks and there are {self._info.world_size}",
                            "start as many ranks")  # fmt: skip
        if spec.workload.is_own:
            return self._prepare_own(spec, before, peak)
        config = resolve(spec.workload.model, dropout=spec.workload.dropout)
        source = None
        if before is not None and not set(before[0].difference(spec)) & set(SOURCE_FIELDS):
            source = before[1].source
        batches = Batches(spec.workload, config, rank=self._info.rank, world_size=self._info.world_size, source=source,
                          progress=self._progress)  # fmt: skip
        w, flops = spec.workload, self._sample(spec)
        _check_unused(flops.unused, spec, "freeze it")
        samples = w.micro_batch * w.accumulate
        cost = StepCost(
            flops=samples * flops.model,
            recompute_flops=samples * flops.recompute,
            tokens=samples * facts_of(config).tokens_per_sample(w.seq_len),
            peak=peak,
        )
        skeleton = adapted(config, w.adapters)
        check(skeleton, spec, self._info.device)
        weights = self._weights(spec, skeleton, config) if begins else None
        return PreparedTraining(spec=spec, skeleton=skeleton, batches=batches, cost=cost, weights=weights)

    def _weights(self, spec: Spec, skeleton: nn.Module, config: PreTrainedConfig) -> Weights | None:
        """The weights that it begins with, if they fit. The ranks share the comparison of what a file has twice."""
        if (folder := weights_folder(spec.workload)) is None:
            return None
        weights = Weights(folder)
        plain = skeleton if spec.workload.adapters is None else build_skeleton(config)
        Pretrained(plain, spec.workload, weights).check_ties(self._info.rank, self._info.world_size)
        return weights

    def _prepare_own(self, spec: Spec, before: tuple[Spec, Batches] | None, peak: BestPeak) -> PreparedTraining:
        """The same for the user's own code."""
        w, own = spec.workload, OwnModel(spec.workload)
        skeleton = own.skeleton()
        check(skeleton, spec, self._info.device)
        source = before[1].source if before is not None else None
        if not isinstance(source, OwnSource) or not source.is_of(w):
            source = OwnSource(w)
        batches = Batches(w, None, rank=self._info.rank, world_size=self._info.world_size, source=source)
        key = json.dumps(
            [_plain(w.model), _plain(w.loss), source.fingerprint, w.micro_batch, spec.strategy.recompute, w.freeze]
        )
        if key not in self.own_costs:
            self.own_costs[key] = own.cost(source, lambda model: recomputed(model, spec.strategy))
        found = self.own_costs[key]
        _check_unused(found.unused, spec, "set its requires_grad to False")
        cost = StepCost(
            flops=w.accumulate * found.flops.model,
            recompute_flops=w.accumulate * found.flops.recompute,
            tokens=w.accumulate * w.micro_batch,  # samples: what a token is, only the user knows
            peak=peak,
        )
        return PreparedTraining(spec=spec, skeleton=skeleton, batches=batches, cost=cost)

    def _sample(self, spec: Spec) -> Flops:
        w, s = spec.workload, spec.strategy
        lora = w.adapters and dataclasses.asdict(w.adapters)
        key = json.dumps([spec.to_dict()["workload"]["model"], w.seq_len, s.recompute, w.freeze, lora], sort_keys=True)
        if key not in self._flops:
            config = resolve(w.model)
            if s.recompute != "none" and config.model_type in CACHE_ALWAYS:
                reason = (
                    f"{config.model_type} keeps keys and values in every forward, and adds them twice when recomputed"
                )
                raise SpecError("strategy.recompute", reason, "use none", {"recompute": "none"})
            self._flops[key] = count_flops(config, w.seq_len, lambda model: recomputed(model, s), w.freeze,
                                           w.adapters)  # fmt: skip
        return self._flops[key]

    def _common_peak(self, peaks: list[Peak | None], mine: Peak) -> Peak:
        """A measured CPU peak is the best of all ranks, so that MFU has one scale."""
        if self._info.device.type == "cuda":
            return mine
        return max((p for p in peaks if p is not None), key=lambda p: p.flops_per_s or 0.0)

    def _check_same(self, fingerprints: list[str], field: str, what: str) -> None:
        other = next((rank for rank, f in enumerate(fingerprints) if f != fingerprints[0]), None)
        if other is not None:
            raise SpecError(f"workload.{field}", f"rank {other} and rank 0 read different {what}",
                            "give a path with the same files on every machine")  # fmt: skip

    def _check_same_module(self, built: list[str]) -> None:
        other = next((rank for rank, b in enumerate(built) if b != built[0]), None)
        if other is not None:
            raise SpecError("workload.model", f"rank {other} and rank 0 built modules with other parameters",
                            "make their names and shapes depend on nothing random and on no file")  # fmt: skip


def _check_unused(unused: Sequence[str], spec: Spec, instead: str) -> None:
    """DDP waits for every parameter's gradient. FSDP2 reduces those that a rank has, which must be the same on all."""
    traits, experts = spec.strategy.traits, [name for name in unused if ".experts." in name]
    if traits.reduces_own and experts and spec.world_size > 1:
        raise SpecError("strategy.backend", f"FSDP2 reduces only the gradients that a rank has, and fails where ranks "
                        f"use different experts, such as {experts[0]}",
                        "use another backend", {"backend": "lab"})  # fmt: skip
    if unused and traits.needs_gradients:
        raise SpecError("strategy.backend", f"DDP needs a gradient for every parameter, and the loss gives none to "
                        f"{unused[0]} in every batch", f"use another backend, or {instead}", {"backend": "lab"})  # fmt: skip


def _plain(value: Any) -> Any:
    """Of code, what is the same in every process."""
    return value if isinstance(value, str) else value["digest"]


# -- the emulated link -----------------------------------------------------------------------------------------------


_PROBE_BYTES = 4 << 20  # of an all-gather's output, through the host
_PROBES = 7
_ON_DEVICE_BYTES = (1 << 20, 1 << 23, 1 << 26, 1 << 29)  # over NCCL: by 4 MiB NVLink has not come near to its speed
_BACK_TO_BACK = 8
LONGEST_S = 0.3  # of a collective: on a slow network no larger one is measured, since seconds are in proportion there
_INSTEAD = "100 Gb/s of h100"  # proposed instead of a link that is too fast


@dataclass(frozen=True, kw_only=True)
class EmulatedLink:
    """The link of collectives in training steps, which is the real one if `link` is None."""

    link: Link | None = None
    notes: tuple[str, ...] = ()  # on the effect on timings


class LinkEmulation:
    """Scales links, and caches the speed of the real wire, which is measured once between the same ranks."""

    def __init__(self, info: RankInfo) -> None:
        self._info = info
        self._bytes_per_s: dict[frozenset[int], float] = {}

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
        real = (f"The wire: {world.context.host_carrier}, {format_rate(wire)} a rank.",) if world.size() > 1 else ()
        return EmulatedLink(link=link, notes=(*real, _note(wanted, link, scale, dtype)))

    def measure(self, world: Wire) -> float:
        """Bytes/s of this rank's link, measured at the first call, which is collective; infinite for one rank."""
        if world.ranks not in self._bytes_per_s:
            self._bytes_per_s[world.ranks] = measured_speed(world, self._info.device)
        return self._bytes_per_s[world.ranks]

    def carriers(self, mesh: DeviceMesh) -> Callable[[], tuple[Carrier, ...]]:
        """Returns what says what the collectives of a training go over. That is collective; the first time it measures."""
        sharded = ShardMesh.of(mesh)  # which keeps no group

        def measured() -> tuple[Carrier, ...]:
            groups = {"shards": sharded.shard_group, "replicas": sharded.replicate_group}
            wires = {name: group for name, group in groups.items() if isinstance(group, Wire)}
            return tuple(
                Carrier(between=name if len(wires) > 1 else "ranks", name=w.carrier, bytes_per_s=self.measure(w))
                for name, w in wires.items()
            )

        return measured

    def _minimum(self, *values: float) -> list[float]:
        """The minimum of each value over the ranks."""
        reduced = torch.tensor(values, dtype=torch.float64)
        if self._info.world_size > 1:
            dist.all_reduce(reduced, op=dist.ReduceOp.MIN)
        minimum: list[float] = reduced.tolist()
        return minimum


def measured_speed(world: Wire, device: torch.device) -> float:
    """Bytes/s over one rank's link, in one direction: of large all-gathers over the real wire, infinite for one rank.
    Through the host it is the median of some, over NCCL the highest of `measured_bandwidths`. Collective."""
    if world.size() == 1:
        return math.inf
    if is_over_nccl(world, device):
        return max(measured_bandwidths(world, device).values())
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


def measured_bandwidths(world: Wire, device: torch.device) -> dict[int, float]:
    """Bus bandwidth of all-gathers over NCCL by the bytes of their output: (W-1)/W of these over the time, in bytes/s (as
    nccl-tests, doc/PERFORMANCE.md). Sizes end where one takes long, or much of the memory that any rank has. Collective."""
    found: dict[int, float] = {}
    for nbytes in _ON_DEVICE_BYTES:
        part = torch.zeros(nbytes // 4 // world.size(), device=device)
        whole = torch.empty(part.numel() * world.size(), device=device)
        seconds = seconds_on_device(world, partial(world.all_gather_single, whole, part), _BACK_TO_BACK)
        found[nbytes] = (whole.nbytes - part.nbytes) / seconds
        del part, whole
        if not is_next_measured(world, device, seconds, nbytes, _ON_DEVICE_BYTES[1] // _ON_DEVICE_BYTES[0]):
            break
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the largest took much
    return found


def is_over_nccl(world: Wire, device: torch.device) -> bool:
    nccl = world.context.nccl
    return nccl is not None and nccl.carries(torch.empty(1, device=device))


def seconds_on_device(world: Wire, issue: Callable[[], Any], times: int) -> float:
    """Seconds of one of some collectives over NCCL, by the device's clock and back to back, so that what the host takes to
    issue and to wake up is in none of a size that matters. Collective."""
    nccl = world.context.nccl
    assert nccl is not None
    issue().wait()  # opens connections
    before = nccl.record()
    for _ in range(times):
        issue().wait()
    after = nccl.record()
    nccl.synchronize()
    return float(before.elapsed_time(after)) / 1e3 / times


def is_next_measured(world: Wire, device: torch.device, seconds: float, nbytes: int, times: int) -> bool:
    """Whether a collective `times` as large as the last one is measured: the same on all ranks. Collective."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    votes = torch.tensor([times * seconds > LONGEST_S or 4 * times * nbytes > free_bytes], dtype=torch.float64)
    world.control(votes)
    return not votes.item()


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
