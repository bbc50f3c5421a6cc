"""What a Spec needs before anything is built: `Preparation` (data, FLOPs, checks) and `LinkEmulation` (its emulated link).

Either all ranks refuse a Spec, or none does."""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.backends import check
from fsdp_lab.backends.base import DTYPES
from fsdp_lab.backends.state import gather_json
from fsdp_lab.backends.wrapping import recomputed
from fsdp_lab.base.errors import FieldError, SpecError
from fsdp_lab.base.events import Carrier
from fsdp_lab.base.hang import LongWork
from fsdp_lab.engine import ShardMesh
from fsdp_lab.models.batches import SOURCE_FIELDS, Batches
from fsdp_lab.models.build import Values, build_skeleton
from fsdp_lab.models.cache import weights_folder
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.flops import BestPeak, Flops, Peak, count_flops, device_peak
from fsdp_lab.models.lora import AdaptedValues, adapted
from fsdp_lab.models.own import OwnCost, OwnModel, OwnSource, signature
from fsdp_lab.models.presets import CACHE_ALWAYS, facts_of
from fsdp_lab.models.pretrained import Pretrained, initial_values
from fsdp_lab.models.weights import Weights
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
        self._info, self._work, self._check = info, work, check
        self._peaks: dict[torch.dtype, BestPeak] = {}
        self._flops: dict[str, Flops] = {}
        self.own_costs: dict[str, OwnCost] = {}

    def _progress(self, awaits: bool) -> None:
        self._work.renew(LongWork.AWAIT_TOKENS if awaits else LongWork.TOKENISE)
        if awaits:
            self._check()

    def prepare(
        self,
        spec: Spec,
        before: tuple[Spec, Batches] | None,
        *,
        require: Require = lambda spec, batches: None,
        begins: bool = False,
    ) -> PreparedTraining:
        """Check a Spec and read its data; collective. If one rank refuses, all raise SpecError, and nothing has changed.

        `before`: the training until now, whose data is not read again if it is the same. `require`: raises FieldError
        of a Spec with data that do not suffice. `begins`: from initial values, so that its weights are checked too,
        without reading all values."""
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
        _, datas, weights, peaks, modules = zip(*by_rank, strict=True)
        same_files = "give a path with the same files on every machine"
        fixed = "make their names and shapes depend on nothing random and on no file"
        read = (
            ("data", datas, f"read different data from {spec.workload.data!r}", same_files),
            ("weights", weights, "read different files of weights", same_files),
            ("model", modules, "built modules with other parameters", fixed),
        )
        for field, fingerprints, differ, hint in read:
            other = next((rank for rank, f in enumerate(fingerprints) if f != fingerprints[0]), None)
            if other is not None:
                raise SpecError(f"workload.{field}", f"rank {other} and rank 0 {differ}", hint)
        common = mine.given
        if self._info.device.type != "cuda":  # a measured CPU peak is the best of all ranks, so that MFU has one scale
            common = max((Peak(*p) for p in peaks if p is not None), key=lambda p: p.flops_per_s or 0.0)
        peak = self._peaks[dtype] = mine if mine.given == common else BestPeak(common)
        return dataclasses.replace(prepared, cost=dataclasses.replace(prepared.cost, peak=peak))

    def peak(self, dtype: torch.dtype) -> BestPeak:
        """The device's, as its MFU is relative to."""
        return self._peaks.get(dtype) or BestPeak(device_peak(self._info.device, dtype))

    def _prepare_local(
        self, spec: Spec, before: tuple[Spec, Batches] | None, peak: BestPeak, *, begins: bool
    ) -> PreparedTraining:
        """Makes all checks that need no other rank."""
        if spec.world_size != self._info.world_size:
            reason = f"the Spec needs {spec.world_size} ranks and there are {self._info.world_size}"
            raise SpecError("world_size", reason, "start as many ranks")
        if spec.workload.is_own:
            return self._prepare_own(spec, before, peak)
        config = resolve(spec.workload.model, dropout=spec.workload.dropout)
        source = None
        if before is not None and not set(before[0].difference(spec)) & set(SOURCE_FIELDS):
            source = before[1].source
        rank, world_size = self._info.rank, self._info.world_size
        given: dict[str, Any] = {"rank": rank, "world_size": world_size, "source": source, "progress": self._progress}
        batches = Batches(spec.workload, config, **given)
        w, flops = spec.workload, self._sample(spec)
        _check_unused(flops.unused, spec, "freeze it")
        samples = spec.rank_samples
        cost = StepCost(
            flops=samples * flops.model,
            recompute_flops=samples * flops.recompute,
            tokens=samples * facts_of(config).tokens_per_sample(w.seq_len),
            peak=peak,
        )
        skeleton = adapted(config, w.adapters)
        check(skeleton, spec, self._info.device)
        weights = None
        if begins and (folder := weights_folder(w)) is not None:
            weights = Weights(folder)  # the ranks share the comparison of what a file has twice
            plain = skeleton if w.adapters is None else build_skeleton(config)
            Pretrained(plain, w, weights).check_ties(rank, world_size)
        return PreparedTraining(spec=spec, skeleton=skeleton, batches=batches, cost=cost, weights=weights)

    def _prepare_own(self, spec: Spec, before: tuple[Spec, Batches] | None, peak: BestPeak) -> PreparedTraining:
        """The same for the user's own code."""
        w, own = spec.workload, OwnModel(spec.workload)
        skeleton = own.skeleton()
        check(skeleton, spec, self._info.device)
        source = before[1].source if before is not None else None
        if not isinstance(source, OwnSource) or not source.is_of(w):
            source = OwnSource(w)
        batches = Batches(w, None, rank=self._info.rank, world_size=self._info.world_size, source=source)
        given: tuple[Any, Any] = (w.model, w.loss)
        code = [c if isinstance(c, str) else c["digest"] for c in given]  # the same in every process
        key = json.dumps([*code, source.fingerprint, w.micro_batch, spec.strategy.recompute, w.freeze])
        if key not in self.own_costs:
            self.own_costs[key] = own.cost(source, lambda model: recomputed(model, spec.strategy))
        own_cost = self.own_costs[key]
        _check_unused(own_cost.unused, spec, "set its requires_grad to False")
        cost = StepCost(
            flops=w.accumulate * own_cost.flops.model,
            recompute_flops=w.accumulate * own_cost.flops.recompute,
            tokens=spec.rank_samples,  # samples: what a token is, only the user knows
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
                keeps = f"{config.model_type} keeps keys and values in every forward"
                reason = f"{keeps}, and adds them twice when recomputed"
                raise SpecError("strategy.recompute", reason, "use none", {"recompute": "none"})
            wrap = partial(recomputed, strategy=s)
            self._flops[key] = count_flops(config, w.seq_len, wrap, w.freeze, w.adapters)
        return self._flops[key]


def _check_unused(unused: Sequence[str], spec: Spec, instead: str) -> None:
    """DDP waits for every parameter's gradient. FSDP2 reduces those that a rank has, which must be the same on all."""
    traits, experts = spec.strategy.traits, [name for name in unused if ".experts." in name]
    if traits.reduces_own and experts and spec.world_size > 1:
        fails = f"fails where ranks use different experts, such as {experts[0]}"
        reason = f"FSDP2 reduces only the gradients that a rank has, and {fails}"
        raise SpecError("strategy.backend", reason, "use another backend", {"backend": "lab"})
    if unused and traits.needs_gradients:
        reason = f"DDP needs a gradient for every parameter, and the loss gives none to {unused[0]} in every batch"
        raise SpecError("strategy.backend", reason, f"use another backend, or {instead}", {"backend": "lab"})


# -- the emulated link -----------------------------------------------------------------------------------------------


_PROBE_BYTES = 4 << 20  # of an all-gather's output, through the host
_PROBES = 7
_ON_DEVICE_BYTES = (1 << 20, 1 << 23, 1 << 26, 1 << 29)  # over NCCL: by 4 MiB NVLink has not come near to its speed
_BACK_TO_BACK = 8
LONGEST_S = 0.3  # of a collective: on a slow network no larger one is measured, since seconds are in proportion there
_INSTEAD = "100 Gb/s of h100"  # proposed instead of a link that is too fast


class LinkEmulation:
    """Scales links, and caches the speed of the real wire, which is measured once between the same ranks.

    Attributes:
        link: of collectives in training steps; None: the real one. notes: on its effect on timings."""

    def __init__(self, info: RankInfo) -> None:
        self._info = info
        self.link: Link | None = None
        self.notes: tuple[str, ...] = ()
        self._bytes_per_s: dict[frozenset[int], float] = {}

    def forget(self) -> None:
        """Measure anew: after an abort some ranks may have measured the link, and others not."""
        self._bytes_per_s.clear()

    def emulate(self, spec: Spec, peak_flops_per_s: float | None, world: Wire) -> None:
        """Make the link of a Spec that of training steps; collective. Raises SpecError on every rank for a link that
        is faster than the wire, or cannot be scaled here, and over NCCL. `peak_flops_per_s`: of this rank in the
        Spec's compute dtype, None if unknown."""
        if spec.link is None:
            self.link, self.notes = None, ()
            return
        if world.context.nccl is not None:
            streams = "these collectives go over NCCL, on the GPUs' own streams"
            effect = "a link that the host emulates would hold the host up, and what overlaps without it would not"
            hint = "leave it out, or start ranks that share a GPU or are on a CPU"
            raise SpecError("link", f"{streams}: {effect}", hint, {"link": None})
        wanted, dtype = LinkSpec.parse(spec.link), spec.strategy.dtypes.param
        least = torch.tensor([peak_flops_per_s or 0.0, self.measure(world)], dtype=torch.float64)
        if self._info.world_size > 1:
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
        compute, wire = least.tolist()
        try:
            scale = wanted.scale(compute, dtype)
        except LinkError as e:
            raise SpecError("link", e.reason, e.hint, {"link": None}) from None
        bytes_per_s = wanted.bytes_per_s * scale
        if bytes_per_s > wire:
            raise _too_fast(wanted, bytes_per_s, wire)
        self.link = Link(bytes_per_s=bytes_per_s, latency_s=wanted.latency_s)
        real = (f"Real link: {world.context.host_carrier}, {format_rate(wire)} a rank.",) if world.size() > 1 else ()
        self.notes = (*real, _note(wanted, self.link, scale, dtype))

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
            if len(wires) == 1:
                wires = {"ranks": next(iter(wires.values()))}
            return tuple(Carrier(between=b, name=w.carrier, bytes_per_s=self.measure(w)) for b, w in wires.items())

        return measured


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
    nccl-tests, doc/PERFORMANCE.md). Collective."""

    def issue(nbytes: int) -> Callable[[], Any]:
        part = torch.zeros(nbytes // 4 // world.size(), device=device)
        whole = torch.empty(part.numel() * world.size(), device=device)
        return partial(world.all_gather_single, whole, part)

    timed = timed_on_device(world, device, _ON_DEVICE_BYTES, issue, _BACK_TO_BACK)
    sent_bytes = {nbytes: nbytes // 4 // world.size() * 4 * (world.size() - 1) for nbytes in _ON_DEVICE_BYTES}
    bandwidths = {nbytes: sent_bytes[nbytes] / seconds for nbytes, seconds in timed}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the largest took much
    return bandwidths


def is_over_nccl(world: Wire, device: torch.device) -> bool:
    nccl = world.context.nccl
    return nccl is not None and nccl.carries(torch.empty(1, device=device))


def timed_on_device(
    world: Wire, device: torch.device, sizes: Sequence[int], issue: Callable[[int], Callable[[], Any]], times: int
) -> Iterator[tuple[int, float]]:
    """Yields (bytes, seconds) of a collective over NCCL, by the device's clock and some back to back, so that what the host
    takes to issue and to wake up is in none of a size that matters. Sizes end where one takes long, or much of the memory
    that any rank has. Collective."""
    nccl = world.context.nccl
    assert nccl is not None
    for nbytes, larger in pairwise((*sizes, 2 * sizes[-1])):
        call = issue(nbytes)
        call().wait()  # opens connections
        before = nccl.record()
        for _ in range(times):
            call().wait()
        after = nccl.record()
        nccl.synchronize()
        seconds = float(before.elapsed_time(after)) / 1e3 / times
        del call  # what it sends
        yield nbytes, seconds
        free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
        is_last = larger // nbytes * seconds > LONGEST_S or 4 * larger > free_bytes
        votes = torch.tensor([is_last], dtype=torch.float64)
        world.control(votes)
        if votes.item():
            return


def _too_fast(wanted: LinkSpec, bytes_per_s: float, wire: float) -> SpecError:
    faster = f"faster than the wire of these ranks, which moves {format_rate(wire)}"
    if wanted.gpu is None:
        hint = f'use a slower one, or one of a GPU, which is scaled to what is computed here, such as "{_INSTEAD}"'
        return SpecError("link", f"{wanted.text} is {faster}", hint, {"link": _INSTEAD})
    comes = f"{wanted.text} comes to {format_rate(bytes_per_s)} here, {faster}"
    return SpecError("link", comes, "use a slower one", {"link": None})


def _note(wanted: LinkSpec, link: Link, scale: float, dtype: str) -> str:
    """A note on how the link was emulated."""
    what = format_rate(link.bytes_per_s) + (f", {format_latency(link.latency_s)} latency" if link.latency_s else "")
    if wanted.gpu is None:
        return f"Emulated link: {what}."
    _, kind = wanted.reference(dtype)
    of = wanted.text.partition(",")[0]
    return f"Emulated link: {what} ({of}, scaled by {scale:.2g}: computing here in {dtype} to its in {kind})."
