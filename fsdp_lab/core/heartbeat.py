"""`Heartbeat`: the state of a rank, sent from a separate thread while its main thread may be blocked.

Floor 0. It crosses processes as a dict of plain scalars. Heartbeats serve only status and hang detection
(`fsdp_lab.core.hang`); plots and history come from step events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORKING_S, IDLE_S = 1.0, 2.0  # the longest interval between two heartbeats
_GRACE_S = 1.5  # on a busy machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """A collective that a rank has issued."""

    sequence: int  # the rank's own count
    kind: str
    group: str
    size: int  # ranks in the group
    ordinal: int  # the group's count: the same number is the same collective on all its ranks; -1 between two ranks
    unit: str = ""
    payload_bytes: int = 0

    @property
    def label(self) -> str:
        """Its kind and its unit, as in "all_gather of transformer.h.3"."""
        return f"{self.kind} of {self.unit}" if self.unit else self.kind

    @property
    def name(self) -> str:
        """With its number in the group, as in "all_gather 17 of transformer.h.3"."""
        number = f" {self.ordinal}" if self.ordinal >= 0 else ""
        return f"{self.kind}{number} of {self.unit}" if self.unit else f"{self.kind}{number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """One heartbeat of one rank. `recent` and `stack` are set only if it has issued no collective for a while."""

    rank: int
    number: int  # 0, 1, 2, ...
    working: bool  # in a call that all ranks make
    step: int | None = None  # in progress; None if it holds no model
    last: Issued | None = None
    pending: Issued | None = None  # the oldest that has not finished
    pending_s: float = 0.0  # since it was issued
    peers: tuple[int, ...] = ()  # the ranks of its group
    counts: Mapping[str, int] = field(default_factory=dict)  # issued so far, by group
    recent: tuple[Issued, ...] = ()  # the last ones, oldest first
    stack: str = ""  # of the rank's main thread, newest call last

    @property
    def next_s(self) -> float:
        """Seconds until the next one is due, at most."""
        return WORKING_S if self.working else IDLE_S

    @property
    def silent_s(self) -> float:
        """Seconds without another one after which its rank counts as silent: it is stopped, or native code holds the GIL."""
        return self.next_s + _GRACE_S

    def to_dict(self) -> dict[str, Any]:
        d = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("last", "pending"):
            d[name] = None if d[name] is None else dataclasses.asdict(d[name])
        d["recent"] = [dataclasses.asdict(one) for one in self.recent]
        d["peers"], d["counts"] = list(self.peers), dict(self.counts)
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Heartbeat:
        fields = dict(d)
        for name in ("last", "pending"):
            fields[name] = None if fields[name] is None else Issued(**fields[name])
        fields["recent"] = tuple(Issued(**one) for one in fields["recent"])
        fields["peers"] = tuple(fields["peers"])
        return cls(**fields)
