"""The controls: one widget a field of the Spec, Start, Pause and Stop, and beside each what became of it.

A choice goes widget -> `Choices` (can it be?) -> `Run.apply` or `Lab.run` -> the first event of the new Spec, which turns
"pending" into "applied at step k". Handlers run on whatever thread the page's message arrives on, `tick` on the tick
thread; one lock orders them. Nothing here waits for a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.spec import Spec, Workload
from fsdp_lab.dashboard.board import running
from fsdp_lab.dashboard.choices import Choices, Standing
from fsdp_lab.dashboard.fields import GROUPS, LIVELY, Control, Group, Offer
from fsdp_lab.dashboard.parts import put
from fsdp_lab.dashboard.ports import LabLike, RunLike, SweepLike, SwitchRequestLike
from fsdp_lab.models.check import check

SWEEPING = "A comparison is running, so the strategy cannot be changed. Stop ends it and keeps what was measured."
WAITING = "The run waits: see Safety below, or press Stop."
NEEDS_NEW_RUN = ("world_size", "devices")


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A button beside those of the run. An error of `press` is shown beside the state."""

    word: str
    icon: str
    tooltip: str
    press: Callable[[], Any]


@dataclass(kw_only=True)
class _Sent:
    """An accepted choice on its way to the ranks."""

    names: dict[str, Any]
    spec_id: str
    run: RunLike
    ticket: SwitchRequestLike | None  # None where a new run was started for it


class Controls:
    """All controls of one lab. `widget` is to be shown; `tick` to be called with what the run says.

    While a comparison goes on they rest: its runs are its own, and Stop ends it.
    """

    def __init__(
        self,
        lab: LabLike,
        more: Sequence[Extra] = (),
        below: Sequence[widgets.Widget] = (),
        options: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """`more` buttons stand in the bar, what is `below` between it and the fields; `options` are for `Lab.run`."""
        self._lab, self._options = lab, options
        self._lock = threading.RLock()
        self._checked: Workload | None = None
        self.choices = Choices(_first(lab), check=self._check)
        self._sent: list[_Sent] = []
        self._complaint = ""
        self._controls = {f.name: Control(f, self.choices.wanted, self._choose) for _, fields in GROUPS for f in fields}
        every = [f for _, fields in GROUPS for f in fields]
        self._groups = [
            Group(title, [self._controls[f.name] for f in fields], self.accept, every) for title, fields in GROUPS
        ]
        self._start = self._button("Start", "play", "Start training at step 0", self.start)
        self._pause = self._button("Pause", "pause", "Pause after the steps in progress", self.pause)
        self._stop = self._button("Stop", "stop", "End the run and keep the ranks", self.stop)
        self._ledger = self._button(
            "Profile memory", "microscope", "Profile memory in the next step (slower)", self.ledger
        )
        self._more = [self._button(e.word, e.icon, e.tooltip, e.press) for e in more]
        self._start.button_style = "primary"
        self._state = widgets.HTML()
        self._state.add_class("fsdp-state-line")
        bar = widgets.Box([self._start, self._pause, self._stop, self._ledger, *self._more, self._state])
        bar.add_class("fsdp-bar")
        groups = widgets.Box([g.box for g in self._groups])
        groups.add_class("fsdp-groups")
        self.widget = widgets.VBox([bar, *below, groups])
        self.widget.add_class("fsdp-controls")
        self._show()
        self._show_state()

    @property
    def answering(self) -> list[widgets.Widget]:
        """The widgets that must answer while a cell runs."""
        return [self._start, self._pause, self._stop, self._ledger, *self._more, *(g.button for g in self._groups),
                *(i for c in self._controls.values() for i in c.inputs)]  # fmt: skip

    def _button(self, word: str, icon: str, tooltip: str, press: Callable[[], Any]) -> widgets.Button:
        button = widgets.Button(description=word, icon=icon, tooltip=tooltip)
        button.add_class("fsdp-button")
        button.on_click(lambda _: self._guarded(press))
        return button

    # -- what a person does ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts a run with the chosen values; resumes a paused one."""
        run = self._alive()
        if run is not None and run.state.name == "PAUSED":
            run.resume()
        else:
            self._begin({})

    def pause(self) -> None:
        """Pauses or resumes the run."""
        run = self._alive()
        if run is not None:
            (run.resume if run.state.name == "PAUSED" else run.pause)()

    def stop(self) -> None:
        """Requests that the run, or the whole comparison, ends at once, whatever the ranks are doing."""
        run = self._alive()
        if (sweep := self._sweep()) is not None:
            sweep.stop(0)
        elif run is not None:
            run.stop(0)

    def ledger(self) -> None:
        """Makes the next step a ledger step."""
        run = self._alive()
        if run is not None:
            run.ledger()

    def for_a_step(self) -> Spec | None:
        """What a step in slow motion is to be trained with; None: what the ranks hold, which code may have changed."""
        with self._lock:
            run = self._alive()
            if run is not None:
                return run.pending or run.spec
            return self.choices.wanted if self._lab.current is None or self._waiting else None

    @property
    def _waiting(self) -> bool:
        """Whether a choice waits for the next start."""
        return any(note.standing is Standing.NEXT for note in self.choices.notes.values())

    def _choose(self, name: str, value: Any) -> None:
        self._guarded(lambda: self._take({name: value}))

    def accept(self, values: Mapping[str, Any]) -> None:
        """Takes field values that belong together, as if a person had chosen them."""
        self._guarded(lambda: self._take(dict(values)))

    def _take(self, values: Mapping[str, Any]) -> None:
        accepted = self.choices.choose(**values)
        if not accepted:
            return
        run = self._alive()
        if run is None:
            for name in accepted:
                self.choices.note(name, Standing.NEXT, "with the next start")
        elif any(name in accepted for name in NEEDS_NEW_RUN):
            self._begin(accepted)
        else:
            self._send(run, accepted)

    def _send(self, run: RunLike, accepted: Mapping[str, Any]) -> None:
        wanted = self.choices.wanted
        try:
            ticket = run.apply(wanted)
        except FieldError as e:
            self.choices.revert(accepted, run.pending or run.spec, e)
            return
        self._await(accepted, wanted, run, ticket)

    def _offer(self, fix: Mapping[str, Any]) -> Offer:
        """What a way out does; one that needs other ranks ends the run."""
        if self._sweep() is not None:
            return Offer(blocked=SWEEPING)
        ranks, most = fix.get("world_size"), self._lab.most_ranks
        if ranks is not None and most is not None and ranks > most:
            return Offer(blocked=f"The given cluster has {most} engine{'s' * (most != 1)}; start more of them first.")
        if self._alive() is not None and any(name in fix for name in NEEDS_NEW_RUN):
            return Offer(effect="Another number of ranks stops this run and starts a new one at step 0.")
        return Offer()

    def _begin(self, accepted: Mapping[str, Any]) -> None:
        """A new run; choices that waited for one are on their way with it."""
        wanted = self.choices.wanted
        waiting = self._next()
        run = self._lab.run(wanted, **self._options())
        self._sent.clear()
        self._await({**waiting, **accepted}, wanted, run, None)

    def begin(self, start: Callable[[Mapping[str, Any]], RunLike]) -> None:
        """A run that something else than Start begins: `start` is given the choices that waited for one, and may raise."""
        with self._lock:
            waiting = self._next()
            run = start(waiting)
            self._complaint = ""
            self._sent.clear()
            self.choices.adopt(run.spec)
            self._await(waiting, run.spec, run, None)
            self._show()
            self._show_state()

    def _next(self) -> dict[str, Any]:
        """The choices that wait for a start."""
        wanted = self.choices.wanted.flat()
        return {n: wanted[n] for n, note in self.choices.notes.items() if note.standing is Standing.NEXT}

    def _await(self, names: Mapping[str, Any], spec: Spec, run: RunLike, ticket: SwitchRequestLike | None) -> None:
        for name in names:
            self.choices.note(name, Standing.PENDING, "pending")
        self._sent.append(_Sent(names=dict(names), spec_id=spec.id, run=run, ticket=ticket))

    def _sweep(self) -> SweepLike | None:
        """The comparison in progress."""
        sweep = self._lab.sweep
        return None if sweep is None or sweep.done else sweep

    def _alive(self) -> RunLike | None:
        run = self._lab.current
        return None if run is None or run.state.over else run

    def _guarded(self, act: Callable[[], None]) -> None:
        """Runs the action under the lock and shows its error: nobody can catch what a widget handler raises."""
        with self._lock:
            self._complaint = ""
            try:
                act()
            except Exception as e:
                self._complaint = str(e) or type(e).__name__
            self._show()
            self._show_state()

    # -- what the ranks say ---------------------------------------------------------------------------------------

    def tick(self, run: RunLike | None, events: Sequence[StepEvent]) -> None:
        """Settles what is pending, follows what code has changed, and shows the state."""
        with self._lock:
            before = (dict(self.choices.notes), self.choices.wanted)
            self._sent = [s for s in self._sent if not self._settled(s, run, events)]
            if run is not None and not self._sent and self._sweep() is None:
                self._follow(run)
            if before != (self.choices.notes, self.choices.wanted):
                self._show()
            self._show_state()

    def complain(self, text: str) -> None:
        """Says in the line of the state what went wrong, until the next thing that is done."""
        with self._lock:
            self._complaint = text
            self._show_state()

    def retire(self, why: str) -> None:
        """Nothing can be done any more."""
        with self._lock:
            buttons = (self._start, self._pause, self._stop, self._ledger, *self._more)
            for control in (*buttons, *(i for c in self._controls.values() for i in c.inputs)):
                control.disabled = True
            self._state.value = f'<span class="fsdp-state fsdp-state-stopped" role="status">closed</span> {escape(why)}'

    def _settled(self, sent: _Sent, run: RunLike | None, events: Sequence[StepEvent]) -> bool:
        """Whether a sent choice has been applied, refused, or overtaken by the run's end."""
        step = None
        if sent.ticket is None:
            first = next((s for s in sent.run.switches if s.after.id == sent.spec_id), None)
            if first is not None and any(e.run == sent.run.id for e in events):
                step = first.step
        elif sent.ticket.done:
            try:
                step = sent.ticket.wait(0).step
            except FieldError as e:
                self.choices.revert(sent.names, sent.run.pending or sent.run.spec, e)
                return True
            except Exception:  # the run is over, and its state says why
                step = None
        if step is not None:
            for name in sent.names:
                self.choices.note(name, Standing.APPLIED, f"applied at step {step}")
            return True
        if sent.run.state.over or run is None or run.id != sent.run.id:
            for name in sent.names:
                self.choices.note(name, Standing.NEXT, "with the next start")
            return True
        return False

    def _follow(self, run: RunLike) -> None:
        """Code may change a run, too: the controls show what it trains."""
        spec = run.pending or run.spec
        if spec.id != self.choices.wanted.id and not run.state.over and not self._waiting:
            self.choices.adopt(spec)

    # -- what is shown --------------------------------------------------------------------------------------------

    def _show(self) -> None:
        for name, control in self._controls.items():
            control.show(self.choices.wanted, self.choices.value(name))
            note = self.choices.notes.get(name)
            control.say(note.standing if note else Standing.IDLE, note.text if note else "")
        for group in self._groups:
            group.explain(self.choices, self._offer)

    def _show_state(self) -> None:
        run, sweeping = running(self._lab), self._sweep() is not None
        alive = run is not None and not run.state.over
        paused = run is not None and run.state.name == "PAUSED" and not sweeping
        stopping = run is not None and run.state.name == "STOPPING"
        broken = run is not None and run.state.name in ("BROKEN", "RECOVERING")
        for control in (i for c in self._controls.values() for i in c.inputs):
            put(control, "disabled", sweeping)
        put(self._start, "disabled", sweeping or (alive and not paused))
        put(self._pause, "disabled", sweeping or not alive or stopping or broken)
        put(self._pause, "description", "Resume" if paused else "Pause")
        put(self._pause, "icon", "play" if paused else "pause")
        put(self._stop, "disabled", not sweeping and (not alive or stopping))
        put(self._ledger, "disabled", sweeping or not alive or stopping or broken)
        word = "comparing" if sweeping else run.state.value if run is not None else "ready"
        reason = self._complaint or (
            SWEEPING if sweeping else WAITING if broken else run.reason if run is not None else "Press Start to train."
        )
        more = run.details if run is not None and not self._complaint else ""
        css = f"fsdp-state fsdp-state-{word}"
        put(self._state, "value", f'<span class="{css}" role="status">{escape(word)}</span> '
             f"<span>{escape(reason or (self._lab.waiting if alive else ''))}</span>{_folded(more)}")  # fmt: skip

    def _check(self, spec: Spec) -> None:
        """What a Spec cannot know of its workload. The last one found good is remembered: most choices leave it."""
        if spec.workload != self._checked:
            check(spec.workload)
            self._checked = spec.workload


def _first(lab: LabLike) -> Spec:
    """What the controls begin with: the lab's Spec, on CPUs with a small model in place of the default one."""
    spec = lab.spec
    untouched = lab.current is None and not lab.attached and spec.workload == Workload()
    return spec.replace(model=LIVELY) if untouched and set(lab.devices) == {"cpu"} else spec


def _folded(lines: str) -> str:
    """Lines that are shown when they are asked for."""
    if not lines:
        return ""
    return f'<details class="fsdp-details"><summary>Details</summary><pre>{escape(lines)}</pre></details>'
