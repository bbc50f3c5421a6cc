"""Events of a run: each once, in order, bounded, cheap to follow."""

from __future__ import annotations

import threading

import pytest

from fsdp_lab.base.events import MemorySample, RoleBytes
from fsdp_lab.runs.steps import CURVE_STEPS, EventStore
from tests.lab.events import event, steps


def test_each_step_of_each_rank_is_kept_once_and_what_was_lost_on_the_way_is_added():
    """A chunk's return value brings all its steps again."""
    store = EventStore()
    assert store.add([e.to_dict() for e in steps(0, 1)]) == 4
    assert store.add([e.to_dict() for e in steps(0, 1, 2)]) == 2 and len(store) == 6
    store.add([event(0, 4), event(0, 5)])
    store.add([event(0, s) for s in range(6)])
    assert sorted(e.step for e in store.since()[0] if e.rank == 0) == [0, 1, 2, 3, 4, 5]


def test_columns_by_rank():
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
    assert seen == len(store) == 500
    assert len(store.since(0)[0]) <= 110 and store.dropped >= 390
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


def test_notes_of_the_placement_stand_in_front_once():
    store = EventStore()
    store.add([event(0, 0, notes=("b", "a")).to_dict(), event(0, 1, notes=("b", "a")).to_dict()], notes=("a",))
    first, second = store.since()[0]
    assert first.notes == ("a", "b") and first.notes is second.notes


def test_last_steps_are_whole():
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
