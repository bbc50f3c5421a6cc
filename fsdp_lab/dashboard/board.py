"""`Board`: which runs are held side by side, and the `Comparison` of them, kept up to date at little cost.

Rows, from the top: pins (A, B, ...), the runs and refusals of the newest sweep (1, 2, ...), and the live run where it is
none of these. A row is worked out anew only when its run, or the baseline, has told more; at most once a second, and
never for more than a thirtieth of the time. Pins are frozen when they are pinned, so they are worked out once.

Presses come on any thread, `tick` from the dashboard's; one lock orders them.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from fsdp_lab.core.describe import DEFAULT_FIELDS, describe_fields, differing_fields
from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels.axis import Overlay
from fsdp_lab.dashboard.pins import Pinned
from fsdp_lab.dashboard.ports import LabLike, RunLike, SweepLike
from fsdp_lab.runs import Comparison, Refusal
from fsdp_lab.runs.comparison import Row
from fsdp_lab.runs.view import RunView

MOST_PINS = len(theme.PINS)
LETTERS = tuple(fill.label for fill in theme.PINS.values())
LIVE = "live"
EVERY_S = 1.0
SHARE = 0.03  # of the time, that comparing may take
LONGEST = 24  # characters of a label


class Kind(enum.Enum):
    PIN = "pin"
    SWEEP = "sweep"
    LIVE = "live"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: its run, and a version that changes with the run's data."""

    label: str
    kind: Kind
    source: RunView | Refusal
    version: tuple[object, ...]
    place: int | None = None  # in the palette
    going: bool = False  # it is the run that is shown in the plots

    @property
    def counts(self) -> bool:
        """Whether it can be a baseline."""
        return not isinstance(self.source, Refusal)


@dataclass(frozen=True, kw_only=True, eq=False)
class BoardView:
    """What was compared last. `entries` are in the order of the comparison's rows."""

    comparison: Comparison
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Pin:
    label: str
    told: tuple[object, ...]  # how much its run had told
    run: Pinned


class Board:
    """See the module."""

    def __init__(self, lab: LabLike) -> None:
        self._lab = lab
        self._lock = threading.RLock()
        self._pins: dict[int, _Pin] = {}  # by place
        self._baseline: str | None = None  # as chosen; None: the first that can be
        self._dismissed: set[str] = set()  # rows of a sweep that were taken away, by run id or reason
        self._sweep: SweepLike | None = None
        self._frozen: dict[str, tuple[tuple[object, ...], Pinned]] = {}  # run -> version, as it was then
        self._overlays: dict[str, tuple[object, Overlay]] = {}  # label -> what it was made of
        self._rows: dict[tuple[object, ...], Row] = {}
        self._dirty = True
        self._due_s = 0.0
        self.shown = BoardView(comparison=Comparison.of([]))

    # -- what a person does -----------------------------------------------------------------------------------------

    def pin(self, run: RunView | RunLike | None = None, label: str | None = None) -> str:
        """Pins a run as it is now, by default the current one. Returns its label.

        Raises:
            ArgumentError: there is nothing to pin, no place, or the label is taken.
        """
        with self._lock:
            run = run if run is not None else running(self._lab)
            if run is None or not len(cast(RunView, run).events):
                raise ArgumentError("pin", "there is no step to pin yet", "start a run, and pin it after some steps")
            place = next((i for i in range(MOST_PINS) if i not in self._pins), None)
            if place is None:
                raise ArgumentError(
                    "pin", f"{MOST_PINS} runs are pinned already", f"unpin one of {', '.join(self.pins)} first"
                )
            name = self._free_label(place) if label is None else self._checked_label(label)
            self._pins[place] = _Pin(label=name, told=_told(run), run=Pinned.of(cast(RunView, run)))
            self._dirty = True
            return name

    def _free_label(self, place: int) -> str:
        """The letter of the place, unless somebody has named another pin so."""
        taken = self.pins
        return next(letter for letter in (LETTERS[place], *LETTERS) if letter not in taken)

    def _checked_label(self, label: str) -> str:
        text = label.strip() if isinstance(label, str) else ""
        taken = {entry.label for entry in self.shown.entries} | {*self.pins, LIVE}
        if not text or len(text) > LONGEST or text in taken or text.isdigit():
            hint = f"give a name of 1 to {LONGEST} characters that is not a number and no other row's"
            raise ArgumentError("label", f"{label!r} is refused", hint)
        return text

    def unpin(self, label: str) -> None:
        """Takes a row away: a pin, or one of a sweep that is over.

        Raises:
            ArgumentError: there is no such row.
        """
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
        """The others are held against this row from now on. One that is not there, or was refused, changes nothing."""
        with self._lock:
            self.refresh()
            if any(e.label == label and e.counts for e in self.shown.entries):
                self._baseline = label
                self._dirty = True

    @property
    def pins(self) -> dict[str, Pinned]:
        """By label, in the order of their places."""
        with self._lock:
            return {pin.label: pin.run for _, pin in sorted(self._pins.items())}

    # -- what is shown ----------------------------------------------------------------------------------------------

    def tick(self) -> BoardView:
        """Brings `shown` up to date where that is due."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._due_s or self._dirty:
                began_s = time.thread_time()
                self.refresh()
                self._due_s = now_s + max(EVERY_S, (time.thread_time() - began_s) / SHARE)
            return self.shown

    def refresh(self) -> Comparison:
        """The comparison of this moment."""
        with self._lock:
            entries = self._entries()
            if self._dirty or _versions(entries) != _versions(self.shown.entries):
                self._dirty = False
                self.shown = BoardView(comparison=self._compare(entries), entries=entries)
            return self.shown.comparison

    def overlays(self) -> dict[int, Overlay]:
        """Place -> the curve that belongs there; the same objects as before where nothing has changed."""
        with self._lock:
            made: dict[int, Overlay] = {}
            kept: dict[str, tuple[object, Overlay]] = {}
            for e in self.shown.entries:
                if e.place is None or not isinstance(e.source, Pinned) or e.going:
                    continue
                of, overlay = self._overlays.get(e.label, (None, None))
                if overlay is None or of is not e.source:
                    overlay = Overlay(label=e.label, rows=e.source.curve)
                kept[e.label] = (e.source, overlay)
                made[e.place] = overlay
            self._overlays = kept
            return made

    # -- entries ------------------------------------------------------------------------------------------------------

    def _entries(self) -> tuple[Entry, ...]:
        """Nothing where neither a pin nor a sweep gives a reason to compare."""
        going = running(self._lab)
        pins = [Entry(label=pin.label, kind=Kind.PIN, source=pin.run, version=(pin.label, id(pin.run)), place=place)
                for place, pin in sorted(self._pins.items())]  # fmt: skip
        swept = list(self._swept(going))
        if not pins and not swept:
            return ()
        live = list(self._live(going, {e.version[0] for e in swept}))
        self._frozen = {r: f for r, f in self._frozen.items() if any(f[1] is e.source for e in (*swept, *live))}
        return (*pins, *swept, *live)

    def _live(self, going: RunLike | None, others: set[object]) -> Iterator[Entry]:
        """The run that is shown, unless it is among the others or has sent no events since it was pinned."""
        if going is None or going.id in others or not len(cast(RunView, going).events):
            return
        if all(pin.told != _told(going) for pin in self._pins.values()):
            version = _version(going)
            source = self._freeze(going, version, curve=False)
            yield Entry(label=LIVE, kind=Kind.LIVE, source=source, version=version, going=True)

    def _swept(self, going: RunLike | None) -> Iterator[Entry]:
        sweep = self._lab.sweep
        if sweep is not self._sweep:
            self._sweep = sweep
            self._dismissed.clear()
        if sweep is None:
            return
        places = iter([i for i in range(MOST_PINS) if i not in self._pins])
        number = 0
        for run in list(sweep.runs):
            number += 1
            if run.id in self._dismissed:
                continue
            version = _version(run)
            yield Entry(label=str(number), kind=Kind.SWEEP, source=self._freeze(run, version, curve=True), version=version,
                        place=next(places, None), going=going is not None and run.id == going.id)  # fmt: skip
        number = len(sweep.specs)
        for refusal in sweep.refused:
            number += 1
            if _identity(refusal) not in self._dismissed:
                yield Entry(label=str(number), kind=Kind.SWEEP, source=refusal, version=(_identity(refusal),))

    def _freeze(self, run: RunLike, version: tuple[object, ...], *, curve: bool) -> Pinned:
        known = self._frozen.get(run.id)
        if known is None or known[0] != version:
            known = self._frozen[run.id] = (version, Pinned.of(cast(RunView, run), curve=curve))
        return known[1]

    # -- rows -----------------------------------------------------------------------------------------------------------

    def _compare(self, entries: Sequence[Entry]) -> Comparison:
        base = next((e for e in entries if e.label == self._baseline and e.counts), None)
        base = base or next((e for e in entries if e.counts), None)
        rows: dict[tuple[object, ...], Row] = {}
        for e in entries:
            key = (e.label, e.version, base.version if base is not None else None)
            rows[key] = self._rows.get(key) or _row(e, base)
        self._rows = rows
        differing = differing_fields([row.flat for row in rows.values()])
        named = tuple(
            replace(row, name=describe_fields(row.flat, differing or DEFAULT_FIELDS)) for row in rows.values()
        )
        return Comparison(rows=named, baseline=base.label if base is not None else None, differing=differing)


def running(lab: LabLike) -> RunLike | None:
    """The run that is shown: in a running sweep, the one that trains at present."""
    sweep = lab.sweep
    return (sweep.current if sweep is not None and not sweep.done else None) or lab.current


def _row(entry: Entry, base: Entry | None) -> Row:
    if base is None or not entry.counts:
        return Comparison.of([entry.source], baseline=None, names=[entry.label]).rows[0]
    if entry is base:
        return Comparison.of([entry.source], names=[entry.label]).rows[0]
    return Comparison.of([base.source, entry.source], names=[base.label, entry.label]).rows[1]


def _told(run: RunView | RunLike) -> tuple[object, ...]:
    return (run.id, len(cast(RunView, run).events), run.spec.id)


def _version(run: RunLike) -> tuple[object, ...]:
    return (*_told(run), run.state.name, run.reason)


def _versions(entries: Sequence[Entry]) -> list[tuple[object, ...]]:
    return [(*e.version, e.going) for e in entries]


def _identity(source: RunView | Refusal) -> str:
    return f"{source.spec}" if isinstance(source, Refusal) else source.id
