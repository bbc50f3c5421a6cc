"""`Comparison`: several runs side by side, live or stored, each compared with one of them, the baseline.

Each run is compared under the Spec that was applied last. The rules for figures and ratios are in `fsdp_lab.runs.summary`,
that for whether two runs computed the same in `fsdp_lab.runs.parity`."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from string import ascii_uppercase
from typing import Any, Self

from fsdp_lab.base.errors import ArgumentError, is_whole
from fsdp_lab.base.events import Role
from fsdp_lab.base.formatting import MIB, Spread, Table, count, duration, flop_rate, size
from fsdp_lab.runs.parity import Parity, Verdict, parity
from fsdp_lab.runs.pictures import Picture, dots
from fsdp_lab.runs.steps import last_stretch
from fsdp_lab.runs.summary import RULE, Figures, Pairing, Ratio, Timed, counting, figures, ratio
from fsdp_lab.runs.view import RunView
from fsdp_lab.spec.describe import DEFAULT_FIELDS, UNKNOWN, Trained, describe_fields, differing_fields, flat_fields
from fsdp_lab.spec.spec import Spec

REFUSED = "refused"
NONE = "–"

_OF_MEDIANS = "Ratios of runs trained one after the other: of their medians (80% interval)"
PAIRINGS = {
    Pairing.ROUNDS: "Ratios of runs trained in turns: the median over rounds (p10 to p90 of rounds).",
    Pairing.MEDIANS: f"{_OF_MEDIANS}; drift of the machine is part of them.",
}
SPREADS = ("step_time_s", "tokens_per_s", "tflops_per_rank", "mfu", "hfu", "exposed_comm_s", "comm_s")


@dataclass(frozen=True)
class Refusal:
    """A Spec that was requested and not started. `spec` is a dict where the fields do not make a valid Spec."""

    spec: Spec | Mapping[str, Any]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run, or one refusal. `name`: its own, if it has one, and its Spec, by the fields in which the runs differ."""

    label: str
    name: str
    run: str  # its id; empty for a refusal
    spec: Trained | None  # None: not a valid one
    flat: Mapping[str, Any] = field(repr=False)  # the Spec's fields by their flat names
    state: str
    reason: str
    started_unix_s: float | None = None
    figures: Figures = field(default_factory=Figures)
    notes: tuple[str, ...] = ()  # how far to trust its times
    step_times: Timed = field(default=(), repr=False)  # of the steps that count
    throughputs: Timed = field(default=(), repr=False)
    parity: Parity | None = None  # None: the baseline, a refusal, or no baseline
    time_ratio: Ratio | None = None  # to the baseline, as are the next two
    throughput_ratio: Ratio | None = None
    memory_ratio: float | None = None
    view: RunView | None = field(default=None, repr=False, compare=False)  # the run itself

    @property
    def refused(self) -> bool:
        """Tells whether it was never started."""
        return not self.run and self.state == REFUSED

    @property
    def differs(self) -> bool:
        return self.parity is not None and self.parity.verdict is Verdict.DIFFERENT


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Runs side by side, as they were when it was made. In a notebook it shows its table.

    Attributes:
        rows: in the order given. baseline: the label of the run that the others are compared with; None: there is none.
        differing: flat names of the Spec's fields in which rows differ."""

    rows: tuple[Row, ...]
    baseline: str | None
    differing: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, runs: Sequence[RunView | Refusal], *, baseline: str | int | None = 0, names: Sequence[str] | None = None
    ) -> Self:
        """Compares runs, live or stored, and lists what was refused.

        Args:
            baseline: an index among the runs (where that one was refused, the next that was not), a label, or a run's id;
                None: no ratios, no parity.
            names: labels of the rows; None: A, B, C, ...

        Raises ArgumentError: there is no such baseline, or the names are not one for each run."""
        labels = [letters(i) for i in range(len(runs))] if names is None else list(names)
        if isinstance(names, str) or len(labels) != len(runs) or len(set(labels)) != len(runs) or not all(labels):
            reason = f"{names!r} does not distinguish {len(runs)} runs"
            raise ArgumentError("names", reason, "give one name for each run, all different, or none at all")
        at = _baseline_index(runs, labels, baseline)
        flats = [flat_fields(r.spec) for r in runs]
        differing = differing_fields(flats)
        rows = [_row(r, label, flat, differing) for r, label, flat in zip(runs, labels, flats, strict=True)]
        base = runs[at] if at is not None else None
        if at is None or base is None or isinstance(base, Refusal):
            return cls(rows=tuple(rows), baseline=None, differing=differing)
        compared = (_compared(row, rows[at], r, base) for row, r in zip(rows, runs, strict=True))
        return cls(rows=tuple(compared), baseline=labels[at], differing=differing)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, label: str) -> Row:
        """Raises KeyError, with the labels that there are."""
        for row in self.rows:
            if row.label == label:
                return row
        raise KeyError(f"there is no row {label!r}; there are {', '.join(row.label for row in self.rows)}")

    def table(self, only: Collection[str] = (), *, spread: bool = True) -> Table:
        """A row for each run that was started, and a column for each figure that some run has.

        Figures are medians, with p10 to p90 in brackets; FLOPS, MFU, exposed and all communication are means over ranks,
        link is what rank 0 sends in a step, peak is that of the rank with the highest.

        Args:
            only: the figures to show; empty: all. "parity", "time ratio" and "peak ratio" are to the baseline.
            spread: whether step times have p10 to p90."""
        rows = [self.cells(r, ("step time",) if spread else ()) for r in self.rows if not r.refused]
        known = [name for name in (rows[0] if rows else ()) if {row[name] for row in rows} - {NONE, ""}]
        shown = [name for name in known if not only or name in ("", "what", "state", *only)]
        base = self.baseline
        titles = {"parity": f"parity with {base}", "time ratio": f"time / {base}", "peak ratio": f"peak / {base}"}
        return Table(
            columns=tuple(titles.get(name, name) for name in shown),
            rows=tuple(tuple(row[name] for name in shown) for row in rows),
            left=frozenset(("", "what", "state", titles["parity"])),
            notes=self.notes(),
        )

    def plot(self, chosen: str | None = None) -> Picture:
        """A picture of step time against peak memory: a dot for each run, by its letter, with p10 to p90 of its time.
        `chosen`: the label of a run that gets a ring. Raises ArgumentError: no run has measured both."""
        found = [(r, r.figures.step_time_s, r.figures.peak_memory_bytes) for r in self.rows]
        ms = [(r, Spread(median=1e3 * t.median, p10=1e3 * t.p10, p90=1e3 * t.p90, n=t.n), m) for r, t, m in found if t]
        points = [(r.label, r.name, peak / MIB, time) for r, time, peak in ms if peak]
        return dots(points, chosen, "peak memory of the fullest rank, MiB", "step time, ms: median, p10 to p90")

    def cells(self, row: Row, spread: Collection[str]) -> dict[str, str]:
        """A row as text, by column; a dash for what was not measured. `spread`: the columns with p10 to p90 in brackets."""
        texts = figure_cells(row.figures, spread)
        return {
            "": row.label,
            "what": row.name,
            "state": row.state,
            "parity": self.badge(row),
            "step time": texts.pop("step time"),
            "time ratio": ratio_words(row.time_ratio),
            "peak/rank": texts.pop("peak/rank"),
            "peak ratio": NONE if row.memory_ratio is None else f"{row.memory_ratio:.2f}",
            **texts,
        }

    def memory_table(self) -> Table:
        """The memory of the fullest rank at its peak, by class, and what is outside of the allocator."""
        measured = [r for r in self.rows if r.figures.peak_memory_bytes]
        columns: dict[str, list[str]] = {"": [r.label for r in measured], "what": [r.name for r in measured]}
        columns |= {role.value: [size(r.figures.at_peak.of_role(role)) for r in measured] for role in Role}
        for name in ("peak_memory", "outside", "host", "limit"):
            columns[name.partition("_")[0]] = [size(getattr(r.figures, f"{name}_bytes")) for r in measured]
        outside = "outside: not the allocator's (contexts, libraries, other processes); host: what offload moved there"
        rows, caption = tuple(zip(*columns.values(), strict=True)), "memory of the fullest rank at its peak"
        return Table(columns=tuple(columns), rows=rows, left=frozenset(("", "what")), notes=(outside,), caption=caption)

    def badge(self, row: Row) -> str:
        """The row's parity in a few words."""
        if row.parity is None:
            return "baseline" if row.label == self.baseline else ""
        if row.parity.verdict is Verdict.DIFFERENT:
            return f"✗ DIFFERENT from step {row.parity.first_step}"
        return str(row.parity.verdict)

    def notes(self) -> tuple[str, ...]:
        """Sentences on why runs ended or were refused, where results differ, the rules, and how far to trust the times."""
        begun = [(r.label, r.figures.first_step) for r in self.rows if r.figures.first_step]
        since = labels_by((label, f"figures of step {step} on, under the Spec applied last") for label, step in begun)
        compared = [(r.label, r.parity) for r in self.rows if r.parity]
        unequal = labels_by((label, p.sentence) for label, p in compared if p.verdict is not Verdict.EQUAL)
        told = (f"{labels}: {sentence}" for sentence, labels in (since | unequal).items())
        return (*self.reasons(), *told, RULE, *self._pairings(), *self.fidelity())

    def reasons(self) -> tuple[str, ...]:
        """Says why combinations were refused, and why runs are in their state."""
        reasons = labels_by((r.label, f"{r.state}: {r.reason}") for r in self.rows if r.reason and not r.refused)
        return (*self.refusals(), *(f"{labels} {reason}" for reason, labels in reasons.items()))

    def refusals(self) -> tuple[str, ...]:
        """The refused combinations in one line, grouped by reason; empty where there are none."""
        refused = labels_by((f"{r.label} {r.name}", r.reason) for r in self.rows if r.refused)
        groups = "; ".join(f"{combinations} ({reason})" for reason, combinations in refused.items())
        return (f"Refused, so not in the table: {groups}.",) if refused else ()

    def fidelity(self, *, common: bool = True) -> tuple[str, ...]:
        """Remarks on how far to trust the times: each note once, with the labels of its runs, where these are not all.
        Without `common` only notes that are not on all runs."""
        trained = [r for r in self.rows if r.figures.steps]
        labels = {note: [r.label for r in trained if note in r.notes] for r in trained for note in r.notes}
        partial = {note: f" ({', '.join(of)})" if len(of) < len(trained) else "" for note, of in labels.items()}
        return tuple(note + suffix for note, suffix in partial.items() if suffix or common)

    def _pairings(self) -> list[str]:
        ratios = [r.time_ratio for r in self.rows if r.time_ratio]
        used = {r.pairing for r in ratios}
        unclear = [] if all(r.clear for r in ratios) else [f"≈: not told apart in time from {self.baseline}."]
        return [*(sentence for pairing, sentence in PAIRINGS.items() if pairing in used), *unclear]

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self._alarm(), repr(self.table())]))

    def _repr_html_(self) -> str:
        alarm = self._alarm()
        loud = "font-weight:bold;border-left:4px solid #c62828;padding:2px 8px"
        head = f'<p role="alert" style="{loud}">{escape(alarm)}</p>' if alarm else ""
        memory = self.memory_table()
        return head + self.table()._repr_html_() + (memory._repr_html_() if len(memory) else "")

    @property
    def differences(self) -> dict[str, str]:
        """Label -> how the run differs from the baseline, for those that are not the same computation."""
        return {r.label: r.parity.sentence for r in self.rows if r.differs and r.parity}

    def _alarm(self) -> str:
        different = [f"{label} is {sentence}" for label, sentence in self.differences.items()]
        return f"NOT THE SAME COMPUTATION: {'; '.join(different)}" if different else ""

    def records(self) -> list[dict[str, Any]]:
        """A flat dict of scalars for each row, for `pandas.DataFrame(records)`; None is what was not measured."""
        return [
            {
                **{name: getattr(r, name) for name in ("label", "run", "name", "state", "reason", "started_unix_s")},
                "spec_id": r.spec.id if r.spec else None,
                **{name: _scalar(value) for name, value in r.flat.items()},
                **_measured(r.figures),
                "baseline": self.baseline,
                **_quantiles("step_time_ratio", r.time_ratio, "n"),
                **_quantiles("tokens_per_s_ratio", r.throughput_ratio, "n"),
                "ratio_pairing": str(r.time_ratio.pairing) if r.time_ratio else None,
                "peak_memory_ratio": r.memory_ratio,
                "parity": str(r.parity.verdict) if r.parity else None,
                **{f"parity_{q}": getattr(r.parity, q, None) for q in ("first_step", "steps", "checksums", "sentence")},
            }
            for r in self.rows
        ]


# -- rows --------------------------------------------------------------------------------------------------------------


def _row(run: RunView | Refusal, label: str, flat: Mapping[str, Any], differing: Sequence[str]) -> Row:
    name = describe_fields(flat, differing or DEFAULT_FIELDS)
    if isinstance(run, Refusal):
        spec = run.spec if isinstance(run.spec, Spec) else None
        return Row(label=label, name=name, run="", spec=spec, flat=flat, state=REFUSED, reason=run.reason)
    name = f"{run.name}: {name}" if run.name else name
    steps = last_stretch(run.events.steps(), run.spec)
    counted, measured = counting(steps), figures(steps)
    return Row(
        label=label,
        name=name,
        run=run.id,
        spec=run.spec,
        flat=flat,
        state=run.state.value,
        reason=run.reason,
        started_unix_s=run.started_unix_s,
        figures=measured,
        notes=tuple(dict.fromkeys([*run.notes, *measured.notes])),
        view=run,
        step_times=tuple((s.events[0].end_unix_s, s.step_time_s) for s in counted),
        throughputs=tuple((s.events[0].end_unix_s, s.tokens_per_s) for s in counted),
    )


def _compared(row: Row, base_row: Row, run: RunView | Refusal, base: RunView) -> Row:
    if isinstance(run, Refusal):
        return row
    verdict = parity(base, run)
    if row is base_row:  # compared with itself, to find replicas that diverged
        return replace(row, parity=verdict) if verdict.verdict is Verdict.DIFFERENT else row
    times, rates = ratio(row.step_times, base_row.step_times), ratio(row.throughputs, base_row.throughputs)
    memory = peak_ratio(row, base_row)
    return replace(row, parity=verdict, time_ratio=times, throughput_ratio=rates, memory_ratio=memory)


def peak_ratio(of: Row, to: Row) -> float | None:
    """Ratio of peak memory; None where one was not measured."""
    one, other = of.figures.peak_memory_bytes, to.figures.peak_memory_bytes
    return one / other if one and other else None


def letters(index: int) -> str:
    """A to Z, then AA, AB, ..."""
    prefix, last = divmod(index, len(ascii_uppercase))
    return (letters(prefix - 1) if prefix else "") + ascii_uppercase[last]


def _baseline_index(runs: Sequence[RunView | Refusal], labels: Sequence[str], baseline: str | int | None) -> int | None:
    """Index of the baseline among the runs; None: there is none."""
    if baseline is None or (not runs and baseline == 0):
        return None
    hint = f"name one of {', '.join(labels)}, a run's id, or an index from 0 on" if labels else "give it some runs"
    if isinstance(baseline, str):
        names = [*labels, *(None if isinstance(r, Refusal) else r.id for r in runs)]
        if baseline not in names:
            raise ArgumentError("baseline", f"there is no run {baseline!r}", hint)
        at = names.index(baseline) % len(runs)
        if isinstance(runs[at], Refusal):
            raise ArgumentError("baseline", f"{baseline} was refused before it began", hint)
        return at
    if not is_whole(baseline, 0) or baseline >= len(runs):
        raise ArgumentError("baseline", f"there is no run with index {baseline!r} of {len(runs)}", hint)
    order = [*range(baseline, len(runs)), *range(baseline)]
    return next((i for i in order if not isinstance(runs[i], Refusal)), None)


# -- cells and scalars -----------------------------------------------------------------------------------------------


def figure_cells(f: Figures, spread: Collection[str] = ()) -> dict[str, str]:
    """The figures of a run as text, by column; a dash for what was not measured. `spread`: the columns with p10 to p90."""
    measured: dict[str, tuple[Spread | None, Callable[[float], str]]] = {
        "step time": (f.step_time_s, duration),
        "tokens/s": (f.tokens_per_s, count),
        "FLOPS": (f.tflops_per_rank, lambda tflops: flop_rate(1e12 * tflops)),
        "MFU": (f.mfu, "{:.1%}".format),
        "exposed": (f.exposed_comm_s, duration),
        "comm": (f.comm_s, duration),
        "link": (f.link_bytes, size),
    }
    return {
        **{name: _spread_text(*of, whole=name in spread) for name, of in measured.items()},
        "peak/rank": size(f.peak_memory_bytes),
        "loss": NONE if f.last_loss is None else f"{f.last_loss:.4f}",
    }


def _spread_text(spread: Spread | None, text: Callable[[float], str], *, whole: bool) -> str:
    """The median, and if `whole` p10 and p90, whose unit is written once where it is the same: 98.0 ms (91.0 to 105 ms)."""
    if spread is None or not whole:
        return NONE if spread is None else text(spread.median)
    low, high = text(spread.p10), text(spread.p90)
    (number, _, unit), high_unit = low.partition(" "), high.partition(" ")[2]
    return f"{text(spread.median)} ({number if unit == high_unit else low} to {high})"


def split_spread(text: str) -> tuple[str, str]:
    """A cell's median, and its spread without the brackets, or "" where it has none."""
    middle, opened, spread = text.partition(" (")
    return (middle, spread[:-1]) if opened and spread.endswith(")") and " to " in spread else (text, "")


def ratio_words(ratio: Ratio | None, sign: str = "") -> str:
    """A ratio with its interval: 1.12 (1.08 to 1.15), or ≈ 1.02 (0.97 to 1.08) where the two are not told apart."""
    if ratio is None:
        return NONE
    interval = f" ({ratio.p10:.2f} to {ratio.p90:.2f})" if ratio.p10 and ratio.p90 else ""
    return f"{'' if ratio.clear else '≈ '}{sign}{ratio.median:.2f}{interval}"


def labels_by(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """(label, sentence) pairs by sentence, each with its labels: "A, B"."""
    labels: dict[str, list[str]] = {}
    for label, sentence in pairs:
        labels.setdefault(sentence, []).append(label)
    return {sentence: ", ".join(of) for sentence, of in labels.items()}


def _scalar(value: Any) -> Any:
    """A field's value, None where it is unknown; as JSON where it is no scalar."""
    if value == UNKNOWN:
        return None
    return value if isinstance(value, str | int | float | None) else json.dumps(value, sort_keys=True, default=str)


def _measured(f: Figures) -> dict[str, Any]:
    at_peak = {f"{role.value}_bytes_at_peak": f.at_peak.of_role(role) if f.peak_memory_bytes else None for role in Role}
    return {
        "steps": f.steps,
        "counted_steps": f.counted,
        **{name: getattr(f, name) for name in ("first_step", "last_step", "last_loss")},
        **{column: value for name in SPREADS for column, value in _quantiles(name, getattr(f, name)).items()},
        "link_bytes_per_step": f.link_bytes.median if f.link_bytes else None,
        "peak_memory_bytes": f.peak_memory_bytes,
        **at_peak,
        "outside_bytes": f.outside_bytes if f.steps else None,
        "host_bytes": f.host_bytes if f.steps else None,
        "limit_bytes": f.limit_bytes,
        "peak_flops_source": f.peak_flops_source,
        "fidelity": " ".join(f.notes),
    }


def _quantiles(name: str, of: Spread | Ratio | None, *more: str) -> dict[str, Any]:
    """The median under the figure's own name, because it is what one plots first; p10, p90 and `more` beside it."""
    return {name: getattr(of, "median", None), **{f"{name}_{q}": getattr(of, q, None) for q in ("p10", "p90", *more)}}


def finite(value: Any) -> Any:
    """The value with None in place of NaN and the infinities, which JSON cannot express."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
