"""`EngineCheck`: an engine of the user's, tried for some steps beside a known one of the same sharding.

It passes if the lab names no mistake (`Inspector` in backends/yours.py), it computes the same (`runs.parity`), and takes no
more than what was asked for (`LIMITS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdp_lab.base.errors import ArgumentError, FieldError
from fsdp_lab.base.events import Role
from fsdp_lab.base.formatting import Table, duration, size, traffic
from fsdp_lab.cluster import ClusterError
from fsdp_lab.runs.parity import Parity, Verdict, parity
from fsdp_lab.runs.run import Run
from fsdp_lab.runs.steps import last_stretch
from fsdp_lab.runs.summary import Figures, figures
from fsdp_lab.spec.spec import ENGINE_FIELD, YOURS, Strategy

SMALL_MODEL = "gpt2-1m"
LEAST_STEPS = 5  # the first three do not count: they are inspected, or measure memory


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineCheck:
    """The result of a check.

    Attributes:
        engine: its name. peer: the backend that it was compared with.
        mistake: in a sentence; "" if there is none. parity: None where a mistake ended the training.
        excess: what it takes more than asked for, in sentences.
        figures: by backend, of the steps that count. most_bytes: by backend, the most of each class of memory that a rank
            held at any moment of its ledger step.
    """

    engine: str
    peer: str
    mistake: str = ""
    parity: Parity | None = None
    excess: tuple[str, ...] = ()
    figures: Mapping[str, Figures]
    most_bytes: Mapping[str, Mapping[Role, int]]

    @property
    def passed(self) -> bool:
        same = self.parity is not None and self.parity.verdict in (Verdict.EQUAL, Verdict.WITHIN)
        return same and not self.mistake and not self.excess

    def __bool__(self) -> bool:
        return self.passed

    @property
    def sentence(self) -> str:
        """The verdict."""
        told = self.mistake
        if self.parity is not None:
            told = " ".join([*self.excess, f"{self.engine} and {self.peer}: {self.parity.sentence}."])
        return f"{'Passed' if self.passed else 'Not yet'}. {told}"

    def table(self) -> Table:
        """Figures of both, side by side; empty after a mistake."""
        columns = ("", *(self.engine if name == YOURS else name for name in self.figures))
        rows = [(title, *map(value, self.figures.values())) for title, value in _FIGURES.items()]
        rows += [(title, *(size(most[role]) for most in self.most_bytes.values())) for title, role in _CLASSES.items()]
        shown = tuple(rows) if self.figures else ()
        return Table(columns=columns, rows=shown, caption=self.sentence, left=frozenset({""}))

    def __repr__(self) -> str:
        return str(self.table()) if self.figures else self.sentence

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() if self.figures else f"<p>{escape(self.sentence)}</p>"


def _median(spread: Any, form: Callable[[float], str]) -> str:
    return "–" if spread is None else form(spread.median)


_FIGURES: Mapping[str, Callable[[Figures], str]] = {
    "step": lambda f: _median(f.step_time_s, duration),
    "exposed communication": lambda f: _median(f.exposed_comm_s, duration),
    "sent by a rank": lambda f: _median(f.link_bytes, traffic),
    "peak memory of a rank": lambda f: size(f.peak_memory_bytes),
}
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
        return EngineCheck(engine=name, peer=peer, mistake=mistake, figures={}, most_bytes={})
    theirs = run(peer).wait()
    steps = {backend: last_stretch(one.events.steps(), one.spec) for backend, one in ((YOURS, yours), (peer, theirs))}
    measured = {backend: figures(s) for backend, s in steps.items()}
    classes: dict[str, dict[Role, int]] = {}
    for backend, whole in steps.items():
        held = [sample.classes for step in whole for e in step.events for sample in e.memory_curve]
        classes[backend] = {role: max((h.of_role(role) for h in held), default=0) for role in Role}
    events = steps[YOURS][-1].events
    model_bytes = sum(e.memory.parameters_bytes for e in events) / (len(events) if strategy.is_replicated else 1)
    excess = tuple(_excess(name, most, measured[YOURS], classes[YOURS], model_bytes))
    same = parity(theirs, yours)
    return EngineCheck(engine=name, peer=peer, parity=same, excess=excess, figures=measured, most_bytes=classes)


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
