"""`HeartbeatThread`: reports where a rank is while its main thread may be blocked. `HangWatchdog`: finds hangs from these
reports without a kernel.

The thread reads only what the wire context has anyway; it is not the abort monitor's, which may wait for rank 0's store. It
needs the interpreter: a rank whose process is stopped, or whose native code holds the GIL, sends nothing, which is how that
is detected."""

import contextlib
import dataclasses
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from torch import distributed as dist

from fsdp_lab.base.hang import IDLE_S, WORKING_S, Heartbeat, Issued, LongWork, diagnose
from fsdp_lab.rank.abort import BoundedStore
from fsdp_lab.wire import Collective, WireContext

PERIOD_S = 0.5  # between two heartbeats of a rank that makes no progress in a call
STILL_S = 1.0  # after this long without a new collective, heartbeats carry the stack
_ANSWER_S = 1.0
_MAX_FRAMES = 40  # of a stack, from the innermost
# Frames between the start of the process and the call in progress: not useful for finding a hang.
_HOSTS = frozenset({"ipykernel", "ipyparallel", "IPython", "asyncio", "tornado", "traitlets", "multiprocessing"})
_BETWEEN = ("torch/nn/modules/module.py",)  # the same three frames between any two modules


class LongWorkLog:
    """Whether a rank is at long work (`LongWork`), and since when not. Thread-safe. `changed` is set when work begins or
    ends, so that a heartbeat says it at once: of a rank at long work, others accept that it is silent."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self._lock = threading.Lock()
        self._open: list[tuple[LongWork, float]] = []  # and when it began, outermost first; without time for inner ones
        self._ended_s: float | None = None

    @contextmanager
    def during(self, work: LongWork) -> Iterator[None]:
        self.begin(work)
        try:
            yield
        finally:
            self.end()

    def begin(self, work: LongWork) -> None:
        with self._lock:
            self._open.append((work, time.monotonic()))
        self.changed.set()

    def end(self) -> None:
        """End the work that began last."""
        with self._lock:
            work, begin_s = self._open.pop()
            self._ended_s = min(time.monotonic(), begin_s + work.limit_s)
            if self._open:
                outer, outer_s = self._open[-1]
                self._open[-1] = (outer, outer_s + time.monotonic() - begin_s)
        self.changed.set()

    def renew(self, work: LongWork) -> None:
        """The work that began last has made progress, and is `work` now: its limit counts from here."""
        with self._lock:
            is_new = self._open[-1][0] is not work
            self._open[-1] = (work, time.monotonic())
        if is_new:
            self.changed.set()

    def read(self) -> tuple[str, float | None]:
        """The text of the work in progress, or ""; and seconds since the last moment of work within its limit, or None."""
        now_s = time.monotonic()
        with self._lock:
            if self._open:
                work, begin_s = self._open[-1]
                return work.text, max(0.0, now_s - begin_s - work.limit_s)
            return "", None if self._ended_s is None else now_s - self._ended_s

    @contextmanager
    def compiling(self, compiles: bool) -> Iterator[None]:
        """The context of steps in which torch.compile may be at work, if the Spec `compiles`."""
        if not compiles:
            yield
            return
        from torch._dynamo.callback import callback_handler

        begun = callback_handler.register_start_callback(lambda _: self.begin(LongWork.COMPILE))
        ended = callback_handler.register_end_callback(lambda _: self.end())
        try:
            yield
        finally:
            callback_handler.remove_start_callback(begun)
            callback_handler.remove_end_callback(ended)


class HeartbeatThread:
    """Calls `send` with a heartbeat as a dict, in a thread until `close`; at once when `changed` is set. What `send` raises
    is ignored. `activity`: returns what the session knows of the heartbeat."""

    def __init__(
        self,
        context: WireContext,
        activity: Callable[[], Heartbeat],
        send: Callable[[dict[str, Any]], None],
        changed: threading.Event,
    ) -> None:
        self._context, self._activity, self._send = context, activity, send
        self._changed, self._closed = changed, threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsdp-lab-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._changed.set()
        self._thread.join(2)

    def _run(self) -> None:
        state, number, progress_s, sent_s = (-1, False), 0, 0.0, 0.0
        while not self._closed.is_set():
            at_once = self._changed.wait(PERIOD_S)
            self._changed.clear()
            if self._closed.is_set():
                return
            activity, last, now = self._activity(), self._context.last, time.monotonic()
            before, state = state, (last.sequence if last else -1, activity.working)
            if progress := state != before:
                progress_s = now
            as_usual = activity.working == progress
            interval_s = PERIOD_S if not as_usual else WORKING_S if progress else IDLE_S
            if not at_once and now - sent_s < interval_s - 0.1:
                continue
            still = now - progress_s > STILL_S or not activity.working
            heartbeat = self._read(number, activity, progress=progress, still=still)
            number, sent_s = number + 1, now
            with contextlib.suppress(Exception):  # no caller to raise to, and the next one may arrive
                self._send(heartbeat.to_dict())

    def _read(self, number: int, activity: Heartbeat, *, progress: bool, still: bool) -> Heartbeat:
        last = self._context.last
        pending = None if progress else self._context.pending()  # not asked for while there is progress
        return dataclasses.replace(
            activity,
            number=number,
            last=_issued(last) if last else None,
            pending=_issued(pending) if pending else None,
            pending_s=time.perf_counter() - pending.issue_s if pending else 0.0,
            peers=self._context.members(pending.group) if pending else (),
            counts=self._context.issue_counts(),
            recent=tuple(map(_issued, self._context.recent_issues())) if still else (),
            stack=main_stack() if still else "",
        )


def _issued(c: Collective) -> Issued:
    return Issued(**{field.name: getattr(c, field.name) for field in dataclasses.fields(Issued)})


class HangWatchdog:
    """Finds hangs from the ranks themselves, where no kernel receives their heartbeats: under torchrun.

    Each rank writes its heartbeats to rank 0's store. A rank that has waited for longer than `limit_s` reads all of them,
    and aborts the step on all ranks with the name of the missing one, by calling `abort`; if the store does not answer, with
    what it is waiting for. `store` is a separate connection."""

    def __init__(self, store: dist.Store, world_size: int, limit_s: float, abort: Callable[[str], None]) -> None:
        self._store, self._world_size = BoundedStore(store, _ANSWER_S), world_size
        self._limit_s, self._abort = limit_s, abort
        self._received: dict[int, tuple[int, float]] = {}  # rank -> number of its last heartbeat, and when it was new

    def receive(self, heartbeat: Mapping[str, Any]) -> None:
        """Called in the heartbeat thread with this rank's own heartbeat."""
        late = heartbeat["pending_s"] >= self._limit_s / 2
        try:
            heartbeats = self._store.call(lambda store: self._exchange(store, heartbeat, read=late))
        except dist.DistNetworkError as e:
            own = Heartbeat.from_dict(heartbeat)
            if own.pending_s > self._limit_s and own.pending is not None:
                pending = f"{own.pending.label} (group {own.pending.group}) has been pending for {own.pending_s:.1f} s"
                unknown = f"rank 0's store does not answer, so the missing rank is unknown ({e})"
                self._abort(f"{pending}, and {unknown}: rank 0 is stopped, or the connection to it is cut")
            return
        silent = {rank: text for rank, h in heartbeats.items() if (text := self._silence(h))}
        if late and (hang := diagnose(heartbeats, self._limit_s, silent)) is not None:
            self._abort(f"{hang.sentence}\n{hang.text}" if hang.text else hang.sentence)

    def _exchange(self, store: dist.Store, heartbeat: Mapping[str, Any], *, read: bool) -> dict[int, Heartbeat]:
        """Writes this rank's heartbeat, and with `read` returns those of all ranks."""
        store.set(f"beat/{heartbeat['rank']}", json.dumps(heartbeat))
        keys = {rank: f"beat/{rank}" for rank in range(self._world_size if read else 0)}
        return {r: Heartbeat.from_dict(json.loads(store.get(key))) for r, key in keys.items() if store.check([key])}

    def _silence(self, heartbeat: Heartbeat) -> str:
        number, since_s = self._received.get(heartbeat.rank, (-1, 0.0))
        if heartbeat.number != number:
            since_s = time.monotonic()
            self._received[heartbeat.rank] = (heartbeat.number, since_s)
        silent_s = time.monotonic() - since_s
        return f"it has sent no heartbeat for {silent_s:.0f} s" if silent_s > heartbeat.silent_s else ""


def main_stack() -> str:
    """The stacks of the main thread, newest call last, and of native threads that now run Python, as autograd's."""
    frames = sys._current_frames()
    python_threads = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    main = threading.main_thread().ident
    chosen = [main, *(ident for ident in frames if ident not in python_threads)]
    stacks = [_summary(frames[ident]) for ident in chosen if ident in frames]
    del frames
    return "another thread, of native code:\n".join("".join(stack.format()) for stack in stacks)


def _summary(frame: object) -> traceback.StackSummary:
    """Source lines are looked up later, when the frames and their locals have been released."""
    walked = traceback.walk_stack(frame)  # type: ignore[arg-type]
    summary = traceback.StackSummary.extract(walked, lookup_lines=False)
    summary.reverse()
    begins = max((i + 1 for i, f in enumerate(summary) if _HOSTS & set(PurePath(f.filename).parts)), default=0)
    shown = summary[begins:] or summary[-3:]  # idle: its host waits for a request
    return traceback.StackSummary.from_list([f for f in shown if not f.filename.endswith(_BETWEEN)][-_MAX_FRAMES:])
