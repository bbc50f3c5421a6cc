"""The forms that a button of the bar opens and closes: `WritingForm`, `SweepForm` for a comparison, and `HostsForm`; and
`DiagnosisBox`, which a trouble opens.

Nothing here waits for a rank on the thread of a handler or of the tick: what takes longer has a thread of its own.
"""

from __future__ import annotations

import math
import shlex
import sys
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
from fsdp_lab.base.formatting import plural
from fsdp_lab.base.generation import Sampling
from fsdp_lab.cluster import ClusterError
from fsdp_lab.cluster.assembly import StartProgress
from fsdp_lab.cluster.hosts import Hosts, SlurmHosts, ssh_hosts
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
HERE, SSH, SLURM = "this machine", "hosts by SSH", "a job of Slurm"
MOST = 4096
LOSES = (
    "The hosts are looked at first. When all can be used, the ranks here end and lose what they have trained: save it "
    "before, in a folder that the hosts have too, and resume there."
)
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


class HostsForm(AskingForm):
    """`toggle` opens and closes it; `choose` takes field values of a Spec that follow from a move: the number of ranks."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike, choose: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(lab)
        self._choose = choose
        self._cancelled = threading.Event()
        self._progress: tuple[StartProgress, float] | None = None  # the newest, and when the start began, monotonic
        self._where = self.dropdown("ranks on", (HERE, SSH, SLURM), SSH, "Where the ranks are to be")
        styled(self._where, "fsdp-select")
        self._ranks = self._narrow("ranks", 2, 1, "Number of ranks on this machine")
        self._names = self._text("hosts", "gpu1, user@gpu2", "Names or addresses, as for ssh, with commas between them")
        self._count = self._narrow("hosts", 2, 1, "Number of hosts")
        self._each = self._narrow("ranks per host", 0, 0, "0: one for each GPU of a host, or one")
        self._partition = self._text("partition", "default", "Of the job, as for sbatch")
        self._time = self._text("time", "1:00:00", "Of the job, as for sbatch")
        self._options = self._text("options", "-J gateway", "More arguments for ssh, or for salloc")
        path = "Its path on the hosts, if it is another one than here"
        self._python = self._text("Python there", sys.executable, path)
        sync = widgets.Checkbox(value=False, description="install what they lack", indent=False)
        self._sync = self.add(styled(sync, "fsdp-check"))
        self._start = self.button("Start there", "play", "End the ranks, and start others there", self.start)
        self._start.button_style = "primary"
        leave = "Leave the queue; ranks start again where they were"
        self._cancel = self.button("Cancel", "stop", leave, self._cancelled.set)
        self._close = self.button("Close", "", "Close this form", self.toggle)
        self.message = styled(widgets.HTML(), "fsdp-sweep-said")
        self._fields = {
            HERE: (self._ranks,),
            SSH: (self._names, self._each, self._options, self._python, self._sync),
            SLURM: (self._count, self._each, self._partition, self._time, self._options, self._python, self._sync),
        }
        shown = dict.fromkeys(widget for fields in self._fields.values() for widget in fields)
        row = styled(widgets.Box([self._where, *shown, self._start, self._cancel, self._close]), "fsdp-sweep-row")
        self.widget = styled(widgets.VBox([row, self.message], layout=widgets.Layout(display=HIDDEN)), "fsdp-sweep")
        self._where.observe(lambda change: self._show_fields(), "value")
        self._show_fields()
        self.say(LOSES)
        self.tick()

    def _narrow(self, label: str, value: int, least: int, tooltip: str) -> widgets.BoundedIntText:
        return styled(self.number(label, value, least, MOST, tooltip), "fsdp-number")

    def _text(self, label: str, placeholder: str, tooltip: str) -> widgets.Text:
        entry = widgets.Text(placeholder=placeholder, description=label, tooltip=tooltip)
        return self.add(styled(entry, "fsdp-prompt"))

    def _show_fields(self) -> None:
        for field in {widget for fields in self._fields.values() for widget in fields}:
            put(field.layout, "display", "" if field in self._fields[self._where.value] else HIDDEN)

    def start(self) -> None:
        """Starts ranks there, on a thread. Raises ArgumentError for a field that is wrong."""
        if self.is_asking:
            return
        hosts, ranks = self._hosts(), self._ranks.value if self._where.value == HERE else None
        self._cancelled.clear()
        self.say("The hosts are looked for; until they are found, the run goes on.")
        self.ask_lab(partial(self._move, hosts, ranks))
        self.tick()

    def _hosts(self) -> Hosts | None:
        options = tuple(shlex.split(self._options.value))
        python = self._python.value.strip() or None
        each, sync = self._each.value or None, self._sync.value
        common: dict[str, Any] = {"ranks_per_host": each, "python": python, "sync": sync}
        if self._where.value == SSH:
            return ssh_hosts(self._names.value, ssh_args=options, **common)
        if self._where.value == SLURM:
            partition, time_limit = self._partition.value.strip() or None, self._time.value.strip() or None
            job: dict[str, Any] = {"partition": partition, "time": time_limit, "options": options}
            return SlurmHosts(hosts=self._count.value, **job, **common)
        return None

    def _move(self, hosts: Hosts | None, ranks: int | None) -> None:
        try:
            self._lab.move(hosts, ranks, progress=self._report)
        finally:
            self._progress = None
        places = dict.fromkeys(status.host for status in self._lab.rank_status())
        n = len(self._lab.devices)
        self._choose({"world_size": n, "devices": None})
        self.say(f"{plural(n, 'rank')} {'are' if n > 1 else 'is'} on {listed([*places])}. Start begins a run there.")

    def _report(self, p: StartProgress) -> None:
        """Raises ClusterError where the start was cancelled."""
        if self._cancelled.is_set():
            raise ClusterError("the start there was cancelled, and ranks are where they were")
        self._progress = p, time.monotonic() - p.seconds

    def tick(self) -> None:
        """Buttons that can be pressed now, and how far a start is."""
        if (progress := self._progress) is not None:
            p, began_s = progress
            self.say(f"{p.stage[0].upper()}{p.stage[1:]}: {p.done} of {p.total}, {time.monotonic() - began_s:.0f} s")
        put(self._start, "disabled", self.is_asking or self._lab.closed)
        put(self._cancel, "disabled", not self.is_asking)


def listed(names: Sequence[str]) -> str:
    """`gpu1, gpu2 and gpu3`; of more than five names four, and the number of the others."""
    shown = [*names[:4], f"{len(names) - 4} more"] if len(names) > 5 else [*names]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


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
                put(text, "value", f'<span role="status"><b>{prose(d.sentence)}</b> {prose(d.cure)}</span>')
                put(cure, "description", ", ".join(describe_field(n, v) for n, v in d.changes.items()) or "Apply")
                put(cure.layout, "display", "" if d.changes else HIDDEN)
        put(self.widget.layout, "display", "" if diagnoses else HIDDEN)
