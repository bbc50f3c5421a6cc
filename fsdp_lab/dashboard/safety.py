"""The forms of what protects a run: checkpoints, evaluation, recovery, incidents, and drills, which test the recovery.

`SafetyBox.recovery` is for a place that is always seen: what has failed, with the buttons to recover."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.formatting import duration, plural, size
from fsdp_lab.cluster import ClusterError
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, error_text, prose, put, section, status, styled
from fsdp_lab.dashboard.lab_like import LabLike, active_run
from fsdp_lab.runs import EvalConfig, Incident, RecoveryPolicy, Run, RunState, WatchedRun
from fsdp_lab.runs.run import Drill
from fsdp_lab.runs.saving import LAST, CheckpointConfig, SavedCheckpoint
from fsdp_lab.spec.checkpoint_format import Checkpoint
from fsdp_lab.spec.faults import DRILLS

FOLDER = "checkpoints"
EVERY_STEPS = 100
OFF, ASKED, EVERY = "off", "on demand and at the end", "every n steps"
SHOWN = 3  # saves, and incidents
NOTHING = "No checkpoint yet. These settings take effect at Start, which creates the folder."
LATER = "Takes effect at the next start"
EVAL_EVERY_STEPS = 50
NEVER = 0
NO_EVALUATION = "Results are drawn in the loss card. With checkpoints on, the best one is kept."
ON_FAILURE = (("off: the run fails", "off"), ("ask: wait for a decision", "ask"), ("automatic", "auto"))
RESUME_ON = (("same number of ranks", "same"), ("remaining ranks", "fewer"))
NO_INCIDENT = "No rank has failed in this run. If one does, this says why, from what training resumed, and how soon."
UNFINISHED = {
    "broken": "The run waits for Recover or Stop.",
    "recovering": "The run is being recovered.",
    "stopping": "The run is given up.",
}
SAID = "Recover it, or press Start."
LASTING = "slow"  # the only drill whose effect lasts until it is ended

Begin = Callable[[Callable[[Mapping[str, Any]], Run]], None]


def field(entry: widgets.Widget) -> widgets.VBox:
    """An input with its label above it, like those of the controls."""
    return styled(widgets.VBox([styled(entry, "fsdp-input")]), "fsdp-field")


def row(parts: Sequence[widgets.Widget]) -> widgets.Box:
    """Places widgets side by side, in as many lines as they need."""
    return styled(widgets.Box(list(parts)), "fsdp-safety-row")


def text_line(css: str) -> widgets.HTML:
    """An empty text with a class of its own, so that the style sheet reserves room for it."""
    return styled(widgets.HTML(), "fsdp-safety-words", css)


class SafetyBox(InputForm):
    """`options` are for `Lab.run`; `begin` is `Controls.begin`, which shows a run that was not started by Start."""

    def __init__(self, lab: LabLike, begin: Begin) -> None:
        super().__init__()
        self._lab = lab
        self._complaint = ""
        self._saving = SavingForm(lab, lambda at: begin(lambda changes: lab.resume(at, **self.options(), **changes)))
        self._evaluation = EvaluationForm()
        self._how = self.dropdown("when ranks fail", ON_FAILURE, "ask", LATER)
        self._ranks = self.dropdown("resume on", RESUME_ON, "same", LATER)
        self._drill = DrillForm(lab)
        self._forms = (self._saving, self._evaluation, self._drill)
        self.message, self._summary = styled(widgets.HTML(), "fsdp-notice-text"), text_line("fsdp-soft")
        same = "Replace the lost ranks and resume"
        fewer = "Resume on the ranks that remain, with the same global batch where it divides"
        self._same = self.button("Recover", "medkit", same, lambda: lab.recover("same"))
        self._fewer = self.button("Resume on fewer ranks", "minus-circle", fewer, lambda: lab.recover("fewer"))
        self._same.button_style = "primary"
        self.recovery = styled(widgets.Box([self.message, self._same, self._fewer]), "fsdp-notice")
        recovery = section("Recovery", [row([field(self._how), field(self._ranks)])])
        beside = widgets.VBox([self._evaluation.widget, recovery, self._drill.widget])
        forms = styled(widgets.Box([self._saving.widget, beside]), "fsdp-safety-forms")
        self._incidents = text_line("fsdp-incidents")
        parts = [self._summary, forms, section("Incidents", [self._incidents])]
        self.widget = styled(widgets.VBox(parts), "fsdp-safety")
        self.inputs += [widget for form in self._forms for widget in form.inputs]
        self.tick(None)

    def options(self) -> dict[str, Any]:
        """Returns how the next run is saved, evaluated and recovered. Raises FieldError, which the card shows as well."""
        recover = RecoveryPolicy(how=self._how.value, ranks=self._ranks.value)
        return {"save": self._saving.config(), "recover": recover, "evaluate": self._evaluation.config()}

    def say(self, text: str, *, wrong: bool = False) -> None:
        """Shows why a run could not be recovered."""
        self._complaint, run = text, self._lab.current
        self.tick(None if isinstance(run, WatchedRun) else run)

    def tick(self, run: Run | None) -> None:
        """Follows `run`, the one that is shown; shows the buttons where they are of use."""
        for form in self._forms:
            form.tick(run)
        incidents = run.incidents if run is not None else ()
        put(self._incidents, "value", incidents_list(incidents, run.state if run is not None else RunState.STARTING))
        waits = run is not None and run is self._lab.current and can_recover(run)
        self._complaint = self._complaint if waits else ""
        for button, visible in ((self._same, waits), (self._fewer, waits and len(self._lab.lost) > 0)):
            put(button.layout, "display", "" if visible else HIDDEN)
        count = plural(len(incidents), "incident") if incidents else "no incident"
        recovery = f"recovery: {'automatic' if self._how.value == 'auto' else self._how.value}"
        parts = (self._saving.summary, self._evaluation.summary, recovery, count)
        put(self._summary, "value", status(" · ".join(filter(None, parts))))
        broken = run is not None and (run.state is RunState.RECOVERING or can_recover(run))
        put(self.recovery.layout, "display", "" if broken else HIDDEN)
        if run is not None and broken:
            reason = SAID if run.state is RunState.FAILED else run.reason
            cost = f"{back_to(run)} " * waits
            put(self.message, "value", status(self._complaint, wrong=True) or status(f"{reason} {cost}".strip()))


class SavingForm(InputForm):
    """`config` is what is chosen; `resume` starts a run from the newest checkpoint in a folder."""

    def __init__(self, lab: LabLike, resume: Callable[[str], None]) -> None:
        super().__init__()
        self._lab = lab
        self._start = resume
        texts = {"value": FOLDER, "description": "folder", "tooltip": "Where checkpoints go"}
        self._folder = self.add(widgets.Text(**texts, continuous_update=False))
        self._when = self.dropdown("save", (OFF, ASKED, EVERY), OFF, "Takes effect at the next start")
        self._every = self.number("n steps", EVERY_STEPS, 1, 1_000_000, "Steps from one checkpoint to the next")
        self._last = self.number("keep last", LAST, 1, 1000, "How many of a run are kept; older ones are removed")
        self._save = self.button("Save now", "save", "Write a checkpoint now; training continues", self.save)
        newest = "Start a run from the newest checkpoint in the folder, with the choices that wait for a start"
        self._resume = self.button("Resume", "history", newest, self.resume)
        self.message, self._list = text_line("fsdp-safety-said"), text_line("fsdp-safety-list")
        entries = [field(entry) for entry in (self._folder, self._when, self._every, self._last)]
        self.widget = section("Checkpoints", [row(entries), row([self._save, self._resume, self.message]), self._list])
        self.tick(None)

    @property
    def summary(self) -> str:
        when = {OFF: "is off", ASKED: "when asked", EVERY: f"every {self._every.value} steps"}[self._when.value]
        return f"saving {when}"

    def config(self) -> CheckpointConfig | None:
        """Returns how the next run is saved; makes its folder. Raises FieldError, which is shown beside the field, too."""
        self.say("")
        if self._when.value == OFF:
            return None
        try:
            every = self._every.value if self._when.value == EVERY else None
            return CheckpointConfig(folder=self._folder.value, every=every, last=self._last.value)
        except FieldError as e:
            self.say(f"The folder {e.reason}: {e.hint}.", wrong=True)
            raise

    def save(self) -> None:
        """Requests a checkpoint of the active run; without one, of what the ranks hold."""
        folder = self._folder.value
        if (run := active_run(self._lab)) is not None:
            request = run.save(folder)
            self.say("A checkpoint is written after the steps in progress, and one of the last step at the run's end.")
            self.ask_lab(lambda: self._say_saved(request.wait()))
        elif not self.is_asking:
            self.say("Saving what the ranks hold.")
            self.ask_lab(lambda: self._say_saved(self._lab.save(folder)))

    def _say_saved(self, checkpoint: Checkpoint) -> None:
        self.say(f"The state after {plural(checkpoint.step, 'step')} is saved in {checkpoint.path.parent.name}.")

    def resume(self) -> None:
        self.say("")
        self._start(self._folder.value)

    def tick(self, run: Run | None) -> None:
        """Shows the saves of `run`, the one that is shown."""
        active = active_run(self._lab)
        busy = active is not None and active.state in (RunState.BROKEN, RunState.RECOVERING, RunState.STOPPING)
        put(self._every, "disabled", self._when.value != EVERY)
        put(self._last, "disabled", self._when.value == OFF)
        put(self._save, "disabled", busy or self._lab.current is None)
        put(self._resume, "disabled", active is not None)
        put(self._list, "value", saves_list(run.saves if run is not None else ()))


def saves_list(saves: Sequence[SavedCheckpoint]) -> str:
    """The newest saves, newest first."""
    if not saves:
        return status(NOTHING)
    lines = []
    for saved in saves[: -SHOWN - 1 : -1]:
        cost = f": {size(saved.nbytes)}, training paused for {duration(saved.stall_s)}" * (saved.path is not None)
        lines.append(escape(f"{saved.words[0].upper()}{saved.words[1:]}{cost}."))
    return _lines(lines, len(saves))


class EvaluationForm(InputForm):
    """Chooses how often a run is evaluated on samples that it does not train on, and when it stops early."""

    def __init__(self) -> None:
        super().__init__()
        self._when = self.dropdown("evaluate", (OFF, EVERY), OFF, LATER)
        steps, samples = "Steps from one evaluation to the next", "How many held-out samples an evaluation takes"
        self._every = self.number("every (steps)", EVAL_EVERY_STEPS, 1, 1_000_000, steps)
        self._samples = self.number("samples", EvalConfig.samples, 1, 1_000_000, samples)
        patience = f"The run stops when so many evaluations in turn were not better than the best; {NEVER}: never"
        self._patience = self.number("patience", NEVER, NEVER, 1000, patience)
        again = "A text that the model continues after each evaluation; empty: none"
        self._prompt = self.add(widgets.Text(placeholder="Once upon a time", description="prompt", tooltip=again))
        self.message = text_line("fsdp-evaluation-said")
        self.widget = section("Evaluation", [row([field(entry) for entry in self.inputs]), self.message])
        self.tick(None)

    @property
    def summary(self) -> str:
        return "" if self._when.value == OFF else f"evaluation every {self._every.value} steps"

    def config(self) -> EvalConfig | None:
        if self._when.value == OFF:
            return None
        patience = self._patience.value if self._patience.value != NEVER else None
        prompts = tuple(filter(None, [self._prompt.value.strip()]))
        return EvalConfig(every=self._every.value, samples=self._samples.value, patience=patience, prompts=prompts)

    def tick(self, run: Run | None) -> None:
        """Shows the results of `run`, the one that is shown."""
        for entry in (self._every, self._samples, self._patience, self._prompt):
            put(entry, "disabled", self._when.value == OFF)
        results = run.early_stopping.words(run.spec.workload) if run is not None else ""
        self.say(f"{results[0].upper()}{results[1:]}." if results else NO_EVALUATION)


def can_recover(run: Run) -> bool:
    """Says whether it waits for a decision, or its ranks failed after it had begun."""
    failed = run.state is RunState.FAILED and isinstance(run.error, ClusterError) and len(run.switches) > 0
    return run.state is RunState.BROKEN or failed


def back_to(run: Run) -> str:
    """What a recovery costs: from which step training resumes, and how many steps are trained again."""
    saved = next((s.step for s in reversed(run.saves) if s.path is not None), None)
    again = run.step - (saved or 0)
    begins = "There is no checkpoint: it begins at step 0" if saved is None else f"It resumes from step {saved:,}"
    return f"{begins}, and trains {plural(again, 'step')} again."


class DrillForm(InputForm):
    """Injects a fault: which one, and on which rank."""

    def __init__(self, lab: LabLike) -> None:
        super().__init__()
        self._lab = lab
        self._kind = self.dropdown("fault", list(DRILLS), next(iter(DRILLS)), "What fails")
        self._rank = self.number("rank", 1, 0, 4095, "The rank that fails")
        self._inject = self.button("Inject fault", "bolt", "Inject it into the run that trains now", self.inject)
        self._inject.button_style = "danger"
        self._restore = self.button("Restore link", "undo", "Remove the slowdown of the link", self.restore)
        self._slowdown: Drill | None = None
        self._unanswered: Drill | None = None  # the newest, until the ranks have refused it
        self._what, self.message = text_line("fsdp-drill-what"), text_line("fsdp-safety-said")
        self._run: Run | None = None  # that the message is about
        self._kind.observe(lambda _: self._explain(), "value")
        entries = row([field(self._kind), field(self._rank), self._inject, self._restore])
        self.widget = section("Drill", [entries, self._what, self.message])
        self._explain()
        self.tick(None)

    def inject(self) -> None:
        kind, rank = self._kind.value, self._rank.value
        self._unanswered = drill = self._lab.drill(kind, rank=rank)
        if kind == LASTING:
            self._slowdown = drill
        self.say(f"Requested: {kind} on rank {rank}.")

    def restore(self) -> None:
        drill, self._slowdown = self._slowdown, None
        if drill is not None:
            drill.end()
            self.say("The link is restored with the next steps.")

    def tick(self, run: Run | None) -> None:
        """A drill needs a run that trains."""
        if run is not self._run:
            self._run = run
            self.say("")
        ranks = len(self._lab.devices) or 1 if run is None else run.spec.world_size  # while ranks move there are none
        if self._rank.value >= ranks:
            put(self._rank, "value", ranks - 1)
        put(self._rank, "max", ranks - 1)
        put(self._inject, "disabled", run is None or run is not self._lab.current or run.state is not RunState.RUNNING)
        if (drill := self._unanswered) is not None and drill.refused is not None:
            self.say(error_text(drill.refused), wrong=True)
            self._unanswered = None
            self._slowdown = None if self._slowdown is drill else self._slowdown
        slow = self._slowdown
        put(self._restore, "disabled", slow is None or run is None or slow.run is not run or run.state.over)

    def _explain(self) -> None:
        put(self._what, "value", status(f"It {DRILLS[self._kind.value]}."))
        self.say("")


def incidents_list(incidents: Sequence[Incident], state: RunState) -> str:
    """The newest incidents, newest first."""
    if not incidents:
        return f'<div class="fsdp-soft">{NO_INCIDENT}</div>'
    lines = [f"<b>step {incident.step:,}</b> · {prose(incident.words)}" for incident in incidents[: -SHOWN - 1 : -1]]
    if incidents[-1].resumed_step is None:
        unfinished = "The run ended before it resumed." if state.over else "The other ranks are freed."
        lines[0] += f" {UNFINISHED.get(state.value, unfinished)}"
    return _lines(lines, len(incidents))


def _lines(newest: Sequence[str], count: int) -> str:
    """Lines of HTML, and how many there are beside them."""
    more = [f'<span class="fsdp-soft">and {count - SHOWN:,} before</span>'] if count > SHOWN else []
    return "".join(f"<div>{line}</div>" for line in [*newest, *more])
