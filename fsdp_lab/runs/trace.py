"""A trace file: traced steps in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A rank is a process, a track of its timeline a thread. Spans of one track that overlap are given threads of their own,
because slices of one thread may only nest. The format: "Trace Event Format", a document of the Chromium project.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.files import check_file, write_whole
from fsdp_lab.spans import Span, Track

if TYPE_CHECKING:
    from fsdp_lab.runs.timeline import Lane, Timeline

SUFFIXES = (".json", ".json.gz")
TRACKS = tuple(Track)
ROWS = 100  # threads that a track may take
STEP_THREAD = 0

NAMES = {
    Track.COMPUTE: "compute",
    Track.WAIT: "waiting",
    Track.ALL_GATHER: "all-gather",
    Track.REDUCE_SCATTER: "reduce-scatter",
    Track.ALL_REDUCE: "all-reduce",
    Track.CONTROL: "control",
    Track.OTHER: "other collectives",
    Track.HOST_COPY: "host copy",
}


def check_path(path: str | os.PathLike[str], *, field: str = "path") -> Path:
    """Where a trace is to go. Raises SpecError where it cannot: to be asked before anything is made."""
    return check_file(path, SUFFIXES, field=field)


def write_trace(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> Path:
    """Writes the file whole or not at all: a former one stays until the new one is there. Raises SpecError."""
    file = check_path(path)
    content = json.dumps(trace(timelines), separators=(",", ":"), allow_nan=False).encode()
    if file.name.endswith(".gz"):
        content = gzip.compress(content, compresslevel=6, mtime=0)
    return write_whole(file, content)


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
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
        yield from _threads(rank, (number + 1) * ROWS, track, spans)


def _threads(
    rank: int, first: int, track: Track, spans: Sequence[tuple[int, int, int, Span]]
) -> Iterator[dict[str, Any]]:
    rows = [min(row, ROWS - 1) for row in stacked([(start, end) for start, end, _, _ in spans])]
    for row in sorted(set(rows)):
        yield _name("thread_name", rank, first + row, name=NAMES[track] + (f" ({row + 1})" if row else ""))
        yield _name("thread_sort_index", rank, first + row, sort_index=first + row)
    for row, (start, end, step, span) in zip(rows, spans, strict=True):
        yield _slice(_title(span), track, rank, first + row, start, end, {"step": step, **_facts(span)})


def _step(begin: int, lane: Lane) -> dict[str, Any]:
    e = lane.event
    told = {"mean_loss": e.mean_loss, "tokens": e.tokens, "exposed_comm_s": e.exposed_comm_s, "spec_id": e.spec_id}
    finite = {k: v for k, v in told.items() if not isinstance(v, float) or math.isfinite(v)}
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
