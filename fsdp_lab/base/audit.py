"""`AuditFinding`: what an audit of a loop's updates found, and its kinds. `AuditLog` joins what the ranks of a loop report.

Note: what only all ranks know together. A watched loop sends nothing of its own, so a rank reports with its events checksums
of the replicated parameters that it looked at, and the gradients that are zero in its own part. `AuditLog` compares.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Self

from fsdp_lab.base.formatting import Table, plural

WAITING = 256  # steps whose checksums are kept until all ranks have reported theirs


class AuditKind(enum.Enum):
    """What is found, and what to do about it."""

    STUCK = "stuck", "look at its group's learning rate, and whether the optimizer holds this tensor or a copy"
    LOW_PRECISION = (
        "update lost",
        "keep fp32 parameters, and compute in lower precision by autocast or the wrapper; or raise the learning rate",
    )
    NO_GRADIENT = "no gradient", "look for a detach, a no_grad or an unused output behind its module; or freeze it"
    ZERO_GRADIENT = "gradient is zero", "look for a factor behind it that is always zero; or freeze it"
    FROZEN_MOVED = "frozen, and moves", "take it out of the optimizer, and set its gradient to None when it is frozen"
    NOT_IN_OPTIMIZER = "in no optimizer", "give it to the optimizer, or freeze it"
    TWICE = "updated twice", "give it to one optimizer, once"
    BESIDE_ADAPTERS = "trained beside adapters", "freeze it; what is saved of adapters lacks it"
    REPLICAS_DIFFER = (
        "replicas differ",
        "average its gradients, or wrap it with the rest; ranks that are to differ are watched with audit=False",
    )
    SKIPPED = "updates skipped", "look for gradients that are not finite; lower the scaler's init_scale, or use bf16"

    @property
    def text(self) -> str:
        return self.value[0]

    @property
    def hint(self) -> str:
        return self.value[1]


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """`parameter`: its name in the model; "" where it is none in particular. `step`: the one after which it was certain;
    of replicas, the first in which they differ. `what`: is seen, in a sentence."""

    kind: AuditKind
    parameter: str
    rank: int
    step: int
    what: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.name}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        return cls(**{**d, "kind": AuditKind[d["kind"]]})


class Audit(Sequence[AuditFinding]):
    """The findings of a loop, in the order in which they came. As text, a row for each kind, and what to do about it.
    `done`: whether the loop is audited at all."""

    def __init__(self, findings: Sequence[AuditFinding] | None, about: str) -> None:
        self.done, self._findings, self._about = findings is not None, tuple(findings or ()), about

    def __getitem__(self, i: Any) -> Any:
        return self._findings[i]

    def __len__(self) -> int:
        return len(self._findings)

    def to_dict(self) -> dict[str, Any]:
        return {"done": self.done, "findings": [finding.to_dict() for finding in self]}

    def table(self) -> Table:
        rows = []
        for kind in AuditKind:
            own = [f for f in self if f.kind is kind]
            names = list(dict.fromkeys(f.parameter for f in own))
            if own:
                more = f" and {len(names) - 2} more" if len(names) > 2 else ""
                ranks, step = ", ".join(map(str, sorted({f.rank for f in own}))), str(min(f.step for f in own))
                rows.append((kind.text, ", ".join(names[:2]) + more, ranks, step, own[0].what, kind.hint))
        columns = ("found", "parameters", "ranks", "step", "what", "do")
        caption = f"{self._about}: {plural(len(self), 'finding')}"
        return Table(columns=columns, rows=tuple(rows), caption=caption, left=frozenset(columns))

    def __repr__(self) -> str:
        nothing = "nothing found" if self.done else "not audited; loops are that are watched by fsdp_lab.watch"
        return repr(self.table()) if self else f"{self._about}: {nothing}"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_() if self else escape(repr(self))


class AuditLog:
    """`take` what each rank reports; `findings`: of all, each kind and parameter once for each rank. A report is plain:

    replicated: (name, ranks that hold what this one does, whether the wrapper sees to it) of each parameter, once
    checksums: (step, {number in `replicated`, as text: checksum}); -1 is before the first step
    findings: as `AuditFinding.to_dict`; everywhere: likewise, certain once all ranks have said so
    """

    def __init__(self, world_size: int) -> None:
        self.findings: list[AuditFinding] = []
        self._world_size = world_size
        self._replicated: dict[int, Sequence[Any]] = {}  # by rank
        self._sums: dict[int, dict[int, Mapping[str, int]]] = {}  # step -> rank -> number -> checksum
        self._equal: set[str] = set()  # numbers of those that were equal once
        self._different: set[str] = set()
        self._copies = False  # all that no wrapper keeps equal was so before the first step: parts of pipelines are not
        self._everywhere: dict[tuple[str, str], dict[int, AuditFinding]] = {}

    def take(self, rank: int, report: Mapping[str, Any]) -> None:
        self.findings += map(AuditFinding.from_dict, report.get("findings", ()))
        for found in map(AuditFinding.from_dict, report.get("everywhere", ())):
            said = self._everywhere.setdefault((found.kind.name, found.parameter), {})
            said[rank] = found
            if len(said) == self._world_size:
                self.findings.append(max(said.values(), key=lambda f: f.step))
        if "replicated" in report:
            self._replicated[rank] = report["replicated"]
        for step, sums in report.get("checksums", ()):
            self._sums.setdefault(step, {})[rank] = sums
            if len(self._sums[step]) == self._world_size:
                self.findings += self._compare(step, self._sums.pop(step))
        for step in sorted(self._sums)[:-WAITING]:
            del self._sums[step]

    def _compare(self, step: int, sums: Mapping[int, Mapping[str, int]]) -> Iterator[AuditFinding]:
        for i in [i for i in sums[0] if i not in self._different]:
            name, _, certain = self._replicated[0][int(i)]
            for ranks in dict.fromkeys(tuple(replicated[int(i)][1]) for replicated in self._replicated.values()):
                other = next((r for r in ranks if sums[r].get(i, sums[ranks[0]].get(i)) != sums[ranks[0]].get(i)), None)
                if other is None:
                    self._equal.add(i)
                elif certain or (i in self._equal and (self._copies or "lora" in name.lower())):
                    self._different.add(i)
                    what = f"its values on rank {other} are not those on rank {ranks[0]}"
                    at, kind = max(step, 0), AuditKind.REPLICAS_DIFFER
                    yield AuditFinding(kind=kind, parameter=name, rank=other, step=at, what=what)
        if step < 0:
            self._copies = all(i in self._equal for i in sums[0] if not self._replicated[0][int(i)][2])
