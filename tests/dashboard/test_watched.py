"""A watched loop in the dashboard: its panels, with gaps where something is not known, and no switches."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fsdp_lab.base.events import UNKNOWN_TRAFFIC, StepEvent
from fsdp_lab.dashboard import Dashboard
from fsdp_lab.dashboard.controls import WATCHING
from fsdp_lab.dashboard.panels import PANELS, StepAxis
from fsdp_lab.report import write_report
from fsdp_lab.runs import Comparison, RunState, WatchedRun
from fsdp_lab.runs.steps import Step
from fsdp_lab.spec.spec import Spec
from tests.dashboard.fake_lab import FakeLab, event
from tests.lab.events import LOOP
from tests.waiting import until

BEGIN = {"loop": LOOP.to_dict(), "notes": ["Communication is not measured."], "started_unix_s": 1.0,
         "device_name": "CPU", "software": {}}  # fmt: skip


def unknown(rank: int, step: int) -> StepEvent:
    """Of a loop that says nothing."""
    known = event(Spec(world_size=2), "loop", rank, step, first=step == 0)
    return dataclasses.replace(known, spec_id=LOOP.id, tokens=0, samples=0, flops=0, loss=math.nan, mean_loss=math.nan,
                               grad_norm=math.nan, peak_flops_per_s=None, comm=UNKNOWN_TRAFFIC, spans=())  # fmt: skip


def message(rank: int, steps: range = range(0), **more: Any) -> dict[str, Any]:
    return {"run": "loop", "rank": rank, "events": [unknown(rank, n).to_dict() for n in steps], **more}


def watched(interrupt: Callable[[], None] = lambda: None, *, losses: bool = False) -> WatchedRun:
    run = WatchedRun(message(0, begin=BEGIN), interrupt)
    for rank in (0, 1):
        told = message(rank, range(20), begin=BEGIN)
        run.take({**told, "events": [{**e, "loss": 2.0 + rank} for e in told["events"]]} if losses else told)
    return run


@pytest.fixture
def lab() -> Iterator[FakeLab]:
    lab = FakeLab(2, step_s=0.005)
    yield lab
    lab.close()


def test_every_panel_draws_a_loop_of_which_little_is_known() -> None:
    frame = StepAxis()
    panels = [make(frame, 2) for make in PANELS]
    steps = [Step(events=(unknown(0, n), unknown(1, n))) for n in range(20)]
    frame.follow(steps)
    for panel in panels:
        panel.update(steps)
        assert "nan" not in repr(panel.captions()).lower(), type(panel).__name__


def test_the_dashboard_shows_it_and_offers_only_to_stop_it(lab: FakeLab) -> None:
    interrupts: list[bool] = []
    run = watched(lambda: interrupts.append(True))
    dashboard = Dashboard(lab)
    try:
        controls = dashboard._controls
        until(lambda: dashboard._feed._stage.prediction is not None)
        lab.current = run  # type: ignore[assignment]
        until(lambda: dashboard._feed.run is run and WATCHING in controls._state.value)
        assert dashboard._feed._stage.prediction is None, "it was of what the controls have chosen"
        assert dashboard._feed._stage.last is not None and dashboard._feed._stage.last.number == 19
        assert "watched: FSDP2 Net" in dashboard._feed._headline()
        assert all(widget.disabled for widget in controls._fields)
        assert controls._start.disabled and controls._pause.disabled and controls._ledger.disabled
        assert not controls._stop.disabled
        controls.stop()
        assert interrupts == [True] and run.state is RunState.STOPPING
        for rank in (0, 1):
            run.take(message(rank, end={"state": "stopped", "reason": "interrupted", "own": True, "notes": []}))
        assert run.done and run.state is RunState.STOPPED
        until(lambda: not controls._start.disabled and not any(widget.disabled for widget in controls._fields))
        assert "failed" not in controls._state.value
    finally:
        dashboard.close()


def test_tables_comparison_and_report_say_what_is_not_known(tmp_path: Any) -> None:
    run = watched()
    row = run.table().rows[-1]
    columns = dict(zip(run.table().columns, row, strict=True))
    unknown = ("loss", "grad norm", "tokens/s", "FLOPS/rank", "MFU", "comm in flight", "exposed")
    assert [columns[c] for c in unknown] == ["–"] * 7 and columns["how"] == "watched fsdp2 full_shard fp32"
    assert "note: Communication is not measured." in repr(run.table())
    lab = FakeLab(2, step_s=0.001)
    own = lab.run(steps=5)
    until(lambda: own.state.over)
    compared = Comparison.of([own, run])
    assert compared.rows[1].parity is not None and "watched loop" in compared.rows[1].parity.sentence
    assert compared.rows[1].figures.last_loss is None and watched(losses=True).summary()["losses"][-1] == 2.5
    assert Comparison.of([watched(losses=True)]).rows[0].figures.last_loss == 2.5, "the mean of 2 and 3"
    assert compared.rows[1].flat["seq_len"] == "unknown" and compared.records()[1]["seq_len"] is None
    assert "fsdp2" in compared.rows[1].name and "unknown" not in compared.rows[1].name
    text, alone = (write_report(tmp_path / "report.html", runs).read_text() for runs in ([own, run], [run]))
    assert compared.rows[1].name in text and "does not tell what it trains" in text and 'id="plot-loss"' in text
    assert "<dd>fsdp2</dd>" in alone and "<dd>unknown" not in alone + text and 'id="plot-loss"' not in alone
    assert "0 tokens/s" not in alone and ": peak " in alone
    lab.close()
