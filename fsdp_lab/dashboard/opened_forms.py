"""The forms that a button of the bar opens and closes: `WritingForm`, and `SweepForm` for a comparison; and
`DiagnosisBox`, which a trouble opens.

Nothing here waits for a rank on the thread of a handler or of the tick: what takes longer has a thread of its own.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.formatting import duration
from fsdp_lab.base.generation import Sampling
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, prose, put, styled
from fsdp_lab.dashboard.lab_like import LabLike, active_loop, active_run, active_sweep
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
MOST_TOKENS = 1000
LOOK_EVERY_S = 1.0


class WritingForm(InputForm):
    """`toggle` opens and closes it."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike) -> None:
        super().__init__()
        self._lab = lab
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
        self._counted: object = None  # the Spec and the lists that were counted
        self._started: Sweep | None = None
        self._chips: dict[str, list[widgets.ToggleButton]] = {name: [] for name in COMBINED}
        for name, value in ((name, value) for name, values in COMBINED.items() for value in values):
            chip = widgets.ToggleButton(description=str(value), tooltip=f"Compare with {field_title(name)} {value}")
            chip.observe(lambda _: self.tick(), "value")
            self._chips[name].append(self.add(styled(chip, "fsdp-chip")))
        rows = [self._row(field_title(name), chips) for name, chips in self._chips.items()]
        self._steps = self.number("steps", STEPS, 1, 100_000, "Of each run")
        turns = "Turns of each run, so that drift of the machine affects all alike"
        self._rounds = self.number("rounds", ROUNDS, 1, 100, turns)
        for number in (self._steps, self._rounds):
            styled(number, "fsdp-number")
        self._start = self.button("Start comparison", "play", "Train all that can run, in turns", self.start)
        self._start.button_style = "primary"
        close = self.button("Close", "", "Close this form", self.toggle)
        self.message = styled(widgets.HTML(), "fsdp-sweep-said")
        last_row = self._row("", [self._steps, self._rounds, self._start, close])
        self._choices = styled(widgets.VBox([*rows, last_row, self.message]), "fsdp-sweep-ask")
        self._progress = styled(widgets.HTML(), "fsdp-sweep-said")
        stop = self.button("Stop comparison", "stop", "End it and keep what was measured", self.stop)
        self._running = self._row("", [stop, self._progress])
        self.widget = styled(widgets.VBox([self._choices, self._running]), "fsdp-sweep")
        self.tick()

    def _row(self, name: str, parts: Sequence[widgets.Widget]) -> widgets.Box:
        head = [styled(widgets.HTML(escape(name)), "fsdp-sweep-name")] if name else []
        return styled(widgets.Box([*head, *parts]), "fsdp-sweep-row")

    def toggle(self) -> None:
        """Opens it with what is trained now chosen, or closes it."""
        with self._lock:
            now = self._wanted().flat()
            for name, chips in self._chips.items() if not self._open else ():
                for value, chip in zip(COMBINED[name], chips, strict=True):
                    chip.value = value == now[name]
            self._open = not self._open
            self.tick()

    def start(self) -> None:
        """Begins the comparison of what is chosen. Raises ArgumentError where that would end what cannot be suspended."""
        base, run = self._wanted(), active_run(self._lab)
        if active_loop(self._lab) is not None or (run is not None and run.state is RunState.BROKEN):
            raise ArgumentError("compare", "it would end what has the ranks now", "stop that first, or recover it")
        self._started = self._lab.compare(base, steps=self._steps.value, rounds=self._rounds.value, **self.lists(base))
        self.tick()

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

    def tick(self) -> None:
        """Follows the comparison, the Spec that is combined, and the chips."""
        with self._lock:
            sweep, last = active_sweep(self._lab), self._started
            if self._open and (wanted := (base := self._wanted(), self.lists(base))) != self._counted:
                self._counted = wanted
                self._count(*wanted)
            if sweep is not None:
                put(self._progress, "value", _progress(sweep))
            elif last is not None and last.error is not None:
                self.say(f"The comparison ended: {last.error}", wrong=True)
                self._started = None
            put(self._choices.layout, "display", "" if sweep is None else HIDDEN)
            put(self._running.layout, "display", "" if sweep is not None else HIDDEN)
            put(self.widget.layout, "display", "" if self._open or sweep is not None else HIDDEN)

    def _count(self, base: Spec, lists: Mapping[str, Sequence[Any]]) -> None:
        """Counts the combinations; says how many can run, and why the others cannot."""
        combined = list(combine(base, lists, lambda spec, changes: spec.replace(**changes)))
        refused = [one for one in combined if isinstance(one, Refusal)]
        valid = len(combined) - len(refused)
        self._start.disabled = not valid
        cannot = f", {len(refused)} cannot" if refused else ""
        goes_on = " A run that goes on is suspended meanwhile." * (active_run(self._lab) is not None)
        total = f"<b>{len(combined)} combination{'s' * (len(combined) != 1)}</b>: {valid} can run{cannot}."
        # Each reason once, with the combinations that it applies to.
        fields = [name for name, values in lists.items() if len(values) > 1] or ["backend", "sharding"]
        reasons = labels_by((describe_fields(flat_fields(r.spec), fields), r.reason) for r in refused)
        why = "".join(f"<br><b>{escape(names)}</b>: {escape(reason)}" for reason, names in reasons.items())
        put(self.message, "value", f"{total}{goes_on}{why}")


def _progress(sweep: Sweep) -> str:
    """The steps done, the time left and the run in progress."""
    p, run = sweep.progress, sweep.current
    parts = [f"{p.done_steps:,} of {p.all_steps:,} steps"]
    parts.append(f"about {duration(p.left_s)} left" if p.left_s is not None else "time left not known yet")
    if run is not None and run in sweep.runs:
        parts.append(f"now {sweep.runs.index(run) + 1}: {describe_strategy(run.spec)}")
    if sweep.suspended is not None:
        parts.append(f"then the run goes on at step {sweep.suspended.step:,}")
    return f'<span role="status">{escape(" · ".join(parts))}</span>'


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
        self.diagnoses: Sequence[Diagnosis] = ()
        self.message = styled(widgets.HTML(), "fsdp-sweep-said")
        self._cure = self.button("Apply", "medkit", "Change the run so", self._apply)
        row = styled(widgets.Box([self.message, self._cure]), "fsdp-sweep-row")
        self.widget = styled(widgets.VBox([row], layout=widgets.Layout(display=HIDDEN)), "fsdp-sweep", "fsdp-diagnosis")

    def _apply(self) -> None:
        if self.diagnoses:  # else the page is out of date
            self._choose(self.diagnoses[0].changes)

    def tick(self, run: Run | WatchedRun | None) -> None:
        """Looks at the run, if it has anything new, at most once a second."""
        now_s = time.monotonic()
        if run is None or now_s < self._due_s:
            return
        version = (run.id, len(run.events), run.state, run.spec.id, run is self.elsewhere)
        if version != self._seen:
            self.show(() if run is self.elsewhere else run.diagnoses)
            self._seen, self._due_s = version, now_s + LOOK_EVERY_S

    def show(self, diagnoses: Sequence[Diagnosis]) -> None:
        """Shows the first; the next one when that is cured. The failure itself is in the row below the buttons."""
        self.diagnoses = diagnoses
        if diagnoses:
            d = diagnoses[0]
            put(self.message, "value", f'<span role="status"><b>{prose(d.sentence)}</b> {prose(d.cure)}</span>')
            put(self._cure, "description", ", ".join(describe_field(n, v) for n, v in d.changes.items()) or "Apply")
            put(self._cure.layout, "display", "" if d.changes else HIDDEN)
        put(self.widget.layout, "display", "" if diagnoses else HIDDEN)
