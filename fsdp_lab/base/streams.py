"""Streams of a device, behind one small interface: `Streams`. The wire uses it too, and a test simulates a GPU's.

Note: streams and lifetimes. On a GPU each kind of communication has a CUDA stream of its own, a `CommStream`: gathers,
reductions, all-reduces between replicas, copies to the device and to the host. All have high priority, as NCCL's has over
the wire: products that fill the GPU would hold them up. A stream first waits for what the compute stream has been given
so far, so whatever it reads is written and whatever memory it allocates is free. A buffer that it allocates is freed from
the compute stream; its memory goes back to the pool of the communication stream, whose next use of it waits for the
compute stream as always. So nothing needs `record_stream`, and a gather cannot run further ahead than the points at which
the schedule issues it. In the other direction the compute stream waits for the event that a `CommHandle` records, not for
the whole stream. A buffer that one stream allocated and another reads (an unsharded gradient, a copy from the host) is
referenced by the handle until the compute stream has waited for it."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

_NOTHING: AbstractContextManager[None] = nullcontext()


class Streams:
    """The streams of a GPU; of a device that a test simulates, what has the same methods."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self, name: str) -> Any:
        """A stream of high priority, with the methods of a torch.cuda.Stream that are used here and in the wire."""
        return torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """The stream to which work is given now."""
        return torch.cuda.current_stream(self._device)

    def entered(self, stream: Any) -> AbstractContextManager[Any]:
        """Within it that stream is current."""
        return torch.cuda.stream(stream)

    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], uninitialised, on the host and pinned, so that copies to and from it are queued."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is in the device's memory."""
        return tensor.is_cuda

    def used_on(self, tensor: Tensor, stream: Any) -> None:
        """That stream uses it until here. When it is freed, its memory stays until the stream has come so far."""
        tensor.record_stream(stream)

    def mark(self) -> Any:
        """An event on the current stream with a time: it has `query`, and `elapsed_time` to a later one, in ms."""
        return self.current().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        torch.cuda.synchronize(self._device)

    def future(self) -> Any:
        """A torch.futures.Future of the device's tensors: who waits for it waits for the stream on which it was set."""
        return torch.futures.Future(devices=[self._device])


def streams_of(device: torch.device) -> Streams | None:
    """None for a CPU, which has none."""
    return Streams(device) if device.type == "cuda" else None


class CommStream:
    """One queue of communication: a stream of a device, or nothing on a CPU."""

    def __init__(self, name: str, streams: Streams | None) -> None:
        self.streams = streams
        self.stream: Any = None if streams is None else streams.new(name)

    def entered(self) -> AbstractContextManager[Any]:
        """A context, to be entered at once, in which work is queued behind what the compute stream has been given so far."""
        if self.streams is None:
            return _NOTHING
        self.stream.wait_stream(self.streams.current())
        return self.streams.entered(self.stream)

    def wait_for(self, other: Self) -> None:
        """Queue what follows behind what the other one has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(other.stream)

    def synchronize(self) -> None:
        """Let the host wait for what it has been given so far."""
        if self.stream is not None:
            self.stream.synchronize()


@dataclass(frozen=True, kw_only=True)
class CommStreams:
    """The streams of one root."""

    gather: CommStream
    reduce: CommStream
    all_reduce: CommStream
    to_device: CommStream
    to_host: CommStream

    @classmethod
    def of(cls, streams: Streams | None) -> Self:
        return cls(**{name: CommStream(name, streams) for name in cls.__dataclass_fields__})
