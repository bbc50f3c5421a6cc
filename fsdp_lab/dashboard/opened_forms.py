"""The forms that a button of the bar opens and closes: `WritingForm`, and `SweepForm` for a comparison; and
`DiagnosisBox`, which a trouble opens.

Nothing here waits for a rank on the thread of a handler or of the tick: what takes longer has a thread of its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from itertools import zip_longest
from statistics import median
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.generation import Sampling
from fsdp_lab.dashboard.forms import HIDDEN, AskingForm, InputForm, prose, put, status, styled
from fsdp_lab.dashboard.lab_like import LabLike, active_loop, active_run, active_sweep, shown_run
from fsdp_lab.runs import Refusal, Run, RunState, Sweep, WatchedRun
from fsdp_lab.runs.comparison import labels_by
from fsdp_lab.runs.diagnosis import Diagnosis
from fsdp_lab.runs.sweep import ROUNDS, combine
from fsdp_lab.spec.describe import describe_field, describe_fields, describe_strategy, field_title, flat_fields
from fsdp_lab.spec.spec import FIELDS, Spec

COMBINED: Mapping[str, Sequence[Any]] = {
    name: row.tokens for name, row in FIELDS.items() if row.group == "Sharding" and row.tokens and not row.planned
}
STEPS = 30
TURN_S = 0.6  # approximate cost of a turn beside its steps: a build and a first step
MEASURED_STEPS = 9
MOST_TOKENS = 1000
LOOK_EVERY_S = 1.0
LOOK_SHARE = 0.03  # of the time, that looking may take
MOST_SHOWN = 2  # that are shown at once: the next ones when these are cured


class WritingForm(AskingForm):
    """`toggle` opens and closes it."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike) -> None:
        super().__init__(lab)
        self._prompt = self.add(widgets.Text(placeholder="Once upon a time", description="prompt"))
        self._tokens = self.number("new tokens", Sampling.new_tokens, 1, MOST_TOKENS, "Length of the text")
        styled(self._tokens, "fsdp-number")
        self._write = self.button("Write", "pencil", "Continue the prompt, after the steps in progress", self.write)
        self._write.button_style = "primary"
        close = self.button("Close", "", "Close this form", self.toggle)
        entries = [styled(self._prompt, "fsdp-prompt"), self._tokens, self._write, close]
        self.message = styled(widgets.HTML(), "fsdp-sweep-said", "fsdp-written")
        row = styled(widgets.Box(entries), "fsdp-sweep-row")
        self.widget = styled(widgets.VBox([row, self.message], layout=widgets.Layout(display=HIDDEN)), "fsdp-sweep")
        self.tick()

    def write(self) -> None:
        """Requests a text. Raises FieldError and ClusterError of what cannot write one."""
        prompt, tokens = self._prompt.value, self._tokens.value
        if not prompt.strip():
            raise ValueError("Type a prompt first: the text that the model is to continue.")
        self.say("The model writes after the steps in progress.")
        if (run := active_run(self._lab)) is not None:
            request = run.generate(prompt, new_tokens=tokens)
            self.ask_lab(lambda: self._show(prompt, request.wait()))
        else:
            self.ask_lab(lambda: self._show(prompt, self._lab.generate(prompt, new_tokens=tokens)))

    def _show(self, prompt: str, texts: Sequence[str]) -> None:
        put(self.message, "value", f'<span role="status"><b>{escape(prompt)}</b>{escape(texts[0])}</span>')

    def tick(self) -> None:
        """A text can be asked for where the ranks hold a model and are not compared."""
        held = self._lab.current is not None and active_sweep(self._lab) is None and active_loop(self._lab) is None
        put(self._write, "disabled", self.is_asking or not held)


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


class DiagnosisBox(InputForm):
    """Shown where something is wrong; `choose` takes field values as if a person had set them. The diagnoses of `elsewhere`
    are shown in another part of the page."""

    css = "fsdp-sweep"

    def __init__(self, choose: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._choose = choose
        self.elsewhere: Run | WatchedRun | None = None
        self._due_s = 0.0
        self._seen: tuple[object, ...] = ()  # the version of the run that was looked at
        self._rows = [self._row(place) for place in range(MOST_SHOWN)]
        self.diagnoses: Sequence[Diagnosis] = ()
        self.message = styled(widgets.HTML(), "fsdp-sweep-said")
        rows = [*(box for box, _, _ in self._rows), self.message]
        self.widget = styled(widgets.VBox(rows, layout=widgets.Layout(display=HIDDEN)), "fsdp-sweep", "fsdp-diagnosis")

    def _row(self, place: int) -> tuple[widgets.Box, widgets.HTML, widgets.Button]:
        text = styled(widgets.HTML(), "fsdp-sweep-said")
        cure = self.button("Apply", "medkit", "Change the run so", partial(self._apply, place))
        return styled(widgets.Box([text, cure]), "fsdp-sweep-row"), text, cure

    def _apply(self, place: int) -> None:
        if place < len(self.diagnoses):  # else the page is out of date
            self._choose(self.diagnoses[place].changes)

    def tick(self, run: Run | WatchedRun | None) -> None:
        """Looks at the run, if it has anything new, at most once a second."""
        now_s = time.monotonic()
        if run is None or now_s < self._due_s:
            return
        version = (run.id, len(run.events), run.state, run.spec.id, run is self.elsewhere)
        if version != self._seen:
            began_s = time.thread_time()
            self.show(() if run is self.elsewhere else run.diagnoses)
            self._seen, spent_s = version, time.thread_time() - began_s
            self._due_s = now_s + max(LOOK_EVERY_S, spent_s / LOOK_SHARE)

    def show(self, diagnoses: Sequence[Diagnosis]) -> None:
        """The failure itself is in the row below the buttons."""
        self.diagnoses = diagnoses[:MOST_SHOWN]
        for (box, text, cure), d in zip_longest(self._rows, self.diagnoses):
            put(box.layout, "display", HIDDEN if d is None else "")
            if d is not None:
                put(text, "value", f'<span role="status"><b>{prose(d.meaning)}</b> {prose(d.cure)}</span>')
                put(cure, "description", ", ".join(describe_field(n, v) for n, v in d.changes.items()) or "Apply")
                put(cure.layout, "display", "" if d.changes else HIDDEN)
        put(self.widget.layout, "display", "" if diagnoses else HIDDEN)
