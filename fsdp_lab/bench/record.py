"""A list of parts, run one after the other, and the file that says what each of them printed and found.

The file is text for a reader; after the line `FIGURES` it is JSON: {"facts": {...}, "parts": [{"name", "title", "outcome",
"reason", "begun", "seconds", "printed", "figures"}, ...]}. It is written anew with each line that is printed, so that a
session that is cut off leaves what it had; the part that was in progress then is "not finished".
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from fsdp_lab.core.files import write_whole

FIGURES = "-- the same as JSON, with all figures --"
LEAST_SHARE = 0.5  # of its limit: a part that has less time is skipped

Say = Callable[[str], None]
Figures = Mapping[str, Any]


class PartOutcome(StrEnum):
    """What became of a part."""

    PENDING = "not begun"
    RUNNING = "not finished"
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class BenchPart:
    """`measure` is given where to print and how long it may take; it returns figures, or raises with a sentence."""

    name: str
    title: str
    limit_s: float
    measure: Callable[[Say, float], Figures]
    skipped: str = ""  # why it cannot be run here; "": it can


@dataclass(kw_only=True)
class PartRecord:
    """A part, as far as it has come."""

    name: str
    title: str
    outcome: PartOutcome = PartOutcome.PENDING
    reason: str = ""  # of a failure, or why it was skipped
    begun: str = ""  # UTC
    seconds: float = 0.0
    printed: list[str] = field(default_factory=list)
    figures: Figures = field(default_factory=dict)

    def text(self) -> Iterator[str]:
        yield f"== {self.name}: {self.title}"
        yield "  ".join(filter(None, (self.begun, f"{self.seconds:.1f} s", self.said)))
        yield from self.printed

    @property
    def said(self) -> str:
        return f"{self.outcome}: {self.reason}" if self.reason else str(self.outcome)


@dataclass(kw_only=True)
class Record:
    """All that one command did."""

    facts: Mapping[str, Any]  # of the machine: printed at the top
    file: Path
    say: Say
    parts: list[PartRecord] = field(default_factory=list)

    @property
    def failed(self) -> list[str]:
        return [part.name for part in self.parts if part.outcome is PartOutcome.FAILED]

    def run(self, parts: Sequence[BenchPart], limit_s: float) -> None:
        """Runs them in order, within so many seconds together (0: no limit). A part that fails does not stop the next."""
        self.parts = [PartRecord(name=part.name, title=part.title) for part in parts]
        begun_s = time.monotonic()
        for part, record in zip(parts, self.parts, strict=True):
            left_s = limit_s - (time.monotonic() - begun_s) if limit_s else part.limit_s
            self._run(part, record, min(part.limit_s, left_s))

    def _run(self, part: BenchPart, record: PartRecord, limit_s: float) -> None:
        record.begun, begun_s = now(), time.monotonic()
        self.say(f"== {part.name}: {part.title}")
        if reason := part.skipped or _too_short(part, limit_s):
            record.outcome, record.reason = PartOutcome.SKIPPED, reason
        else:
            record.outcome = PartOutcome.RUNNING
            self.write()

            def say(line: str) -> None:
                self.say(line)
                record.printed.extend(line.splitlines())
                record.seconds = time.monotonic() - begun_s
                self.write()

            try:
                record.figures = part.measure(say, limit_s)
                record.outcome = PartOutcome.PASSED
            except Exception as e:  # of any kind: the next part may work
                record.outcome, record.reason = PartOutcome.FAILED, " ".join(str(e).split()) or type(e).__name__
            record.seconds = time.monotonic() - begun_s
        self.say(f"{record.said} ({record.seconds:.1f} s)")
        self.write()

    def write(self) -> None:
        write_whole(self.file, "\n".join(self.text()).encode(), field="--out")

    def text(self) -> Iterator[str]:
        for name, value in self.facts.items():
            yield f"{name}: {value}"
        yield ""
        width = max(map(len, (part.name for part in self.parts)), default=0)
        for part in self.parts:
            yield f"{part.name:{width}}  {part.seconds:6.1f} s  {part.said}"
        for part in self.parts:
            if part.outcome is not PartOutcome.PENDING:
                yield ""
                yield from part.text()
        yield f"\n{FIGURES}"
        yield json.dumps({"facts": dict(self.facts), "parts": [asdict(part) for part in self.parts]}) + "\n"


def _too_short(part: BenchPart, left_s: float) -> str:
    """Why a part is not begun with so little time; "" if it is."""
    if left_s >= LEAST_SHARE * part.limit_s:
        return ""
    return f"{max(0.0, left_s):.0f} s were left, and it may need {part.limit_s:.0f}; give --only {part.name}"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
