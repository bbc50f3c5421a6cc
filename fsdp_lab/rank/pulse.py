"""`Pulse`: the side thread of a rank that says where the rank stands, whatever its main thread is in.

It is another thread than the guard's (guard.py), which asks rank 0's store, and so stands still where rank 0 does. It reads
what the hub keeps anyway and touches nothing in the way of a step. It needs the interpreter: a rank whose process is
stopped, or whose native code holds the interpreter, says nothing, and that is how it is known.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_lab.beats import IDLE_S, WORKING_S, Beat, Issued
from fsdp_lab.rank.stacks import main_stack
from fsdp_lab.wire import Collective, Hub

PERIOD_S = 0.5  # of a rank that stands still in its work
STILL_S = 1.0  # after so long without a new collective, the beat carries the stack


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the session is: whether in a call that ranks do together, and in which step."""

    working: bool
    step: int | None


class Pulse:
    """Beats from its making until `close`.

    Args:
        hub, rank: whose.
        place: asked at each beat, from this thread.
        tell: called with each beat as a dict, from this thread; what it raises is not heard.
    """

    def __init__(self, hub: Hub, rank: int, place: Callable[[], Place], tell: Callable[[dict[str, Any]], None]) -> None:
        self._hub, self._rank, self._place, self._tell = hub, rank, place, tell
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fsdp-lab-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2)

    def _beat(self) -> None:
        seen, number, moved_s, told_s = (-1, False), 0, 0.0, 0.0
        while not self._closed.wait(PERIOD_S):
            place, last, now = self._place(), self._hub.last, time.monotonic()
            before, seen = seen, (last.sequence if last else -1, place.working)
            if moved := seen != before:
                moved_s = now
            if now - told_s < _due_s(place.working, moved=moved) - 0.1:
                continue
            beat = self._read(number, place, moved, still=now - moved_s > STILL_S or not place.working)
            number, told_s = number + 1, now
            with contextlib.suppress(Exception):  # there is nobody to raise to, and the next one may get through
                self._tell(beat.to_dict())

    def _read(self, number: int, place: Place, moved: bool, *, still: bool) -> Beat:
        last = self._hub.last
        pending = None if moved else self._hub.pending()  # works in flight are not touched while the rank goes on
        return Beat(
            rank=self._rank,
            number=number,
            working=place.working,
            step=place.step,
            last=_issued(last) if last else None,
            pending=_issued(pending) if pending else None,
            pending_s=time.perf_counter() - pending.issue_s if pending else 0.0,
            peers=self._hub.members(pending.group) if pending else (),
            counts=self._hub.counts(),
            recent=tuple(map(_issued, self._hub.recent())) if still else (),
            stack=main_stack() if still else "",
        )


def _due_s(working: bool, *, moved: bool) -> float:
    if not working:
        return PERIOD_S if moved else IDLE_S
    return WORKING_S if moved else PERIOD_S


def _issued(c: Collective) -> Issued:
    return Issued(
        sequence=c.sequence,
        kind=c.kind,
        group=c.group,
        size=c.size,
        ordinal=c.ordinal,
        unit=c.unit,
        payload_bytes=c.payload_bytes,
    )
