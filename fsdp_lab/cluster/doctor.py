"""`Doctor`: the last beat of each rank, as the kernel heard it, and what is to be made of them.

Beats come to an address of their own (`Channel`), not as news of a call: so they reach the kernel while a rank is busy
with a cell, or with nothing. What a stopped rank cannot say any more, its process tells, where it is on this machine.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from fsdp_lab.beats import Beat
from fsdp_lab.hang import Hang, diagnose

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
STILL_S = 2.0  # past the limit, a stopped rank that a collective waits for is named with that collective
READ_S = 0.8  # past the limit, a new word of a rank that is missing is waited for so long


@dataclass(frozen=True, kw_only=True)
class Heard:
    """A beat, and when it was heard, on the kernel's monotonic clock."""

    beat: Beat
    at_s: float

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.at_s

    @property
    def waits_s(self) -> float | None:
        """How long the rank has waited for a collective by now; None where it does not."""
        return None if self.beat.pending is None else self.beat.pending_s + self.age_s


class Doctor:
    """Hears on the client's IO thread, looks on the watcher's, and is asked by any."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._heard: dict[int, Heard] = {}
        self._stopped_at_s: dict[int, float] = {}  # by rank, when its process was first seen stopped
        self._lock = threading.Lock()

    def hear(self, beat: Mapping[str, Any]) -> None:
        """One that comes late, after a newer one, is dropped."""
        heard = Heard(beat=Beat.from_dict(beat), at_s=time.monotonic())
        with self._lock:
            before = self._heard.get(heard.beat.rank)
            if before is None or before.beat.number < heard.beat.number:
                self._heard[heard.beat.rank] = heard

    def last(self, rank: int) -> Heard | None:
        with self._lock:
            return self._heard.get(rank)

    def forget(self) -> None:
        """What was heard until now says nothing about what comes."""
        with self._lock:
            self._heard = {}

    def look(self, processes: Mapping[int, psutil.Process | None], since_s: float) -> Hang | None:
        """A hang of the call that began at `since_s`, on the monotonic clock.

        `processes` are those of the ranks, None where they are on another machine.
        """
        with self._lock:
            heard = dict(self._heard)
        waits_s = {h.at_s - h.beat.pending_s: h.beat.pending_s for h in heard.values()}
        if not any(begun_s > since_s - 1.0 and waited_s > self.limit_s for begun_s, waited_s in waits_s.items()):
            return None
        fates = {rank: fate for rank, process in processes.items() if (fate := _fate(heard.get(rank), process))}
        hang = diagnose({rank: h.beat for rank, h in heard.items()}, self.limit_s, fates)
        if hang is None:
            return None
        unsure = [rank for rank in hang.ranks if rank not in fates and not _fresh(heard.get(rank))]
        return None if unsure and hang.waited_s < self.limit_s + READ_S else hang

    def long_stopped(self, processes: Mapping[int, psutil.Process | None]) -> list[int]:
        """Ranks whose process has been stopped for longer than a collective is waited for, to be asked again and again.

        Where nobody waits for them in one (a rank that saves, one that idles), `look` does not find them.
        """
        now_s = time.monotonic()
        stopped = {rank for rank, process in processes.items() if _status(process) in STOPPED}
        self._stopped_at_s = {rank: self._stopped_at_s.get(rank, now_s) for rank in stopped}
        return [rank for rank, at_s in self._stopped_at_s.items() if now_s - at_s > self.limit_s + STILL_S]


def _fresh(heard: Heard | None) -> bool:
    """Whether a rank has just said where it stands, with its stack."""
    return heard is not None and bool(heard.beat.stack) and heard.age_s < heard.beat.next_s


def _fate(heard: Heard | None, process: psutil.Process | None) -> str:
    """Why a rank cannot speak; "" where it can."""
    status = _status(process)
    if status in STOPPED:
        return "its process is stopped"
    if heard is None or heard.age_s < heard.beat.silent_s:
        return ""
    why = f": native code holds its interpreter, or it gets no time (its process is {status})" if status else ""
    return f"nothing has been heard of it for {heard.age_s:.0f} s{why}"


def _status(process: psutil.Process | None) -> str:
    """As the system says it; "" where it cannot be seen from here."""
    with contextlib.suppress(psutil.Error):
        return str(process.status()) if process is not None else ""
    return ""


class Channel:
    """Where beats of one rank arrive at an `ipyparallel.Client`.

    The client hands what engines publish to the entry of its `metadata` that their message names as its parent; such an
    entry need not belong to a call. One that a call has made is dropped with the call's end.
    """

    def __init__(self, client: Any, name: str, sink: dict[str, Any]) -> None:
        self._client, self._name, self._sink = client, name, sink

    @property
    def header(self) -> dict[str, str]:
        """What the engine writes on its messages."""
        return {
            "msg_id": self._name,
            "session": self._client.session.session,
            "username": "",
            "msg_type": "apply_request",
        }

    def open(self) -> None:
        """Again and again, as the user may empty their own client."""
        entry = self._client.metadata[self._name]
        if entry["data"] is not self._sink:
            entry["data"] = self._sink

    def close(self) -> None:
        self._client.metadata.pop(self._name, None)
