"""`Dashboard`: a bar with the main controls, the live plots, tabs with the rest, and the thread that updates them.

The tabs are chosen in the page: `live.js` shows the cards and the forms of one, so that the kernel need not answer."""

import contextlib
import logging
import threading
from typing import Self

import ipywidgets as widgets

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.formatting import plural
from fsdp_lab.dashboard.board import Board, ComparisonCard, difference_line
from fsdp_lab.dashboard.controls import Controls
from fsdp_lab.dashboard.feed import Feed
from fsdp_lab.dashboard.forms import InputForm, answer_while_busy, close_all, display_widget, error_text, put, styled
from fsdp_lab.dashboard.lab_like import LabLike
from fsdp_lab.dashboard.live import LiveView
from fsdp_lab.dashboard.opened_forms import DiagnosisBox, RunsForm, SweepForm, WritingForm
from fsdp_lab.dashboard.safety import SafetyBox
from fsdp_lab.dashboard.slow_motion import SlowMotionBox
from fsdp_lab.runs import Comparison, WatchedRun
from fsdp_lab.runs.view import RunView
from fsdp_lab.spec.spec import Spec

TICK_S = 0.1  # between two ticks, at most; and at least, where steps are so fast that a tick brings several
STEP_TICK_S = 0.05  # at least, where a tick brings one step: it is drawn when the last rank has reported it
SHOWN = "_shown_dashboard"  # the lab's attribute that holds its dashboard, so that a cell run again replaces it

log = logging.getLogger(__name__)


class Dashboard:
    """A lab's controls and live plots. The last expression of a cell, or `display(dashboard)`; as often as you like.

    A lab has one dashboard: making another closes the former. `close()` ends its thread and its widgets; the lab and its
    runs continue. When the lab is closed, the dashboard says so and its thread ends. `diagnosis` shows what is wrong.
    """

    def __init__(self, lab: LabLike) -> None:
        if (former := self.of(lab)) is not None:
            former.close()
        self.lab = lab
        self._live = LiveView()
        self._board = Board(lab)
        self._safety = SafetyBox(lab, begin=lambda start: self._controls.begin(start))
        self._controls = Controls(lab, [self._safety.recovery], self._safety.options)
        self._sweep_form = SweepForm(lab, self._wanted)
        self._writing = WritingForm(lab)
        self._runs = RunsForm(lab, self._wanted, self._board)
        keep = "Keep this run as it is now: what you change next is compared with it"
        self._keep_button = self._controls.add_button("Keep as A", "thumb-tack", keep, self._keep)
        self._slow = SlowMotionBox(lab, wanted=self._controls.slow_motion_spec)
        self.diagnosis = DiagnosisBox(choose=self._controls.accept)
        in_tabs = {"compare": self._sweep_form.widget, "runs": self._runs.widget, "settings": self._controls.settings}
        in_tabs |= {"safety": self._safety.widget, "slow": self._slow.widget, "generate": self._writing.widget}
        tabbed = [styled(widget, "fsdp-tab", f"fsdp-tab-{name}") for name, widget in in_tabs.items()]
        shown = [self._controls.widget, self.diagnosis.widget, self._live, *tabbed]
        self.widget = styled(widgets.VBox(shown), "fsdp-lab")  # to be put into a layout of your own
        below = (self._writing, self._runs, self._safety, self._slow, self.diagnosis)
        self._forms: tuple[InputForm, ...] = (self._controls, self._sweep_form, *below)
        inputs = [widget for form in self._forms for widget in form.inputs]
        tips = {w.description: w.tooltip for w in inputs if w.has_trait("description") and w.tooltip}
        card = ComparisonCard(self._press)
        self._feed = Feed(lab, self._live, self._board, card, self._wanted, tips)
        answer_while_busy([self._live, *inputs])
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._tick_until_closed, name="fsdp-lab-dashboard", daemon=True)
        self._thread.start()
        vars(lab)[SHOWN] = self

    @classmethod
    def of(cls, lab: LabLike) -> Self | None:
        """The open dashboard of a lab."""
        shown = vars(lab).get(SHOWN)
        return shown if isinstance(shown, cls) else None

    def pin(self, run: RunView | None = None) -> str:
        """Keeps a run as it is now, to compare others with; returns its label, A to H.

        Its curves, of the whole run, stay under the live ones; its figures are of the steps since the last change of
        strategy, so that pinning before and after a switch compares the two. Pins last until they are unpinned.

        Args:
            run: a live or a stored one; None: the one that is shown.

        Raises ArgumentError: there is nothing to pin, or eight are pinned already."""
        return self._board.pin(run)

    def _keep(self) -> None:
        self._board.choose_baseline(self.pin())

    def unpin(self, label: str) -> None:
        """Removes a pin, or a row of a sweep that is over. Raises ArgumentError: there is none of this label."""
        self._board.unpin(label)

    @property
    def pins(self) -> dict[str, RunView]:
        """The pinned runs by label, as they were then: for `report`, `recommend`, `Comparison.of`."""
        return {**self._board.pins}

    @property
    def comparison(self) -> Comparison:
        """The comparison card's runs: pins, the newest sweep's runs, and the live run, as they are now."""
        return self._board.refresh()

    def _wanted(self) -> Spec:
        return self._controls.choices.wanted

    def _press(self, word: str, about: str) -> None:
        try:
            {"baseline": self._board.choose_baseline, "unpin": self._board.unpin}[word](about)
        except FieldError as e:  # a row of a page that is out of date, or of a sweep in progress
            self._controls.say(error_text(e))

    @property
    def closed(self) -> bool:
        return self._halt.is_set()

    def close(self) -> None:
        """Ends the thread and frees the widgets' comms. Idempotent."""
        if self._halt.is_set():
            return
        self._halt.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        vars(self.lab).pop(SHOWN, None)
        self._slow.close()
        self._live.close()
        for widget in (self.widget, *self._slow.parts):
            close_all(widget)

    def _tick_until_closed(self) -> None:
        """Ticks until closed. A failing tick is logged, once in a row, and does not end the display."""
        failing, several = False, True
        while self._rest(several=several):
            try:
                events = self._feed.tick()
                several = len(events) > self._feed.ranks
                run = None if isinstance(self._feed.run, WatchedRun) else self._feed.run
                self._controls.tick(run, events)
                self._sweep_form.tick()
                self._writing.tick()
                self._runs.tick(self._feed.run)
                self._controls.tell_difference(difference_line(self._board.shown))
                put(self._keep_button, "description", f"Keep as {self._board.next_letter}".strip())
                self._safety.tick(run)
                self.diagnosis.tick(self._feed.run)
                self._slow.tick()
                failing = False
            except Exception as e:
                if not failing:
                    log.exception("a tick of the dashboard failed")
                    with contextlib.suppress(Exception):  # it may be the controls that fail
                        self._controls.say(f"The display failed: {type(e).__name__}: {e}")
                failing = True
        if not self._halt.is_set():
            for form in self._forms:
                form.retire()

    def _rest(self, *, several: bool) -> bool:
        """Waits for the next tick; `several`: steps came with the last one. Returns whether there is to be one."""
        if not self._halt.wait(TICK_S if several else STEP_TICK_S) and not several:
            self._feed.wait(TICK_S - STEP_TICK_S)
        return not self._halt.is_set() and not self.lab.closed

    def prepare(self) -> None:
        """Draws the first picture. Call it before `widget` is displayed in a layout of your own."""
        self._live.prepare()

    def _ipython_display_(self) -> None:
        self.prepare()
        display_widget(self.widget)

    def __repr__(self) -> str:
        return f"<Dashboard of {self.lab!r}: {'closed' if self.closed else plural(self._live.views, 'view')}>"
