"""`Dashboard`: one thread, one dashboard a lab, and nothing left behind."""

import threading
from bisect import bisect_right
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace

import ipywidgets
import pytest
from ipykernel.comm.comm import BaseComm

from course.clinic import Clinic, Pain
from fsdp_lab.base.errors import Cause
from fsdp_lab.dashboard import Dashboard
from fsdp_lab.dashboard.dashboard import STEP_TICK_S, TICK_S
from fsdp_lab.dashboard.forms import answer_while_busy
from fsdp_lab.dashboard.lab_like import LabLike
from fsdp_lab.dashboard.panels.base import Columns
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState
from fsdp_lab.runs.diagnosis import diagnose
from fsdp_lab.runs.steps import EventStore
from tests.dashboard.fake_lab import FakeLab
from tests.waiting import until


def ticking() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "fsdp-lab-dashboard"]


def table(dashboard: Dashboard, name: str) -> Columns:
    return next(t for t in dashboard._live._scene.sources if t.name == name)


@pytest.fixture
def lab():
    lab = FakeLab(2, step_s=0.005)
    yield lab
    lab.close()


@pytest.fixture
def dashboard(lab):
    made = Dashboard(lab)
    yield made
    made.close()


@pytest.mark.slow
def test_another_dashboard_of_a_lab_replaces_the_former_and_closing_leaves_nothing(lab):
    def open_widgets() -> int:
        return len(ipywidgets.Widget.get_manager_state()["state"])

    before = open_widgets()
    first = Dashboard(lab)
    assert open_widgets() > before + 50
    second = Dashboard(lab)
    assert first.closed and not second.closed and len(ticking()) == 1
    second.close()
    second.close()
    assert open_widgets() == before and ticking() == []


def test_a_closed_lab_is_said_and_the_thread_rests(lab, dashboard):
    lab.close()
    until(lambda: ticking() == [])
    assert "The lab is closed" in dashboard._controls._state.value and dashboard._controls._start.disabled


def test_the_clinics_select_follows_what_is_trained(lab, monkeypatch):
    """A page may send another choice before it has heard that the select is disabled."""
    trained = threading.Event()
    monkeypatch.setattr(Pain, "reproduce", lambda pain, lab: trained.wait(10) and lab.run(steps=1))
    with closing((clinic := Clinic(lab)).dashboard):
        clinic.choose("generation")
        clinic._reproduce.click()
        assert clinic._choice.disabled
        clinic._choice.value = "communication"
        assert clinic._choice.value == clinic.pain.cause == "generation" and "wait some seconds" in clinic.message.value
        trained.set()
        clinic.wait(10)
        clinic._choice.value = "communication"
        assert clinic.pain.cause == "communication"


def test_a_failure_in_the_clinic_is_said_once(lab, monkeypatch):
    """Below the buttons; what it means, in the clinic's card."""
    failure, meaning = "ran the model in generate", "A sharded model gathers"
    reason = f"rank 0 {failure}; rank 1 waits for it"

    def reproduce(pain, lab):
        run = lab.run(steps=1)
        run.wait(10)
        run.diagnoses = diagnose(run.spec, EventStore(), Cause.GENERATION)
        run.reason, run.state = reason, RunState.FAILED
        return run

    monkeypatch.setattr(Pain, "reproduce", reproduce)
    monkeypatch.setattr(Pain, "cure", lambda pain, lab, run: lab.run(steps=1))

    def said(text):
        return [w.value.count(text) for w in within(clinic.widget) if text in str(getattr(w, "value", ""))]

    with closing((clinic := Clinic(lab)).dashboard):
        clinic.choose("generation")
        clinic.reproduce()
        clinic.wait(10)
        until(lambda: failure in clinic.dashboard._controls.message.value)
        until(lambda: said(meaning) == said(failure) == [1])
        assert meaning in clinic._found.value
        clinic.cure()
        clinic.wait(10)
        assert meaning in clinic._found.value, "another run is shown below"


def within(widget):
    """The widget, and all that it contains."""
    return [widget, *(found for child in getattr(widget, "children", ()) for found in within(child))]


def test_a_tick_that_fails_does_not_end_the_display(lab, dashboard, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(dashboard._feed, "tick", lambda: 1 / 0)
        until(lambda: "The display failed: ZeroDivisionError" in dashboard._controls.message.value)
    lab.run()
    until(lambda: len(table(dashboard, "loss.steps")) > 3)
    dashboard.close()
    assert sum("a tick of the dashboard failed" in r.message for r in caplog.records) == 1


def test_steps_wake_the_dashboard_no_more_often_than_it_may_and_an_idle_run_lets_it_rest(lab, dashboard):
    """By a clock that waits alone move: nothing comes for 10 s, then steps seldom, then several in a tick."""
    seldom = [10.0 + 0.26 * step + 0.02 * rank for step in range(38) for rank in range(2)]
    arrivals, ticks, now_s = [0.0, 0.0, *seldom, *(20.0 + i / 1000 for i in range(20_000))], [], 0.0
    run, feed = lab.run(steps=1), dashboard._feed
    run.wait(10)
    dashboard.close()  # ends its own thread
    feed.tick()

    def rest(seconds):
        nonlocal now_s
        now_s += seconds

    def tick():
        ticks.append(now_s)
        before, feed._stage.cursor = feed._stage.cursor, bisect_right(arrivals, now_s)
        return run.events.since(0)[0][:1] * (feed._stage.cursor - before)

    feed.tick, run.events.wait = tick, lambda n, s: rest(max(0.0, min(s, arrivals[n - 1] - now_s)))
    dashboard._halt = SimpleNamespace(wait=rest, is_set=lambda: now_s > 30 or len(ticks) > 1000)
    dashboard._tick_until_closed()
    gaps = [(at, after - at) for at, after in pairwise(ticks)]
    assert all(gap > STEP_TICK_S - 1e-6 for _, gap in gaps)
    assert all(gap == pytest.approx(TICK_S) for at, gap in gaps if at < 9.5 or at > 20.2)
    late = sorted(next(at for at in ticks if at >= last) - last for last in seldom[1::2])
    assert late[-1] <= STEP_TICK_S and late[30] < 1e-6, "most are drawn as the last rank reports them"


def test_the_real_lab_has_what_the_dashboard_uses():
    assert {name for name in vars(LabLike) if not name.startswith("_")} <= set(dir(Lab))


def test_a_widget_answers_on_the_shell_that_the_page_chose():
    """By the private corner of ipykernel that `answer_while_busy` uses; where ipykernel has none, nothing is touched."""
    first, second, plain = ipywidgets.Button(), ipywidgets.Button(), ipywidgets.Button()
    for widget in (first, second):
        widget.comm = BaseComm(primary=False)
        widget.comm._reply_subshell_id = "the shell that ran the cell"
    plain.comm = None
    assert second.comm._reply_subshell_for({}, "the page's subshell") == "the shell that ran the cell"
    assert answer_while_busy([first, plain]) == 1
    assert first.comm._reply_subshell_for({}, "the page's subshell") == "the page's subshell"
