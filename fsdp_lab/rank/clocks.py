"""`compare_clocks`: how far this rank's clock is from rank 0's, found over the wire.

A few all-gathers of the ranks' own times bound it from both sides: nobody has the result before rank 0 gave its part, and
rank 0 not before this rank gave its own. What lies between the closest two bounds is the offset, as in Marzullo's
intersection of intervals (1984); half their distance is how far it may be off. All ranks are compared at once, however many
they are. Processes of one machine share `time.perf_counter` on Linux: there the offset is only what an exchange is worth.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from fsdp_lab.wire import Wire

_EXCHANGES = 8


class Clock(NamedTuple):
    """Add `offset_s` to this rank's `time.perf_counter` for rank 0's; it may be wrong by `error_s`."""

    offset_s: float = 0.0
    error_s: float | None = None


def compare_clocks(world: Wire) -> Clock:
    """Collective; some tenths of a millisecond an exchange."""
    if world.size() == 1:
        return Clock(0.0, 0.0)
    least, most = float("-inf"), float("inf")
    given_s = had_s = float("nan")  # of the exchange before, by this clock
    for _ in range(_EXCHANGES + 1):  # one tells when rank 0 had the result of the one before
        before_s, now_s = given_s, time.perf_counter()
        told = torch.empty(2 * world.size(), dtype=torch.float64)
        world.all_gather_single(told, torch.tensor([now_s, had_s], dtype=torch.float64)).wait()
        given_s, had_s = now_s, time.perf_counter()
        its_s, it_had_s = told[:2].tolist()
        least = max(least, its_s - had_s)
        if not math.isnan(before_s):
            most = min(most, it_had_s - before_s)
    if world.rank() == 0:
        return Clock(0.0, 0.0)
    return Clock((least + most) / 2, max(0.0, most - least) / 2)
