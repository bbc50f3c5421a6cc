"""Runs side by side: what is kept when one pins, the rows, the card, and what it costs."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.dashboard import Dashboard
from fsdp_lab.dashboard.board import LIVE, Pinned, difference_line, table
from fsdp_lab.dashboard.panels.axis import CURVE
from fsdp_lab.runs import Comparison, RunState
from fsdp_lab.runs.history import History
from fsdp_lab.runs.parity import Verdict
from fsdp_lab.spec.spec import Spec
from tests.dashboard.conftest import Show
from tests.dashboard.fake_lab import FakeLab, event
from tests.lab.kept import RecordedRun, told
from tests.waiting import until


def run_of(spec: Spec, steps: int, name: str = "past", *, first: int = 0) -> RecordedRun:
    ranks = range(spec.world_size)
    return told(spec, [event(spec, name, r, n, first=n == first) for n in range(first, steps) for r in ranks], id=name)


@pytest.fixture
def dashboard():
    lab = FakeLab(2, step_s=0.005)
    made = Dashboard(lab)
    yield made
    made.close()
    lab.close()


# -- what a pin keeps ------------------------------------------------------------------------------------------------
def test_figures_are_of_the_strategy_applied_last_and_the_curve_of_the_whole_run():
    before, after = Spec(), Spec().replace(sharding="no_shard")
    run = run_of(before, 40)
    run.events.add([event(after, "past", r, n, first=n == 40) for n in range(40, 60) for r in range(2)])
    run.spec = after
    pinned = Pinned.of(run)
    assert {e.spec_id for e in pinned.events.since()[0]} == {after.id} and len(pinned.events) == 40
    assert pinned.curve[:, 0].tolist() == list(range(60))
    assert Comparison.of([pinned]).rows[0].figures == Comparison.of([run]).rows[0].figures


def test_a_pin_does_not_change_with_its_run_and_keeps_no_spans():
    run = run_of(Spec(), 30)
    pinned = Pinned.of(run)
    rows = pinned.curve.copy()
    run.events.add([event(run.spec, "past", r, 30) for r in range(2)])
    run.state = RunState.FAILED
    assert np.array_equal(pinned.curve, rows, equal_nan=True) and len(pinned.events) == 60
    assert pinned.state is RunState.FINISHED and not pinned.events.traced() and run.events.traced()
    run.events.restart(0)  # what was before it is not of the run any more
    run.events.add([event(run.spec, "past", r, n) for n in range(12) for r in range(2)])
    pinned = Pinned.of(run)
    assert pinned.curve[:, 0].tolist() == list(range(12)) and len(pinned.events) == 24


def test_a_long_run_keeps_its_beginning_and_its_end_as_a_curve_that_is_smooth():
    """Its rates leave out what does not count: the first step, six times as long, and ledger steps."""
    pinned = Pinned.of(run_of(Spec(world_size=1), 2600))
    steps, rates = pinned.curve[:, 0], pinned.curve[:30, CURVE.index("tokens_per_s")]
    assert len(pinned.events) == 2000 and len(steps) == 2001 and math.isnan(steps[1000])
    assert steps[999] == 999 and steps[1001] == 1600 and steps[-1] == 2599
    assert math.isnan(rates[0]) and np.ptp(rates[3:]) < 0.3 * rates[3:].mean()


def test_the_difference_to_what_is_kept_is_said_in_a_line(show):
    """And not before there are steps enough."""
    base, after = Spec(), Spec().replace(precision="bf16")
    show.board.pin(run_of(base, 40, "past"))
    assert difference_line(show.board.tick()) == (
        "A is kept: lab full_shard fp32. Change one thing: the difference is shown here.")  # fmt: skip
    show.board.pin(run_of(after, 8, "few"))
    show.board.refresh()
    assert difference_line(show.board.shown) == "A → bf16: 7 of 10 steps, too few to compare"
    assert table(show.board.shown.comparison, show.board.shown.entries)[2][4].title == "too few steps: 10 are needed"
    show.board.unpin("B")
    show.board.pin(run_of(after, 40, "enough"))
    show.board.refresh()
    said = difference_line(show.board.shown)
    assert re.match(r"A → bf16: time (≈ )?×[\d.]+ \([\d.]+ to [\d.]+\)(, not told apart)? · peak memory ×", said), said
    show.board.unpin("A")
    show.board.unpin("B")
    show.board.refresh()
    assert difference_line(show.board.shown) == ""


# -- pins ------------------------------------------------------------------------------------------------------------
def test_pins_are_lettered_to_h_and_a_ninth_is_refused(show):
    board, run = show.board, run_of(Spec(), 5)
    with pytest.raises(ArgumentError, match="start a run"):
        board.pin()
    assert [board.pin(run) for _ in range(8)] == list("ABCDEFGH")
    with pytest.raises(ArgumentError, match=r"8 runs are pinned already; unpin one of A, B, C, D, E, F, G, H first"):
        board.pin(run)
    board.unpin("C")
    assert list(board.pins) == list("ABDEFGH") and board.pin(run) == "C"
    board.unpin("C")
    with pytest.raises(ArgumentError, match="there is no pin 'C'"):
        board.unpin("C")


def test_pinned_curves_lie_in_every_time_plot_and_ranges_hold_them(all_panels, show):
    show.lab.run(steps=30)
    show.until(lambda: len(show.steps()) == 30)
    end = show.live._scene.patches()["throughput.y"]["end"]
    fast = run_of(Spec(world_size=8).replace(micro_batch=64), 40)
    show.board.pin(fast)
    show.until(lambda: len(show.table("overlay.0")) == 40)
    rates = Pinned.of(fast).curve[:, CURVE.index("tokens_per_s")]
    assert end < np.nanmax(rates) <= show.live._scene.patches()["throughput.y"]["end"], "it leaves the live one"
    patches = show.live._scene.patches()
    for plot in ("loss", "throughput", "tflops", "communication.over", "memory.lane_0", "memory.lane_1"):
        assert patches[f"{plot}.overlay.0"] == {"visible": True} and patches[f"{plot}.overlay.1"] == {"visible": False}
    words = show.live._scene.captions()
    assert [k["label"] for k in words["loss"]["legend"]] == ["mean of all ranks", "A"]
    assert words["loss"]["legend"][1]["token"] == "pin.0"
    show.board.unpin("A")
    show.until(lambda: len(show.table("overlay.0")) == 0)
    assert not show.live._scene.patches()["loss.overlay.0"]["visible"]


def test_a_run_of_the_past_is_pinned_as_a_live_one_is(show, tmp_path):
    """Read back from disk, its row says what it said when it was kept."""
    live = run_of(Spec(), 30)
    history = History(tmp_path)
    history.record(live)
    assert history.flush()

    (past,) = history.runs()
    assert show.board.pin(past) == "A" and show.board.pin(live) == "B"
    compared = show.board.refresh()
    assert compared["A"].figures == compared["B"].figures and compared["B"].parity.verdict is Verdict.EQUAL


def test_pins_survive_a_new_run_and_another_world_size(show):
    run = show.lab.run(steps=5)
    show.until(lambda: len(show.steps()) == 5)
    show.board.pin()
    run.spec = run.spec.replace(sharding="no_shard")  # no step under it yet
    assert show.board.refresh()[LIVE].parity.verdict is Verdict.UNKNOWN, "a run has no step in common with itself"
    show.lab.run(world_size=3, steps=4)
    show.until(lambda: show.live._scene.ranks == 3 and len(show.steps()) == 4)
    assert len(show.table("overlay.0")) == 5
    show.until(lambda: [e.label for e in show.board.shown.entries] == ["A", LIVE])


# -- the card --------------------------------------------------------------------------------------------------------
def cells(show: Show) -> tuple[tuple[Any, ...], ...]:
    return show.card.captions().table


def test_a_row_says_its_figures(show):
    run, failed = run_of(Spec(), 30), run_of(Spec().replace(sharding="no_shard"), 30, "other")
    failed.state, failed.reason = RunState.FAILED, "rank 1 ran out of memory"
    show.board.pin(run)
    show.board.pin(failed)
    show.feed.tick()
    heads, one, other = cells(show)
    assert [len(row) for row in cells(show)] == [len(heads)] * 3
    figures = show.board.shown.comparison["B"].figures
    assert one[2].text == "baseline" and one[0].pressed and not other[0].pressed and other[1].text == "no_shard"
    assert other[3].startswith(f"{figures.step_time_s.median * 1e3:.3g}"[:3])
    assert other[9].startswith("×") and (other[10].text, other[10].tone) == (f"failed: {failed.reason}", "bad")


def test_a_difference_is_loud(show):
    """Red, an icon, and words with the step; and in the headline of the card."""
    right = run_of(Spec(), 20, "right")
    events = right.events.since()[0]
    others = [dataclasses.replace(e, mean_loss=e.mean_loss + 0.5 * (e.step >= 7)) for e in events]
    show.board.pin(right)
    show.board.pin(told(right.spec, others, id="wrong"))
    show.feed.tick()
    badge = cells(show)[2][2]
    assert (badge.text, badge.tone) == ("✗ DIFFERENT from step 7", "bad")
    assert "NOT THE SAME COMPUTATION: B" in show.card.captions().reading
    assert "from step 7 on: loss" in show.card.captions().note


def test_presses_choose_the_baseline_and_take_rows_away(dashboard):
    for i in range(2):
        dashboard.pin(run_of(Spec(), 12, f"r{i}"))
    dashboard._live._on_message(None, {"kind": "press", "card": "comparison", "word": "baseline", "about": "B"}, [])
    assert dashboard.comparison.baseline == "B"
    assert dashboard.comparison == Comparison.of(list(dashboard.pins.values()), baseline="B")
    dashboard._live._on_message(None, {"kind": "press", "card": "comparison", "word": "unpin", "about": "B"}, [])
    assert list(dashboard.pins) == ["A"] and dashboard.comparison.baseline == "A"
    dashboard._press("unpin", "Z")
    assert "no pin" in dashboard._controls.message.value


# -- sweeps ----------------------------------------------------------------------------------------------------------
def test_a_sweep_keeps_its_pictures_and_shows_whose_turn_it_is(show, monkeypatch):
    """No page is asked to build its plots again; rows and curves of the others stand beside."""
    monkeypatch.setattr("fsdp_lab.dashboard.board.EVERY_S", 0.0)  # rows are worked out with every tick
    monkeypatch.setattr("fsdp_lab.dashboard.board.SHARE", math.inf)
    show.lab.run(steps=3)
    show.until(lambda: len(show.steps()) == 3)
    ticked = 0

    def wait_for_two_ticks(run) -> None:
        """No step is made that nobody sees."""
        first = ticked
        until(lambda: ticked >= first + 2)

    show.lab.before_step = wait_for_two_ticks
    remounts = show.live._scenes
    sweep = show.lab.compare(sharding=["full_shard", "no_shard"], backend=["lab", "ddp"], steps=8, rounds=2)
    shown, overlaid = set(), set()

    def look() -> None:
        nonlocal ticked
        show.feed.tick()
        ticked += 1
        shown.add(show.feed.run.id)
        overlaid.update(show.feed._stage.frame.overlays.labels.values())

    show.until(lambda: sweep.done, look)
    assert show.live._scenes == remounts and {run.id for run in sweep.runs} <= shown and overlaid == {"1", "2", "3"}
    show.until(lambda: "The fastest that fits is" in show.card.captions().reading)
    assert [row[0].text for row in cells(show)[1:]] == list("123"), "what was refused is said below"
    assert "Refused, so not in the table: 4 ddp full_shard (" in show.card.captions().note
    assert [r.figures.steps for r in show.board.refresh().rows] == [8, 8, 8, 0]
    show.board.unpin("4")
    assert [r.label for r in show.board.refresh().rows] == list("123")


def test_controls_rest_while_a_comparison_suspends_a_run_that_goes_on_afterwards(dashboard):
    lab, form = dashboard.lab, dashboard._sweep_form
    run = lab.run()
    form.tick()
    assert "A run that goes on is suspended meanwhile." in form.message.value
    form._steps.value = 400
    form.start()
    controls = dashboard._controls
    until(lambda: "then the run goes on at step" in form._progress.value and "comparison" in controls._state.value)
    assert controls._start.disabled and all(i.disabled for c in controls._controls.values() for i in c.inputs)
    controls.stop()
    until(lambda: lab.sweep.done and lab.current is run and run.state is RunState.RUNNING)
    assert {turn.state for turn in lab.sweep.runs} == {RunState.STOPPED}
    until(lambda: not controls._controls["backend"].input.disabled)
    run.state, former = RunState.BROKEN, lab.sweep
    form.attempt(form.start)
    assert "It would end what has the ranks now: stop that first" in form.message.value and lab.sweep is former


# -- stored runs -----------------------------------------------------------------------------------------------------
def test_a_run_is_named_copied_reported_and_compared_with_stored_ones(dashboard, tmp_path):
    lab, form = dashboard.lab, dashboard._runs
    history = History(tmp_path)
    for name in ("old", "older"):
        run = run_of(Spec(), 12, name)
        run.name = name.upper()
        history.record(run)
    assert history.flush()
    lab.runs = history.runs
    run = lab.run()
    form.attempt(form.compare)
    assert "No stored run is marked" in form.message.value
    form.list_stored()
    marked = next(line for line in form._list.options if line.startswith("OLD ·"))
    assert re.search(r"^OLD · gpt2-\w+ · lab full_shard fp32 · 20\d\d-.* · 12 steps · old$", marked), marked
    form._list.value = (marked,)
    form.compare()
    assert "In the comparison as A." in form.message.value and dashboard.pins["A"].name == "OLD"
    until(lambda: not form._name.disabled)
    form._name.value, form._note.value = "baseline", "before the change"
    assert (run.name, run.note) == ("baseline", "before the change")
    run.apply(precision="bf16")
    until(lambda: "lab.run(precision=&#x27;bf16&#x27;)" in form._code.value)
    form.report()
    until(lambda: re.search(r"The report is in <code>report-of-[12].html", form.message.value))
