"""`Choices`, the field values that are chosen: pending, applied, or refused; and the inputs for them: `Control`, of one
field by its row, `Group`, a titled row of them, and `RefusalLine`, which says why choices are refused.

A refused choice is held back with its reason, and tried again with every later choice, so that a combination can be made
in any order: backend ddp is refused under full_shard, and accepted once no_shard is chosen."""

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Generic, Protocol, Self, TypeVar

import ipywidgets as widgets

from fsdp_lab.base.errors import FieldError
from fsdp_lab.dashboard.forms import HIDDEN, put, styled, unfold
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.spec.describe import describe_value, row_of
from fsdp_lab.spec.fields import AUTO, FieldRow, rows_of
from fsdp_lab.spec.spec import Spec, Strategy
from fsdp_lab.spec.workload import OWN, Workload

MOST_FIXES = 6


class ChoiceState(enum.Enum):
    IDLE = "idle"
    NEXT = "next"  # takes effect with the next start
    PENDING = "pending"
    APPLIED = "applied"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Note:
    """The text beside a control. Of a refused choice, `why` says the same in sentences, without the field's name, and `fix`
    has further field values that would make it possible."""

    state: ChoiceState = ChoiceState.IDLE
    text: str = ""
    step: int | None = None  # at which an applied one took effect
    why: str = ""
    fix: Mapping[str, Any] = field(default_factory=dict)


def _refused(error: FieldError, fix: Mapping[str, Any]) -> Note:
    return Note(state=ChoiceState.REFUSED, text=str(error), why=error.sentences, fix=fix)


class Chosen(Protocol):
    """A choice, field by field: a Spec, or a question of the what-if page."""

    def flat(self) -> dict[str, Any]: ...
    def replace(self, **changes: Any) -> Self: ...  # raises SpecError for values that are refused


T = TypeVar("T", bound=Chosen)


class Choices(Generic[T]):
    """Field values that are chosen: `wanted` is possible, `held` has refused values, `notes` those of each touched field."""

    def __init__(self, spec: T, *, check: Callable[[T], object] = lambda chosen: None) -> None:
        """check: raises SpecError for what a Spec alone cannot know, such as a text that does not exist."""
        self.wanted = spec
        self.held: dict[str, Any] = {}
        self.notes: dict[str, Note] = {}
        self._former: list[dict[str, Any]] = []  # values before each accepted choice
        self._check = check

    def choose(self, **values: Any) -> dict[str, Any]:
        """Takes a choice of one field, or of several that belong together. Returns what is accepted: the given fields and
        those held before that became possible, or nothing where the choice is refused."""
        now = self.wanted.flat()
        together = {**self.held, **values}
        for attempt in (together, values):
            changes = {name: value for name, value in attempt.items() if not same(now[name], value)}
            if self._refusal(attempt) is None:
                self.wanted = self.wanted.replace(**changes)
                if changes:
                    self._former.append({name: now[name] for name in changes})
                for name in attempt:
                    self.held.pop(name, None)
                    self.notes[name] = Note()
                self._review()
                return changes
        self.held.update(values)
        self._review()
        return {}

    @property
    def former(self) -> Mapping[str, Any]:
        """The values that the last accepted choice changed, as they were; empty if there is none."""
        return self._former[-1] if self._former else {}

    def undo(self) -> dict[str, Any]:
        """Takes the last accepted choice back, as `choose` does; the one before it is the last one then."""
        changes = self.choose(**self._former.pop())
        if changes:
            self._former.pop()
        return changes

    def adopt(self, spec: T) -> None:
        """Replaces the wanted Spec by one that was not chosen here, and reviews what is held."""
        if spec != self.wanted:
            self._former.clear()
        self.wanted = spec
        self.held = {name: value for name, value in self.held.items() if not same(spec.flat()[name], value)}
        self._review()

    def revert(self, names: Mapping[str, Any], to: T, error: FieldError) -> None:
        """Holds fields that were accepted here and refused by the ranks, with the ranks' reason."""
        now = self.wanted.flat()
        if self.former.keys() == names.keys():
            self._former.pop()
        self.held |= {name: now[name] for name in names}
        self.notes |= {name: _refused(error, error.fix) for name in names}
        self.wanted = to

    def note(self, names: Iterable[str], state: ChoiceState, text: str, step: int | None = None) -> None:
        self.notes |= {name: Note(state=state, text=text, step=step) for name in names}

    def value(self, name: str) -> Any:
        """Returns what the control of a field shows: the held choice, else the wanted one."""
        return self.held[name] if name in self.held else self.wanted.flat()[name]

    def _review(self) -> None:
        """Updates the reasons of what is held: one for all where a change would make all possible, else each its own."""
        together, fix = self._refusal(self.held), self._fix(self.held)
        for name, value in self.held.items():
            if together is not None and fix:
                self.notes[name] = _refused(together, {**{n: v for n, v in self.held.items() if n != name}, **fix})
            # One that is possible by itself is not with what it was chosen with.
            elif (error := self._refusal({name: value}) or together) is not None:
                self.notes[name] = _refused(error, self._fix({name: value}))

    def _refusal(self, changes: Mapping[str, Any]) -> FieldError | None:
        try:
            self._check(self.wanted.replace(**changes))
        except FieldError as e:
            return e
        return None

    def _fix(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Further field values with which `values` would be accepted; empty where the refusals give none."""
        fix: dict[str, Any] = {}
        for _ in range(MOST_FIXES):
            error = self._refusal({**values, **fix})
            if error is None:
                return fix
            more = {name: value for name, value in error.fix.items() if name not in values and name not in fix}
            if not more:
                return {}
            fix.update(more)
        return {}


def same(a: Any, b: Any) -> bool:
    """Says whether two field values mean the same: a tuple and a list of devices do."""
    return bool((list(a) if isinstance(a, tuple) else a) == (list(b) if isinstance(b, tuple) else b))


OTHER = "other…"
RANK_FIELDS = ("world_size", "devices")  # a change starts or ends ranks
FIRST_MODEL_ON_CPUS = "gpt2-1m"  # trains in some tens of milliseconds a step
OFFERED_PARAMETERS = 10**10  # larger presets are meant for planning; code can train them all the same


def presets(*, below: float = math.inf) -> tuple[str, ...]:
    """The names of models with fewer parameters than that."""
    return tuple(name for name, preset in PRESETS.items() if preset.parameters < below)


def offered(row: FieldRow, now: Chosen, value: Any) -> list[tuple[str, Any]]:
    """The values that a control offers with their labels, `value` among them; none where a number or text is to be typed."""
    if not row.choices:
        return []
    chosen = now.flat()
    has_folder = isinstance(chosen["model"], str) and chosen["model"] not in PRESETS  # to which OWN refers
    tokens = [t for t in (row.choices(chosen) if callable(row.choices) else row.choices) if t != OWN or has_folder]
    if value not in tokens:
        tokens.append(value)
    none = row.none if row.automatic is None else f"{row.none} ({row.automatic(chosen)})"
    return [(none if t is None else short_value(row.name, t), t) for t in tokens]


_ROWS = {**rows_of(Strategy), **rows_of(Workload), **rows_of(Spec)}
CONTROLS = _ROWS | {"model": replace(_ROWS["model"], choices=presets(below=OFFERED_PARAMETERS))}
TITLES = ("Sharding", "Schedule", "Workload", "Training")
MAIN = ("backend", "sharding", "precision", "offload")  # are always on the screen


def controls_of(title: str, *, planned: bool = False) -> tuple[FieldRow, ...]:
    """Returns the rows of a group; `planned`: and then those of the what-if page alone."""
    rows = [row for row in CONTROLS.values() if row.group == title and (planned or not row.planned)]
    return tuple(sorted(rows, key=lambda row: row.planned))


ALWAYS_TOLD = ("optimizer", "lr")  # of the group that is folded
FOLDED = "Training"  # the group that is one line until it is unfolded


class Control:
    """The input of one field, with its label above and its note below."""

    def __init__(self, field: FieldRow, now: Chosen, choose: Callable[[str, Any], None]) -> None:
        self.field = field
        self._choose = choose
        self._updating = False  # the input changes by code
        self.input = styled(self._make(now), "fsdp-input")
        self.typed: widgets.Text | None = None  # for a value that is not among the tokens
        if field.typed:
            hidden = widgets.Layout(display=HIDDEN)  # until `other…` is chosen
            texts = {"placeholder": field.typed, "tooltip": field.help}
            self.typed = widgets.Text(**texts, continuous_update=False, layout=hidden)
            styled(self.typed, "fsdp-input").observe(self._typed, "value")
        self.inputs = [self.input] if self.typed is None else [self.input, self.typed]  # what a person can change
        self.note = styled(widgets.HTML(), "fsdp-note-line")
        self.box = styled(widgets.VBox([*self.inputs, self.note]), "fsdp-field")
        self.input.observe(self._changed, "value")

    def _make(self, now: Chosen) -> widgets.Widget:
        f, value = self.field, now.flat()[self.field.name]
        texts = {"description": f.label, "tooltip": f.help}
        if f.choices:
            return widgets.Dropdown(options=self._options(now, value), value=_key(value), **texts)
        if f.least is not None:
            return widgets.BoundedIntText(value=value, min=f.least, max=f.most, **texts)
        return widgets.Text(value=f.write(value), placeholder=f.none, continuous_update=False, **texts)

    def _options(self, now: Chosen, value: Any) -> list[tuple[str, Any]]:
        named = [(label, _key(token)) for label, token in offered(self.field, now, value)]
        return [*named, (OTHER, OTHER)] if self.field.typed else named

    @property
    def _awaits_typing(self) -> bool:
        return self.typed is not None and self.input.value == OTHER

    def show(self, now: Chosen, value: Any) -> None:
        """Shows a value without taking it for a choice; not while a person is about to type another."""
        if self._awaits_typing:
            return
        self._updating = True
        try:
            if self.field.choices:
                options = self._options(now, value)
                if list(self.input.options) != options:
                    self.input.options = options
            shown = self.field.write(value) if self.field.is_text else _key(value)
            if self.input.value != shown:
                self.input.value = shown
        finally:
            self._updating = False

    def say(self, state: ChoiceState, text: str) -> None:
        """Writes the note under the input; a refusal's reason is in the group's line, where there is room for it."""
        word = {ChoiceState.REFUSED: "refused, see below", ChoiceState.PENDING: "pending"}.get(state, text)
        put(self.note, "value", f'<span class="fsdp-{state.value}">{escape(word)}</span>' if word else "")
        (self.box.add_class if state is ChoiceState.REFUSED else self.box.remove_class)("fsdp-held")

    def _changed(self, change: Mapping[str, Any]) -> None:
        if self._updating:
            return
        value = change["new"]
        if self.typed is not None:
            put(self.typed.layout, "display", "" if self._awaits_typing else "none")
        if self._awaits_typing:
            return
        if self.field.is_text:
            value = self.field.read(value)
        elif self.field.choices:
            value = None if value == AUTO else value.value if isinstance(value, _Opaque) else value
        self._choose(self.field.name, value)

    def _typed(self, change: Mapping[str, Any]) -> None:
        text, typed = change["new"].strip(), change["owner"]
        if not text:
            return
        self._updating = True
        try:
            value = self.field.read(text)
            self.input.options = [*self.input.options, (short_value(self.field.name, value), _key(value))]
            self.input.value = _key(value)
            typed.value = ""
        finally:
            self._updating = False
        put(typed.layout, "display", "none")
        self._choose(self.field.name, value)


Accept = Callable[[Mapping[str, Any]], None]


class RefusalLine:
    """Says why choices are refused, with a button for what would make them possible; hidden while none is."""

    def __init__(self, accept: Accept) -> None:
        self._fix: dict[str, Any] = {}
        self._words = styled(widgets.HTML(), "fsdp-refusal")
        self.button = styled(widgets.Button(description=""), "fsdp-fix")
        self.button.on_click(lambda _: accept(self._fix))
        self.widget = styled(widgets.Box([self._words, self.button]), "fsdp-refusal-line")

    def explain(self, choices: Choices[Any]) -> None:
        """Shows the reasons of what is held, each once."""
        refused = {name: choices.notes[name] for name in choices.held if name in choices.notes}
        fixed = [{name: choices.held[name], **note.fix} for name, note in refused.items() if note.fix]
        self._fix = fixed[-1] if fixed else {}
        more = {n: v for n, v in self._fix.items() if n not in choices.held or v != choices.held[n]}
        label = fix_text(more, choices.held)
        put(self._words, "value", "<br>".join(dict.fromkeys(escape(note.why) for note in refused.values())))
        put(self.button, "description", label)
        put(self.button.layout, "display", "" if label else HIDDEN)
        put(self.widget.layout, "display", "" if refused else HIDDEN)


class Group:
    """A titled row of controls. The group `FOLDED` is one line that says what is not as it is by default, until its button,
    or a refusal, shows the controls."""

    def __init__(self, title: str, controls: Mapping[str, Control]) -> None:
        self.controls = {row.name: controls[row.name] for row in controls_of(title) if row.name not in MAIN}
        head = styled(widgets.HTML(f"<h4>{escape(title)}</h4>"), "fsdp-group-head")
        self.row = styled(widgets.Box([c.box for c in self.controls.values()]), "fsdp-group-row")
        self.fold: widgets.Button | None = None
        self.summary: widgets.HTML | None = None
        parts = [head, self.row]
        if title == FOLDED:
            self.fold = fold = styled(widgets.Button(tooltip=f"Show or hide: {title}"), "fsdp-fold")
            fold.on_click(lambda _: unfold(self.row, fold, self.row.layout.display == HIDDEN))
            unfold(self.row, fold, False)
            self.summary = styled(widgets.HTML(), "fsdp-state-line", "fsdp-soft")
            parts.insert(1, styled(widgets.Box([fold, self.summary]), "fsdp-fold-line"))
        self.box = styled(widgets.VBox(parts), "fsdp-group", *["fsdp-folds"] * (title == FOLDED))

    def summarize(self, choices: Choices[Any]) -> None:
        """Of a group that is folded: says what is not as it is by default, and shows it where a choice is refused."""
        if self.fold is not None and self.summary is not None:
            if self.controls.keys() & choices.held.keys():
                unfold(self.row, self.fold, True)
            now, usual = choices.wanted.flat(), Spec().flat()
            told = [n for n in self.controls if n in ALWAYS_TOLD or now[n] != usual[n]]
            put(self.summary, "value", escape(" · ".join(value_text(CONTROLS[n], now[n]) for n in told)))


def _key(value: Any) -> Any:
    """A dropdown's value for a field's value: None means no choice to ipywidgets, and other objects may lack a hash."""
    return AUTO if value is None else value if isinstance(value, (str, int)) else _Opaque(value)


@dataclass(frozen=True)
class _Opaque:
    """A value that only code can set, in a dropdown: a config, a precision by parts."""

    value: Any

    def __hash__(self) -> int:
        return hash(repr(self.value))


def short_value(name: str, value: Any) -> str:
    """As text, a path by its last part, since there is little room."""
    text = describe_value(name, value.value if isinstance(value, _Opaque) else value)
    return text.rstrip("/").rpartition("/")[2] if row_of(name).path and "/" in text else text


def value_text(row: FieldRow, value: Any) -> str:
    return f"{row.label} {row.none if value is None else short_value(row.name, value)}"


def fix_text(fix: Mapping[str, Any], held: Mapping[str, Any], rows: Mapping[str, FieldRow] = CONTROLS) -> str:
    """The words of a button that changes these fields so that a refused choice becomes possible; "" without any."""
    if not fix:
        return ""
    if "world_size" in fix and set(fix) <= set(RANK_FIELDS):
        return f"Use {fix['world_size']} ranks"
    changes = ", ".join(value_text(rows.get(name) or CONTROLS[name], value) for name, value in fix.items())
    return f"{'Set' if any(name in held for name in fix) else 'Also set'} {changes}"
