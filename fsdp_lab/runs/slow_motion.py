"""`SlowMotion`: one real training step, phase by phase, and what each rank holds at each phase.

    lab.slow_motion().plot()
    for moment in lab.slow_motion():
        print(moment.caption, moment.holds(0))

The ranks train an ordinary step, forward, backward and update by autograd, and halt before each of its phases until the next
one is requested. Nothing is sent to them in between, so they are idle then, and cells (`%%px`) can inspect them.

Threads: the thread that calls `next` or `close` sends the work, one call at a time. No run trains meanwhile, because a run
and a step in slow motion end each other before they begin. So all ranks still get the same calls in the same order."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import ROOT, ParameterHolding, PhaseSnapshot, StepEvent
from fsdp_lab.base.formatting import count
from fsdp_lab.cluster import ClusterError, Interrupted
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.runs.pictures import INK, RANKS, Picture
from fsdp_lab.spec.spec import Spec

END_S = 15.0  # for the step to finish; then it is interrupted, and the parameters stay as they were before it
POLL_S = 0.05
MOST_KEPT = 100_000  # parameters of all ranks in the moments that are kept: about 40 MB
MASTER_BYTES = 4  # per element of a shard, which is fp32 in any precision

# Shares of the axis: the least width of a parameter, and all of these together.
LEAST_WIDTH, LEAST_WIDTHS = 0.004, 0.3
UNIT_GAP, UNIT_GAPS = 0.008, 0.12  # the gap between units, and all gaps together at most
SPLIT = 0.0012  # the gap between parameters

EMPTY, LIGHT, MOVING = 0.18, 0.48, 0.16  # opacities: not held, gathered, in communication

MOST_DRAWN = 8  # ranks in a picture
LETTERS = {"unshard": "u", "compute": "c", "reshard": "f", "reduce": "r", "host_copy": "h", "optim": "o"}
EMPTY_COLOR, ALPHA = f"#808890{round(255 * EMPTY):02X}", f"{round(255 * LIGHT):02X}"
Box = tuple[float, float, float, float]  # left, top, right, bottom
LEGEND = (("its own shard", RANKS[0]), ("gathered now", RANKS[0] + ALPHA),
          ("being gathered or reduced", f"/{RANKS[0]}"), ("not held", EMPTY_COLOR))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HoldingBar:
    """A parameter's place on the axis, which runs from 0 to 1."""

    left: float
    right: float
    numel: int

    def at(self, start: int, stop: int) -> tuple[float, float]:
        """The place of a range of its elements."""
        scale = (self.right - self.left) / max(1, self.numel)
        return self.left + start * scale, self.left + stop * scale


@dataclass(frozen=True, kw_only=True)
class ParameterAxis:
    """All parameters side by side, grouped by unit; widths are proportional to their elements, with a least width."""

    bars: Mapping[str, HoldingBar]
    units: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, parameters: Sequence[ParameterHolding]) -> Self:
        by_unit: dict[str, list[ParameterHolding]] = {}
        for p in parameters:
            by_unit.setdefault(p.unit, []).append(p)
        least = min(LEAST_WIDTH, LEAST_WIDTHS / max(1, len(parameters)))
        gap = min(UNIT_GAP, UNIT_GAPS / max(1, len(by_unit)))
        free = 1 - least * len(parameters) - gap * (len(by_unit) - 1)
        each = free / max(1, sum(p.numel for p in parameters))
        bars: dict[str, HoldingBar] = {}
        units: dict[str, tuple[float, float]] = {}
        x = 0.0
        for unit, inside in by_unit.items():
            first = x
            for p in inside:
                width = least + each * p.numel
                bars[p.name] = HoldingBar(left=x, right=x + width - min(SPLIT, width / 4), numel=p.numel)
                x += width
            units[unit] = (first, x)
            x += gap
        return cls(bars=bars, units=units)


def short_names(units: Sequence[str]) -> dict[str, str]:
    """Unit -> its name without the prefix common to all: transformer.h.0 becomes h.0."""
    inner = [u.split(".") for u in units if u != ROOT]
    common = 0
    while inner and all(len(parts) > common + 1 and parts[common] == inner[0][common] for parts in inner):
        common += 1
    return {u: u if u == ROOT else ".".join(u.split(".")[max(0, common - 1) :]) for u in units}


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

    def __repr__(self) -> str:
        held = dict.fromkeys(count(self.held_elements(f.rank)) for f in self.frames)
        ranks = "every rank holds" if len(held) == 1 else "the ranks hold"
        return f"<Moment {self.index} of step {self.step}: {self.caption}; {ranks} {', '.join(held)} elements>"

    def plot(self) -> Picture:
        """A picture of what every rank holds: all parameters side by side, as wide as they have elements."""
        return stills([self])

    @property
    def height_px(self) -> float:
        return 34.0 * min(len(self.frames), MOST_DRAWN) + 18

    def draw(self, picture: Picture, left: float, top: float, right: float) -> None:
        """A row for each rank, in its colour: a bar of what it holds of each parameter, and a strip of its gradients."""
        axis, begin, height = ParameterAxis.of(self.frames[0].parameters), left + 46, self.height_px
        width = right - begin
        for frame in self.frames[:MOST_DRAWN]:
            color, y = RANKS[frame.rank % len(RANKS)], top + 34 * frame.rank
            picture.text(left, y + 12, f"rank {frame.rank}", color=color)
            for p in frame.parameters:
                bar = axis.bars[p.name]
                first, last, own, end = (begin + width * v for v in (bar.left, bar.right, *bar.at(p.start, p.stop)))
                for state, above, below in ((p.state, y, y + 19), (p.gradient, y + 22, y + 28)):
                    shard = (own, above, end, below) if state == "sharded" or above == y else None
                    _draw_state(picture, (first, above, last, below), state, color, shard)
        for unit, name in short_names(list(axis.units)).items():
            first, last = axis.units[unit]
            at_work = unit == self.unit or self.direction == "update"
            if at_work or picture.width_of(name, 10) < width * (last - first):
                middle = begin + width * (first + last) / 2
                picture.text(middle, top + height - 10, name, 10, anchor="mm")
            if at_work:
                ends = [begin + width * first - 1, begin + width * last + 1]
                picture.line([(x, top + height - 19) for x in ends], INK)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return self.plot()._repr_png_()


def _draw_state(picture: Picture, box: Box, state: str, color: str, own: Box | None) -> None:
    """`box`, `own`: the whole, and the rank's shard in it; None: it has none."""
    if state in ("gathering", "reducing"):
        picture.hatched(*box, color)
    elif state == "unsharded" or own is not None:
        picture.rect(*box, color + ALPHA if state == "unsharded" else EMPTY_COLOR)
    if own is not None:
        picture.rect(*own, color)


def stills(moments: Sequence[StepMoment]) -> Picture:
    """What every rank holds at these moments, side by side."""
    each, columns = moments[0].height_px + 42, min(2, len(moments))
    numbers = ", ".join(str(m.index) for m in moments)
    picture = Picture(each * -(-len(moments) // columns) + 44, f"what every rank holds before phase {numbers}")
    width = picture.width_px / columns
    for place, moment in enumerate(moments):
        left, top = (place % columns) * width + 8, (place // columns) * each
        unit = short_names([*dict.fromkeys(p.unit for p in moment.frames[0].parameters)])[moment.unit]
        short = f"{moment.direction} · {moment.phase}" + (f" {unit}" if moment.phase != "optim" else "")
        words = moment.caption if columns == 1 else short
        picture.text(left, top + 12, f"phase {moment.index}, about to happen: {words}", 12)
        moment.draw(picture, left, top + 26, left + width - 22)
    picture.keys(picture.height_px - 32, LEGEND, 54)
    picture.text(54, picture.height_px - 14, "thin strips: the same for gradients; line: the unit at work")
    return picture


def film(moments: Sequence[StepMoment]) -> Picture:
    """What rank 0 holds of each unit, over all phases: a row for each unit, a column for each phase."""
    names = short_names(list(dict.fromkeys(p.unit for p in moments[0].frames[0].parameters)))
    left, top, row, share = 70.0, 44.0, max(10.0, min(30.0, 420 / len(names))), 1 / moments[0].spec.shard_factor
    picture = Picture(top + row * len(names) + 82, f"what rank 0 holds of {len(names)} units in {len(moments)} phases")
    column = (picture.width_px - left - 8) / len(moments)
    wide = column > 8
    width = column - wide
    picture.text(8, 12, f"step {moments[0].step}: what rank 0 holds of each unit, in {len(moments)} phases", 12)
    directions = [m.direction for m in moments]
    for direction in dict.fromkeys(directions):
        x = min(left + column * directions.index(direction), picture.width_px - 8 - picture.width_of(direction))
        picture.text(x, 32, direction)
    for y, (unit, name) in zip((top + row * i for i in range(len(names))), names.items(), strict=True):
        picture.text(left - 8, y + row * 0.4, name, min(11.0, row), anchor="rm")
        for i, m in enumerate(moments):
            x, p = left + column * i, next(p for p in m.frames[0].parameters if p.unit == unit)
            for state, above, below in ((p.state, y, y + 0.58 * row), (p.gradient, y + 0.66 * row, y + 0.86 * row)):
                shard = (x, below - share * (below - above), x + width, below)
                own = shard if state == "sharded" or above == y else None
                _draw_state(picture, (x, above, x + width, below), state, RANKS[0], own)
            if m.unit == unit or m.direction == "update":
                picture.line([(x, y - 1), (x + width, y - 1)], INK)
    bottom, every = top + row * len(names), max(1, round(24 / column))
    for i, m in enumerate(moments):
        if wide:
            picture.text(left + column * (i + 0.5), bottom + 8, LETTERS.get(m.phase, ""), anchor="mm")
        if i % every == 0:
            picture.text(left + column * (i + 0.5), bottom + 23, str(m.index), 9, anchor="mm")
    if wide:
        letters = ", ".join(f"{letter} {name}" for name, letter in LETTERS.items())
        picture.text(8, bottom + 8, "next:")
        picture.text(left, bottom + 42, letters.replace("reshard", "free (reshard)"))
    picture.keys(bottom + 62, LEGEND, left)
    return picture


class SlowMotion(Iterator[StepMoment]):
    """An iterator over the phases of one training step. Made by `Lab.slow_motion`; begins with the first `next`.

    It ends with the step. If it ends earlier (by `close()`, `with`, Ctrl-C, a new run, another slow motion, or
    `lab.close()`), the step runs to its end without halts. Any thread may advance or end it.

    Raises, from `next`: the errors of a run, such as RankError, RankLost, or the SpecError of a refused Spec.

    Attributes:
        moment: the last one; None before the first. past: the moments of this step up to that one, or the newest of a large
        model. events: one per rank, when the step is over; times include the halts.
        closed, reason: whether no further moment comes, and why. ready: whether the Spec is applied on the ranks."""

    def __init__(self, ranks: Cluster, spec: Spec, prepare: Callable[[Spec], None]) -> None:
        """`prepare(spec)`: called before anything is sent; makes the ranks ready and ends what else is running on them."""
        self.spec = spec
        self.moment: StepMoment | None = None
        self.past: deque[StepMoment] = deque()
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

    def plot(self, *phases: int) -> Picture:
        """Goes through the rest of the step and draws it: what rank 0 holds of each unit before each phase. With `phases`,
        by their numbers, what every rank holds before each of these, side by side. Raises ArgumentError: there is none."""
        moments = [m for m in self if not phases or m.index in phases]
        if not moments:
            raise ArgumentError("phases", "the step has no such phase left", "begin another one: lab.slow_motion()")
        return stills(moments) if phases else film(moments)

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
        if not self.past:
            self.past = deque(maxlen=max(1, MOST_KEPT // max(1, sum(len(f.parameters) for f in frames))))
        self.past.append(self.moment)
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
        return f"<SlowMotion: {repr(self.moment)[1:-1] if self.moment else 'not begun; plot() goes through the step'}>"

    def _repr_png_(self) -> tuple[bytes, dict[str, int]] | None:
        return self.moment._repr_png_() if self.moment is not None else None
