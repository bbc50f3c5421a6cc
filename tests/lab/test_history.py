"""Runs kept on disk, without ranks: what is written is what was told, whatever happens to the file meanwhile."""

import dataclasses
import json
import os
import socket
import sqlite3
import struct
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.base.events import Carrier, Memory, MemorySample, RoleBytes, Span, StepEvent, Track, Traffic
from fsdp_lab.base.generation import Completion
from fsdp_lab.base.process import Identity
from fsdp_lab.runs import Comparison, RunState
from fsdp_lab.runs.history import History, HistoryError, StoredRun, database as database_module, writer as writer_module
from fsdp_lab.runs.history.database import HistoryDB, Pack, unpack
from fsdp_lab.runs.history.history import kernel_alive
from fsdp_lab.runs.history.writer import CURVES_KEPT, SPANS_KEPT
from fsdp_lab.spec.describe import describe_strategy
from fsdp_lab.spec.spec import Spec
from tests.dashboard.fake_lab import event
from tests.lab.telling import Telling, ended, plain
from tests.waiting import until

LONG_S = 20
LOST_S = 5.0  # of what was told before a kernel was killed


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    made = History(tmp_path / "runs.sqlite3")
    live: list[Telling] = []
    record = made.record
    made.record = lambda run: (live.append(run), record(run))[1]  # type: ignore[method-assign]
    yield made
    for run in live:
        if not run.state.over:
            run.end(RunState.STOPPED)
    made.flush(5)


def size(history: History) -> int:
    return sum(file.stat().st_size for file in history.path.parent.glob(f"{history.path.name}*"))


def kept(history: History, *runs: Telling) -> None:
    for run in runs:
        history.record(run)
    assert history.flush(LONG_S), history.problem


# -- what is kept ----------------------------------------------------------------------------------------------------
def test_a_past_run_is_the_run_that_was(history: History):
    run = Telling(Spec(world_size=2))
    history.record(run)
    for steps, changes in ((7, {}), (300, {"sharding": "shard_grad_op"}), (20, {"seed": 3}), (30, {})):
        run.tell(steps)
        if changes:
            run.switch(**changes)
        history.flush(LONG_S)
    run.end(RunState.STOPPED, "enough")
    history.flush(LONG_S)

    past = History(history.path).runs()[0]
    assert isinstance(past, StoredRun) and "StoredRun" in repr(past) and run.id in repr(past)
    assert plain(past.events.since()[0]) == plain(run.events.since()[0])
    assert past.events.attempt == run.events.attempt and past.events.ranks == (0, 1)
    assert past.summary() == run.summary() and past.table().rows == run.table().rows
    assert past.table().notes == run.table().notes
    assert list(past.switches) == run.switches and past.spec == run.spec
    assert (past.state, past.reason, past.notes) == (RunState.STOPPED, "enough", ("a note",))
    assert (past.started_unix_s, past.ended_unix_s) == (run.started_unix_s, run.ended_unix_s)
    assert past.environment == run.environment and past.step == 30
    assert past.loss == run.summary()["losses"][-1] and past.tokens_per_s == run.summary()["tokens_per_s"]


def test_spans_and_curves_on_disk_are_bounded_and_the_newest_are_kept(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fsdp_lab.runs.history.writer.SPANS_S", 0.0)
    run = Telling()
    history.record(run)
    for _ in range(60):
        run.tell(5, rich=True)
        run.events.add([event(run.spec, run.id, r, 10_000 + 50 * run._step + 10) for r in (0, 1)])  # a ledger step
        history.flush(LONG_S)
    run.end()
    history.flush(LONG_S)
    with HistoryDB(history.path) as archive:
        found = {row["curve"]: row["n"] for row in archive.rows("SELECT curve, count(*) n FROM traces GROUP BY curve")}
    assert found == {0: SPANS_KEPT, 1: CURVES_KEPT}
    past = history.runs()[0]
    lived, read = {step.number: step for step in run.events.traced()}, past.events.traced()
    assert read == [lived[step.number] for step in read] and [*lived][-5:] == [s.number for s in read][-5:]
    assert past.timeline().step == run.timeline().step == [*lived][-1]
    trace = run.export_trace(tmp_path / "live.json", [step.number for step in read]).read_text()
    assert past.export_trace(tmp_path / "past.json").read_text() == trace
    curves = [e for e in past.events.since()[0] if e.memory_curve]
    by_step = {(e.step, e.rank): e for e in run.events.since()[0]}
    assert len(curves) > 4 and curves == [by_step[e.step, e.rank] for e in curves]


def test_a_run_that_is_listed_while_it_goes_on(history: History):
    """What is told comes to the disk without being asked for."""
    run, reader = Telling(), History(history.path)
    history.record(run)
    for step in range(1, 6):
        run.tell()
        until(lambda step=step: [len(r.events) for r in reader.runs()] == [2 * step])
    [past] = history.runs()
    assert past.state is RunState.RUNNING and past.step == 5 and past.ended_unix_s is None
    assert len(past.events) == 10 and run.id in repr(history.runs())
    run.switch(precision="bf16")
    run.tell(1)
    assert history.runs()[0].spec.strategy.precision == "bf16"


# -- lists -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A failed run and six ended ones, from 2025-12-31 on, a day apart."""
    history = History(tmp_path_factory.mktemp("shelf") / "runs.sqlite3")
    day_s = datetime(2026, 1, 1).timestamp()
    kinds: list[dict[str, Any]] = [{}, {"backend": "fsdp2"}, {"backend": "ddp", "sharding": "no_shard"}]
    kinds += [{"precision": "bf16"}, {"backend": "fsdp2", "model": "gpt2-1m"}, {"micro_batch": 8}]
    failed = Telling(started_unix_s=day_s - 86_400)
    failed.end(RunState.FAILED, "rank 1 is gone")
    kept(history, failed)
    for i, changes in enumerate(kinds):
        kept(history, ended(Spec().replace(**changes), started_unix_s=day_s + i * 86_400))
    return history


def test_runs_are_listed_newest_first_with_what_they_were(shelf: History):
    runs = shelf.runs()
    assert len(runs) == 7 and [r.started_unix_s for r in runs] == sorted((r.started_unix_s for r in runs), reverse=True)
    table = runs.table()
    row, last = (dict(zip(table.columns, table.rows[i], strict=True)) for i in (1, -1))
    assert row["id"] == runs[1].id and row["model"] == "gpt2-1m" and row["how"] == describe_strategy(runs[1].spec)
    assert row["when"] == "2026-01-05 00:00" and row["steps"] == "3" and row["state"] == "finished"
    assert "torch" in row["machine"] and float(row["loss"]) > 0 and row["tokens/s"] != "–"
    assert last["loss"] == "–", "it told nothing"
    assert "<table>" in runs._repr_html_() and runs[1].id in runs._repr_html_()
    assert runs[:2][1] is runs[1] and list(runs)[-1].state is RunState.FAILED


def test_runs_are_filtered_by_the_fields_of_their_spec(shelf: History):
    assert [r.spec.workload.model for r in shelf.runs(backend="fsdp2")] == ["gpt2-1m", "gpt2-10m"]
    assert len(shelf.runs(backend=["fsdp2", "ddp"])) == 3 and len(shelf.runs(backend="fsdp2", model="gpt2-1m")) == 1
    assert len(shelf.runs(micro_batch=8, world_size=2)) == 1 and len(shelf.runs(precision="fp16")) == 0
    assert len(shelf.runs(since="2026-01-05")) == 2 and len(shelf.runs(since=datetime(2026, 1, 6))) == 1
    assert len(shelf.runs(since=shelf.runs()[2].started_unix_s)) == 3
    assert [len(shelf.runs(state=state)) for state in ("failed", RunState.FAILED, "lost")] == [1, 1, 0]
    assert "3 of 7 runs" in repr(shelf.runs(backend=["fsdp2", "ddp"]))

    for filters, words in (
        ({"shardng": "full_shard"}, "shardng: there is no such field to look for; use since, state, name, model"),
        ({"state": "asleep"}, "state: 'asleep' is refused; give one of starting, running"),
        ({"since": "yesterday"}, "since: 'yesterday' is no time; give one such as"),
    ):
        with pytest.raises(ArgumentError, match=f"^{words}"):
            shelf.runs(**filters)  # type: ignore[arg-type]


def test_a_run_is_found_by_the_beginning_of_its_id_or_its_name(shelf: History):
    runs = shelf.runs()
    assert runs[runs[2].id].id == runs[runs[2].id[:7]].id == runs[2].id and runs[-1] is runs[6]
    with pytest.raises(ArgumentError, match="run: none of these runs is called 'zz' or begins with it; the newest are"):
        runs["zz"]
    with pytest.raises(ArgumentError, match="none of these"):
        runs[""]
    with pytest.raises(IndexError):
        runs[7]
    runs[3].rename("baseline")
    assert shelf.runs()["baseline"].id == runs[3].id and len(shelf.runs(name="baseline")) == 1
    shelf.rename(runs[4].id, "baseline")
    with pytest.raises(ArgumentError, match="2 runs are called 'baseline'"):
        shelf.runs()["baseline"]
    for run in runs[3:5]:
        shelf.rename(run.id, "")
    for change, what in ((shelf.rename, "two\nlines"), (shelf.annotate, 3)):
        with pytest.raises(ArgumentError, match="(name|note): "):
            change(runs[0].id, what)


def test_a_name_and_a_note_are_stored_while_a_run_trains_and_may_come_from_elsewhere(history: History):
    with HistoryDB(history.path) as db:
        db.change("ALTER TABLE runs DROP COLUMN note")  # as files were first
    run = Telling()
    run.rename("baseline")
    kept(history, run)
    History(history.path).rename("baseline", "first")
    run.tell(3)
    history.flush(LONG_S)
    assert history.runs()["first"].id == run.id, "a name from another process stays"
    run.annotate("as in the paper")
    history.flush(LONG_S)
    [past] = history.runs()
    assert (past.name, past.note, run.name) == ("first", "as in the paper", "baseline")
    assert [row.name.partition(":")[0] for row in Comparison.of([past, run]).rows] == ["first", "baseline"]


def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """No file is no runs, and none is made."""
    history = History(tmp_path / "new" / "runs.sqlite3")
    assert len(history.runs()) == 0 and "0 runs" in repr(history.runs()) and not history.path.parent.exists()
    assert History(tmp_path).path == tmp_path / "history.sqlite3"
    assert History().path == Path(os.environ["FSDP_LAB_HISTORY"]), "the tests' own"
    monkeypatch.delenv("FSDP_LAB_HISTORY")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert History().path == tmp_path / "fsdp_lab" / "history.sqlite3"
    with pytest.raises(ArgumentError, match="limit_bytes: 0 is refused"):
        History(limit_bytes=0)


# -- room ------------------------------------------------------------------------------------------------------------
def test_what_is_deleted_goes_back_to_the_disk(history: History):
    small, large = ended(steps=5), ended(Spec(world_size=8), steps=800)
    kept(history, small, large)
    listed = history.runs()[large.id]
    before = size(history)
    assert history.delete(large.id[:6]) == 1
    assert [r.id for r in history.runs()] == [small.id] and size(history) < before / 3
    assert plain(history.runs()[0].events.since()[0]) == plain(small.events.since()[0])
    with pytest.raises(HistoryError, match="was deleted"):
        listed.events  # noqa: B018


def test_the_oldest_make_room_but_none_that_goes_on_or_is_pinned(tmp_path: Path):
    history = History(tmp_path / "runs.sqlite3", limit_bytes=400_000)
    now_s = time.time()
    wide = Spec(world_size=8)
    going = Telling(wide, started_unix_s=now_s - 1000)
    going.tell(150)
    pinned = ended(wide, 150, started_unix_s=now_s - 900)
    kept(history, going, pinned)
    history.pin(pinned.id)
    others = [ended(wide, 150, started_unix_s=now_s - 800 + i) for i in range(8)]
    for run in others:
        kept(history, run)
    left = [r.id for r in history.runs()]
    assert going.id in left and pinned.id in left and size(history) < 800_000
    newest = [r.id for r in others[::-1]]
    assert left[0] == newest[0] and left[:-2] == newest[: len(left) - 2] and len(left) < 10
    assert history.problem == ""
    small = History(history.path, limit_bytes=10_000)
    last = ended(steps=1)
    kept(small, last)
    assert {r.id for r in small.runs()} == {going.id, pinned.id, last.id} and "running or pinned" in small.problem
    going.end()
    assert history.flush(LONG_S)
    history.unpin(pinned.id)
    kept(small, ended(steps=1))
    assert pinned.id not in {r.id for r in small.runs()}


def test_deleting_by_age_and_what_cannot_be_deleted(history: History):
    old, new, going = ended(started_unix_s=0.0), ended(), Telling()
    old.ended_unix_s = time.time() - 10 * 86_400
    kept(history, old, new, going)
    with pytest.raises(ArgumentError, match=rf"run {going.id} is running; stop it first"):
        history.delete(new.id, going.id)
    assert len(history.runs()) == 3, "all or none"
    assert history.delete_older(11) == 0 and history.delete_older(9) == 1
    assert {r.id for r in history.runs()} == {new.id, going.id}
    with pytest.raises(ArgumentError, match="days: -1 is refused"):
        history.delete_older(-1)
    nowhere = History(history.path / "runs.sqlite3")
    nowhere.record(new)
    assert not nowhere.flush(LONG_S) and nowhere.problem in repr(nowhere)
    assert "its folder is a file; set FSDP_LAB_HISTORY to a file that can be written" in nowhere.problem


# -- what can go wrong -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("how_it_breaks", "words"),
    [("max_page_count = 20", "full; make room"), ("query_only = ON", "readonly database; set FSDP_LAB_HISTORY")],
)
def test_a_disk_that_fills_up_or_cannot_be_written_stops_nothing_and_loses_nothing(
    history: History, monkeypatch: pytest.MonkeyPatch, how_it_breaks: str, words: str
):
    """SQLite's own errors, in a file that is not allowed to grow, or to change."""
    broken = threading.Event()

    class Breakable(HistoryDB):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            if broken.is_set():
                self._db.execute(f"PRAGMA {how_it_breaks}")

    monkeypatch.setattr(writer_module, "HistoryDB", Breakable)
    monkeypatch.setattr(writer_module, "RETRY_S", 0.05)
    broken.set()
    run = Telling(Spec(world_size=8))
    history.record(run)
    run.tell(200)
    assert not history.flush(LONG_S) and words in history.problem
    run.tell(20)
    assert len(run.events) == 8 * 220
    broken.clear()
    run.end()
    until(lambda: history.flush(LONG_S))
    assert history.problem == "" and plain(history.runs()[0].events.since()[0]) == plain(run.events.since()[0])


def test_a_lock_that_somebody_holds_is_waited_for(history: History, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(database_module, "BUSY_S", 0.05)
    monkeypatch.setattr(writer_module, "RETRY_S", 0.05)
    kept(history, ended())
    other = sqlite3.connect(history.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    run = Telling()
    history.record(run)
    run.tell(3)
    assert not history.flush(LONG_S) and "locked; another program holds it" in history.problem
    assert len(history.runs()) == 1, "readers do not wait"
    other.execute("COMMIT")
    other.close()
    until(lambda: history.flush(LONG_S))
    assert history.problem == "" and len(history.runs()[run.id].events) == 6


@pytest.mark.parametrize("damaged", ["header", "pages"])
def test_a_damaged_file_is_moved_aside_and_a_new_one_begun(history: History, damaged: str):
    kept(history, ended(steps=200))
    until(lambda: not Path(f"{history.path}-wal").exists())  # from the log SQLite would mend the pages
    content = history.path.read_bytes()
    sound = content[:4096] if damaged == "pages" else b""
    history.path.write_bytes(wrong := sound + b"\x5a" * (len(content) - len(sound)))
    if damaged == "header":  # found out by who only lists it
        runs = history.runs()
        assert len(runs) == 0 and "was damaged: it is now" in repr(runs)
    run, kept_by = ended(), History(history.path)
    kept_by.record(run)
    until(lambda: kept_by.flush(LONG_S))
    assert [r.id for r in kept_by.runs()] == [run.id]
    left = [p for p in history.path.parent.iterdir() if "damaged" in p.name]
    [aside] = [p for p in left if not p.name.endswith(("-wal", "-shm"))]
    assert damaged == "header" or str(aside) in kept_by.problem
    assert aside.read_bytes()[:4096] == wrong[:4096], "and not destroyed"


def test_a_file_that_is_deleted_under_way_is_begun_again(history: History):
    run = Telling()
    history.record(run)
    run.tell(5)
    history.flush(LONG_S)
    for file in history.path.parent.glob("runs.sqlite3*"):
        file.unlink()
    run.tell(5)
    run.end()
    until(lambda: history.flush(LONG_S) and bool(history.runs()))
    assert plain(history.runs()[0].events.since()[0]) == plain(run.events.since()[0])


def test_a_file_that_another_kernel_makes_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, use_wal = tmp_path / "runs.sqlite3", HistoryDB._use_wal

    def meanwhile(db: HistoryDB) -> None:
        monkeypatch.undo()
        HistoryDB(path).close()
        use_wal(db)

    monkeypatch.setattr(HistoryDB, "_use_wal", meanwhile)
    with HistoryDB(path) as archive:
        assert archive.rows("SELECT * FROM runs") == []


def test_a_file_of_another_version_and_a_strangers_are_refused_and_left_alone(history: History, tmp_path: Path):
    kept(history, ended())
    with sqlite3.connect(history.path) as db:
        db.execute("PRAGMA user_version = 99")
    before = history.path.read_bytes()
    refusal = r"another fsdp_lab \(version 99 of its schema, and this one supports 2\); move it away"
    with pytest.raises(HistoryError, match=refusal):
        history.runs()
    run = ended()
    history.record(run)
    assert not history.flush(LONG_S) and "another fsdp_lab" in history.problem
    assert history.path.read_bytes() == before
    strangers = tmp_path / "other.sqlite3"
    with sqlite3.connect(strangers) as db:
        db.execute("CREATE TABLE mine (x)")
    with pytest.raises(HistoryError, match="is not a history of fsdp_lab; name another file"):
        History(strangers).runs()
    history._writer._writers.clear()


WRITER = """
    import sys, time
    from fsdp_lab.runs.history import History
    from fsdp_lab.spec.spec import Spec
    from tests.lab.telling import Telling
    history = History(sys.argv[1])
    for seconds in (0.8, 600):
        runs = [Telling(Spec(world_size=4)) for _ in range(2)]
        for run in runs:
            history.record(run)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for run in runs:
                run.tell()
            history.runs()
            time.sleep(0.01)
        for run in runs:
            run.end()
        assert history.flush(20), history.problem
        for run in runs:
            print(run.id, len(run.events), flush=True)
"""


@pytest.mark.slow
def test_two_kernels_write_at_once_and_their_death_loses_no_more_than_the_last_moment(tmp_path: Path):
    path, told = tmp_path / "runs.sqlite3", dict[str, str]()
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    kernels = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for kernel in kernels:
            assert kernel.stdout is not None
            told.update(kernel.stdout.readline().split() for _ in range(2))  # type: ignore[misc]
        until(lambda: [len(r.events) > 40 for r in History(path).runs() if not r.state.over] == [True] * 4)
    finally:
        killed_unix_s = time.time()
        for kernel in kernels:
            kernel.kill()
            kernel.communicate()
    with HistoryDB(path) as archive:
        assert archive.rows("PRAGMA integrity_check") == [{"integrity_check": "ok"}]
        assert archive.rows("PRAGMA foreign_key_check") == []
    runs = {run.id: run for run in History(path).runs()}
    assert {id: str(len(runs[id].events)) for id in told} == told and len(runs) == 2 * len(told) == 8
    for id, run in runs.items():
        steps = run.events.steps()
        assert run.state is (RunState.FINISHED if id in told else RunState.LOST)
        assert [s.number for s in steps] == list(range(run.step)) and run.table().rows
        moment_s = killed_unix_s - steps[-1].events[0].end_unix_s
        assert id in told or moment_s < LOST_S, "they write every half second, and more than that where disks are slow"


def test_a_run_whose_kernel_is_gone_is_lost(history: History, monkeypatch: pytest.MonkeyPatch):
    run = Telling()
    run.tell(3)
    kept(history, run)
    assert history.runs()[0].state is RunState.RUNNING
    gone = subprocess.Popen(["true"])
    gone.wait()
    with HistoryDB(history.path) as archive, archive.transaction():
        archive.change("UPDATE runs SET pid = ?", gone.pid)
    [past] = History(history.path).runs(state="lost")
    assert past.state is RunState.LOST and past.state.over and past.ended_unix_s is not None
    assert f"process {gone.pid}" in past.reason and "lost with its kernel" in repr(History(history.path).runs())
    me, now_s = Identity.this(), time.time()
    assert kernel_alive(socket.gethostname(), me, 0)
    assert not kernel_alive(socket.gethostname(), Identity(pid=me.pid, born="before"), now_s)
    assert kernel_alive("elsewhere", me, now_s - 10) and not kernel_alive("elsewhere", me, now_s - 1000)


def test_a_run_of_another_version_is_listed_as_it_was(history: History):
    kept(history, run := ended())
    with HistoryDB(history.path) as archive:
        events = json.loads(zlib.decompress(archive.value("SELECT data FROM batches")))
        assert {event.pop("eval_metrics", None) is None for _, event in events} == {True, False}, "some had it"
        archive.change("UPDATE batches SET data = ?", zlib.compress(json.dumps(events).encode()))
        assert history.runs()[0].table().rows == run.table().rows
        fields = json.loads(archive.rows("SELECT spec FROM runs")[0]["spec"])
        fields["strategy"]["gone_by_now"] = 1
        archive.change("UPDATE runs SET spec = ?", json.dumps(fields))
    [past] = history.runs(backend="lab")
    assert "lab" in repr(history.runs()) and past.spec_fields == fields
    with pytest.raises(SpecError, match="gone_by_now"):
        past.spec  # noqa: B018


# -- events as bytes and back, bit for bit ------------------------------------------------------------------------
FLOATS = st.floats() | st.sampled_from([0.0, -0.0, float("nan"), float("inf"), 5e-324, 0.1])
COUNTS = st.integers(0, 2**70)
WORDS = st.text(max_size=6)


def made(kind: type, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any value of a dataclass, its scalars by their types."""
    by_type = {"float": FLOATS, "int": COUNTS, "str": WORDS, "bool": st.booleans(), "int | None": st.none() | COUNTS,
               "float | None": st.none() | FLOATS, "tuple[str, ...]": st.lists(WORDS, max_size=2).map(tuple),
               "Mapping[str, float]": st.dictionaries(WORDS, FLOATS, max_size=2)}  # fmt: skip
    types = {f.name: f.type.__name__ if isinstance(f.type, type) else f.type for f in dataclasses.fields(kind)}
    fields = {name: more[name] if name in more else by_type[of] for name, of in types.items()}
    return st.builds(kind, **fields)


SPANS = made(Span, track=st.sampled_from(Track))
SAMPLES = made(MemorySample, classes=made(RoleBytes))
EVENTS = made(
    StepEvent, memory=made(Memory, at_peak=made(RoleBytes)), memory_curve=st.lists(SAMPLES, max_size=2).map(tuple),
    comm=st.dictionaries(st.sampled_from(["all_gather", "control", "ünbekannt"]), made(Traffic)),
    late=st.lists(st.tuples(COUNTS, FLOATS), max_size=2).map(tuple),
    spans=st.lists(SPANS, max_size=2).map(tuple), completions=st.lists(made(Completion), max_size=2).map(tuple),
    carriers=st.lists(made(Carrier), max_size=2).map(tuple),
)  # fmt: skip
ROWS = st.lists(EVENTS, max_size=5).flatmap(
    lambda events: st.lists(st.integers(0, 10**9), min_size=len(events), max_size=len(events), unique=True).map(
        lambda cursors: list(zip(sorted(cursors), events, strict=True))
    )
)


def bits(value: Any) -> Any:
    """So that equality is that of bits: NaN equals itself, 0.0 is not -0.0, 1 is not 1.0."""
    if isinstance(value, float):
        return struct.pack("<d", value) if value == value else "nan"
    if isinstance(value, dict):
        return {key: bits(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    return (type(value).__name__, value)


@pytest.mark.slow
@settings(max_examples=25)
@given(ROWS)
def test_any_events_come_back_bit_for_bit(rows: list[tuple[int, StepEvent]]):
    back = unpack(Pack(rows, heavy=True).data())
    assert [(c, bits(e.to_dict())) for c, e in back.items()] == [(c, bits(e.to_dict())) for c, e in rows]
    light = [(c, dataclasses.replace(e, spans=(), memory_curve=())) for c, e in rows]
    back = unpack(Pack(rows).data())
    assert [(c, bits(e.to_dict())) for c, e in back.items()] == [(c, bits(e.to_dict())) for c, e in light]
