"""The card of what keeps a run from being lost: checkpoints, evaluation, recovery, incidents, and drills that show that
it works.

One line of it is always seen: what is chosen, or what has happened, with the buttons of the way out. The rest is folded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.dashboard.drill_form import DrillForm
from fsdp_lab.dashboard.evaluation_form import EvaluationForm
from fsdp_lab.dashboard.parts import button, put, status
from fsdp_lab.dashboard.ports import LabLike, RunLike
from fsdp_lab.dashboard.recovery_form import RecoveryForm, can_recover
from fsdp_lab.dashboard.saving_form import SavingForm

FOLDED = "none"
Begin = Callable[[Callable[[Mapping[str, Any]], RunLike]], None]


class SafetyBox:
    """`widget` is to be shown, `tick` to be called often; `options` are for `Lab.run`.

    Args:
        begin: `Controls.begin`: shows what a run trains that something else than Start begins.
    """

    def __init__(self, lab: LabLike, begin: Begin) -> None:
        self._lab, self._begin = lab, begin
        self._complaint = ""
        self._saving = SavingForm(lab, self._resume)
        self._evaluation = EvaluationForm()
        self._recovery = RecoveryForm(lab, self._complain)
        self._drill = DrillForm(lab)
        self._make_widgets()
        self.tick(None)

    def _make_widgets(self) -> None:
        head = widgets.HTML("<h4>Safety</h4>")
        head.add_class("fsdp-slow-head")
        self._fold = button("Show", "angle-down", "Checkpoints, evaluation, recovery, incidents, drills", self.toggle)
        self._fold.add_class("fsdp-fold")
        self._said = widgets.HTML()
        self._said.add_class("fsdp-state-line")
        bar = widgets.Box([head, self._fold, self._said, *self._recovery.buttons])
        bar.add_class("fsdp-bar")
        beside = widgets.VBox([self._evaluation.widget, self._recovery.widget, self._drill.widget])
        forms = widgets.Box([self._saving.widget, beside])
        forms.add_class("fsdp-safety-forms")
        self._body = widgets.VBox([forms, self._recovery.incidents], layout=widgets.Layout(display=FOLDED))
        self._body.add_class("fsdp-safety-body")
        self.widget = widgets.VBox([bar, self._body])
        self.widget.add_class("fsdp-safety")

    @property
    def answering(self) -> list[widgets.Widget]:
        """The widgets that must answer while a cell runs."""
        return [self._fold, *(widget for form in self._forms for widget in form.answering)]

    @property
    def _forms(self) -> tuple[SavingForm, EvaluationForm, RecoveryForm, DrillForm]:
        return self._saving, self._evaluation, self._recovery, self._drill

    def options(self) -> dict[str, Any]:
        """How the next run is saved, evaluated and recovered. Raises FieldError, which the card shows as well."""
        saving, recovering = self._saving.saving(), self._recovery.recovering()
        return {"save": saving, "recover": recovering, "evaluate": self._evaluation.evaluating()}

    def toggle(self) -> None:
        """Unfolds the card, or folds it."""
        folded = self._body.layout.display == FOLDED
        put(self._body.layout, "display", "" if folded else FOLDED)
        put(self._fold, "description", "Hide" if folded else "Show")
        put(self._fold, "icon", "angle-up" if folded else "angle-down")

    def _resume(self, folder: str) -> None:
        self._begin(lambda changes: self._lab.resume(folder, **self.options(), **changes))

    def _complain(self, words: str) -> None:
        self._complaint = words
        self._show(self._lab.current)

    def tick(self, run: RunLike | None) -> None:
        """Follows the run that is shown."""
        for form in self._forms:
            form.tick(run)
        self._show(run)

    def _show(self, run: RunLike | None) -> None:
        state = run.state.value if run is not None else ""
        if run is None or not (state == "recovering" or can_recover(run)):
            state, words, self._complaint = "", self._summary(run), ""
        else:
            words = self._complaint or run.reason
        badge = f'<span class="fsdp-state fsdp-state-{state}">{state}</span> ' if state else ""
        plain = f'<span role="status">{escape(words)}</span>' if state and not self._complaint else ""
        put(self._said, "value", badge + (plain or status(words, wrong=bool(self._complaint))))

    def _summary(self, run: RunLike | None) -> str:
        count = len(run.incidents) if run is not None else 0
        incidents = f"{count} incident{'s' * (count != 1)}" if count else "no incident"
        return " · ".join(filter(None, [self._saving.words, self._evaluation.words, self._recovery.words, incidents]))

    def retire(self) -> None:
        """The lab is closed: nothing can be done any more."""
        for form in self._forms:
            form.retire()
