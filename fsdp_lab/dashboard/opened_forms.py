"""The forms of the tabs: `WritingForm` for a text, `SweepForm` for a comparison, `RunsForm` for names, reports and stored
runs; and `DiagnosisBox`, which a trouble opens.

Nothing here waits for a rank on the thread of a handler or of the tick: what takes longer has a thread of its own."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.base.formatting import duration
from fsdp_lab.base.generation import Sampling
from fsdp_lab.dashboard.board import Board
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, prose, put, styled
from fsdp_lab.dashboard.lab_like import LabLike, active_loop, active_run, active_sweep
from fsdp_lab.runs import Refusal, Run, RunState, Sweep, WatchedRun
from fsdp_lab.runs.comparison import labels_by
from fsdp_lab.runs.diagnosis import Diagnosis
from fsdp_lab.runs.history import StoredRun
from fsdp_lab.runs.sweep import ROUNDS, combine
from fsdp_lab.runs.view import RunQueries, RunView
from fsdp_lab.spec import describe
from fsdp_lab.spec.describe import describe_field, describe_strategy, field_title
from fsdp_lab.spec.spec import FIELDS, Spec

COMBINED: Mapping[str, Sequence[Any]] = {
    name: row.tokens for name, row in FIELDS.items() if row.group == "Sharding" and row.tokens and not row.planned
}
STEPS = 30
MOST_TOKENS = 1000
LOOK_EVERY_S = 1.0
MOST_STORED = 50


class WritingForm(InputForm):
    """Has the model continue a text."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike) -> None:
        super().__init__()
        self._lab = lab
        self._prompt = self.add(widgets.Text(placeholder="Once upon a time", description="prompt"))
        self._tokens = self.number("new tokens", Sampling.new_tokens, 1, MOST_TOKENS, "Length of the text")
        styled(self._tokens, "fsdp-number")
        self._write = self.button("Generate", "pencil", "Continue the prompt, after the steps in progress", self.write)
        self._write.button_style = "primary"
        entries = [styled(self._prompt, "fsdp-prompt"), self._tokens, self._write]
        self.message = styled(widgets.HTML(), "fsdp-sweep-said", "fsdp-written")
        row = styled(widgets.Box(entries), "fsdp-sweep-row")
        self.widget = styled(widgets.VBox([row, self.message]), "fsdp-sweep")
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
    """`wanted` is the Spec whose fields are combined with the lists: its own values are chosen until another is."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike, wanted: Callable[[], Spec]) -> None:
        super().__init__()
        self._lab, self._wanted = lab, wanted
        self._lock = threading.RLock()
        self._follows, self._updating = True, False  # the chips show the wanted Spec's values; are being set to them
        self._counted: object = None  # what was counted
        self._started: Sweep | None = None
        self._chips: dict[str, list[widgets.ToggleButton]] = {name: [] for name in COMBINED}
        for name, value in ((name, value) for name, values in COMBINED.items() for value in values):
            chip = widgets.ToggleButton(description=str(value), tooltip=f"Compare with {field_title(name)} {value}")
            chip.observe(self._choose, "value")
            self._chips[name].append(self.add(styled(chip, "fsdp-chip")))
        rows = [self._row(field_title(name), chips) for name, chips in self._chips.items()]
        self._steps = self.number("steps", STEPS, 1, 100_000, "Of each run")
        turns = "Turns of each run, so that drift of the machine affects all alike"
        self._rounds = self.number("rounds", ROUNDS, 1, 100, turns)
        for number in (self._steps, self._rounds):
            styled(number, "fsdp-number")
        self._start = self.button("Start comparison", "play", "Train all that can run, in turns", self.start)
        self._start.button_style = "primary"
        self.message = styled(widgets.HTML(), "fsdp-sweep-said")
        last_row = self._row("", [self._steps, self._rounds, self._start])
        self._choices = styled(widgets.VBox([*rows, last_row, self.message]), "fsdp-sweep-ask")
        self._progress = styled(widgets.HTML(), "fsdp-sweep-said")
        stop = self.button("Stop comparison", "stop", "End it and keep what was measured", self.stop)
        self._running = self._row("", [stop, self._progress])
        self.widget = styled(widgets.VBox([self._choices, self._running]), "fsdp-sweep")
        self.tick()

    def _row(self, name: str, parts: Sequence[widgets.Widget]) -> widgets.Box:
        head = [styled(widgets.HTML(escape(name)), "fsdp-sweep-name")] if name else []
        return styled(widgets.Box([*head, *parts]), "fsdp-sweep-row")

    def _choose(self, _change: object) -> None:
        with self._lock:
            if self._updating:  # by the tick
                return
            self._follows = False
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
        pairs = {name: zip(COMBINED[name], chips, strict=True) for name, chips in self._chips.items()}
        return {name: [v for v, chip in each if chip.value] or [now[name]] for name, each in pairs.items()}

    def tick(self) -> None:
        """Follows the comparison, the Spec that is combined, and the chips."""
        with self._lock:
            sweep, last = active_sweep(self._lab), self._started
            base = self._wanted()
            if self._follows:
                now, self._updating = base.flat(), True
                for name, chips in self._chips.items():
                    for value, chip in zip(COMBINED[name], chips, strict=True):
                        put(chip, "value", value == now[name])
                self._updating = False
            counted = (base, self.lists(base), active_run(self._lab) is not None)
            if counted != self._counted:
                self._counted = counted
                self._count(*counted)
            if sweep is not None:
                put(self._progress, "value", _progress(sweep))
            elif last is not None and last.error is not None:
                self.say(f"The comparison ended: {last.error}", wrong=True)
                self._started = None
            put(self._choices.layout, "display", "" if sweep is None else HIDDEN)
            put(self._running.layout, "display", "" if sweep is not None else HIDDEN)

    def _count(self, base: Spec, lists: Mapping[str, Sequence[Any]], active: bool) -> None:
        """Counts the combinations; says how many can run, and why the others cannot. `active`: a run goes on."""
        combined = list(combine(base, lists, lambda spec, changes: spec.replace(**changes)))
        refused = [one for one in combined if isinstance(one, Refusal)]
        valid = len(combined) - len(refused)
        self._start.disabled = not valid
        cannot = f", {len(refused)} cannot" if refused else ""
        goes_on = " A run that goes on is suspended meanwhile." * active
        total = f"<b>{len(combined)} combination{'s' * (len(combined) != 1)}</b>: {valid} can run{cannot}."
        # Each reason once, with the combinations that it applies to.
        fields = [name for name, values in lists.items() if len(values) > 1] or ["backend", "sharding"]
        reasons = labels_by((describe.describe_fields(describe.flat_fields(r.spec), fields), r.reason) for r in refused)
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


class RunsForm(InputForm):
    """The run's name and note, its settings as code and as a command, a report of what is compared, and the stored runs of
    other days, which it brings into the comparison."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike, wanted: Callable[[], Spec], board: Board) -> None:
        super().__init__()
        self._lab, self._wanted, self._board = lab, wanted, board
        self._run: Run | WatchedRun | None = None
        self._coded: Spec | None = None
        self._stored: Mapping[str, RunView] = {}
        about = "Names this run in lists, comparisons and reports"
        self._name = self._text("name", "baseline", about, RunQueries.rename)
        self._note = self._text("note", "what is tried here", "A note that is stored with the run", RunQueries.annotate)
        report = self.button("Save report", "file-text-o", "Write what is compared to one HTML file", self.report)
        show = "Bring the marked runs into the comparison, where their curves and figures are beside this run's"
        self._compare = self.button("Compare marked", "columns", show, self.compare)
        refresh = self.button("List stored runs", "refresh", "Read the history's newest runs", self.list_stored)
        self._list = self.add(widgets.SelectMultiple(rows=6, tooltip="Stored runs, newest first"))
        self._code = styled(widgets.HTML(), "fsdp-code")
        self.message = styled(widgets.HTML(), "fsdp-sweep-said")
        named = styled(widgets.Box([self._name, self._note, report]), "fsdp-sweep-row")
        listed = styled(widgets.Box([refresh, self._compare]), "fsdp-sweep-row")
        lines = [named, self._code, listed, styled(self._list, "fsdp-stored"), self.message]
        self.widget = styled(widgets.VBox(lines), "fsdp-sweep")
        self.tick(None)

    def _text(self, label: str, example: str, tooltip: str, write: Callable[[Any, str], None]) -> widgets.Text:
        texts = {"description": label, "placeholder": example, "tooltip": tooltip}
        text = self.add(styled(widgets.Text(**texts, continuous_update=False), "fsdp-prompt"))

        def save(change: Mapping[str, Any]) -> None:
            if self._run is not None and change["new"] != getattr(self._run, label):
                self.attempt(lambda: write(self._run, change["new"]))

        text.observe(save, "value")
        return text

    def report(self) -> None:
        """Writes a report of the comparison, or of the run. Raises ArgumentError: there is nothing to report."""
        self.say("The report is being written.")
        compared = [entry.source for entry in self._board.shown.entries]
        self.ask_lab(lambda: self.say(f"The report is in `{self._lab.report(runs=compared)}`."))

    def list_stored(self) -> None:
        """Lists the newest stored runs."""
        stored = {_stored_line(run): run for run in self._lab.runs()[:MOST_STORED]}
        self._stored, self._list.options = stored, tuple(stored)
        self.say("" if stored else "No run is stored yet.")

    def compare(self) -> None:
        """Pins the marked runs. Raises ArgumentError: none is marked, or too many are pinned."""
        if not (marked := self._list.value):
            raise ArgumentError("compare", "no stored run is marked", "list the stored runs, and mark one or more")
        letters = [self._board.pin(self._stored[line]) for line in marked]
        self.say(f"In the comparison as {', '.join(letters)}.")

    def tick(self, run: Run | WatchedRun | None) -> None:
        """Follows the run that is shown."""
        if run is not self._run:
            self._run = run
            put(self._name, "value", run.name if run is not None else "")
            put(self._note, "value", run.note if run is not None else "")
        for text in (self._name, self._note):
            put(text, "disabled", run is None)
        put(self._compare, "disabled", not self._stored)
        if (spec := self._wanted()) is self._coded:
            return
        self._coded = spec
        given = ", ".join(f"{name}={new!r}" for name, (_, new) in Spec().difference(spec).items())
        flags, unsaid = describe.command(spec)
        without = f" without {', '.join(map(field_title, unsaid))}, which no option says" if unsaid else ""
        lines = []
        for what, code, more in (("code", f"lab.run({given})", ""), ("command", flags, without)):
            copy = f'<button type="button" class="fsdp-copy" title="Copy the settings as {what}">Copy as {what}'
            lines.append(f"<div>{copy}</button><code>{escape(code)}</code>{escape(more)}</div>")
        put(self._code, "value", "".join(lines))


def _stored_line(run: StoredRun) -> str:
    """Such as "baseline · gpt2-1m · lab full_shard fp32 · 2026-11-28 10:03 · 300 steps · 4f2a09c1"."""
    try:
        what = describe_strategy(run.spec)
    except SpecError:
        what = "a Spec of another version"
    named = [run.name] if run.name else []
    model = describe.describe_value("model", run.flat_fields.get("model", "own loop"))
    return " · ".join([*named, model, what, run.when, f"{run.step:,} steps", run.id])


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
            change = ", ".join(describe_field(n, v) for n, v in d.changes.items())
            put(self._cure, "description", change or "Apply")
            put(self._cure.layout, "display", "" if d.changes else HIDDEN)
        put(self.widget.layout, "display", "" if diagnoses else HIDDEN)
