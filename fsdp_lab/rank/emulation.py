"""`LinkEmulation`: the emulated link of a Spec on these ranks. All ranks refuse it, or none does."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import distributed as dist

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.link import LinkError, LinkSpec, spoken_rate, spoken_time
from fsdp_lab.core.spec import Spec
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.wire import Link, Wire

_PROBE_BYTES = 4 << 20  # of an all-gather's output
_PROBES = 7
_INSTEAD = "100 Gb/s of h100"  # proposed instead of a link that is too fast


@dataclass(frozen=True, kw_only=True)
class EmulatedLink:
    """The link of collectives in training steps; None: the real one."""

    link: Link | None = None
    notes: tuple[str, ...] = ()  # on the effect on timings


class LinkEmulation:
    """Caches the speed of the real wire, which is measured when a link is first requested."""

    def __init__(self, info: RankInfo) -> None:
        self._info = info
        self._wire_bytes_per_s: float | None = None

    def of(self, spec: Spec, peak_flops_per_s: float | None, world: Wire) -> EmulatedLink:
        """Collective. `peak_flops_per_s`: of this rank in the Spec's compute dtype, None if unknown.

        Raises:
            SpecError: on every rank, for a link faster than the wire, or one that cannot be scaled here.
        """
        if spec.link is None:
            return EmulatedLink()
        asked, dtype = LinkSpec.parse(spec.link), spec.strategy.dtypes.param
        compute, wire = self._minimum(peak_flops_per_s or 0.0, self.measure(world))
        try:
            scale = asked.scale(compute, dtype)
        except LinkError as e:
            raise SpecError("link", e.reason, e.hint, {"link": None}) from None
        bytes_per_s = asked.bytes_per_s * scale
        if bytes_per_s > wire:
            raise _too_fast(asked, bytes_per_s, wire)
        link = Link(bytes_per_s=bytes_per_s, latency_s=asked.latency_s)
        return EmulatedLink(link=link, notes=(_note(asked, link, scale, dtype),))

    def measure(self, world: Wire) -> float:
        """Link bytes/s of this rank in an all-gather, the median of a few; collective at the first call. Infinite for
        one rank."""
        if self._wire_bytes_per_s is None:
            self._wire_bytes_per_s = (
                measured_speed(world, self._info.device) if self._info.world_size > 1 else float("inf")
            )
        return self._wire_bytes_per_s

    def _minimum(self, *values: float) -> list[float]:
        """Each value of the slowest rank."""
        reduced = torch.tensor(values, dtype=torch.float64)
        if self._info.world_size > 1:
            dist.all_reduce(reduced, op=dist.ReduceOp.MIN)
        minimum: list[float] = reduced.tolist()
        return minimum


def measured_speed(world: Wire, device: torch.device) -> float:
    """Bytes/s over one rank's link, in one direction, in a large all-gather over the real wire. Collective."""
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


def _too_fast(asked: LinkSpec, bytes_per_s: float, wire: float) -> SpecError:
    moves = f"than the wire of these ranks, which moves {spoken_rate(wire)}"
    if asked.gpu is None:
        return SpecError("link", f"{asked.text} is faster {moves}", "use a slower one, or one of a GPU, which is scaled to "
                         f'what is computed here, such as "{_INSTEAD}"', {"link": _INSTEAD})  # fmt: skip
    return SpecError("link", f"{asked.text} comes to {spoken_rate(bytes_per_s)} here, faster {moves}", "use a slower one",
                     {"link": None})  # fmt: skip


def _note(asked: LinkSpec, link: Link, scale: float, dtype: str) -> str:
    """On the fidelity of timings."""
    what = spoken_rate(link.bytes_per_s) + (f", {spoken_time(link.latency_s)} latency" if link.latency_s else "")
    if asked.gpu is None:
        return f"Emulated link: {what}."
    _, kind = asked.reference(dtype)
    of = asked.text.partition(",")[0]
    return f"Emulated link: {what} ({of}, scaled by {scale:.2g}: computing here in {dtype} to its in {kind})."
