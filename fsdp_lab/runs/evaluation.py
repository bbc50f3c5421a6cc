"""Evaluation on held-out samples: how often a run is to do it, what it found, and when it is enough.

A loss counts beside others of the same samples alone. So where a switch changes what is held out (`HELD_OUT_BY`), what was
found before is forgotten, as are steps that the ranks go back behind; the events keep it all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_lab.core.errors import SpecError, check_whole
from fsdp_lab.core.spec import Spec, Workload
from fsdp_lab.models.check import is_language
from fsdp_lab.runs.view import RunView

HELD_OUT_BY = ("data", "held_out", "seq_len")  # a change of model or seed begins again anyway


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """After each `every` steps, and after the run's last, the mean loss of so many held-out `samples` is found.

    `patience`: the run stops when so many evaluations in turn were not better than the best; None: never.

    Raises:
        ArgumentError: what is no whole number of 1 or more.
    """

    every: int
    samples: int = 64
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "samples", "patience"):
            value = getattr(self, name)
            if name != "patience":
                check_whole(f"evaluate.{name}", value)
            elif value is not None:
                wanted = "a whole number of 1 or more, or None to go on in any case"
                check_whole("evaluate.patience", value, wanted=wanted)

    @classmethod
    def of(cls, given: EvalConfig | int | None) -> EvalConfig | None:
        """An int is `every`. Raises ArgumentError."""
        return given if given is None or isinstance(given, cls) else cls(every=given)  # type: ignore[arg-type]

    def check(self, spec: Spec) -> None:
        """Raises SpecError where nothing is held out. Whether it is enough is known where the data is."""
        if not spec.workload.held_out:
            share = Workload.held_out
            raise SpecError("workload.held_out", "nothing is held out to evaluate on", f"use held_out {share}",
                            {"held_out": share})  # fmt: skip


class Evaluation(NamedTuple):
    """The mean loss of the held-out samples after a step."""

    step: int  # as in its event: the first is 0
    loss: float


class EarlyStopping:
    """Takes evaluations in the order of steps. `stale`: how many in turn were not better than the best."""

    def __init__(self, patience: int | None = None) -> None:
        self.patience = patience
        self._begin()

    def _begin(self) -> None:
        self.evaluations: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.stale = 0

    def take(self, step: int, loss: float) -> bool:
        """Whether it is the best until now. One that is not finite never is."""
        found = Evaluation(step, loss)
        self.evaluations.append(found)
        better = math.isfinite(loss) and (self.best is None or loss < self.best.loss)
        self.best = found if better else self.best
        self.stale = 0 if better else self.stale + 1
        return better

    def forget(self, step: int = 0) -> None:
        """What was found at `step` and later is not true any more."""
        kept = [e for e in self.evaluations if e.step < step]
        self._begin()
        for e in kept:
            self.take(*e)

    def switched(self, before: Spec, after: Spec) -> None:
        """Another Spec goes on with the same parameters."""
        if set(before.difference(after)) & set(HELD_OUT_BY):
            self.forget()

    @property
    def reason(self) -> str:
        """Why to stop; empty where there is none."""
        if self.patience is None or self.stale < self.patience:
            return ""
        times = f"in {self.stale} evaluation{'s' * (self.stale != 1)}"
        if self.best is None:
            return f"the evaluation loss was not finite {times}"
        return f"the evaluation loss has not fallen below {self.best.loss:.4g} (step {self.best.step}) {times}"

    def words(self, workload: Workload) -> str:
        """The last evaluation and the best; empty before the first."""
        if not self.evaluations:
            return ""
        said = f"evaluation loss {_words(self.evaluations[-1], workload)}"
        return f"{said}, best {_words(self.best, workload)}" if self.best else said


def judged(run: RunView) -> EarlyStopping:
    """Of a run that is kept, from the steps that count."""
    judge, before = EarlyStopping(), None
    specs = {switch.after.id: switch.after for switch in run.switches}
    for step in run.events.steps():
        if step.eval_loss is None:
            continue
        spec = specs.get(step.spec_id)
        if before is not None and spec is not None:
            judge.switched(before, spec)
        before = spec or before
        judge.take(step.number, step.eval_loss)
    return judge


def perplexity(loss: float) -> float:
    """Of a language model with this mean loss, in nats per token."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def in_words(loss: float, *, language: bool) -> str:
    """An evaluation loss, with the perplexity where the model is one of language."""
    return f"{loss:.4f} (perplexity {perplexity(loss):.4g})" if language else f"{loss:.4f}"


def _words(found: Evaluation, workload: Workload) -> str:
    return f"{in_words(found.loss, language=is_language(workload))} at step {found.step}"
