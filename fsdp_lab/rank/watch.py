"""`Watch`: ranks that look for a hang themselves, where no kernel hears their beats: under torchrun.

Each rank writes its beats to rank 0's store. One that has waited for too long reads all of them, names the rank that is
missing, and gives up the step on all ranks with that word. Where the store does not answer, since rank 0 stands still or
the cable to it is cut, it gives up its own, naming what it waits for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import distributed as dist

from fsdp_lab.beats import Beat
from fsdp_lab.hang import diagnose
from fsdp_lab.rank.line import Line

_ANSWER_S = 1.0


class Watch:
    """Of one rank.

    Args:
        store: a connection that no other thread uses.
        limit_s: how long a collective may wait for a rank.
        give_up: called with the diagnosis.
    """

    def __init__(self, store: dist.Store, world_size: int, limit_s: float, give_up: Callable[[str], None]) -> None:
        self._store, self._world_size, self._limit_s, self._give_up = store, world_size, limit_s, give_up
        self._line = Line(_ANSWER_S)
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: the number of its last beat, and when that was new

    def hear(self, beat: Mapping[str, Any]) -> None:
        """From the pulse's thread, with this rank's own beat."""
        late = beat["pending_s"] >= self._limit_s / 2
        try:
            beats = self._line.ask(lambda: self._exchange(beat, read=late))
        except dist.DistNetworkError as e:
            if beat["pending_s"] > self._limit_s:
                self._give_up(_alone(Beat.from_dict(beat), str(e)))
            return
        fates = {rank: fate for rank, one in beats.items() if (fate := self._fate(one))}
        if late and (hang := diagnose(beats, self._limit_s, fates)) is not None:
            self._give_up(f"{hang.sentence}\n{hang.text}" if hang.text else hang.sentence)

    def _exchange(self, beat: Mapping[str, Any], *, read: bool) -> dict[int, Beat]:
        """Tells this rank's beat, and reads those of all where that is asked for."""
        self._store.set(_key(beat["rank"]), json.dumps(beat))
        there = [rank for rank in range(self._world_size) if read and self._store.check([_key(rank)])]
        return {rank: Beat.from_dict(json.loads(self._store.get(_key(rank)))) for rank in there}

    def _fate(self, beat: Beat) -> str:
        number, since_s = self._heard.get(beat.rank, (-1, 0.0))
        if beat.number != number:
            since_s = time.monotonic()
            self._heard[beat.rank] = (beat.number, since_s)
        silent_s = time.monotonic() - since_s
        return f"nothing has been heard of it for {silent_s:.0f} s" if silent_s > beat.silent_s else ""


def _alone(beat: Beat, silence: str) -> str:
    """What a rank knows that hears of no other."""
    assert beat.pending is not None
    return (
        f"{beat.pending.name} (group {beat.pending.group}) has been waited for {beat.pending_s:.1f} s, and rank 0's store "
        f"cannot be asked who is missing ({silence}): rank 0 stands still, or the connection to it does"
    )


def _key(rank: int) -> str:
    return f"beat/{rank}"
