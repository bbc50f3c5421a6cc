"""The peak of what a script's tensors hold on this rank, by torch's profiler: every allocation, nothing sampled.

A tensor that a thread of Gloo's releases last is freed unseen. Its bytes count until another takes its address."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import profile


@contextmanager
def allocated() -> Iterator[Callable[[], int]]:
    """To be asked when it has ended."""
    with _recorded() as changes:
        yield lambda: max((total for _, total in _totals(changes())), default=0)


@contextmanager
def growths() -> Iterator[tuple[Callable[[], None], Callable[[], list[int]]]]:
    """A function that marks a moment, and one to be asked when it has ended: between two marks each, how far the peak was
    above what was allocated at the first of the two. Frees are seen of what was allocated inside only."""
    marks: list[int] = []
    with _recorded() as changes:
        yield lambda: marks.append(time.time_ns()), lambda: _between(marks, list(_totals(changes())))


def _between(marks: Sequence[int], totals: Sequence[tuple[int, int]]) -> list[int]:
    found = []
    for begin, end in zip(marks[::2], marks[1::2], strict=True):
        at_first = [total for at, total in totals if at < begin][-1]
        found.append(max(total for at, total in totals if begin <= at < end) - at_first)
    return found


@contextmanager
def _recorded() -> Iterator[Callable[[], Sequence[tuple[int, int, int]]]]:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes to stderr at each start
    with profile(profile_memory=True, use_kineto=True) as profiler:
        yield lambda: sorted(_changes(profiler.kineto_results.experimental_event_tree()))


def _totals(changes: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """(nanoseconds, bytes) after each change."""
    alive: dict[int, int] = {}
    total = 0
    for at, address, size in changes:
        total -= alive.pop(address, 0)
        if size > 0:
            alive[address] = size
            total += size
        yield at, total


def _changes(tree: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """(nanoseconds, address, bytes; freed: negative)"""
    left = list(tree)
    while left:
        event = left.pop()
        fields = event.extra_fields
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation):
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        left += event.children
