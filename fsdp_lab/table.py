"""`Table`: a few rows to look at, as text in a terminal and as HTML in a notebook. No pandas, no colours of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as they are shown. Columns named in `left` are words, the others are figures and stand to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    notes: tuple[str, ...] = ()
    left: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        widths = [max(len(c), *(len(r[i]) for r in self.rows), 0) for i, c in enumerate(self.columns)]
        lines = [self._line(self.columns, widths), *(self._line(row, widths) for row in self.rows)]
        head = [self.caption] if self.caption else []
        return "\n".join([*head, *lines, *(f"note: {n}" for n in self.notes)])

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        pairs = zip(self.columns, cells, widths, strict=True)
        return "  ".join(c.ljust(w) if name in self.left else c.rjust(w) for name, c, w in pairs).rstrip()

    def _repr_html_(self) -> str:
        def side(name: str) -> str:
            if name in self.left:
                return 'style="text-align:left"'
            return 'style="text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"'

        def cell(name: str, text: str) -> str:
            """A figure's spread stands below it: tables of many columns are wide enough."""
            middle, open_, spread = text.partition(" (")
            if name in self.left or not open_:
                return escape(text)
            return f"{escape(middle)}<br><small>({escape(spread)}</small>"

        sides = [side(name) for name in self.columns]
        head = "".join(f"<th {s}>{escape(c)}</th>" for s, c in zip(sides, self.columns, strict=True))
        filled = ([cell(name, text) for name, text in zip(self.columns, row, strict=True)] for row in self.rows)
        body = "".join(
            "<tr>" + "".join(f"<td {s}>{c}</td>" for s, c in zip(sides, row, strict=True)) + "</tr>" for row in filled
        )
        caption = f'<caption style="text-align:left">{escape(self.caption)}</caption>' if self.caption else ""
        notes = "".join(f"<p><small>{escape(n)}</small></p>" for n in self.notes)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def size(number_bytes: float | None) -> str:
    """Bytes for a person: 512 B, 3.4 MiB, 1.25 GiB."""
    if number_bytes is None:
        return "–"
    value = float(number_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{1 if value >= 10 else 2}f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Seconds for a person: 3.2 ms, 1.25 s; a dash for what was not measured."""
    if not math.isfinite(seconds):
        return "–"
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms" if seconds < 1 else f"{seconds:.2f} s"


def count(number: float) -> str:
    """A rate for a person: 950, 12,300, 1.2 M."""
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number:,.0f}"
