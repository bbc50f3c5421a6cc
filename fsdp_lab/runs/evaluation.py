"""Evaluation on held-out samples: how often, with which results, and when to stop.

Only losses of the same samples are comparable. So a switch that changes what is held out (`HELD_OUT_BY`) discards earlier
evaluations, and a restart from an earlier step discards those after it; the events keep them all."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from fsdp_lab.base.errors import ArgumentError, SpecError, check_whole
from fsdp_lab.base.formatting import plural
from fsdp_lab.base.generation import Prompt, Sampling, checked_prompts
from fsdp_lab.cluster.sent_code import code_of
from fsdp_lab.models.check import is_language
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.user_code import METRICS, UserCode
from fsdp_lab.spec.workload import SAMPLES, Workload

# A change of model or seed begins at step 0 anyway.
HELD_OUT_BY = (*SAMPLES, "held_out", "loss")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Computes the mean loss of `samples` held-out samples, or of all if they are fewer, after every `every` steps, and
    after the run's last.

    `patience`: the run stops after so many consecutive evaluations that were not better than the best; None: never.
    `prompts`: texts or chats, as of `Lab.generate`, that a language model continues after each evaluation, as `sampling`
    says. `metrics`: functions of your own by name, sent as those of a Spec. Each returns one number, the mean over a batch.
    For a module of your own it gets (outputs, batch): what `model(...)` returned last in the loss, and the batch. For one of
    transformers it gets (logits, labels): of images (batch, classes) and (batch,), of text (batch, places, vocabulary) and
    (batch, places), shifted for a causal model, so that `logits[:, i]` predicts `labels[:, i]`; a label of -100 does not
    count. Raises ArgumentError for a number, prompt or metric that is none, SpecError for one that cannot be sent."""

    every: int
    samples: int = 64
    patience: int | None = None
    prompts: tuple[Prompt, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    code: UserCode | None = field(init=False, repr=False, compare=False)  # all metrics together, as they are sent

    def __post_init__(self) -> None:
        check_whole("evaluate.every", self.every)
        check_whole("evaluate.samples", self.samples)
        if self.patience is not None:
            wanted = "a whole number of 1 or more, or None to never stop early"
            check_whole("evaluate.patience", self.patience, wanted=wanted)
        if self.prompts:
            object.__setattr__(self, "prompts", checked_prompts(self.prompts, "evaluate.prompts"))
        for name, metric in (self.metrics if isinstance(self.metrics, Mapping) else {"": self.metrics}).items():
            if not (isinstance(name, str) and re.fullmatch(r"(?!(loss|step)$)\w[\w .@+-]*", name) and callable(metric)):
                hint = 'give functions by their names, such as {"accuracy": accuracy}; "loss" and "step" are taken'
                raise ArgumentError(METRICS, f"{name!r}: {metric!r} is refused", hint)
        sent: Any = code_of(METRICS, dict(self.metrics)) if self.metrics else None
        object.__setattr__(self, "code", sent and UserCode("a metric", "", sent.digest, packed=sent.packed))

    @classmethod
    def of(cls, given: Self | int | None) -> Self | None:
        """An int is `every`. Raises ArgumentError."""
        return given if given is None or isinstance(given, cls) else cls(every=given)  # type: ignore[arg-type]

    def check(self, spec: Spec) -> None:
        """Raises SpecError where nothing is held out. The ranks, which have the data, check whether it is enough."""
        if not spec.workload.held_out:
            reason, share = "nothing is held out to evaluate on", Workload.held_out
            raise SpecError("workload.held_out", reason, f"use held_out {share}", {"held_out": share})

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call that evaluates, for `prompts` and `metrics`."""
        texts = {"prompts": list(self.prompts), "sampling": self.sampling.to_dict()} if self.prompts else {}
        return texts | ({"metrics": self.code.digest} if self.code is not None else {})

    def due(self, steps: range, until: int | None) -> dict[int, int]:
        """The first of `steps` after which to evaluate, with the number of samples; empty where there is none. `until`: the
        step before which the run ends; its last step is evaluated, too."""
        return dict.fromkeys([n for n in steps if (n + 1) % self.every == 0 or n + 1 == until][:1], self.samples)


class Evaluation(NamedTuple):
    """The mean loss of the held-out samples after a step, and the metrics of one's own by name."""

    step: int  # as in its event: the first is 0
    loss: float
    metrics: Mapping[str, float] = {}

    @property
    def when(self) -> str:
        """In the words of a checkpoint of the same moment."""
        return f"after {plural(self.step + 1, 'step')}"


def generated(call: Callable[..., list[Any]], run: str, prompts: Sequence[Prompt], sampling: Sampling) -> list[str]:
    """The texts that continue `prompts`, in their order. `call`: of the cluster, which has the ranks generate them."""
    by_rank = call("generate", run=run, prompts=list(prompts), sampling=sampling.to_dict())
    texts = {int(number): text for answer in by_rank for number, text in answer["texts"].items()}
    return [texts[number] for number in range(len(prompts))]


class EarlyStopping:
    """Takes evaluations in order of steps. `stale`: how many consecutive ones were not better than the best."""

    def __init__(self, patience: int | None = None) -> None:
        self.patience = patience
        self._begin()

    def _begin(self) -> None:
        self.evaluations: list[Evaluation] = []
        self.best: Evaluation | None = None
        self.stale = 0

    def take(self, evaluation: Evaluation) -> bool:
        """Returns whether it is the best so far. A loss that is not finite never is."""
        self.evaluations.append(evaluation)
        better = math.isfinite(evaluation.loss) and (self.best is None or evaluation.loss < self.best.loss)
        self.best = evaluation if better else self.best
        self.stale = 0 if better else self.stale + 1
        return better

    def forget(self, step: int = 0) -> None:
        """Discards the evaluations at `step` and later, which are to be trained again."""
        earlier = [e for e in self.evaluations if e.step < step]
        self._begin()
        for e in earlier:
            self.take(e)

    def switched(self, before: Spec, after: Spec) -> None:
        """Another Spec continues with the same parameters. Discards all evaluations where it holds out other samples."""
        if set(before.difference(after)) & set(HELD_OUT_BY):
            self.forget()

    @property
    def reason(self) -> str:
        """Says why to stop, in a sentence; empty: not to stop."""
        if self.patience is None or self.stale < self.patience:
            return ""
        times = f"in {self.stale} evaluation{'s' * (self.stale != 1)}"
        if self.best is None:
            return f"the evaluation loss was not finite {times}"
        return f"the evaluation loss has not fallen below {self.best.loss:.4g} ({self.best.when}) {times}"

    def words(self, workload: Workload) -> str:
        """The last evaluation and the best, as text; empty before the first."""
        if not self.evaluations:
            return ""

        def text(evaluation: Evaluation) -> str:
            return f"{in_words(*evaluation[1:], language=is_language(workload))} {evaluation.when}"

        best = f", best {text(self.best)}" if self.best else ""
        return f"evaluation loss {text(self.evaluations[-1])}{best}"


def perplexity(loss: float) -> float:
    """Perplexity of a language model. `loss`: mean, in nats per token."""
    return math.inf if loss > 700 else math.exp(loss)


def in_words(loss: float | None, metrics: Mapping[str, float], *, language: bool) -> str:
    """An evaluation loss as text, with the perplexity for a language model, and the metrics; empty where there is none."""
    told = "" if loss is None else f"{loss:.4f} (perplexity {perplexity(loss):.4g})" if language else f"{loss:.4f}"
    return told + "".join(f", {name} {value:.4g}" for name, value in metrics.items())
