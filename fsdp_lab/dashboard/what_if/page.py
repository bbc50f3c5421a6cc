"""`WhatIf`: a page that answers what-if questions with the planner, without ranks, for hardware other than this machine's.

Threads: a handler queues a request and returns. A worker thread, which exists while there are requests, applies the
choices, asks the planner and draws. A search has a thread of its own, so that questions are answered meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.core.spec import Spec
from fsdp_lab.dashboard.choices import Choices, ChoiceState
from fsdp_lab.dashboard.fields import Control, Group
from fsdp_lab.dashboard.forms import answer_while_busy, close_all, display_widget, put
from fsdp_lab.dashboard.live import LiveView
from fsdp_lab.dashboard.scene import Scene
from fsdp_lab.dashboard.what_if.charts import MemoryCard, ScalingCard, StepCard
from fsdp_lab.dashboard.what_if.form import CUSTOM_ONLY, FIELDS, FORM
from fsdp_lab.dashboard.what_if.question import CUSTOM, Answer, Question, answer, best, default_spec, with_curve
from fsdp_lab.dashboard.what_if.tables import AnswerCard, StrategiesCard, headline, verdict
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.search import Search

RETRY_S = 0.05
STALE = "fsdp-stale"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """New field values, or the outcome of a search."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    found: tuple[Question, Search] | None = None
    failure: str = ""  # why a search failed
    at_s: float = field(default_factory=time.perf_counter)


class WhatIf:
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

    def __init__(self, spec: Spec | None = None, *, hardware: str = "h100", per_host: int | None = None,
                 network: float | None = None) -> None:  # fmt: skip
        first = Question(spec=spec or default_spec(), hardware=hardware, per_host=per_host, network=network)
        self._lock = threading.Condition(threading.RLock())  # guards the requests
        self._requests: list[_Request] = []
        self._worker: threading.Thread | None = None
        self._searching = self._closed = False
        self._failure = ""
        self._answers: list[Answer] = []  # computed while choices were checked, newest last
        self.answered_s = self.drawn_s = 0.0
        self._answer = answer(first)
        self.choices: Choices[Question] = Choices(first, check=self._check)
        self._cards = (AnswerCard(), MemoryCard(), StepCard(), ScalingCard())
        self._strategies = StrategiesCard(self.choose_together)
        self._live = LiveView()
        self._make_widgets()
        self._live.show(Scene(cards=[*self._cards, self._strategies], headline=lambda: headline(self._answer)))
        self._draw(with_curve(self._answer))
        self._show()
        answer_while_busy([self._live, self._best, *(g.button for g in self._groups),
                           *(i for c in self._controls.values() for i in c.inputs)])  # fmt: skip

    def _make_widgets(self) -> None:
        self._controls = {name: Control(f, self.choices.wanted, self._chosen) for name, f in FIELDS.items()}
        self._groups = [
            Group(title, [self._controls[f.name] for f in fields], self.choose_together, list(FIELDS.values()))
            for title, fields in FORM
        ]
        head = widgets.HTML("<h4>What if?</h4>").add_class("fsdp-slow-head")
        tooltip = "The fastest strategies that fit, at this global batch"
        self._best = widgets.Button(description="Find the best", icon="search", tooltip=tooltip, button_style="primary")
        self._best.add_class("fsdp-button").on_click(lambda _: self.find())
        self._state = widgets.HTML().add_class("fsdp-state-line")
        bar = widgets.Box([head, self._best, self._state]).add_class("fsdp-bar")
        groups = widgets.Box([g.box for g in self._groups]).add_class("fsdp-groups")
        controls = widgets.VBox([bar, groups]).add_class("fsdp-controls")
        self._box = widgets.VBox([controls, self._live]).add_class("fsdp-lab").add_class("fsdp-what-if")

    # -- what a person does, from any thread ------------------------------------------------------------------------

    def choose(self, **changes: Any) -> None:
        """Sets field values as if they were chosen on the page: `page.choose(model="llama-70b", world_size=512)`."""
        self.choose_together(changes)

    def choose_together(self, changes: Mapping[str, Any]) -> None:
        self._submit(_Request(changes=dict(changes)))

    def _chosen(self, name: str, value: Any) -> None:
        self.choose_together({name: value})

    def find(self) -> None:
        """Searches for the fastest strategies that fit, for the current question."""
        with self._lock:
            if self._searching or self._closed:
                return
            self._searching = True
        put(self._best, "disabled", True)
        threading.Thread(target=self._search, name="fsdp-lab-what-if-search", daemon=True).start()

    def _search(self) -> None:
        """Searches for the current question, once earlier choices are handled."""
        with self._lock:
            self._lock.wait_for(lambda: self._worker is None)
            question = self.choices.wanted
        self._set_status("working", "Strategies are tried.")
        try:
            self._submit(_Request(found=(question, best(question))))
        except Exception as e:  # in a thread there is no caller to raise to
            self._submit(_Request(failure=str(e) or type(e).__name__))

    # -- what a program reads -------------------------------------------------------------------------------------

    @property
    def answer(self) -> Answer:
        """The newest answer, after earlier choices are handled; refused choices leave the former one."""
        self.settle()
        return self._answer

    @property
    def found(self) -> Search | None:
        """The result of the last search."""
        self.settle()
        return self._strategies.search

    @property
    def refusals(self) -> dict[str, str]:
        """Field -> why the chosen value is refused."""
        self.settle()
        return {name: self.choices.notes[name].text for name in self.choices.held}

    def settle(self, timeout_s: float = 60.0) -> None:
        """Waits until all choices are answered and drawn. Raises TimeoutError."""
        with self._lock:
            if not self._lock.wait_for(lambda: self._worker is None and not self._searching, timeout_s):
                raise TimeoutError(f"no answer for {timeout_s:g} s")

    @property
    def widget(self) -> widgets.Widget:
        """The page, for a layout of your own."""
        return self._box

    def close(self) -> None:
        """Frees the widgets' comms. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._requests.clear()
        self._live.close()
        close_all(self._box)

    def _ipython_display_(self) -> None:
        self._live.prepare()
        display_widget(self._box)

    def __repr__(self) -> str:
        return f"<WhatIf: {headline(self._answer)}; it {verdict(self._answer.plan)}>"

    # -- the worker -----------------------------------------------------------------------------------------------

    def _submit(self, request: _Request) -> None:
        with self._lock:
            if request.found is not None or request.failure:
                self._searching = False
            if self._closed:
                self._lock.notify_all()
                return
            self._requests.append(request)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="fsdp-lab-what-if", daemon=True)
                self._worker.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                requests, self._requests = self._requests, []
                if not requests or self._closed:
                    self._worker = None
                    self._lock.notify_all()
                    return
            try:
                self._handle(requests)
                self._failure = next((request.failure for request in requests if request.failure), "")
            except Exception as e:
                log.exception("the what-if page failed")
                self._failure = f"It failed: {type(e).__name__}: {e}"
            self._show()

    def _handle(self, requests: list[_Request]) -> None:
        """Draws the prediction first, and the curve if there is no new request by then."""
        before = self.choices.wanted
        for request in requests:
            if request.changes:
                self._announce_slow(request.changes)
                self.choices.choose(**request.changes)
            if request.found is not None:
                self._strategies.show(*request.found)
        question = self.choices.wanted
        if question != before:
            self._draw(self._computed(question) or answer(question))
            self._show()
            self.answered_s = time.perf_counter() - requests[0].at_s
        with self._lock:
            superseded = bool(self._requests)
        if not superseded and not self._answer.along:
            self._draw(with_curve(self._answer))
            self.drawn_s = time.perf_counter() - requests[0].at_s
        self._strategies.compare(question)
        self._flush()

    def _check(self, question: Question) -> None:
        """Raises if the question cannot be answered; keeps the answer to be drawn."""
        if self._computed(question) is None:
            self._answers = [*self._answers[-2:], answer(question)]

    def _computed(self, question: Question) -> Answer | None:
        return next((a for a in (self._answer, *self._answers) if a.question == question), None)

    def _announce_slow(self, changes: Mapping[str, Any]) -> None:
        """A model that is no preset is first built without values, which takes seconds."""
        model, wrap = changes.get("model"), str(changes.get("wrap", ""))
        named = model is None or (isinstance(model, str) and model in PRESETS)
        if not named or wrap.startswith(("min_params:", "class:")):
            self._set_status("working", "The model is built without values, to know its shape.")

    # -- what is shown --------------------------------------------------------------------------------------------

    def _draw(self, answered: Answer) -> None:
        self._answer = answered
        for card in self._cards:
            card.show(answered)
        self._flush()

    def _flush(self) -> None:
        """Sends what is new; where a page is still painting, waits for it."""
        while True:
            held = self._live.ticks_held
            if self._live.flush() or self._live.ticks_held == held:
                return
            time.sleep(RETRY_S)

    def _show(self) -> None:
        choices = self.choices
        for name, control in self._controls.items():
            control.show(choices.wanted, choices.value(name))
            refused = name in choices.held
            control.say(
                ChoiceState.REFUSED if refused else ChoiceState.IDLE, "" if refused else self._consequence(name)
            )
        for group in self._groups:
            group.explain(choices)
        shown = choices.value("hardware") == CUSTOM
        for name in CUSTOM_ONLY:
            put(self._controls[name].box.layout, "display", "" if shown else "none")
        (self._box.add_class if choices.held else self._box.remove_class)(STALE)
        put(self._best, "disabled", self._searching)
        if self._failure:
            self._set_status("failed", self._failure)
        elif choices.held:
            self._set_status("refused", "The answer below is to the last choice that was possible.")
        elif self._searching:
            self._set_status("working", "Strategies are tried.")
        else:
            self._set_status(
                "ready", "Choose: the answer follows at once. Nothing is trained, and the hardware need not be here."
            )

    def _consequence(self, name: str) -> str:
        """What follows from the value of a field."""
        p = self._answer.plan
        if name == "per_host":
            return f"{p.machine.hosts:,} host{'s' * (p.machine.hosts != 1)}"
        if name == "accumulate":
            return f"{p.spec.global_batch:,} samples a step"
        return ""

    def _set_status(self, state: str, text: str) -> None:
        put(self._state, "value", f'<span class="fsdp-slow-state fsdp-slow-{state}" role="status">{state}</span> '
                                  f"<span>{escape(text)}</span>")  # fmt: skip
