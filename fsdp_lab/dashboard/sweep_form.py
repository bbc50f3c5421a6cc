"""The form of a comparison: what is combined, which combinations can run, how long they take; then the progress.

One lock orders handlers and `tick`; nothing here waits for a rank.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, put, status, styled
from fsdp_lab.dashboard.lab_like import LabLike, active_loop, active_run, active_sweep, shown_run
from fsdp_lab.runs import Refusal, RunState, Sweep
from fsdp_lab.runs.comparison import labels_by
from fsdp_lab.runs.sweep import ROUNDS, combine
from fsdp_lab.spec.describe import describe_fields, describe_strategy, field_title, flat_fields
from fsdp_lab.spec.spec import FIELDS, Spec

COMBINED: Mapping[str, Sequence[Any]] = {
    name: row.tokens for name, row in FIELDS.items() if row.group == "Sharding" and row.tokens and not row.planned
}
STEPS = 30
TURN_S = 0.6  # approximate cost of a turn beside its steps: a build and a first step
MEASURED_STEPS = 9


class SweepForm(InputForm):
    """`toggle` opens and closes it; `wanted` is the Spec whose fields are combined with the lists."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike, wanted: Callable[[], Spec]) -> None:
        super().__init__()
        self._lab, self._wanted = lab, wanted
        self._lock = threading.RLock()
        self._open = False
        self._updating = False  # chips change by code
        self._counted: Spec | None = None  # the Spec that was counted with
        self._started: Sweep | None = None
        self._text = ""
        self._chips: dict[str, list[widgets.ToggleButton]] = {name: [] for name in COMBINED}
        for name, value in ((name, value) for name, values in COMBINED.items() for value in values):
            chip = widgets.ToggleButton(description=str(value), tooltip=f"Compare with {field_title(name)} {value}")
            chip.observe(lambda _: None if self._updating else self._recount(), "value")
            self._chips[name].append(self.add(styled(chip, "fsdp-chip")))
        rows = [self._row(field_title(name), chips) for name, chips in self._chips.items()]
        self._steps = self.number("steps", STEPS, 1, 100_000, "Of each run")
        turns = "Turns of each run, so that drift of the machine affects all alike"
        self._rounds = self.number("rounds", ROUNDS, 1, 100, turns)
        for number in (self._steps, self._rounds):
            styled(number, "fsdp-number").observe(lambda _: self._recount(), "value")
        self._start = self.button("Start comparison", "play", "Train all that can run, in turns", self.start)
        self._start.button_style = "primary"
        close = self.button("Close", "", "Close this form", self.toggle)
        last_row = self._row("", [self._steps, self._rounds, self._start, close])
        self._choices = styled(widgets.VBox([*rows, last_row]), "fsdp-sweep-ask")
        self.message = styled(widgets.HTML(), "fsdp-sweep-said")
        self._progress = styled(widgets.HTML(), "fsdp-sweep-said")
        stop = self.button("Stop comparison", "stop", "End it and keep what was measured", self.stop)
        self._running = self._row("", [stop, self._progress])
        hidden = widgets.Layout(display=HIDDEN)
        self.widget = styled(widgets.VBox([self._choices, self.message, self._running], layout=hidden), "fsdp-sweep")
        self._show()

    def _row(self, name: str, parts: Sequence[widgets.Widget]) -> widgets.Box:
        head = [styled(widgets.HTML(escape(name)), "fsdp-sweep-name")] if name else []
        return styled(widgets.Box([*head, *parts]), "fsdp-sweep-row")

    def toggle(self) -> None:
        """Opens it with what is trained now chosen, or closes it."""
        with self._lock:
            self._open = not self._open
            if self._open:
                self._updating, now = True, self._wanted().flat()
                try:
                    for name, chips in self._chips.items():
                        for value, chip in zip(COMBINED[name], chips, strict=True):
                            chip.value = value == now[name]
                finally:
                    self._updating = False
                self._text = self._count()
            self._show()

    def start(self) -> None:
        """Begins the comparison of what is chosen. Raises ArgumentError where that would end what cannot be suspended."""
        base, run = self._wanted(), active_run(self._lab)
        if active_loop(self._lab) is not None or (run is not None and run.state is RunState.BROKEN):
            raise ArgumentError("compare", "it would end what has the ranks now", "stop that first, or recover it")
        self._started = self._lab.compare(base, steps=self._steps.value, rounds=self._rounds.value, **self.lists(base))
        self._open = False
        self._show()

    def stop(self) -> None:
        """Requests that the comparison ends. Finished steps are kept."""
        if (sweep := active_sweep(self._lab)) is not None:
            sweep.stop(0)

    def lists(self, base: Spec) -> dict[str, list[Any]]:
        """Field -> values that are chosen; where none is, the base's own."""
        now = base.flat()
        chosen = {
            name: [v for v, chip in zip(COMBINED[name], chips, strict=True) if chip.value]
            for name, chips in self._chips.items()
        }
        return {name: values or [now[name]] for name, values in chosen.items()}

    def attempt(self, action: Callable[[], Any]) -> None:
        with self._lock:
            super().attempt(action)
            self._show()

    def say(self, text: str, *, wrong: bool = False) -> None:
        self._text = status(text, wrong=wrong)

    def tick(self) -> None:
        """Follows the comparison, and the Spec that is combined."""
        with self._lock:
            if self._open and self._wanted() is not self._counted:
                self._text = self._count()
            self._show()

    def _recount(self) -> None:
        with self._lock:
            self._text = self._count()
            self._show()

    def _count(self) -> str:
        """Counts the combinations; says how many can run, for how long, and why the others cannot."""
        base = self._counted = self._wanted()
        combined = list(combine(base, self.lists(base), lambda spec, changes: spec.replace(**changes)))
        refused = [one for one in combined if isinstance(one, Refusal)]
        valid = len(combined) - len(refused)
        self._start.disabled = not valid
        cannot = f", {len(refused)} cannot" if refused else ""
        run = active_run(self._lab)
        goes_on = "" if run is None else " The run is suspended meanwhile, and goes on afterwards."
        total = f"<b>{len(combined)} combination{'s' * (len(combined) != 1)}</b>: {valid} can run{cannot}."
        # Each reason once, with the combinations that it applies to.
        fields = [name for name, values in self.lists(base).items() if len(values) > 1] or ["backend", "sharding"]
        reasons = labels_by((describe_fields(flat_fields(r.spec), fields), r.reason) for r in refused)
        why = "".join(f"<br><b>{escape(names)}</b>: {escape(reason)}" for reason, names in reasons.items())
        return f"{total} {self._estimate(valid)}{goes_on}{why}"

    def _estimate(self, runs: int) -> str:
        run = shown_run(self._lab)
        steps = run.events.last_steps(MEASURED_STEPS) if run is not None else []
        if not steps or not runs:
            return "The estimate follows after the first turns." if runs else ""
        seconds = median(step.step_time_s for step in steps) * self._steps.value * runs
        seconds += TURN_S * runs * min(self._rounds.value, self._steps.value)
        return f"About {_rough(seconds)}, by the step time of the run that is shown."

    def _show(self) -> None:
        sweep, last = active_sweep(self._lab), self._lab.sweep
        text = self._text if self._open else ""
        if not self._open and last is not None and last is self._started and last.error is not None:
            text = status(f"The comparison ended: {last.error}", wrong=True)
        if sweep is not None:
            text = ""
            put(self._progress, "value", _progress(sweep))
        put(self._choices.layout, "display", "" if self._open and sweep is None else HIDDEN)
        put(self._running.layout, "display", "" if sweep is not None else HIDDEN)
        put(self.message, "value", text)
        put(self.message.layout, "display", "" if text else HIDDEN)
        put(self.widget.layout, "display", "" if sweep is not None or text else HIDDEN)


def _progress(sweep: Sweep) -> str:
    """A progress bar with the steps done, the time left and the run in progress."""
    p, run = sweep.progress, sweep.current
    share = 100 * p.done_steps / max(1, p.all_steps)
    left = f"about {_rough(p.left_s)} left" if p.left_s is not None else "time left not known yet"
    turn = ""
    if run is not None and run in sweep.runs:
        turn = f" · now {sweep.runs.index(run) + 1}: {describe_strategy(run.spec)}"
    if sweep.suspended is not None:
        turn += f" · then the run goes on at step {sweep.suspended.step:,}"
    track = f'<span class="fsdp-progress-track"><i class="fsdp-progress-done" style="width:{share:.1f}%"></i></span>'
    return (
        f'<span class="fsdp-progress" role="progressbar" aria-valuenow="{share:.0f}" aria-valuemin="0" '
        f'aria-valuemax="100" aria-label="Comparison">{track}<span>{p.done_steps:,} of {p.all_steps:,} steps · {left}'
        f"{escape(turn)}</span></span>"
    )


def _rough(seconds: float) -> str:
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
