"""`WhatIf`: the page in a notebook, where the kernel answers any value, for hardware other than this machine's.

The page draws the trait `state`, which outlives a reload, and sends what a person chooses. A worker thread applies it,
asks the planner and replaces the state. The fields of a `Question` are chosen one by one, as a Spec's are
(`dashboard.fields.Choices`)."""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import anywidget
import traitlets

from fsdp_lab.base.errors import ArgumentError, check_whole, is_number
from fsdp_lab.base.formatting import plural, size
from fsdp_lab.dashboard.fields import CONTROLS, Choices, Note, controls_of, fix_text, offered, presets
from fsdp_lab.dashboard.forms import answer_while_busy
from fsdp_lab.planner.devices import DEVICES
from fsdp_lab.planner.plan import Plan, Training, sentences
from fsdp_lab.planner.questions import Target, curve, on_hosts, planned, searched
from fsdp_lab.planner.search import SEARCHED, Search
from fsdp_lab.report.what_if_page import SCRIPT, STYLES, bill_inputs, look, row_of
from fsdp_lab.spec.describe import describe_value, written
from fsdp_lab.spec.fields import FieldRow, knob, rows_of
from fsdp_lab.spec.spec import Spec

log = logging.getLogger(__name__)

_HOSTED = FieldRow(choices=(None, 1, 2, 4, 16, 32, 72), typed="6", none="8")
_RATE = FieldRow(none="as usual", most=10**6)


def default_spec() -> Spec:
    return Spec(world_size=64).replace(model="llama-7b", precision="bf16", seq_len=2048, micro_batch=2)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A Spec, and hardware that need not be this machine's. Raises FieldError where the combination is impossible."""

    spec: Spec = field(default_factory=default_spec)
    hardware: str = knob("h100", FieldRow(choices=tuple(DEVICES)), help="The GPU")
    per_host: int | None = knob(None, _HOSTED, label="GPUs a host", help="With NVLink or PCI Express between them")
    network: float | None = knob(None, _RATE, label="network, Gb/s", help="Of all network cards of a host, one way")

    def __post_init__(self) -> None:
        if self.network is not None and not is_number(self.network):
            raise ArgumentError("network", f"{self.network!r} is refused", "give a number above 0")
        if self.per_host is not None:
            check_whole("per_host", self.per_host)
        self.target.machine(self.spec.world_size)

    def flat(self) -> dict[str, Any]:
        """Returns every field by its name, the Spec's included."""
        return {**self.spec.flat(), **{name: getattr(self, name) for name in _OWN}}

    @property
    def changed(self) -> dict[str, Any]:
        """The fields of the Spec that are not as usual."""
        usual = Spec().flat()
        return {name: value for name, value in self.spec.flat().items() if value != usual[name]}

    def replace(self, **changes: Any) -> Question:
        own = {name: value for name, value in changes.items() if name in _OWN}
        rest = {name: value for name, value in changes.items() if name not in _OWN}
        return replace(self, spec=self.spec.replace(**rest), **own)

    @property
    def target(self) -> Target:
        return Target(hardware=self.hardware, per_host=self.per_host, network_gbit_per_s=self.network)

    @property
    def planned_spec(self) -> Spec:
        """The Spec with the shard size of hybrid sharding: the GPUs of a host, unless it is given."""
        return on_hosts(self.spec, self.target)

    def unsearched(self) -> dict[str, Any]:
        """The fields that a search keeps, and the global batch."""
        rest = {name: value for name, value in self.flat().items() if name not in SEARCHED}
        return {**rest, "global_batch": self.spec.global_batch}


_OWN = rows_of(Question)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The prediction for a question. `along` is empty until the scaling curve is computed: 1 to 4,096 GPUs, each with the
    same work."""

    question: Question
    plan: Plan
    along: tuple[Plan, ...] = ()

    @classmethod
    def of(cls, question: Question) -> Answer:
        """Takes milliseconds for a preset. Raises FieldError as `planner.questions.planned` does."""
        return cls(question=question, plan=planned(question.planned_spec, question.target))

    def with_curve(self) -> Answer:
        plans, _ = curve(self.question.planned_spec, self.question.target)
        return replace(self, along=tuple(plans))

    @property
    def assumed(self) -> dict[str, Any]:
        """The values that were not given, and what was assumed."""
        size = self.plan.spec.strategy.shard_size
        same = size == self.question.spec.strategy.shard_size
        return {**self.plan.assumed, **({} if same else {"shard size": f"{size}, the GPUs of a host"})}


def searched_fields(spec: Spec) -> dict[str, Any]:
    return {name: value for name, value in spec.flat().items() if name in SEARCHED}


_POWERS = tuple(1 << i for i in range(18))
_ANY_MODEL = "A preset; or other: a type that transformers knows, or the folder of a config"
_MODEL = (
    replace(CONTROLS["model"], help=_ANY_MODEL, choices=presets(), typed="opt, or a folder"),
    replace(CONTROLS["seq_len"], choices=_POWERS[7:], typed="3000"),
    CONTROLS["micro_batch"],
    CONTROLS["accumulate"],
    replace(CONTROLS["optimizer"], help="Its state is a class of memory", typed=""),
    replace(CONTROLS["optimizer_args"], help="Fused: one pass over its state", choices=({}, {"fused": True})),
)
_HARDWARE = (
    _OWN["hardware"],
    replace(CONTROLS["world_size"], label="GPUs", help="One rank each", choices=_POWERS[:13], typed="96"),
    *(row for name, row in _OWN.items() if name != "hardware"),
)
FORM: tuple[tuple[str, tuple[FieldRow, ...]], ...] = (
    ("Model", _MODEL),
    ("Hardware", _HARDWARE),
    ("Sharding", controls_of("Sharding", planned=True)),
    ("Schedule", tuple(f for f in controls_of("Schedule", planned=True) if f.name not in ("accumulate", "link"))),
)
FIELDS = {f.name: f for _, fields in FORM for f in fields}


class WhatIf(anywidget.AnyWidget):
    """Will a model fit, how fast will it train, and what limits it, on GPUs that you do not have? The last expression of a
    cell: choose, and read the answer.

    Args:
        spec: the first question; None: llama-7b on 64 GPUs.
        hardware: a name of `fsdp_lab.planner.devices.DEVICES`.
        per_host: GPUs of a host; None: eight.
        network: Gb/s of all network cards of a host; None: the usual rate.
        tokens, price_per_gpu_hour: of a whole training, such as "15B" and 2.49, as in `Lab.plan`; None: not asked.

    Raises SpecError: unknown hardware or model, a number of GPUs that is no multiple of a host's. ArgumentError."""

    _esm = SCRIPT
    _css = f".fsdp-what-if {{ {''.join(style.read_text(encoding='utf-8') for style in STYLES)} }}"
    look = traitlets.Dict(look()).tag(sync=True)
    state = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        spec: Spec | None = None,
        *,
        hardware: str = "h100",
        per_host: int | None = None,
        network: float | None = None,
        tokens: float | str | None = None,
        price_per_gpu_hour: float | None = None,
    ) -> None:
        self._bill = bill_inputs(Training.of(tokens, price_per_gpu_hour))  # as texts, by field
        first = Question(spec=spec or default_spec(), hardware=hardware, per_host=per_host, network=network)
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._left = self._asked = self._shown = 0
        self._searching = self._closed = False
        self._said = ""  # instead of the usual status
        self._chosen: Mapping[str, Any] = {}  # what is answered now
        self._found: tuple[Question, Search] | None = None
        self._answer = Answer.of(first).with_curve()
        self.choices: Choices[Question] = Choices(first, check=Answer.of)
        self._worker = ThreadPoolExecutor(1, "fsdp-lab-what-if")
        super().__init__(state=self._state())
        self.on_msg(self._on_message)
        answer_while_busy([self])

    def choose(self, **changes: Any) -> None:
        """Sets field values as if they were chosen on the page: `page.choose(model="llama-70b", world_size=512)`."""
        with self._changed:
            self._asked += 1
            self._submit(self._choose, lambda: changes, self._asked)

    def find(self) -> None:
        """Searches for the fastest strategies that fit, for the current question."""
        with self._changed:
            if not self._searching:
                self._searching = True
                self._submit(self._search)

    def _on_message(self, _widget: Any, content: Mapping[str, Any], _buffers: Any) -> None:
        if content["kind"] == "find":
            return self.find()
        with self._changed:
            if content.get("name") in self._bill:
                self._bill[content["name"]] = str(content["text"])
                return self._show()
            self._asked += 1
            self._submit(self._choose, lambda: self._read(content), self._asked)

    def _read(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a message chooses: a value of a field, the fix of a refused one, or a strategy of the search."""
        match content:
            case {"kind": "take", "place": place} if self._found is not None:
                return searched_fields(self._found[1].shown[int(place)].plan.spec)
            case {"kind": "fix", "name": name}:
                return {name: self.choices.value(name), **self.choices.notes[name].fix}
            case {"kind": "choose", "name": name, "text": text}:
                tokens = dict(offered(FIELDS[name], self.choices.wanted, self.choices.value(name)))
                return {name: tokens[text] if text in tokens else FIELDS[name].read(text)}
        raise ValueError(f"the page sent what is not known here: {dict(content)}")

    @property
    def answer(self) -> Answer:
        """The newest answer, after earlier choices are handled; refused choices leave the former one."""
        self.settle()
        return self._answer

    @property
    def found(self) -> Search | None:
        """The result of the last search."""
        self.settle()
        return self._found and self._found[1]

    @property
    def refusals(self) -> dict[str, str]:
        """Field -> why the chosen value is refused."""
        self.settle()
        return {name: self.choices.notes[name].text for name in self.choices.held}

    def settle(self, timeout_s: float = 60.0) -> None:
        """Waits until all choices are answered. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or not self._left, timeout_s):
                raise TimeoutError(f"no answer for {timeout_s:g} s")

    def close(self) -> None:
        """Frees the comms. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._worker.shutdown(wait=False, cancel_futures=True)
        self.layout.close()
        super().close()

    def __repr__(self) -> str:
        about, fit, *_ = sentences(self._answer.plan)
        return f"<WhatIf: {about}. {fit}>"

    def _submit(self, work: Callable[..., None], *args: Any) -> None:
        with self._changed:
            if not self._closed:
                self._left += 1
                self._worker.submit(self._attempt, work, *args)

    def _attempt(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
            failure = ""
        except Exception as e:  # in a thread there is no caller to raise to
            log.exception("the what-if page failed")
            failure = f"It failed: {type(e).__name__}: {e}"
        with self._changed:
            self._said, self._chosen = failure, {}
            self._show()
            self._left -= 1
            self._changed.notify_all()

    def _choose(self, changes: Callable[[], Mapping[str, Any]], number: int) -> None:
        """Shows the prediction first, and the curve if nothing else was asked by then."""
        # This takes seconds for a model that is no preset: it is built without values.
        self._said, self._chosen = "The answer is computed.", changes()
        self._show()
        self.choices.choose(**self._chosen)
        question = self.choices.wanted
        if question != self._answer.question:
            self._answer = Answer.of(question)
            self._show()
        if number == self._asked and not self._answer.along:
            self._answer = self._answer.with_curve()

    def _search(self) -> None:
        self._show()
        question = self.choices.wanted
        try:
            self._found = (question, searched(question.planned_spec, question.target))
        finally:
            self._searching = False

    def _show(self) -> None:
        with self._changed:
            if not self._closed:
                self.state = self._state()

    def _state(self) -> dict[str, Any]:
        """All that the page shows, as what_if.js reads it."""
        held = [(name, self.choices.notes.get(name, Note())) for name in FIELDS if name in self.choices.held]
        fields = ", ".join(f"{name}={value!r}" for name, value in self._answer.question.changed.items())
        texts = [("The same in a terminal", self._command()), ("As a Spec", f"Spec().replace({fields})")]
        ways = [(name, fix_text(note.fix, self.choices.held, FIELDS)) for name, note in held]
        self._shown += 1
        return {
            "number": self._shown,  # so that no two are equal, and each answers a choice
            "groups": [{"title": title, "fields": [self._field(f) for f in fields]} for title, fields in FORM],
            "row": _row(self._answer.plan, self._answer.assumed),
            "along": [_row(p, p.assumed) for p in self._answer.along],
            "refusals": [f"{FIELDS[name].label}: {note.why}" for name, note in held],
            "ways": [{"words": words, "name": name} for name, words in ways if words],
            "strategies": self._strategies(),
            "status": self._status(),
            "searching": self._searching,
            "bill": self._bill,
            "take": {"texts": texts},
        }

    def _command(self) -> str:
        """`fsdp-lab plan` with the question of the answer that is shown, and the bill."""
        question, machine = self._answer.question, self._answer.plan.machine
        hosts = None if question.per_host is None else machine.hosts
        options = {"hardware": machine.device.name, "ranks": machine.ranks, "hosts": hosts, "network": question.network}
        options |= {n: written(n, value) for n, value in question.changed.items() if n not in ("world_size", "devices")}
        given = {name: value for name, value in {**options, **self._bill}.items() if value not in (None, "")}
        words = (f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items())
        return " ".join(["fsdp-lab plan", *words])

    def _status(self) -> str:
        if self._said:
            return self._said
        if self.choices.held:
            return "The answer below is to the last choice that was possible."
        if self._searching:
            return "Strategies are tried."
        return "Choose: the answer follows at once. Nothing is trained, and the hardware need not be here."

    def _field(self, f: FieldRow) -> dict[str, Any]:
        now, p = self.choices.wanted, self._answer.plan
        value = self._chosen.get(f.name, self.choices.value(f.name))
        tokens = offered(f, now, value)
        text = next((label for label, token in tokens if token == value), f.write(value))
        notes = {"per_host": plural(p.machine.hosts, "host"), "accumulate": f"{p.spec.global_batch:,} samples a step"}
        return {
            **{name: getattr(f, name) for name in ("name", "label", "help", "typed", "most")},
            "options": [label for label, _ in tokens],
            "value": text,
            "placeholder": f.none,
            "least": None if f.choices else f.least,
            "refused": f.name in self.choices.held,
            "note": notes.get(f.name, ""),
        }

    def _strategies(self) -> dict[str, Any] | None:
        """The result of the search, and which of it is chosen now. None if the search was for another question."""
        now = self.choices.wanted
        if self._found is None or now.unsearched() != self._found[0].unsearched():
            return None
        search, chosen = self._found[1], searched_fields(now.planned_spec)
        table, used = search.table(), [searched_fields(one.plan.spec) == chosen for one in search.shown]
        return {
            "reading": search.sentence if search.top else f"None of {search.considered} strategies fits; nearest is:",
            "heads": table.columns,
            "rows": [{"used": is_used, "cells": row[1:]} for is_used, row in zip(used, table.rows, strict=True)],
        }


def _row(p: Plan, assumed: Mapping[str, Any]) -> dict[str, Any]:
    m = p.memory
    peak = f"The peak is in the {m.peak_phase}, at {m.peak_unit}; {size(m.held.total_bytes)} stay between steps."
    model = describe_value("model", p.spec.workload.model)
    about = {"hardware": p.machine.device.name, "model": model, "peak": peak}
    return {**row_of({**p.to_dict(), "assumed": assumed}), **about}
