"""`Measure`: what is read of a step, on its way and when it is over. The trainer and the bench of metering read the same.

Note: when a GPU is read. What a step leaves on the device's streams to be timed is read when the step has ended, with the
device synchronised, and not a step later: the vote (trainer.py) has waited for the device in this very step, so that little
but the optimizer is left to wait for, and a step's event is whole when it is told, also the last one's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from fsdp_lab.backends import Backend
from fsdp_lab.events import Memory, MemorySample, Traffic
from fsdp_lab.rank.ledger import Found
from fsdp_lab.rank.probes import MemoryProbe
from fsdp_lab.rank.rendezvous import Seat
from fsdp_lab.rank.tracing import StepTrace
from fsdp_lab.spans import Span
from fsdp_lab.wire import Collective, Hub, traffic


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one step; the fields are those of its `StepEvent`."""

    begin_s: float  # what spans count from, on this rank's own clock
    end_unix_s: float
    step_time_s: float
    memory: Memory
    memory_curve: tuple[MemorySample, ...]
    comm: Mapping[str, Traffic]
    spans: tuple[Span, ...]


class Measure:
    """One for each backend that is built. Around a step: `step`; in it `part`, `before_update` and `after_update`; then
    `read`, unless it was given up."""

    def __init__(self, backend: Backend, hub: Hub, seat: Seat, *, offload: str, found: Found | None = None) -> None:
        """`found`: by a ledger step of the same Spec, before it was parked."""
        self._backend, self._hub, self._seat = backend, hub, seat
        self._memory = MemoryProbe(backend, hub, seat.device, offload=offload, found=found)
        self._on_gpu = seat.device.type == "cuda"
        self._start_s = 0.0
        self._trace: StepTrace | None = None  # of the step in progress, or the last
        self._ledger = False

    @property
    def found(self) -> Found | None:
        """What the last ledger step found; plain values."""
        return self._memory.found

    @contextmanager
    def step(self, *, ledger: bool = False, traced: bool = False) -> Iterator[None]:
        """`ledger`: find every block that is allocated; `traced`: note when each unit computes."""
        meter = self._hub.meter
        meter.take()  # what was sent between steps, by a switch for one
        meter.take_copies()
        self._ledger = ledger
        self._trace = StepTrace(self._backend.unit_modules(), self._seat.device) if traced else None
        if self._on_gpu:
            self._hub.start_clocks()
        self._memory.begin()
        self._start_s = time.perf_counter()
        with self._memory.ledger() if ledger else nullcontext(), self._trace or nullcontext():
            yield

    def part(self, name: str) -> None:
        """Another part of the step begins: "forward", "backward" or "optimizer"."""
        if self._trace is not None:
            self._trace.begin(name)

    def before_update(self) -> None:
        """While the gradients are there."""
        self._memory.before_update()

    def after_update(self) -> None:
        """When the optimizer has its state."""
        self._memory.after_update()

    def read(self) -> Measured:
        """Of the step that has ended."""
        if self._on_gpu:
            torch.cuda.synchronize(self._seat.device)
            self._hub.read_clocks()
        seconds = time.perf_counter() - self._start_s
        collectives, copies = self._hub.meter.take(), self._hub.meter.take_copies()
        trace = self._trace
        return Measured(
            begin_s=trace.begin_s if trace else self._start_s,
            end_unix_s=time.time(),
            step_time_s=seconds,
            memory=self._memory.read(),
            memory_curve=self._memory.curve if self._ledger else (),
            comm=self._traffic(collectives),
            spans=trace.spans(collectives, copies) if trace else (),
        )

    def _traffic(self, collectives: Sequence[Collective]) -> dict[str, Traffic]:
        """Over NCCL exposed communication is what the last ledger step found, repeated; not known before the first."""
        if not self._on_gpu or self._seat.shares_gpu:
            return traffic(collectives)
        unknown = dict.fromkeys((c.kind for c in collectives), math.nan)
        return traffic(collectives, unknown if self._memory.exposed is None else self._memory.exposed)
