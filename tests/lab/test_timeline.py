"""Events of a run: each once, in order, bounded, cheap to follow; a traced step of all ranks on one clock, aligned or honest
that it is not; and the trace file made of it."""

import dataclasses
import gzip
import itertools
import json
import math
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import MemorySample, RoleBytes, Span, StepEvent, Track, Traffic
from fsdp_lab.runs.run import Run
from fsdp_lab.runs.steps import CURVE_STEPS, EventStore
from fsdp_lab.runs.timeline import Timeline
from fsdp_lab.spec.spec import Spec
from tests.lab.events import event, steps
from tests.traces import traced


def told(ranks: int = 2, step: int = 7, *, error_s: float | None = 1e-4, **more: Any) -> list[StepEvent]:
    """The events of a traced step."""
    spec = Spec(world_size=ranks)
    return [event(rank, step, spec, begin_s=t.begin_s, step_time_s=t.step_time_s, spans=t.spans, clock_error_s=error_s)
            for rank, t in enumerate(traced(ranks, **more))]  # fmt: skip


def off(e: StepEvent, seconds: float) -> StepEvent:
    """The same event of a rank whose clock is wrong by so much."""
    return dataclasses.replace(e, begin_s=e.begin_s + seconds)


# -- one clock -------------------------------------------------------------------------------------------------------
def test_clocks_that_disagree_are_compared_with_what_was_measured():
    assert Timeline.of(told(3, skew_s=0.002)[::-1]).remarks == ("Ranks aligned to ±0.1 ms.",)
    first, second = told(2)
    timeline = Timeline.of([first, off(second, 0.5)])
    assert timeline.contradicted == (1,) and timeline.clock_error_s is None, "rank 0 is the measure"
    assert [lane.begin_s for lane in timeline.lanes] == [0.0, 0.0] and len(timeline.remarks) == 1
    timeline = Timeline.of([first, off(second, math.nan)])
    assert [lane.begin_s for lane in timeline.lanes] == [0.0, 0.0]
    first, second = told(2, error_s=0.06)
    assert Timeline.of([first, off(second, 0.05)]).contradicted == (), "within its stated error it is believed"
    assert Timeline.of(told(1, error_s=None)).remarks == ()
    timeline = Timeline.of(told(2, error_s=None, skew_s=3600.0))
    assert [lane.begin_s for lane in timeline.lanes] == [0.0, 0.0] and timeline.clock_error_s is None
    said = "The clocks of ranks 0 and 1 were not compared with others: drawn from their own start of the step."
    assert timeline.remarks == (said,)


def test_what_is_missing_or_cannot_be_is_said():
    timeline = Timeline.of(told(3)[:2])
    assert timeline.missing == (2,) and "There are no spans of rank 2 in this step." in timeline.remarks
    first, second = told(2)
    wrong = [dataclasses.replace(first.spans[0], end_s=-1.0), dataclasses.replace(first.spans[1], start_s=math.nan)]
    timeline = Timeline.of([dataclasses.replace(first, spans=(*first.spans, *wrong)), second])
    assert len(timeline.lanes[0].spans) == len(first.spans) and "2 spans left out" in timeline.remarks[-1]
    with pytest.raises(ValueError, match="none of these has spans"):
        Timeline.of([event(0, 1)])


@pytest.mark.parametrize(("jump_s", "who"), [(-3600.0, 1), (0.05, 3)])
def test_a_rank_whose_clock_jumps_is_found_out_and_drawn_from_its_own_beginning(jump_s, who):
    events = told(4)
    events[who] = off(events[who], jump_s)
    timeline = Timeline.of(events)
    assert timeline.contradicted == (who,)
    begins = [lane.begin_s for lane in timeline.lanes]
    assert begins == pytest.approx([0.0 if r == who else 0.0004 * r for r in range(4)])
    assert [lane.aligned for lane in timeline.lanes] == [r != who for r in range(4)]
    assert f"The clock of rank {who} must be wrong" in timeline.remarks[0] and timeline.seconds < 0.5


def test_the_table_says_what_each_unit_cost():
    """Known answers: each rank waits 1 ms for h.0 and 2 ms for h.1."""
    waits = [("transformer.h.0", 0.000, 0.001), ("transformer.h.1", 0.003, 0.005)]
    spans = tuple(Span(track=Track.WAIT, name="all_gather", unit=u, start_s=a, end_s=b) for u, a, b in waits)
    table = Timeline.of([event(r, 3, spans=spans, step_time_s=0.010) for r in range(2)]).table()
    assert table.columns == ("exposed", "rank 0", "rank 1")
    assert table.rows == (("transformer.h.1", "2.00 ms", "2.00 ms"), ("transformer.h.0", "1.00 ms", "1.00 ms"),
                          ("all exposed", "3.00 ms", "3.00 ms"), ("step", "10.0 ms", "10.0 ms"))  # fmt: skip
    many = Timeline.of(told(16))
    assert many.table().columns == ("exposed", "least", "mean", "most")
    assert many._repr_png_()[0] == many.plot().png and "transformer.h.3" in repr(many)


@pytest.mark.parametrize(("exposed_s", "shown"), [(0.040, "40.0 ms"), (math.nan, "–")])
def test_what_streams_waited_unseen_is_told_of_the_step_as_a_whole(exposed_s, shown):
    """Over NCCL spans tell of the vote's wait alone."""
    vote = Span(track=Track.WAIT, name="control", unit="", start_s=0.08, end_s=0.0805)
    comm = {"all_gather": Traffic(calls=1, exposed_seconds=exposed_s)}
    timeline = Timeline.of([event(r, 3, spans=(vote,), comm=comm, clock_error_s=0.0) for r in range(2)])
    assert timeline.waits_unseen and timeline.remarks[-1].startswith("Over NCCL streams wait")
    assert {name: cells[0] for name, *cells in timeline.table().rows} == {
        "no unit": "0.500 ms", "all exposed": shown, "step": "100 ms"}  # fmt: skip
    assert not Timeline.of(told(2)).waits_unseen


# -- what a run keeps ------------------------------------------------------------------------------------------------
def test_the_store_keeps_the_spans_of_the_newest_traced_steps():
    store = EventStore(traced_steps=3)
    for step in range(10):
        store.add(told(2, step, ordinal=100 * step))
    assert [[(e.rank, e.step) for e in s.events] for s in store.traced()] == [[(0, n), (1, n)] for n in (7, 8, 9)]
    assert len(store.since(0)[0]) == 20  # the events stay, without spans
    few = EventStore(span_cap=3 * len(told(2)[0].spans))
    few.add([e for step in range(4) for e in told(2, step)])
    assert sum(len(e.spans) for s in few.traced() for e in s.events) <= 3 * len(told(2)[0].spans)
    assert few.traced()[-1].number == 3


def test_each_step_of_each_rank_is_kept_once_what_was_lost_on_the_way_is_added_and_columns_are_by_rank():
    """A chunk's return value brings all its steps again."""
    store = EventStore()
    assert store.add([e.to_dict() for e in steps(0, 1)]) == 4
    assert store.add([e.to_dict() for e in steps(0, 1, 2)]) == 2 and len(store) == 6
    store.add([event(0, 4), event(0, 5)])
    store.add([event(0, s) for s in range(6)])
    assert sorted(e.step for e in store.since()[0] if e.rank == 0) == [0, 1, 2, 3, 4, 5]
    store = EventStore()
    store.add(steps(0, 1))
    columns, cursor = store.columns("step", "tflops", "memory.peak_bytes")
    assert columns[1] == {"step": [0, 1], "tflops": [0.01, 0.01], "memory.peak_bytes": [1001, 1001]}
    assert store.columns("step", cursor=cursor) == ({}, cursor)
    with pytest.raises(AttributeError):
        store.columns("nonsense")


def test_memory_is_bounded_and_cursors_stay_true():
    store = EventStore(cap=100)
    cursor, seen = 0, 0
    for step in range(500):
        store.add([event(0, step)])
        new, cursor = store.since(cursor)
        seen += len(new)
    assert seen == len(store) == 500 and len(store.since(0)[0]) <= 110
    assert store.since(0)[0][-1].step == 499


def test_a_run_that_goes_on_from_another_begins_where_it_does_and_attempts_are_counted():
    store = EventStore()
    store.restart(40)  # nothing was done before
    assert store.add(steps(40, 41)) == 4 and store.add(steps(40, 41)) == 0
    assert all(not seen.above for seen in store._seen.values()), "what is remembered of it does not grow"
    store.restart(41)
    assert store.add(steps(42), attempt=0) == 0, "a message that arrives after the restart is dropped"
    store.add([e.to_dict() for e in steps(41)])
    assert [e.attempt for e in store.since()[0]] == [0, 0, 0, 0, 1, 1] and store.attempt == 1
    assert [(s.number, s.attempt) for s in store.steps()] == [(40, 0), (41, 1)]


def test_notes_of_the_placement_stand_in_front_once_and_last_steps_are_whole():
    store = EventStore()
    store.add([event(0, 0, notes=("b", "a")).to_dict(), event(0, 1, notes=("b", "a")).to_dict()], notes=("a",))
    first, second = store.since()[0]
    assert first.notes == ("a", "b") and first.notes is second.notes
    store = EventStore()
    store.add([*steps(0, 1, 2), event(0, 3)])
    assert [[(e.rank, e.step) for e in s.events] for s in store.last_steps(2)] == [[(0, 1), (1, 1)], [(0, 2), (1, 2)]]
    assert store.latest()[0].step == 3 and store.latest()[1].step == 2


def test_threads_lose_nothing():
    store = EventStore()
    threads = [threading.Thread(target=lambda r=r: [store.add([event(r, s)]) for s in range(300)]) for r in range(4)]
    for t in threads:
        t.start()
    cursor, seen = 0, []
    while any(t.is_alive() for t in threads) or store.since(cursor)[0]:
        new, cursor = store.since(cursor)
        seen += new
    assert len({(e.rank, e.step) for e in seen}) == len(seen) == 1200


def test_the_memory_curves_of_the_newest_ledger_steps_are_kept():
    sample = MemorySample(at_s=0.1, phase="forward", unit="root", moment="begin", classes=RoleBytes(parameters_bytes=8))
    store = EventStore()
    for step in range(CURVE_STEPS + 5):
        store.add([event(rank, step, memory_curve=(sample,)) for rank in range(2)])
    kept = [e.step for e in store.since(0)[0] if e.memory_curve]
    assert kept == [step for step in range(5, CURVE_STEPS + 5) for _ in range(2)]


def run_with(*steps: list[StepEvent]) -> Run:
    """Without ranks it fails at once, and is read all the same."""
    run = Run(SimpleNamespace(notes=()), Spec(), prepare=lambda spec: None)
    for events in steps:
        run.events.add(events)
    return run


def test_a_run_gives_the_newest_whole_timeline_or_the_one_asked_for():
    run = run_with(told(2, 4), told(2, 9), told(2, 12)[:1])
    assert run.timeline().step == 9 and run.timeline(4).step == 4 and run.timeline(12).missing == (1,)
    with pytest.raises(ArgumentError, match=r"step 8 was not traced.*the nearest of 3 that are stored is 9"):
        run.timeline(8)
    with pytest.raises(ArgumentError, match="no step of this run has been traced yet"):
        run_with().timeline()


# -- the file --------------------------------------------------------------------------------------------------------
def read(file: Path) -> dict[str, Any]:
    raw = file.read_bytes()
    return json.loads(gzip.decompress(raw) if file.name.endswith(".gz") else raw)


def slices(content: dict[str, Any], rank: int | None = None) -> list[dict[str, Any]]:
    return [e for e in content["traceEvents"] if e["ph"] == "X" and rank in (None, e["pid"])]


def check_format(content: dict[str, Any]) -> None:
    """What Perfetto asks of a trace: names for what is there, finite times, and no slices of a thread that overlap."""
    named = {(e["pid"], e["tid"]) for e in content["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in slices(content):
        assert math.isfinite(e["ts"]) and e["dur"] >= 0 and e["name"] and e["cat"]
        threads.setdefault((e["pid"], e["tid"]), []).append((round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)))
    assert threads.keys() == named
    for times in threads.values():
        assert times == sorted(times) and all(end <= start for (_, end), (start, _) in itertools.pairwise(times))


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_trace_has_every_span_once_where_it_was(name, tmp_path):
    events = told(2, skew_s=0.003)
    content = read(Timeline.of(events).export(tmp_path / name))
    assert [p.name for p in tmp_path.iterdir()] == [name]
    check_format(content)
    for e in events:
        mine = [s for s in slices(content, e.rank) if s["cat"] != "step"]
        expected = sorted((1e6 * (0.003 * e.rank + s.start_s), 1e6 * s.seconds, s.track) for s in e.spans)
        got = sorted((s["ts"], s["dur"], s["cat"]) for s in mine)
        assert [cat for *_, cat in got] == [track for *_, track in expected]
        times = [[us for *both, _ in rows for us in both] for rows in (got, expected)]
        assert times[0] == pytest.approx(times[1], abs=2e-3)
    gathers = [s for s in slices(content, 1) if s["name"] == "all-gather transformer.h.2"]
    (gather,) = [s for s in gathers if s["args"]["ordinal"] < 5]
    span = next(s for s in events[1].spans if s.unit == "transformer.h.2" and s.track is Track.ALL_GATHER)
    assert gather["args"]["link_bytes"] == span.link_bytes == 3_000_000
    assert gather["args"]["bus_bytes_per_s"] == pytest.approx(span.link_bytes / span.seconds)
    names = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}


def test_several_steps_are_one_trace_on_one_clock_which_may_jump_back(tmp_path):
    run = run_with(*(told(2, step, begin_s=5.0 + step, ordinal=50 * step) for step in range(3)))
    content = read(run.export_trace(tmp_path / "all.json"))
    check_format(content)
    assert [s["ts"] for s in slices(content, 0) if s["cat"] == "step"] == pytest.approx([0, 1e6, 2e6])
    some = read(run.export_trace(tmp_path / "some.json", steps=[2, 0]))
    assert [s["name"] for s in slices(some, 0) if s["cat"] == "step"] == ["step 0", "step 2"]
    with pytest.raises(ArgumentError, match="step 5 was not traced"):
        run.export_trace(tmp_path / "none.json", steps=[5])
    with pytest.raises(ArgumentError, match="none is named"):
        run.export_trace(tmp_path / "none.json", steps=[])
    assert not (tmp_path / "none.json").exists()
    nowhere = [off(e, math.nan) for e in told(2, 3, error_s=None)]
    run = run_with(told(2, 1, begin_s=100.0), told(2, 2, begin_s=3.0), nowhere)
    content = read(run.export_trace(tmp_path / "jump.json"))
    check_format(content)
    assert len(slices(content)) == 3 * sum(len(e.spans) + 1 for e in told(2))
    labels = [e["args"]["labels"] for e in content["traceEvents"] if e["name"] == "process_labels"]
    assert labels == ["its own clock"] * 2


def test_a_path_that_cannot_be_written_is_said_before_anything(tmp_path, monkeypatch):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file.json").write_text("{}")
    monkeypatch.setattr("fsdp_lab.runs.timeline.trace_events", None)  # nothing is built
    for path, why in (
        ("", "does not end in .json"), (tmp_path / "file.json/trace.json", "there is no folder"),
        (tmp_path / "folder.json", "it is a folder"), (tmp_path / "bad\0name.json", "null"),
        (tmp_path / f"{'long' * 99}.json", "too long"), ("/proc/trace.json", "cannot be written"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=why) as refused:
            run_with(told(2)).export_trace(path)
        assert "name a .json or .json.gz file in a folder that exists and is yours" in str(refused.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file.json", "folder.json"]


def test_a_disk_that_fails_leaves_the_former_file_whole(tmp_path, monkeypatch):
    file = Timeline.of(told(2)).export(tmp_path / "trace.json")
    before = file.read_bytes()
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ArgumentError, match="No space left on device; make room"):
        Timeline.of(told(2, blocks=6)).export(file)
    assert file.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["trace.json"]
