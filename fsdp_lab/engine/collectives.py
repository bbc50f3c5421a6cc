"""Collectives of flat buffers, and `CommHandle`, which waits for them. See "Note: streams and lifetimes" in base/streams.py.

On a CPU there are no streams: Gloo's threads move the bytes while Python goes on, and `wait` blocks until they have arrived.
What remains to be done then (`then`) runs in the thread that waits; on a GPU it is queued on the stream at once.

A gather's output is passed as an alias that does not share the version counter (`.data`): Gloo raises the counter from its
own thread when the bytes arrive, and autograd would take the views that it saved for modified ones.

Note: the end of a program. Gloo's threads release the tensors of a collective a moment after `wait` returns, and need the
interpreter for it. A script that ends right after a collective must call `torch.distributed.destroy_process_group()` first,
as torch asks of every script; mesh.py lets it end these threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed as dist

from fsdp_lab.base.streams import CommStream
from fsdp_lab.engine.errors import giving_up

Group = dist.ProcessGroup


class CommHandle:
    """Something in flight. `wait` once: afterwards its result may be used on the compute stream.

    To be made inside `stream.entered()`. `keeps` are tensors that must outlive it.
    """

    def __init__(
        self,
        stream: CommStream,
        work: dist.Work | None,
        keeps: tuple[Tensor, ...] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        self._work, self._then, self.keeps, self._streams = work, then, keeps, stream.streams
        self._event: Any = None
        if stream.stream is not None:
            self._finish()
            self._event = stream.stream.record_event()

    def wait(self, *, on_host: bool = False) -> None:
        """`on_host`: the host reads the result next, so Python waits for it too."""
        self.order(on_host=on_host)
        self.keeps = ()

    def order(self, *, on_host: bool = False) -> None:
        """Queue what the current stream is given from now on behind it; the tensors stay."""
        if self._streams is None:
            self._finish()
        elif on_host:
            self._event.synchronize()
        else:
            self._streams.current().wait_event(self._event)

    def _finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            with giving_up():
                work.wait()
        then, self._then = self._then, None
        if then is not None:
            then()


def all_gather(full: Tensor, shard: Tensor, group: Group) -> dist.Work | None:
    """full: [F * n], shard: [n], of one dtype."""
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    work: dist.Work | None = call(_real(full.data), _real(shard), group=group, async_op=True)
    return work


def reduce_scatter(shard: Tensor, full: Tensor, group: Group) -> dist.Work | None:
    """shard: [n] gets its part of the sum over the ranks of full: [F * n]. The caller divides: in some releases of torch
    Gloo's AVG was a sum."""
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(_real(shard), _real(full), op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work


def all_reduce(tensor: Tensor, group: Group) -> dist.Work | None:
    """tensor: [n], summed in place."""
    work: dist.Work | None = dist.all_reduce(_real(tensor), op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work


def gather_texts(text: str, group: Group, device: torch.device) -> list[str]:
    """The texts of all ranks of a group, in rank order. torch's functions for objects need NumPy, and the engine torch
    only."""
    own = torch.frombuffer(bytearray(text.encode()) + b"\0", dtype=torch.uint8).to(device)  # never empty
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    sizes[group.rank()] = own.numel()
    dist.all_reduce(sizes, group=group)
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[: size - 1].tolist()).decode() for part, size in zip(parts, sizes.tolist(), strict=True)]


def _real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, side by side: no backend of torch sends them otherwise."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
