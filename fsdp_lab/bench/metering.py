"""`Metered`: a form whose every step is measured and told as a lab's rank does it.

Only in the telling it differs: a rank publishes its events over ZMQ, which a bench need not have; here they go as lines of
JSON through the pipe to the launcher, which keeps them. What the trainer does besides measuring (the vote that ends a step,
the gradient norm) is not part of it: a loop without a lab may want these, too, or neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from fsdp_lab.backends import Backend
from fsdp_lab.bench.plan import Plan
from fsdp_lab.events import StepEvent
from fsdp_lab.rank.measure import Measure
from fsdp_lab.rank.rendezvous import Seat
from fsdp_lab.wire import Wire

TRACE_EVERY_S = 0.5  # a lab traces the last step of a chunk, which lasts so long
TELL_EVERY_S = 0.04  # as a lab's ranks do, however fast the steps are

Tell = Callable[[list[dict[str, Any]]], None]


class Metered:
    """One for a form. Around each step: `step`; then `tell`, still in the step's time."""

    def __init__(self, plan: Plan, seat: Seat, world: Wire, backend: Backend, tell: Tell) -> None:
        self._plan, self._seat, self._tell = plan, seat, tell
        self.measure = Measure(backend, world.hub, seat, offload="none")
        self._waiting: list[dict[str, Any]] = []
        self._steps = 0
        self._told_s = self._traced_s = float("-inf")

    def step(self) -> AbstractContextManager[None]:
        """Around forward, backward and update."""
        now_s = time.perf_counter()
        traced = now_s - self._traced_s >= TRACE_EVERY_S
        if traced:
            self._traced_s = now_s
        return self.measure.step(traced=traced)

    def tell(self) -> None:
        """When the step is over: its event, and what waits is sent."""
        measured = self.measure.read()
        self._waiting.append(
            StepEvent(
                run="bench",
                spec_id="bench",
                rank=self._seat.rank,
                world_size=self._seat.world_size,
                step=self._steps,
                samples=self._steps * self._plan.micro_batch * self._plan.ranks,
                end_unix_s=measured.end_unix_s,
                step_time_s=measured.step_time_s,
                tokens=self._plan.micro_batch * self._plan.seq_len,
                loss=0.0,  # reading it would be a synchronisation that is the trainer's
                mean_loss=0.0,
                grad_norm=0.0,
                flops=0,
                memory=measured.memory,
                comm=measured.comm,
                begin_s=measured.begin_s,
                spans=measured.spans,
            ).to_dict()
        )
        self._steps += 1
        now_s = time.perf_counter()
        if now_s - self._told_s >= TELL_EVERY_S:
            waiting, self._waiting = self._waiting, []
            self._tell(waiting)
            self._told_s = now_s
