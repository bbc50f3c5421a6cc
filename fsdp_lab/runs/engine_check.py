"""`check_engine`: an engine of the user's, tried for some steps beside a known one of the same sharding.

It passes if the lab names no mistake (backends/yours.py), it computes the same (`runs.parity`), and takes no more than what
was asked for (`LIMITS`)."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdp_lab.base.errors import ArgumentError, FieldError
from fsdp_lab.base.events import Role
from fsdp_lab.base.formatting import Table, duration, size, traffic
from fsdp_lab.cluster import ClusterError
from fsdp_lab.runs.parity import Verdict, parity
from fsdp_lab.runs.run import Run
from fsdp_lab.runs.steps import last_stretch
from fsdp_lab.runs.summary import Figures, figures
from fsdp_lab.spec.spec import ENGINE_FIELD, YOURS, Strategy

SMALL_MODEL = "gpt2-1m"
LEAST_STEPS = 5  # the first three do not count: they are inspected, or measure memory


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineCheck:
    """The verdict of a check, in a sentence, and figures of both engines; None after a mistake, which ends the training."""

    passed: bool
    sentence: str
    table: Table | None = None

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return self.sentence if self.table is None else str(self.table)

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.sentence)}</p>" if self.table is None else self.table._repr_html_()


_FIGURES: Mapping[str, tuple[str, Callable[[float], str]]] = {  # the median of a field of `Figures`
    "step": ("step_time_s", duration),
    "exposed communication": ("exposed_comm_s", duration),
    "sent by a rank": ("link_bytes", traffic),
}
# The most of a class of memory that a rank held at any moment of its ledger step.
_CLASSES: Mapping[str, Role] = {
    "parameters, at most": Role.PARAMETERS,
    "gathered parameters, at most": Role.UNSHARDED,
    "gradients, at most": Role.GRADIENTS,
    "optimizer state, at most": Role.OPTIMIZER,
}

# What may be limited: a title, a hint, and the class of memory that is meant. In sizes of the whole model in fp32, a rank
# and step; "exposed" is the share of communication that computing waits for, which a busy machine changes less than its
# seconds.
LIMITS: Mapping[str, tuple[str, str, Role | None]] = {
    "sent": ("sends", "a reduce-scatter sends half of what an all-reduce does", None),
    "parameters": (
        "keeps parameters of",
        "return a copy (clone) of this rank's part from shard: a view keeps all of it",
        Role.PARAMETERS,
    ),
    "gathered": ("holds gathered parameters of", "free a unit's parameters once it has computed", Role.UNSHARDED),
    "gradients": ("holds gradients of", "set p.grad = None once it is sent", Role.GRADIENTS),
    "optimizer": ("holds optimizer state of", "return this rank's part from shard, not all", Role.OPTIMIZER),
    "exposed": ("waits for", "begin a gather in prefetch, and let reduce return a function", None),
}


def check_engine(run: Callable[..., Run], strategy: Strategy, name: str, most: Mapping[str, float] = {}) -> EngineCheck:
    """`run`: starts the same training with a backend. Waits for both. `most`: see `LIMITS`. Raises ArgumentError."""
    if unknown := next((key for key in most if key not in LIMITS), None):
        raise ArgumentError("most", f"{unknown!r} cannot be limited", f"give some of {', '.join(LIMITS)}")
    peer = "ddp" if strategy.is_replicated else "lab" if strategy.shards_optimizer_only else "fsdp2"
    try:
        yours = run(YOURS).wait()
    except (FieldError, ClusterError) as e:
        of_engine = isinstance(e, FieldError) and e.field == ENGINE_FIELD  # whose errors name the engine themselves
        mistake = f"{e.reason}; {e.hint}" if of_engine else getattr(e, "sentence", str(e))  # type: ignore[union-attr]
        return EngineCheck(passed=False, sentence=f"Not yet. {mistake}")
    theirs = run(peer).wait()
    steps = [last_stretch(one.events.steps(), one.spec) for one in (yours, theirs)]
    measured = [figures(of_run) for of_run in steps]
    curves = [[sample.classes for s in of_run for e in s.events for sample in e.memory_curve] for of_run in steps]
    classes = [{role: max((held.of_role(role) for held in curve), default=0) for role in Role} for curve in curves]
    events = steps[0][-1].events
    model_bytes = sum(e.memory.parameters_bytes for e in events) / (len(events) if strategy.is_replicated else 1)
    excess = list(_excess(name, most, measured[0], classes[0], model_bytes))
    same = parity(theirs, yours)
    passed = same.verdict in (Verdict.EQUAL, Verdict.WITHIN) and not excess
    said = " ".join([f"{'Passed' if passed else 'Not yet'}.", *excess, f"{name} and {peer}: {same.sentence}."])
    rows = [(title, *(_median(f, field, form) for f in measured)) for title, (field, form) in _FIGURES.items()]
    rows.append(("peak memory of a rank", *(size(f.peak_memory_bytes) for f in measured)))
    rows += [(title, *(size(held[role]) for held in classes)) for title, role in _CLASSES.items()]
    table = Table(columns=("", name, peer), rows=tuple(rows), caption=said, left=frozenset({""}))
    return EngineCheck(passed=passed, sentence=said, table=table)


def _median(measured: Figures, field: str, form: Callable[[float], str]) -> str:
    spread: Any = getattr(measured, field)
    return "–" if spread is None else form(spread.median)


def _excess(
    name: str, most: Mapping[str, float], measured: Figures, classes: Mapping[Role, int], model_bytes: float
) -> Iterator[str]:
    spreads = (measured.link_bytes, measured.exposed_comm_s, measured.comm_s)
    sent, exposed, all_of_it = (math.nan if spread is None else spread.median for spread in spreads)
    for key, limit in most.items():
        title, hint, role = LIMITS[key]
        share = exposed / all_of_it if all_of_it else 0.0
        value = share if key == "exposed" else (sent if role is None else classes[role]) / model_bytes
        if math.isnan(value):
            yield f"What {name} {title} is not known here: train four steps or more, or leave {key!r} out."
        elif value > limit:
            form, unit = (".0%", "of its communication") if key == "exposed" else (".2f", "model sizes")
            yield f"{name} {title} {value:{form}} {unit}, and at most {limit:{form}} were asked for: {hint}."
