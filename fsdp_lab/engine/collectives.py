"""Collectives of flat buffers, and `CommHandle`, which waits for them. See "Note: streams and lifetimes" in base/streams.py.

On a CPU there are no streams: Gloo's threads move the bytes while Python goes on, and `wait` blocks until they have arrived.
What remains to be done then (`then`) runs in the thread that waits; on a GPU it is queued on the stream at once.

A gather's output is passed as an alias that does not share the version counter (`.data`): Gloo raises the counter from its
own thread when the bytes arrive, and autograd would take the views that it saved for modified ones."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_lab.base.streams import CommStream

Group = dist.ProcessGroup


class ShardError(RuntimeError):
    """Something was done with a sharded model that cannot be. `str()` is a sentence that names the parameter or module, and
    says what to do. Where ranks could disagree, every one of them raises it."""


@contextmanager
def answered(ranks: Sequence[int], what: Callable[[], str]) -> Iterator[None]:
    """Around collectives that are waited for at once, and nothing else. Raises ShardError where torch's group gives up
    since one of `ranks` did not come, as after its last batch, or left. A group of somebody else's has errors of its own
    kinds: they pass. `what`: says in which step, and for what."""
    began_s = time.monotonic()
    try:
        yield
    except RuntimeError as e:
        if type(e) is not RuntimeError and not isinstance(e, dist.DistError):
            raise
        waited_s, others = time.monotonic() - began_s, [rank for rank in ranks if rank != dist.get_rank()]
        who = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {', '.join(map(str, others))}"
        raise ShardError(
            f"rank {dist.get_rank()} waited {waited_s:.1f} s {what()} for {who}, which did not come; give every rank "
            f"the same number of batches, and let all make the same calls: {e}"
        ) from e


class CommHandle:
    """Something in flight. To be made inside `stream.entered()`; `keeps`: tensors, or their holders, that must outlive it;
    `answered`: the context in which its work is waited for."""

    def __init__(
        self,
        stream: CommStream,
        work: dist.Work | None,
        keeps: tuple[object, ...] = (),
        then: Callable[[], None] | None = None,
        answered: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._work, self._then, self._keeps, self._streams, self._answered = work, then, keeps, stream.streams, answered
        self._event: Any = None
        if stream.stream is not None:
            self._finish()
            self._event = stream.stream.record_event()

    def wait(self, *, on_host: bool = False) -> None:
        """Queue what the current stream is given from now on behind it. `on_host`: the host reads the result next, so Python
        waits for it too."""
        if self._streams is None:
            self._finish()
        elif on_host:
            self._event.synchronize()
        else:
            self._streams.current().wait_event(self._event)

    def _finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            with self._answered():
                work.wait()
        then, self._then = self._then, None
        if then is not None:
            then()


def all_gather(full: Tensor, shard: Tensor, group: Group) -> dist.Work:
    """full: [F * n], shard: [n], of one dtype. Of the group itself, as those below: before torch's functions call it they
    look at what others may pass, which costs as much on the host."""
    return group._allgather_base(_real(full.data), _real(shard), c10d.AllgatherOptions())


def reduce_scatter(shard: Tensor, full: Tensor, group: Group) -> dist.Work:
    """shard: [n] gets its part of the sum over the ranks of full: [F * n]. The caller divides: in some releases of torch
    Gloo's AVG was a sum."""
    return group._reduce_scatter_base(_real(shard), _real(full), c10d.ReduceScatterOptions())


def all_reduce(tensor: Tensor, group: Group) -> dist.Work:
    """tensor: [n], summed in place."""
    return group.allreduce([_real(tensor)], c10d.AllreduceOptions())


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, side by side: no backend of torch sends them otherwise."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


# -- memory ----------------------------------------------------------------------------------------------------------


class ResizedStorage:
    """A tensor [numel] that has memory only while it is held. One that is made anew would not do: autograd saves views of
    gathered parameters, and the backward reads through them. Held when made: torch makes no view of what has no storage."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()

    @property
    def is_held(self) -> bool:
        return bool(self._storage.size())

    def hold(self) -> None:
        """Takes the memory; its content is undefined then."""
        if not self.is_held:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        self._storage.resize_(0)


class BufferPool(Protocol):
    """The `buffer_pool` of a group whose ranks share memory, as the lab's wire has: what is gathered or sent there is not
    copied once more, and is in the same place in every step. It must not be written to after it was sent, since other ranks
    may read it later; it may be freed. ZeRO-1 keeps what it sends, and uses torch's allocator."""

    def empty(self, numel: int, dtype: torch.dtype, *, is_private: bool = False) -> Tensor:
        """[numel], with any content, on the host. `is_private`: it may be written to at any time, also after it was sent."""

    def reserve(self, numel: int, dtype: torch.dtype) -> Any:
        """What has the methods of a `ResizedStorage`. numel: not 0."""

    def map_shards(self, numel: int, dtype: torch.dtype) -> Any:
        """The same of shards of `numel`, where they lie: see extras/parameters.py."""

    def settle(self, tensor: Tensor) -> None:
        """Wait until other ranks have read what was sent from a tensor."""


def pool_of(group: Group | None, device: torch.device) -> BufferPool | None:
    return getattr(group, "buffer_pool", None) if device.type == "cpu" else None
