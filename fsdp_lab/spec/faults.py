"""`Fault`: a fault to inject, where and when. rank/faults.py executes it on a rank; validation needs no torch."""

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fsdp_lab.base.errors import ArgumentError, is_number, is_whole
from fsdp_lab.spec.link import LinkError, LinkSpec


class FaultKind(enum.StrEnum):
    RAISE = "raise"  # the model's code raises
    NAN = "nan"  # an activation, or in the backward a gradient, becomes NaN
    OOM = "oom"  # an allocation larger than the memory
    STALL = "stall"  # the thread that trains blocks in native code and does not handle SIGINT
    CUT = "cut"  # no byte of the rank's collectives is transferred any more, as if its cable were pulled
    SLOW = "slow"  # the rank's link is slower from then on
    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP


class FaultPhase(enum.StrEnum):
    """The moment in a step: in the middle of the forward or backward, or after the vote that ends it, before the update."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


_ONLY = {"for_s": FaultKind.STALL, "heals": FaultKind.CUT, "link": FaultKind.SLOW, "factor": FaultKind.SLOW}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, which happens once. Raises ArgumentError for an invalid field."""

    kind: FaultKind
    ranks: tuple[int, ...]  # on which it happens
    at_step: int | None = None  # this step, or the first later one that reaches the phase; None: the next
    phase: FaultPhase = FaultPhase.FORWARD
    for_s: float | None = None  # duration of a stall; None: unlimited
    heals: bool | None = None  # of a cut: whether groups that are opened after the aborted step work; None: yes
    link: str | None = None  # of a slow link: its bandwidth and latency, as in "5 MB/s, 1 ms"
    factor: float | None = None  # or: how many times slower it gets

    def __post_init__(self) -> None:
        for name, tokens in (("kind", FaultKind), ("phase", FaultPhase)):
            try:
                object.__setattr__(self, name, tokens(getattr(self, name)))
            except ValueError:
                listed = ", ".join(one.value for one in tokens)
                raise _refused(name, getattr(self, name), f"one of {listed}") from None
        if not isinstance(self.ranks, (tuple, list)) or not self.ranks or not all(is_whole(r, 0) for r in self.ranks):
            raise _refused("ranks", self.ranks, "the numbers of one rank or more")
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if self.at_step is not None and not is_whole(self.at_step, 0):
            raise _refused("at_step", self.at_step, "the number of a step, or None for the next")
        for name, kind in _ONLY.items():
            if getattr(self, name) is not None and self.kind is not kind:
                raise _invalid(name, f"it belongs to {kind.value} and this is {self.kind.value}", "leave it out")
        for name, least in (("for_s", 0.0), ("factor", 1.0)):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and math.isfinite(value) and value > least):
                raise _refused(name, value, f"a finite number above {least:g}, or leave it out")
        if self.heals is not None and not isinstance(self.heals, bool):
            raise _refused("heals", self.heals, "true or false")
        if self.kind is FaultKind.NAN and self.phase is FaultPhase.UPDATE:
            reason = "when a step is applied, its loss and gradients were found finite"
            raise _invalid("phase", reason, "use forward or backward")
        if self.kind is FaultKind.SLOW:
            self._check_link()

    def _check_link(self) -> None:
        if (self.link is None) == (self.factor is None):
            reason = "a slow link is one of a bandwidth, or slower by a factor"
            raise _invalid("link", reason, 'give link, as in "5 MB/s", or factor, as in 10')
        if self.link is None:
            return
        try:
            requested = LinkSpec.parse(self.link)
        except LinkError as e:
            raise _invalid("link", e.reason, e.hint) from None
        if requested.gpu is not None:
            raise _invalid("link", f"{requested.text} is scaled to a GPU", 'give a bandwidth, as in "5 MB/s"')

    def check(self, world_size: int, step: int) -> None:
        """Raises ArgumentError if it is impossible for `world_size` ranks that are at `step`."""
        if beyond := [rank for rank in self.ranks if rank >= world_size]:
            raise _invalid("ranks", f"there is no rank {beyond[0]}", f"give ranks from 0 to {world_size - 1}")
        if self.at_step is not None and self.at_step < step:
            raise _invalid("at_step", f"step {self.at_step} is over", f"give {step} or more, or None for the next")
        if world_size == 1 and self.kind in (FaultKind.CUT, FaultKind.SLOW):
            raise _invalid("kind", "one rank sends nothing over a link", "start two ranks or more")

    @property
    def where(self) -> str:
        """The place, for messages: "in the backward of step 12"."""
        return f"in the {self.phase.value} of step {'…' if self.at_step is None else self.at_step}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for `from_dict`."""
        d = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**d, "kind": self.kind.value, "phase": self.phase.value, "ranks": list(self.ranks)}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """Raises ArgumentError."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in d:
            if name not in names:
                raise _invalid(name, "there is no such field", f"use {', '.join(names)}")
        return cls(**{"kind": None, "ranks": None, **d})  # a missing field is refused as None is


def _invalid(name: str, reason: str, hint: str) -> ArgumentError:
    return ArgumentError(f"fault.{name}", reason, hint)


def _refused(name: str, value: Any, wanted: str) -> ArgumentError:
    return _invalid(name, f"{value!r} is refused", f"give {wanted}")


# "kill" and "stop" are signals to the process; the others happen in the rank's next step.
DRILLS = {
    "kill": "ends the rank's process (SIGKILL), as the system does when memory runs out",
    "stop": "stops the rank's process (SIGSTOP), like a machine that hangs",
    "stall": "blocks the rank in native code, where it ignores interrupts",
    "cut": "blocks every byte of the rank's collectives, as if its cable were pulled",
    "slow": "makes the rank's link ten times slower; nothing fails; end() restores it",
    "out-of-memory": "lets the rank ask for more memory than there is",
    "nan": "makes one of the rank's activations NaN",
    "raise": "lets the model's code raise on the rank",
}
SIGNALS = ("kill", "stop")
_KINDS = {"out-of-memory": FaultKind.OOM}
SLOWER = 10.0


def check_kind(kind: str) -> None:
    """Raises ArgumentError."""
    if kind not in DRILLS:
        raise ArgumentError("kind", f"{kind!r} is refused", f"choose from {', '.join(DRILLS)}")


def fault_of(kind: str, rank: int) -> Fault:
    """The fault of a drill, also of one that is a signal, so that both are validated alike. Raises ArgumentError."""
    check_kind(kind)
    wanted = _KINDS.get(kind) or FaultKind(kind)
    return Fault(kind=wanted, ranks=(rank,), factor=SLOWER if wanted is FaultKind.SLOW else None)
