"""A simulated NCCL on a CPU: what it does to the host, to streams and to memory, so that aborts can be tested without a GPU.

It takes the place of `fsdp_lab.wire.Nccl`. A collective runs in a thread of its group, over Gloo; `wait` of its work only
orders the current simulated stream behind it. As on a GPU, the host waits where an operator needs the values: it blocks in
C, where no exception and no signal handler reaches it, until the collective has run, or the group is aborted; what it reads
then is garbage. In this simulation every operator waits for its stream, as if the queue of the device were always full: a
dispatch mode sees to that. A work holds its tensors, and its failure is reported late, as torch's watchdog does.

`.tolist()` of a tensor on a CPU is no operator and waits for nothing; `.clone().tolist()` does.

Floats of 32 bits and fewer are "on the device"; other tensors, such as the lab's votes, are the host's and go over Gloo.

`simulated(place, function, ...)` is for `pool.run`: it calls the function in a rank whose NCCL is simulated."""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fsdp_lab.rank import rendezvous
from fsdp_lab.wire import group as wire_group
from tests.engine.simulated import tensors_in
from tests.pool import Place

LATE_S = 0.1  # how late the watchdog reports the end of a collective
ON_DEVICE = (torch.float32, torch.bfloat16, torch.float16)
_LIBC = ctypes.CDLL(None)  # its calls release the GIL
_SLICE = timedelta(seconds=0.05)
SUCCESS, TIMED_OUT, FAILED = 0, 1, 2  # of torch's `WorkResult`


class Gate:
    """Opened once. `wait` blocks in `pthread_cond_wait`, which no signal ends."""

    def __init__(self) -> None:
        # all zero: ready
        self._mutex, self._condition = (ctypes.create_string_buffer(64), ctypes.create_string_buffer(64))
        self.is_open, self.opened_s = False, 0.0

    def open(self) -> None:
        if self.is_open:
            return
        _LIBC.pthread_mutex_lock(self._mutex)
        self.is_open, self.opened_s = True, time.perf_counter()
        _LIBC.pthread_cond_broadcast(self._condition)
        _LIBC.pthread_mutex_unlock(self._mutex)

    def wait(self) -> None:
        _LIBC.pthread_mutex_lock(self._mutex)
        while not self.is_open:
            _LIBC.pthread_cond_wait(self._condition, self._mutex)
        _LIBC.pthread_mutex_unlock(self._mutex)


class Stream:
    """What it is ordered behind, as far as it is not known to be over."""

    def __init__(self) -> None:
        self.behind: list[Gate] = []

    def order_behind(self, gates: Sequence[Gate]) -> None:
        self.behind += [gate for gate in gates if not gate.is_open]

    def synchronize(self) -> None:
        gates, self.behind = self.behind, []
        for gate in gates:
            gate.wait()


class Event:
    """Recorded on a stream: it happens when all that the stream was ordered behind is over."""

    def __init__(self, stream: Stream) -> None:
        self._behind, self._at_s = list(stream.behind), time.perf_counter()

    @property
    def happened_s(self) -> float:
        if not self.query():
            raise RuntimeError("the event has not happened yet")
        return max([self._at_s, *(gate.opened_s for gate in self._behind)])

    def query(self) -> bool:
        return all(gate.is_open for gate in self._behind)

    def synchronize(self) -> None:
        for gate in self._behind:
            gate.wait()

    def elapsed_time(self, other: "Event") -> float:
        """In milliseconds."""
        return (other.happened_s - self.happened_s) * 1e3


class SimulatedWork(dist.Work):
    def __init__(self, device: "SimulatedNccl", tensors: list[Tensor]) -> None:
        super().__init__()
        self._device, self.tensors = device, tensors  # like NCCL's, it holds them
        self.done = Gate()
        self.result: torch.futures.Future[int] = torch.futures.Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._device.current.order_behind([self.done])
        return True

    def is_completed(self) -> bool:
        return self.done.is_open

    def get_future_result(self) -> torch.futures.Future[int]:
        return self.result


class SimulatedGroup:
    """Has the collectives of `ProcessGroupNCCL`, which run one after the other in a thread.

    Only that thread uses Gloo's group. An operation that was given up still runs in it, and whoever drops the last reference
    to it waits until the operation times out. A collective is passed to the thread by its name: as a method of the group
    it would be a reference, also in the traceback of a collective that is refused after an abort."""

    def __init__(self, device: "SimulatedNccl", gloo: Any, timeout: timedelta) -> None:
        self._device, self._gloo, self._timeout_s = device, gloo, timeout.total_seconds()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._lock = threading.Lock()  # held while outputs are written
        self._communicator = threading.Lock()  # held while it is shut down or aborted
        self._in_flight: list[SimulatedWork] = []
        self.issued = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def __getattr__(self, name: str) -> Callable[..., SimulatedWork | None]:
        """A collective: its first argument is its outputs."""
        return lambda *args: self._issue(name, args)

    def _issue(self, name: str, args: tuple[Any, ...]) -> SimulatedWork | None:
        work, behind = SimulatedWork(self._device, tensors_in(args)), list(self._device.current.behind)
        with self._lock:
            if self._aborted.is_set():
                raise RuntimeError("NCCL communicator was aborted")
            self._in_flight.append(work)
            self.issued += 1
        self._queue.put((work, name, args, behind))
        if all(getattr(arg, "asyncOp", True) for arg in args):
            return work
        self._device.current.order_behind([work.done])
        return None  # as NCCL does for a synchronous collective

    def abort(self) -> None:
        """End all kernels: they have written garbage, and whoever waits for them continues. It waits for a shutdown."""
        if self._device.deaf:
            return
        with self._communicator, self._lock:
            self._aborted.set()
            ended, self._in_flight = self._in_flight, []
        for work in ended:
            work.done.open()
        self._queue.put(None)

    def shutdown(self) -> None:
        """Waits for the kernels."""
        with self._communicator:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._run_one(*item)
            del item
        self._gloo, self._queue = None, queue.SimpleQueue()  # here, as this may wait for an operation of Gloo's

    def _run_one(self, work: SimulatedWork, name: str, args: tuple[Any, ...], behind: list[Gate]) -> None:
        for gate in behind:
            gate.wait()
        result = self._execute(work.tensors, name, args)
        threading.Timer(LATE_S, work.result.set_result, (result,)).start()
        if result != SUCCESS:
            self._aborted.wait()  # its kernel spins on
        work.done.open()
        with self._lock:
            if work in self._in_flight:
                self._in_flight.remove(work)

    def _execute(self, tensors: list[Tensor], name: str, args: tuple[Any, ...]) -> int:
        """On copies: an abort must leave no operation of Gloo's that still writes."""
        if self._device.fails():
            return FAILED
        with self._lock:
            if self._aborted.is_set():  # the tensors may be freed now
                return SUCCESS
            if any(t.untyped_storage().nbytes() < t.numel() * t.element_size() for t in tensors):
                raise AssertionError("a tensor was freed before its collective began")
            copies = {id(t): t.detach().clone() for t in tensors}
        given = tree_map_only(Tensor, lambda t: copies[id(t)], args)
        inner, until_s = getattr(self._gloo, name)(*given), time.monotonic() + self._timeout_s
        while not self._aborted.is_set():
            try:
                inner.wait(_SLICE)
                self._land(args[0], copies)
                return SUCCESS
            except RuntimeError:  # the slice is over, or the peer is gone, which a kernel does not notice
                if time.monotonic() > until_s:
                    return TIMED_OUT
                if inner.is_completed():
                    time.sleep(_SLICE.total_seconds())
        return SUCCESS

    def _land(self, outputs: Any, copies: dict[int, Tensor]) -> None:
        with self._lock:
            if not self._aborted.is_set():
                for t in tensors_in(outputs):
                    t.detach().copy_(copies[id(t)])


class SimulatedNccl:
    """Takes the place of `fsdp_lab.wire.Nccl`, and is its device. `deaf`: an abort does nothing."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.main, self.side = Stream(), Stream()
        self.current = self.main  # only the main thread uses streams
        self.groups: list[SimulatedGroup] = []
        self._fails_in: int | None = None

    def fail_after(self, collectives: int) -> None:
        """After so many, one never ends, and the watchdog says that NCCL failed."""
        self._fails_in = collectives

    def fails(self) -> bool:
        if self._fails_in is None:
            return False
        self._fails_in = self._fails_in - 1 if self._fails_in else None
        return self._fails_in is None

    # -- the interface of Nccl ------------------------------------------------------------------------------------

    def carries(self, tensor: Tensor) -> bool:
        return tensor.dtype in ON_DEVICE

    def open(self, store: Any, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
        gloo = wire_group._open_gloo(store, rank, size, timedelta(seconds=60))
        self.groups.append(SimulatedGroup(self, gloo, timeout))
        return self.groups[-1]

    def record(self) -> Event:
        return Event(self.current)

    @contextmanager
    def beside(self) -> Iterator[None]:
        outside, self.current = self.current, self.side
        try:
            yield
        finally:
            self.current = outside

    def complete(self, future: torch.futures.Future[Any], result: Any) -> None:
        """Later: DDP waits for it in C++, where no stream of this simulation can be made to wait."""
        gates = list(self.current.behind)

        def run() -> None:
            for gate in gates:
                gate.wait()
            future.set_result(result)

        threading.Thread(target=run, daemon=True).start()

    def synchronize(self) -> None:
        self.main.synchronize()
        self.side.synchronize()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Operators of this thread are kernels of the device."""
        with _Kernels(self):
            yield


class _Kernels(TorchDispatchMode):
    def __init__(self, device: SimulatedNccl) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":  # a mark of the host's
            self._device.current.synchronize()
        return func(*args, **(kwargs or {}))


def simulated(place: Place, function: Callable[..., Any], *args: Any, deaf: bool = False) -> Any:
    """Call `function(place, *args)` in a rank whose NCCL is simulated. `deaf`: NCCL's abort does nothing."""
    device = SimulatedNccl(deaf=deaf)
    with mock.patch.object(rendezvous, "nccl_of", lambda info: device), device.running():
        return function(place, *args)
