"""`Board`: the runs that are compared side by side, and the `Comparison` of them, kept up to date at little cost; and
`ComparisonCard`, which shows it.

Rows, from the top: pins (A, B, ...), the runs and refusals of the newest sweep (1, 2, ...), and the live run unless it is
one of these. A row is computed again only when its run, or the baseline, has new events; at most once a second, and never
for more than a thirtieth of the time. A pinned run does not change, so its row is computed once.

Handlers run on any thread, `tick` on the dashboard's; one lock orders them.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from statistics import fmean
from typing import Any

import numpy as np

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import Role
from fsdp_lab.base.formatting import MIB, median_known, plural, size
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.lab_like import LabLike, shown_run
from fsdp_lab.dashboard.panels.axis import CURVE, MOST_ROWS, SMOOTH_STEPS, STEP_LIMIT, Overlay
from fsdp_lab.dashboard.panels.base import BaseCard, Captions, Cell, Key, Numbers, Part
from fsdp_lab.dashboard.panels.draw import ON_DEVICE, class_keys
from fsdp_lab.runs import EventStore, Refusal, RunState, Step, Sweep, Switch
from fsdp_lab.runs.comparison import NONE, Comparison, Row, ratio_words, split_spread
from fsdp_lab.runs.parity import Verdict
from fsdp_lab.runs.recommendation import recommend
from fsdp_lab.runs.steps import last_stretch
from fsdp_lab.runs.summary import RULE
from fsdp_lab.runs.view import RunQueries, RunView
from fsdp_lab.spec.describe import DEFAULT_FIELDS, describe_fields, differing_fields
from fsdp_lab.spec.loops import Trained

MOST_PINS = len(theme.PINS)
LETTERS = tuple(fill.label for fill in theme.PINS.values())
LIVE = "live"
EVERY_S = 1.0
SHARE = 0.03  # of the time, that comparing may take
LONGEST = 24  # characters of a label

Version = tuple[object, ...]  # equal for equal data


@dataclass(kw_only=True, eq=False)
class Pinned(RunQueries):
    """A `RunView` that does not change any more. Its figures are one strategy's: `events` are those under the Spec that
    was applied last, since it was applied. Its `curve` is of the whole run, changes included, because a loss is read
    from its beginning. Of a run of more than 2,000 steps both keep the first thousand and the last."""

    id: str
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
    def of(cls, run: RunView, *, curve: bool = True) -> Pinned:
        """The run as it is now, without its curve if only figures are needed."""
        steps, spec, state, reason = run.events.steps(), run.spec, run.state, run.reason
        store = EventStore()
        kept = [e for step in ends(last_stretch(steps, spec), STEP_LIMIT) for e in step.events]
        # Without what is large and in no curve.
        store.add(replace(e, spans=(), memory_curve=()) if e.spans or e.memory_curve else e for e in kept)
        rows = curve_of(ends(steps, STEP_LIMIT)) if curve else np.empty((0, len(CURVE)))
        now: dict[str, Any] = {"spec": spec, "state": state, "reason": reason, "switches": tuple(run.switches)}
        same = ("id", "notes", "started_unix_s", "ended_unix_s", "environment")
        return cls(events=store, curve=rows, **now, **{name: getattr(run, name) for name in same})


class Kind(enum.Enum):
    PIN = "pin"
    SWEEP = "sweep"
    LIVE = "live"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: its run, and a version that changes with the run's data."""

    label: str
    kind: Kind
    source: Pinned | Refusal
    version: Version
    place: int | None = None  # in the palette
    plotted: bool = False  # the plots show this run

    @property
    def began(self) -> bool:
        return not isinstance(self.source, Refusal)


@dataclass(frozen=True, kw_only=True, eq=False)
class BoardView:
    """The comparison, and its rows' entries in the same order."""

    comparison: Comparison
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Pin:
    label: str
    data: Version  # of its run, when it was pinned
    run: Pinned


class Board:
    def __init__(self, lab: LabLike) -> None:
        self._lab = lab
        self._lock = threading.RLock()
        self._pins: dict[int, _Pin] = {}  # by place in the palette
        self._baseline: str | None = None  # as chosen; None: the first row that began
        self._dismissed: set[str] = set()  # rows of the sweep that were removed (see `_identity`)
        self._sweep: Sweep | None = None
        self._frozen: dict[str, tuple[Version, Pinned]] = {}  # run id -> the run as it was at this version
        self._overlays: dict[int, Overlay] = {}
        self._rows: dict[Version, Row] = {}
        self._dirty = True
        self._due_s = 0.0
        self.shown = BoardView(comparison=Comparison.of([]))

    def pin(self, run: RunView | None = None, label: str | None = None) -> str:
        """Pins a run as it is now, by default the one that is shown; returns its label. Raises ArgumentError if there is
        nothing to pin, no place, or the label is taken."""
        with self._lock:
            run = run if run is not None else shown_run(self._lab)
            if run is None or not len(run.events):
                raise ArgumentError("pin", "there is no step to pin yet", "start a run, and pin it after some steps")
            place = next((i for i in range(MOST_PINS) if i not in self._pins), None)
            if place is None:
                hint = f"unpin one of {', '.join(self.pins)} first"
                raise ArgumentError("pin", f"{MOST_PINS} runs are pinned already", hint)
            if label is None:  # the letter of the place, unless another pin was given it as its name
                name = next(letter for letter in (LETTERS[place], *LETTERS) if letter not in self.pins)
            else:
                name = label.strip() if isinstance(label, str) else ""
                taken = {entry.label for entry in self.shown.entries} | {*self.pins, LIVE}
                if not name or len(name) > LONGEST or name in taken or name.isdigit():
                    hint = f"give a name of 1 to {LONGEST} characters that is not a number and no other row's"
                    raise ArgumentError("label", f"{label!r} is refused", hint)
            self._pins[place] = _Pin(label=name, data=_data_version(run), run=Pinned.of(run))
            self._dirty = True
            return name

    def unpin(self, label: str) -> None:
        """Removes a row: a pin, or one of a sweep that is over. Raises ArgumentError if there is no such row."""
        with self._lock:
            self.refresh()
            place = next((i for i, pin in self._pins.items() if pin.label == label), None)
            row = next((e for e in self.shown.entries if e.label == label and e.kind is Kind.SWEEP), None)
            if place is not None:
                del self._pins[place]
            elif row is not None and (self._sweep is None or self._sweep.done):
                self._dismissed.add(_identity(row.source))
            else:
                there = f"take one of {', '.join(self.pins)}" if self._pins else "nothing is pinned"
                raise ArgumentError("unpin", f"there is no pin {label!r}", there)
            if self._baseline == label:
                self._baseline = None
            self._dirty = True

    def choose_baseline(self, label: str) -> None:
        """Compares the others with this row from now on, if there is such a row and it was not refused."""
        with self._lock:
            self.refresh()
            if any(e.label == label and e.began for e in self.shown.entries):
                self._baseline = label
                self._dirty = True

    @property
    def pins(self) -> dict[str, Pinned]:
        """The pinned runs by label, in the order of their places."""
        with self._lock:
            return {pin.label: pin.run for _, pin in sorted(self._pins.items())}

    def tick(self) -> BoardView:
        """Updates `shown` if that is due."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._due_s or self._dirty:
                began_s = time.thread_time()
                self.refresh()
                self._due_s = now_s + max(EVERY_S, (time.thread_time() - began_s) / SHARE)
            return self.shown

    def refresh(self) -> Comparison:
        with self._lock:
            entries = self._entries()
            before = [(e.version, e.plotted) for e in self.shown.entries]
            if self._dirty or [(e.version, e.plotted) for e in entries] != before:
                self._dirty = False
                self.shown = BoardView(comparison=self._compare(entries), entries=entries)
            return self.shown.comparison

    def overlays(self) -> dict[int, Overlay]:
        """Place -> the curve that belongs there; the same objects as before where nothing has changed."""
        with self._lock:
            before = {overlay.label: overlay for overlay in self._overlays.values()}
            self._overlays = {}
            for e in self.shown.entries:
                if e.place is not None and isinstance(e.source, Pinned) and not e.plotted:
                    overlay = before.get(e.label)
                    if overlay is None or overlay.rows is not e.source.curve:
                        overlay = Overlay(label=e.label, rows=e.source.curve)
                    self._overlays[e.place] = overlay
            return self._overlays

    def _entries(self) -> tuple[Entry, ...]:
        """Nothing where neither a pin nor a sweep gives a reason to compare."""
        plotted = shown_run(self._lab)
        pins = [
            Entry(label=pin.label, kind=Kind.PIN, source=pin.run, version=(pin.label, id(pin.run)), place=place)
            for place, pin in sorted(self._pins.items())
        ]
        others = self._swept(plotted)
        if not pins and not others:
            return ()
        if plotted is not None and len(plotted.events) and plotted.id not in {e.version[0] for e in others}:
            version, data = _version(plotted), _data_version(plotted)
            if all(pin.data != data for pin in self._pins.values()):  # it has new events since it was pinned
                source = self._freeze(plotted, version, curve=False)
                others.append(Entry(label=LIVE, kind=Kind.LIVE, source=source, version=version, plotted=True))
        self._frozen = {r: f for r, f in self._frozen.items() if any(f[1] is e.source for e in others)}
        return (*pins, *others)

    def _swept(self, plotted: RunView | None) -> list[Entry]:
        """The newest sweep's runs, then its refusals."""
        sweep = self._lab.sweep
        if sweep is not self._sweep:
            self._sweep = sweep
            self._dismissed.clear()
        if sweep is None:
            return []
        places = iter([i for i in range(MOST_PINS) if i not in self._pins])
        entries = []
        for number, run in enumerate(list(sweep.runs), 1):
            if run.id not in self._dismissed:
                version = _version(run)
                source = self._freeze(run, version, curve=True)
                entry = Entry(label=str(number), kind=Kind.SWEEP, source=source, version=version)
                is_plotted = plotted is not None and run.id == plotted.id
                entries.append(replace(entry, place=next(places, None), plotted=is_plotted))
        for number, refusal in enumerate(sweep.refused, len(sweep.specs) + 1):
            if (identity := _identity(refusal)) not in self._dismissed:
                entries.append(Entry(label=str(number), kind=Kind.SWEEP, source=refusal, version=(identity,)))
        return entries

    def _freeze(self, run: RunView, version: Version, *, curve: bool) -> Pinned:
        known = self._frozen.get(run.id)
        if known is None or known[0] != version:
            known = self._frozen[run.id] = (version, Pinned.of(run, curve=curve))
        return known[1]

    def _compare(self, entries: Sequence[Entry]) -> Comparison:
        base = next((e for e in entries if e.label == self._baseline and e.began), None)
        base = base or next((e for e in entries if e.began), None)
        rows: dict[Version, Row] = {}
        for e in entries:
            key = (e.label, e.version, base.version if base is not None else None)
            pair = [base, e] if base is not None and e.began and e is not base else [e]
            sources, names = [one.source for one in pair], [one.label for one in pair]
            baseline = 0 if base is not None and e.began else None
            rows[key] = self._rows.get(key) or Comparison.of(sources, baseline=baseline, names=names).rows[-1]
        self._rows = rows
        differing = differing_fields([row.flat for row in rows.values()])
        shown = differing or DEFAULT_FIELDS
        named = tuple(replace(row, name=describe_fields(row.flat, shown)) for row in rows.values())
        return Comparison(rows=named, baseline=base.label if base is not None else None, differing=differing)


def _data_version(run: RunView) -> Version:
    return (run.id, len(run.events), run.spec.id)


def _version(run: RunView) -> Version:
    return (*_data_version(run), run.state, run.reason)


def _identity(source: RunView | Refusal) -> str:
    return f"{source.spec}" if isinstance(source, Refusal) else source.id


def ends(steps: Sequence[Step], most: int) -> list[Step]:
    """Returns the first `most` steps and the last `most`, or all."""
    return [*steps[:most], *steps[-most:]] if len(steps) > 2 * most else list(steps)


def curve_of(steps: Iterable[Step]) -> Numbers:
    """A row for each whole step, in the order of `CURVE`. Rates and exposed communication are medians of nine ordinary
    steps; peaks are of each rank, in MiB, or, of more ranks than colours, the largest and the smallest."""
    recent: deque[tuple[float, float, float]] = deque(maxlen=SMOOTH_STEPS)
    rows: list[list[float]] = []
    for step in steps:
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


SPREADS = ("step time", "tokens/s", "TFLOPS", "MFU", "exposed")  # columns whose spread is shown or told
ICONS = {Verdict.EQUAL: "=", Verdict.WITHIN: "≈", Verdict.UNKNOWN: "?"}
TONES = {Verdict.EQUAL: "good", Verdict.WITHIN: "fair", Verdict.DIFFERENT: "bad", Verdict.UNKNOWN: "soft"}
SAME_RUN = "The same run under another strategy: they have no step in common. Start it again, or press Compare…"


class ComparisonCard(BaseCard):
    """Texts, bars and buttons, without a Bokeh plot. Hidden while there is nothing to compare."""

    name = "comparison"
    title = "Comparison"
    wide = True

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
        at_peaks = [row.figures.at_peak for row in compared.rows if row.figures.peak_memory_bytes]
        drawn = [c for c in ON_DEVICE if any(peak.of_role(Role(c)) for peak in at_peaks)]
        differences = [f"{label} is {sentence}." for label, sentence in compared.differences.items()]
        reading = [f"{_reading(compared, shown.entries)}."]
        if over:  # one of the sweep's runs is recommended: they were trained in turns, pinned ones were not
            swept = [e.kind is Kind.SWEEP for e in shown.entries]
            reading += recommend(replace(compared, rows=tuple(compress(compared.rows, swept)), baseline=None)).sentences
        ratios = [note for note in compared.notes() if note.startswith("Ratios of")]
        self._captions = Captions(
            reading=" ".join(reading),
            legend=tuple(class_keys(drawn)),
            note=" ".join([*compared.refusals(), *differences, RULE, *ratios, *compared.fidelity(common=False)]),
            table=table(compared, shown.entries),
        )


def table(compared: Comparison, entries: Sequence[Entry]) -> tuple[tuple[str | Cell, ...], ...]:
    """Column heads, then a row for each run that began."""
    base = compared.baseline or NONE
    longest_s = max((s.p90 for r in compared.rows if (s := r.figures.step_time_s)), default=0.0)
    largest = max((r.figures.peak_memory_bytes or 0 for r in compared.rows), default=0)
    times = ("step time (p10–p90)", f"time / {base}", "tokens/s", "TFLOPS · MFU", "exposed")
    heads = ("", "strategy", f"same as {base}?", *times, "peak memory", f"peak / {base}", "state", "")
    rows: list[tuple[str | Cell, ...]] = []
    for row, entry in zip(compared.rows, entries, strict=True):
        if row.refused:
            continue
        texts = compared.cells(row, SPREADS)
        ratio, interval = split_spread(ratio_words(row.time_ratio, "×"))
        times_of_row = (
            _time(row, texts["step time"], longest_s),
            Cell(text=ratio, title=("not told apart: " if ratio.startswith("≈") else "") + interval),
            _figure(texts["tokens/s"]),
            _figure(texts["TFLOPS"], texts["MFU"]),
            _figure(texts["exposed"]),
        )
        memory = _memory(row, largest), f"×{row.memory_ratio:.2f}" if row.memory_ratio else NONE
        remove = Cell(text="×", press="unpin", about=row.label, title=f"Remove {row.label}")
        about = (_label(row, entry, compared), Cell(text=row.name, title=row.name), _badge(row, compared))
        last: str | Cell = "" if entry.kind is Kind.LIVE else remove
        rows.append((*about, *times_of_row, *memory, _state(row, entry), last))
    return (heads, *rows)


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
    same_run = parity.verdict is Verdict.UNKNOWN and row.run == compared[compared.baseline or ""].run
    text = compared.badge(row)
    if parity.verdict is not Verdict.DIFFERENT:  # that has its icon
        text = f"{ICONS[parity.verdict]} {text}"
    return Cell(text=text, tone=TONES[parity.verdict], title=SAME_RUN if same_run else parity.sentence)


def _time(row: Row, text: str, longest_s: float) -> Cell:
    spread = row.figures.step_time_s
    if spread is None or not longest_s:
        return Cell(text=NONE)
    return Cell(
        text=text.replace(" to ", "–"),
        title=f"Median of {row.figures.counted} of {row.figures.steps} steps",
        parts=(Part(share=spread.median / longest_s, token="ink.faint"),),
        whisker=(spread.p10 / longest_s, spread.p90 / longest_s),
    )


def _figure(*texts: str) -> Cell:
    """Medians, and their spreads as the tooltip."""
    middles, spreads = zip(*map(split_spread, texts), strict=True)
    shown = [middle for middle in middles if middle != NONE]
    title = "; ".join(f"p10 to p90: {spread}" for spread in spreads if spread)
    return Cell(text=" · ".join(shown) or NONE, title=title)


def _memory(row: Row, largest: int) -> Cell:
    peak = row.figures.peak_memory_bytes
    if not peak or not largest:
        return Cell(text=NONE, title="Not measured yet: the third step of a run does")
    sizes = [(c, theme.MEMORY[c], row.figures.at_peak.of_role(Role(c))) for c in ON_DEVICE]
    host = f", {size(row.figures.host_bytes)} on the host" if row.figures.host_bytes else ""
    classes = ", ".join(f"{fill.label} {size(b)}" for _, fill, b in sizes if b)
    parts = tuple(Part(share=b / largest, token=f"memory.{c}", hatch=fill.hatch) for c, fill, b in sizes if b)
    return Cell(text=f"{size(peak)}{' + host' if host else ''}", title=f"Fullest rank: {classes}{host}", parts=parts)


def _state(row: Row, entry: Entry) -> Cell:
    tone = "bad" if row.state == "failed" or row.state.startswith("lost") else ""
    text = f"▶ {row.state}" if entry.plotted and row.state == "running" else row.state
    if entry.kind is Kind.PIN and row.state in ("running", "paused"):
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
