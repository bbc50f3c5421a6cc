"""`Clinic`: a card for each known pain, above the dashboard that shows its symptom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape

import ipywidgets as widgets

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.dashboard.clinic.pains import PAINS, AnyRun, ClinicLab, Pain
from fsdp_lab.dashboard.dashboard import Dashboard
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, answer_while_busy, display_widget, prose, put, section, styled


class Clinic(InputForm):
    """Choose a pain, press *Reproduce*, read what the lab names as its cause, press *Apply the cure*, and compare.

        Clinic(lab)

    The last expression of a cell. It replaces the run of the lab, and its dashboard, which it shows below itself.
    `choose`, `reproduce` and `cure` are what the page does; the latter two return at once, and `wait` waits for them.

    Attributes:
        pain: the one that is shown. sick, cured: its newest runs; None: not yet.
    """

    css = "fsdp-sweep"

    def __init__(self, lab: ClinicLab) -> None:
        super().__init__()
        self._lab = lab
        self.pain: Pain = next(iter(PAINS.values()))
        self.sick: AnyRun | None = None
        self.cured: AnyRun | None = None
        self._worker: threading.Thread | None = None
        self.dashboard = Dashboard(lab)
        names = [(pain.title, name) for name, pain in PAINS.items()]
        self._choice = styled(self.dropdown("pain", names, names[0][1], "What hurts"), "fsdp-select")
        self._choice.observe(lambda change: self._chosen(change["new"]), "value")
        self._reproduce = self.button("Reproduce", "bug", "Train until it has this pain", self.reproduce)
        self._cure = self.button("Apply the cure", "medkit", "Train as the diagnosis says", self.cure)
        self._about, self._code, self._found, self.message = (
            styled(widgets.HTML(), "fsdp-sweep-said") for _ in range(4)
        )
        row = styled(widgets.Box([self._choice, self._reproduce, self._cure]), "fsdp-sweep-row")
        card = styled(
            section("Clinic", [row, self._about, self._code, self._found, self.message]), "fsdp-sweep", "fsdp-clinic"
        )
        self._box = styled(widgets.VBox([card, self.dashboard.widget]), "fsdp-lab")
        answer_while_busy(self.inputs)
        self._show()

    # -- what a person does --------------------------------------------------------------------------------------------

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
        self.attempt(lambda: self.choose(name))
        put(self._choice, "value", self.pain.cause.value)  # a choice while something is trained comes too late

    def reproduce(self) -> None:
        """Trains until the ranks have the pain."""
        self.sick = self.cured = None
        self._work("Training until it has this pain: some seconds.", self._make_sick)

    def cure(self) -> None:
        """Trains as the diagnosis of the run says. Raises ArgumentError before `reproduce`."""
        if self.sick is None:
            raise ArgumentError("cure", "there is nothing to cure yet", "press Reproduce first")
        self._work("Training again, with the cure: some seconds.", self._make_cured)

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until nothing is being trained for it. Raises TimeoutError."""
        if self._worker is not None:
            self._worker.join(timeout_s)
            if self._worker.is_alive():
                raise TimeoutError(f"the clinic still trained after {timeout_s} s")

    # -- how ---------------------------------------------------------------------------------------------------------

    def _require_idle(self) -> None:
        if self._worker is not None and self._worker.is_alive():
            raise ArgumentError("pain", "one is being trained", "wait some seconds")

    def _work(self, doing: str, work: Callable[[], None]) -> None:
        self._require_idle()
        self.say(doing)
        self._worker = threading.Thread(target=self._do, args=(work,), name="fsdp-lab-clinic", daemon=True)
        self._show(busy=True)
        self._worker.start()

    def _do(self, work: Callable[[], None]) -> None:
        def done() -> None:
            work()
            self.say("")

        try:
            self.attempt(done)
        finally:
            self._show()

    def _make_sick(self) -> None:
        self.sick = self.pain.reproduce(self._lab)

    def _make_cured(self) -> None:
        assert self.sick is not None
        self.cured = self.pain.cure(self._lab, self.sick)

    def _show(self, *, busy: bool = False) -> None:
        pain, self.dashboard.diagnosis.elsewhere = self.pain, self.sick
        for widget in (self._choice, self._reproduce):
            put(widget, "disabled", busy)
        put(self._cure, "disabled", busy or self.sick is None)
        put(self._reproduce, "button_style", "primary" if self.sick is None else "")
        put(self._cure, "button_style", "primary" if self.sick is not None and self.cured is None else "")
        put(self._about, "value", f"<p>{escape(pain.said)}</p><p><b>Look at:</b> {escape(pain.look)}</p>")
        put(self._code, "value", code_of(pain))
        put(self._code.layout, "display", "" if pain.code else HIDDEN)
        put(self._found, "value", "" if self.sick is None else found(pain, self.sick, self.cured))

    def _ipython_display_(self) -> None:
        self.dashboard.prepare()
        display_widget(self._box)

    def __repr__(self) -> str:
        return f"<Clinic: {self.pain.title}>"


def code_of(pain: Pain) -> str:
    """The loop, to be unfolded."""
    return f"<details><summary>The loop</summary><pre>{escape(pain.code.strip())}</pre></details>" if pain.code else ""


def found(pain: Pain, sick: AnyRun, cured: AnyRun | None) -> str:
    """What the lab says of the run, and the figure before and after, as HTML. While the dashboard shows the run, the failure
    itself is there."""
    named = [d for d in sick.diagnoses if d.cause is pain.cause]
    texts = [d.sentence if cured is not None else d.meaning for d in named]
    said = [f"<p><b>{prose(text)}</b> {prose(d.cure)}</p>" for text, d in zip(texts, named, strict=True)]
    said = said or ["<p>The lab has not named the cause this time.</p>"]
    rows = [("as reproduced", sick), *([("cured", cured)] if cured is not None else [])]
    cells = "".join(f"<tr><td>{name}</td><td>{escape(pain.measure.of(run))}</td></tr>" for name, run in rows)
    head = f"<tr><th></th><th>{escape(pain.measure.name)}</th></tr>"
    return f'{"".join(said)}<table class="fsdp-clinic-figures">{head}{cells}</table>'
