"""`WireWork`: one collective in flight, with its own future (see "Note: abort" in context.py)."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from fsdp_lab.wire.context import RankAborted, Timed, WireContext, WireTimeout
from fsdp_lab.wire.meter import Collective
from fsdp_lab.wire.shared_memory import SharedWork, profiled

_SLICE = timedelta(seconds=0.1)  # the longest wait in C++, hence how late an abort is seen


def in_order(rounds: Sequence[Any]) -> Any:
    """Several operations of Gloo's as one; None for none. One thread runs them in this order: all end with the last."""
    return _Rounds(rounds) if len(rounds) > 1 else next(iter(rounds), None)


class _Rounds(dist.Work):
    """See `in_order`. Fails where any of them did."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        return bool(self._works[-1].is_completed())

    def get_future(self) -> torch.futures.Future[Any]:
        futures = [work.get_future() for work in self._works]
        checked: torch.futures.Future[Any] = futures[-1].then(lambda _: [future.value() for future in futures][-1])
        return checked


class WireWork(dist.Work):
    """Wraps the Gloo or NCCL work of one collective.

    An abort interrupts a wait, which is cut into slices, but not for a transfer between two ranks over Gloo: when a wait
    for one times out, Gloo closes the connection.

    `finish` is what remains to be done when the bytes have arrived (a sum in rank order, a division, a copy to the
    device). It runs once, in the thread that waits or, if a future was handed out, in the thread that completes it.

    On a GPU it runs on one stream, whichever thread calls it: that of the first wait, or of who asked for a future, or, for
    NCCL's futures, a side stream. Other streams that wait are ordered behind that one. torch's allocator frees memory for
    the stream that allocated it, so it must be told what another stream uses (`Streams.used_on`): the temporaries of
    `finish`, and on a side stream all tensors, which NCCL's work holds only until a stream waits for it."""

    _finished = _completed = _settled = False  # outputs written; link done too; future done too
    _future: torch.futures.Future[Any] | None = None
    _stream: Any = None  # on which a GPU's results are ready
    _issued_on: Any = None  # the stream, where `finish` uses tensors

    def __init__(
        self,
        context: WireContext,
        issued: Collective,
        inner: Any,
        results: list[torch.Tensor],
        finish: Callable[[], None] | None,
        blocking: bool,
        timed: Timed | None,
        uses: Sequence[torch.Tensor],
    ) -> None:
        """`timed`: of NCCL's. `uses`: the device's tensors, where NCCL or `finish` uses them."""
        super().__init__()
        self._context, self._issued, self._inner, self._results = context, issued, inner, results
        self._finish, self._blocking, self._timed, self._uses = finish, blocking, timed, uses
        self._once = threading.Lock()
        if finish is not None and context.streams is not None:
            self._issued_on = context.streams.current()
        # When it ends. NCCL's end is that of the stream that waits for it, and what has no future ends with its wait.
        if blocking and isinstance(inner, SharedWork):
            inner.issued, inner.on_read = issued, context.ended
        elif blocking and inner is not None:
            with contextlib.suppress(RuntimeError):  # Gloo's own reduce-scatter
                inner.get_future().add_done_callback(partial(context.ended, issued))

    # -- torch's interface ----------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RankAborted, WireTimeout, or RankAborted naming a connection that broke."""
        if self._completed:
            self._order_again()
        elif not self._blocking and self._finish is None and self._future is None and self._inner is not None:
            self._wait_stream()  # NCCL's, as FSDP waits for it
            self._stream = None if self._context.streams is None else self._context.streams.current()
            self._inner, self._uses, self._finished, self._completed = None, (), True, True
        else:
            issued, start_s = self._issued, time.perf_counter()
            if self._inner is not None:
                self._wait_inner(timeout)
            self._finish_up()
            if issued.link_end_s is not None:
                self._context.wait_link(issued)
            self._complete()
            if self._blocking:  # otherwise a stream waits, not this thread
                issued.waits += ((start_s, time.perf_counter()),)
            if self._future is not None:
                self._order_again()
        if self._context.aborted is not None:
            self._context.check()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        inner = self._inner
        if isinstance(inner, SharedWork):
            inner.try_finish()
        landed = self._finished or inner is None or inner.is_completed()
        return self._completed or (landed and time.perf_counter() >= (self._issued.link_end_s or 0.0))

    def is_success(self) -> bool:
        return self.is_completed() and self._context.aborted is None

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the list of result tensors; after an abort too, with invalid values."""
        if self._future is None:
            streams = self._context.streams
            on_device = streams is not None and any(map(streams.holds, self._results[:1]))
            self._future = streams.future() if streams is not None and on_device else torch.futures.Future()
            if streams is not None and self._blocking and self._stream is None:
                self._stream = streams.current()
            self._issued.by_future = True
            self._context.add_cancellable(self)
            if self._inner is None:
                self._land()
            elif not self._blocking:  # on a side stream, so that the stream that computes does not wait for NCCL
                nccl = self._context.nccl
                assert nccl is not None
                with nccl.beside():
                    self._wait_stream()
                    self._land()
            else:
                self._land_when_inner_completes()
        return self._future

    def followed_by(self, then: Callable[[], object], results: list[torch.Tensor]) -> "WireWork":
        """Add to `finish`, and set other results. Only for the caller that issued the work, right away."""
        before, streams = self._finish, self._context.streams

        def both() -> None:
            if before is not None:
                before()
            then()

        self._finish, self._results, self._uses = both, results, (*self._uses, *results)
        self._issued_on = None if streams is None else streams.current()
        return self

    def cancel(self) -> None:
        """Complete the future without its bytes. A `finish` in progress ends first."""
        with self._once:
            self._finish = None
        self._settle()

    def _land_when_inner_completes(self) -> None:
        assert self._inner is not None
        try:
            self._inner.get_future().add_done_callback(self._land_in_callback)
        except RuntimeError:  # no future: wait for it in a thread
            threading.Thread(target=self._land_in_thread, daemon=True).start()

    def _land_in_callback(self, done: torch.futures.Future[Any]) -> None:
        """Called in Gloo's thread when the inner future is complete. Its work may not be yet: only the future is used."""
        if self._settled:
            return  # cancelled
        try:
            done.value()
            self._land()
        except RuntimeError as e:
            self._context.abort(f"{self._issued.described} failed: {_first_line(e)}")

    def _land_in_thread(self) -> None:
        try:
            self._wait_inner(None)
            self._land()
        except RuntimeError as e:
            if not self._settled:
                self._context.abort(str(e))

    def _wait_inner(self, timeout: timedelta | None) -> None:
        if not self._blocking:
            self._wait_stream()
            return
        sliced = self._issued.ordinal >= 0 or isinstance(self._inner, SharedWork)
        limit_s = timeout.total_seconds() if timeout and timeout.total_seconds() > 0 else self._context.timeout_s
        while True:
            self._context.check()
            try:
                self._inner.wait(_SLICE if sliced else timedelta(seconds=limit_s))
                return
            except RuntimeError:  # the slice is over, it failed, or it completed just now
                if self._inner.is_completed():
                    try:
                        self._inner.wait()  # returns at once, or raises Gloo's error
                    except RuntimeError as e:
                        raise RankAborted(f"{self._issued.described} failed: {_first_line(e)}") from None
                    return
            if time.perf_counter() - self._issued.issue_s > limit_s:
                what = self._issued.described
                raise WireTimeout(f"{what} did not complete in {limit_s:.0f} s: a rank did not join it")

    def _wait_stream(self) -> None:
        """NCCL: orders the current stream behind the work, without blocking."""
        assert self._context.nccl is not None
        try:
            self._inner.wait()
        except RuntimeError as e:
            self._context.check()  # it was aborted
            raise RankAborted(f"{self._issued.described} failed: {_first_line(e)}") from None
        if self._timed is not None:
            self._timed.end = self._context.nccl.record()

    def _land(self) -> None:
        """The bytes have arrived: complete the future when the emulated link has carried them, too."""
        self._finish_up()
        due_s = self._issued.link_end_s
        if due_s is None or time.perf_counter() >= due_s:
            self._complete()
        else:
            self._context.alarm.at(due_s, self._complete_in_alarm)

    def _finish_up(self) -> None:
        """Run `finish` on the bytes that have arrived, once."""
        if self._blocking:
            self._context.untrack(self._issued)
        with self._once:
            if not self._finished:
                finish, self._finish = self._finish, None
                if self._stream is None and self._context.streams is not None:
                    self._stream = self._context.streams.current()
                if finish is not None and self._context.aborted is None:
                    with self._on_stream(), profiled():
                        finish()
                if finish is not None or self._future is not None:
                    self._keep_memory()
                self._finished, self._uses = True, ()
                if not self._blocking:
                    self._inner = None  # NCCL's work holds its outputs

    def _on_stream(self) -> AbstractContextManager[Any]:
        streams, stream = self._context.streams, self._stream
        if streams is None or stream is None or streams.current() == stream:  # to enter one takes longer than to ask
            return contextlib.nullcontext()
        return streams.entered(stream)

    def _keep_memory(self) -> None:
        streams = self._context.streams
        if streams is not None and self._issued_on != self._stream:
            for t in filter(streams.holds, self._uses):
                streams.used_on(t, self._stream)

    def _order_again(self) -> None:
        """Order the current stream behind results that are ready on another one."""
        streams = self._context.streams
        if self._future is not None and not self._blocking:
            self._future.wait()
        elif streams is not None and self._stream is not None and streams.current() != self._stream:
            streams.current().wait_stream(self._stream)

    def _complete(self) -> None:
        with self._once:
            first, self._completed = not self._completed, True
        if first and self._blocking and (self._issued.end_s is None or self._issued.by_future):
            self._issued.end_s = time.perf_counter()  # a future delivers finished results
        if self._future is not None:
            self._settle()

    def _complete_in_alarm(self) -> None:
        """Called in the alarm's thread."""
        try:
            self._complete()
        except RuntimeError as e:
            self._context.abort(f"{self._issued.described} failed: {_first_line(e)}")

    def _settle(self) -> None:
        with self._once:
            if self._future is None or self._settled:
                return
            self._settled = True
        with self._on_stream():
            if not self._blocking and self._context.nccl is not None:
                self._context.nccl.complete(self._future, self._results)
            else:
                self._future.set_result(self._results)


def _first_line(e: Exception) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
