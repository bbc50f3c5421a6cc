"""`WhatIf`: the page in a notebook, where the kernel answers any value, for hardware other than this machine's.

The page draws the trait `state`, which outlives a reload, and sends what a person chooses. A worker thread applies it,
asks the planner and replaces the state. A search has a thread of its own, so that questions are answered meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anywidget
import traitlets

from fsdp_lab.base.formatting import plural, size
from fsdp_lab.dashboard.choices import Choices, Note
from fsdp_lab.dashboard.fields import fix_text, offered
from fsdp_lab.dashboard.forms import answer_while_busy
from fsdp_lab.planner.plan import Plan, sentences
from fsdp_lab.planner.questions import searched
from fsdp_lab.planner.search import Search
from fsdp_lab.report.what_if.page import SCRIPT, STYLES, look, row_of
from fsdp_lab.report.what_if.question import (
    CUSTOM,
    CUSTOM_ONLY,
    FIELDS,
    FORM,
    Answer,
    Question,
    default_spec,
    searched_fields,
)
from fsdp_lab.spec.describe import describe_value
from fsdp_lab.spec.fields import FieldRow
from fsdp_lab.spec.spec import Spec

log = logging.getLogger(__name__)


class WhatIf(anywidget.AnyWidget):
    """Will a model fit, how fast will it train, and what limits it, on GPUs that you do not have? The last expression of a
    cell: choose, and read the answer.

    Args:
        spec: the first question; None: llama-7b on 64 GPUs.
        hardware: a name of `fsdp_lab.planner.devices.DEVICES`.
        per_host: GPUs of a host; None: eight.
        network: Gb/s of all network cards of a host; None: the usual rate.

    Raises:
        SpecError: unknown hardware, a number of GPUs that is no multiple of a host's, an unknown model.
    """

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
    ) -> None:
        first = Question(spec=spec or default_spec(), hardware=hardware, per_host=per_host, network=network)
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._left = self._asked = self._shown = 0
        self._searching = self._closed = False
        self._doing = self._failure = ""
        self._found: tuple[Question, Search] | None = None
        self._answer = Answer.of(first).with_curve()
        self._computed: list[Answer] = []  # while choices were checked, newest last
        self.choices: Choices[Question] = Choices(first, check=self._compute)
        self._worker, self._searcher = (ThreadPoolExecutor(1, f"fsdp-lab-what-if-{n}") for n in ("answer", "search"))
        super().__init__(state=self._state())
        self.on_msg(self._on_message)
        answer_while_busy([self])

    def choose(self, **changes: Any) -> None:
        """Sets field values as if they were chosen on the page: `page.choose(model="llama-70b", world_size=512)`."""
        with self._changed:
            self._asked += 1
            self._submit(self._worker, self._choose, lambda: changes, self._asked)

    def find(self) -> None:
        """Searches for the fastest strategies that fit, for the current question."""
        with self._changed:
            if not self._searching:
                self._searching = True
                # For what is chosen once earlier choices are handled.
                self._submit(self._worker, lambda: self._submit(self._searcher, self._search, self.choices.wanted))

    def _on_message(self, _widget: Any, content: Mapping[str, Any], _buffers: Any) -> None:
        if content["kind"] == "find":
            return self.find()
        with self._changed:
            self._asked += 1
            self._submit(self._worker, self._choose, lambda: self._read(content), self._asked)

    def _read(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what a message chooses: a value of a field, the fix of a refused one, or a strategy of the search."""
        if content["kind"] == "take":
            assert self._found is not None
            return searched_fields(self._found[1].shown[int(content["place"])].plan.spec)
        name = str(content["name"])
        if content["kind"] == "fix":
            return {name: self.choices.value(name), **self.choices.notes[name].fix}
        text, tokens = str(content["text"]), dict(offered(FIELDS[name], self.choices.wanted, self.choices.value(name)))
        return {name: tokens[text] if text in tokens else FIELDS[name].read(text)}

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
        for pool in (self._worker, self._searcher):
            pool.shutdown(wait=False, cancel_futures=True)
        self.layout.close()
        super().close()

    def __repr__(self) -> str:
        about, fit, *_ = sentences(self._answer.plan)
        return f"<WhatIf: {about}. {fit}>"

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., None], *args: Any) -> None:
        with self._changed:
            if not self._closed:
                self._left += 1
                pool.submit(self._attempt, work, *args)

    def _attempt(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
            failure = ""
        except Exception as e:  # in a thread there is no caller to raise to
            log.exception("the what-if page failed")
            failure = f"It failed: {type(e).__name__}: {e}"
        with self._changed:
            self._failure = failure
            self._show()
            self._left -= 1
            self._changed.notify_all()

    def _choose(self, changes: Callable[[], Mapping[str, Any]], number: int) -> None:
        """Shows the prediction first, and the curve if nothing else was asked by then."""
        chosen = changes()
        # A model that is no preset is first built without values, which takes seconds.
        model, tokens = chosen.get("model"), [token for _, token in offered(FIELDS["model"], self.choices.wanted, None)]
        is_named = model is None or model in tokens
        if not is_named or str(chosen.get("wrap", "")).startswith(("min_params:", "class:")):
            self._doing = "The model is built without values, to know its shape."
            self._show()
        self.choices.choose(**chosen)
        self._doing = ""
        question = self.choices.wanted
        if question != self._answer.question:
            self._answer = self._computed_for(question) or Answer.of(question)
            self._show()
        if number == self._asked and not self._answer.along:
            self._answer = self._answer.with_curve()

    def _compute(self, question: Question) -> None:
        """Raises if the question cannot be answered; keeps the answer."""
        if self._computed_for(question) is None:
            self._computed = [*self._computed[-2:], Answer.of(question)]

    def _computed_for(self, question: Question) -> Answer | None:
        return next((a for a in (self._answer, *self._computed) if a.question == question), None)

    def _search(self, question: Question) -> None:
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
        usual = Spec().flat()
        spec = self._answer.question.spec.flat()
        changed = [f"{name}={value!r}" for name, value in spec.items() if value != usual[name]]
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
            "take": {"title": "The same as a Spec", "text": f"Spec().replace({', '.join(changed)})"},
        }

    def _status(self) -> str:
        if self._failure or self._doing:
            return self._failure or self._doing
        if self.choices.held:
            return "The answer below is to the last choice that was possible."
        if self._searching:
            return "Strategies are tried."
        return "Choose: the answer follows at once. Nothing is trained, and the hardware need not be here."

    def _field(self, f: FieldRow) -> dict[str, Any]:
        now, value, p = self.choices.wanted, self.choices.value(f.name), self._answer.plan
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
            "hidden": f.name in CUSTOM_ONLY and self.choices.value("hardware") != CUSTOM,
        }

    def _strategies(self) -> dict[str, Any] | None:
        """The result of the search, which of it is chosen now, and whether the search was for another question."""
        if self._found is None:
            return None
        (question, search), now = self._found, self.choices.wanted
        same = now.unsearched() == question.unsearched()
        chosen, table = searched_fields(now.planned_spec) if same else None, search.table()
        used = [searched_fields(one.plan.spec) == chosen for one in search.shown]
        return {
            "reading": search.sentence if search.top else f"None of {search.considered} strategies fits; nearest is:",
            "heads": table.columns,
            "rows": [{"used": is_used, "cells": row[1:]} for is_used, row in zip(used, table.rows, strict=True)],
            "note": "" if same else "Found for what was asked before: press Find the best again.",
        }


def _row(p: Plan, assumed: Mapping[str, Any]) -> dict[str, Any]:
    m = p.memory
    peak = f"The peak is in the {m.peak_phase}, at {m.peak_unit}; {size(m.held.total_bytes)} stay between steps."
    model = describe_value("model", p.spec.workload.model)
    about = {"hardware": p.machine.device.name, "model": model, "peak": peak}
    return {**row_of({**p.to_dict(), "assumed": assumed}), **about}
