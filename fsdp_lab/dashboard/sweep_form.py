"""The form of a comparison: what is combined, what of it can run and how long that takes; then how far it is.

Handlers run on whatever thread the page's message arrives on, `tick` on the tick thread; one lock orders them. Nothing
here waits for a rank.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any, cast

import ipywidgets as widgets

from fsdp_lab.core.describe import describe_fields, describe_strategy, field_title, flat_fields
from fsdp_lab.core.spec import BACKENDS, OFFLOADS, PRECISIONS, SHARDINGS, Spec
from fsdp_lab.dashboard.board import running
from fsdp_lab.dashboard.parts import put
from fsdp_lab.dashboard.ports import LabLike, SweepLike
from fsdp_lab.runs import Refusal
from fsdp_lab.runs.sweep import ROUNDS, combine
from fsdp_lab.runs.view import RunView

COMBINED: Mapping[str, Sequence[Any]] = {
    "backend": BACKENDS,
    "sharding": SHARDINGS,
    "precision": tuple(PRECISIONS),
    "offload": OFFLOADS,
}
STEPS = 30
TURN_S = 0.6  # what a turn costs beside its steps, about: a build and a first step
MEASURED_STEPS = 9
HIDE = "none"


class SweepForm:
    """`toggle` opens and closes it; `widget` is to be shown, `tick` to be called often.

    Args:
        wanted: the Spec whose fields are combined with the lists.
    """

    def __init__(self, lab: LabLike, wanted: Callable[[], Spec]) -> None:
        self._lab, self._wanted = lab, wanted
        self._lock = threading.RLock()
        self._open = False
        self._quiet = False  # chips are set by us
        self._counted: Spec | None = None  # what was counted with
        self._begun: SweepLike | None = None
        self._words = ""
        self._make_widgets()
        self._show()

    def _make_widgets(self) -> None:
        self._chips = {name: [self._chip(name, value) for value in values] for name, values in COMBINED.items()}
        rows = [self._row(field_title(name), chips) for name, chips in self._chips.items()]
        self._steps = self._number("steps", STEPS, "Of each run", 1, 100_000)
        self._rounds = self._number(
            "rounds", ROUNDS, "Turns of each run, so that drift of the machine affects all alike", 1, 100
        )
        self._start = self._button("Start comparison", "play", "Train all that can run, in turns", self.start)
        self._start.button_style = "primary"
        self._away = self._button("Close", "", "Close this form", self.toggle)
        self._ask = widgets.VBox([*rows, self._row("", [self._steps, self._rounds, self._start, self._away])])
        self._said = widgets.HTML()
        self._said.add_class("fsdp-sweep-said")
        self._stop = self._button("Stop comparison", "stop", "End it and keep what was measured", self.stop)
        self._far = widgets.HTML()
        self._far.add_class("fsdp-sweep-said")
        self._going = self._row("", [self._stop, self._far])
        self.widget = widgets.VBox([self._ask, self._said, self._going], layout=widgets.Layout(display=HIDE))
        self.widget.add_class("fsdp-sweep")
        self._ask.add_class("fsdp-sweep-ask")

    def _chip(self, name: str, value: Any) -> widgets.ToggleButton:
        chip = widgets.ToggleButton(description=str(value), tooltip=f"Compare with {field_title(name)} {value}")
        chip.add_class("fsdp-chip")
        chip.observe(lambda _: None if self._quiet else self._count(), "value")
        return chip

    def _number(self, label: str, value: int, tooltip: str, least: int, most: int) -> widgets.BoundedIntText:
        number = widgets.BoundedIntText(value=value, min=least, max=most, description=label, tooltip=tooltip)
        number.add_class("fsdp-number")
        number.observe(lambda _: self._count(), "value")
        return number

    def _button(self, word: str, icon: str, tooltip: str, press: Callable[[], None]) -> widgets.Button:
        button = widgets.Button(description=word, icon=icon, tooltip=tooltip)
        button.add_class("fsdp-sweep-button")
        button.on_click(lambda _: self._guarded(press))
        return button

    def _row(self, name: str, parts: Sequence[widgets.Widget]) -> widgets.Box:
        head = [widgets.HTML(escape(name))] if name else []
        for label in head:
            label.add_class("fsdp-sweep-name")
        row = widgets.Box([*head, *parts])
        row.add_class("fsdp-sweep-row")
        return row

    @property
    def answering(self) -> list[widgets.Widget]:
        """The widgets that must answer while a cell runs."""
        chips = [chip for chips in self._chips.values() for chip in chips]
        return [*chips, self._steps, self._rounds, self._start, self._away, self._stop]

    # -- what a person does -----------------------------------------------------------------------------------------

    def toggle(self) -> None:
        """Opens it with what is trained now chosen, or closes it."""
        with self._lock:
            self._open = not self._open
            if self._open:
                self._choose(self._wanted())
                self._words = self._counts()
            self._show()

    def start(self) -> None:
        """Begins the comparison of what is chosen."""
        base = self._wanted()
        self._begun = self._lab.compare(base, steps=self._steps.value, rounds=self._rounds.value, **self.lists(base))
        self._open = False
        self._show()

    def stop(self) -> None:
        """Requests that the comparison ends. Finished steps stay."""
        if (sweep := self._going_on()) is not None:
            sweep.stop(0)

    def lists(self, base: Spec) -> dict[str, list[Any]]:
        """Field -> values that are chosen; where none is, the base's own."""
        now = base.flat()
        chosen = {name: [v for v, chip in zip(COMBINED[name], chips, strict=True) if chip.value]
                  for name, chips in self._chips.items()}  # fmt: skip
        return {name: values or [now[name]] for name, values in chosen.items()}

    def _guarded(self, act: Callable[[], None]) -> None:
        """Runs the action under the lock and shows its error: nobody can catch what a widget handler raises."""
        with self._lock:
            try:
                act()
            except Exception as e:
                self._words = _wrong(str(e) or type(e).__name__)
                self._show()

    def _choose(self, spec: Spec) -> None:
        self._quiet = True
        try:
            now = spec.flat()
            for name, chips in self._chips.items():
                for value, chip in zip(COMBINED[name], chips, strict=True):
                    chip.value = value == now[name]
        finally:
            self._quiet = False

    # -- what is said -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Follows the comparison, and the Spec that is combined."""
        with self._lock:
            if self._open and self._wanted() is not self._counted:
                self._words = self._counts()
            self._show()

    def retire(self) -> None:
        """The lab is closed: nothing can be done any more."""
        with self._lock:
            for control in self.answering:
                control.disabled = True

    def _count(self) -> None:
        with self._lock:
            self._words = self._counts()
            self._show()

    def _counts(self) -> str:
        """How many combinations there are, how many can run, for how long, and why the others cannot."""
        base = self._counted = self._wanted()
        combined = list(combine(base, self.lists(base), lambda spec, changes: spec.replace(**changes)))
        refused = [one for one in combined if isinstance(one, Refusal)]
        fine = len(combined) - len(refused)
        self._start.disabled = not fine
        cannot = f", {len(refused)} cannot" if refused else ""
        said = f"<b>{_many(len(combined), 'combination')}</b>: {fine} can run{cannot}."
        return f"{said} {self._estimate(fine)}{_why(refused, self.lists(base))}"

    def _estimate(self, runs: int) -> str:
        run = running(self._lab)
        steps = cast(RunView, run).events.last_steps(MEASURED_STEPS) if run is not None else []
        if not steps or not runs:
            return "The estimate follows after the first turns." if runs else ""
        seconds = median(step.step_time_s for step in steps) * self._steps.value * runs
        seconds += TURN_S * runs * min(self._rounds.value, self._steps.value)
        return f"About {_while(seconds)}, by the step time of the run that is shown."

    def _going_on(self) -> SweepLike | None:
        sweep = self._lab.sweep
        return sweep if sweep is not None and not sweep.done else None

    def _show(self) -> None:
        sweep = self._going_on()
        over = self._lab.sweep if sweep is None else None
        failed = over is not None and over is self._begun and over.error is not None
        put(self._ask.layout, "display", "" if self._open and sweep is None else HIDE)
        put(self._going.layout, "display", "" if sweep is not None else HIDE)
        said = _wrong(f"The comparison ended: {over.error}") if failed and over is not None else ""
        words = "" if sweep is not None else self._words if self._open else said
        put(self._said, "value", words)
        put(self._said.layout, "display", "" if words else HIDE)
        if sweep is not None:
            put(self._far, "value", _progress(sweep))
        put(self.widget.layout, "display", "" if sweep is not None or words else HIDE)


def _progress(sweep: SweepLike) -> str:
    """A progress bar with the steps done, the time left and the run in progress."""
    p = sweep.progress
    share = 100 * p.done_steps / max(1, p.all_steps)
    left = f"about {_while(p.left_s)} left" if p.left_s is not None else "time left not known yet"
    now = sweep.current
    turn = (
        f" · now {list(sweep.runs).index(now) + 1}: {describe_strategy(now.spec)}"
        if now is not None and now in sweep.runs
        else ""
    )
    track = f'<span class="fsdp-progress-track"><i class="fsdp-progress-done" style="width:{share:.1f}%"></i></span>'
    return (f'<span class="fsdp-progress" role="progressbar" aria-valuenow="{share:.0f}" aria-valuemin="0" '
            f'aria-valuemax="100" aria-label="Comparison">{track}<span>{p.done_steps:,} of {p.all_steps:,} steps · {left}'
            f"{escape(turn)}</span></span>")  # fmt: skip


def _wrong(text: str) -> str:
    return f'<span class="fsdp-refused">{escape(text)}</span>'


def _why(refused: Sequence[Refusal], lists: Mapping[str, Sequence[Any]]) -> str:
    """Each reason once, with what it is the reason of."""
    flats = [flat_fields(r.spec) for r in refused]
    fields = [name for name, values in lists.items() if len(values) > 1] or ["backend", "sharding"]
    reasons: dict[str, list[str]] = {}
    for refusal, flat in zip(refused, flats, strict=True):
        reasons.setdefault(refusal.reason, []).append(describe_fields(flat, fields))
    lines = (f"<br><b>{escape('; '.join(names))}</b>: {escape(reason)}" for reason, names in reasons.items())
    return "".join(lines)


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _while(seconds: float) -> str:
    """About so long."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{math.ceil(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
