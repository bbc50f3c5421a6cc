"""`WhatIf`: a page that answers what-if questions with the planner: no ranks, no lab, hardware that need not be here.

Threads: a handler leaves a word and returns; one worker, which lives while there are words, takes the choices, asks the
planner and draws. A search has a thread of its own, so that answers come meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.core.spec import Spec
from fsdp_lab.dashboard.choices import Choices, ChoiceState
from fsdp_lab.dashboard.fields import Control, Group
from fsdp_lab.dashboard.forms import answer_while_busy, close_all, put
from fsdp_lab.dashboard.live import LiveView
from fsdp_lab.dashboard.scene import Scene
from fsdp_lab.dashboard.what_if import words
from fsdp_lab.dashboard.what_if.answer_card import AnswerCard
from fsdp_lab.dashboard.what_if.form import CUSTOM_ONLY, FIELDS, FORM
from fsdp_lab.dashboard.what_if.found_card import FoundCard
from fsdp_lab.dashboard.what_if.memory_card import MemoryCard
from fsdp_lab.dashboard.what_if.question import CUSTOM, Answer, Question, answer, best, usual, with_curve
from fsdp_lab.dashboard.what_if.scaling_card import ScalingCard
from fsdp_lab.dashboard.what_if.step_card import StepCard
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.planner.search import Search

RETRY_S = 0.05
STALE = "fsdp-stale"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Word:
    """What somebody wants: field values, or that a search's result is shown."""

    changes: Mapping[str, Any]
    at_s: float
    found: tuple[Question, Search] | None = None
    failed: str = ""  # a search, and why


class WhatIf:
    """Will a model fit, how fast will it train, and what limits it, on GPUs that you do not have? The last expression of a
    cell: choose, and read the answer.

    Args:
        spec: what to begin with; None: llama-7b on 64 GPUs.
        hardware: a name of `fsdp_lab.planner.devices.DEVICES`.
        per_host: GPUs of a host; None: eight.
        network: Gb/s of all network cards of a host; None: as is usual.

    Raises:
        SpecError: hardware that is unknown, GPUs that hosts do not divide, a model that nothing is known of.
    """

    def __init__(self, spec: Spec | None = None, *, hardware: str = "h100", per_host: int | None = None,
                 network: float | None = None) -> None:  # fmt: skip
        first = Question(spec=spec or usual(), hardware=hardware, per_host=per_host, network=network)
        self._lock = threading.Condition(threading.RLock())  # guards the words
        self._words: list[_Word] = []
        self._worker: threading.Thread | None = None
        self._searching = self._closed = False
        self._complaint = ""
        self._answers: list[Answer] = []  # that checking has come by, newest last
        self.answered_s = self.drawn_s = 0.0
        self._answer = answer(first)
        self.choices: Choices[Question] = Choices(first, check=self._check)
        self._cards = (AnswerCard(), MemoryCard(), StepCard(), ScalingCard())
        self._found = FoundCard(self.choose_together)
        self._live = LiveView()
        self._make_widgets()
        self._live.show(Scene(cards=[*self._cards, self._found], headline=lambda: words.headline(self._answer)))
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
        head = widgets.HTML("<h4>What if?</h4>")
        head.add_class("fsdp-slow-head")
        self._best = widgets.Button(
            description="Find the best", icon="search", tooltip="The fastest strategies that fit, at this global batch"
        )
        self._best.add_class("fsdp-button")
        self._best.button_style = "primary"
        self._best.on_click(lambda _: self.find())
        self._state = widgets.HTML()
        self._state.add_class("fsdp-state-line")
        bar = widgets.Box([head, self._best, self._state])
        bar.add_class("fsdp-bar")
        groups = widgets.Box([g.box for g in self._groups])
        groups.add_class("fsdp-groups")
        controls = widgets.VBox([bar, groups])
        controls.add_class("fsdp-controls")
        self._box = widgets.VBox([controls, self._live])
        self._box.add_class("fsdp-lab")
        self._box.add_class("fsdp-what-if")

    # -- what a person does ---------------------------------------------------------------------------------------

    def choose(self, **changes: Any) -> None:
        """Field values, as if they were chosen on the page: `page.choose(model="llama-70b", world_size=512)`."""
        self.choose_together(changes)

    def choose_together(self, changes: Mapping[str, Any]) -> None:
        self._leave(_Word(changes=dict(changes), at_s=time.perf_counter()))

    def _chosen(self, name: str, value: Any) -> None:
        self.choose_together({name: value})

    def find(self) -> None:
        """Searches for the fastest strategies that fit the present question."""
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
        self._say("working", "Strategies are tried.")
        found, failed = None, ""
        try:
            found = (question, best(question))
        except Exception as e:  # nobody above to raise to
            failed = str(e) or type(e).__name__
        self._leave(_Word(changes={}, at_s=time.perf_counter(), found=found, failed=failed))

    # -- what is said to code -------------------------------------------------------------------------------------

    @property
    def answer(self) -> Answer:
        """The newest, to what could be answered; it waits for what was chosen before."""
        self.settle()
        return self._answer

    @property
    def found(self) -> Search | None:
        """What the last search has found."""
        self.settle()
        return self._found.found

    @property
    def refusals(self) -> dict[str, str]:
        """Field -> why what is chosen there cannot be."""
        self.settle()
        return {name: self.choices.notes[name].text for name in self.choices.held}

    def settle(self, timeout_s: float = 60.0) -> None:
        """Until all that was chosen is answered and drawn. Raises TimeoutError."""
        with self._lock:
            if not self._lock.wait_for(lambda: self._worker is None and not self._searching, timeout_s):
                raise TimeoutError(f"no answer for {timeout_s:g} s")

    @property
    def widget(self) -> widgets.Widget:
        """To be put into a layout of your own."""
        return self._box

    def close(self) -> None:
        """Frees the widgets' comms. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._words.clear()
        self._live.close()
        close_all(self._box)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        self._live.prepare()
        return self._box._repr_mimebundle_(**options)

    def __repr__(self) -> str:
        return f"<WhatIf: {words.headline(self._answer)}; it {words.verdict(self._answer.plan)}>"

    # -- the worker -----------------------------------------------------------------------------------------------

    def _leave(self, word: _Word) -> None:
        with self._lock:
            if word.found is not None or word.failed:
                self._searching = False
            if self._closed:
                self._lock.notify_all()
                return
            self._words.append(word)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="fsdp-lab-what-if", daemon=True)
                self._worker.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                taken, self._words = self._words, []
                if not taken or self._closed:
                    self._worker = None
                    self._lock.notify_all()
                    return
            try:
                self._take(taken)
                self._complaint = next((word.failed for word in taken if word.failed), "")
            except Exception as e:
                log.exception("the what-if page failed")
                self._complaint = f"It failed: {type(e).__name__}: {e}"
            self._show()

    def _take(self, taken: list[_Word]) -> None:
        """First the prediction; the curve when nothing else is asked meanwhile."""
        before = self.choices.wanted
        for word in taken:
            if word.changes:
                self._say_if_it_lasts(word.changes)
                self.choices.choose(**word.changes)
            if word.found is not None:
                self._found.show(*word.found)
        question = self.choices.wanted
        if question != before:
            self._draw(self._known(question))
            self._show()
            self.answered_s = time.perf_counter() - taken[0].at_s
        with self._lock:
            superseded = bool(self._words)
        if not superseded and not self._answer.along:
            self._draw(with_curve(self._answer))
            self.drawn_s = time.perf_counter() - taken[0].at_s
        self._found.mark(question)
        self._flush()

    def _check(self, question: Question) -> None:
        """Whether it can be answered. What was found by the way is kept for the drawing."""
        if all(known.question != question for known in (self._answer, *self._answers)):
            self._answers = [*self._answers[-2:], answer(question)]

    def _known(self, question: Question) -> Answer:
        return next((a for a in (self._answer, *self._answers) if a.question == question), None) or answer(question)

    def _say_if_it_lasts(self, changes: Mapping[str, Any]) -> None:
        """A model that is no preset is built without values first, in seconds."""
        model, wrap = changes.get("model"), str(changes.get("wrap", ""))
        named = model is None or (isinstance(model, str) and model in PRESETS)
        if not named or wrap.startswith(("min_params:", "class:")):
            self._say("working", "The model is built without values, to know its shape.")

    # -- what is shown --------------------------------------------------------------------------------------------

    def _draw(self, answered: Answer) -> None:
        self._answer = answered
        for card in self._cards:
            card.show(answered)
        self._flush()

    def _flush(self) -> None:
        """Sends what is new; where a page still paints, when it has."""
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
            control.say(ChoiceState.REFUSED if refused else ChoiceState.IDLE, "" if refused else self._aside(name))
        for group in self._groups:
            group.explain(choices)
        shown = choices.value("hardware") == CUSTOM
        for name in CUSTOM_ONLY:
            put(self._controls[name].box.layout, "display", "" if shown else "none")
        (self._box.add_class if choices.held else self._box.remove_class)(STALE)
        put(self._best, "disabled", self._searching)
        if self._complaint:
            self._say("failed", self._complaint)
        elif choices.held:
            self._say("refused", "The answer below is to what was chosen before.")
        elif self._searching:
            self._say("working", "Strategies are tried.")
        else:
            self._say(
                "ready", "Choose: the answer follows at once. Nothing is trained, and nothing of it need be here."
            )

    def _aside(self, name: str) -> str:
        """What follows from a field."""
        p = self._answer.plan
        if name == "per_host":
            return f"{p.machine.hosts:,} host{'s' * (p.machine.hosts != 1)}"
        if name == "accumulate":
            return f"{p.spec.global_batch:,} samples a step"
        return ""

    def _say(self, word: str, text: str) -> None:
        put(self._state, "value", f'<span class="fsdp-slow-state fsdp-slow-{word}" role="status">{word}</span> '
                                  f"<span>{escape(text)}</span>")  # fmt: skip
