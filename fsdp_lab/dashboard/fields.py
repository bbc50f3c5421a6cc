"""`ControlSpec`, `Control` and `Group`: a field, also of the what-if page, its input, and a titled row of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.dashboard.choices import Choices, ChoiceState, Chosen
from fsdp_lab.dashboard.forms import HIDDEN, put, styled
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.spec.describe import describe_value, field_title
from fsdp_lab.spec.link import OFFERED
from fsdp_lab.spec.lr_schedule import LR_SCHEDULES
from fsdp_lab.spec.optimizer import OPTIMIZERS
from fsdp_lab.spec.spec import BACKENDS, OFFLOADS, PRECISIONS, SHARDINGS, YOURS, Spec, Strategy
from fsdp_lab.spec.workload import DROPOUTS, OWN, RANDOM

AUTO = "auto"
OTHER = "other…"
RANK_FIELDS = ("world_size", "devices")  # a change starts or ends ranks
FIRST_MODEL_ON_CPUS = "gpt2-1m"  # trains in some tens of milliseconds a step
OFFERED_PARAMETERS = 10**10  # larger presets are meant for planning; code can train them all the same


@dataclass(frozen=True, kw_only=True)
class ControlSpec:
    """A field of the Spec and how it is chosen.

    Attributes:
        tokens: the values offered, in order, given what is chosen now; another value that code has set is added to them.
            None: a whole number between `least` and `most`, or text.
        typed: an example of another value that may be typed instead of a token; empty: none may.
        none: the word for None. automatic: what None stands for, given what is chosen now, where it is worth saying.
        read, write: from text to a value, and back. `read` returns text that it cannot read as it is.
    """

    name: str
    label: str
    help: str
    tokens: Callable[[Chosen], Sequence[Any]] | None = None
    least: int | None = None
    most: int = 4096
    typed: str = ""
    none: str = AUTO
    automatic: Callable[[Chosen], str] | None = None
    read: Callable[[str], Any] = str.strip
    write: Callable[[Any], str] = str

    def offered(self, now: Chosen, value: Any) -> list[tuple[str, Any]]:
        """The tokens with their labels, `value` among them; none where a number or text is to be typed."""
        if self.tokens is None:
            return []
        tokens = [*self.tokens(now)]
        if value not in tokens:
            tokens.append(value)
        none = self.none if self.automatic is None else f"{self.none} ({self.automatic(now)})"
        return [(none if t is None else short_value(self.name, t), t) for t in tokens]


def fixed(*tokens: Any) -> Callable[[Chosen], Sequence[Any]]:
    """The same tokens whatever is chosen."""
    return lambda chosen: tokens


def presets(*, below: float = math.inf) -> Callable[[Chosen], Sequence[Any]]:
    """The names of models with fewer parameters than that."""
    return fixed(*(name for name, preset in PRESETS.items() if preset.parameters < below))


def _shard_sizes(chosen: Chosen) -> Sequence[Any]:
    ranks = chosen.flat()["world_size"]
    return (None, *(f for f in range(1, ranks + 1) if ranks % f == 0))


def _forward_prefetch(chosen: Chosen) -> str:
    backend = chosen.flat()["backend"]
    if backend == "lab":
        return str(Strategy(backend=backend).forward_depth)
    return "your own" if backend == YOURS else "torch's own"


def _whole_number(text: str) -> Any:
    """Text that is none is for the Spec to refuse."""
    return int(text) if text.strip().isdecimal() else text.strip()


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text.strip()


def _number_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _whole_number_or_none(text: str) -> Any:
    return _whole_number(text) if text.strip() else None


def _names(text: str) -> list[str] | None:
    """Devices or patterns, with commas between them."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    return None if not names or names == [AUTO] else names


def _names_text(value: Any) -> str:
    return "" if value is None else ", ".join(value)


def _of_folder(*tokens: Any) -> Callable[[Chosen], Sequence[Any]]:
    """The tokens, and what the folder of a model has."""

    def offered(chosen: Chosen) -> Sequence[Any]:
        model = chosen.flat()["model"]
        return (*tokens, OWN) if isinstance(model, str) and model not in PRESETS else tokens

    return offered


def _lora(text: str) -> Any:
    """Adapters of a rank, as in a Spec's dict."""
    rank = _whole_number(text)
    return {"r": rank, "alpha": None, "targets": None} if isinstance(rank, int) else rank


def _backends(chosen: Chosen) -> Sequence[Any]:
    """With "yours" where the Spec has an engine of the user's."""
    return BACKENDS if chosen.flat().get("engine") is None else (*BACKENDS, YOURS)


GROUPS: tuple[tuple[str, tuple[ControlSpec, ...]], ...] = (
    ("Sharding", (
        ControlSpec(name="backend", label="backend", help="Who shards", tokens=_backends),
        ControlSpec(name="sharding", label="sharding", help="What is sharded", tokens=fixed(*SHARDINGS)),
        ControlSpec(name="shard_size", label="shard size", help="Ranks in one shard group", tokens=_shard_sizes),
        ControlSpec(name="precision", label="precision", help="dtype of computing and reducing", tokens=fixed(*PRECISIONS)),
        ControlSpec(name="offload", label="offload", help="What is kept on the host", tokens=fixed(*OFFLOADS)),
        ControlSpec(name="wrap", label="wrap", help="What becomes one unit",
              tokens=fixed("block", "every:2", "every:4", "min_params:100000", "whole")),
    )),
    ("Schedule", (
        ControlSpec(name="forward_prefetch", label="forward prefetch", help="Units gathered ahead",
              tokens=fixed(None, 0, 1, 2, 3), typed="4", automatic=_forward_prefetch, read=_whole_number),
        ControlSpec(name="backward_prefetch", label="backward prefetch", help="Units gathered ahead", least=0, most=16),
        ControlSpec(name="recompute", label="recompute", help="Activations computed again in the backward",
              tokens=fixed("none", "every:2", "full")),
        ControlSpec(name="accumulate", label="accumulate", help="Micro-batches in a step", least=1),
        ControlSpec(name="sync", label="sync", help="Micro-batches that communicate", tokens=fixed("every", 2, 4, 8, "last"),
              typed="3", read=_whole_number),
        ControlSpec(name="link", label="link", help="Emulate a slower interconnect; a GPU's is scaled to this machine",
              tokens=fixed(None, *OFFERED), typed="0.25 GB/s, 50 us", none="off"),
    )),
    ("Workload", (
        ControlSpec(name="model", label="model", help="A preset, or the folder of a model. A change begins at step 0",
              tokens=presets(below=OFFERED_PARAMETERS), typed="/my/model"),
        ControlSpec(name="data", label="data", help="Python's own source, made-up images, or a file or folder of yours",
              tokens=fixed("stdlib", "images"), typed="/my/text.jsonl"),
        ControlSpec(name="micro_batch", label="micro batch", help="Samples per rank and forward", least=1),
        ControlSpec(name="seq_len", label="sequence length", help="Tokens of a sample",
              tokens=fixed(32, 64, 128, 256, 512, 1024)),
        ControlSpec(name="world_size", label="ranks", help="A change takes seconds; training goes on", least=1, most=256),
        ControlSpec(name="devices", label="devices", help="auto, or one a rank: cuda:0, cuda:1. A change takes seconds",
              read=_names, write=_names_text),
    )),
    ("Training", (
        ControlSpec(name="weights", label="weights", help="Where values begin. A change begins at step 0",
              tokens=_of_folder(None, RANDOM), typed="/my/weights"),
        ControlSpec(name="tokenizer", label="tokenizer", help="What makes text into tokens",
              tokens=_of_folder(None, "bytes"), typed="/my/tokenizer"),
        ControlSpec(name="optimizer", label="optimizer", help="Or another class of torch.optim. A change begins at step 0",
              tokens=fixed(*OPTIMIZERS), typed="RMSprop"),
        ControlSpec(name="lr", label="learning rate", help="The full rate", read=_number, write=_number_text),
        ControlSpec(name="lr_schedule", label="lr schedule", help="How the rate falls after the warm-up",
              tokens=fixed(*LR_SCHEDULES)),
        ControlSpec(name="warmup_steps", label="warm-up steps", help="The rate rises to the full one", least=0, most=10**6),
        ControlSpec(name="decay_steps", label="decay steps", help="Where linear and cosine end", none="none",
              read=_whole_number_or_none, write=lambda value: "" if value is None else str(value)),
        ControlSpec(name="dropout", label="dropout", help="None, or as the model's config says", tokens=fixed(*DROPOUTS)),
        ControlSpec(name="freeze", label="freeze", help="Patterns of parameters that are not trained: *.wte.*, *.bias",
              none="nothing", read=_names, write=_names_text),
        ControlSpec(name="lora", label="lora", help="Low-rank adapters alone are trained. A change begins at step 0",
              tokens=fixed(None, *map(_lora, ("4", "8", "16"))), typed="32", none="off", read=_lora),
    )),
)  # fmt: skip
PATHS = ("model", "data", "weights", "tokenizer")  # may be one
ALWAYS_TOLD = ("optimizer", "lr")  # of the group that is folded
FOLDED = "Training"  # the group that is one line until it is unfolded


class Control:
    """The input of one field, with its label above and its note below."""

    def __init__(self, field: ControlSpec, now: Chosen, choose: Callable[[str, Any], None]) -> None:
        self.field = field
        self._choose = choose
        self._updating = False  # the input changes by code
        self.input = styled(self._make(now), "fsdp-input")
        self.typed = self._make_typed() if field.typed else None
        self.inputs = [self.input] if self.typed is None else [self.input, self.typed]  # what a person can change
        self.note = styled(widgets.HTML(), "fsdp-note-line")
        self.box = styled(widgets.VBox([*self.inputs, self.note]), "fsdp-field")
        self.input.observe(self._changed, "value")

    def _make(self, now: Chosen) -> widgets.Widget:
        f, value = self.field, now.flat()[self.field.name]
        texts = {"description": f.label, "tooltip": f.help}
        if f.tokens is not None:
            return widgets.Dropdown(options=self._options(now, value), value=_key(value), **texts)
        if f.least is not None:
            return widgets.BoundedIntText(value=value, min=f.least, max=f.most, **texts)
        return widgets.Text(value=f.write(value), placeholder=f.none, continuous_update=False, **texts)

    def _options(self, now: Chosen, value: Any) -> list[tuple[str, Any]]:
        named = [(label, _key(token)) for label, token in self.field.offered(now, value)]
        return [*named, (OTHER, OTHER)] if self.field.typed else named

    def _make_typed(self) -> widgets.Text:
        """For a value that is not among the tokens; hidden until `other…` is chosen."""
        hidden = widgets.Layout(display="none")
        typed = widgets.Text(
            placeholder=self.field.typed, tooltip=self.field.help, continuous_update=False, layout=hidden
        )
        typed.observe(self._typed, "value")
        return styled(typed, "fsdp-input")

    @property
    def _is_text(self) -> bool:
        return self.field.tokens is None and self.field.least is None

    @property
    def _awaits_typing(self) -> bool:
        """Whether `other…` is chosen."""
        return self.typed is not None and self.input.value == OTHER

    def show(self, now: Chosen, value: Any) -> None:
        """Shows a value without taking it for a choice; not while a person is about to type another."""
        if self._awaits_typing:
            return
        self._updating = True
        try:
            if self.field.tokens is not None:
                options = self._options(now, value)
                if list(self.input.options) != options:
                    self.input.options = options
            shown = self.field.write(value) if self._is_text else _key(value)
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
        if self._is_text:
            value = self.field.read(value)
        elif self.field.tokens is not None:
            value = _unkey(value)
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


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a fix does to a run, or why it cannot be applied."""

    effect: str = ""
    blocked: str = ""


class Group:
    """A titled row of controls, and below it why a choice is refused, with a button that fixes it."""

    def __init__(self, title: str, controls: Sequence[Control], accept: Callable[[Mapping[str, Any]], None],
                 fields: Sequence[ControlSpec]) -> None:  # fmt: skip
        """`fields` of all groups: a fix may change one of another group."""
        self._fields = {f.name: f for f in fields}
        self.names = [c.field.name for c in controls]
        self._fix: dict[str, Any] = {}
        head = styled(widgets.HTML(f"<h4>{escape(title)}</h4>"), "fsdp-group-head")
        self.row = styled(widgets.Box([c.box for c in controls]), "fsdp-group-row")
        self._words = styled(widgets.HTML(), "fsdp-refusal")
        self.button = styled(widgets.Button(description="", layout=widgets.Layout(display="none")), "fsdp-fix")
        self.button.on_click(lambda _: accept(self._fix))
        self.buttons = [self.button]
        hidden = widgets.Layout(display="none")
        self._line = styled(widgets.Box([self._words, self.button], layout=hidden), "fsdp-refusal-line")
        self.box = styled(widgets.VBox([head, self.row, self._line]), "fsdp-group")

    def explain(self, choices: Choices[Any], offer: Callable[[Mapping[str, Any]], Offer] = lambda fix: Offer()) -> None:
        """Shows the reasons of this group's refusals, and the fix if there is one. `offer` tells what that does."""
        refused = [(n, choices.notes[n]) for n in self.names if n in choices.held and n in choices.notes]
        self._fix = {}
        for name, note in refused:
            if note.fix:
                self._fix = {name: choices.held[name], **note.fix}
        more = {n: v for n, v in self._fix.items() if n not in choices.held or v != choices.held[n]}
        label = fix_text(more, choices.held, self._fields)
        offered = offer(more) if more else Offer()
        reasons = "<br>".join(escape(refusal_text(note.text)) for _, note in refused)
        text = " ".join(filter(None, [reasons, escape(offered.blocked or offered.effect)]))
        put(self._words, "value", text)
        put(self.button, "description", label)
        put(self.button, "disabled", bool(offered.blocked))
        put(self.button, "tooltip", offered.blocked or offered.effect)
        put(self.button.layout, "display", "" if label else "none")
        put(self._line.layout, "display", "" if text else "none")


class FoldedGroup(Group):
    """One line that says what is not as it is by default, with a button that shows the controls; so does a refusal."""

    def __init__(self, title: str, controls: Sequence[Control], accept: Callable[[Mapping[str, Any]], None],
                 fields: Sequence[ControlSpec]) -> None:  # fmt: skip
        super().__init__(title, controls, accept, fields)
        self.fold = styled(widgets.Button(tooltip=f"Show or hide: {title}"), "fsdp-fold")
        self.fold.on_click(lambda _: self._unfold(self.row.layout.display == HIDDEN))
        self.buttons.append(self.fold)
        self.summary = styled(widgets.HTML(), "fsdp-state-line", "fsdp-soft")
        head, *rest = self.box.children
        self.box.children = [head, styled(widgets.Box([self.fold, self.summary]), "fsdp-fold-line"), *rest]
        styled(self.box, "fsdp-folds")
        self._unfold(False)

    def explain(self, choices: Choices[Any], offer: Callable[[Mapping[str, Any]], Offer] = lambda fix: Offer()) -> None:
        super().explain(choices, offer)
        if any(name in choices.held for name in self.names):
            self._unfold(True)
        now, usual = choices.wanted.flat(), Spec().flat()
        told = [n for n in self.names if n in ALWAYS_TOLD or now[n] != usual[n]]
        put(self.summary, "value", escape(" · ".join(value_text(n, now[n], self._fields[n]) for n in told)))

    def _unfold(self, shown: bool) -> None:
        put(self.row.layout, "display", "" if shown else HIDDEN)
        put(self.fold, "description", "Hide" if shown else "Show")
        put(self.fold, "icon", "angle-up" if shown else "angle-down")


def _key(value: Any) -> Any:
    """A dropdown's value for a field's value: None means no choice to ipywidgets, and other objects may lack a hash."""
    if value is None:
        return AUTO
    return value if isinstance(value, (str, int)) else _Opaque(value)


def _unkey(value: Any) -> Any:
    if value == AUTO:
        return None
    return value.value if isinstance(value, _Opaque) else value


@dataclass(frozen=True)
class _Opaque:
    """A value that only code can set, in a dropdown: a config, a precision by parts."""

    value: Any

    def __hash__(self) -> int:
        return hash(repr(self.value))


def short_value(name: str, value: Any) -> str:
    """As text, a path by its last part, since there is little room."""
    text = describe_value(name, value.value if isinstance(value, _Opaque) else value)
    return text.rstrip("/").rpartition("/")[2] if name in PATHS and "/" in text else text


def value_text(name: str, value: Any, field: ControlSpec | None) -> str:
    """A field and one of its values, as text."""
    label = field.label if field is not None else field_title(name)
    return f"{label} {field.none if field is not None and value is None else short_value(name, value)}"


def fix_text(fix: Mapping[str, Any], held: Mapping[str, Any], fields: Mapping[str, ControlSpec]) -> str:
    """The words of a button that changes these fields so that a refused choice becomes possible; "" without any."""
    if not fix:
        return ""
    if "world_size" in fix and set(fix) <= set(RANK_FIELDS):
        return f"Use {fix['world_size']} ranks"
    changes = ", ".join(value_text(name, value, fields.get(name)) for name, value in fix.items())
    return f"{'Set' if any(name in held for name in fix) else 'Also set'} {changes}"


def refusal_text(text: str) -> str:
    """A FieldError's "field: reason; hint" as two sentences. The reason may start with a value, and keeps its case."""
    _, _, rest = text.partition(": ")
    reason, _, hint = (rest or text).partition("; ")
    return " ".join(f"{part[0].upper()}{part[1:]}." if part is hint else f"{part}." for part in (reason, hint) if part)
