"""`MemoryTracker`: bytes by class, as they come and go, and the highest moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_lab.core.events import Role, RoleBytes

PARAMETERS, UNSHARDED, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION, OTHER = range(7)
_ROLES = (
    Role.PARAMETERS, Role.UNSHARDED, Role.GRADIENTS, Role.OPTIMIZER, Role.ACTIVATIONS, Role.COMMUNICATION, Role.OTHER,
)  # fmt: skip


@dataclass(slots=True)
class MemoryTracker:
    """A mutable sum. `where` is whatever the writer says of the present moment; `peak_where` that of the highest."""

    now: list[float] = field(default_factory=lambda: [0.0] * 7)
    total: float = 0.0
    peak: list[float] = field(default_factory=lambda: [0.0] * 7)
    peak_total: float = 0.0
    where: tuple[str, int] = ("begin", 0)
    peak_where: tuple[str, int] = ("begin", 0)

    def alloc(self, role: int, size: float) -> None:
        self.now[role] += size
        self.total += size
        if self.total > self.peak_total:
            self.peak_total, self.peak, self.peak_where = self.total, self.now[:], self.where

    def free(self, role: int, size: float) -> None:
        self.now[role] -= size
        self.total -= size

    def add(self, other: MemoryTracker) -> None:
        """What another book, which began at nothing, wrote: as if it had been written here."""
        if self.total + other.peak_total > self.peak_total:
            self.peak_total = self.total + other.peak_total
            self.peak = [a + b for a, b in zip(self.now, other.peak, strict=True)]
            self.peak_where = self.where
        self.now = [a + b for a, b in zip(self.now, other.now, strict=True)]
        self.total += other.total


def classes_of(sizes: list[float]) -> RoleBytes:
    return RoleBytes.of({role: round(max(0.0, size)) for role, size in zip(_ROLES, sizes, strict=True)})
