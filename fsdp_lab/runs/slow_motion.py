"""`SlowMotion`: one real training step, phase by phase, and what each rank holds at each phase.

    for moment in lab.slow_motion():
        print(moment.caption, moment.holds(0))

The ranks train an ordinary step, forward, backward and update by autograd, and halt before each of its phases until the next
one is asked for. Nothing is sent to them in between, so they are idle then, and cells (`%%px`) can look at them.

Threads: whoever calls `next` or `close` sends the work, one call at a time; a run cannot be going meanwhile, because each
of the two ends the other before it begins. So the ranks still get the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_lab.cluster import ClusterError, Interrupted
from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.formatting import Table, count, size
from fsdp_lab.core.phase_snapshot import ParameterHolding, PhaseSnapshot
from fsdp_lab.core.spec import Spec
from fsdp_lab.runs.driver import Ranks

END_S = 15.0  # for a step to run to its end; then it is interrupted, and the parameters stay as they were before it
POLL_S = 0.05

ITEM_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
MASTER_BYTES = 4  # an element of a shard: fp32, whatever is computed in


@dataclass(frozen=True)
class StepMoment:
    """All ranks at one phase, which is about to happen.

    `frames` are in rank order; `spec` is what is trained.
    """

    frames: tuple[PhaseSnapshot, ...]
    spec: Spec

    @property
    def phase(self) -> str:
        """ "unshard", "compute", "reshard", "reduce", "host_copy" or "optim"."""
        return self.frames[0].phase

    @property
    def unit(self) -> str:
        return self.frames[0].unit

    @property
    def direction(self) -> str:
        """ "forward", "backward" or "update"."""
        return self.frames[0].direction

    @property
    def index(self) -> int:
        """0, 1, 2, ... within the step."""
        return self.frames[0].index

    @property
    def step(self) -> int:
        return self.frames[0].step

    def holds(self, rank: int) -> dict[str, tuple[int, int]]:
        """Parameter -> the range [start, stop) of its flattened elements that this rank can read now."""
        return {p.name: p.held for p in self.frames[rank].parameters}

    def held_elements(self, rank: int) -> int:
        """Elements of parameters that this rank can read now."""
        return sum(stop - start for start, stop in self.holds(rank).values())

    def held_bytes(self, rank: int) -> int:
        """Bytes of parameters on this rank: its fp32 shards, and beside them what is gathered, in the dtype of computing."""
        return sum(self._bytes_of(p) for p in self.frames[rank].parameters)

    def _bytes_of(self, p: ParameterHolding) -> int:
        strategy = self.spec.strategy
        shard = MASTER_BYTES * (p.stop - p.start)
        one_copy = self.spec.shard_factor == 1 and strategy.dtypes.param == "fp32" and strategy.offload == "none"
        if p.state == "sharded" or one_copy:
            return shard
        return shard + ITEM_BYTES[strategy.dtypes.param] * p.numel

    @property
    def caption(self) -> str:
        """What is about to happen, in words."""
        return f"{self.direction} · {self.phase}{'' if self.phase == 'optim' else ' ' + self.unit}: {self._words()}"

    def _words(self) -> str:
        """The phase, with how much of what it moves."""
        parameters = self.frames[0].parameters
        n = count(sum(p.numel for p in parameters if p.unit == self.unit))
        factor = self.spec.shard_factor
        match self.phase:
            case "unshard":
                if factor == 1:
                    return f"its {n} parameters are on every rank, nothing is gathered"
                dtype = self.spec.strategy.dtypes.param
                return f"all-gather of {n} parameters in {dtype}, each of {factor} ranks gives its shard"
            case "compute" if self.direction == "backward":
                return f"its gradients are computed, with all of its {n} parameters"
            case "compute":
                return f"its outputs are computed, with all of its {n} parameters"
            case "reshard":
                return f"what was gathered of {n} parameters is freed, each rank keeps its shard"
            case "reduce":
                return self._reduction(n, factor)
            case "host_copy":
                return f"{n} elements are copied between host and device"
            case _:
                return (
                    f"the optimizer updates {count(sum(p.numel for p in parameters))} parameters, each rank its shards"
                )

    def _reduction(self, n: str, factor: int) -> str:
        if self.spec.world_size == 1:
            return f"its {n} gradients are complete, there is one rank"
        if factor == 1:
            return f"all-reduce of {n} gradients, each rank gets the mean"
        more = ", then an all-reduce with the ranks of the same shard" if self.spec.strategy.is_hybrid else ""
        return f"reduce-scatter of {n} gradients, each rank gets the mean of its shard{more}"

    def table(self) -> Table:
        """What each rank holds, a row a rank."""
        rows = []
        for frame in self.frames:
            whole = dict.fromkeys(p.unit for p in frame.parameters if p.state == "unsharded")
            coming = dict.fromkeys(p.unit for p in frame.parameters if p.state == "gathering")
            held = f"{count(self.held_elements(frame.rank))} of {count(sum(p.numel for p in frame.parameters))}"
            rows.append((str(frame.rank), held, size(self.held_bytes(frame.rank)), ", ".join(whole) or "–",
                         ", ".join(coming) or "–"))  # fmt: skip
        return Table(
            columns=("rank", "elements held", "bytes", "whole", "being gathered"),
            rows=tuple(rows),
            caption=f"step {self.step}, phase {self.index}, about to happen: {self.caption}",
            left=frozenset({"whole", "being gathered"}),
        )

    def __repr__(self) -> str:
        held = dict.fromkeys(count(self.held_elements(f.rank)) for f in self.frames)
        ranks = "every rank holds" if len(held) == 1 else "the ranks hold"
        return f"<Moment {self.index} of step {self.step}: {self.caption}; {ranks} {', '.join(held)} elements>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


class SlowStep:
    """The step on the ranks: begun, moved on, ended, from any thread. Knows no iterator, so that one can be dropped.

    Attributes:
        moment: the last one. events: one a rank, when the step is over. over, reason, error: whether it is, and why.
        ready: whether the ranks hold the Spec.
    """

    def __init__(self, ranks: Ranks, spec: Spec, prepare: Callable[[Spec], None]) -> None:
        """`prepare(spec)` is called before anything is sent: it sees to the right ranks, with nothing else going on."""
        self.spec = spec
        self.moment: StepMoment | None = None
        self.events: tuple[StepEvent, ...] = ()
        self.over = False
        self.reason = ""
        self.error: Exception | None = None
        self._ranks, self._prepare = ranks, prepare
        self._turn = threading.Lock()  # held during a call to the ranks: there is one at a time
        self._asked_s: float | None = None  # when its end was asked for, on the monotonic clock
        self._asked_why, self._limit_s = "", END_S
        self.ready = False
        self._under_way = False  # on the ranks

    def advance(self) -> StepMoment | None:
        """To the next phase; None when the step is over. Raises what a call to the ranks raises."""
        with self._turn:
            if self.over or self._asked_s is not None:
                return None
            try:
                if not self.ready:
                    self._begin()
                return self._next()
            except Interrupted:
                if self._asked_s is None:  # by somebody else: the step was given up
                    self._finish("interrupted")
                return None
            except Exception as e:
                self.error = e
                self._finish(e.sentence if isinstance(e, ClusterError) else str(e))
                raise

    def end(self, why: str, limit_s: float = END_S) -> Exception | None:
        """Lets the step run to its end without stops. Returns what went wrong, if anything did. Idempotent."""
        if self._asked_s is None:
            self._asked_why, self._limit_s, self._asked_s = why, limit_s, time.monotonic()
        with self._turn:
            if self.over:
                return None
            try:
                if self._under_way:
                    self._take(self._results("slow_end"))
            except Interrupted:
                pass  # it took too long, or somebody was in a hurry
            except Exception as e:
                self.error = e
            self._finish(self._asked_why)
            return self.error

    def _begin(self) -> None:
        self._prepare(self.spec)
        told = self._results("status")
        if any(s.get("spec_id") != self.spec.id for s in told):
            self._results("apply", run=secrets.token_hex(4), spec=self.spec.to_dict(), fresh=False)
        self.ready = True

    def _next(self) -> StepMoment | None:
        self._under_way = True
        told = self._results("slow_next")
        if any(t["frame"] is None for t in told):
            self._under_way = False
            self._take(told)
            self._finish("the step is over")
            return None
        frames = sorted((PhaseSnapshot.from_dict(t["frame"]) for t in told), key=lambda f: f.rank)
        self.moment = StepMoment(tuple(frames), self.spec)
        return self.moment

    def _results(self, what: str, **arguments: Any) -> list[Any]:
        """Of a call to all ranks. One that keeps the end waiting for too long is interrupted."""
        call = self._ranks.submit(what, **arguments)
        while not call.wait(POLL_S):
            if self._asked_s is not None and time.monotonic() - self._asked_s > self._limit_s:
                return call.results(0)
        return call.results()

    def _take(self, told: list[Any]) -> None:
        self.events = tuple(StepEvent.from_dict(t["event"]) for t in told if t.get("event") is not None)

    def _finish(self, reason: str) -> None:
        self.reason, self.over, self._under_way = reason, True, False


class SlowMotion(Iterator[StepMoment]):
    """An iterator over the phases of one training step. Made by `Lab.slow_motion`; begins with the first `next`.

    It ends with the step. Ended early, by `close()`, `with`, Ctrl-C, or by dropping it (a `break` out of a loop), it lets
    the step run to its end; so do a new run, another slow motion, and `lab.close()`. `reason` says which it was.

    Raises, from `next`: what a run's error would be, such as RankError, RankLost, or the SpecError of a refused Spec.
    """

    def __init__(self, step: SlowStep) -> None:
        self._step = step
        # An iterator that is dropped must not wait for ranks on the thread that happens to collect it.
        weakref.finalize(self, _end_later, step).atexit = False

    def __next__(self) -> StepMoment:
        try:
            moment = self._step.advance()
        except KeyboardInterrupt:
            self._step.end("interrupted")
            raise
        if moment is None:
            raise StopIteration
        return moment

    @property
    def spec(self) -> Spec:
        return self._step.spec

    @property
    def moment(self) -> StepMoment | None:
        """The last one; None before the first."""
        return self._step.moment

    @property
    def event(self) -> StepEvent | None:
        """Of rank 0, when the step is over; its times are those of a step that was held."""
        return self._step.events[0] if self._step.events else None

    @property
    def events(self) -> tuple[StepEvent, ...]:
        """Of all ranks, when the step is over."""
        return self._step.events

    @property
    def closed(self) -> bool:
        """Whether there will be no further moment."""
        return self._step.over

    @property
    def reason(self) -> str:
        """Why it is closed, in words."""
        return self._step.reason

    def close(self) -> None:
        """Lets the step run to its end. Idempotent. Raises what goes wrong on the ranks meanwhile."""
        if (error := self._step.end("closed")) is not None:
            raise error

    def __enter__(self) -> SlowMotion:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        failed = self._step.end("closed")
        if failed is not None and kind is None:
            raise failed

    def __repr__(self) -> str:
        if self.closed:
            return f"<SlowMotion: closed ({self.reason})>"
        return f"<SlowMotion: {repr(self.moment)[1:-1] if self.moment else 'not begun'}>"


def _end_later(step: SlowStep) -> None:
    if not step.over:
        with contextlib.suppress(RuntimeError):  # the interpreter is ending: the lab ends its ranks itself
            threading.Thread(target=step.end, args=("dropped",), name="fsdp_lab-slow-end", daemon=True).start()
