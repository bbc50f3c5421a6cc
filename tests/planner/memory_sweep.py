"""By hand: `python -m tests.planner.memory_sweep [ranks ...]` measures what tests/planner/measured.py lists.

On 2 and 4 ranks where nothing is said; it prints each case beside its prediction, and takes some minutes.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from fsdp_lab.core.events import StepEvent
from tests.planner.measured import SMALL, USUAL, Beside, beside, models, one_by_one, strategies, toggles
from tests.pool import Pool

KEPT = "FSDP_LAB_SWEEP"  # a folder, where measurements are kept and taken from


def main(ranks: list[int], folder: Path | None) -> None:
    for world_size in ranks:
        for name, family in (("strategies", strategies), ("toggles", toggles), ("models", models)):
            for sizes, changes in (("usual", USUAL), ("small", SMALL)):
                found = compared(world_size, family, changes, folder and folder / f"{name}_{sizes}_{world_size}.pkl")
                good = [b for b in found if b.agrees]
                worst = max((abs(b.error) for b in found), default=0.0)
                print(f"{world_size} ranks, {name}, {sizes}: {len(good)} of {len(found)} agree, worst peak {worst:.2%}")
                for b in found:
                    if not b.agrees:
                        told = ", ".join(f"{role} {e:+.1%}" for role, e in b.errors() if abs(e) > 0.02)
                        print(
                            f"    {b.name}: peak {b.error:+.2%}; {told}; at {b.planned.peak_phase} {b.planned.peak_unit}"
                        )


def compared(world_size: int, family: Any, changes: dict[str, Any], kept: Path | None) -> list[Beside]:
    specs = family(world_size, **changes)
    if kept is not None and kept.exists():
        events = pickle.loads(kept.read_bytes())
    else:
        pool = Pool(world_size)
        events = dict(one_by_one(pool, specs))
        pool.close()
    if kept is not None:
        kept.write_bytes(pickle.dumps(events))
    for name, event in events.items():
        if isinstance(event, str):
            print(f"    {name}: not measured: {event}")
    return beside(specs, [(name, e) for name, e in events.items() if isinstance(e, StepEvent)])


if __name__ == "__main__":
    import os

    where = os.environ.get(KEPT)
    main([int(n) for n in sys.argv[1:]] or [2, 4], Path(where) if where else None)
