"""`Comparison`: several runs side by side, live or past, each held against one of them, the baseline.

What is compared is each run under the Spec that was applied last, by the rule in `fsdp_lab.runs.summary`; ratios by the
rule in `fsdp_lab.runs.summary`; whether two runs computed the same by that in `fsdp_lab.runs.parity`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from fsdp_lab.core.describe import DEFAULT_FIELDS, describe_fields, differing_fields, flat_fields
from fsdp_lab.core.errors import ArgumentError, is_whole
from fsdp_lab.core.events import Role
from fsdp_lab.core.files import check_file, write_whole
from fsdp_lab.core.formatting import Spread, Table, count, duration, size
from fsdp_lab.core.spec import Spec
from fsdp_lab.runs.parity import Parity, Verdict, parity
from fsdp_lab.runs.steps import last_stretch
from fsdp_lab.runs.summary import RULE, Figures, Pairing, Ratio, Timed, counting, figures, ratio
from fsdp_lab.runs.view import RunView

REFUSED = "refused"
NONE = "–"

SPREADS = ("step_time_s", "tokens_per_s", "tflops_per_rank", "mfu", "hfu", "exposed_comm_s", "comm_s")


@dataclass(frozen=True)
class Refusal:
    """What was asked for and not begun. `spec` is the dict of a Spec where it cannot even be one."""

    spec: Spec | Mapping[str, Any]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run, or one refusal. `name` is its Spec in few words: what not all runs have in common."""

    label: str
    name: str
    run: str  # its id; empty for a refusal
    spec: Spec | None  # None: it cannot be one
    flat: Mapping[str, Any] = field(repr=False)  # the Spec's fields by their flat names
    state: str
    reason: str
    started_unix_s: float | None = None
    figures: Figures = field(default_factory=Figures)
    notes: tuple[str, ...] = ()  # what its times are worth
    step_times: Timed = field(default=(), repr=False)  # that count
    throughputs: Timed = field(default=(), repr=False)
    parity: Parity | None = None  # None: the baseline, a refusal, or no baseline
    time_ratio: Ratio | None = None  # to the baseline, as are the next two
    throughput_ratio: Ratio | None = None
    memory_ratio: float | None = None

    @property
    def refused(self) -> bool:
        """Whether it never began."""
        return not self.run and self.state == REFUSED

    @property
    def differs(self) -> bool:
        return self.parity is not None and self.parity.verdict is Verdict.DIFFERENT


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Runs side by side, as they were when it was made. In a notebook it shows its table.

    Attributes:
        rows: in the order given. baseline: the label of the run that others are held against; None: there is none.
        differing: flat names of the Spec's fields in which rows differ.
    """

    rows: tuple[Row, ...]
    baseline: str | None
    differing: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        runs: Sequence[RunView | Refusal],
        *,
        baseline: str | int | None = 0,
        names: Sequence[str] | None = None,
    ) -> Comparison:
        """Of runs that go on, are over, or were kept, and of what was refused.

        Args:
            baseline: a place among the runs (where that one was refused, the next that was not), a label, or a run's id;
                None: no ratios, no parity.
            names: labels of the rows; None: A, B, C, ...

        Raises:
            ArgumentError: there is no such baseline, or the names are not one for each run.
        """
        labels = _labels(len(runs), names)
        at = _place(runs, labels, baseline)
        flats = [flat_fields(r.spec) for r in runs]
        differing = differing_fields(flats)
        base = runs[at] if at is not None else None
        rows = [_row(r, label, flat, differing) for r, label, flat in zip(runs, labels, flats, strict=True)]
        if at is None or isinstance(base, Refusal) or base is None:
            return cls(rows=tuple(rows), baseline=None, differing=differing)
        held = (_held(row, rows[at], r, base) for row, r in zip(rows, runs, strict=True))
        return cls(rows=tuple(held), baseline=labels[at], differing=differing)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, label: str) -> Row:
        """Raises KeyError, with the labels that there are."""
        for row in self.rows:
            if row.label == label:
                return row
        raise KeyError(f"there is no row {label!r}; there are {', '.join(row.label for row in self.rows)}")

    # -- tables ---------------------------------------------------------------------------------------------------

    def table(self, only: Collection[str] = (), *, spread: bool = True) -> Table:
        """A row for each run that began, and a column for each figure that some run has.

        Figures are medians, with p10 to p90 in brackets; TFLOPS, MFU, exposed and all communication are means over ranks,
        link is what a rank sends in a step, peak that of the fullest rank.

        Args:
            only: the figures to show; empty: all. "parity", "time ratio" and "peak ratio" are to the baseline.
            spread: whether step times have p10 to p90.
        """
        base, rows = self.baseline, [r for r in self.rows if not r.refused]
        shown = [cells(r.figures, spread=spread) for r in rows]
        columns = {head: [row[head] for row in shown] for head in cells(Figures())}
        step_time, loss = columns.pop("step time"), columns.pop("loss")
        heads = {
            "": [r.label for r in rows],
            "what": [r.name for r in rows],
            "state": [r.state for r in rows],
            f"parity with {base}": [self.badge(r) for r in rows],
            "step time": step_time,
            f"time / {base}": [ratio_words(r.time_ratio) for r in rows],
            **columns,
            f"peak / {base}": [NONE if r.memory_ratio is None else f"{r.memory_ratio:.2f}" for r in rows],
            "loss": loss,
        }
        ratios = {f"parity with {base}": "parity", f"time / {base}": "time ratio", f"peak / {base}": "peak ratio"}
        wanted = {"", "what", "state", *only} if only else {ratios.get(head, head) for head in heads}
        kept = {head: texts for head, texts in heads.items()
                if ratios.get(head, head) in wanted and any(text not in (NONE, "") for text in texts)}  # fmt: skip
        return _table(kept, ("", "what", "state", f"parity with {base}"), notes=self.notes())

    def memory_table(self) -> Table:
        """What the peak of the fullest rank was made of, and what lies beside it."""
        measured = [r for r in self.rows if r.figures.peak_memory_bytes]
        heads = {"": [r.label for r in measured], "what": [r.name for r in measured]}
        heads |= {role.value: [size(r.figures.at_peak.of_role(role)) for r in measured] for role in Role}
        heads |= {
            "peak": [size(r.figures.peak_memory_bytes) for r in measured],
            "outside": [size(r.figures.outside_bytes) for r in measured],
            "host": [size(r.figures.host_bytes) for r in measured],
            "limit": [size(r.figures.limit_bytes) for r in measured],
        }
        outside = "outside: not the allocator's (contexts, libraries, other processes); host: what offload moved there"
        return _table(heads, ("", "what"), caption="memory of the fullest rank at its peak", notes=(outside,))

    def badge(self, row: Row) -> str:
        """Its parity in three words."""
        if row.parity is None:
            return "baseline" if row.label == self.baseline else ""
        if row.parity.verdict is Verdict.DIFFERENT:
            return f"✗ DIFFERENT from step {row.parity.first_step}"
        return str(row.parity.verdict)

    def notes(self) -> tuple[str, ...]:
        """Why rows are as they are, the rules, and what the times are worth."""
        since = gathered((r.label, f"figures of step {r.figures.first_step} on, under the Spec applied last")
                         for r in self.rows if r.figures.first_step)  # fmt: skip
        apart = [(r.label, r.parity.sentence) for r in self.rows if r.parity and r.parity.verdict is not Verdict.EQUAL]
        return (
            *self.reasons(),
            *(f"{labels}: {said}" for said, labels in (since | gathered(apart)).items()),
            *(RULE, *self._pairings(), *self.fidelity()),
        )

    def reasons(self) -> tuple[str, ...]:
        """Why some combinations never began and runs ended as they did."""
        found = gathered([(r.label, f"{r.state}: {r.reason}") for r in self.rows if r.reason and not r.refused])
        return (*self.refusals(), *(f"{labels} {reason}" for reason, labels in found.items()))

    def refusals(self) -> tuple[str, ...]:
        """The combinations that never began, in one line, grouped by reason; nothing where there are none."""
        found = gathered((f"{r.label} {r.name}", r.reason) for r in self.rows if r.refused)
        groups = "; ".join(f"{combinations} ({reason})" for reason, combinations in found.items())
        return (f"Refused, so not in the table: {groups}.",) if found else ()

    def fidelity(self, *, common: bool = True) -> tuple[str, ...]:
        """What the times are worth, each sentence once; with the labels it is true of, where that is not all. Without
        `common` only those that are not true of all."""
        trained = [r for r in self.rows if r.figures.steps]
        notes = dict.fromkeys(note for r in trained for note in r.notes)
        only = {note: _only([r.label for r in trained if note in r.notes], len(trained)) for note in notes}
        return tuple(note + labels for note, labels in only.items() if labels or common)

    def _pairings(self) -> list[str]:
        found = {r.time_ratio.pairing for r in self.rows if r.time_ratio and r.label != self.baseline}
        said = []
        if Pairing.ROUNDS in found:
            said.append("Ratios of runs trained in turns: the median over rounds (p10 to p90 of rounds).")
        if Pairing.MEDIANS in found:
            said.append("Ratios of runs trained one after the other: of their medians (80% interval); "
                        "drift of the machine is part of them.")  # fmt: skip
        return said

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self._alarm(), repr(self.table())]))

    def _repr_html_(self) -> str:
        alarm = self._alarm()
        loud = "font-weight:bold;border-left:4px solid #c62828;padding:2px 8px"
        head = f'<p role="alert" style="{loud}">{escape(alarm)}</p>' if alarm else ""
        memory = self.memory_table()
        return head + self.table()._repr_html_() + (memory._repr_html_() if len(memory) else "")

    def _alarm(self) -> str:
        wrong = [f"{r.label} is {r.parity.sentence}" for r in self.rows if r.differs and r.parity]
        return f"NOT THE SAME COMPUTATION: {'; '.join(wrong)}" if wrong else ""

    # -- figures to go on with --------------------------------------------------------------------------------------

    def records(self) -> list[dict[str, Any]]:
        """A flat dict of scalars for each row, for `pandas.DataFrame(records)`; None is what was not measured."""
        return [{**_said(r), **_scalars(r.flat), **_measured(r.figures), **self._against(r)} for r in self.rows]

    def _against(self, row: Row) -> dict[str, Any]:
        found = row.parity
        return {
            "baseline": self.baseline,
            **_ratio_fields("step_time_ratio", row.time_ratio),
            **_ratio_fields("tokens_per_s_ratio", row.throughput_ratio),
            "ratio_pairing": str(row.time_ratio.pairing) if row.time_ratio else None,
            "peak_memory_ratio": row.memory_ratio,
            "parity": str(found.verdict) if found else None,
            "parity_first_step": found.first_step if found else None,
            "parity_steps": found.steps if found else None,
            "parity_checksums": found.checksums if found else None,
            "parity_sentence": found.sentence if found else None,
        }

    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Writes the records, a line each under a line of heads; returns where. Raises ArgumentError: the path cannot be."""
        file = check_file(path, (".csv",))
        records, text = self.records(), io.StringIO()
        writer = csv.DictWriter(text, list(records[0]) if records else ["label"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return write_whole(file, text.getvalue().encode())

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Writes {"baseline", "rules", "records"}; returns where. What is not finite is null. Raises ArgumentError."""
        file = check_file(path, (".json",))
        content = {"baseline": self.baseline, "rules": [RULE, *self._pairings()], "records": finite(self.records())}
        return write_whole(file, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


# -- rows --------------------------------------------------------------------------------------------------------------


def _row(run: RunView | Refusal, label: str, flat: Mapping[str, Any], differing: Sequence[str]) -> Row:
    name = describe_fields(flat, differing or DEFAULT_FIELDS)
    if isinstance(run, Refusal):
        spec = run.spec if isinstance(run.spec, Spec) else None
        return Row(label=label, name=name, run="", spec=spec, flat=flat, state=REFUSED, reason=run.reason)
    steps = last_stretch(run.events.steps(), run.spec)
    counted, found = counting(steps), figures(steps)
    return Row(
        label=label,
        name=name,
        run=run.id,
        spec=run.spec,
        flat=flat,
        state=run.state.value,
        reason=run.reason,
        started_unix_s=run.started_unix_s,
        figures=found,
        notes=tuple(dict.fromkeys([*run.notes, *found.notes])),
        step_times=tuple((s.events[0].end_unix_s, s.step_time_s) for s in counted),
        throughputs=tuple((s.events[0].end_unix_s, s.tokens_per_s) for s in counted),
    )


def _held(row: Row, base_row: Row, run: RunView | Refusal, base: RunView) -> Row:
    """The row with what it is beside the baseline."""
    if isinstance(run, Refusal) or row is base_row:
        # Of the baseline's own replicas nobody else would tell.
        torn = parity(base, base) if row is base_row else None
        return replace(row, parity=torn if torn and torn.verdict is Verdict.DIFFERENT else None)
    mine, its = row.figures.peak_memory_bytes, base_row.figures.peak_memory_bytes
    return replace(
        row,
        parity=parity(base, run),
        time_ratio=ratio(row.step_times, base_row.step_times),
        throughput_ratio=ratio(row.throughputs, base_row.throughputs),
        memory_ratio=mine / its if mine and its else None,
    )


def _labels(number: int, names: Sequence[str] | None) -> list[str]:
    if names is None:
        return [letters(i) for i in range(number)]
    if isinstance(names, str) or len(names) != number or len(set(names)) != number or not all(names):
        reason = f"{names!r} does not name {number} runs apart"
        raise ArgumentError("names", reason, "give one name for each run, all different, or none at all")
    return list(names)


def letters(place: int) -> str:
    """A to Z, then AA, AB, ..."""
    before, here = divmod(place, len(ascii_uppercase))
    return (letters(before - 1) if before else "") + ascii_uppercase[here]


def _place(runs: Sequence[RunView | Refusal], labels: Sequence[str], baseline: str | int | None) -> int | None:
    """Index of the baseline among the runs."""
    if baseline is None or (not runs and baseline == 0):
        return None
    hint = f"name one of {', '.join(labels)}, a run's id, or a place from 0 on" if labels else "give it some runs"
    if isinstance(baseline, str):
        ids = [None if isinstance(r, Refusal) else r.id for r in runs]
        if baseline not in labels and baseline not in ids:
            raise ArgumentError("baseline", f"there is no run {baseline!r}", hint)
        at = labels.index(baseline) if baseline in labels else ids.index(baseline)
        if isinstance(runs[at], Refusal):
            raise ArgumentError("baseline", f"{baseline} was refused before it began", hint)
        return at
    if not is_whole(baseline, 0) or baseline >= len(runs):
        raise ArgumentError("baseline", f"there is no run at place {baseline!r} of {len(runs)}", hint)
    order = [*range(baseline, len(runs)), *range(baseline)]
    return next((i for i in order if not isinstance(runs[i], Refusal)), None)


# -- cells and scalars -----------------------------------------------------------------------------------------------


def _table(heads: Mapping[str, Sequence[str]], left: Sequence[str], **more: Any) -> Table:
    rows = tuple(zip(*heads.values(), strict=True))
    return Table(columns=tuple(heads), rows=rows, left=frozenset(left), **more)


def cells(f: Figures, *, spread: bool = False) -> dict[str, str]:
    """The figures of a run as text, by column; a dash for what was not measured. `spread`: p10 to p90 of the step time."""
    return {
        "step time": _of(f.step_time_s, duration, spread=spread),
        "tokens/s": _of(f.tokens_per_s, count),
        "TFLOPS": _of(f.tflops_per_rank, "{:.3g}".format),
        "MFU": _of(f.mfu, "{:.1%}".format),
        "exposed": _of(f.exposed_comm_s, duration),
        "comm": _of(f.comm_s, duration),
        "link": _of(f.link_bytes, size),
        "peak/rank": size(f.peak_memory_bytes),
        "loss": NONE if f.last_loss is None else f"{f.last_loss:.4f}",
    }


def _of(found: Spread | None, shown: Callable[[float], str], *, spread: bool = False) -> str:
    if found is None:
        return NONE
    if not spread:
        return shown(found.median)
    low, high = shown(found.p10), shown(found.p90)
    (number, _, unit), high_unit = low.partition(" "), high.partition(" ")[2]
    return f"{shown(found.median)} ({number if unit == high_unit else low} to {high})"


def ratio_words(found: Ratio | None) -> str:
    """1.12 (1.08 to 1.15)."""
    if found is None:
        return NONE
    return f"{found.median:.2f}" + (f" ({found.p10:.2f} to {found.p90:.2f})" if found.p10 and found.p90 else "")


def gathered(said: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Sentence -> the labels of the rows it applies to: "A, B"."""
    found: dict[str, list[str]] = {}
    for label, what in said:
        found.setdefault(what, []).append(label)
    return {what: ", ".join(labels) for what, labels in found.items()}


def _only(labels: Sequence[str], of: int) -> str:
    return "" if len(labels) == of else f" ({', '.join(labels)})"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _scalars(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v if isinstance(v, str | int | float) or v is None else _text(v) for name, v in flat.items()}


def _said(row: Row) -> dict[str, Any]:
    return {
        "label": row.label,
        "run": row.run,
        "name": row.name,
        "state": row.state,
        "reason": row.reason,
        "started_unix_s": row.started_unix_s,
        "spec_id": row.spec.id if row.spec else None,
    }


def _measured(f: Figures) -> dict[str, Any]:
    spreads = {name: _spread_fields(name, getattr(f, name)) for name in SPREADS}
    at_peak = {f"{role.value}_bytes_at_peak": f.at_peak.of_role(role) if f.peak_memory_bytes else None for role in Role}
    return {
        "steps": f.steps,
        "counted_steps": f.counted,
        "first_step": f.first_step,
        "last_step": f.last_step,
        "last_loss": f.last_loss,
        **{name: value for fields in spreads.values() for name, value in fields.items()},
        "link_bytes_per_step": f.link_bytes.median if f.link_bytes else None,
        "peak_memory_bytes": f.peak_memory_bytes,
        **at_peak,
        "outside_bytes": f.outside_bytes if f.steps else None,
        "host_bytes": f.host_bytes if f.steps else None,
        "limit_bytes": f.limit_bytes,
        "peak_flops_source": f.peak_flops_source,
        "fidelity": " ".join(f.notes),
    }


def _spread_fields(name: str, found: Spread | None) -> dict[str, Any]:
    """The median under the figure's own name, so that a column of it is what one plots first."""
    values = (found.median, found.p10, found.p90) if found else (None, None, None)
    return dict(zip((name, f"{name}_p10", f"{name}_p90"), values, strict=True))


def _ratio_fields(name: str, found: Ratio | None) -> dict[str, Any]:
    values = (found.median, found.p10, found.p90, found.n) if found else (None, None, None, None)
    return dict(zip((name, f"{name}_p10", f"{name}_p90", f"{name}_n"), values, strict=True))


def finite(value: Any) -> Any:
    """The same with None in place of what JSON has no word for: NaN and the infinities."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
