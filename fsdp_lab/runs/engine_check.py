"""`EngineCheck`: an engine of the user's, tried for some steps beside a known one of the same sharding.

It passes if the lab found no mistake (fsdp_lab/backends/your_checks.py), it computes the same (`runs.parity`), and takes no
more than what was asked for (`LIMITS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdp_lab.cluster import ClusterError
from fsdp_lab.core.errors import ArgumentError, FieldError
from fsdp_lab.core.events import Role
from fsdp_lab.core.formatting import Table, duration, size, traffic
from fsdp_lab.core.spec import ENGINE_FIELD, Strategy
from fsdp_lab.runs.parity import Parity, Verdict, parity
from fsdp_lab.runs.run import Run
from fsdp_lab.runs.steps import Step, last_stretch
from fsdp_lab.runs.summary import Figures, figures

SMALL_MODEL = "gpt2-1m"
LEAST_STEPS = 5  # the first three do not count: they are inspected, or measure memory


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineCheck:
    """What was found.

    Attributes:
        engine: its name. sharding: as the lab has called it. peer: the backend that it was compared with.
        mistake: in a sentence; "" if there is none. parity: None where a mistake ended the training.
        excess: what it takes more than asked for, in sentences.
        figures: by backend, of the steps that count. most_bytes: by backend, the most of each class of memory that a rank
            held at any moment of its ledger step.
    """

    engine: str
    sharding: str
    peer: str
    mistake: str = ""
    parity: Parity | None = None
    excess: tuple[str, ...] = ()
    figures: Mapping[str, Figures]
    most_bytes: Mapping[str, Mapping[Role, int]]

    @property
    def passed(self) -> bool:
        return not self.mistake and not self.excess and self._computes_the_same

    @property
    def _computes_the_same(self) -> bool:
        return self.parity is not None and self.parity.verdict in (Verdict.EQUAL, Verdict.WITHIN)

    def __bool__(self) -> bool:
        return self.passed

    @property
    def sentence(self) -> str:
        """The verdict."""
        if self.mistake:
            return f"Not yet. {self.mistake}"
        assert self.parity is not None
        verdict = f"{self.engine} and {self.peer}: {self.parity.sentence}."
        return " ".join([f"{'Passed' if self.passed else 'Not yet'}.", *self.excess, verdict])

    def table(self) -> Table:
        """Figures of both, side by side; empty after a mistake."""
        columns = ("", *({"yours": self.engine}.get(name, name) for name in self.figures))
        rows: list[tuple[str, ...]] = []
        for title, value in _FIGURES.items():
            rows.append((title, *(value(f) for f in self.figures.values())))
        for title, role in _CLASSES.items():
            rows.append((title, *(size(most[role]) for most in self.most_bytes.values())))
        return Table(columns=columns, rows=tuple(rows) if self.figures else (), caption=self.sentence,
                     left=frozenset({""}))  # fmt: skip

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


# What may be limited: a title, and what to look at. In sizes of the whole model in fp32, a rank and step; "exposed" is the
# share of communication that computing waits for, which a busy machine changes less than its seconds.
LIMITS: Mapping[str, tuple[str, str]] = {
    "sent": ("sends", "a reduce-scatter sends half of what an all-reduce does"),
    "parameters": (
        "keeps parameters of",
        "return a copy (clone) of this rank's part from shard: a view keeps all of it",
    ),
    "gathered": ("holds gathered parameters of", "free a unit's parameters once it has computed"),
    "gradients": ("holds gradients of", "set p.grad = None once it is sent"),
    "optimizer": ("holds optimizer state of", "return this rank's part from shard, not all"),
    "exposed": ("waits for", "begin a gather in prefetch, and let reduce return a function"),
}


def peer_of(strategy: Strategy) -> str:
    """The backend that shards in the same way: torch's, where it has one."""
    if strategy.is_replicated:
        return "ddp"
    return "lab" if strategy.shards_optimizer_only else "fsdp2"


def check_engine(run: Callable[..., Run], strategy: Strategy, name: str, most: Mapping[str, float] = {}) -> EngineCheck:
    """`run`: starts the same training with a backend. Waits for both. `most`: see `LIMITS`. Raises ArgumentError."""
    if unknown := next((key for key in most if key not in LIMITS), None):
        raise ArgumentError("most", f"{unknown!r} cannot be limited", f"give some of {', '.join(LIMITS)}")
    peer = peer_of(strategy)
    try:
        yours = run("yours").wait()
    except (FieldError, ClusterError) as e:
        of_engine = isinstance(e, FieldError) and e.field == ENGINE_FIELD  # whose errors name the engine themselves
        mistake = f"{e.reason}; {e.hint}" if of_engine else getattr(e, "sentence", str(e))  # type: ignore[union-attr]
        return EngineCheck(engine=name, sharding=strategy.sharding, peer=peer, mistake=mistake, figures={},
                           most_bytes={})  # fmt: skip
    theirs = run(peer).wait()
    steps = {backend: last_stretch(one.events.steps(), one.spec) for backend, one in (("yours", yours), (peer, theirs))}
    found, classes = figures(steps["yours"]), _most_of_each(steps["yours"])
    return EngineCheck(
        engine=name,
        sharding=strategy.sharding,
        peer=peer,
        parity=parity(theirs, yours),
        excess=tuple(_excess(name, most, found, classes, _model_bytes(steps["yours"], strategy))),
        figures={"yours": found, peer: figures(steps[peer])},
        most_bytes={"yours": classes, peer: _most_of_each(steps[peer])},
    )


def _excess(
    name: str, most: Mapping[str, float], found: Figures, classes: Mapping[Role, int], model_bytes: float
) -> Iterator[str]:
    sent, exposed, all_of_it = (
        math.nan if spread is None else spread.median
        for spread in (found.link_bytes, found.exposed_comm_s, found.comm_s)
    )
    values = {
        "sent": sent / model_bytes,
        "parameters": classes[Role.PARAMETERS] / model_bytes,
        "gathered": classes[Role.UNSHARDED] / model_bytes,
        "gradients": classes[Role.GRADIENTS] / model_bytes,
        "optimizer": classes[Role.OPTIMIZER] / model_bytes,
        "exposed": exposed / all_of_it if all_of_it else 0.0,
    }
    for key, limit in most.items():
        title, hint = LIMITS[key]
        if math.isnan(values[key]):
            yield f"What {name} {title} is not known here: train four steps or more, or leave {key!r} out."
        elif values[key] > limit:
            share = key == "exposed"
            told, asked = (f"{v:.0%}" if share else f"{v:.2f}" for v in (values[key], limit))
            unit = " of its communication" if share else " model sizes"
            yield f"{name} {title} {told}{unit}, and at most {asked} were asked for: {hint}."


def _model_bytes(steps: Sequence[Step], strategy: Strategy) -> float:
    events = steps[-1].events
    return sum(e.memory.parameters_bytes for e in events) / (len(events) if strategy.is_replicated else 1)


def _most_of_each(steps: Sequence[Step]) -> dict[Role, int]:
    """By class, the most at any moment of a ledger step."""
    samples = [sample for s in steps for e in s.events for sample in e.memory_curve]
    return {role: max((sample.classes.of_role(role) for sample in samples), default=0) for role in Role}
