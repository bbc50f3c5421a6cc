"""What the controls have chosen: pending, applied, or refused and held back. No widgets here, and no lab.

A choice that cannot be is held, with its reason, and not sent; it is tried again with every later choice, so that a
combination can be made in any order: backend ddp is held under full_shard and goes through with no_shard.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from fsdp_lab.core.errors import FieldError

MOST_FIXES = 6


class Standing(enum.Enum):
    """The state of a choice."""

    IDLE = "idle"
    NEXT = "next"  # takes effect with the next start
    PENDING = "pending"
    APPLIED = "applied"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Note:
    """The text beside a control. `fix` holds further field values that would make a refused choice possible."""

    standing: Standing = Standing.IDLE
    text: str = ""
    fix: Mapping[str, Any] = field(default_factory=dict)


class Chosen(Protocol):
    """What is chosen, field by field: a Spec, or a question that has one."""

    def flat(self) -> dict[str, Any]:
        """Every field by its name."""

    def replace(self, **changes: Any) -> Self:
        """Raises SpecError for what cannot be."""


T = TypeVar("T", bound=Chosen)


def _unchecked(chosen: Chosen) -> None:
    pass


class Choices(Generic[T]):
    """The Spec that is wanted, what was refused of it, and a note for each field that was touched."""

    def __init__(self, spec: T, *, check: Callable[[T], None] = _unchecked) -> None:
        """check: raises SpecError for what a Spec alone cannot know, such as a text that is not there."""
        self.wanted = spec
        self.held: dict[str, Any] = {}
        self.notes: dict[str, Note] = {}
        self._check = check

    def choose(self, **values: Any) -> dict[str, Any]:
        """Takes a choice of one field, or of several that belong together. Returns what is accepted by it: the given
        fields and those held before that became possible, or nothing where it is refused."""
        now = self.wanted.flat()
        together = {**self.held, **values}
        for attempt in (together, values):
            changes = {name: value for name, value in attempt.items() if not same(now[name], value)}
            if self._refusal(attempt) is None:
                self.wanted = self.wanted.replace(**changes)
                for name in attempt:
                    self.held.pop(name, None)
                    self.notes[name] = Note()
                self._review()
                return changes
        self.held.update(values)
        self._review()
        return {}

    def adopt(self, spec: T) -> None:
        """The wanted Spec is this one, by somebody else's word; what was held is reviewed against it."""
        self.wanted = spec
        self.held = {name: value for name, value in self.held.items() if not same(spec.flat()[name], value)}
        self._review()

    def revert(self, names: Mapping[str, Any], to: T, error: FieldError) -> None:
        """Fields that were accepted here and refused by the ranks: they are held with the ranks' reason."""
        refused = {name: self.wanted.flat()[name] for name in names}
        self.wanted = to
        for name, value in refused.items():
            self.held[name] = value
            self.notes[name] = Note(standing=Standing.REFUSED, text=str(error), fix=error.fix)

    def note(self, name: str, standing: Standing, text: str) -> None:
        self.notes[name] = Note(standing=standing, text=text)

    def value(self, name: str) -> Any:
        """What the control of a field shows: the held choice, else the wanted one."""
        return self.held[name] if name in self.held else self.wanted.flat()[name]

    def _review(self) -> None:
        """Says again why each held choice is held."""
        for name, value in self.held.items():
            error = self._refusal({name: value})
            if error is None:  # possible by itself, but not with what it was chosen with
                error = self._refusal(self.held)
            if error is not None:
                fix = self._way_out({name: value})
                self.notes[name] = Note(standing=Standing.REFUSED, text=str(error), fix=fix)

    def _refusal(self, changes: Mapping[str, Any]) -> FieldError | None:
        try:
            self._check(self.wanted.replace(**changes))
        except FieldError as e:
            return e
        return None

    def _way_out(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Further field values with which `values` would be accepted; empty where the refusals give none."""
        fix: dict[str, Any] = {}
        for _ in range(MOST_FIXES):
            error = self._refusal({**values, **fix})
            if error is None:
                return fix
            more = {name: value for name, value in error.fix.items() if name not in values and name not in fix}
            if not more:
                return {}
            fix.update(more)
        return {}


def same(a: Any, b: Any) -> bool:
    """Whether two field values mean the same: a tuple and a list of devices do."""
    return bool((list(a) if isinstance(a, tuple) else a) == (list(b) if isinstance(b, tuple) else b))
