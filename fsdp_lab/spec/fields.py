"""`FieldRow`: all that is known of a field of a Spec besides its type, declared by `knob`. Controls, the command line,
checks, descriptions, exports and the what-if page read it, so that none of them lists fields."""

import dataclasses
import json
import logging
import math
import re
import textwrap
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from typing import Any, TypeVar

from fsdp_lab.base.errors import SpecError, is_number, is_whole
from fsdp_lab.spec.user_code import UserCode, is_code

AUTO = "auto"
Kind = TypeVar("Kind")
_WITH_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")  # commas as people write them, and no decimal ones


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The part of a field that some backends do not support."""

    of: tuple[str, ...]
    allows: Callable[[Any], bool]
    why: str  # this and the hint are the halves of the refusal's sentence; {} is the backend
    hint: str
    fix: Any  # the value that the hint means
    other: str  # another way out


@dataclass(frozen=True, kw_only=True)
class FieldRow:
    """See the module. `name` and `type` are the field's, and known to the rows of `rows_of`."""

    name: str = ""
    type: str = ""
    # What it takes.
    accepts: Callable[[Any], bool] = lambda value: True  # of values other than the default
    wanted: str = ""  # what is accepted, for a hint
    limits: tuple[Limit, ...] = ()
    # What it means.
    none: str = AUTO  # what None means: AUTO, a choice by the backend; or a word such as "off"
    automatic: Callable[[Mapping[str, Any]], str] | None = None  # what AUTO stands for, given all values by flat name
    lineage: bool = False  # another value is another training, which begins at step 0
    same_work: bool = False  # with another value the same is trained
    live: bool = False  # the live backend takes a change over
    samples: bool = False  # it decides what the samples are
    of_text: bool = False  # of no use for images
    of_configs: bool = False  # of no use for a model of the user's own
    code: bool = False  # may be the user's own code
    # As text.
    tokens: tuple[Any, ...] = ()  # the named values
    others: str = ""  # what else the command line takes, in words
    json: bool = False  # the command line takes JSON, since values contain commas
    reads: Callable[[str], Any] | None = None  # from text, if the type does not say how
    text: Callable[[Any], str] | None = None  # of a value
    path: bool = False  # values may be paths
    bare: bool = False  # values explain themselves, without the field's name
    in_name: bool = False  # part of the name of a strategy, unless it is None or `off`
    off: Any = None
    # Its control: one of the choices, by default the tokens, or a number from `least` to `most`, or text.
    group: str = ""  # its title; "": it has none
    planned: bool = False  # only on the what-if page
    label: str = ""
    help: str = ""
    choices: Sequence[Any] | Callable[[Mapping[str, Any]], Sequence[Any]] = ()  # also by all values
    least: int | None = None
    most: int = 4096
    typed: str = ""  # an example of another value than the choices; "": none may be typed

    @property
    def is_text(self) -> bool:
        """True if its control is a line of text."""
        return not self.choices and self.least is None

    def means_none(self, word: str) -> bool:
        """Returns whether a word in text stands for None; never for a field that has no None."""
        words = ("", "null", "none", self.none, *(["off"] if self.none != AUTO else []))
        return "None" in self.type and word.lower() in words

    def read(self, word: str) -> Any:
        """The value that a word means; the word itself if it has no such meaning, which the field then refuses."""
        word = word.strip()
        plain = word.replace(",", "") if _WITH_THOUSANDS.fullmatch(word) else word
        if self.reads is not None:
            return self.reads(word)
        if "int" in self.type and plain.isdecimal():
            return int(plain)
        if self.means_none(word):
            return None
        if "tuple" in self.type:
            return [part.strip() for part in word.split(",") if part.strip()] or None
        if "str" in self.type:
            return word
        try:
            value = float(plain) if "float" in self.type else json.loads(plain.lower())
        except ValueError:
            return word
        return value if isinstance(value, int | float) else word

    def write(self, value: Any) -> str:
        """A value as text to be changed."""
        if isinstance(value, list | tuple):
            return ", ".join(map(str, value))
        return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    def shown(self, value: Any) -> str:
        """A value in words."""
        return self.none if value is None else self.write(value) if self.text is None else self.text(value)

    @property
    def sentence(self) -> str:
        """What it is, with its label where the name does not say that."""
        return self.help if self.label == self.name.replace("_", " ") else f"{self.label}: {self.help}"

    def line(self, default: Any) -> str:
        """What it is, what it takes, and its default."""
        named = ", ".join([*map(str, self.tokens), *filter(None, [self.others])])
        takes = named or self.wanted or (self.typed and f"such as {self.typed}")
        return "; ".join(filter(None, [self.sentence, takes, f"default: {self.shown(default)}"]))


def knob(default: Any, row: FieldRow, *limits: Limit, **more: Any) -> Any:
    """A field of a dataclass with its row, of which `more` replaces attributes."""
    return dataclasses.field(default=default, metadata={"row": replace(row, limits=limits, **more)})


def rows_of(kind: Any) -> dict[str, FieldRow]:
    """The fields of a dataclass with their rows."""
    rows = {}
    for f in (f for f in dataclasses.fields(kind) if "row" in f.metadata):
        row, of = f.metadata["row"], str(f.type)
        choices = row.choices or ((None, *row.tokens) if row.tokens and "None" in of else row.tokens)
        label = row.label or f.name.replace("_", " ")
        rows[f.name] = replace(row, name=f.name, type=of, label=label, choices=choices)
    return rows


def documented(*parts: type) -> Callable[[type[Kind]], type[Kind]]:
    """A decorator that adds the fields of a dataclass, and of `parts` before them, to its docstring, a sentence each."""

    def add(kind: type[Kind]) -> type[Kind]:
        rows = [(part, row) for part in (*parts, kind) for row in rows_of(part).values()]
        lines = [f"    {row.name}: {row.line(getattr(part, row.name))}." for part, row in rows]
        wrapped = [textwrap.fill(line, 110, subsequent_indent=" " * 8) for line in lines]
        kind.__doc__ = "\n".join([str(kind.__doc__), "", "    Fields:", *wrapped])
        return kind

    return add


def html_table(values: Mapping[str, Any], rows: Mapping[str, FieldRow], bold: Collection[str]) -> str:
    """Fields with their values and what they are, those in `bold` in bold."""
    cells = [(name, rows[name].shown(value), rows[name].sentence) for name, value in values.items()]
    heads = (f'<td style="text-align:left{";font-weight:bold" if row[0] in bold else ""}">' for row in cells)
    lines = ["".join(f"{td}{escape(c)}</td>" for c in row) for td, row in zip(heads, cells, strict=True)]
    return f"<table><tr>{'</tr><tr>'.join(lines)}</tr></table>"


def only(of: str, allowed: tuple[Any, ...], why: str, hint: str = "", *, fix: Any = None, other: str = "") -> Limit:
    """A Limit of backends, with spaces between them. The fix is by default the first value that is allowed."""
    fix = allowed[0] if fix is None else fix
    hint = hint or f"leave it at {allowed[0]}"
    return Limit(of=tuple(of.split()), allows=lambda v: v in allowed, why=why, hint=hint, fix=fix, other=other)


def values(accepts: Callable[[Any], bool], wanted: str) -> FieldRow:
    return FieldRow(accepts=accepts, wanted=wanted)


def one_of(tokens: Sequence[str]) -> FieldRow:
    return FieldRow(accepts=lambda v: v in tokens, wanted="one of " + ", ".join(tokens), tokens=tuple(tokens))


def whole(least: int) -> FieldRow:
    return FieldRow(accepts=lambda v: is_whole(v, least), wanted=f"a whole number of {least} or more", least=least)


def matching(pattern: str, wanted: str) -> FieldRow:
    return values(lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None, wanted)


def text(wanted: str) -> FieldRow:
    return values(lambda v: isinstance(v, str) and bool(v), wanted)


POSITIVE = values(lambda v: is_number(v) and math.isfinite(v) and v > 0, "a finite number above 0")
NOT_NEGATIVE = values(lambda v: is_number(v) and math.isfinite(v) and v >= 0, "a finite number of 0 or more")
BOOL = values(lambda v: isinstance(v, bool), "true or false")


def check_value(name: str, value: Any, row: FieldRow) -> None:
    """Raises SpecError unless the value is accepted."""
    if not row.accepts(value):
        raise SpecError(name, f"{value!r} is refused", f"give {row.wanted}")


def check_fields(prefix: str, part: Any) -> None:
    """Raises SpecError for the first field of a dataclass whose value is neither accepted nor the default. Code that was
    sent becomes a UserCode."""
    for f in dataclasses.fields(part):
        row, name, value = f.metadata["row"], f"{prefix}.{f.name}", getattr(part, f.name)
        if row.code and callable(value):
            hint = f'give it to lab.run({f.name}=...), or its name, as "package.module:name"'
            raise SpecError(name, f"{value!r} is refused: a Spec holds what JSON can", hint)
        if value is not f.default:
            check_value(name, value, row)
        if row.code and isinstance(value, Mapping) and is_code(value) and not isinstance(value, UserCode):
            object.__setattr__(part, f.name, UserCode.of(name, value))


# -- names of other libraries ----------------------------------------------------------------------------------------

# fmt: off
# Of transformers' TrainingArguments, TRL and training scripts -> the field that means the same.
ALIASES: Mapping[str, str] = {
    "bf16": "precision", "dataset_name": "data", "dataset_text_field": "text_field", "fp16": "precision",
    "gradient_accumulation_steps": "accumulate", "gradient_checkpointing": "recompute", "learning_rate": "lr",
    "lr_scheduler_type": "lr_schedule", "max_grad_norm": "clip_norm", "max_length": "seq_len", "max_seq_length": "seq_len",
    "model_name_or_path": "model", "optim": "optimizer", "per_device_train_batch_size": "micro_batch",
    "tokenizer_name": "tokenizer", "torch_compile": "compile", "batch_size": "micro_batch", "bs": "micro_batch",
}
# Their values that have another name here.
_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "bf16": {True: "bf16", False: "fp32"}, "fp16": {True: "fp16", False: "fp32"}, "max_grad_norm": {0: None},
    "gradient_checkpointing": {True: "full", False: "none"}, "lr_scheduler_type": {"constant_with_warmup": "constant"},
    "optim": {"adamw_torch": "adamw"},
}
# fmt: on
_LENGTH, _STEPS = "how long to train is no field of a Spec", "give lab.run(steps=...): samples x epochs / global batch"
# Their names for what no field says, with the reason and a hint.
NOT_FIELDS: Mapping[str, tuple[str, str]] = {
    "epochs": (_LENGTH, _STEPS),
    "eval_steps": ("how often to evaluate is no field of a Spec", "give lab.run(evaluate=50)"),
    "lora_r": ("the rank of adapters is a part of lora", 'give lora={"r": 8}'),
    "max_steps": (_LENGTH, "give lab.run(steps=...), and decay_steps where the rate falls"),
    "num_train_epochs": (_LENGTH, _STEPS),
    "output_dir": ("where checkpoints go is no field of a Spec", "give lab.run(save=folder)"),
    "warmup_ratio": ("a warm-up has a number of steps here", "give warmup_steps"),
}


def own_names(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes with names of transformers and TRL replaced by those of the fields, each said once in a process; of a list,
    as `Lab.compare` takes it, each value. Raises SpecError for two names of one field."""
    own: dict[str, Any] = {}
    for name, value in changes.items():
        beside = changes.get({"bf16": "fp16", "fp16": "bf16"}.get(name, ""))
        if value is False and (beside is True or (beside is False and name == "fp16")):
            continue  # TrainingArguments name both; only a True chooses
        field, values = ALIASES.get(name, name), _VALUES.get(name, {})
        if field in own or (field != name and field in changes):
            raise SpecError(field, f"{name} means it too", "give one of the two")
        if field != name:
            _say_once(f"{name} is {field} here")
        many = isinstance(value, list)
        given = [values.get(v, v) if isinstance(v, Hashable) else v for v in (value if many else [value])]
        own[field] = given if many else given[0]
    return own


@cache
def _say_once(note: str) -> None:
    logging.getLogger(__name__).warning(note)
