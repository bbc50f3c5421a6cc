"""`Timeline`: one traced step, the spans of all ranks on one clock.

A rank says its spans from its own beginning of the step, and where that beginning is on rank 0's clock, give or take.
Ranks whose clocks were not compared, or whose clock contradicts what was done (`disagreeing`), stand by their own
beginning, and the timeline says so: it never shows an order of things that cannot have been.

A trace file holds traced steps in the Trace Event Format ("Trace Event Format", a document of the Chromium project), which
Perfetto (ui.perfetto.dev) and chrome://tracing open. A rank is a process, a track of its timeline a thread. Spans of one
track that overlap are given threads of their own, because slices of one thread may only nest.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from fsdp_lab.core.events import Span, StepEvent, Track, exposed_by_unit
from fsdp_lab.core.files import check_file, write_whole
from fsdp_lab.core.formatting import Table, duration

TOLERANCE_S = 1e-3  # beyond the stated errors, by which a clock may disagree: what the moments themselves are worth
MOST_COLUMNS = 8  # ranks that a table names each
NO_UNIT = "no unit"  # the vote, and whatever else belongs to no module

# What needs the data of every rank of its group: it cannot end anywhere before all have begun it.
MEETINGS = (Track.ALL_GATHER, Track.REDUCE_SCATTER, Track.ALL_REDUCE, Track.CONTROL)

TRACE_SUFFIXES = (".json", ".json.gz")
TRACKS = tuple(Track)
TRACK_ROWS = 100  # threads of a trace file that a track may take
STEP_THREAD = 0
TRACK_NAMES = {
    Track.COMPUTE: "compute",
    Track.WAIT: "waiting",
    Track.ALL_GATHER: "all-gather",
    Track.REDUCE_SCATTER: "reduce-scatter",
    Track.ALL_REDUCE: "all-reduce",
    Track.CONTROL: "control",
    Track.OTHER: "other collectives",
    Track.HOST_COPY: "host copy",
}


@dataclass(frozen=True, kw_only=True)
class RankLane:
    """One rank's part: its spans lie at `begin_s + span.start_s`, in seconds from the timeline's zero."""

    rank: int
    begin_s: float
    aligned: bool  # on the common clock; otherwise it begins at zero, because nobody knows better
    event: StepEvent
    spans: tuple[Span, ...]  # the sound ones, in order of their start
    unsound: int = 0  # spans left out: they end before they begin, or have no time at all

    @property
    def end_s(self) -> float:
        """Of the step; a collective that is still under way then may end later."""
        return self.begin_s + self.event.step_time_s


@dataclass(frozen=True, kw_only=True, repr=False)
class Timeline:
    """A traced step. In a notebook it shows its exposed communication, unit by unit; `export` writes it as a trace.

    Attributes:
        lanes: one for each rank that sent spans, in order of rank. missing: the other ranks.
        zero_s: of the common clock, rank 0's `time.perf_counter`.
        clock_error_s: how far a lane may be off beside rank 0's, at most; None: no two lanes are aligned.
    """

    step: int
    world_size: int
    lanes: tuple[RankLane, ...]
    zero_s: float
    clock_error_s: float | None
    contradicted: tuple[int, ...] = ()  # ranks whose clock cannot be right

    @classmethod
    def of(cls, events: Sequence[StepEvent]) -> Timeline:
        """Of the events of one step; those without spans are passed over. Raises ValueError where none has any."""
        traced = sorted((e for e in events if e.spans), key=lambda e: e.rank)
        if not traced:
            raise ValueError("a timeline needs the events of a traced step: none of these has spans")
        sound = {e.rank: sorted(filter(_sound, e.spans), key=attrgetter("start_s", "end_s")) for e in traced}
        compared = {e.rank: e for e in traced if _compared(e)}
        contradicted = disagreeing(compared, sound)
        agreed = [e for rank, e in compared.items() if rank not in contradicted]
        zero_s = min((e.begin_s for e in agreed), default=traced[0].begin_s)
        ranks = {e.rank for e in agreed} if len(agreed) > 1 else set()
        lanes = tuple(
            RankLane(
                rank=e.rank,
                begin_s=e.begin_s - zero_s if e.rank in ranks else 0.0,
                aligned=e.rank in ranks,
                event=e,
                spans=tuple(sound[e.rank]),
                unsound=len(e.spans) - len(sound[e.rank]),
            )
            for e in traced
        )
        return cls(
            step=traced[0].step,
            world_size=traced[0].world_size,
            lanes=lanes,
            zero_s=zero_s,
            clock_error_s=max((e.clock_error_s or 0.0 for e in agreed), default=None) if ranks else None,
            contradicted=tuple(sorted(contradicted)),
        )

    # -- what it says ---------------------------------------------------------------------------------------------

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that sent no spans of this step."""
        return tuple(sorted(set(range(self.world_size)) - {lane.rank for lane in self.lanes}))

    @property
    def seconds(self) -> float:
        """From zero to the end of the last rank's step."""
        return max(lane.end_s for lane in self.lanes)

    def exposed(self) -> dict[int, dict[str, float]]:
        """Exposed communication: rank -> unit -> seconds that computing waited for its collectives."""
        return {lane.rank: exposed_by_unit(lane.spans) for lane in self.lanes}

    @property
    def waits_unseen(self) -> bool:
        """Whether more was waited than spans tell: over NCCL streams wait, where no clock of the wire sees it. Then
        exposed communication is known of a step as a whole (`StepEvent.exposed_comm_s`, NaN before it was measured)."""
        return any(_unseen(lane) for lane in self.lanes)

    @property
    def remarks(self) -> tuple[str, ...]:
        """How exactly the lanes stand to each other, and what is not there; a sentence each."""
        return tuple(filter(None, [self._contradiction(), self._alignment(), self._gaps(), self._unseen()]))

    def _alignment(self) -> str:
        own = [lane.rank for lane in self.lanes if not lane.aligned and lane.rank not in self.contradicted]
        if self.clock_error_s is not None and not own:
            return (
                f"{'The other ranks' if self.contradicted else 'Ranks'} aligned to ±{self.clock_error_s * 1e3:.2g} ms."
            )
        if len(self.lanes) < 2 or not own or (self.contradicted and len(own) == 1):
            return ""
        which = f"clock of {_named(own)} was" if len(own) == 1 else f"clocks of {_named(own)} were"
        return f"The {which} not compared with others: drawn from {_its(own)} own beginning."

    def _contradiction(self) -> str:
        if not self.contradicted:
            return ""
        return (
            f"What {_named(self.contradicted)} says of time contradicts the others: a collective would have ended before "
            f"all its ranks began it. Drawn from {_its(self.contradicted)} own beginning."
        )

    def _gaps(self) -> str:
        said = f"Nothing is known of {_named(self.missing)} in this step." if self.missing else ""
        unsound = sum(lane.unsound for lane in self.lanes)
        if unsound:
            said += f" {unsound} span{'s' * (unsound > 1)} left out: no end, or one before the beginning."
        return said.strip()

    def _unseen(self) -> str:
        said = "Over NCCL streams wait, where the wire does not see it: waits are not attributed to units."
        return said if self.waits_unseen else ""

    def table(self) -> Table:
        """Exposed communication of each unit, most first: a column for each rank, or least, mean and most of many."""
        by_rank = self.exposed()
        units = {unit for exposed in by_rank.values() for unit in exposed}
        of = {unit: [exposed.get(unit, 0.0) for exposed in by_rank.values()] for unit in units}
        ordered = sorted(units, key=lambda unit: (-fmean(of[unit]), unit))
        rows = [(unit or NO_UNIT, of[unit]) for unit in ordered]
        sums = [lane.event.exposed_comm_s if _unseen(lane) else sum(by_rank[lane.rank].values()) for lane in self.lanes]
        rows += [("all exposed", sums), ("step", [lane.event.step_time_s for lane in self.lanes])]
        few = len(self.lanes) <= MOST_COLUMNS
        heads = [f"rank {rank}" for rank in by_rank] if few else ["least", "mean", "most"]
        return Table(
            columns=("exposed", *heads),
            rows=tuple((name, *map(_shown, values if few else _range(values))) for name, values in rows),
            caption=f"step {self.step}: {duration(self.seconds)}, exposed communication by unit",
            notes=(*self.remarks, *dict.fromkeys(note for lane in self.lanes for note in lane.event.notes)),
            left=frozenset({"exposed"}),
        )

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes the step as a Chrome trace, for ui.perfetto.dev or chrome://tracing; returns where.

        Raises SpecError for a path that is not a .json or .json.gz file that can be written.
        """
        return write_trace(path, [self])


# -- clocks ----------------------------------------------------------------------------------------------------------


def disagreeing(events: Mapping[int, StepEvent], spans: Mapping[int, Sequence[Span]]) -> set[int]:
    """Ranks whose clocks cannot be right: a collective that needs all ranks ended before one of them issued it.

    Such a pair accuses both; the rank that most others accuse is taken for the wrong one, until no pair is left. Between
    two alone it is not rank 0, whose clock is the measure.
    """
    accused: dict[int, set[int]] = {}
    for issued, ended in _meetings(events, spans).values():
        if min(ended.values()) + TOLERANCE_S >= max(issued.values()):
            continue
        for a, end_s in ended.items():
            for b, issue_s in issued.items():
                if a != b and end_s + TOLERANCE_S < issue_s:
                    accused.setdefault(a, set()).add(b)
                    accused.setdefault(b, set()).add(a)
    wrong: set[int] = set()
    while accused:
        worst = max(accused, key=lambda rank: (len(accused[rank]), rank))
        wrong.add(worst)
        for other in accused.pop(worst):
            accused[other].discard(worst)
        accused = {rank: others for rank, others in accused.items() if others}
    return wrong


def _meetings(
    events: Mapping[int, StepEvent], spans: Mapping[int, Sequence[Span]]
) -> dict[tuple[str, int, Track], tuple[dict[int, float], dict[int, float]]]:
    """Collective -> rank -> the earliest that it can have issued it, and the latest that it can have ended, on rank 0's
    clock. A collective with more ranks than its group has is left out."""
    found: dict[tuple[str, int, Track], tuple[dict[int, float], dict[int, float]]] = {}
    crowded = set()
    for rank, e in events.items():
        error_s = e.clock_error_s or 0.0
        for s in spans[rank]:
            if s.track not in MEETINGS or s.ordinal < 0:
                continue
            key = (s.group, s.ordinal, s.track)
            issued, ended = found.setdefault(key, ({}, {}))
            if rank in issued or len(issued) >= s.size:
                crowded.add(key)
            issued[rank] = e.begin_s + s.start_s - error_s
            ended[rank] = e.begin_s + s.end_s + error_s
    return {key: times for key, times in found.items() if key not in crowded}


def _sound(span: Span) -> bool:
    return -math.inf < span.start_s <= span.end_s < math.inf  # of NaN nothing is true


def _unseen(lane: RankLane) -> bool:
    told_s, all_s = sum(exposed_by_unit(lane.spans).values()), lane.event.exposed_comm_s
    return not all_s <= 1.05 * told_s + TOLERANCE_S  # NaN is unseen too


def _shown(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) else "–"


def _compared(event: StepEvent) -> bool:
    error_s = event.clock_error_s
    return error_s is not None and math.isfinite(error_s) and math.isfinite(event.begin_s)


def _named(ranks: Sequence[int]) -> str:
    """In words: rank 3; ranks 0, 1 and 5; 64 ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_COLUMNS:
        return f"{len(ranks)} ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _its(ranks: Sequence[int]) -> str:
    return "its" if len(ranks) == 1 else "their"


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), fmean(values), max(values)


# -- trace files -----------------------------------------------------------------------------------------------------


def check_trace_path(path: str | os.PathLike[str], *, field: str = "path") -> Path:
    """Where a trace is to go. Raises SpecError where it cannot: to be asked before anything is made."""
    return check_file(path, TRACE_SUFFIXES, field=field)


def write_trace(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> Path:
    """Writes the file whole or not at all: a former one stays until the new one is there. Raises SpecError."""
    file = check_trace_path(path)
    content = json.dumps(trace_events(timelines), separators=(",", ":"), allow_nan=False).encode()
    if file.name.endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    return write_whole(file, content)


def trace_events(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The content of the file. Times are in microseconds from the first step's beginning on the common clock."""
    steps = _placed(timelines)
    ranks = sorted({lane.rank for _, timeline in steps for lane in timeline.lanes})
    events = [e for rank in ranks for e in _process(rank, steps)]
    first = timelines[0].lanes[0].event
    said = [r for t in timelines for r in t.remarks]
    said += [n for t in timelines for lane in t.lanes for n in lane.event.notes]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": first.run,
            "world_size": first.world_size,
            "steps": [t.step for t in timelines],
            "notes": list(dict.fromkeys(said)),
        },
    }


def stacked(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """A row for each interval, so that none overlaps another in its row; as few rows as can be.

    `intervals` in order of their start; one that begins where another ends does not overlap it.
    """
    ends: list[float] = []
    rows = []
    for start, end in intervals:
        row = next((i for i, taken in enumerate(ends) if taken <= start), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        rows.append(row)
    return rows


def _placed(timelines: Sequence[Timeline]) -> list[tuple[int, Timeline]]:
    """Each with its zero in nanoseconds. One that would begin before the step before it has ended on one of its ranks
    (a clock has jumped between them) is put behind it."""
    placed: list[tuple[int, Timeline]] = []
    ends: dict[int, int] = {}
    base_s = timelines[0].zero_s
    zero = 0
    for timeline in timelines:
        since_s = timeline.zero_s - base_s
        zero = _ns(since_s) if math.isfinite(since_s) else zero
        late = [ends[lane.rank] - zero - _ns(lane.begin_s) for lane in timeline.lanes if lane.rank in ends]
        zero += max([0, *late])
        ends.update({lane.rank: zero + _ns(lane.end_s) for lane in timeline.lanes})
        placed.append((zero, timeline))
    return placed


def _process(rank: int, steps: Sequence[tuple[int, Timeline]]) -> Iterator[dict[str, Any]]:
    """A rank's names and slices, its threads in the order of tracks."""
    mine = [
        (zero + _ns(lane.begin_s), lane) for zero, timeline in steps for lane in timeline.lanes if lane.rank == rank
    ]
    yield _name("process_name", rank, name=f"rank {rank}")
    yield _name("process_sort_index", rank, sort_index=rank)
    if not all(lane.aligned for _, lane in mine) and mine[0][1].event.world_size > 1:
        yield _name("process_labels", rank, labels="its own clock")
    yield _name("thread_name", rank, STEP_THREAD, name="step")
    yield from (_step(begin, lane) for begin, lane in mine)
    for number, track in enumerate(TRACKS):
        spans = sorted(
            ((begin + _ns(s.start_s), begin + _ns(s.end_s), lane.event.step, s)
             for begin, lane in mine for s in lane.spans if s.track is track),
            key=lambda placed: placed[:3],
        )  # fmt: skip
        yield from _threads(rank, (number + 1) * TRACK_ROWS, track, spans)


def _threads(
    rank: int, first: int, track: Track, spans: Sequence[tuple[int, int, int, Span]]
) -> Iterator[dict[str, Any]]:
    rows = [min(row, TRACK_ROWS - 1) for row in stacked([(start, end) for start, end, _, _ in spans])]
    for row in sorted(set(rows)):
        yield _name("thread_name", rank, first + row, name=TRACK_NAMES[track] + (f" ({row + 1})" if row else ""))
        yield _name("thread_sort_index", rank, first + row, sort_index=first + row)
    for row, (start, end, step, span) in zip(rows, spans, strict=True):
        yield _slice(_title(span), track, rank, first + row, start, end, {"step": step, **_facts(span)})


def _step(begin: int, lane: RankLane) -> dict[str, Any]:
    e = lane.event
    values = {"mean_loss": e.mean_loss, "tokens": e.tokens, "exposed_comm_s": e.exposed_comm_s, "spec_id": e.spec_id}
    finite = {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}
    return _slice(f"step {e.step}", "step", e.rank, STEP_THREAD, begin, begin + _ns(e.step_time_s), finite)


def _slice(
    name: str, category: str, rank: int, thread: int, start: int, end: int, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": str(category),
        "pid": rank,
        "tid": thread,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": facts,
    }


def _name(what: str, rank: int, thread: int = STEP_THREAD, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _title(span: Span) -> str:
    what = span.name.replace("_", "-")
    return " ".join(filter(None, [f"wait for {what}" if span.track is Track.WAIT else what, span.unit]))


def _facts(span: Span) -> dict[str, Any]:
    """What a click on a slice shows; of a collective all that is known of it."""
    if span.sequence < 0 and not span.payload_bytes:
        return {"unit": span.unit} if span.unit else {}
    facts = {
        "unit": span.unit,
        "group": span.group,
        "ranks": span.size,
        "dtype": span.dtype,
        "payload_bytes": span.payload_bytes,
        "link_bytes": span.link_bytes,
        "sequence": span.sequence,
        "ordinal": span.ordinal,
    }
    if span.track is not Track.WAIT:  # a wait is only part of the collective's time
        facts |= {"algorithm_bytes_per_s": span.algorithm_bytes_per_s, "bus_bytes_per_s": span.bus_bytes_per_s}
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _ns(seconds: float) -> int:
    """Whole nanoseconds, so that what touches still touches."""
    return round(seconds * 1e9)
