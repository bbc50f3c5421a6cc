"""What a rank can tell of its memory.

On a GPU the allocator counts: peak and reserved bytes of every step. On a CPU nothing counts all the time; a **ledger
step** is run under torch's profiler, which reports each allocation of the CPU allocator, and the peak of those on top of
what stayed is the step's. Later steps repeat it, as they do the same work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch.autograd.profiler import profile

from fsdp_lab.backends import Backend
from fsdp_lab.backends.base import state_slots
from fsdp_lab.events import Memory


class MemoryProbe:
    """One for each backend that is built. Sizes do not change between switches, so each is found once."""

    def __init__(self, backend: Backend, device: torch.device, *, offload: str) -> None:
        self._backend, self._device, self._offload = backend, device, offload
        self._process = psutil.Process()
        self._parameters = sum(p.local.nbytes for p in backend.pieces())
        self._gradients = 0
        self._optimizer = 0
        self._transient = 0  # bytes alive at once beyond what stays, in the last ledger step
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def ledger(self) -> Iterator[None]:
        """Around one step on a CPU: find the peak of what it allocates."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to stderr at each start
        with profile(profile_memory=True, use_kineto=True) as watched:
            yield
        alive = peak = 0
        for event in watched.kineto_results.events():
            if event.name() == "[memory]":
                alive += event.nbytes()
                peak = max(peak, alive)
        self._transient = peak

    def before_update(self) -> None:
        """While the gradients are there."""
        if not self._gradients:
            shards = (self._backend.gradient(p) for p in self._backend.pieces())
            self._gradients = sum(g.nbytes for g in shards if g is not None)

    def after_update(self) -> None:
        """When the optimizer has its state."""
        if not self._optimizer:
            slots = [state_slots(self._backend.optimizer, p) for p in self._backend.pieces()]
            self._optimizer = sum(t.nbytes for s in slots for t in s.values())

    def read(self) -> Memory:
        """Of the step that ended, on the compute device; what offload moved is the host's."""
        parameters, gradients, optimizer = self._parameters, self._gradients, self._optimizer
        host = 0
        if self._offload != "none":
            host, gradients, optimizer = parameters + gradients + optimizer, 0, 0
            parameters = self._backend.standing_bytes() if self._offload == "optimizer" else 0  # a copy to gather from
        peak = self._peak(parameters, optimizer)
        return Memory(
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_bytes=optimizer,
            host_bytes=host,
            working_bytes=max(0, peak - parameters - gradients - optimizer),
            peak_bytes=peak,
            reserved_bytes=torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else None,
            rss_bytes=self._process.memory_info().rss,
        )

    def _peak(self, parameters: int, optimizer: int) -> int:
        """0 on a CPU before the first ledger step."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not self._transient:
            return 0
        before_the_step = parameters + optimizer + (0 if self._offload == "optimizer" else self._backend.standing_bytes())
        return before_the_step + self._transient
