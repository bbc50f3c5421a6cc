"""Which samples are never trained on: a share of them, the last of the data. Neither torch nor numpy."""

from __future__ import annotations

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.spec import MOST_HELD_OUT, Workload

_STEPS = 1000  # a share that is proposed is a multiple of one in so many


def held_out_count(workload: Workload, count: int) -> int:
    """How many of `count` samples are held out."""
    return int(workload.held_out * count)


def check_held_out(workload: Workload, count: int, evaluated: int) -> None:
    """Raises SpecError where fewer of `count` samples are held out than are to be evaluated."""
    held = held_out_count(workload, count)
    if held >= evaluated:
        return
    shares = (k / _STEPS for k in range(1, int(MOST_HELD_OUT * _STEPS) + 1))
    enough = next((share for share in shares if int(share * count) >= evaluated), None)
    ways = [f"use held_out {enough:g}" if enough else "give more data"]
    ways += [f"evaluate {held} samples or fewer"] if held else []
    raise SpecError("workload.held_out", f"{held} of {count:,} samples are held out, and {evaluated} are to be evaluated",
                    ", or ".join(ways), {"held_out": enough} if enough else {})  # fmt: skip
