"""Numbers and tables as text, for a terminal and for a notebook; and `Spread`, a median with its percentiles."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Self

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text. The columns in `left` are aligned to the left, the others, which hold numbers, to the right."""

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
            """A spread in parentheses is on a line below its number, which saves width. What is not told apart is grey."""
            middle, open_, spread = text.partition(" (")
            if name in self.left:
                return escape(text)
            shown = escape(middle) + (f"<br><small>({escape(spread)}</small>" if open_ else "")
            return f'<span style="opacity:.55">{shown}</span>' if text.startswith("≈") else shown

        sides = [side(name) for name in self.columns]
        head = "".join(f"<th {s}>{escape(c)}</th>" for s, c in zip(sides, self.columns, strict=True))
        filled = ([cell(name, text) for name, text in zip(self.columns, row, strict=True)] for row in self.rows)
        rows = ("".join(f"<td {s}>{c}</td>" for s, c in zip(sides, row, strict=True)) for row in filled)
        body = "".join(f"<tr>{cells}</tr>" for cells in rows)
        caption = f'<caption style="text-align:left">{escape(self.caption)}</caption>' if self.caption else ""
        notes = "".join(f"<p><small>{escape(n)}</small></p>" for n in self.notes)
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def figures(value: float, digits: int = 3) -> str:
    """`digits` significant figures, thousands separated, never an exponent: 0.0123, 4.56, 78.9, 12,300."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def size(number_bytes: float | None) -> str:
    """Bytes in binary units: 512 B, 3.40 MiB, 1.25 GiB."""
    if number_bytes is None:
        return "–"
    for unit, one in (("GiB", GIB), ("MiB", MIB), ("KiB", 1 << 10)):
        if abs(number_bytes) >= one:
            return f"{figures(number_bytes / one)} {unit}"
    return f"{number_bytes:.0f} B"


def traffic(number_bytes: float) -> str:
    """Bytes on a link, in powers of ten: 3.40 kB, 1.25 MB, 12.0 GB."""
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if number_bytes >= one:
            return f"{figures(number_bytes / one)} {unit}"
    return f"{figures(number_bytes / 1e3)} kB"


def duration(seconds: float) -> str:
    """3.20 ms, 1.25 s, 5.40 h, 12.5 days; a dash if not measured."""
    if not math.isfinite(seconds):
        return "–"
    one, unit = _time_unit(seconds)
    return f"{figures(seconds / one)} {unit}"


def duration_range(low_s: float, high_s: float) -> str:
    """In one unit: 591 to 792 ms."""
    one, unit = _time_unit(high_s)
    return f"{figures(low_s / one)} to {figures(high_s / one)} {unit}"


def _time_unit(seconds: float) -> tuple[float, str]:
    units = ((86_400.0, "days"), (3_600.0, "h"), (1.0, "s"))
    return next(((one, unit) for one, unit in units if seconds >= one), (1e-3, "ms"))


def flop_rate(flops_per_s: float) -> str:
    """FLOPS with the unit: 7.69 GFLOPS, 0.450 TFLOPS, 312 TFLOPS; a dash if not measured."""
    if not math.isfinite(flops_per_s):
        return "–"
    scaled, unit = (flops_per_s / 1e12, "TFLOPS") if flops_per_s >= 1e11 else (flops_per_s / 1e9, "GFLOPS")
    return f"{figures(scaled)} {unit}"


def count(number: float) -> str:
    """A number or a rate without its unit: 950, 12,300, 1.23 M; a dash if not measured."""
    if math.isnan(number):
        return "–"
    return f"{figures(number / 1e6)} M" if number >= 1e6 else f"{number:,.0f}"


def known_or_dash(value: float, form: str) -> str:
    """The value as `format` writes it; a dash if not measured."""
    return "–" if math.isnan(value) else format(value, form)


def plural(number: int, noun: str) -> str:
    """A number of things: 1 rank, 4,096 ranks."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def known(values: Iterable[float]) -> list[float]:
    """The finite values; infinities and NaN mark values that were not measured."""
    return [v for v in values if math.isfinite(v)]


def median_known(values: Iterable[float]) -> float:
    """The median of the finite values; NaN if there are none. (A median among NaN depends on their places.)"""
    middle = quantile(known(values), 0.5)
    return math.nan if middle is None else middle


def quantile(values: Sequence[float], q: float) -> float | None:
    """With linear interpolation between neighbours; None if there are no values."""
    if not values:
        return None
    ordered, place = sorted(values), q * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of `n` values, with the 10th and the 90th percentile."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """The spread of the finite values; None if there are none."""
        finite = known(values)
        m, low, high = quantile(finite, 0.5), quantile(finite, 0.1), quantile(finite, 0.9)
        return None if m is None or low is None or high is None else cls(median=m, p10=low, p90=high, n=len(finite))
