"""Collectives of flat buffers, and where they run beside the computation.

Note: streams and lifetimes. On a GPU each kind of communication has a CUDA stream of its own, a `Lane`. It first waits for
what the compute stream has been given so far, so whatever it reads is written and whatever memory it takes anew is free. A
buffer that a lane allocates is freed from the compute stream; its memory goes back to the lane's pool, and the lane's next
use of it waits for the compute stream as it always does. So nothing needs `record_stream`, and a gather cannot run further
ahead than the points at which the schedule issues it. In the other direction the compute stream waits for the event that
`Pending` records, not for the whole lane. A buffer that the compute stream allocated and a lane reads (an unsharded
gradient) is kept by the `Pending` until it is waited for.

On a CPU there are no streams: Gloo's threads move the bytes while Python goes on, and `wait` blocks until they have landed.
What remains to be done then (`then`) runs in the thread that waits; on a GPU it is queued in the lane at once.

A gather's output is given as an alias that does not share the version counter (`.data`): Gloo raises the counter from its
own thread when the bytes land, and autograd would take the views that it saved for changed ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

Group = dist.ProcessGroup


class Lane:
    """One queue of communication."""

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it, work is queued behind what computation has been given so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield


class Pending:
    """Something in flight. `wait` once: afterwards its result may be used on the compute stream.

    To be made inside `lane.entered()`. `keeps` are tensors that must outlive it.
    """

    def __init__(
        self, lane: Lane, work: dist.Work | None, keeps: tuple[Tensor, ...] = (), then: Callable[[], None] | None = None
    ) -> None:
        self._work, self._then, self.keeps, self._event = work, then, keeps, None
        if lane.stream is not None:
            self._finish()
            self._event = lane.stream.record_event()

    def wait(self, *, on_host: bool = False) -> None:
        """`on_host`: the host reads the result next, so Python waits for it too."""
        if self._event is not None and on_host:
            self._event.synchronize()
        elif self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self._finish()
        self.keeps = ()

    def _finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        then, self._then = self._then, None
        if then is not None:
            then()


def settle() -> None:
    """After the last collective of what a program may end with: let Gloo's threads let go of its tensors.

    They take the interpreter's lock for that, a moment after the wait is over; where the interpreter ends just then, the
    process is aborted ("terminate called without an active exception").
    """
    time.sleep(0.002)


def all_gather(full: Tensor, shard: Tensor, group: Group) -> dist.Work | None:
    """full: [F * n], shard: [n], of one dtype."""
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    work: dist.Work | None = call(full.data, shard, group=group, async_op=True)
    return work


def reduce_scatter(shard: Tensor, full: Tensor, group: Group) -> dist.Work | None:
    """shard: [n] gets the sum over the ranks of full: [F * n], its own part. The mean is taken by the caller: Gloo's AVG
    summed only in some releases."""
    call: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = call(shard, full, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work


def all_reduce(tensor: Tensor, group: Group) -> dist.Work | None:
    """tensor: [n], summed in place."""
    work: dist.Work | None = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work
