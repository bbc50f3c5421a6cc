"""`Preparation`: what a Spec needs before anything is built. All ranks refuse a Spec, or none does."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_lab.backends.base import DTYPES
from fsdp_lab.backends.build import check
from fsdp_lab.backends.transfer import gather_objects
from fsdp_lab.backends.wrapping import recomputed
from fsdp_lab.core.errors import FieldError, SpecError
from fsdp_lab.core.spec import Spec
from fsdp_lab.models import Batches, BestPeak, Flops, build_skeleton, count_flops, device_peak, resolve
from fsdp_lab.models.peaks import Peak
from fsdp_lab.models.presets import facts_of
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.trainer import StepCost


@dataclass(frozen=True, kw_only=True)
class PreparedTraining:
    """A Spec that is ready to be built."""

    spec: Spec
    skeleton: nn.Module
    batches: Batches
    cost: StepCost


class Preparation:
    """Caches what is expensive to find: the device's peaks, and the FLOPs of a sample."""

    def __init__(self, info: RankInfo) -> None:
        self._info = info
        self._peaks: dict[torch.dtype, BestPeak] = {}
        self._flops: dict[str, Flops] = {}

    def prepare(self, spec: Spec, before: tuple[Spec, Batches] | None, evaluated: int = 0) -> PreparedTraining:
        """Collective. `before`: the training until now, whose data is not read again if it is the same. `evaluated`:
        how many samples must be held out.

        Raises:
            SpecError: on every rank, even if only one refuses; nothing has been changed.
        """
        error, prepared, mine = None, None, None
        dtype = DTYPES[spec.strategy.dtypes.param]
        try:
            mine = self._peaks.get(dtype) or BestPeak(device_peak(self._info.device, dtype))
            prepared = self._prepare_local(spec, before, mine)
            prepared.batches.check_held_out(evaluated)
        except FieldError as e:
            error = e
        fingerprint = prepared.batches.source.fingerprint if prepared else ""
        by_rank = gather_objects((error, fingerprint, mine.given if mine else None))
        for of_rank, _, _ in by_rank:
            if of_rank is not None:
                raise of_rank
        assert prepared is not None and mine is not None
        self._check_same_text([f for _, f, _ in by_rank], spec)
        common = self._common_peak([p for _, _, p in by_rank], mine.given)
        peak = self._peaks[dtype] = mine if mine.given == common else BestPeak(common)
        return dataclasses.replace(prepared, cost=self._cost(spec, peak, prepared.skeleton.config))

    def _prepare_local(self, spec: Spec, before: tuple[Spec, Batches] | None, peak: BestPeak) -> PreparedTraining:
        """All checks that need no other rank."""
        if spec.world_size != self._info.world_size:
            raise SpecError("world_size", f"the Spec needs {spec.world_size} ranks and there are {self._info.world_size}",
                            "start as many ranks")  # fmt: skip
        config = resolve(spec.workload.model)
        source = before[1].source if before is not None and _same_data(before[0], spec) else None
        batches = Batches(spec.workload, config, rank=self._info.rank, world_size=self._info.world_size, source=source)
        cost = self._cost(spec, peak, config)
        skeleton = build_skeleton(config)
        check(skeleton, spec, self._info.device)
        return PreparedTraining(spec=spec, skeleton=skeleton, batches=batches, cost=cost)

    def _cost(self, spec: Spec, peak: BestPeak, config: Any) -> StepCost:
        w = spec.workload
        samples = w.micro_batch * w.accumulate
        flops = self._sample(spec, config)
        return StepCost(
            flops=samples * flops.model,
            recompute_flops=samples * flops.recompute,
            tokens=samples * facts_of(config).tokens_per_sample(w.seq_len),
            peak=peak,
        )

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


def _same_data(one: Spec, other: Spec) -> bool:
    return not set(one.difference(other)) & {"data", "seq_len", "seed", "model"}
