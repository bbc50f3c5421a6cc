"""`Preparation`: what a Spec needs on a rank before anything is built, refused on all ranks alike or on none."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from fsdp_lab.backends.base import DTYPES
from fsdp_lab.backends.build import check
from fsdp_lab.backends.wrapping import recomputed
from fsdp_lab.models import Batches, Flops, build_skeleton, count_flops, device_peak, resolve
from fsdp_lab.models.facts import facts_of
from fsdp_lab.rank.rendezvous import Seat
from fsdp_lab.rank.trainer import Cost
from fsdp_lab.spec import Spec, SpecError

Peak = tuple[float | None, str]  # FLOP/s, and where the figure is from


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Ready to be built."""

    spec: Spec
    skeleton: nn.Module
    batches: Batches
    cost: Cost


class Preparation:
    """Keeps what is dear to find: the device's peaks, and the FLOPs of a sample."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._peaks: dict[torch.dtype, Peak] = {}
        self._flops: dict[str, Flops] = {}

    def prepare(self, spec: Spec, before: tuple[Spec, Batches] | None, evaluated: int = 0) -> Prepared:
        """Collective. `before` is what was trained until now: its data is not read again when it is the same. `evaluated`
        samples are to be held out.

        Raises:
            SpecError: on every rank, though one alone may have had to refuse; nothing has been changed.
        """
        refusal, prepared, mine = None, None, None
        dtype = DTYPES[spec.strategy.dtypes.param]
        try:
            mine = self._peaks.get(dtype) or device_peak(self._seat.device, dtype)
            prepared = self._alone(spec, before, mine)
            prepared.batches.check_held_out(evaluated)
        except SpecError as e:
            refusal = e
        fingerprint = prepared.batches.source.fingerprint if prepared else ""
        said = self._everybodys((refusal, fingerprint, mine))
        for refused, _, _ in said:
            if refused is not None:
                raise refused
        assert prepared is not None and mine is not None
        self._same_text([f for _, f, _ in said], spec)
        self._peaks[dtype] = peak = self._common([p for _, _, p in said], mine)
        return Prepared(
            spec=spec,
            skeleton=prepared.skeleton,
            batches=prepared.batches,
            cost=self._cost(spec, peak, prepared.skeleton.config),
        )

    def _alone(self, spec: Spec, before: tuple[Spec, Batches] | None, peak: Peak) -> Prepared:
        """Whatever can be refused, without the other ranks."""
        if spec.world_size != self._seat.world_size:
            raise SpecError("world_size", f"{spec.world_size} is wanted and {self._seat.world_size} ranks are here",
                            "start as many ranks")  # fmt: skip
        config = resolve(spec.workload.model)
        source = before[1].source if before is not None and _same_data(before[0], spec) else None
        batches = Batches(spec.workload, config, rank=self._seat.rank, world_size=self._seat.world_size, source=source)
        cost = self._cost(spec, peak, config)
        skeleton = build_skeleton(config)
        check(skeleton, spec, self._seat.device)
        return Prepared(spec=spec, skeleton=skeleton, batches=batches, cost=cost)

    def _cost(self, spec: Spec, peak: Peak, config: Any) -> Cost:
        w = spec.workload
        samples = w.micro_batch * w.accumulate
        flops = self._sample(spec, config)
        return Cost(
            flops=samples * flops.model,
            recompute_flops=samples * flops.recompute,
            tokens=samples * facts_of(config).tokens_per_sample(w.seq_len),
            peak_flops_per_s=peak[0],
            peak_source=peak[1],
        )

    def _sample(self, spec: Spec, config: Any) -> Flops:
        w, s = spec.workload, spec.strategy
        key = json.dumps([spec.to_dict()["workload"]["model"], w.seq_len, s.recompute], sort_keys=True)
        if key not in self._flops:
            self._flops[key] = count_flops(config, w.seq_len, lambda model: recomputed(model, s))
        return self._flops[key]

    def _common(self, peaks: list[Peak | None], mine: Peak) -> Peak:
        """What CPUs measured is taken at the best that any rank saw, so that MFU has one scale."""
        if self._seat.device.type == "cuda":
            return mine
        return max((p for p in peaks if p is not None), key=lambda p: p[0] or 0.0)

    def _same_text(self, fingerprints: list[str], spec: Spec) -> None:
        other = next((rank for rank, f in enumerate(fingerprints) if f != fingerprints[0]), None)
        if other is not None:
            raise SpecError("workload.data", f"rank {other} reads another text than rank 0 under {spec.workload.data!r}",
                            "give a path with the same files on every machine")  # fmt: skip

    def _everybodys(self, mine: Any) -> list[Any]:
        said = [mine] * self._seat.world_size
        if self._seat.world_size > 1:
            dist.all_gather_object(said, mine)
        return said


def _same_data(one: Spec, other: Spec) -> bool:
    return not set(one.difference(other)) & {"data", "seq_len", "seed", "model"}
