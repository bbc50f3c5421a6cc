"""`Timeline`: one traced step, with the spans of all ranks on one clock; and its export as a Chrome trace.

A rank measures its spans from its own start of the step, and reports that start on rank 0's clock, with an error bound.
Ranks whose clocks were not compared, or are contradicted by the order of collectives (`contradicted_ranks`), are drawn from
their own start of the step, and the timeline says so: it never shows an impossible order of events.

A trace file holds traced steps in the Trace Event Format ("Trace Event Format", a document of the Chromium project), which
Perfetto (ui.perfetto.dev) and chrome://tracing open. A rank is a process, a track of its timeline a thread. Spans of one
track that overlap are given threads of their own, because slices of one thread may only nest."""

import gzip
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from fsdp_lab.base.events import Span, StepEvent, Track, exposed_by_unit
from fsdp_lab.base.files import check_file, write_whole
from fsdp_lab.base.formatting import Table, duration
from fsdp_lab.runs.pictures import FAINT, RANKS, Picture, Plot

TOLERANCE_S = 1e-3  # by which clocks may disagree beyond their reported errors: the accuracy of a span's ends
MOST_COLUMNS = 8  # ranks with a column each in a table
UNSEEN_WAITS = "Over NCCL streams wait, where the lab does not see it: waits are not attributed to units."
NO_UNIT = "no unit"  # the vote, and whatever else belongs to no module

# Colours of a picture, in the order of its rows; waiting, which is to be found, has the one that stands out.
COMPUTE = {"forward": "#A3C4AC", "backward": "#5F9489", "optimizer": "#4E7058"}
COLORS = {
    Track.COMPUTE: "#C2CFCB",
    Track.WAIT: "#E86A00",
    Track.ALL_GATHER: "#3B61BD",
    Track.REDUCE_SCATTER: "#AB89D2",
    Track.ALL_REDUCE: "#7EC7F5",
    Track.HOST_COPY: "#8D9AA2",
    Track.OTHER: "#8FA0B5",
    Track.CONTROL: "#9D9DA6",
}

# Collectives that need the data of every rank of their group: none can end anywhere before all ranks have issued it.
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
    """One rank's part: its spans start at `begin_s + span.start_s`, in seconds from the timeline's zero."""

    rank: int
    begin_s: float
    aligned: bool  # on the common clock; otherwise it begins at zero
    event: StepEvent
    spans: tuple[Span, ...]  # the valid ones, in order of their start
    invalid: int = 0  # spans left out: they end before they start, or have no finite time

    @property
    def end_s(self) -> float:
        """The end of the step; a collective that is still running then may end later."""
        return self.begin_s + self.event.step_time_s


@dataclass(frozen=True, kw_only=True, repr=False)
class Timeline:
    """A traced step. In a notebook it shows itself as a picture; `table` has the exposed communication of each unit, and
    `export` writes it as a trace.

    Attributes:
        lanes: one for each rank that sent spans, in rank order. missing: the other ranks.
        zero_s: on the common clock, which is rank 0's `time.perf_counter`.
        clock_error_s: the most by which a lane may be shifted relative to rank 0's; None: no two lanes are aligned."""

    step: int
    world_size: int
    lanes: tuple[RankLane, ...]
    zero_s: float
    clock_error_s: float | None
    contradicted: tuple[int, ...] = ()  # ranks whose clock must be wrong

    @classmethod
    def of(cls, events: Sequence[StepEvent]) -> Self:
        """Makes it from the events of one step; those without spans are ignored. Raises ValueError where none has spans."""
        traced = sorted((e for e in events if e.spans), key=lambda e: e.rank)
        if not traced:
            raise ValueError("a timeline needs the events of a traced step: none of these has spans")
        finite = {e.rank: [s for s in e.spans if -math.inf < s.start_s <= s.end_s < math.inf] for e in traced}  # no NaN
        valid = {rank: sorted(spans, key=attrgetter("start_s", "end_s")) for rank, spans in finite.items()}
        measured = [e for e in traced if e.clock_error_s is not None and math.isfinite(e.clock_error_s)]
        compared = {e.rank: e for e in measured if math.isfinite(e.begin_s)}
        contradicted = contradicted_ranks(compared, valid)
        agreed = [e for rank, e in compared.items() if rank not in contradicted]
        zero_s = min((e.begin_s for e in agreed), default=traced[0].begin_s)
        ranks = {e.rank for e in agreed} if len(agreed) > 1 else set()
        lanes = tuple(
            RankLane(
                rank=e.rank,
                begin_s=e.begin_s - zero_s if e.rank in ranks else 0.0,
                aligned=e.rank in ranks,
                event=e,
                spans=tuple(valid[e.rank]),
                invalid=len(e.spans) - len(valid[e.rank]),
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

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that sent no spans of this step."""
        return tuple(sorted(set(range(self.world_size)) - {lane.rank for lane in self.lanes}))

    @property
    def seconds(self) -> float:
        """The time from zero to the end of the last rank's step."""
        return max(lane.end_s for lane in self.lanes)

    def exposed(self) -> dict[int, dict[str, float]]:
        """Exposed communication: rank -> unit -> seconds that computation waited for its collectives."""
        return {lane.rank: exposed_by_unit(lane.spans) for lane in self.lanes}

    @property
    def waits_unseen(self) -> bool:
        """Tells whether spans miss some waits, as over NCCL, where streams wait and not the host. Then exposed
        communication is known only of the whole step (`StepEvent.exposed_comm_s`, NaN before it was measured)."""
        return any(_has_unseen_waits(lane) for lane in self.lanes)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences on how exactly the lanes are aligned, and on what is missing."""
        unseen = UNSEEN_WAITS if self.waits_unseen else ""
        return tuple(filter(None, [self._contradiction(), self._alignment(), self._gaps(), unseen]))

    def _alignment(self) -> str:
        own = [lane.rank for lane in self.lanes if not lane.aligned and lane.rank not in self.contradicted]
        if self.clock_error_s is not None and not own:
            which = "The other ranks" if self.contradicted else "Ranks"
            return f"{which} aligned to ±{self.clock_error_s * 1e3:.2g} ms."
        if len(self.lanes) < 2 or not own or (self.contradicted and len(own) == 1):
            return ""
        which, were, its = ("clock", "was", "its") if len(own) == 1 else ("clocks", "were", "their")
        return f"The {which} of {_named(own)} {were} not compared with others: drawn from {its} own start of the step."

    def _contradiction(self) -> str:
        if not self.contradicted:
            return ""
        which = "clock" if len(self.contradicted) == 1 else "clocks"
        return (
            f"The {which} of {_named(self.contradicted)} must be wrong: a collective would have ended before all its "
            f"ranks began it. Each is drawn from its own start of the step."
        )

    def _gaps(self) -> str:
        missing = f"There are no spans of {_named(self.missing)} in this step." if self.missing else ""
        invalid = sum(lane.invalid for lane in self.lanes)
        left_out = f"{invalid} span{'s' * (invalid > 1)} left out: no end, or one before the start." if invalid else ""
        return f"{missing} {left_out}".strip()

    def table(self) -> Table:
        """Exposed communication of each unit, largest first: a column for each rank, or least, mean and most of many."""
        by_rank = self.exposed()
        units = {unit for exposed in by_rank.values() for unit in exposed}
        of_unit = {unit: [exposed.get(unit, 0.0) for exposed in by_rank.values()] for unit in units}
        sums = [
            lane.event.exposed_comm_s if _has_unseen_waits(lane) else sum(by_rank[lane.rank].values())
            for lane in self.lanes
        ]
        rows = {unit or NO_UNIT: of_unit[unit] for unit in sorted(units, key=lambda u: (-fmean(of_unit[u]), u))}
        rows |= {"all exposed": sums, "step": [lane.event.step_time_s for lane in self.lanes]}
        titles = [f"rank {rank}" for rank in by_rank]
        if len(titles) > MOST_COLUMNS:
            titles = ["least", "mean", "most"]
            rows = {name: [min(values), fmean(values), max(values)] for name, values in rows.items()}
        return Table(
            columns=("exposed", *titles),
            rows=tuple((name, *map(duration, values)) for name, values in rows.items()),
            caption=f"step {self.step}: {duration(self.seconds)}, exposed communication by unit",
            notes=(*self.remarks, *dict.fromkeys(note for lane in self.lanes for note in lane.event.notes)),
            left=frozenset({"exposed"}),
        )

    def __repr__(self) -> str:
        return repr(self.table())

    def plot(self) -> Picture:
        """A picture: a lane for each rank, with a row for each kind of work."""
        lanes, row, top = self.lanes[:MOST_COLUMNS], 13.0, 30.0
        tracks = [t for t in COLORS if any(s.track is t for lane in lanes for s in lane.spans)]
        lane_px = row * len(tracks) + 14
        bottom = top + lane_px * len(lanes)
        rank, exposed_s = max(((r, sum(u.values())) for r, u in self.exposed().items()), key=itemgetter(1))
        picture = Picture(bottom + 78, f"timeline of step {self.step}, {duration(self.seconds)}")
        exposed = "" if self.waits_unseen else f"; up to {duration(exposed_s)} of communication exposed, on rank {rank}"
        some = f"; the first {len(lanes)} ranks" if len(lanes) < len(self.lanes) else ""
        picture.text(8, 12, f"step {self.step}: {duration(self.seconds)}{exposed}{some}", 12)
        plot = Plot(picture=picture, right=picture.width_px - 10, bottom=bottom, x=(0, 1e3 * self.seconds), y=(0, 1))
        plot.draw_axes("ms since the first rank began the step")
        keys: dict[str, str] = {}
        for place, lane in enumerate(lanes):
            y, color = top + lane_px * place, RANKS[lane.rank % len(RANKS)]
            picture.text(8, y + lane_px / 2 - 7, f"rank {lane.rank}", 12, color=color)
            picture.rect(plot.left - 5, y, plot.left - 2, y + lane_px - 14, color)
            for s in lane.spans:
                label = s.name if s.track is Track.COMPUTE and s.name in COMPUTE else TRACK_NAMES[s.track]
                keys[label] = fill = COMPUTE.get(label, COLORS[s.track])
                left, right = (plot.at(1e3 * (lane.begin_s + t), 0)[0] for t in (s.start_s, s.end_s))
                upper = y + row * tracks.index(s.track)
                picture.rect(left, upper, min(max(left + 0.8, right), plot.right), upper + row - 2, fill)
        order = [*COMPUTE.values(), *COLORS.values()]
        picture.keys(bottom + 46, sorted(keys.items(), key=lambda key: order.index(key[1])))
        picture.text(8, bottom + 70, " ".join(self.remarks), 10, color=FAINT)
        return picture

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return self.plot()._repr_png_()

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Writes the step as a Chrome trace, for ui.perfetto.dev; returns the path. Raises ArgumentError for a path that is
        not a .json or .json.gz file that can be written."""
        return write_trace(path, [self])


# -- clocks ----------------------------------------------------------------------------------------------------------


def contradicted_ranks(events: Mapping[int, StepEvent], spans: Mapping[int, Sequence[Span]]) -> set[int]:
    """Ranks whose clocks must be wrong: a collective that needs all ranks ended before one of them issued it, which is a
    conflict of two. The rank with most conflicts is taken for the wrong one, until none is left; of two with as many the
    higher rank, because rank 0's clock is the reference."""
    conflicts: dict[int, set[int]] = {}
    for issued, ended in _meetings(events, spans).values():
        if min(ended.values()) + TOLERANCE_S >= max(issued.values()):
            continue
        for a, end_s in ended.items():
            for b, issue_s in issued.items():
                if a != b and end_s + TOLERANCE_S < issue_s:
                    conflicts.setdefault(a, set()).add(b)
                    conflicts.setdefault(b, set()).add(a)
    wrong: set[int] = set()
    while conflicts:
        worst = max(conflicts, key=lambda rank: (len(conflicts[rank]), rank))
        wrong.add(worst)
        for other in conflicts.pop(worst):
            conflicts[other].discard(worst)
        conflicts = {rank: others for rank, others in conflicts.items() if others}
    return wrong


Meetings = dict[tuple[str, int, Track], tuple[dict[int, float], dict[int, float]]]


def _meetings(events: Mapping[int, StepEvent], spans: Mapping[int, Sequence[Span]]) -> Meetings:
    """Collective -> (rank -> the earliest time at which it can have been issued, rank -> the latest at which it can have
    ended), on rank 0's clock. A collective with more ranks than its group has is left out."""
    times: Meetings = {}
    ambiguous = set()
    for rank, e in events.items():
        error_s = e.clock_error_s or 0.0
        for s in spans[rank]:
            if s.track not in MEETINGS or s.ordinal < 0:
                continue
            key = (s.group, s.ordinal, s.track)
            issued, ended = times.setdefault(key, ({}, {}))
            if rank in issued or len(issued) >= s.size:
                ambiguous.add(key)
            issued[rank] = e.begin_s + s.start_s - error_s
            ended[rank] = e.begin_s + s.end_s + error_s
    return {key: pair for key, pair in times.items() if key not in ambiguous}


def _has_unseen_waits(lane: RankLane) -> bool:
    in_spans_s, all_s = sum(exposed_by_unit(lane.spans).values()), lane.event.exposed_comm_s
    return not all_s <= 1.05 * in_spans_s + TOLERANCE_S  # True with NaN


def _named(ranks: Sequence[int]) -> str:
    """Ranks as text: rank 3; ranks 0, 1 and 5; 64 ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_COLUMNS:
        return f"{len(ranks)} ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def late_in_trace(events: Sequence[StepEvent]) -> dict[int, dict[int, float]]:
    """Rank -> rank that had not issued a collective yet -> seconds that the first waited for it, by the clocks of a traced
    step; {} where the step is not traced, or clocks do not agree. Where waits are unseen, collectives stand for them."""
    timeline = Timeline.of(events) if all(e.spans for e in events) else None
    if timeline is None or not all(lane.aligned for lane in timeline.lanes):
        return {}
    lanes = timeline.lanes
    meetings = _meetings({lane.rank: lane.event for lane in lanes}, {lane.rank: lane.spans for lane in lanes})
    last = {key: max((at_s, rank) for rank, at_s in issued.items()) for key, (issued, _) in meetings.items()}
    late: dict[int, dict[int, float]] = {lane.rank: {} for lane in timeline.lanes}
    for lane in timeline.lanes:
        waits = [s for s in lane.spans if s.track is Track.WAIT]
        for s in waits or lane.spans:
            at_s, rank = last.get((s.group, s.ordinal, Track.of(s.name)), (-math.inf, -1))
            begin_s = lane.event.begin_s + s.start_s
            if (seconds := min(begin_s + s.seconds, at_s) - begin_s) > 0 and rank != lane.rank:
                late[lane.rank][rank] = late[lane.rank].get(rank, 0.0) + seconds
    return late


# -- trace files -----------------------------------------------------------------------------------------------------


def check_trace_path(path: str | os.PathLike[str], *, field: str = "path") -> Path:
    """The path for a trace, to be checked before anything is computed. Raises ArgumentError."""
    return check_file(path, TRACE_SUFFIXES, field=field)


def write_trace(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> Path:
    """Writes the file atomically: an existing one is replaced when the new one is complete. Raises ArgumentError."""
    file = check_trace_path(path)
    content = json.dumps(trace_events(timelines), separators=(",", ":"), allow_nan=False).encode()
    if file.name.endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    return write_whole(file, content)


def trace_events(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The content of the file. Times are in microseconds from the first step's start on the common clock."""
    steps = _with_start(timelines)
    ranks = sorted({lane.rank for _, timeline in steps for lane in timeline.lanes})
    events = [e for rank in ranks for e in _process(rank, steps)]
    first = timelines[0].lanes[0].event
    notes = [r for t in timelines for r in t.remarks]
    notes += [n for t in timelines for lane in t.lanes for n in lane.event.notes]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": first.run,
            "world_size": first.world_size,
            "steps": [t.step for t in timelines],
            "notes": list(dict.fromkeys(notes)),
        },
    }


def stacked(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """A row for each interval, so that none overlaps another in its row; as few rows as can be. `intervals` in order of
    their start; one that begins where another ends does not overlap it."""
    ends: list[float] = []
    rows = []
    for start, end in intervals:
        row = next((i for i, end_of_row in enumerate(ends) if end_of_row <= start), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        rows.append(row)
    return rows


def _with_start(timelines: Sequence[Timeline]) -> list[tuple[int, Timeline]]:
    """Each with its zero in nanoseconds. One that would begin before the previous one has ended on one of its ranks,
    because a clock jumped between them, is moved behind that."""
    placed: list[tuple[int, Timeline]] = []
    ends: dict[int, int] = {}
    base_s = timelines[0].zero_s
    zero = 0
    for timeline in timelines:
        offset_s = timeline.zero_s - base_s
        zero = _ns(offset_s) if math.isfinite(offset_s) else zero
        late = [ends[lane.rank] - zero - _ns(lane.begin_s) for lane in timeline.lanes if lane.rank in ends]
        zero += max([0, *late])
        ends.update({lane.rank: zero + _ns(lane.end_s) for lane in timeline.lanes})
        placed.append((zero, timeline))
    return placed


def _process(rank: int, steps: Sequence[tuple[int, Timeline]]) -> Iterator[dict[str, Any]]:
    """A rank's names and slices, with its threads in the order of tracks."""
    lanes = [(zero + _ns(lane.begin_s), lane) for zero, t in steps for lane in t.lanes if lane.rank == rank]
    yield _name("process_name", rank, name=f"rank {rank}")
    yield _name("process_sort_index", rank, sort_index=rank)
    if not all(lane.aligned for _, lane in lanes) and lanes[0][1].event.world_size > 1:
        yield _name("process_labels", rank, labels="its own clock")
    yield _name("thread_name", rank, STEP_THREAD, name="step")
    yield from (_step(begin, lane) for begin, lane in lanes)
    for number, track in enumerate(TRACKS):
        of_track = [(begin, lane.event.step, s) for begin, lane in lanes for s in lane.spans if s.track is track]
        spans = [(begin + _ns(s.start_s), begin + _ns(s.end_s), step, s) for begin, step, s in of_track]
        yield from _threads(rank, (number + 1) * TRACK_ROWS, track, sorted(spans, key=itemgetter(0, 1, 2)))


Placed = tuple[int, int, int, Span]  # begin and end in nanoseconds, step, span


def _threads(rank: int, first: int, track: Track, spans: Sequence[Placed]) -> Iterator[dict[str, Any]]:
    rows = [min(row, TRACK_ROWS - 1) for row in stacked([(start, end) for start, end, _, _ in spans])]
    for row in sorted(set(rows)):
        yield _name("thread_name", rank, first + row, name=TRACK_NAMES[track] + (f" ({row + 1})" if row else ""))
        yield _name("thread_sort_index", rank, first + row, sort_index=first + row)
    for row, (start, end, step, span) in zip(rows, spans, strict=True):
        name = span.name.replace("_", "-")
        title = " ".join(filter(None, [f"wait for {name}" if span.track is Track.WAIT else name, span.unit]))
        yield _slice(title, track, rank, first + row, start, end, {"step": step, **_facts(span)})


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


def _facts(span: Span) -> dict[str, Any]:
    """The facts that a click on a slice shows: of a collective all its fields, else the unit."""
    if span.sequence < 0 and not span.payload_bytes:
        return {"unit": span.unit} if span.unit else {}
    names = ["dtype", "payload_bytes", "link_bytes", "sequence", "ordinal"]
    if span.track is not Track.WAIT:  # a wait is only part of the collective's time
        names += ["algorithm_bytes_per_s", "bus_bytes_per_s"]
    facts: dict[str, Any] = {"unit": span.unit, "group": span.group, "ranks": span.size}
    facts |= {name: getattr(span, name) for name in names}
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _ns(seconds: float) -> int:
    """Whole nanoseconds, so that spans that touch do so after rounding, too."""
    return round(seconds * 1e9)
