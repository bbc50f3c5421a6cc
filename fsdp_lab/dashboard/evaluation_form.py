"""The form of evaluation: how often a run is held against samples that it does not train on, and when that is enough."""

from __future__ import annotations

import ipywidgets as widgets

from fsdp_lab.dashboard.parts import field, line, part, put, row, status
from fsdp_lab.dashboard.ports import RunLike
from fsdp_lab.runs.evaluation import EvalConfig

OFF, EVERY = "off", "every n steps"
EVERY_STEPS = 50
NEVER = 0
NOTHING = "Results are drawn in the loss card. With checkpoints on, the best one is kept."


class EvaluationForm:
    """`widget` is to be shown, `tick` to be called often."""

    def __init__(self) -> None:
        later = "Takes effect at the next start"
        self._when = widgets.Dropdown(options=(OFF, EVERY), value=OFF, description="evaluate", tooltip=later)
        self._every = widgets.BoundedIntText(value=EVERY_STEPS, min=1, max=1_000_000, description="every (steps)",
                                             tooltip="Steps from one evaluation to the next")  # fmt: skip
        self._samples = widgets.BoundedIntText(value=EvalConfig.samples, min=1, max=1_000_000, description="samples",
                                               tooltip="How many held-out samples an evaluation takes")  # fmt: skip
        self._patience = widgets.BoundedIntText(
            value=NEVER, min=NEVER, max=1000, description="patience",
            tooltip=f"The run stops when so many evaluations in turn were not better than the best; {NEVER}: never",
        )  # fmt: skip
        self._said = line("fsdp-evaluation-said")
        entries = (self._when, self._every, self._samples, self._patience)
        self.widget = part("Evaluation", [row([field(entry) for entry in entries]), self._said])
        self.tick(None)

    @property
    def answering(self) -> list[widgets.Widget]:
        """The widgets that must answer while a cell runs."""
        return [self._when, self._every, self._samples, self._patience]

    @property
    def words(self) -> str:
        """What is chosen, shortly; empty where nothing is."""
        return "" if self._when.value == OFF else f"evaluation every {self._every.value} steps"

    def evaluating(self) -> EvalConfig | None:
        """How the next run is to be evaluated."""
        if self._when.value == OFF:
            return None
        patience = self._patience.value if self._patience.value != NEVER else None
        return EvalConfig(every=self._every.value, samples=self._samples.value, patience=patience)

    def tick(self, run: RunLike | None) -> None:
        """Shows what the run that is shown has found."""
        for entry in (self._every, self._samples, self._patience):
            put(entry, "disabled", self._when.value == OFF)
        found = run.early_stopping.words(run.spec.workload) if run is not None else ""
        put(self._said, "value", status(f"{found[0].upper()}{found[1:]}." if found else NOTHING))

    def retire(self) -> None:
        """The lab is closed: nothing can be done any more."""
        for entry in self.answering:
            entry.disabled = True
