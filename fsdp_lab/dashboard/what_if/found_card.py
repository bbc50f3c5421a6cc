"""`FoundCard`: the strategies that a search has found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_lab.core.formatting import duration, size
from fsdp_lab.dashboard.panels.base import Captions, Cell
from fsdp_lab.dashboard.what_if import words
from fsdp_lab.dashboard.what_if.card import WhatIfCard, taken_bytes
from fsdp_lab.dashboard.what_if.question import Question, base, choice
from fsdp_lab.planner.plan import Plan
from fsdp_lab.planner.search import Search, strategy_label


class FoundCard(WhatIfCard):
    """What a search has found, the fastest first; a press takes one."""

    name = "found"
    title = "Best strategies"
    wide = True

    def __init__(self, take: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(Captions(hidden=True))
        self._take = take
        self._found: tuple[Question, Search] | None = None

    def show(self, asked: Question, found: Search) -> None:
        self._found = (asked, found)
        self.mark(asked)

    def mark(self, now: Question) -> None:
        """Says which of them is chosen now, and whether they answer another question."""
        if self._found is None:
            return
        asked, found = self._found
        rows = tuple(self._row(i, now) for i in range(len(self._plans)))
        about = f"{found.fitting:,} of {found.considered:,} that were tried fit"
        if not found.top:
            about = f"none of {found.considered:,} fits; nearest is" if found.nearest else "there is nothing to choose"
        note = "" if base(now) == base(asked) else "Found for what was asked before: press Find the best again."
        heads = ("", "strategy", "step", "MFU", "memory", "why")
        self._captions = Captions(reading=about, table=(heads, *rows), note=note)

    @property
    def found(self) -> Search | None:
        return None if self._found is None else self._found[1]

    @property
    def _plans(self) -> list[Plan]:
        assert self._found is not None
        found = self._found[1]
        return [one.plan for one in found.top] or ([found.nearest] if found.nearest is not None else [])

    def _row(self, index: int, now: Question) -> tuple[str | Cell, ...]:
        assert self._found is not None
        (asked, found), p = self._found, self._plans[index]
        why = found.top[index].why if found.top else words.verdict(p)
        chosen = base(now) == base(asked) and choice(now.planned_spec) == choice(p.spec)
        use = Cell(text="In use" if chosen else "Use", title=f"Take strategy {index + 1}", press="apply", about=f"{index}",
                   pressed=chosen)  # fmt: skip
        return (
            use,
            strategy_label(asked.spec, p.spec),
            duration(p.step_time_s),
            words.percent(p.mfu),
            size(taken_bytes(p)),
            why,
        )

    def press(self, word: str, about: str) -> None:
        """From any thread."""
        if word == "apply" and self._found is not None and int(about) < len(self._plans):
            self._take(choice(self._plans[int(about)].spec))
