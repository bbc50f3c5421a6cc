"""A failure on purpose: which one, on which rank, and *Inject fault*."""

from __future__ import annotations

import ipywidgets as widgets

from fsdp_lab.core.faults import DRILLS
from fsdp_lab.dashboard.parts import button, field, line, part, put, row, sentence, status
from fsdp_lab.dashboard.ports import DrillLike, LabLike, RunLike

LASTING = "slow"  # of the drills, the one that goes on until it is mended


class DrillForm:
    """`widget` is to be shown, `tick` to be called often."""

    def __init__(self, lab: LabLike) -> None:
        self._lab = lab
        self._kind = widgets.Dropdown(options=list(DRILLS), description="fault", tooltip="What fails")
        self._rank = widgets.BoundedIntText(value=1, min=0, max=4095, description="rank", tooltip="The rank that fails")
        self._do = button("Inject fault", "bolt", "Inject it into the run that trains now", self.do)
        self._do.button_style = "danger"
        self._mend = button("Restore link", "undo", "Remove the slowdown of the link", self.mend)
        self._made: tuple[RunLike, DrillLike] | None = None  # that lasts until it is mended
        self._what, self._said = line("fsdp-drill-what"), line("fsdp-safety-said")
        self._kind.observe(lambda _: self._explain(), "value")
        self.widget = part(
            "Drill", [row([field(self._kind), field(self._rank), self._do, self._mend]), self._what, self._said]
        )
        self._explain()
        self.tick(None)

    @property
    def answering(self) -> list[widgets.Widget]:
        """The widgets that must answer while a cell runs."""
        return [self._kind, self._rank, self._do, self._mend]

    def do(self) -> None:
        """Makes it happen."""
        kind, rank = self._kind.value, self._rank.value
        try:
            run, made = self._lab.current, self._lab.drill(kind, rank=rank)
            if kind == LASTING and run is not None:
                self._made = run, made
            put(self._said, "value", status(f"Requested: {kind} on rank {rank}."))
        except Exception as e:
            put(self._said, "value", status(sentence(e), wrong=True))

    def mend(self) -> None:
        """Ends what lasts."""
        made, self._made = self._made, None
        try:
            if made is not None:
                made[1].end()
                put(self._said, "value", status("The link is restored with the next steps."))
        except Exception as e:
            put(self._said, "value", status(sentence(e), wrong=True))

    def tick(self, run: RunLike | None) -> None:
        """A drill needs a run that trains."""
        ranks = (run or self._lab).spec.world_size
        if self._rank.value >= ranks:
            put(self._rank, "value", ranks - 1)
        put(self._rank, "max", ranks - 1)
        put(self._do, "disabled", run is None or run is not self._lab.current or run.state.name != "RUNNING")
        put(self._mend, "disabled", self._made is None or self._made[0] is not run or run.state.over)

    def _explain(self) -> None:
        put(self._what, "value", status(f"It {DRILLS[self._kind.value]}."))
        put(self._said, "value", "")

    def retire(self) -> None:
        """The lab is closed: nothing can be done any more."""
        for control in self.answering:
            control.disabled = True
