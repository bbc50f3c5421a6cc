"""The form for what a run does when its ranks fail, and the buttons that resume a run which waits after a failure."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as widgets

from fsdp_lab.cluster import ClusterError
from fsdp_lab.dashboard.incident_picture import incidents_picture
from fsdp_lab.dashboard.parts import button, field, line, part, put, row, sentence
from fsdp_lab.dashboard.ports import LabLike, RunLike
from fsdp_lab.runs.recovery import RecoveryPolicy

HOWS = (("off: the run fails", "off"), ("ask: wait for a decision", "ask"), ("automatic", "auto"))
RANKS = (("same number of ranks", "same"), ("remaining ranks", "fewer"))


class RecoveryForm:
    """`widget` is to be shown, and `buttons` where they are always seen; `tick` to be called often.

    Args:
        say: told, in words, what was wrong with a press; "" when nothing was.
    """

    def __init__(self, lab: LabLike, say: Callable[[str], None]) -> None:
        self._lab, self._say = lab, say
        self._how = widgets.Dropdown(options=HOWS, value="ask", description="when ranks fail",
                                     tooltip="Takes effect at the next start")  # fmt: skip
        self._ranks = widgets.Dropdown(options=RANKS, value="same", description="resume on",
                                       tooltip="Takes effect at the next start")  # fmt: skip
        same = "Replace the lost ranks and resume"
        fewer = "Resume on the ranks that remain, with the same global batch where it divides"
        self._same = button("Recover", "medkit", same, lambda: self.recover("same"))
        self._fewer = button("Resume on fewer ranks", "minus-circle", fewer, lambda: self.recover("fewer"))
        self._same.button_style = "primary"
        self.buttons = (self._same, self._fewer)
        self._incidents = line("fsdp-incidents")
        self.widget = part("Recovery", [row([field(self._how), field(self._ranks)])])
        self.incidents = part("Incidents", [self._incidents])
        self.tick(None)

    @property
    def answering(self) -> list[widgets.Widget]:
        """The widgets that must answer while a cell runs."""
        return [self._how, self._ranks, *self.buttons]

    @property
    def words(self) -> str:
        """What is chosen, shortly."""
        return f"recovery: {'automatic' if self._how.value == 'auto' else self._how.value}"

    def recovering(self) -> RecoveryPolicy:
        """What the next run is to do when its ranks fail."""
        return RecoveryPolicy(how=self._how.value, ranks=self._ranks.value)

    def recover(self, ranks: str) -> None:
        """Requests that the run resumes on the same ranks or on fewer. A failed run is replaced by a new one."""
        try:
            self._say("")
            self._lab.recover(ranks)
        except Exception as e:
            self._say(sentence(e))

    def tick(self, run: RunLike | None) -> None:
        """Shows the buttons where they are of use, and the incidents of the run that is shown."""
        waits = run is not None and run is self._lab.current and can_recover(run)
        for each, there in ((self._same, waits), (self._fewer, waits and len(self._lab.lost) > 0)):
            put(each.layout, "visibility", "visible" if there else "hidden")  # their room is kept
        state = run.state.value if run is not None else ""
        over = run is not None and run.state.over
        put(self._incidents, "value", incidents_picture(run.incidents if run is not None else (), state, over=over))

    def retire(self) -> None:
        """The lab is closed: nothing can be done any more."""
        for control in self.answering:
            control.disabled = True


def can_recover(run: RunLike) -> bool:
    """Whether it waits for that, or has failed by its ranks after it had begun."""
    failed = run.state.name == "FAILED" and isinstance(run.error, ClusterError) and len(run.switches) > 0
    return run.state.name == "BROKEN" or failed
