"""The choices of the controls: pending, applied, or refused. Neither widgets here, nor a lab.

A refused choice is held back with its reason, and tried again with every later choice, so that a combination can be made
in any order: backend ddp is refused under full_shard, and accepted once no_shard is chosen.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from fsdp_lab.base.errors import FieldError

MOST_FIXES = 6


class ChoiceState(enum.Enum):
    IDLE = "idle"
    NEXT = "next"  # takes effect with the next start
    PENDING = "pending"
    APPLIED = "applied"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Note:
    """The text beside a control. Of a refused choice, `why` says the same in sentences, without the field's name, and `fix`
    has further field values that would make it possible."""

    state: ChoiceState = ChoiceState.IDLE
    text: str = ""
    why: str = ""
    fix: Mapping[str, Any] = field(default_factory=dict)


def _refused(error: FieldError, fix: Mapping[str, Any]) -> Note:
    return Note(state=ChoiceState.REFUSED, text=str(error), why=error.sentences, fix=fix)


class Chosen(Protocol):
    """A choice, field by field: a Spec, or a question of the what-if page."""

    def flat(self) -> dict[str, Any]: ...
    def replace(self, **changes: Any) -> Self: ...  # raises SpecError for values that are refused


T = TypeVar("T", bound=Chosen)


class Choices(Generic[T]):
    """Field values that are chosen: `wanted` is possible, `held` has refused values, `notes` those of each touched field."""

    def __init__(self, spec: T, *, check: Callable[[T], None] = lambda chosen: None) -> None:
        """check: raises SpecError for what a Spec alone cannot know, such as a text that does not exist."""
        self.wanted = spec
        self.held: dict[str, Any] = {}
        self.notes: dict[str, Note] = {}
        self._check = check

    def choose(self, **values: Any) -> dict[str, Any]:
        """Takes a choice of one field, or of several that belong together. Returns what is accepted: the given fields and
        those held before that became possible, or nothing where the choice is refused."""
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
        """Replaces the wanted Spec by one that was not chosen here, and reviews what is held."""
        self.wanted = spec
        self.held = {name: value for name, value in self.held.items() if not same(spec.flat()[name], value)}
        self._review()

    def revert(self, names: Mapping[str, Any], to: T, error: FieldError) -> None:
        """Holds fields that were accepted here and refused by the ranks, with the ranks' reason."""
        now = self.wanted.flat()
        self.held |= {name: now[name] for name in names}
        self.notes |= {name: _refused(error, error.fix) for name in names}
        self.wanted = to

    def note(self, names: Iterable[str], state: ChoiceState, text: str) -> None:
        self.notes |= {name: Note(state=state, text=text) for name in names}

    def value(self, name: str) -> Any:
        """Returns what the control of a field shows: the held choice, else the wanted one."""
        return self.held[name] if name in self.held else self.wanted.flat()[name]

    def _review(self) -> None:
        """Updates the reasons of what is held."""
        for name, value in self.held.items():
            error = self._refusal({name: value})
            if error is None:  # possible by itself, but not with what it was chosen with
                error = self._refusal(self.held)
            if error is not None:
                self.notes[name] = _refused(error, self._fix({name: value}))

    def _refusal(self, changes: Mapping[str, Any]) -> FieldError | None:
        try:
            self._check(self.wanted.replace(**changes))
        except FieldError as e:
            return e
        return None

    def _fix(self, values: Mapping[str, Any]) -> dict[str, Any]:
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
    """Says whether two field values mean the same: a tuple and a list of devices do."""
    return bool((list(a) if isinstance(a, tuple) else a) == (list(b) if isinstance(b, tuple) else b))
