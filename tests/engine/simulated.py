"""A simulated device: streams, events and memory of a GPU, on tensors of the CPU, so that a missing wait is found here.

Operations are seen by a dispatch mode. Those inside `CommStream.entered` belong to that stream, all others to the compute
stream, or to the host where all their memory is the host's. Collectives run on a stream of their group's own, as NCCL's do.
Their work holds its tensors until a stream waits for it, as NCCL's does.

Every operation runs at once, so values are right whatever is waited for; what a GPU could do in another order is found by
vector clocks (Fidge 1988). Each stream has a clock, and so has the host; a wait joins two of them, and what the host gives
to a stream follows what it did before. Two accesses of one memory, of which one writes, must be ordered; so must all
accesses of memory that was freed, and the next allocation from the same pool. This covers every order at once.

A wait can be left out (`without`): then it must be noticed."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fsdp_lab
from fsdp_lab.engine import buffer, mesh

aten: Any = torch.ops.aten
Clock = Counter[str]  # by stream: how many of its operations are known to have ended
PACKAGE = Path(inspect.getfile(fsdp_lab)).parent


@dataclass(frozen=True)
class Wait:
    """Who waits for whom, and where in the package."""

    waiting: str
    waited_for: str
    at: str


@dataclass
class Access:
    stream: str
    time: int
    what: str

    def precedes(self, clock: Clock) -> bool:
        return clock[self.stream] >= self.time


@dataclass
class Memory:
    """One storage: from whose pool it is, and who accessed it last."""

    storage: StorageWeakRef
    pool: str = ""  # "": it was there before
    is_host: bool = False
    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)  # since that write, by stream
    used_on: set[str] = field(default_factory=set)  # streams for which the allocator waits before it gives it again

    @property
    def accesses(self) -> list[Access]:
        return [*([] if self.write is None else [self.write]), *self.reads.values()]


class Event:
    def __init__(self, device: SimulatedDevice, stream: Stream) -> None:
        self._device, self.stream = device, stream
        self.clock = Clock(stream.clock)

    def synchronize(self) -> None:
        self._device.wait(self._device.host, self)

    def query(self) -> bool:
        return all(self._device.host.clock[name] >= time for name, time in self.clock.items())

    def elapsed_time(self, other: Event) -> float:
        for event in (self, other):
            if not event.query():
                self._device.races.append(f"a mark on {event.stream.name} is read before the host has waited for it")
        return 0.0


class Future:
    """As torch's is with devices: it records an event where it is set, and a callback runs on a stream of its own."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self._event, self._value = device, None, None
        self._callbacks: list[Callable[[], object]] = []

    def done(self) -> bool:
        return self._event is not None

    def set_result(self, value: Any) -> None:
        self._event, self._value = self._device.current_stream.record_event(), value
        for call in self._callbacks:
            call()

    def value(self) -> Any:
        return self._value

    def wait(self) -> Any:
        assert self._event is not None, "nothing else would complete it"
        self._device.current_stream.wait_event(self._event)
        for t in tensors_in(self._value):
            self._device.used_on(t, self._device.current_stream)
        return self._value

    def then(self, callback: Callable[[Future], Any]) -> Future:
        child = Future(self._device)

        def call() -> None:
            with self._device.entered(self._device.new("callback")):
                self.wait()
                child.set_result(callback(self))

        if self.done():
            call()
        else:
            self._callbacks.append(call)
        return child


class Stream:
    """Of the device, or the host, which is one too."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self._device, self.name = device, name
        self.clock = Clock()

    def record_event(self) -> Event:
        self._device.counts["events"] += 1
        return Event(self._device, self)

    def wait_event(self, event: Event) -> None:
        self._device.wait(self, event)

    def wait_stream(self, other: Stream) -> None:
        self._device.wait(self, Event(self._device, other))

    def synchronize(self) -> None:
        Event(self._device, self).synchronize()


class Work:
    """Of a collective. To wait for it lets the current stream wait, not the host."""

    def __init__(self, device: SimulatedDevice, event: Event, holds: Sequence[Tensor]) -> None:
        self._device, self._event, self._holds = device, event, holds

    def wait(self) -> bool:
        self._device.wait(self._device.current_stream, self._event)
        self._holds = ()
        return True

    def get_future_result(self) -> torch.futures.Future[int]:
        """What NCCL's watchdog finds: it succeeded."""
        found: torch.futures.Future[int] = torch.futures.Future()
        found.set_result(0)
        return found


class SimulatedDevice(TorchDispatchMode):
    """`Streams` (base/streams.py), and a mode within which all that is given to them is seen.

    Args:
        without: a wait that is left out.

    Attributes:
        waits: how often each wait was made.
        counts: of streams, events, marks, copies between host and device, collectives, and synchronisations of the host.
        races: two accesses of one memory that could happen in either order, in words. The ranks go on, as they do on a
            device: one that stopped would leave the others in a collective."""

    def __init__(self, *, without: Wait | None = None) -> None:
        super().__init__()
        self._without = without
        self.streams: dict[str, Stream] = {}
        self.host, self.compute = self._stream("host"), self._stream("compute")
        self.current_stream = self.compute
        self.waits: Counter[Wait] = Counter()
        self.counts: Counter[str] = Counter()
        self.races: list[str] = []
        self._memory: dict[int, Memory] = {}
        self._freed: list[tuple[str, Access]] = []  # what was accessed and is free now, with its pool

    # -- `Streams` -----------------------------------------------------------------------------------------------------

    def new(self, name: str) -> Stream:
        self.counts["streams"] += 1
        return self._stream(name)

    def current(self) -> Stream:
        return self.current_stream

    @contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        before, self.current_stream = self.current_stream, stream
        try:
            yield
        finally:
            self.current_stream = before

    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            made = torch.empty(numel, dtype=dtype)
        self._of(made, new=True).is_host = True
        return made

    def holds(self, tensor: Tensor) -> bool:
        memory = self._of(tensor)
        return bool(memory.pool) and not memory.is_host

    def reads_and_writes(self, what: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """The host does, without an operator: Gloo."""
        self._access(self.host, what, read, written)

    def used_on(self, tensor: Tensor, stream: Stream) -> None:
        self._of(tensor).used_on.add(stream.name)

    def mark(self) -> Event:
        self.counts["marks"] += 1
        return Event(self, self.current_stream)

    def synchronize(self) -> None:
        if self._is_made(self.host, "all"):
            for stream in list(self.streams.values()):
                self.host.clock |= stream.clock

    def future(self) -> Future:
        return Future(self)

    # -- installed -----------------------------------------------------------------------------------------------------

    @contextmanager
    def installed(self, collectives: Mapping[str, Callable[..., Any]] | None = None) -> Iterator[SimulatedDevice]:
        """Models are sharded on this device, and all operations seen. `collectives`: in place of the engine's."""
        resize = torch.UntypedStorage.resize_
        with ExitStack() as stack:
            stack.enter_context(patch.object(mesh, "streams_of", lambda device: self))
            for module, name in ((buffer, "all_gather"), (buffer, "reduce_scatter"), (buffer, "all_reduce")):
                call = self._collective(name, getattr(module, name)) if collectives is None else collectives[name]
                stack.enter_context(patch.object(module, name, call))
            stack.enter_context(
                patch.object(torch.UntypedStorage, "resize_", lambda storage, size: self._resize(resize, storage, size))
            )
            stack.enter_context(self)
            yield self

    # -- waits ---------------------------------------------------------------------------------------------------------

    def wait(self, waiting: Stream, event: Event) -> None:
        if self._is_made(waiting, event.stream.name):
            waiting.clock |= event.clock

    def _is_made(self, waiting: Stream, waited_for: str) -> bool:
        wait = Wait(waiting.name, waited_for, _place())
        self.waits[wait] += 1
        if waiting is self.host:
            self.counts["synchronisations"] += 1
        return wait != self._without

    # -- operations ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # what it does comes here again, on plain tensors
        returns = [r.alias_info for r in func._schema.returns]
        if func.namespace == "profiler" or any(r is not None and not r.is_write for r in returns):
            return func(*args, **kwargs)  # a mark of the host's, or a view
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        is_written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments}
        read = [t for name, v in given.items() if not is_written[name] for t in tensors_in(v)]
        written = [t for name, v in given.items() if is_written[name] for t in tensors_in(v)]
        stream = self.current_stream if kwargs.get("device") is not None else self._whose([*read, *written])
        found = func(*args, **kwargs)
        made = [] if any(returns) else tensors_in(found)
        is_host = stream is self.host
        for t in made:
            self._of(t, new=True).is_host = is_host
        if not func._schema.name.startswith("aten::empty") and func.overloadpacket not in (aten.new_empty, aten.set_):
            all_read = [*read, *(t for t in written if _reads_too(func))]
            self._access(stream, func._schema.name, all_read, [*written, *made])
        self._count(func, given, [*read, *written])
        return found

    def _whose(self, tensors: list[Tensor]) -> Stream:
        """The host's, where all memory that is known is; else that of the stream."""
        known = [m for m in map(self._of, tensors) if m.pool or m.is_host]
        return self.host if known and all(m.is_host for m in known) else self.current_stream

    def _count(self, func: Any, given: dict[str, Any], tensors: list[Tensor]) -> None:
        """What the host waits for, and copies between host and device."""
        both = {self._of(t).is_host for t in tensors if self._of(t).pool or self._of(t).is_host} == {True, False}
        if both and func.overloadpacket in (aten.copy_, aten._to_copy):
            self.counts["copies"] += 1
        asks = func.overloadpacket is aten._local_scalar_dense and not self._of(tensors[0]).is_host
        if asks or (both and not given.get("non_blocking")):
            self.wait(self.host, Event(self, self.current_stream))

    def _collective(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*tensors_and_group: Any) -> Any:
            *tensors, group = tensors_and_group
            plain = [t.detach() for t in tensors]
            where = f"{name} of {group.size()}"
            return self.collective(name, where, tensors[:1], tensors[1:], lambda: call(*plain, group))

        return issue

    def collective(
        self, name: str, stream: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], call: Callable[[], Any]
    ) -> Work:
        """Give one to a stream of that name, behind the current one. `call` runs it and returns torch's work."""
        self.counts[name] += 1
        own = self._stream(stream)
        own.clock |= self.current_stream.clock
        storages = {t.untyped_storage()._cdata for t in outputs}
        apart = [t for t in inputs if t.untyped_storage()._cdata not in storages]
        self._access(own, name, apart, list(outputs))
        with _disable_current_modes():
            work = call()
            if work is not None:
                work.wait()
        return Work(self, Event(self, own), [*outputs, *inputs])

    # -- memory --------------------------------------------------------------------------------------------------------

    def _of(self, t: Tensor, *, new: bool = False) -> Memory:
        storage = t.untyped_storage()
        known = self._memory.get(storage._cdata)
        if known is None:
            known = self._memory[storage._cdata] = Memory(StorageWeakRef(storage))
            if new:
                self._allocate(known)
        return known

    def _allocate(self, memory: Memory) -> None:
        """From the pool of the current stream: whatever is free there may be given again."""
        stream = self.current_stream
        memory.pool = stream.name
        for key, other in [(k, m) for k, m in self._memory.items() if m.storage.expired()]:
            self._free(other)
            del self._memory[key]
        self._host_gives(stream)
        stays = []
        for pool, access in self._freed:
            if pool != stream.name:
                stays.append((pool, access))
            elif not access.precedes(stream.clock):
                self.races.append(
                    f"{access.what} on {access.stream} accesses memory that was freed, and that {stream.name} may allocate "
                    "again meanwhile"
                )
        self._freed = stays

    def _free(self, memory: Memory) -> None:
        if not memory.is_host:
            over = [self.streams[name].clock for name in memory.used_on]  # the allocator waits for these
            self._freed += [(memory.pool, a) for a in memory.accesses if not any(map(a.precedes, over))]
        memory.write, memory.reads, memory.used_on = None, {}, set()

    def _resize(self, resize: Any, storage: Any, size: int) -> Any:
        memory = self._memory.get(storage._cdata)
        if memory is not None and not size:
            self._free(memory)
        was_empty = not storage.size()
        found = resize(storage, size)
        if memory is not None and size and was_empty:
            self._allocate(memory)
        return found

    def _host_gives(self, stream: Stream) -> None:
        """What the host gives to a stream follows what the host has done or waited for."""
        stream.clock |= self.host.clock

    def _access(self, stream: Stream, what: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        self._host_gives(stream)
        stream.clock[stream.name] += 1
        access = Access(stream.name, stream.clock[stream.name], what)
        for memory in map(self._of, read):
            self._check(memory.write, access, stream)
            memory.reads[stream.name] = access
        for memory in map(self._of, written):
            for before in memory.accesses:
                self._check(before, access, stream)
            memory.write, memory.reads = access, {}

    def _check(self, before: Access | None, access: Access, stream: Stream) -> None:
        if before is not None and not before.precedes(stream.clock):
            other = f"{before.what} on {before.stream}"
            self.races.append(f"{access.what} on {access.stream} ({_place()}) does not wait for {other}")

    def _stream(self, name: str) -> Stream:
        return self.streams.setdefault(name, Stream(self, name))


def tensors_in(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and not t.is_meta]


def _reads_too(func: Any) -> bool:
    """Whether what it writes to is read before; then another stream's write must precede either way."""
    return func.overloadpacket not in (aten.copy_, aten.zero_, aten.fill_)


def _place() -> str:
    """Where in the package this was asked for: its innermost method that is not one of streams or handles."""
    frame, found = inspect.currentframe(), ""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if PACKAGE in file.parents and file.name not in ("streams.py", "collectives.py"):
            found = f"{file.stem}.{frame.f_code.co_name}"
            break
        frame = frame.f_back
    return found
