"""Steps over all ranks: after a restart every view of a run shows what an undisturbed run shows."""

import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.dashboard.board import Board, ComparisonCard, Pinned
from fsdp_lab.dashboard.feed import Feed
from fsdp_lab.dashboard.live import LiveView
from fsdp_lab.report.report import Course, curves, timeline
from fsdp_lab.runs import Comparison, Switch
from fsdp_lab.runs.history import History
from fsdp_lab.runs.parity import Verdict, parity
from fsdp_lab.runs.steps import Assembler, EventStore, assemble, assemble_all
from fsdp_lab.runs.view import switches_in_force
from fsdp_lab.spec.spec import Spec
from tests.dashboard.fake_lab import FakeLab, event
from tests.lab.telling import Telling

LONG_S = 60.0

SPEC = Spec(world_size=2)


@cache
def measured(step: int, spec: Spec = SPEC) -> tuple[StepEvent, ...]:
    """The same whenever it is done; it is no first step, so that a restart changes no median."""
    more = {"end_unix_s": 1.7e9 + step, "eval_loss": 3 + 0.01 * step if step % 7 == 6 else None}
    made = (event(spec, "the run", rank, step) for rank in range(spec.world_size))
    return tuple(replace(e, checksum=step if step % 4 == 3 else None, **more) for e in made)


class Recorded(Telling):
    """A run whose events a test chooses; `pending` is for the dashboard."""

    pending = None

    def __init__(self, spec: Spec = SPEC) -> None:
        super().__init__(spec, started_unix_s=1.7e9)
        self.id, self.environment = "the run", {}
        self.ended_unix_s = None

    def train(self, steps: Iterable[int]) -> "Recorded":
        for step in steps:
            self.events.add(measured(step, self.spec))
        return self

    def begin_again(self, step: int, spec: Spec | None = None) -> "Recorded":
        """As `Run` does after a failure."""
        before, self.spec = self.spec, spec or self.spec
        self.events.restart(step)
        self.switches.append(Switch(step=step, before=before, after=self.spec, seconds=0.5, carried=True))
        return self


def undisturbed(steps: int) -> Recorded:
    return Recorded().train(range(steps))


def disturbed(seed: int, steps: int, failures: int) -> Iterator[Callable[[Recorded], object]]:
    """What befalls a run of so many steps: it fails, some ranks a step ahead of the others, and begins again earlier."""
    chance, begin = random.Random(seed), 0
    for _ in range(failures):
        end = min(begin + chance.randint(0, 40), steps + 10)
        yield lambda run, a=begin, b=end: run.train(range(a, b))
        if chance.random() < 0.5:
            yield lambda run, at=end: run.events.add(measured(at)[:1])
        begin = chance.randint(max(0, min(end, steps) - 30), min(end, steps - 1))
        yield lambda run, at=begin: run.begin_again(at)
    yield lambda run, a=begin: run.train(range(a, steps))


def text(value: Any) -> str:
    """Comparable though it has NaN in it."""
    return json.dumps(value, default=str)


def results(run: Any) -> dict[str, str]:
    """What every view of the run shows, but for the plots."""
    compared = Comparison.of([run])
    course = Course.of(0, compared.rows[0], run)
    still = timeline(0, compared.rows[0], run)
    pinned = Pinned.of(run)
    renderers = [chart.root.renderers for chart in curves([course])]
    drawn = [[{k: list(v) for k, v in r.data_source.data.items()} for r in some] for some in renderers]
    found = {"summary": run.summary(), "table": run.table(20).rows, "evaluations": [run.evaluations, run.best],
             "newest": {rank: e.step for rank, e in run.events.latest().items()},
             "timeline": run.timeline().table().rows, "comparison": compared.records(), "pin": pinned.curve.tolist(),
             "pin's figures": Comparison.of([pinned]).records(),
             "report": [drawn, course.switches, still and still.reading]}  # fmt: skip
    return {name: text(shown) for name, shown in found.items()}


# -- results ---------------------------------------------------------------------------------------------------------
def test_abandoned_steps_are_in_no_result():
    """Though they diverged; those done again are as they should be."""
    run, other = undisturbed(40), undisturbed(45)
    run.events.add(replace(e, mean_loss=9.0, checksum=1) for step in range(40, 60) for e in measured(step))
    run.begin_again(40).train(range(40, 45))
    assert run.events.last_steps(1)[0].number == 44
    assert len(run.summary()["losses"]) == len(other.summary()["losses"]) == 45
    found = parity(other, run)
    assert (found.verdict, found.steps, parity(run, run).steps) == (Verdict.EQUAL, 45, 45)
    assert Pinned.of(run).curve[:, 0].tolist() == list(range(45)), "the whole curve, not that since the restart"
    assert results(run) == results(other)


def test_however_often_it_begins_again_every_view_is_that_of_an_undisturbed_run(tmp_path: Path):
    run, other = Recorded(), undisturbed(40)
    for happens in disturbed(0, 40, failures=6):
        happens(run)
    assert len(run.switches) == 7 and 6 >= run.events.attempt > 3
    expected = results(other)
    assert results(run) == expected
    assert (parity(other, run).verdict, parity(other, run).steps) == (Verdict.EQUAL, 40)
    traced = [step.number for step in other.events.traced()]
    traces = [r.export_trace(tmp_path / f"{i}.json", traced).read_text() for i, r in enumerate([run, other])]
    assert traces[0] == traces[1]

    history = History(tmp_path / "history.sqlite3")
    history.record(run)
    run.end()
    assert history.flush(30), history.problem
    past = History(history.path).runs()[0]
    assert [e.attempt for e in past.events.since()[0]] == [e.attempt for e in run.events.since()[0]]
    other.end()
    assert results(past) == results(other)


def test_who_waits_for_events_goes_on_when_all_have_come():
    store, spec, late = EventStore(), Spec(world_size=2), threading.Event()

    def report() -> None:
        for rank in range(2):
            late.wait(LONG_S)
            store.add([event(spec, "run", rank, 0)])

    thread = threading.Thread(target=report)
    thread.start()
    assert not store.wait(1, 0.01), "none has come"
    late.set()
    assert store.wait(2, LONG_S) and len(store) == 2
    assert not store.wait(3, 0.01)
    thread.join()


def test_steps_of_another_world_size_are_whole_by_their_own():
    run = undisturbed(30).begin_again(20, Spec(world_size=1).replace(accumulate=2)).train(range(20, 26))
    assert [(s.number, s.world_size, s.attempt) for s in run.events.steps()] == [
        *((n, 2, 0) for n in range(20)), *((n, 1, 1) for n in range(20, 26))]  # fmt: skip
    assert all(s.is_whole for s in run.events.steps())
    assert len(run.summary()["losses"]) == 6, "figures are of the Spec applied last"
    assert Pinned.of(run).curve[:, 0].tolist() == list(range(26))
    assert len(Course.of(0, Comparison.of([run]).rows[0], run).steps) == 26
    assert parity(undisturbed(26), run).steps == 26


def test_switches_that_the_ranks_went_back_behind_are_not_in_force():
    one, two = SPEC.replace(lr=1e-3), SPEC.replace(precision="bf16")
    first = Switch(step=0, before=None, after=SPEC, seconds=0.1, carried=False)
    a = Switch(step=20, before=SPEC, after=one, seconds=0.1, carried=True)
    b = Switch(step=50, before=one, after=two, seconds=0.1, carried=True)
    back = Switch(step=40, before=two, after=two, seconds=0.1, carried=True)
    assert switches_in_force([first, a, b]) == [first, a, b]
    assert switches_in_force([first, a, b, back]) == [first, a, replace(back, before=one)]
    anew = Switch(step=0, before=two, after=SPEC, seconds=0.1, carried=False)
    assert switches_in_force([first, a, anew]) == [replace(anew, before=None)]


# -- assembling ------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6), st.randoms())
def test_a_later_attempt_replaces_all_steps_from_its_first_on(attempts: Sequence[tuple[int, int]], chance: Any):
    """Each attempt does some steps from one on. The order in which events arrive within it does not matter."""
    events: list[StepEvent] = []
    life: dict[int, int] = {}  # step -> the attempt that counts
    for attempt, (first, count) in enumerate(attempts):
        done = [replace(e, attempt=attempt) for n in range(first, first + count) for e in measured(n)]
        chance.shuffle(done)
        events += done
        if count:
            life = {n: a for n, a in life.items() if n < first} | dict.fromkeys(range(first, first + count), attempt)
    assert {s.number: s.attempt for s in assemble(events)} == life
    assert [s.number for s in assemble(events)] == sorted(life) and all(s.is_whole for s in assemble(events))
    assert len(assemble_all(events)) == sum(count for _, count in attempts)
    assembler = Assembler()
    assert [*assembler.add(events), *assembler.flush()] == assemble(events), "however it is asked"


# -- live plots ------------------------------------------------------------------------------------------------------
class Plots:
    """The dashboard's panels, fed by a run."""

    def __init__(self, run: Recorded) -> None:
        self.lab = FakeLab(run.spec.world_size)
        self.lab.current = run  # type: ignore[assignment]
        self.live = LiveView()
        self.feed = Feed(self.lab, self.live, Board(self.lab), ComparisonCard(lambda word, about: None))  # type: ignore

    def columns(self) -> dict[str, str]:
        tables = {s.name: s.all() for s in self.live._scene.sources if not s.name.startswith("frame")}
        return {name: text([block.numbers.tolist(), block.texts]) for name, block in tables.items()}

    def steps_of(self, name: str) -> list[int]:
        table = next(s for s in self.live._scene.sources if s.name == name)
        return [int(n) for n in table.column("step")]


@pytest.mark.slow
def test_plots_show_the_steps_that_count_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    """Nothing is drawn by a clock meanwhile, and nothing predicted beside it."""

    def refused(spec: Spec, *, device: str) -> None:
        raise SpecError("workload.model", "nothing is known of it", "use another")

    monkeypatch.setattr("fsdp_lab.dashboard.feed.planned_memory", refused)
    monkeypatch.setattr("fsdp_lab.dashboard.panels.timeline.REDRAW_S", -1.0)
    monkeypatch.setattr("fsdp_lab.dashboard.panels.communication.BARS_EVERY_S", -1.0)
    run = Recorded()
    plots, other = Plots(run), Plots(undisturbed(20))
    other.feed.tick()
    for happens in disturbed(0, 20, failures=2):
        happens(run)
        plots.feed.tick()
        assert plots.steps_of("loss.steps") == [s.number for s in run.events.steps() if s.is_whole]
    assert plots.columns() == other.columns()
    assert plots.steps_of("frame.markers") == [s.step for s in switches_in_force(run.switches)[1:]]
