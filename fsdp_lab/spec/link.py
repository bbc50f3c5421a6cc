"""`LinkSpec`: an emulated link, parsed from one line of text.

    0.25 GB/s                  this bandwidth, one direction
    0.25 GB/s, 50 us           and this latency for each collective
    100 Gb/s of h100           a scaled link: a network card of one GPU, multiplied by (compute rate here / of that GPU)
    nvlink of h100             all NVLinks of one GPU, scaled
    pcie4 of a100              a PCIe 4 slot of 16 lanes, scaled

A scaled link keeps the ratio of communication to computation of that GPU, so that the same collectives overlap. Only the
bandwidth is scaled, not a latency."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fsdp_lab.base.hardware import GPUS, NETWORKS_BITS_PER_S, PCIE4_BYTES_PER_S

_BYTES: Mapping[str, float] = {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3}
_BITS: Mapping[str, float] = {"Tb/s": 1e12 / 8, "Gb/s": 1e9 / 8, "Mb/s": 1e6 / 8, "kb/s": 1e3 / 8}
_RATES: Mapping[str, float] = {**_BYTES, **_BITS}
_TIMES: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_LATENCY = rf"({_NUMBER})\s*(s|ms|us|µs|μs|ns)"
_LINK = re.compile(rf"(?:((?i:nvlink|pcie4))|({_NUMBER})\s*([a-zA-Z/]+))(?:\s+of\s+([^\s,]+))?(?:\s*,\s*{_LATENCY})?")
_EXAMPLES = (
    '"0.25 GB/s", "0.25 GB/s, 50 us", "nvlink of h100", "pcie4 of a100", "100 Gb/s of h100", or none for the real wire'
)

# The choices in user interfaces: unscaled links that CPU ranks can emulate, and named ones.
_OFFERED_RATES = ("0.5 GB/s", "0.25 GB/s", "0.1 GB/s", "0.05 GB/s")
_OFFERED_OF_H100 = ("nvlink of h100", "pcie4 of h100", *(f"{network} of h100" for network in NETWORKS_BITS_PER_S))
OFFERED = (*_OFFERED_RATES, *_OFFERED_OF_H100, "nvlink of a100", "pcie4 of a100")


class LinkError(ValueError):
    """A text that describes no link. `reason` and `hint` are two halves of a sentence."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(f"{reason}; {hint}")
        self.reason, self.hint = reason, hint


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """An emulated link; see the module."""

    text: str  # in canonical spelling, for `parse`
    bytes_per_s: float  # one direction, before scaling
    latency_s: float = 0.0  # of each collective
    gpu: str | None = None  # a name in `hardware.GPUS`: the link is scaled by the compute rate of this device

    @classmethod
    def parse(cls, text: Any) -> Self:
        """Raises LinkError."""
        match = _LINK.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise LinkError(f"{text!r} is no link", f"give a text such as {_EXAMPLES}")
        named, amount, unit, gpu_name, delay, delay_unit = match.groups()
        gpu = (gpu_name or "").lower() or None
        if gpu is not None and gpu not in GPUS:
            raise LinkError(f"{gpu_name!r} is no GPU that the lab knows", f"use one of {', '.join(GPUS)}")
        if named:
            what = named.lower()
            bytes_per_s = _named(what, gpu)
        else:
            unit = re.sub("ps$", "/s", unit)  # Gbps
            if unit not in _RATES:
                units = f"give bytes ({', '.join(_BYTES)}) or bits ({', '.join(_BITS)})"
                raise LinkError(f"{unit!r} is no unit of bandwidth", units)
            what, bytes_per_s = f"{float(amount):.12g} {unit}", float(amount) * _RATES[unit]
        latency_s, latency = 0.0, ""
        if delay is not None:
            delay_unit = delay_unit.replace("µ", "u").replace("μ", "u")
            latency_s, latency = float(delay) * _TIMES[delay_unit], f", {float(delay):.12g} {delay_unit}"
        if not (math.isfinite(bytes_per_s) and bytes_per_s > 0 and math.isfinite(latency_s) and latency_s >= 0):
            hint = "give a finite bandwidth above 0 and a latency of 0 or more, or none for the real wire"
            raise LinkError(f"{text!r} is refused", hint)
        canonical = what + (f" of {gpu}" if gpu else "") + latency
        return cls(text=canonical, bytes_per_s=bytes_per_s, latency_s=latency_s, gpu=gpu)

    def scale(self, flops_per_s: float | None, dtype: str) -> float:
        """The factor on the bandwidth for a device with `flops_per_s` in `dtype` ("fp32", "bf16" or "fp16"). Raises
        LinkError if the link is scaled and `flops_per_s` is not known."""
        if self.gpu is None:
            return 1.0
        if not flops_per_s or not math.isfinite(flops_per_s):
            reason = f"{self.text} is scaled to what this device computes in {dtype}, and that is not known"
            raise LinkError(reason, 'give a bandwidth that is not scaled, such as "0.1 GB/s"')
        return flops_per_s / self.reference(dtype)[0]

    def reference(self, dtype: str) -> tuple[float, str]:
        """The link's GPU: its dense FLOP/s in `dtype`, or else in bf16, fp16 or fp32; and which dtype that is."""
        gpu = GPUS[self.gpu or ""]
        kind = next(d for d in (dtype, "bf16", "fp16", "fp32") if gpu.flops_per_s(d))
        return gpu.flops_per_s(kind) or 0.0, kind


def split_list(text: str) -> list[str]:
    """Splits a comma-separated list of links; the comma before a latency does not separate links."""
    links: list[str] = []
    for word in (w.strip() for w in text.split(",")):
        if links and re.fullmatch(_LATENCY, word):
            links[-1] += f", {word}"
        else:
            links.append(word)
    return links


def format_rate(bytes_per_s: float) -> str:
    """A bandwidth as text: "0.25 GB/s", "31.9 MB/s"."""
    unit, size = ("GB/s", 1e9) if bytes_per_s >= 0.1e9 else ("MB/s", 1e6) if bytes_per_s >= 0.1e6 else ("kB/s", 1e3)
    return f"{bytes_per_s / size:.3g} {unit}"


def format_latency(seconds: float) -> str:
    """A latency as text: "50 µs"."""
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    return f"{seconds / size:.3g} {unit}"


def _named(what: str, gpu: str | None) -> float:
    if gpu is None:
        raise LinkError(f"{what} is of a GPU", f'say which: "{what} of h100"')
    rate = PCIE4_BYTES_PER_S if what == "pcie4" else GPUS[gpu].nvlink_bytes_per_s
    if rate is None:
        raise LinkError(f"{gpu} has no NVLink", f'use "pcie4 of {gpu}", or "25 Gb/s of {gpu}"')
    return rate
