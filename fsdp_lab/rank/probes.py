"""What a rank can tell of its memory.

Sizes do not change between two switches, so most of it is found once and repeated: bytes of shards, gradients and optimizer
state when they are first there, the peak and what it was made of in a **ledger step** (ledger.py). What an ordinary step
adds is what the allocator, the driver and the system say, in some microseconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from fsdp_lab.backends import Backend
from fsdp_lab.backends.base import state_slots
from fsdp_lab.events import Classes, Memory, MemorySample
from fsdp_lab.rank.ledger import Found, Ledger
from fsdp_lab.wire import Hub

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class MemoryProbe:
    """One for each backend that is built."""

    def __init__(
        self, backend: Backend, hub: Hub, device: torch.device, *, offload: str, found: Found | None = None
    ) -> None:
        """`found`: by a ledger step of the same Spec, before it was parked."""
        self._backend, self._hub, self._device, self._offload = backend, hub, device, offload
        self._process = psutil.Process()
        self._parameters = sum(p.local.nbytes for p in backend.pieces())
        self._gradients = 0
        self._optimizer = 0
        self._limit = limit_bytes(device)
        self.found = found  # of the last ledger step
        self._recording: Ledger | None = None

    def begin(self) -> None:
        """Of every step."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def ledger(self) -> Iterator[None]:
        """Around a step: find what it allocates."""
        self._recording = Ledger(self._backend, self._hub, self._device, offloaded=self._offload != "none")
        try:
            with self._recording.recording():
                yield
            self.found = self._recording.found
        finally:
            self._recording = None

    @property
    def curve(self) -> tuple[MemorySample, ...]:
        """Of the last ledger step."""
        return self.found.curve if self.found is not None else ()

    @property
    def exposed(self) -> dict[str, float] | None:
        """Exposed communication by kind of the last ledger step on a GPU."""
        return self.found.exposed if self.found is not None else None

    def before_update(self) -> None:
        """While the gradients are there."""
        if not self._gradients:
            shards = (self._backend.gradient(p) for p in self._backend.pieces())
            self._gradients = sum(g.nbytes for g in shards if g is not None)
        if self._recording is not None:
            self._recording.before_update()

    def after_update(self) -> None:
        """When the optimizer has its state."""
        if not self._optimizer:
            slots = [state_slots(self._backend.optimizer, p) for p in self._backend.pieces()]
            self._optimizer = sum(t.nbytes for s in slots for t in s.values())

    def read(self) -> Memory:
        """Of the step that ended."""
        parameters, gradients, optimizer, host = self._parameters, self._gradients, self._optimizer, 0
        if self._offload != "none":
            host, gradients, optimizer = parameters + gradients + optimizer, 0, 0
            parameters = self._backend.standing_bytes() if self._offload == "optimizer" else 0  # a copy to gather from
        whole = Memory(
            parameters_bytes=parameters,
            gradients_bytes=gradients,
            optimizer_bytes=optimizer,
            host_bytes=host,
            limit_bytes=self._limit,
            rss_bytes=self._process.memory_info().rss,
        )
        return self._on_gpu(whole) if self._device.type == "cuda" else self._on_cpu(whole)

    def _on_cpu(self, m: Memory) -> Memory:
        """Nothing counts all the time: the last ledger step is repeated, since every step does the same."""
        if self.found is not None:
            allocated, peak = self.found.end_bytes, self.found.peak
        else:
            allocated, peak = self._parameters + self._optimizer + self._backend.standing_bytes(), Classes()
        outside = max(0, m.rss_bytes - allocated)
        return dataclasses.replace(
            m, peak_bytes=peak.total_bytes, at_peak=peak, allocated_bytes=allocated, outside_bytes=outside
        )

    def _on_gpu(self, m: Memory) -> Memory:
        """The allocator counts; what it tells beyond what the last ledger step found is other."""
        reserved, peak = torch.cuda.memory_reserved(self._device), torch.cuda.max_memory_allocated(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        known = self.found.peak if self.found is not None else _standing(m)
        other = known.other_bytes + max(0, peak - known.total_bytes)
        return dataclasses.replace(
            m,
            peak_bytes=peak,
            at_peak=dataclasses.replace(known, other_bytes=other),
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            reserved_bytes=reserved,
            outside_bytes=max(0, total - free - reserved),
        )


def _standing(m: Memory) -> Classes:
    return Classes(parameters_bytes=m.parameters_bytes, optimizer_bytes=m.optimizer_bytes)


def limit_bytes(device: torch.device) -> int:
    """What this process may take: its part of the GPU's memory; else the machine's memory, or the container's."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return int(total * torch.cuda.get_per_process_memory_fraction(device))
    limits = [psutil.virtual_memory().total]
    for path in map(Path, _CGROUPS):
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)
