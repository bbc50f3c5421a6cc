"""`recommend`: which of the measured runs to use, and what each toggle saved or cost, in sentences.

The rule. Candidates do the same work as the baseline on the same link (model, data, sequence length), they are not
*different* from it (`runs.parity`), and the peak of their fullest rank has been measured and fits. Speed is throughput over
all ranks, so that runs of other batches and world sizes compare. *Fastest*: the most tokens per second. *Smallest*: the
lowest peak among those whose time per token is within `WITHIN` of the fastest's (`runs.summary.ratio`). A *toggle* is a
field of the Spec with two of its values; it is judged from every pair of runs that differ in this field alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import Any

from fsdp_lab.core.describe import describe_field
from fsdp_lab.core.errors import check_whole
from fsdp_lab.core.formatting import count, size
from fsdp_lab.runs.comparison import Comparison, Refusal, Row, gathered
from fsdp_lab.runs.summary import Ratio, ratio
from fsdp_lab.runs.view import RunView

WITHIN = 0.10
SAME_WORK = ("model", "data", "seq_len", "link")
TOGGLES = ("backend", "sharding", "shard_size", "reshard_size", "precision", "offload", "wrap", "forward_prefetch",
           "backward_prefetch", "backward_prefetch_point", "limit_all_gathers", "recompute", "sync", "compile",
           "micro_batch", "accumulate", "world_size", "link")  # fmt: skip
FITS = "What fits is judged by the allocator's peak; a device's context, libraries and fragmentation take some more."
SAME_MEMORY = 0.01  # peaks that differ by less count as equal


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs that differ in one field: `taken` has the toggle's value, `instead` the other one."""

    taken: str  # labels
    instead: str
    memory: float | None  # ratio of peaks
    time: Ratio | None  # of time per token


@dataclass(frozen=True, kw_only=True)
class Toggle:
    """What a field's value saved or cost compared with another, as a sentence."""

    field: str
    taken: Any
    instead: Any
    pairs: tuple[Pair, ...]
    sentence: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Recommendation:
    """Labels are those of the comparison's rows.

    Attributes:
        fastest, smallest: labels; None where no run can be recommended.
        sentences: the recommendation. toggles: what each toggle saved or cost.
        excluded: label -> why it is not recommended. notes: how far to trust the figures.
    """

    fastest: str | None
    smallest: str | None
    limit_bytes: int | None
    sentences: tuple[str, ...]
    toggles: tuple[Toggle, ...]
    excluded: Mapping[str, str]
    notes: tuple[str, ...]

    def lines(self) -> tuple[str, ...]:
        """Recommendation, toggles and exclusions, a sentence each, without the notes."""
        reasons = gathered((label, why) for label, why in self.excluded.items())
        left_out = (f"Not recommended, {labels}: {why}." for why, labels in reasons.items())
        return (*self.sentences, *(t.sentence for t in self.toggles), *left_out)

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *(f"note: {n}" for n in self.notes)])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        def items(lines: Sequence[str]) -> str:
            return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""

        chosen = "".join(f"<p><b>{escape(s)}</b></p>" for s in self.sentences)
        notes = "".join(f"<p><small>{escape(n)}</small></p>" for n in self.notes)
        return chosen + items(self.lines()[len(self.sentences) :]) + notes


def recommend(runs: Comparison | Sequence[RunView | Refusal], limit_bytes: int | None = None) -> Recommendation:
    """By the rule in the module's docstring.

    Args:
        limit_bytes: device memory per rank; None: that of the devices that the runs used.

    Raises:
        ArgumentError: a limit that is not a number of bytes.
    """
    if limit_bytes is not None:
        check_whole("limit_bytes", limit_bytes, wanted="a whole number of bytes, or nothing")
    compared = runs if isinstance(runs, Comparison) else Comparison.of(runs)
    excluded = {row.label: why for row in compared.rows if (why := _excluded(compared, row, limit_bytes))}
    fit = [row for row in compared.rows if row.label not in excluded]
    fastest = max(fit, key=_speed, default=None)
    near = [row for row in fit if fastest and (row is fastest or _behind(row, fastest) <= 1 + WITHIN)]
    smallest = min(near, key=lambda row: (row.figures.peak_memory_bytes or 0, -_speed(row)), default=None)
    sound = [row for row in compared.rows if row.figures.steps and not row.differs]
    return Recommendation(
        fastest=fastest.label if fastest else None,
        smallest=smallest.label if smallest else None,
        limit_bytes=limit_bytes,
        sentences=_chosen(fastest, smallest, fit, limit_bytes),
        toggles=toggles(sound),
        excluded=excluded,
        notes=(FITS, *compared.fidelity()),
    )


# -- candidates -------------------------------------------------------------------------------------------------------


def _excluded(compared: Comparison, row: Row, limit_bytes: int | None) -> str:
    """Why it is not a candidate; empty where it is one."""
    if not row.figures.steps:
        return f"{row.state} before a step was measured" + (f" ({row.reason})" if row.reason else "")
    if row.differs and row.parity:
        return f"it does not compute the same ({row.parity.sentence})"
    base = compared[compared.baseline] if compared.baseline is not None else compared.rows[0]
    if other := [name.replace("_", " ") for name in SAME_WORK if row.flat[name] != base.flat[name]]:
        return f"its {' and '.join(other)} {'is' if len(other) == 1 else 'are'} not {base.label}'s"
    need, limit = row.figures.peak_memory_bytes, limit_bytes or row.figures.limit_bytes
    if need is None:
        return "its peak memory has not been measured (a run's third step does)"
    if limit is not None and need > limit:
        return f"it needs {size(need)} of {size(limit)} a rank"
    return ""


def _speed(row: Row) -> float:
    found = row.figures.tokens_per_s
    return found.median if found else 0.0


def _behind(row: Row, fastest: Row) -> float:
    """Time per token relative to the fastest."""
    found = ratio(fastest.throughputs, row.throughputs)
    return found.median if found else math.inf


def _chosen(fastest: Row | None, smallest: Row | None, fit: Sequence[Row], limit_bytes: int | None) -> tuple[str, ...]:
    if fastest is None or smallest is None:
        return ("None of these runs can be recommended.",)
    room = f"fits in {size(limit_bytes)} a rank" if limit_bytes else "fits"
    first = f"The fastest that {room} is {_named(fastest)}: {_costs(fastest)}."
    others = ((row, ratio(fastest.throughputs, row.throughputs)) for row in fit if row is not fastest)
    alike = ", ".join(row.label for row, found in others if found is None or not found.clear)
    first += f" Within noise as fast: {alike}." if alike else ""
    if smallest is fastest:
        return (first, f"It is also the smallest within {WITHIN:.0%} of that time.")
    return (first, f"The smallest within {WITHIN:.0%} of its time is {_named(smallest)}: {_costs(smallest)}.")


def _named(row: Row) -> str:
    return f"{row.label} ({row.name})"


def _costs(row: Row) -> str:
    return f"{count(_speed(row))} tokens/s, peak {size(row.figures.peak_memory_bytes)} a rank"


# -- toggles ------------------------------------------------------------------------------------------------------


def toggles(rows: Sequence[Row]) -> tuple[Toggle, ...]:
    """From every pair of runs that differ in one field alone, in order of fields."""
    found: dict[tuple[str, str, str], list[tuple[Row, Row]]] = {}
    for a, b in combinations(rows, 2):
        fields = [name for name in a.flat if a.flat[name] != b.flat[name]]
        if len(fields) == 1 and fields[0] in TOGGLES:
            # One order for all pairs of the two values, whichever came first.
            first, second = sorted((a, b), key=lambda row: str(row.flat[fields[0]]))
            key = (fields[0], str(first.flat[fields[0]]), str(second.flat[fields[0]]))
            found.setdefault(key, []).append((first, second))
    by_field = sorted(found.items(), key=lambda item: TOGGLES.index(item[0][0]))
    return tuple(_toggle(name, pairs) for (name, _, _), pairs in by_field)


def _toggle(name: str, rows: Sequence[tuple[Row, Row]]) -> Toggle:
    """The order of the two values is such that the one taken saves memory, else time."""
    pairs = [_pair(a, b) for a, b in rows]
    memory = _middle([p.memory for p in pairs if p.memory])
    time = _middle([p.time.median for p in pairs if p.time])
    alike = memory is None or abs(memory - 1) < SAME_MEMORY
    if (alike and (time or 1) > 1) or (not alike and (memory or 1) > 1):
        rows = [(b, a) for a, b in rows]
        pairs = [_pair(a, b) for a, b in rows]
    taken, instead = rows[0][0].flat[name], rows[0][1].flat[name]
    said = f"{describe_field(name, taken)} instead of {describe_field(name, instead)} {_bought(pairs)}"
    return Toggle(field=name, taken=taken, instead=instead, pairs=tuple(pairs), sentence=said)


def _pair(taken: Row, instead: Row) -> Pair:
    mine, its = taken.figures.peak_memory_bytes, instead.figures.peak_memory_bytes
    return Pair(
        taken=taken.label,
        instead=instead.label,
        memory=mine / its if mine and its else None,
        time=ratio(instead.throughputs, taken.throughputs),  # inverse throughput: time per token
    )


def _bought(pairs: Sequence[Pair]) -> str:
    """The rest of the sentence: what was saved, and at what cost; by the order of the values that is never memory."""
    memory, time = _memory([p.memory for p in pairs if p.memory]), _time([p.time for p in pairs if p.time])
    source = (
        f"{pairs[0].taken} and {pairs[0].instead}" if len(pairs) == 1 else f"median and range of {len(pairs)} pairs"
    )
    if memory and time.startswith("cost"):
        result = f"saved {memory} for {time.removeprefix('cost ')}"
    elif memory and time.startswith("saved"):
        result = f"saved {memory} and {time.removeprefix('saved ')}"
    elif memory:
        result = f"saved {memory}; {time}"
    else:
        measured = any(p.memory for p in pairs)
        result = f"{'bought nothing: ' if time.startswith('within') else ''}{time}, " + (
            "the same memory" if measured else "memory not measured"
        )
    return f"{result} ({source})."


def _memory(ratios: Sequence[float]) -> str:
    """How much of the peak was saved; empty where that is nothing, or unknown."""
    middle = _middle(ratios)
    return _percent(ratios, "memory") if middle is not None and abs(middle - 1) >= SAME_MEMORY else ""


def _time(ratios: Sequence[Ratio]) -> str:
    if not ratios:
        return "time not measured"
    medians = [r.median for r in ratios]
    middle = statistics.median(medians)
    if not _clear(ratios):
        return f"within noise in time ({100 * (middle - 1):+.0f}%)"
    return f"{'saved' if middle < 1 else 'cost'} {_percent(medians, 'time')}"


def _clear(ratios: Sequence[Ratio]) -> bool:
    """Whether most pairs show a difference, and all of these in the same direction."""
    clear = [r for r in ratios if r.clear]
    return 2 * len(clear) > len(ratios) and len({r.median > 1 for r in clear}) == 1


def _middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _percent(ratios: Sequence[float], of: str) -> str:
    """The distance of their median from 1, and the range of several: "55% memory (50 to 61%)"."""
    away = 1 if statistics.median(ratios) >= 1 else -1
    shares = sorted(100 * away * (r - 1) for r in ratios)
    text = f"{round(statistics.median(shares))}% {of}"  # round has no negative zero
    return text if len(shares) < 2 else f"{text} ({round(shares[0])} to {round(shares[-1])}%)"
