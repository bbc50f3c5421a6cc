"""`recommend`: which of the measured runs to use, and what each toggle saved or cost, in sentences.

The rule. Candidates do the same work as the baseline on the same link (model, data, sequence length), they are not
*different* from it (`runs.parity`), and the peak of their fullest rank has been measured and fits. Speed is throughput over
all ranks, so that runs of other batches and world sizes compare. *Fastest*: of the run with the most tokens per second and
those whose time per token is not told apart from its (`runs.summary.ratio`), the one with the lowest peak. *Smallest*: the
lowest peak of these and of those within `WITHIN` of that time. A *toggle* is a field of the Spec with two of its values; it
is judged from every pair of runs that differ in this field alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import Any

from fsdp_lab.base.errors import check_whole
from fsdp_lab.base.formatting import count, plural, size
from fsdp_lab.runs.comparison import REFUSED, Comparison, Refusal, Row, labels_by, peak_ratio
from fsdp_lab.runs.summary import Ratio, median, ratio
from fsdp_lab.runs.view import RunView
from fsdp_lab.spec.describe import describe_field
from fsdp_lab.spec.fields import rows_of
from fsdp_lab.spec.spec import FIELDS, Spec, Strategy
from fsdp_lab.spec.workload import CODE_FIELDS, Workload

WITHIN = 0.10
SAME_WORK = tuple(name for name, row in FIELDS.items() if row.samples or name in (*CODE_FIELDS, "lora", "link"))
_OF_WORKLOAD = tuple(name for name, row in rows_of(Workload).items() if row.same_work)
_CHOSEN = (*rows_of(Strategy), *_OF_WORKLOAD, *rows_of(Spec))
TOGGLES = tuple(name for name in _CHOSEN if name not in ("engine", "devices"))
FITS = "What fits is judged by the allocator's peak; a device's context, libraries and fragmentation take some more."
SAME_MEMORY = 0.01  # peaks that differ by less count as equal


@dataclass(frozen=True, kw_only=True)
class Toggle:
    """What a field's value saved or cost compared with another, as a sentence. `pairs`: labels of runs that differ in it
    alone, the one with `taken` first."""

    field: str
    taken: Any
    instead: Any
    pairs: tuple[tuple[str, str], ...]
    sentence: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Recommendation:
    """A recommendation, with the labels of the comparison's rows.

    Attributes:
        fastest, smallest: labels; None where no run can be recommended. fastest_run, smallest_run: the runs themselves.
        sentences: the recommendation. toggles: what each toggle saved or cost.
        excluded: label -> why it is not recommended. notes: how far to trust the figures."""

    fastest: str | None
    smallest: str | None
    fastest_run: RunView | None
    smallest_run: RunView | None
    limit_bytes: int | None
    sentences: tuple[str, ...]
    toggles: tuple[Toggle, ...]
    excluded: Mapping[str, str]
    notes: tuple[str, ...]

    def lines(self) -> tuple[str, ...]:
        """Recommendation, toggles and exclusions, a sentence each, without the notes."""
        others = labels_by(item for item in self.excluded.items() if item[1] != REFUSED)  # the comparison says why
        left_out = (f"Not recommended, {labels}: {why}." for why, labels in others.items())
        return (*self.sentences, *(t.sentence for t in self.toggles), *left_out)

    def __repr__(self) -> str:
        return "\n".join([*self.lines(), *(f"note: {n}" for n in self.notes)])

    def _repr_html_(self) -> str:
        chosen = "".join(f"<p><b>{escape(s)}</b></p>" for s in self.sentences)
        notes = "".join(f"<p><small>{escape(n)}</small></p>" for n in self.notes)
        items = "".join(f"<li>{escape(line)}</li>" for line in self.lines()[len(self.sentences) :])
        return chosen + (f"<ul>{items}</ul>" if items else "") + notes


def recommend(runs: Comparison | Sequence[RunView | Refusal], limit_bytes: int | None = None) -> Recommendation:
    """Recommends by the rule in the module's docstring. `limit_bytes`: device memory per rank; None: that of the runs'
    devices. Raises ArgumentError: a limit that is not a number of bytes."""
    if limit_bytes is not None:
        check_whole("limit_bytes", limit_bytes, wanted="a whole number of bytes, or nothing")
    compared = runs if isinstance(runs, Comparison) else Comparison.of(runs)
    excluded = {row.label: why for row in compared.rows if (why := _excluded(compared, row, limit_bytes))}
    fit = [row for row in compared.rows if row.label not in excluded]
    quickest = max(fit, key=_speed, default=None)
    slowdowns = [(row, ratio(quickest.throughputs, row.throughputs)) for row in fit if quickest]
    alike = [row for row, r in slowdowns if row is quickest or not (r and r.clear)]
    near = [row for row, r in slowdowns if row in alike or (r and r.median <= 1 + WITHIN)]
    fastest, smallest = _smallest(alike), _smallest(near)
    sound = [row for row in compared.rows if row.figures.steps and not row.differs]
    return Recommendation(
        fastest=fastest.label if fastest else None,
        smallest=smallest.label if smallest else None,
        fastest_run=fastest.view if fastest else None,
        smallest_run=smallest.view if smallest else None,
        limit_bytes=limit_bytes,
        sentences=_sentences(fastest, smallest, [row.label for row in alike], limit_bytes),
        toggles=toggles(sound),
        excluded=excluded,
        notes=(FITS, *compared.fidelity()),
    )


def _excluded(compared: Comparison, row: Row, limit_bytes: int | None) -> str:
    """Says why it is not a candidate; empty where it is one."""
    if row.refused:
        return REFUSED
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
    return f"it needs {size(need)} of {size(limit)} a rank" if limit is not None and need > limit else ""


def _speed(row: Row) -> float:
    rate = row.figures.tokens_per_s
    return rate.median if rate else 0.0


def _smallest(rows: Sequence[Row]) -> Row | None:
    """The fastest of those with the lowest peak."""
    least = min((row.figures.peak_memory_bytes or 0 for row in rows), default=0) * (1 + SAME_MEMORY)
    return max((row for row in rows if (row.figures.peak_memory_bytes or 0) <= least), key=_speed, default=None)


def _sentences(fastest: Row | None, smallest: Row | None, alike: Sequence[str], limit: int | None) -> tuple[str, ...]:
    """The recommendation. `alike`: those that are not told apart in time, with the fastest. `limit`: in bytes."""
    if fastest is None or smallest is None:
        return ("None of these runs can be recommended.",)

    def described(row: Row) -> str:
        peak, speed = size(row.figures.peak_memory_bytes), f"{count(_speed(row))} tokens/s, " if _speed(row) else ""
        return f"{row.label} ({row.name}): {speed}peak {peak} a rank"

    room = f"fits in {size(limit)} a rank" if limit else "fits"
    several = f"{' or '.join(alike)}, not told apart in time. The smallest of them is " if len(alike) > 1 else ""
    first = f"The fastest that {room} is {several}{described(fastest)}."
    if smallest is fastest:
        return (first, f"It is also the smallest within {WITHIN:.0%} of that time.")
    return (first, f"The smallest within {WITHIN:.0%} of its time is {described(smallest)}.")


def toggles(rows: Sequence[Row]) -> tuple[Toggle, ...]:
    """Judges every pair of runs that differ in one field alone, in order of fields."""
    by_values: dict[tuple[str, str, str], list[tuple[Row, Row]]] = {}
    for a, b in combinations(rows, 2):
        fields = [name for name in a.flat if a.flat[name] != b.flat[name]]
        if len(fields) == 1 and fields[0] in TOGGLES:
            # One order for all pairs of the two values, whichever came first.
            first, second = sorted((a, b), key=lambda row: str(row.flat[fields[0]]))
            key = (fields[0], str(first.flat[fields[0]]), str(second.flat[fields[0]]))
            by_values.setdefault(key, []).append((first, second))
    by_field = sorted(by_values.items(), key=lambda item: TOGGLES.index(item[0][0]))
    return tuple(_toggle(name, pairs) for (name, _, _), pairs in by_field)


def _toggle(name: str, rows: Sequence[tuple[Row, Row]]) -> Toggle:
    """The order of the two values is such that the one taken saves memory, else time."""
    memory, time = _medians(rows)
    if (memory if memory and abs(memory - 1) >= SAME_MEMORY else time or 1) > 1:
        rows = [(b, a) for a, b in rows]
        memory, time = _medians(rows)
    clear = [(r.median, f"{a.label} and {b.label}") for a, b in rows if (r := _time_ratio(a, b)) and r.clear]
    noise = 2 * len(clear) <= len(rows) or len({t > 1 for t, _ in clear}) > 1  # most show none, or not in one direction
    times = [_change(t, f"time in {labels}", 0.0) for t, labels in clear] if noise else [_change(time, "time", 0.0)]
    if noise and (others := len(rows) - len(clear)):  # a median would hide those that are clear
        times.append(_change(time, "time" + (f" in {plural(others, 'pair')}" if clear else ""), math.inf))
    effects = ", ".join([_change(memory, "memory", SAME_MEMORY), *times])
    taken, instead = rows[0][0].flat[name], rows[0][1].flat[name]
    pairs = tuple((a.label, b.label) for a, b in rows)
    source = " and ".join(pairs[0]) if len(pairs) == 1 else f"median of {len(pairs)} pairs"
    sentence = f"{describe_field(name, taken)} instead of {describe_field(name, instead)}: {effects} ({source})."
    return Toggle(field=name, taken=taken, instead=instead, pairs=pairs, sentence=sentence)


def _time_ratio(taken: Row, instead: Row) -> Ratio | None:
    """Of time per token, which is inverse throughput."""
    return ratio(instead.throughputs, taken.throughputs)


def _medians(rows: Sequence[tuple[Row, Row]]) -> tuple[float | None, float | None]:
    """The medians of the ratios of memory and of time; None: not measured."""
    times = [r.median for a, b in rows if (r := _time_ratio(a, b))]
    return median([m for a, b in rows if (m := peak_ratio(a, b))]), median(times)


def _change(ratio: float | None, of: str, same: float) -> str:
    """A ratio as text: 55% less memory. `same`: the distance from 1 up to which it counts as none."""
    if ratio is None:
        return f"{of} not measured"
    if abs(ratio - 1) <= same:
        return f"{of} the same but for noise" if same == math.inf else f"the same {of}"
    return f"{abs(ratio - 1):.0%} {'less' if ratio < 1 else 'more'} {of}"
