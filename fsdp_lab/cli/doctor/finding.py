"""A finding: what was looked at, what is there, whether that is well, and what to do."""

from __future__ import annotations

import enum
import shutil
import subprocess
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


def output_of(command: Sequence[str], timeout_s: float = 10) -> str | None:
    """What a command prints; None where it is missing, fails, or takes longer than `timeout_s`."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def size(n_bytes: float) -> str:
    """ "1.5 GiB": binary units, one decimal below ten."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB" if n_bytes < 10 else f"{n_bytes:.0f} GiB"
