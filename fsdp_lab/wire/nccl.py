"""`Nccl`: opens NCCL's groups of one rank, and has the streams and events of its GPU. `NcclGroup`: one of the groups.

Note: waiting for a GPU. `wait` of a collective over NCCL only orders the current stream behind it. The host waits where it
reads a result: in `.item()`, `.tolist()`, `synchronize`, in C, where no Python exception reaches it, and for ever if a rank
does not join. Only an abort of NCCL's communicator from another thread ends that, and what was read is invalid. So
`WireContext.abort` sets its reason before it aborts NCCL, and whoever has waited for the device calls `WireContext.check`.

Note: NCCL's own error handling. By default torch's watchdog ends the process when a collective fails or times out, or aborts
the communicators, and the host would go on with invalid values without knowing. So for our groups it is switched off
(`_SETTINGS`). The watchdog still finds timeouts and errors, and says so in `Work.get_future_result`, some tenths of a second
late; the abort monitor reads that (`WireContext.failure`). torch reads the settings when a group is opened: they are set for
that moment only, so that groups of others keep the user's.

Note: memory. NCCL's work holds its outputs, so nothing that outlives a collective may hold its work: the meter keeps two
events, and an observer the `NcclOutcome`. A future is completed on a side stream, so that the stream that computes does not
wait (`WireWork`, which also says how long memory lives then)."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed as dist

from fsdp_lab.base.streams import Streams

_CLOSE_S = 10.0  # the longest wait for a group to be aborted or shut down, before others are opened
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # report only
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # with it there is no watchdog, and `wait` cannot be aborted
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # it would end the process when the watchdog itself is blocked for long
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # after a failure the watchdog sleeps four times that, and closing waits
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it switches the error handling on again
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
_FAILURES = {1: "did not complete in time: a rank did not join it"}  # by torch's `WorkResult`; 0 is success


class Nccl:
    """See above. Tests replace it by a simulation on a CPU."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._side: Any = None  # the stream on which futures are completed

    def carries(self, tensor: Tensor) -> bool:
        """Returns whether a tensor goes over NCCL; others go over Gloo."""
        return self._streams.holds(tensor)

    def open(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """A group; its communicator is made by its first collective."""
        nccl: Any = dist.ProcessGroupNCCL  # not in a build for a CPU
        options = nccl.Options()
        options._timeout = timeout
        options.is_high_priority_stream = True  # as base/streams.py says of its own
        own = {"supports_time_estimate": False}  # of what it estimates it sends nothing, and completes no work
        with _own_settings():
            return type("ProcessGroupNCCL", (nccl,), own)(store, rank, size, options)

    def record(self) -> Any:
        """An event on the current stream, whose time can be read."""
        return self._streams.mark()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, the current stream is a side stream, which is to wait for a collective first: that is behind the stream on
        which it was issued."""
        if self._side is None:
            self._side = self._streams.new("side")
        with self._streams.entered(self._side):
            yield

    def complete(self, future: torch.futures.Future[Any], result: Any) -> None:
        """Complete a future of CUDA tensors: a stream that waits for it waits for the current one."""
        future.set_result(result)

    def synchronize(self) -> None:
        """Wait for the device. After an abort it returns early: see the note on waiting."""
        self._streams.synchronize()


class NcclOutcome:
    """Whether and how a collective has ended. It holds no tensor, and asks the driver nothing, which can block."""

    def __init__(self, work: Any) -> None:
        self._result = work.get_future_result()  # an int, completed by torch's watchdog

    def is_completed(self) -> bool:
        return bool(self._result.done())

    def failure(self) -> str | None:
        """Why it failed, or None."""
        value = int(self._result.value()) if self._result.done() else 0
        return _FAILURES.get(value, f"failed in NCCL (torch's WorkResult {value})") if value else None


class NcclGroup:
    """One group of NCCL's, `inner`, that can be aborted from any thread and is closed in bounded time."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.met = False  # whether all ranks have come to their first collective in it: see `Wire._send`
        self._lock = threading.Lock()
        self._aborting: Callable[[float], object] | None = None  # waits for its end

    def abort(self) -> None:
        """End its collectives on this rank. Returns at once, and can be repeated. Each group is aborted in a thread of
        its own: the abort of a communicator may wait for its kernels, and those may wait on the device for another
        communicator's."""
        with self._lock:
            if self._aborting is None:
                self._aborting = self._in_thread(self.inner.abort)

    def close(self, *, aborted: bool, busy: Callable[[], bool]) -> None:
        """Release it. After an abort, or if it stays `busy` since a rank left without a word, by an abort: torch's shutdown
        waits for the kernels, and meanwhile an abort waits for it. The caller drops the last reference (see
        `WireContext.destroy_async`)."""
        end_s = time.monotonic() + _CLOSE_S
        while not aborted and busy() and time.monotonic() < end_s:
            time.sleep(0.01)
        if aborted or busy():
            self.abort()
            assert self._aborting is not None
            self._aborting(_CLOSE_S)
        else:
            self._in_thread(self.inner.shutdown)(_CLOSE_S)

    def _in_thread(self, call: Any) -> Callable[[float], object]:
        """Returns what waits for the end of the call."""

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # it took longer than the group's timeout
                call()

        thread = threading.Thread(target=run, name="fsdp-lab-nccl", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts none at its exit
            run()
            return lambda timeout_s: None
        return thread.join


@contextmanager
def _own_settings() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _SETTINGS}
    level = dist.get_debug_level()
    os.environ.update(_SETTINGS)
    if level == dist.DebugLevel.DETAIL:  # it switches the error handling on again
        dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        yield
    finally:
        dist.set_debug_level(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
