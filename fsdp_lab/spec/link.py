"""`LinkSpec`: an emulated link, parsed from one line of text.

    0.25 GB/s                  this bandwidth, one direction
    0.25 GB/s, 50 us           and this latency for each collective
    100 Gb/s of h100           a scaled link: a network card of one GPU, multiplied by (compute rate here / of that GPU)
    nvlink of h100             all NVLinks of one GPU, scaled
    pcie4 of a100              a PCIe 4 slot of 16 lanes, scaled

A scaled link keeps the ratio of communication to computation of that GPU, so that the same collectives overlap. Only the
bandwidth is scaled, not a latency.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_lab.base.hardware import GPUS, NETWORKS_BITS_PER_S, PCIE4_BYTES_PER_S, Gpu

_BYTES: Mapping[str, float] = {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3}
_BITS: Mapping[str, float] = {"Tb/s": 1e12 / 8, "Gb/s": 1e9 / 8, "Mb/s": 1e6 / 8, "kb/s": 1e3 / 8}
_RATES: Mapping[str, float] = {**_BYTES, **_BITS}
_TIMES: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NAMED = ("nvlink", "pcie4")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_LATENCY = rf"({_NUMBER})\s*(s|ms|us|µs|μs|ns)"
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
    def parse(cls, text: Any) -> LinkSpec:
        """Raises LinkError."""
        if not isinstance(text, str) or not text.strip():
            raise LinkError(f"{text!r} is refused", f"give a text such as {_EXAMPLES}")
        rate, latency_s, latency_text = _split_latency(text.strip())
        what, of, gpu_name = (part.strip() for part in rate.partition(" of "))
        name = gpu_name.lower() if of else None
        if name is not None and name not in GPUS:
            raise LinkError(f"{gpu_name!r} is no GPU that the lab knows", f"use one of {', '.join(GPUS)}")
        if what.lower() in _NAMED:
            what = what.lower()
            bytes_per_s = _named(what, gpu_name, GPUS[name] if name is not None else None)
        else:
            what, bytes_per_s = _rate(what)
        spelt = what + (f" of {name}" if name else "") + latency_text
        return cls(text=spelt, bytes_per_s=bytes_per_s, latency_s=latency_s, gpu=name)

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


def _split_latency(text: str) -> tuple[str, float, str]:
    """The text of the rate, the latency in seconds, and the canonical text of the latency."""
    rate, comma, latency = (part.strip() for part in text.partition(","))
    if not comma:
        return rate, 0.0, ""
    match = re.fullmatch(_LATENCY, latency)
    if match is None:
        raise LinkError(f"{latency!r} is no latency", 'give one behind the comma such as "50 us" or "0.2 ms"')
    number, unit = float(match[1]), match[2].replace("µ", "u").replace("μ", "u")
    if not math.isfinite(number) or number < 0:
        raise LinkError(f"a latency of {latency} is refused", "give 0 or more")
    return rate, number * _TIMES[unit], f", {number:.12g} {unit}"


def _rate(word: str) -> tuple[str, float]:
    """The canonical text of a rate, and its bytes/s."""
    match = re.fullmatch(rf"({_NUMBER})\s*(\S*)", word)
    if match is None:
        raise LinkError(f"{word!r} is no link", f"give {_EXAMPLES}")
    number, unit = float(match[1]), re.sub("ps$", "/s", match[2])  # Gbps
    if unit not in _RATES:
        reason = f"{unit!r} is no unit of bandwidth" if unit else f"{word!r} has no unit"
        raise LinkError(reason, f"give bytes ({', '.join(_BYTES)}) or bits ({', '.join(_BITS)})")
    bytes_per_s = number * _RATES[unit]
    if not math.isfinite(bytes_per_s) or bytes_per_s <= 0:
        raise LinkError(f"a bandwidth of {word} is refused", "give a finite one above 0, or none for the real wire")
    return f"{number:.12g} {unit}", bytes_per_s


def _named(what: str, gpu_name: str, gpu: Gpu | None) -> float:
    if gpu is None:
        raise LinkError(f"{what} is of a GPU", f'say which: "{what} of h100"')
    if what == "pcie4":
        return PCIE4_BYTES_PER_S
    if gpu.nvlink_bytes_per_s is None:
        raise LinkError(f"{gpu_name} has no NVLink", f'use "pcie4 of {gpu_name}", or "25 Gb/s of {gpu_name}"')
    return gpu.nvlink_bytes_per_s
