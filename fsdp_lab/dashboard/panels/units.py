"""Numbers as a reader wants them: three figures and a unit."""

from __future__ import annotations

import math

MIB = 1 << 20
GIB = 1 << 30


def figures(value: float, digits: int = 3) -> str:
    """`digits` significant figures, thousands separated, never an exponent: 0.0123, 4.56, 78.9, 12,300."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def memory(value_bytes: float) -> str:
    """Bytes in MiB or GiB."""
    if value_bytes >= GIB:
        return f"{figures(value_bytes / GIB)} GiB"
    return f"{figures(value_bytes / MIB)} MiB"


def traffic(value_bytes: float) -> str:
    """Bytes on a link, in powers of ten as links are sold: kB, MB, GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if value_bytes >= size:
            return f"{figures(value_bytes / size)} {unit}"
    return f"{figures(value_bytes / 1e3)} kB"


def duration(value_s: float) -> str:
    """Seconds as ms or s."""
    return f"{figures(value_s)} s" if value_s >= 1 else f"{figures(value_s * 1e3)} ms"


def rate(value_per_s: float) -> str:
    """A rate without its unit: 987, 12,300, 1.23 million."""
    return f"{figures(value_per_s / 1e6)} million" if value_per_s >= 1e6 else f"{value_per_s:,.0f}"
