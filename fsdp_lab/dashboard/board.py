"""`Board`: runs side by side and their `Comparison`, up to date at little cost; and `ComparisonCard`, which shows it.

Rows, from the top: pins (A, B, ...), the runs and refusals of the newest sweep (1, 2, ...), and the live run unless it is
one of these. They are compared again when one of them has new events; at most once a second, and never for more than a
thirtieth of the time.

Handlers run on any thread, `tick` on the dashboard's; one lock orders them."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from statistics import fmean
from typing import Any, Self

import numpy as np

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.formatting import MIB, median_known, plural
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.lab_like import LabLike, shown_run
from fsdp_lab.dashboard.panels.axis import CURVE, MOST_ROWS, SMOOTH_STEPS, STEP_LIMIT, Overlay
from fsdp_lab.dashboard.panels.base import BaseCard, Captions, Cell, Key, Numbers
from fsdp_lab.runs import EventStore, Refusal, RunState, Step, Sweep, Switch
from fsdp_lab.runs.comparison import NONE, Comparison, Row, ratio_words, split_spread
from fsdp_lab.runs.parity import Verdict
from fsdp_lab.runs.recommendation import recommend
from fsdp_lab.runs.steps import last_stretch
from fsdp_lab.runs.summary import RULE
from fsdp_lab.runs.view import RunQueries, RunView
from fsdp_lab.spec.describe import Trained, describe_field, describe_strategy

MOST_PINS = len(theme.PINS)
LETTERS = tuple(fill.label for fill in theme.PINS.values())
LIVE = "live"
FEW_STEPS = 10  # below which a ratio says nothing yet
EVERY_S = 1.0
SHARE = 0.03  # of the time, that comparing may take

Version = tuple[object, ...]  # equal for equal data


@dataclass(kw_only=True, eq=False)
class Pinned(RunQueries):
    """A `RunView` that does not change any more. Its figures are one strategy's: `events` are those under the Spec that
    was applied last, since it was applied. Its `curve` is of the whole run, changes included, because a loss is read
    from its beginning. Of a run of more than 2,000 steps both keep the first thousand and the last."""

    id: str
    name: str
    note: str
    spec: Trained
    events: EventStore = field(repr=False)
    curve: Numbers = field(repr=False)  # a row for each step, in the order of `CURVE`
    switches: tuple[Switch, ...]
    state: RunState
    reason: str
    notes: tuple[str, ...]
    started_unix_s: float
    ended_unix_s: float | None
    environment: Mapping[str, Any]
    cause: None = None  # it is not diagnosed

    @classmethod
    def of(cls, run: RunView) -> Self:
        """The run as it is now."""
        steps, spec, state, reason = run.events.steps(), run.spec, run.state, run.reason
        store = EventStore()
        kept = [e for step in ends(last_stretch(steps, spec), STEP_LIMIT) for e in step.events]
        # Without what is large and in no curve.
        store.add(replace(e, spans=(), memory_curve=()) if e.spans or e.memory_curve else e for e in kept)
        rows = curve_of(steps)
        now: dict[str, Any] = {"spec": spec, "state": state, "reason": reason, "switches": tuple(run.switches)}
        same = ("id", "name", "note", "notes", "started_unix_s", "ended_unix_s", "environment")
        return cls(events=store, curve=rows, **now, **{name: getattr(run, name) for name in same})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: its run or refusal, and a version that changes with the run's data."""

    label: str
    source: RunView | Refusal
    version: Version = ()
    place: int | None = None  # in the palette
    plotted: bool = False  # the plots show this run

    @property
    def began(self) -> bool:
        return not isinstance(self.source, Refusal)

    @property
    def swept(self) -> bool:
        """Tells whether it is of a sweep, whose labels are numbers."""
        return self.label.isdigit()


@dataclass(frozen=True, kw_only=True, eq=False)
class BoardView:
    """The comparison, and its rows' entries in the same order."""

    comparison: Comparison
    entries: tuple[Entry, ...] = ()


class Board:
    def __init__(self, lab: LabLike) -> None:
        self._lab = lab
        self._lock = threading.RLock()
        self._pins: dict[int, Pinned] = {}  # by place in the palette
        self._baseline: str | None = None  # as chosen; None: the first row that began
        self._sweep: Sweep | None = None
        self._dismissed: set[str] = set()  # labels of rows of the sweep that were removed
        self._known: dict[tuple[str, Version], Overlay] = {}  # that are drawn, by label and version
        self._live: Entry | None = None  # the live run at its version, under the Spec that was applied last
        self._compared: tuple[object, ...] = (None, ())
        self._due_s = 0.0
        self.shown = BoardView(comparison=Comparison.of([]))

    def pin(self, run: RunView | None = None) -> str:
        """Pins a run as it is now, by default the one that is shown; returns its letter. Raises ArgumentError if there is
        nothing to pin, or no place."""
        with self._lock:
            run = run if run is not None else shown_run(self._lab)
            if run is None or not len(run.events):
                raise ArgumentError("pin", "there is no step to pin yet", "start a run, and pin it after some steps")
            if not (letter := self.next_letter):
                hint = f"unpin one of {', '.join(self.pins)} first"
                raise ArgumentError("pin", f"{MOST_PINS} runs are pinned already", hint)
            self._pins[LETTERS.index(letter)] = Pinned.of(run)
            self._due_s = 0.0
            return letter

    @property
    def next_letter(self) -> str:
        """The label of the next pin; "" where there is no place."""
        with self._lock:
            return next((letter for place, letter in enumerate(LETTERS) if place not in self._pins), "")

    def unpin(self, label: str) -> None:
        """Removes a row: a pin, or one of a sweep that is over. Raises ArgumentError if there is no such row."""
        with self._lock:
            self.refresh()
            if label in self.pins:
                del self._pins[LETTERS.index(label)]
            elif any(e.label == label and e.swept for e in self.shown.entries) and self._sweep and self._sweep.done:
                self._dismissed.add(label)
            else:
                there = f"take one of {', '.join(self.pins)}" if self._pins else "nothing is pinned"
                raise ArgumentError("unpin", f"there is no pin {label!r}", there)
            self._due_s = 0.0

    def choose_baseline(self, label: str) -> None:
        """Compares the others with this row from now on, while there is such a row and it was not refused."""
        with self._lock:
            self._baseline, self._due_s = label, 0.0

    @property
    def pins(self) -> dict[str, Pinned]:
        """The pinned runs by label, in the order of their places."""
        with self._lock:
            return {LETTERS[place]: run for place, run in sorted(self._pins.items())}

    def tick(self) -> BoardView:
        """Updates `shown` if that is due."""
        with self._lock:
            if (now_s := time.monotonic()) >= self._due_s:
                began_s = time.thread_time()
                self.refresh()
                self._due_s = now_s + max(EVERY_S, (time.thread_time() - began_s) / SHARE)
            return self.shown

    def refresh(self) -> Comparison:
        with self._lock:
            entries = self._entries()
            if (self._baseline, entries) != self._compared:
                self._compared = (self._baseline, entries)
                began = [e.label for e in entries if e.began]
                baseline = self._baseline if self._baseline in began else began[0] if began else None
                names, sources = [e.label for e in entries], [e.source for e in entries]
                compared = Comparison.of(sources, baseline=baseline, names=names)
                self.shown = BoardView(comparison=compared, entries=entries)
            return self.shown.comparison

    def overlays(self) -> dict[int, Overlay]:
        """Place -> the curve that belongs there; the same objects as before where nothing has changed."""
        with self._lock:
            known, self._known = self._known, {}
            overlays: dict[int, Overlay] = {}
            for e in self.shown.entries:
                if e.place is None or e.plotted or isinstance(e.source, Refusal):
                    continue
                if (overlay := known.get((e.label, e.version))) is None:
                    rows = e.source.curve if isinstance(e.source, Pinned) else curve_of(e.source.events.steps())
                    overlay = Overlay(label=e.label, rows=rows)
                self._known[e.label, e.version] = overlays[e.place] = overlay
            return overlays

    def _entries(self) -> tuple[Entry, ...]:
        """Pins, the newest sweep's runs, its refusals, and the live run; nothing where there is no pin and no sweep."""
        plotted, sweep = shown_run(self._lab), self._lab.sweep
        if sweep is not self._sweep:
            self._sweep = sweep
            self._dismissed.clear()
            self._baseline = None if sweep is None else "1"
        pins = sorted(self._pins.items())
        entries = [Entry(label=LETTERS[i], source=run, version=(id(run),), place=i) for i, run in pins]
        runs = [] if sweep is None else list(sweep.runs)
        places = iter([i for i in range(MOST_PINS) if i not in self._pins])
        for number, run in enumerate(runs, 1):
            if str(number) not in self._dismissed:
                shown = plotted is not None and run.id == plotted.id
                place = next(places, None)
                entries.append(Entry(label=str(number), source=run, version=_version(run), place=place, plotted=shown))
        for number, refusal in enumerate(sweep.refused if sweep else (), len(sweep.specs) + 1 if sweep else 0):
            if str(number) not in self._dismissed:
                entries.append(Entry(label=str(number), source=refusal))
        if entries and plotted is not None and len(plotted.events) and plotted.id not in {run.id for run in runs}:
            version = _version(plotted)
            if self._live is None or self._live.version != version:
                self._live = Entry(label=LIVE, source=Pinned.of(plotted), version=version, plotted=True)
            entries.append(self._live)
        return tuple(entries)


def _version(run: RunView) -> Version:
    return (run.id, len(run.events), run.spec.id, run.state, run.reason)


def ends(steps: Sequence[Step], most: int) -> list[Step]:
    """Returns the first `most` steps and the last `most`, or all."""
    return [*steps[:most], *steps[-most:]] if len(steps) > 2 * most else list(steps)


def curve_of(steps: Sequence[Step]) -> Numbers:
    """A row for each whole step of the first thousand and the last, in the order of `CURVE`. Rates and exposed communication
    are medians of twenty ordinary steps; peaks in MiB are of each rank, or the extremes of more ranks than colours."""
    recent: deque[tuple[float, float, float]] = deque(maxlen=SMOOTH_STEPS)
    rows: list[list[float]] = []
    for step in ends(steps, STEP_LIMIT):
        if not step.is_whole:
            continue
        if rows and step.number > rows[-1][0] + 1:
            rows.append([math.nan] * len(CURVE))
        if step.events[0].first_after_switch:
            recent.clear()
        if step.counts:
            tflops, exposed_s = fmean(e.tflops for e in step.events), fmean(e.exposed_comm_s for e in step.events)
            recent.append((step.tokens_per_s, tflops, 1e3 * exposed_s))
        smooth = [median_known(values) for values in zip(*recent, strict=True)] if recent else [math.nan] * 3
        peaks = [(e.memory.peak_bytes or math.nan) / MIB for e in step.events]
        if len(peaks) > theme.MOST_LINES:
            peaks = [max(peaks), min(peaks)]
        rows.append([step.number, step.mean_loss, *smooth, *peaks, *[math.nan] * (theme.MOST_LINES - len(peaks))])
    return np.array(rows[-MOST_ROWS:], dtype=np.float64).reshape(-1, len(CURVE))


ICONS = {Verdict.EQUAL: "=", Verdict.WITHIN: "≈", Verdict.UNKNOWN: "?"}
TONES = {Verdict.EQUAL: "good", Verdict.WITHIN: "fair", Verdict.DIFFERENT: "bad", Verdict.UNKNOWN: "soft"}


class ComparisonCard(BaseCard):
    """Texts and buttons, without a Bokeh plot. Hidden while there is nothing to compare."""

    name = "comparison"
    title = "Comparison"
    wide = True
    tab = "compare"

    def __init__(self, press: Callable[[str, str], None]) -> None:
        super().__init__(Captions(hidden=True))
        self._press = press

    def press(self, word: str, about: str) -> None:
        self._press(word, about)

    def show(self, shown: BoardView, *, over: bool) -> None:
        """`over`: a sweep among the rows has ended, so that a recommendation can be made."""
        compared = shown.comparison
        if not compared.rows:
            self._captions = Captions(hidden=True)
            return
        differences = [f"{label} is {sentence}." for label, sentence in compared.differences.items()]
        reading = [f"{_reading(compared, shown.entries)}."]
        if over:  # one of the sweep's runs is recommended: they were trained in turns, pinned ones were not
            swept = [e.swept for e in shown.entries]
            reading += recommend(replace(compared, rows=tuple(compress(compared.rows, swept)), baseline=None)).sentences
        ratios = [note for note in compared.notes() if note.startswith("Ratios of")]
        self._captions = Captions(
            reading=" ".join(reading),
            note=" ".join([*compared.refusals(), *differences, RULE, *ratios, *compared.fidelity(common=False)]),
            table=table(compared, shown.entries),
        )


def table(compared: Comparison, entries: Sequence[Entry]) -> tuple[tuple[str | Cell, ...], ...]:
    """Column heads, then a row for each run that began."""
    base = compared.baseline or NONE
    times = ("step time (p10–p90)", f"time / {base}", "tokens/s", "FLOPS · MFU", "exposed")
    heads = ("", "strategy", f"same as {base}?", *times, "peak memory", f"peak / {base}", "state", "")
    rows: list[tuple[str | Cell, ...]] = []
    for row, entry in zip(compared.rows, entries, strict=True):
        if row.refused:
            continue
        texts = compared.cells(row, ("step time",))
        ratio, interval = split_spread(ratio_words(row.time_ratio, "×"))
        few = row.time_ratio is not None and few_steps(row, compared[base])
        interval = f"too few steps: {FEW_STEPS} are needed" if few else interval
        unsure = "not told apart: " if ratio.startswith("≈") else ""
        relative = Cell(text=ratio, title=f"{unsure}{interval}", tone="soft" if few else "")
        rates = (texts["tokens/s"], f"{texts['FLOPS']} · {texts['MFU']}", texts["exposed"])
        times_of_row = (texts["step time"].replace(" to ", "–"), relative, *rates)
        memory = texts["peak/rank"], f"×{row.memory_ratio:.2f}" if row.memory_ratio else NONE
        remove = Cell(text="×", press="unpin", about=row.label, title=f"Remove {row.label}")
        about = (_label(row, entry, compared), Cell(text=row.name, title=row.name), _badge(row, compared))
        rows.append((*about, *times_of_row, *memory, _state(row, entry), "" if entry.label == LIVE else remove))
    return (heads, *rows)


def few_steps(*rows: Row) -> bool:
    """Tells whether a ratio of these rows rests on too few steps."""
    return any(len(row.step_times) < FEW_STEPS for row in rows)


def difference_line(shown: BoardView) -> str:
    """The newest run against the baseline in a sentence; "" where nothing is compared."""
    compared = shown.comparison
    if compared.baseline is None:
        return ""
    base = compared[compared.baseline]
    row = next((row for row in reversed(compared.rows) if row.run and row is not base), base)
    kept = f"{base.label} is kept: {describe_strategy(base.spec)}" if base.spec is not None else f"{base.label} is kept"
    changes = {n: value for n, value in row.flat.items() if n in compared.differing and value != base.flat.get(n)}
    if row is base or not changes:
        return f"{kept}. Change one thing: the difference is shown here."
    what = ", ".join(describe_field(name, value) for name, value in changes.items())
    if few_steps(row, base):
        steps = min(len(row.step_times), len(base.step_times))
        return f"{base.label} → {what}: {steps} of {FEW_STEPS} steps, too few to compare"
    parts = [f"time {ratio_words(row.time_ratio, '×')}"]
    if row.time_ratio is not None and not row.time_ratio.clear:
        parts[0] += ", not told apart"
    if row.memory_ratio:
        parts.append(f"peak memory ×{row.memory_ratio:.2f}")
    if row.parity is not None and row.parity.verdict is not Verdict.UNKNOWN:
        parts.append(f"loss: {compared.badge(row)}")
    return f"{base.label} → {what}: {' · '.join(parts)}"


def _label(row: Row, entry: Entry, compared: Comparison) -> Cell:
    if not entry.began:
        return Cell(text=row.label)
    token = "ink.mean" if entry.place is None or entry.plotted else f"pin.{entry.place}"
    key = Key(label="", token=token, hatch="line" if token == "ink.mean" else "dashes")
    on = row.label == compared.baseline
    title = "The baseline: others are compared with it" if on else f"Compare the others with {row.label}"
    return Cell(text=row.label, key=key, press="baseline", about=row.label, pressed=on, title=title)


def _badge(row: Row, compared: Comparison) -> Cell:
    parity = row.parity
    if parity is None:
        return Cell(text="baseline" if row.label == compared.baseline else NONE, tone="soft")
    icon = f"{ICONS[parity.verdict]} " if parity.verdict in ICONS else ""  # another one is in the text
    return Cell(text=icon + compared.badge(row), tone=TONES[parity.verdict], title=parity.sentence)


def _state(row: Row, entry: Entry) -> Cell:
    tone = "bad" if row.state == "failed" or row.state.startswith("lost") else ""
    text = f"▶ {row.state}" if entry.plotted and row.state == "running" else row.state
    if isinstance(entry.source, Pinned) and entry.label != LIVE and row.state in ("running", "paused"):
        text = "pinned"  # the row is as it was then
    steps = row.figures.steps
    more = f": {row.reason}" if row.reason else f", {steps} step{'s' * (steps != 1)}"
    return Cell(text=text + more, tone=tone, title=row.reason)


def _reading(compared: Comparison, entries: Sequence[Entry]) -> str:
    if compared.differences:
        return f"✗ NOT THE SAME COMPUTATION: {', '.join(compared.differences)}"
    if not compared.baseline:
        return "no run has begun"
    return f"{plural(sum(e.began for e in entries), 'run')}, compared with {compared.baseline}"
