"""Evaluation on held-out samples: how often, with which results, and when to stop.

Only losses of the same samples are comparable. So a switch that changes what is held out (`HELD_OUT_BY`) discards earlier
evaluations, and a restart from an earlier step discards those after it; the events keep them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsdp_lab.core.errors import SpecError, check_whole
from fsdp_lab.core.spec import Spec, Workload
from fsdp_lab.models.check import is_language

HELD_OUT_BY = ("data", "held_out", "seq_len")  # a change of model or seed begins at step 0 anyway


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Computes the mean loss of `samples` held-out samples after every `every` steps, and after the run's last.

    `patience`: the run stops after so many consecutive evaluations that were not better than the best; None: never. Raises
    ArgumentError for a value that is not a whole number of 1 or more.
    """

    every: int
    samples: int = 64
    patience: int | None = None

    def __post_init__(self) -> None:
        check_whole("evaluate.every", self.every)
        check_whole("evaluate.samples", self.samples)
        if self.patience is not None:
            wanted = "a whole number of 1 or more, or None to never stop early"
            check_whole("evaluate.patience", self.patience, wanted=wanted)

    @classmethod
    def of(cls, given: EvalConfig | int | None) -> EvalConfig | None:
        """An int is `every`. Raises ArgumentError."""
        return given if given is None or isinstance(given, cls) else cls(every=given)  # type: ignore[arg-type]

    def check(self, spec: Spec) -> None:
        """Raises SpecError where nothing is held out. The ranks, which have the data, check whether it is enough."""
        if not spec.workload.held_out:
            share = Workload.held_out
            raise SpecError("workload.held_out", "nothing is held out to evaluate on", f"use held_out {share}",
                            {"held_out": share})  # fmt: skip


class Evaluation(NamedTuple):
    """The mean loss of the held-out samples after a step."""

    step: int  # as in its event: the first is 0
    loss: float


class EarlyStopping:
    """Takes evaluations in order of steps. `stale`: how many consecutive ones were not better than the best."""

    def __init__(self, patience: int | None = None) -> None:
        self.patience = patience
        self._begin()

    def _begin(self) -> None:
        self.evaluations: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.stale = 0

    def take(self, step: int, loss: float) -> bool:
        """Returns whether it is the best so far. A loss that is not finite never is."""
        evaluation = Evaluation(step, loss)
        self.evaluations.append(evaluation)
        better = math.isfinite(loss) and (self.best is None or loss < self.best.loss)
        self.best = evaluation if better else self.best
        self.stale = 0 if better else self.stale + 1
        return better

    def forget(self, step: int = 0) -> None:
        """Discards the evaluations at `step` and later, which are to be trained again."""
        earlier = [e for e in self.evaluations if e.step < step]
        self._begin()
        for e in earlier:
            self.take(*e)

    def switched(self, before: Spec, after: Spec) -> None:
        """Another Spec continues with the same parameters. Discards all evaluations where it holds out other samples."""
        if set(before.difference(after)) & set(HELD_OUT_BY):
            self.forget()

    @property
    def reason(self) -> str:
        """Why to stop, in a sentence; empty: not to stop."""
        if self.patience is None or self.stale < self.patience:
            return ""
        times = f"in {self.stale} evaluation{'s' * (self.stale != 1)}"
        if self.best is None:
            return f"the evaluation loss was not finite {times}"
        return f"the evaluation loss has not fallen below {self.best.loss:.4g} (step {self.best.step}) {times}"

    def words(self, workload: Workload) -> str:
        """The last evaluation and the best, as text; empty before the first."""
        if not self.evaluations:
            return ""

        def text(evaluation: Evaluation) -> str:
            return f"{in_words(evaluation.loss, language=is_language(workload))} at step {evaluation.step}"

        best = f", best {text(self.best)}" if self.best else ""
        return f"evaluation loss {text(self.evaluations[-1])}{best}"


class Evaluator:
    """When a run is evaluated, and with which results. Used by the run's driver alone.

    Attributes:
        config: None: the run is not evaluated. on_best: called with each evaluation that is the best so far.
    """

    def __init__(self, config: EvalConfig | None) -> None:
        self.config = config
        self.early_stopping = EarlyStopping(config.patience if config is not None else None)
        self.on_best: list[Callable[[Evaluation], None]] = []

    @property
    def samples(self) -> int:
        """Held-out samples per evaluation."""
        return self.config.samples if self.config is not None else 0

    def check(self, spec: Spec) -> None:
        """Raises SpecError where the Spec holds nothing out for the evaluation."""
        if self.config is not None:
            self.config.check(spec)

    def due(self, steps: range, until: int | None) -> dict[int, int]:
        """The first of `steps` after which to evaluate, with the number of samples; empty where there is none.

        `until`: the step before which the run ends; its last step is evaluated, too.
        """
        if self.config is None:
            return {}
        due = [n for n in steps if (n + 1) % self.config.every == 0 or n + 1 == until]
        return dict.fromkeys(due[:1], self.config.samples)

    def take(self, results: Sequence[Mapping[str, Any]]) -> list[Evaluation]:
        """Takes the evaluations among the events of each rank. Returns those that were the best so far."""
        losses = {e["step"]: e["eval_loss"] for r in results for e in r["events"] if e["eval_loss"] is not None}
        return [Evaluation(step, loss) for step, loss in losses.items() if self.early_stopping.take(step, loss)]


def perplexity(loss: float) -> float:
    """Perplexity of a language model. `loss`: mean, in nats per token."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def in_words(loss: float, *, language: bool) -> str:
    """An evaluation loss as text, with the perplexity for a language model."""
    return f"{loss:.4f} (perplexity {perplexity(loss):.4g})" if language else f"{loss:.4f}"
