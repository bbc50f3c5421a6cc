"""`SlowMotion`: one real training step, phase by phase, and what each rank holds at each phase.

    for moment in lab.slow_motion():
        print(moment.caption, moment.holds(0))

The ranks train an ordinary step, forward, backward and update by autograd, and halt before each of its phases until the next
one is requested. Nothing is sent to them in between, so they are idle then, and cells (`%%px`) can inspect them.

Threads: the thread that calls `next` or `close` sends the work, one call at a time. No run trains meanwhile, because a run
and a step in slow motion end each other before they begin. So all ranks still get the same calls in the same order.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from fsdp_lab.base.events import PhaseSnapshot, StepEvent
from fsdp_lab.base.formatting import Table, count, size
from fsdp_lab.cluster import ClusterError, Interrupted
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.spec.spec import Spec

END_S = 15.0  # for the step to finish; then it is interrupted, and the parameters stay as they were before it
POLL_S = 0.05
MASTER_BYTES = 4  # per element of a shard, which is fp32 in any precision


@dataclass(frozen=True)
class StepMoment:
    """All ranks just before one phase of a step. `frames`: in rank order."""

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
        """Parameter -> range [start, stop) of its flattened elements that this rank can read now."""
        return {p.name: p.held for p in self.frames[rank].parameters}

    def held_elements(self, rank: int) -> int:
        """Number of parameter elements that this rank can read now."""
        return sum(stop - start for start, stop in self.holds(rank).values())

    def held_bytes(self, rank: int) -> int:
        """Bytes of parameters on this rank: its fp32 shards, plus what is gathered, in the compute dtype."""
        is_fp32, parameters = self.spec.strategy.dtypes.param == "fp32", self.frames[rank].parameters
        shards = sum(MASTER_BYTES * (p.stop - p.start) for p in parameters)
        if self.spec.shard_factor == 1 and is_fp32 and self.spec.strategy.offload == "none":
            return shards  # they are what is computed with
        return shards + sum((4 if is_fp32 else 2) * p.numel for p in parameters if p.state != "sharded")

    @property
    def caption(self) -> str:
        """The phase that comes next, as text."""
        unit = "" if self.phase == "optim" else f" {self.unit}"
        return f"{self.direction} · {self.phase}{unit}: {self._description()}"

    def _description(self) -> str:
        """The work of the phase, and on how many elements."""
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
                if self.spec.world_size == 1:
                    return f"its {n} gradients are complete, there is one rank"
                if factor == 1:
                    return f"all-reduce of {n} gradients, each rank gets the mean"
                more = ", then an all-reduce with the ranks of the same shard" if self.spec.strategy.is_hybrid else ""
                return f"reduce-scatter of {n} gradients, each rank gets the mean of its shard{more}"
            case "host_copy":
                return f"{n} elements are copied between host and device"
            case _:
                n = count(sum(p.numel for p in parameters))
                return f"the optimizer updates {n} parameters, each rank its shards"

    def table(self) -> Table:
        """A row for each rank, with what it holds."""

        def units(frame: PhaseSnapshot, state: str) -> str:
            return ", ".join(dict.fromkeys(p.unit for p in frame.parameters if p.state == state)) or "–"

        rows = []
        for frame in self.frames:
            held = f"{count(self.held_elements(frame.rank))} of {count(sum(p.numel for p in frame.parameters))}"
            whole, gathered = units(frame, "unsharded"), units(frame, "gathering")
            rows.append((str(frame.rank), held, size(self.held_bytes(frame.rank)), whole, gathered))
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


class SlowMotion(Iterator[StepMoment]):
    """An iterator over the phases of one training step. Made by `Lab.slow_motion`; begins with the first `next`.

    It ends with the step. If it ends earlier (by `close()`, `with`, Ctrl-C, a new run, another slow motion, or
    `lab.close()`), the step runs to its end without halts. Any thread may advance or end it.

    Raises, from `next`: the errors of a run, such as RankError, RankLost, or the SpecError of a refused Spec.

    Attributes:
        moment: the last one; None before the first. events: one per rank, when the step is over; times include the halts.
        closed, reason: whether there will be no further moment, and why. ready: whether the Spec is applied on the ranks.
    """

    def __init__(self, ranks: Cluster, spec: Spec, prepare: Callable[[Spec], None]) -> None:
        """`prepare(spec)`: called before anything is sent; makes the ranks ready and ends what else is running on them."""
        self.spec = spec
        self.moment: StepMoment | None = None
        self.events: tuple[StepEvent, ...] = ()
        self.closed = self.ready = False
        self.reason = ""
        self._ranks, self._prepare = ranks, prepare
        self._calling = threading.Lock()  # held during a call to the ranks: one at a time
        self._end_s: float | None = None  # when its end was requested, on the monotonic clock
        self._end_reason, self._limit_s = "", END_S
        self._under_way = False  # on the ranks

    def __next__(self) -> StepMoment:
        try:
            moment = self._advance()
        except KeyboardInterrupt:
            self.end("interrupted")
            raise
        if moment is None:
            raise StopIteration
        return moment

    def _advance(self) -> StepMoment | None:
        """Runs to the next phase; None when the step is over. Raises what a call to the ranks raises."""
        with self._calling:
            if self.closed or self._end_s is not None:
                return None
            try:
                if not self.ready:
                    self._begin()
                return self._next_moment()
            except Interrupted:
                if self._end_s is None:  # not by `end`, so the step is abandoned
                    self._finish("interrupted")
                return None
            except Exception as e:
                self._finish(e.sentence if isinstance(e, ClusterError) else str(e))
                raise

    def end(self, why: str, limit_s: float = END_S) -> Exception | None:
        """Lets the step run to its end without halts. Returns the ranks' error meanwhile, or None. Idempotent."""
        if self._end_s is None:
            self._end_reason, self._limit_s, self._end_s = why, limit_s, time.monotonic()
        error = None
        with self._calling:
            if self.closed:
                return None
            try:
                if self._under_way:
                    self._take(self._results("slow_end"))
            except Interrupted:
                pass  # after `limit_s`, or by the user
            except Exception as e:
                error = e
            self._finish(self._end_reason)
            return error

    def _begin(self) -> None:
        self._prepare(self.spec)
        statuses = self._results("status")
        if any(s.get("spec_id") != self.spec.id for s in statuses):
            self._ranks.delivery.provide(self.spec)
            self._results("apply", run=secrets.token_hex(4), spec=self.spec.to_dict(), fresh=False)
        self.ready = True

    def _next_moment(self) -> StepMoment | None:
        self._under_way = True
        results = self._results("slow_next")
        if any(r["frame"] is None for r in results):
            self._take(results)
            self._finish("the step is over")
            return None
        frames = sorted((PhaseSnapshot.from_dict(r["frame"]) for r in results), key=lambda f: f.rank)
        self.moment = StepMoment(tuple(frames), self.spec)
        return self.moment

    def _results(self, what: str, **arguments: Any) -> list[Any]:
        """Results of a call to all ranks, which is interrupted `limit_s` after the end was requested."""
        call = self._ranks.submit(what, **arguments)
        while not call.wait(POLL_S):
            if self._end_s is not None and time.monotonic() - self._end_s > self._limit_s:
                return call.results(0)
        return call.results()

    def _take(self, results: list[Any]) -> None:
        self.events = tuple(StepEvent.from_dict(r["event"]) for r in results if r.get("event") is not None)

    def _finish(self, reason: str) -> None:
        self.reason, self.closed, self._under_way = reason, True, False

    @property
    def event(self) -> StepEvent | None:
        """Rank 0's, when the step is over."""
        return self.events[0] if self.events else None

    def close(self) -> None:
        """Lets the step run to its end. Idempotent. Raises errors of the ranks meanwhile."""
        if (error := self.end("closed")) is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        failure = self.end("closed")
        if failure is not None and kind is None:
            raise failure

    def __repr__(self) -> str:
        if self.closed:
            return f"<SlowMotion: closed ({self.reason})>"
        return f"<SlowMotion: {repr(self.moment)[1:-1] if self.moment else 'not begun'}>"
