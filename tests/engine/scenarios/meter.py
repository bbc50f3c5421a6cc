"""The peak of what a script's tensors hold on this rank, by torch's profiler: every allocation, nothing sampled.

A tensor that a thread of Gloo's releases last is freed unseen. Its bytes count until another takes its address.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import profile


@contextmanager
def allocated() -> Iterator[Callable[[], int]]:
    """To be asked when it has ended."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to stderr at each start
    with profile(profile_memory=True, use_kineto=True) as profiler:
        yield lambda: _peak(profiler.kineto_results.experimental_event_tree())


def _peak(tree: Sequence[Any]) -> int:
    alive: dict[int, int] = {}
    total = most = 0
    for _, address, size in sorted(_changes(tree)):
        total -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            total += size
            most = max(most, total)
    return most


def _changes(tree: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """(nanoseconds, address, bytes; freed: negative)"""
    left = list(tree)
    while left:
        event = left.pop()
        fields = event.extra_fields
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation):
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        left += event.children
