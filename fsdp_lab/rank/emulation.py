"""`Emulation`: the emulated link that a Spec asks for, as it is on these ranks; refused on all of them alike."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import distributed as dist

from fsdp_lab.link_spec import LinkError, LinkSpec, spoken_rate, spoken_time
from fsdp_lab.rank.rendezvous import Seat
from fsdp_lab.spec import Spec, SpecError
from fsdp_lab.wire import Link, Wire

_PROBE_BYTES = 4 << 20  # of an all-gather's output
_PROBES = 7
_INSTEAD = "100 Gb/s of h100"  # what is proposed to who asks for a link that is too fast


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """What collectives take while steps are trained."""

    link: Link | None = None
    notes: tuple[str, ...] = ()  # what that does to the times, in words


class Emulation:
    """Keeps what the wire itself can do, which is measured when a link is first asked for."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._wire_bytes_per_s: float | None = None

    def of(self, spec: Spec, peak_flops_per_s: float | None, world: Wire) -> Emulated:
        """Collective. `peak_flops_per_s`: of this rank in the Spec's compute dtype, None where it is not known.

        Raises:
            SpecError: on every rank, for a link faster than the wire, or one that cannot be scaled here.
        """
        if spec.link is None:
            return Emulated()
        asked, dtype = LinkSpec.parse(spec.link), spec.strategy.dtypes.param
        compute, wire = self._least(peak_flops_per_s or 0.0, self.measure(world))
        try:
            scale = asked.scale(compute, dtype)
        except LinkError as e:
            raise SpecError("link", e.reason, e.way_out, {"link": None}) from None
        bytes_per_s = asked.bytes_per_s * scale
        if bytes_per_s > wire:
            raise _too_fast(asked, bytes_per_s, wire)
        link = Link(bytes_per_s=bytes_per_s, latency_s=asked.latency_s)
        return Emulated(link=link, notes=(_note(asked, link, scale, dtype),))

    def measure(self, world: Wire) -> float:
        """Link bytes/s of this rank in an all-gather by itself, the median of a few; collective when it is first asked for.
        Without bound where nothing leaves the rank."""
        if self._wire_bytes_per_s is None:
            self._wire_bytes_per_s = (
                measured_speed(world, self._seat.device) if self._seat.world_size > 1 else float("inf")
            )
        return self._wire_bytes_per_s

    def _least(self, *values: float) -> list[float]:
        """Of each, what the slowest rank has."""
        told = torch.tensor(values, dtype=torch.float64)
        if self._seat.world_size > 1:
            dist.all_reduce(told, op=dist.ReduceOp.MIN)
        least: list[float] = told.tolist()
        return least


def measured_speed(world: Wire, device: torch.device) -> float:
    """Bytes/s over one rank's link, in one direction, for a large all-gather over the real wire. Collective."""
    part = torch.zeros(_PROBE_BYTES // 4 // world.size(), device=device)
    whole = torch.empty(part.numel() * world.size(), device=device)
    rates = []
    for _ in range(_PROBES):
        start_s = time.perf_counter()
        world.all_gather_single(whole, part).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        rates.append((whole.nbytes - part.nbytes) / (time.perf_counter() - start_s))
    return statistics.median(rates[1:])  # the first makes connections


def _too_fast(asked: LinkSpec, bytes_per_s: float, wire: float) -> SpecError:
    moves = f"than the wire of these ranks, which moves {spoken_rate(wire)}"
    if asked.gpu is None:
        return SpecError("link", f"{asked.text} is faster {moves}", "use a slower one, or one of a GPU, which is scaled to "
                         f'what is computed here, such as "{_INSTEAD}"', {"link": _INSTEAD})  # fmt: skip
    return SpecError("link", f"{asked.text} comes to {spoken_rate(bytes_per_s)} here, faster {moves}", "use a slower one",
                     {"link": None})  # fmt: skip


def _note(asked: LinkSpec, link: Link, scale: float, dtype: str) -> str:
    """The fidelity label."""
    what = spoken_rate(link.bytes_per_s) + (f", {spoken_time(link.latency_s)} latency" if link.latency_s else "")
    if asked.gpu is None:
        return f"Emulated link: {what}."
    _, kind = asked.reference(dtype)
    of = asked.text.partition(",")[0]
    return f"Emulated link: {what} ({of}, scaled by {scale:.2g}: computing here in {dtype} to its in {kind})."
