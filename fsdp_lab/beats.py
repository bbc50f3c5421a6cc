"""`Beat`: where a rank stands, said by a thread of its own while the rank's main thread may be blocked.

Floor 0. It crosses processes as a dict of plain scalars. Beats tell a status and a hang (`fsdp_lab.hang`), and nothing else:
what is drawn and kept comes from step events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORKING_S, IDLE_S = 1.0, 2.0  # a rank beats as often as this, at least
_GRACE_S = 1.5  # for a busy machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """A collective that a rank has issued."""

    sequence: int  # the rank's own count
    kind: str
    group: str
    size: int  # ranks in the group
    ordinal: int  # the group's count: on all its ranks the same number is the same collective; -1 between two ranks
    unit: str = ""
    payload_bytes: int = 0

    @property
    def whose(self) -> str:
        """Its kind and its unit, as in "all_gather of transformer.h.3"."""
        return f"{self.kind} of {self.unit}" if self.unit else self.kind

    @property
    def name(self) -> str:
        """With its number in the group, as in "all_gather 17 of transformer.h.3"."""
        number = f" {self.ordinal}" if self.ordinal >= 0 else ""
        return f"{self.kind}{number} of {self.unit}" if self.unit else f"{self.kind}{number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One word of one rank. `recent` and `stack` are there only where it has issued nothing for a while."""

    rank: int
    number: int  # 0, 1, 2, ...: one that does not go up is of a rank that has fallen silent
    working: bool  # within a call that the ranks do together
    step: int | None = None  # that it is in; None where it holds no model
    last: Issued | None = None
    pending: Issued | None = None  # the oldest that has not finished
    pending_s: float = 0.0  # since it was issued
    peers: tuple[int, ...] = ()  # the ranks of its group
    counts: Mapping[str, int] = field(default_factory=dict)  # issued so far, by group
    recent: tuple[Issued, ...] = ()  # the last ones, oldest first
    stack: str = ""  # of the rank's own thread, newest call last

    @property
    def next_s(self) -> float:
        """Within how many seconds the next one is due."""
        return WORKING_S if self.working else IDLE_S

    @property
    def silent_s(self) -> float:
        """After how many seconds without another one its rank cannot speak: it is stopped, or something holds it."""
        return self.next_s + _GRACE_S

    def to_dict(self) -> dict[str, Any]:
        d = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("last", "pending"):
            d[name] = None if d[name] is None else dataclasses.asdict(d[name])
        d["recent"] = [dataclasses.asdict(one) for one in self.recent]
        d["peers"], d["counts"] = list(self.peers), dict(self.counts)
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Beat:
        fields = dict(d)
        for name in ("last", "pending"):
            fields[name] = None if fields[name] is None else Issued(**fields[name])
        fields["recent"] = tuple(Issued(**one) for one in fields["recent"])
        fields["peers"] = tuple(fields["peers"])
        return cls(**fields)
