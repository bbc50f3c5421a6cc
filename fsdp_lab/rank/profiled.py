"""Exposed communication of a GPU, from the kernels of a profiled step.

Over NCCL it is streams that wait, not threads, and torch's wrappers order their streams by themselves, so no clock of the
wire sees it. The profiler does: communication without computing is the length of all kernels less that of the computing
ones, as Holistic Trace Analysis counts it. Copies are neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.profiler import DeviceType

Interval = tuple[float, float]

_NCCL = ("AllGather", "all_gather"), ("ReduceScatter", "reduce_scatter"), ("AllReduce", "all_reduce")
_NEITHER = ("Memcpy", "Memset")


def exposed_on_device(events: Iterable[Any]) -> dict[str, float]:
    """By kind of collective, in seconds. `events` are kineto's, with `name()`, `device_type()`, `start_ns()`, `end_ns()`.

    An instant of several collectives counts for the one that began first.
    """
    sent: list[tuple[float, float, str]] = []
    computed: list[Interval] = []
    for event in events:
        name, span = event.name(), (event.start_ns() / 1e9, event.end_ns() / 1e9)
        if event.device_type() == DeviceType.CUDA and not name.startswith(_NEITHER):
            if "nccl" in name.lower():
                sent.append((*span, next((kind for part, kind in _NCCL if part in name), "other")))
            else:
                computed.append(span)
    found: dict[str, float] = {}
    until = float("-inf")
    for start, end, kind in sorted(sent):
        alone = (max(start, until), end)
        if alone[0] < alone[1]:
            beside = [(max(a, alone[0]), min(b, alone[1])) for a, b in computed if a < alone[1] and b > alone[0]]
            found[kind] = found.get(kind, 0.0) + alone[1] - alone[0] - covered(beside)
            until = end
    return found


def covered(spans: Sequence[Interval]) -> float:
    """The length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
