"""`DiagnosisBox`: what `fsdp_lab.runs.diagnosis` finds in the run that is shown, and a button for a cure that fields do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import ipywidgets as widgets

from fsdp_lab.dashboard.forms import HIDDEN, InputForm, prose, put, styled
from fsdp_lab.runs import Run, WatchedRun
from fsdp_lab.runs.diagnosis import Diagnosis
from fsdp_lab.spec.describe import describe_field

EVERY_S = 1.0
SHARE = 0.03  # of the time, that looking may take
MOST = 2  # that are shown at once: the next ones when these are cured


class DiagnosisBox(InputForm):
    """`widget` is displayed where something was found; `tick` called often. `choose` takes field values, as if a person had
    set them: a live run takes them at once.

    Attributes:
        elsewhere: a run whose diagnoses another part of the page shows.
    """

    css = "fsdp-sweep"

    def __init__(self, choose: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._choose = choose
        self.elsewhere: Run | WatchedRun | None = None
        self._due_s = 0.0
        self._seen: tuple[object, ...] = ()  # the version of the run that was looked at
        self._rows = [self._row(place) for place in range(MOST)]
        self.found: Sequence[Diagnosis] = ()
        self.message = styled(widgets.HTML(), "fsdp-sweep-said")
        rows = [*(box for box, _, _ in self._rows), self.message]
        self.widget = styled(widgets.VBox(rows, layout=widgets.Layout(display=HIDDEN)), "fsdp-sweep", "fsdp-diagnosis")

    def _row(self, place: int) -> tuple[widgets.Box, widgets.HTML, widgets.Button]:
        text = styled(widgets.HTML(), "fsdp-sweep-said")
        cure = self.button("Apply", "medkit", "Change the run so", partial(self._apply, place))
        return styled(widgets.Box([text, cure]), "fsdp-sweep-row"), text, cure

    def _apply(self, place: int) -> None:
        if place < len(self.found):  # else the page is out of date
            self._choose(self.found[place].changes)

    def tick(self, run: Run | WatchedRun | None) -> None:
        """Looks at the run, if it has anything new, at most once a second."""
        now_s = time.monotonic()
        if run is None or now_s < self._due_s:
            return
        version = (run.id, len(run.events), run.state, run.spec.id, run is self.elsewhere)
        if version != self._seen:
            began_s = time.thread_time()
            self.show(() if run is self.elsewhere else run.diagnoses)
            self._seen, spent_s = version, time.thread_time() - began_s
            self._due_s = now_s + max(EVERY_S, spent_s / SHARE)

    def show(self, found: Sequence[Diagnosis]) -> None:
        """The failure itself is in the row below the buttons."""
        self.found = found[:MOST]
        for (box, text, cure), d in zip_longest(self._rows, self.found):
            put(box.layout, "display", HIDDEN if d is None else "")
            if d is not None:
                put(text, "value", f'<span role="status"><b>{prose(d.meaning)}</b> {prose(d.cure)}</span>')
                put(cure, "description", ", ".join(describe_field(n, v) for n, v in d.changes.items()) or "Apply")
                put(cure.layout, "display", "" if d.changes else HIDDEN)
        put(self.widget.layout, "display", "" if found else HIDDEN)
