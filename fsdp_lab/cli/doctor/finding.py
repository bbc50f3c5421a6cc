"""A finding: what was looked at, what is there, whether that is well, and what to do."""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


class State(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, with less than it could
    FAIL = "fail"  # does not work until something is done


@dataclass(frozen=True)
class Finding:
    name: str
    value: str
    state: State = State.OK
    advice: str = ""  # what to do; empty where nothing needs doing

    def lines(self, colours: bool) -> Iterator[str]:
        """The finding for a terminal: one line, and the advice below it."""
        mark = self.state.upper() if self.state is State.FAIL else self.state
        colour = {State.OK: "32", State.WARN: "33", State.FAIL: "1;31"}[self.state]
        padded = f"{mark:<5}"
        yield f"  {f'{chr(27)}[{colour}m{padded}{chr(27)}[0m' if colours else padded}{self.name:<18} {self.value}"
        yield from textwrap.wrap(self.advice, 110, initial_indent=" " * 9 + "-> ", subsequent_indent=" " * 12)


def worst(findings: Sequence[Finding]) -> State:
    order = list(State)
    return max((f.state for f in findings), key=order.index, default=State.OK)
