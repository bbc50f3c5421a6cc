"""The controls: an input for each field of the Spec, Start, Pause and Stop, and beside each input its state. The bar with
the buttons and the main fields stays on the screen while the page scrolls; `Controls.settings` has the other fields.

A choice goes from its widget to `Choices` (is it possible?), to `Run.apply` or `Lab.run`, and until the first event of the
new Spec, which turns "pending" into "applied at step k". Handlers run on the thread that the page's message arrives on,
`tick` on the tick thread; one lock orders them. Nothing here waits for a rank."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.dashboard import fields
from fsdp_lab.dashboard.fields import Choices, ChoiceState, Control, Group, Note, RefusalLine
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, prose, put, styled
from fsdp_lab.dashboard.lab_like import LabLike, active_loop, active_run, active_sweep, held_step, shown_run
from fsdp_lab.models.check import check
from fsdp_lab.planner.questions import DoesNotFit
from fsdp_lab.runs import Run, RunState, SwitchRequest, WatchedRun
from fsdp_lab.spec.describe import field_title
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.workload import LINEAGE, Workload

SWEEPING = "A comparison is running, so the strategy cannot be changed. Stop ends it and keeps what was measured."
WATCHING = "This loop is your own: what it trains and how is in its code. Stop interrupts its cell."
WAITING = "Recover it, or press Stop."
HELD = "The ranks hold what was trained up to step {step:,}."
IDLE = "Press Start to train."
RESTARTS = "With another {field} training begins at step 0, with the next start: press Stop, and Start over."
CLOSED = "The lab is closed. Make another one and run this cell again."
# Tooltips: live.js presses the button whose tooltip ends with a key, as of Next in slow motion.
PAUSES, RESUMES = "Pause after the steps in progress. Key: space", "Go on with the run. Key: space"
CONTINUES = "Train on from the step that the ranks hold"
FRESH_STEPS = 20  # after which an applied choice is no longer marked as new


@dataclass(kw_only=True)
class _Sent:
    """An accepted choice on its way to the ranks."""

    names: dict[str, Any]
    spec_id: str
    run: Run
    request: SwitchRequest | None  # None where a new run was started for it


class Controls(InputForm):
    """All controls of one lab. During a comparison they are disabled but for Stop, which ends it, because its runs have
    Specs of their own."""

    css = "fsdp"

    def __init__(
        self, lab: LabLike, below: Sequence[widgets.Widget] = (), options: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        """`below` is placed at the end of the bar; `options` are for `Lab.run`."""
        super().__init__()
        self._lab, self._options = lab, options
        self._lock = threading.RLock()
        self._checked: Workload | None = None
        first, untouched = lab.spec, lab.current is None and not lab.attached
        if untouched and first.workload == Workload() and set(lab.devices) == {"cpu"}:
            first = first.replace(model=fields.FIRST_MODEL_ON_CPUS)
        self.choices = Choices(first, check=self._check)
        self._sent: list[_Sent] = []
        self._ranks = len(lab.devices)
        self._too_large: Spec | None = None  # what Start refused
        self._complaint = ""
        self._start = self.button("Start", "play", "Start training at step 0", self.start)
        self._pause = self.button("Pause", "pause", PAUSES, self.pause)
        self._stop = self.button("Stop", "stop", "End the run and keep the ranks", self.stop)
        self._undo = self.button("Undo", "undo", "Take the last change back", self.undo)
        slower = "Profile memory in the next step (slower)"
        self._ledger = self.button("Profile memory", "microscope", slower, self.ledger)
        self._state = styled(widgets.HTML(), "fsdp-state-line")
        self._bar = styled(widgets.Box([*self.inputs, self._state]), "fsdp-bar")
        self.message = styled(widgets.HTML(), "fsdp-notice-text")
        self._notice = styled(widgets.Box([self.message]), "fsdp-notice")
        rows = [fields.CONTROLS[row.name] for title in fields.TITLES for row in fields.controls_of(title)]
        self._controls = {row.name: Control(row, first, lambda name, v: self.accept({name: v})) for row in rows}
        self._groups = [Group(title, self._controls) for title in fields.TITLES]
        self._refusals = RefusalLine(self.accept)
        self._fields = [widget for control in self._controls.values() for widget in control.inputs]
        self._fields.append(self._refusals.button)
        self.inputs += [*self._fields, *(group.fold for group in self._groups if group.fold is not None)]
        self.settings = styled(widgets.Box([group.box for group in self._groups]), "fsdp-groups")
        main = styled(widgets.Box([self._controls[name].box for name in fields.MAIN]), "fsdp-main")
        headline = styled(widgets.HTML(), "fsdp-headline-place")  # the live view writes into it
        self._difference = styled(widgets.HTML(), "fsdp-difference")
        lines = [self._refusals.widget, self._notice, *below, headline, self._difference]
        self.widget = styled(widgets.VBox([self._bar, main, *lines]), "fsdp-controls")
        self._show()

    def add_button(self, text: str, icon: str, tooltip: str, press: Callable[[], Any]) -> widgets.Button:
        """Adds a button to the bar. An error of `press` is shown below it."""
        *buttons, state = self._bar.children
        button = self.button(text, icon, tooltip, press)
        self._bar.children = [*buttons, button, state]
        return button

    def start(self) -> None:
        """Starts a run with the chosen values."""
        self._begin()

    def pause(self) -> None:
        """Pauses or resumes the run. Without one, starts a run that continues with what the ranks hold."""
        if (run := active_run(self._lab)) is not None:
            (run.resume if run.state is RunState.PAUSED else run.pause)()
        elif self._held() is not None:
            self._begin(fresh=False)

    def _held(self) -> int | None:
        """The step at which the ranks continue, if they train what is chosen; None: they begin at step 0."""
        if (step := held_step(self._lab)) is None:  # while ranks move there are none, and no Spec of theirs
            return None
        return None if {*LINEAGE, *fields.RANK_FIELDS} & {*self._lab.spec.difference(self.choices.wanted)} else step

    def stop(self) -> None:
        """Requests that the run, or the whole comparison, ends at once, whatever the ranks are doing."""
        if (active := active_sweep(self._lab) or active_run(self._lab) or active_loop(self._lab)) is not None:
            active.stop(0)

    def undo(self) -> None:
        """Takes the last accepted choice back."""
        if self.choices.former:
            self._send(self.choices.undo())

    def tell_difference(self, text: str) -> None:
        """Shows how the newest run differs from the one that is kept; "": none is."""
        put(self._difference, "value", f'<span role="status">{prose(text)}</span>' if text else "")
        put(self._difference.layout, "display", "" if text else HIDDEN)

    def ledger(self) -> None:
        if (run := active_run(self._lab)) is not None:
            run.ledger()

    def slow_motion_spec(self) -> Spec | None:
        """Returns the Spec of the next step in slow motion; None: what the ranks hold, which code may have changed."""
        with self._lock:
            if (run := active_run(self._lab)) is not None:
                return run.pending or run.spec
            return self.choices.wanted if self._lab.current is None or self._waiting() else None

    def _waiting(self) -> dict[str, Any]:
        """The choices that wait for the next start."""
        wanted, notes = self.choices.wanted.flat(), self.choices.notes
        return {name: wanted[name] for name, note in notes.items() if note.state is ChoiceState.NEXT}

    def accept(self, values: Mapping[str, Any]) -> None:
        """Takes field values that belong together, as if a person had chosen them."""
        self.attempt(lambda: self._send(self.choices.choose(**values)))

    def _send(self, accepted: dict[str, Any]) -> None:
        """Applies what is accepted to the active run, or lets it wait for one."""
        if not accepted:
            return
        run = active_run(self._lab)
        if run is None or self._restarting:
            self.choices.note(accepted, ChoiceState.NEXT, "with the next start")
            return
        accepted |= self._waiting()  # a field of LINEAGE that is as before again holds nothing back
        try:
            request = run.apply(self.choices.wanted)
        except FieldError as e:
            self.choices.revert(accepted, run.pending or run.spec, e)
        else:
            self._await(accepted, self.choices.wanted, run, request)

    @property
    def _restarting(self) -> str:
        """The chosen field with which the active run would begin at step 0: it waits for a start. "": there is none."""
        run = active_run(self._lab)
        if run is None or not run.step:
            return ""
        return min(set((run.pending or run.spec).difference(self.choices.wanted)) & set(LINEAGE), default="")

    def _begin(self, *, fresh: bool = True) -> None:
        """Starts a run; choices that waited for one become pending with it."""
        wanted, waiting = self.choices.wanted, self._waiting()
        again = {"anyway": True} if wanted == self._too_large else {}
        try:
            run = self._lab.run(wanted, fresh=fresh, **self._options(), **again)
        except DoesNotFit as e:
            self._too_large = wanted
            raise e.with_way_out("press Start again to start it all the same") from e
        self._sent.clear()
        self.choices.note([n for n, note in self.choices.notes.items() if note.step is not None], ChoiceState.IDLE, "")
        self._await(waiting, wanted, run, None)

    def begin(self, start: Callable[[Mapping[str, Any]], Run]) -> None:
        """Shows a run that was not started by Start: `start` is given the choices that wait for one, and may raise."""
        with self._lock:
            waiting = self._waiting()
            run = start(waiting)
            self._complaint = ""
            self._sent.clear()
            self.choices.adopt(run.spec)
            self._await(waiting, run.spec, run, None)
            self._show()

    def _await(self, names: Mapping[str, Any], spec: Spec, run: Run, request: SwitchRequest | None) -> None:
        self.choices.note(names, ChoiceState.PENDING, "pending")
        self._sent.append(_Sent(names=dict(names), spec_id=spec.id, run=run, request=request))

    def attempt(self, action: Callable[[], Any]) -> None:
        with self._lock:
            self._complaint = ""
            super().attempt(action)
            self._show()

    def say(self, text: str, *, wrong: bool = False) -> None:
        """Shows what went wrong below the buttons, until the next thing that a person does."""
        with self._lock:
            self._complaint = text
            self._show_state()

    def tick(self, run: Run | None, events: Sequence[StepEvent]) -> None:
        """Settles what is pending, follows what code has changed, and shows the state."""
        with self._lock:
            before = (dict(self.choices.notes), self.choices.wanted)
            self._sent = [s for s in self._sent if not self._settled(s, run, events)]
            if run is not None and not self._sent and active_sweep(self._lab) is None:
                spec = run.pending or run.spec  # code may change it, too
                if spec.id != self.choices.wanted.id and not run.state.over and not self._waiting():
                    self.choices.adopt(spec)
            if (ranks := len(self._lab.devices)) not in (0, self._ranks):  # as by `lab.move`
                self._ranks = ranks
                if active_run(self._lab) is None and ranks != self.choices.wanted.world_size:
                    self._send(self.choices.choose(world_size=ranks, devices=None))
            for name, note in self.choices.notes.items():
                if run is not None and note.state is ChoiceState.APPLIED and (note.step or 0) < run.step - FRESH_STEPS:
                    self.choices.notes[name] = replace(note, state=ChoiceState.IDLE)
            changed = before != (self.choices.notes, self.choices.wanted)
            (self._show if changed else self._show_state)()

    def retire(self) -> None:
        with self._lock:
            super().retire()
            self._state.value = f'<span class="fsdp-state fsdp-state-stopped" role="status">closed</span> {CLOSED}'

    def _settled(self, sent: _Sent, run: Run | None, events: Sequence[StepEvent]) -> bool:
        """Says whether a sent choice has been applied, refused, or overtaken by the run's end."""
        step = None
        if sent.request is None:
            first = next((s for s in sent.run.switches if s.after.id == sent.spec_id), None)
            if first is not None and any(e.run == sent.run.id for e in events):
                step = first.step
        elif sent.request.done:
            try:
                step = sent.request.wait(0).step
            except FieldError as e:
                self.choices.revert(sent.names, sent.run.pending or sent.run.spec, e)
                return True
            except Exception:  # the run is over, and its state says why
                step = None
        if step is not None:
            self.choices.note(sent.names, ChoiceState.APPLIED, f"applied at step {step}", step)
            return True
        if sent.run.state.over or run is None or run.id != sent.run.id:
            self.choices.note(sent.names, ChoiceState.NEXT, "with the next start")
            return True
        return False

    def _show(self) -> None:
        for name, control in self._controls.items():
            control.show(self.choices.wanted, self.choices.value(name))
            note = self.choices.notes.get(name, Note())
            control.say(note.state, note.text)
        for group in self._groups:
            group.summarize(self.choices)
        self._refusals.explain(self.choices)
        self._show_state()

    def _show_state(self) -> None:
        run, sweeping = shown_run(self._lab), active_sweep(self._lab) is not None
        state = run.state if run is not None else None
        active = state is not None and not state.over
        paused = state is RunState.PAUSED and not sweeping
        stopping = state is RunState.STOPPING
        broken = state in (RunState.BROKEN, RunState.RECOVERING)
        watching = active_loop(self._lab) is not None and not sweeping
        for widget in self._fields:
            put(widget, "disabled", sweeping or watching)
        held = None if active or sweeping or state is RunState.FAILED else self._held()
        put(self._start, "disabled", sweeping or active)
        put(self._start, "description", "Start" if held is None else "Start over")
        put(self._start, "button_style", "primary" if held is None else "")
        put(self._pause, "disabled", sweeping or watching or (not active and held is None) or stopping or broken)
        put(self._pause, "description", "Resume" if paused else "Pause" if held is None else "Continue")
        put(self._pause, "tooltip", RESUMES if paused else PAUSES if held is None else CONTINUES)
        put(self._pause, "icon", "pause" if held is None and not paused else "play")
        put(self._pause, "button_style", "" if held is None else "primary")
        put(self._stop, "disabled", not sweeping and (not active or stopping))
        put(self._ledger, "disabled", sweeping or watching or not active or stopping or broken)
        former = ", ".join(fields.value_text(fields.CONTROLS[n], v) for n, v in self.choices.former.items())
        put(self._undo, "disabled", sweeping or watching or not former)
        put(self._undo, "tooltip", f"Back to {former}" if former else "No change to take back")
        word = "comparing" if sweeping else state.value if state is not None else "ready"
        css, text = f"fsdp-state fsdp-state-{word}", SWEEPING if sweeping else self._sentence(run, held)
        put(self._state, "value", f'<span class="{css}" role="status">{escape(word)}</span> <span>{prose(text)}</span>')
        self._show_notice(run if state is RunState.FAILED and not sweeping else None)

    def _sentence(self, run: Run | WatchedRun | None, held: int | None) -> str:
        if run is not None and run.state in (RunState.BROKEN, RunState.RECOVERING):
            return WAITING
        if run is not None and run.reason:
            return "" if run.state is RunState.FAILED else run.reason
        if held is not None:
            return HELD.format(step=held)
        if run is None:
            return IDLE
        return WATCHING if active_loop(self._lab) is not None else "" if run.state.over else self._lab.waiting

    def _show_notice(self, failed: Run | WatchedRun | None) -> None:
        """The row below the buttons: what was refused, what waits for a start, or why the run failed."""
        text = self._complaint or (failed.reason if failed is not None else "")
        if not text and (name := self._restarting) and active_sweep(self._lab) is None:
            text = RESTARTS.format(field=field_title(name))
        said = prose(f"{text[:1].upper()}{text[1:]}")
        details = failed.details if failed is not None and text == failed.reason else ""
        if details:
            details = f'<details class="fsdp-details"><summary>Details</summary><pre>{escape(details)}</pre></details>'
        put(self.message, "value", f'<span role="alert">{said}</span>{details}' if text else "")
        put(self._notice.layout, "display", "" if text else HIDDEN)

    def _check(self, spec: Spec) -> None:
        """Checks what a Spec cannot of its workload. The last valid one is remembered: most choices do not change it."""
        if spec.workload != self._checked:
            check(spec.workload)
            self._checked = spec.workload
