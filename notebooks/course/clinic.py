"""`Clinic`: a card for each known pain, above the dashboard that shows its symptom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from html import escape

import ipywidgets as widgets

from course.pains import PAINS, AnyRun, Pain
from fsdp_lab import Dashboard, Lab
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, answer_while_busy, display_widget, prose, put, section, styled

STYLE = """<style>
.fsdp-clinic p { margin: 0 0 6px; }
.fsdp-clinic pre { white-space: pre-wrap; margin: 4px 0 0; padding: 6px 8px; border: 1px solid var(--fsdp-line); }
.fsdp-clinic table { border-collapse: collapse; margin: 0 0 4px; }
.fsdp-clinic th, .fsdp-clinic td { text-align: left; padding: 2px 14px 2px 0; font-weight: normal; }
.fsdp-clinic th { color: var(--fsdp-ink-soft); }
</style>"""


class Clinic(InputForm):
    """Choose a pain, press *Reproduce*, read what the lab names as its cause, press *Apply the cure*, and compare.

        Clinic(lab)

    The last expression of a cell. It replaces the run of the lab, and its dashboard, which it shows below itself.
    `choose`, `reproduce` and `cure` are what the page does; the latter two return at once, and `wait` waits for them.

    Attributes:
        pain: the one that is shown. sick, cured: its newest runs; None: not yet.
    """

    css = "fsdp-sweep"

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self._lab, self.dashboard = lab, Dashboard(lab)
        self.pain: Pain = next(iter(PAINS.values()))
        self.sick: AnyRun | None = None
        self.cured: AnyRun | None = None
        self._worker = threading.Thread()
        names = [(pain.title, name) for name, pain in PAINS.items()]
        self._choice = styled(self.dropdown("pain", names, names[0][1], "What hurts"), "fsdp-select")
        self._choice.observe(lambda change: self._chosen(change["new"]), "value")
        self._reproduce = self.button("Reproduce", "bug", "Train until it has this pain", self.reproduce)
        self._cure = self.button("Apply the cure", "medkit", "Train as the diagnosis says", self.cure)
        self._about, self._code, self._found, self.message = (
            styled(widgets.HTML(), "fsdp-sweep-said") for _ in range(4)
        )
        row = styled(widgets.Box([self._choice, self._reproduce, self._cure]), "fsdp-sweep-row")
        card = section("Clinic", [row, self._about, self._code, self._found, self.message])
        card = styled(card, "fsdp-sweep", "fsdp-clinic")
        self.widget = styled(widgets.VBox([widgets.HTML(STYLE), card, self.dashboard.widget]), "fsdp-lab")
        answer_while_busy(self.inputs)
        self._show()

    def choose(self, name: str) -> None:
        """Shows another pain. Raises ArgumentError for an unknown one, or while one is being had."""
        if name not in PAINS:
            raise ArgumentError("pain", f"there is no {name!r}", f"take one of {', '.join(PAINS)}")
        self._require_idle()
        self.pain, self.sick, self.cured = PAINS[name], None, None
        put(self._choice, "value", name)
        self.say("")
        self._show()

    def _chosen(self, name: str) -> None:
        self.attempt(partial(self.choose, name))
        put(self._choice, "value", self.pain.cause.value)  # a choice while something is trained comes too late

    def reproduce(self) -> None:
        """Trains until the ranks have the pain."""
        self.sick = self.cured = None
        self._begin("Training until it has this pain: some seconds.", "sick", self.pain.reproduce)

    def cure(self) -> None:
        """Trains as the diagnosis of the run says. Raises ArgumentError before `reproduce`."""
        if self.sick is None:
            raise ArgumentError("cure", "there is nothing to cure yet", "press Reproduce first")
        self._begin("Training again, with the cure: some seconds.", "cured", partial(self.pain.cure, run=self.sick))

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until nothing is being trained for it. Raises TimeoutError."""
        if self._worker.ident:
            self._worker.join(timeout_s)
        if self._worker.is_alive():
            raise TimeoutError(f"the clinic still trained after {timeout_s} s")

    def _require_idle(self) -> None:
        if self._worker.is_alive():
            raise ArgumentError("pain", "one is being trained", "wait some seconds")

    def _begin(self, doing: str, name: str, train: Callable[[Lab], AnyRun]) -> None:
        def done() -> None:
            setattr(self, name, train(self._lab))
            self.say("")

        def work() -> None:
            self.attempt(done)
            self._show()

        self._require_idle()
        self.say(doing)
        self._show(busy=True)
        self._worker = threading.Thread(target=work, name="fsdp-lab-clinic", daemon=True)
        self._worker.start()

    def _show(self, *, busy: bool = False) -> None:
        pain, self.dashboard.diagnosis.elsewhere = self.pain, self.sick
        for widget, disabled in ((self._choice, busy), (self._reproduce, busy), (self._cure, busy or not self.sick)):
            put(widget, "disabled", disabled)
        put(self._reproduce, "button_style", "" if self.sick else "primary")
        put(self._cure, "button_style", "primary" if self.sick and not self.cured else "")
        put(self._about, "value", f"<p>{escape(pain.said)}</p><p><b>Look at:</b> {escape(pain.look)}</p>")
        code = f"<details><summary>The loop</summary><pre>{escape(pain.code.strip())}</pre></details>"
        put(self._code, "value", code if pain.code else "")
        put(self._code.layout, "display", "" if pain.code else HIDDEN)
        put(self._found, "value", self._told())

    def _told(self) -> str:
        """What the lab says of the run, and the figure before and after, as HTML. While the dashboard shows the run, the
        failure itself is there."""
        if self.sick is None:
            return ""
        named = [d for d in self.sick.diagnoses if d.cause is self.pain.cause]
        said = [(d.sentence, d.cure) for d in named]
        said = said or [("The lab has not named the cause this time.", "")]
        runs = {"as reproduced": self.sick, **({"cured": self.cured} if self.cured is not None else {})}
        measure = self.pain.measure
        rows = "".join(f"<tr><td>{name}</td><td>{escape(measure.of(run))}</td></tr>" for name, run in runs.items())
        texts = "".join(f"<p><b>{prose(text)}</b> {prose(cure)}</p>" for text, cure in said)
        return f"{texts}<table><tr><th></th><th>{escape(measure.name)}</th></tr>{rows}</table>"

    def _ipython_display_(self) -> None:
        self.dashboard.prepare()
        display_widget(self.widget)
