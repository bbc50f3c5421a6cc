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

from ..events import StepEvent
from ..link_spec import OFFERED
from ..models.check import check
from ..models.presets import PRESETS
from ..spec import BACKENDS, OFFLOADS, PRECISIONS, SHARDINGS, SYNCS, Spec, SpecError, Workload
from .board import running
from .choices import Choices, Standing
from .ports import LabLike, RunLike, SweepLike, TicketLike

AUTO = "auto"
OTHER = "other…"
SWEEPING = "The strategy is the comparison's until it is over. Stop ends it and keeps what is done."
WAITING = "The run waits: see Safety below, or press Stop."
NEEDS_NEW_RUN = ("world_size", "devices")
OFFERED_PARAMETERS = 10**10  # larger presets are there to be planned; by code they can be trained all the same


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of the Spec and how it is chosen.

    `tokens` are the values offered, in order, given the present Spec; a value that is none of them is added, so that
    what was set by code can be seen. None: a whole number between `least` and `most`, or text. `typed` is an example of
    what may be written where none of the tokens is wanted; empty: nothing else may be. `none` is the word for None.
    """

    name: str
    label: str
    help: str
    tokens: Callable[[Spec], Sequence[Any]] | None = None
    least: int | None = None
    most: int = 4096
    typed: str = ""
    none: str = AUTO


def _fixed(*tokens: Any) -> Callable[[Spec], Sequence[Any]]:
    return lambda spec: tokens


def _shard_sizes(spec: Spec) -> Sequence[Any]:
    return (None, *(f for f in range(1, spec.world_size + 1) if spec.world_size % f == 0))


GROUPS: tuple[tuple[str, tuple[Field, ...]], ...] = (
    ("Sharding", (
        Field(name="backend", label="backend", help="Who shards", tokens=_fixed(*BACKENDS)),
        Field(name="sharding", label="sharding", help="What is sharded", tokens=_fixed(*SHARDINGS)),
        Field(name="shard_size", label="shard size", help="Ranks in one shard group", tokens=_shard_sizes),
        Field(name="precision", label="precision", help="dtype of computing and reducing", tokens=_fixed(*PRECISIONS)),
        Field(name="offload", label="offload", help="What is kept on the host", tokens=_fixed(*OFFLOADS)),
        Field(name="wrap", label="wrap", help="What becomes one unit",
              tokens=_fixed("block", "every:2", "every:4", "min_params:100000", "whole")),
    )),
    ("Schedule", (
        Field(name="forward_prefetch", label="forward prefetch", help="Units gathered ahead", least=0, most=16),
        Field(name="backward_prefetch", label="backward prefetch", help="Units gathered ahead", least=0, most=16),
        Field(name="recompute", label="recompute", help="Activations computed again in the backward",
              tokens=_fixed("none", "every:2", "full")),
        Field(name="accumulate", label="accumulate", help="Micro-batches in a step", least=1),
        Field(name="sync", label="sync", help="Micro-batches that communicate", tokens=_fixed(*SYNCS)),
        Field(name="link", label="link", help="A slower interconnect, emulated; of a GPU: scaled to what is computed here",
              tokens=_fixed(None, *OFFERED), typed="0.25 GB/s, 50 us", none="off"),
    )),
    ("Workload", (
        Field(name="model", label="model", help="A change begins at step 0",
              tokens=_fixed(*(name for name, p in PRESETS.items() if p.parameters < OFFERED_PARAMETERS))),
        Field(name="micro_batch", label="micro batch", help="Samples per rank and forward", least=1),
        Field(name="seq_len", label="sequence length", help="Tokens of a sample",
              tokens=_fixed(32, 64, 128, 256, 512, 1024)),
        Field(name="world_size", label="ranks", help="A change starts a new run", least=1, most=256),
        Field(name="devices", label="devices", help="auto, or one a rank: cuda:0, cuda:1. A change starts a new run"),
    )),
)  # fmt: skip


class Control:
    """The widget of one field, with its label above and its note below."""

    def __init__(self, field: Field, spec: Spec, chosen: Callable[[str, Any], None]) -> None:
        self.field = field
        self._chosen = chosen
        self._quiet = False
        self.input = self._make(spec)
        self.input.add_class("fsdp-input")
        self.note = widgets.HTML()
        self.note.add_class("fsdp-note-line")
        self.typed = self._make_typed() if field.typed else None
        self.inputs = [self.input, *([self.typed] if self.typed is not None else [])]  # what a person can change
        self.box = widgets.VBox([*self.inputs, self.note])
        self.box.add_class("fsdp-field")
        self.input.observe(self._changed, "value")

    def _make(self, spec: Spec) -> widgets.Widget:
        f, value = self.field, spec.flat()[self.field.name]
        texts = {"description": f.label, "tooltip": f.help}
        if f.tokens is not None:
            return widgets.Dropdown(options=self._options(spec, value), value=_key(value), **texts)
        if f.least is not None:
            return widgets.BoundedIntText(value=value, min=f.least, max=f.most, **texts)
        return widgets.Text(value=_devices_text(value), placeholder=AUTO, continuous_update=False, **texts)

    def _options(self, spec: Spec, value: Any) -> list[tuple[str, Any]]:
        assert self.field.tokens is not None
        tokens = [*self.field.tokens(spec)]
        if value not in tokens:
            tokens.append(value)
        named = [(self.field.none if t is None else _label(t), _key(t)) for t in tokens]
        return [*named, (OTHER, OTHER)] if self.field.typed else named

    def _make_typed(self) -> widgets.Text:
        """Where a value is written that is not among the tokens; out of sight until it is asked for."""
        hidden = widgets.Layout(display="none")
        typed = widgets.Text(
            placeholder=self.field.typed, tooltip=self.field.help, continuous_update=False, layout=hidden
        )
        typed.add_class("fsdp-input")
        typed.observe(self._written, "value")
        return typed

    @property
    def _asks(self) -> bool:
        """Whether something is to be written that is not among the tokens."""
        return self.typed is not None and self.input.value == OTHER

    def show(self, spec: Spec, value: Any) -> None:
        """Shows a value without taking it for a choice; not while a person is about to write another."""
        if self._asks:
            return
        self._quiet = True
        try:
            if self.field.tokens is not None:
                options = self._options(spec, value)
                if list(self.input.options) != options:
                    self.input.options = options
            shown = _devices_text(value) if self.field.name == "devices" else _key(value)
            if self.input.value != shown:
                self.input.value = shown
        finally:
            self._quiet = False

    def say(self, standing: Standing, text: str) -> None:
        """The note under the control; a refusal's words stand in the group's line, where there is room for them."""
        word = {Standing.REFUSED: "refused, see below", Standing.PENDING: "pending"}.get(standing, text)
        line = f'<span class="fsdp-{standing.value}">{escape(word)}</span>' if word else ""
        if self.note.value != line:
            self.note.value = line
        (self.box.add_class if standing is Standing.REFUSED else self.box.remove_class)("fsdp-held")

    def _changed(self, change: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        value = change["new"]
        if self.typed is not None:
            _set(self.typed.layout, "display", "" if self._asks else "none")
        if self._asks:
            return
        if self.field.name == "devices":
            value = _devices(value)
        elif self.field.tokens is not None:
            value = _unkey(value)
        self._chosen(self.field.name, value)

    def _written(self, change: Mapping[str, Any]) -> None:
        text, typed = change["new"].strip(), change["owner"]
        if not text:
            return
        self._quiet = True
        try:
            self.input.options = [*self.input.options, (text, text)]
            self.input.value = text
            typed.value = ""
        finally:
            self._quiet = False
        _set(typed.layout, "display", "none")
        self._chosen(self.field.name, text)


class Group:
    """A named row of controls and the line under it that explains refusals."""

    def __init__(self, title: str, controls: Sequence[Control], accept: Callable[[Mapping[str, Any]], None]) -> None:
        self.names = [c.field.name for c in controls]
        head = widgets.HTML(f"<h4>{escape(title)}</h4>")
        head.add_class("fsdp-group-head")
        row = widgets.Box([c.box for c in controls])
        row.add_class("fsdp-group-row")
        self._words = widgets.HTML()
        self._words.add_class("fsdp-refusal")
        self.button = widgets.Button(description="", layout=widgets.Layout(display="none"))
        self.button.add_class("fsdp-fix")
        self.button.on_click(lambda _: accept(self._fix))
        self._fix: dict[str, Any] = {}
        self._line = widgets.Box([self._words, self.button], layout=widgets.Layout(display="none"))
        self._line.add_class("fsdp-refusal-line")
        self.box = widgets.VBox([head, row, self._line])
        self.box.add_class("fsdp-group")

    def explain(self, choices: Choices) -> None:
        """The reasons of what is refused in this group, and a button for the way out where there is one."""
        refused = [(n, choices.notes[n]) for n in self.names if n in choices.held and n in choices.notes]
        text = "<br>".join(escape(_sentence(note.text)) for _, note in refused)
        self._fix = {}
        for name, note in refused:
            if note.fix:
                self._fix = {name: choices.held[name], **note.fix}
        more = {n: v for n, v in self._fix.items() if n not in choices.held or v != choices.held[n]}
        also = "" if any(n in choices.held for n in more) else "Also "
        label = f"{also}set ".capitalize() + ", ".join(_said(n, v) for n, v in more.items()) if more else ""
        _set(self._words, "value", text)
        _set(self.button, "description", label)
        _set(self.button.layout, "display", "" if label else "none")
        _set(self._line.layout, "display", "" if text else "none")


@dataclass(frozen=True, kw_only=True)
class Extra:
    """A button beside those of the run. What `press` raises is said in the line of the state."""

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
    ticket: TicketLike | None  # None where a new run was started for it


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
        self.choices = Choices(lab.spec, check=self._check)
        self._sent: list[_Sent] = []
        self._complaint = ""
        self._controls = {f.name: Control(f, self.choices.wanted, self._choose) for _, fields in GROUPS for f in fields}
        self._groups = [Group(title, [self._controls[f.name] for f in fields], self.accept) for title, fields in GROUPS]
        self._start = self._button("Start", "play", "Begin at step 0", self.start)
        self._pause = self._button("Pause", "pause", "Hold after the running chunk", self.pause)
        self._stop = self._button("Stop", "stop", "End the run; the ranks stay", self.stop)
        self._ledger = self._button(
            "Memory", "microscope", "Measure memory in the next step, which that slows", self.ledger
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
        """Begins a run with what is chosen; goes on with one that is paused."""
        run = self._alive()
        if run is not None and run.state.name == "PAUSED":
            run.resume()
        else:
            self._begin({})

    def pause(self) -> None:
        """Holds the run, or goes on with it."""
        run = self._alive()
        if run is not None:
            (run.resume if run.state.name == "PAUSED" else run.pause)()

    def stop(self) -> None:
        """Leaves word that the run, or the whole comparison, is to end: at once, whatever the ranks are doing."""
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
        except SpecError as e:
            self.choices.revert(accepted, run.pending or run.spec, e)
            return
        self._await(accepted, wanted, run, ticket)

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

    def _await(self, names: Mapping[str, Any], spec: Spec, run: RunLike, ticket: TicketLike | None) -> None:
        for name in names:
            self.choices.note(name, Standing.PENDING, "pending")
        self._sent.append(_Sent(names=dict(names), spec_id=spec.id, run=run, ticket=ticket))

    def _sweep(self) -> SweepLike | None:
        """The comparison that goes on."""
        sweep = self._lab.sweep
        return None if sweep is None or sweep.done else sweep

    def _alive(self) -> RunLike | None:
        run = self._lab.current
        return None if run is None or run.state.over else run

    def _guarded(self, act: Callable[[], None]) -> None:
        """Does it under the lock, and says in words what went wrong: a handler has nobody to raise to."""
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
            except SpecError as e:
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
            group.explain(self.choices)

    def _show_state(self) -> None:
        run, sweeping = running(self._lab), self._sweep() is not None
        alive = run is not None and not run.state.over
        paused = run is not None and run.state.name == "PAUSED" and not sweeping
        stopping = run is not None and run.state.name == "STOPPING"
        broken = run is not None and run.state.name in ("BROKEN", "RECOVERING")
        for control in (i for c in self._controls.values() for i in c.inputs):
            _set(control, "disabled", sweeping)
        _set(self._start, "disabled", sweeping or (alive and not paused))
        _set(self._pause, "disabled", sweeping or not alive or stopping or broken)
        _set(self._pause, "description", "Resume" if paused else "Pause")
        _set(self._pause, "icon", "play" if paused else "pause")
        _set(self._stop, "disabled", not sweeping and (not alive or stopping))
        _set(self._ledger, "disabled", sweeping or not alive or stopping or broken)
        word = "comparing" if sweeping else run.state.value if run is not None else "ready"
        reason = self._complaint or (
            SWEEPING if sweeping else WAITING if broken else run.reason if run is not None else "Press Start to train."
        )
        more = run.details if run is not None and not self._complaint else ""
        css = f"fsdp-state fsdp-state-{word}"
        _set(self._state, "value", f'<span class="{css}" role="status">{escape(word)}</span> '
             f"<span>{escape(reason or (self._lab.waiting if alive else ''))}</span>{_folded(more)}")  # fmt: skip

    def _check(self, spec: Spec) -> None:
        """What a Spec cannot know of its workload. The last one found good is remembered: most choices leave it."""
        if spec.workload != self._checked:
            check(spec.workload)
            self._checked = spec.workload


def _folded(lines: str) -> str:
    """Lines that are shown when they are asked for."""
    if not lines:
        return ""
    return f'<details class="fsdp-details"><summary>Details</summary><pre>{escape(lines)}</pre></details>'


def _set(widget: Any, name: str, value: Any) -> None:
    """Sets a trait only where it changes: each set is a message."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def _key(value: Any) -> Any:
    """A dropdown's value for a field's value: None means no choice to ipywidgets, and what cannot be hashed is wrapped."""
    if value is None:
        return AUTO
    return value if isinstance(value, (str, int)) else _Opaque(value)


def _unkey(value: Any) -> Any:
    if value == AUTO:
        return None
    return value.value if isinstance(value, _Opaque) else value


@dataclass(frozen=True)
class _Opaque:
    """A value that code has set and a dropdown shows: a config, a precision by parts."""

    value: Any

    def __hash__(self) -> int:
        return hash(repr(self.value))


def _label(value: Any) -> str:
    if value is None:
        return AUTO
    if isinstance(value, _Opaque):
        return _label(value.value)
    if isinstance(value, Mapping):
        return str(value.get("model_type") or "/".join(str(v) for v in value.values() if v))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _said(name: str, value: Any) -> str:
    """A field and a value of it, in words."""
    field = next((f for _, fields in GROUPS for f in fields if f.name == name), None)
    label = field.label if field is not None else name.replace("_", " ")
    return f"{label} {field.none if field is not None and value is None else _label(value)}"


def _sentence(text: str) -> str:
    """A SpecError's "field: reason; way out" as two sentences. A reason that starts with its value stays as it is."""
    _, _, rest = text.partition(": ")
    reason, _, way_out = (rest or text).partition("; ")
    return " ".join(
        f"{part[0].upper()}{part[1:]}." if part is way_out else f"{part}." for part in (reason, way_out) if part
    )


def _devices(text: str) -> list[str] | None:
    names = [part.strip() for part in text.split(",") if part.strip()]
    return None if not names or names == [AUTO] else names


def _devices_text(value: Any) -> str:
    return "" if value is None else ", ".join(value)
