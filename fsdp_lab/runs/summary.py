"""Figures of a run: `summarize` (the entry of `fsdp-lab compare`'s JSON), `Figures`, `Ratio`, and a table of the last steps.

The rule of what counts, everywhere: figures are of the steps trained with the Spec applied last (which steps a run has after
a restart: see `runs.steps`). A step's time is that of its slowest rank. Medians and percentiles of time, throughput, TFLOPS
and communication leave out the first step after a switch (allocations, first-time set-up) and ledger steps (slowed by
measuring memory); where no step is left, as in a run of one, they include all. Losses and memory leave out nothing."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

from fsdp_lab.base.events import Role, RoleBytes, StepEvent, Traffic
from fsdp_lab.base.formatting import Spread, Table, count, duration, flop_rate, known, known_or_dash, quantile, size
from fsdp_lab.runs.steps import Step, last_stretch
from fsdp_lab.spec.describe import Trained, describe_strategy

_COUNTS = "Medians (and p10 to p90) leave out the first step after a change and ledger steps, which measure memory"
RULE = f"{_COUNTS}; a step's time is that of its slowest rank."  # for readers of the figures
NO_TRAFFIC = Traffic()


def summarize(spec: Trained, steps: Sequence[Step]) -> dict[str, Any]:
    """The `runs` entry of compare's JSON. Where nothing was measured, figures are None and lists are empty."""
    steps = last_stretch(steps, spec)
    counted, peaks = counting(steps), Peaks(steps)
    kinds = comm_kinds(counted)
    ranks = range(steps[0].world_size if steps else 0)
    times = [s.step_time_s for s in counted]

    def sent_bytes(step: Step, kind: str) -> int:
        return traffic(step.events[0], kind).link_bytes

    def exposed_seconds(step: Step, kind: str) -> float:
        return statistics.fmean(traffic(e, kind).exposed_seconds for e in step.events)

    def by_rank(value: Callable[[StepEvent], float | None]) -> list[float | None]:
        """For each rank, the median over the steps where the value is not None."""
        return [median([v for s in counted if (v := value(s.events[r])) is not None]) for r in ranks]

    return {
        "spec": spec.to_dict(),
        "losses": [s.mean_loss for s in steps],
        "step_time_s": {"median": quantile(times, 0.5), "p10": quantile(times, 0.1), "p90": quantile(times, 0.9)},
        "tokens_per_s": median([s.tokens_per_s for s in counted]),
        "tflops_per_rank": by_rank(attrgetter("tflops")),
        "mfu": median(known([of_ranks(s, peaks.mfu) for s in counted])),
        "mfu_per_rank": by_rank(peaks.mfu),
        "hfu_per_rank": by_rank(peaks.hfu),
        "peak_flops_source": steps[-1].events[0].peak_source if steps else "",
        "peak_memory_bytes": [max(s.events[r].memory.peak_bytes for s in steps) for r in ranks],
        "memory_at_peak_bytes": {k.value: [steps[-1].events[r].memory.at_peak.of_role(k) for r in ranks] for k in Role},
        "rss_bytes": [steps[-1].events[r].memory.rss_bytes for r in ranks],
        "loading_bytes": [max(s.events[r].memory.loading_bytes for s in steps) for r in ranks],
        "comm_s_per_step": {k: median(known([comm_seconds(s, k) for s in counted])) for k in kinds},
        "comm_bytes_per_step": {k: round(statistics.median(sent_bytes(s, k) for s in counted)) for k in kinds},
        "exposed_comm_s_per_step": {k: median(known([exposed_seconds(s, k) for s in counted])) for k in kinds},
        **evaluated(steps),
    }


def evaluated(steps: Sequence[Step]) -> dict[str, Any]:
    """Evaluation losses with metrics, by name, and the least finite one; empty for a run without evaluations."""
    whole = [{"step": s.number, "loss": loss, **s.eval_metrics} for s in steps if (loss := s.eval_loss) is not None]
    best = min([e for e in whole if math.isfinite(e["loss"])], key=itemgetter("loss"), default=None)
    return {"evaluations": whole, "best_evaluation": best} if whole else {}


def counting(steps: Sequence[Step]) -> Sequence[Step]:
    """The steps whose times belong in a median; all where there is none."""
    return [s for s in steps if s.counts] or steps


def comm_kinds(steps: Iterable[Step]) -> list[str]:
    return sorted({kind for s in steps for e in s.events for kind in e.comm})


class Peaks:
    """The peak FLOP/s that utilisation is relative to: for each rank and Spec the greatest one of the steps added so
    far. Events have the peak known at their time; a faster step raises it. Here it is the same for all steps, earlier
    ones too."""

    def __init__(self, steps: Sequence[Step] = ()) -> None:
        self._best: dict[tuple[int, str], tuple[float, str]] = {}
        for step in steps:
            self.add(step)

    def add(self, step: Step) -> None:
        for event in step.events:
            if (peak := event.best_flops_per_s) is not None:
                key = event.rank, event.spec_id
                self._best[key] = max(self._best.get(key, (0.0, "")), (peak, event.peak_source))

    def of(self, event: StepEvent) -> tuple[float, str] | None:
        """(FLOP/s, source); None where no peak is known."""
        return self._best.get((event.rank, event.spec_id))

    def mfu(self, event: StepEvent) -> float | None:
        return self._share(event, event.flops)

    def hfu(self, event: StepEvent) -> float | None:
        return self._share(event, event.hardware_flops)

    def _share(self, event: StepEvent, flops: int) -> float | None:
        best = self.of(event)
        return flops / event.step_time_s / best[0] if best is not None and flops else None

    @property
    def by_source(self) -> dict[str, float]:
        """Source of a peak -> the greatest peak, FLOP/s."""
        return {source: best for best, source in sorted(self._best.values())}


def comm_seconds(step: Step, kind: str) -> float:
    """The time from issue to completion, mean over ranks."""
    return statistics.fmean(traffic(e, kind).seconds for e in step.events)


def traffic(event: StepEvent, kind: str) -> Traffic:
    """The collectives of a kind, also where there were none."""
    return event.comm.get(kind, NO_TRAFFIC)


def median(values: Sequence[float]) -> float | None:
    """The median; None of no values."""
    return statistics.median(values) if values else None


# -- figures of a whole run, one value each with its spread ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of a run under the Spec applied last, by the rule of this module. None: not measured. Memory is that of
    the fullest rank; `at_peak`: by class, at its peak. `outside_bytes`, `host_bytes`: the greatest of all ranks at the
    last step; `limit_bytes`: the least."""

    steps: int = 0  # whole ones
    counted: int = 0  # those in medians
    first_step: int | None = None
    step_time_s: Spread | None = None
    tokens_per_s: Spread | None = None  # of all ranks
    tflops_per_rank: Spread | None = None  # mean over ranks, as are the next four
    mfu: Spread | None = None
    hfu: Spread | None = None
    comm_s: Spread | None = None  # per step, issue to completion, all kinds
    exposed_comm_s: Spread | None = None  # per step, all kinds
    link_bytes: Spread | None = None  # sent by rank 0 per step
    comm_s_by_kind: Mapping[str, float] = field(default_factory=dict)  # medians
    peak_memory_bytes: int | None = None
    at_peak: RoleBytes = field(default_factory=RoleBytes)
    host_bytes: int = 0
    outside_bytes: int = 0
    limit_bytes: int | None = None
    last_step: int | None = None
    last_loss: float | None = None  # mean over ranks
    peak_flops_source: str = ""
    notes: tuple[str, ...] = ()  # how far to trust the times


def figures(steps: Sequence[Step]) -> Figures:
    """`steps`: the whole ones under one Spec (`steps.last_stretch`)."""
    if not steps:
        return Figures()
    counted, last, peaks = counting(steps), steps[-1].events, Peaks(steps)
    fullest = max((e.memory for s in steps for e in s.events), key=attrgetter("peak_bytes"))

    def spread(value: Callable[[StepEvent], float | None]) -> Spread | None:
        return Spread.of([of_ranks(s, value) for s in counted])

    return Figures(
        steps=len(steps),
        counted=len(counted),
        first_step=steps[0].number,
        step_time_s=Spread.of([s.step_time_s for s in counted]),
        tokens_per_s=Spread.of([s.tokens_per_s for s in counted]),
        tflops_per_rank=spread(attrgetter("tflops")),
        mfu=spread(peaks.mfu),
        hfu=spread(peaks.hfu),
        comm_s=spread(lambda e: sum(t.seconds for t in e.comm.values())),
        exposed_comm_s=spread(attrgetter("exposed_comm_s")),
        link_bytes=Spread.of([sum(t.link_bytes for t in s.events[0].comm.values()) for s in counted]),
        comm_s_by_kind={k: statistics.median(comm_seconds(s, k) for s in counted) for k in comm_kinds(counted)},
        peak_memory_bytes=fullest.peak_bytes or None,
        at_peak=fullest.at_peak,
        host_bytes=max(e.memory.host_bytes for e in last),
        outside_bytes=max(e.memory.outside_bytes for e in last),
        limit_bytes=min((e.memory.limit_bytes for e in last if e.memory.limit_bytes), default=None),
        last_step=last[0].step,
        last_loss=None if math.isnan(loss := steps[-1].mean_loss) else loss,
        peak_flops_source=last[0].peak_source,
        notes=tuple(dict.fromkeys(note for e in last for note in e.notes)),
    )


def of_ranks(step: Step, value: Callable[[StepEvent], float | None]) -> float:
    """Mean over the ranks whose value is not None; NaN where all are None, or one is NaN."""
    values = [v for e in step.events if (v := value(e)) is not None]
    return statistics.fmean(values) if values else math.nan


# -- ratios of two runs' figures ------------------------------------------------------------------------------------

ROUNDS = 3
FEWEST = 3  # steps of each run that an interval needs
LEAST = 0.02  # a smaller difference counts as noise, however narrow its interval
NORMAL_90 = 1.2816  # 90 % of a normal distribution lies below so many standard deviations

Timed = Sequence[tuple[float, float]]  # (Unix time in seconds, value) of each step


class Pairing(StrEnum):
    ROUNDS = "in rounds"
    MEDIANS = "one after the other"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How a figure of one run, such as its step time, relates to that of another, and how certain that is.

    The rule. Where the two were trained in turns, at least `ROUNDS` times each, as in a sweep, the median of each turn is
    divided by that of the other run's turn in the same round, which is the nearest in time: drift of the machine affects
    both alike. The ratio is the median over rounds, with the 10th and 90th percentile of rounds. Otherwise, when one was
    trained after the other, it is the ratio of the two medians; p10 and p90 are the ends of its 80 % interval, from the
    order statistics of both samples. Drift of the machine between the two is then part of the ratio.

    `p10`, `p90`: None where there are too few steps. `n`: rounds, or the steps of the run that has fewer."""

    median: float
    p10: float | None
    p90: float | None
    n: int
    pairing: Pairing

    @property
    def clear(self) -> bool:
        """Tells whether it differs from 1: the interval excludes 1, and the median is not within `LEAST` of it."""
        if self.p10 is None or self.p90 is None:
            return False
        return not self.p10 <= 1 <= self.p90 and abs(self.median - 1) >= LEAST


def ratio(of: Timed, to: Timed) -> Ratio | None:
    """Compares by the rule in `Ratio`; None where one of the two has no values, or some are not positive."""
    if not of or not to or min(v for _, v in (*of, *to)) <= 0:
        return None
    rounds = in_rounds(of, to)
    if len(rounds) >= ROUNDS:
        each = [statistics.median(a) / statistics.median(b) for a, b in rounds]
        p10, p90 = quantile(each, 0.1), quantile(each, 0.9)
        return Ratio(median=statistics.median(each), p10=p10, p90=p90, n=len(each), pairing=Pairing.ROUNDS)
    upper, lower = [v for _, v in of], [v for _, v in to]
    middle, n = statistics.median(upper) / statistics.median(lower), min(len(upper), len(lower))
    p10 = p90 = None
    if n >= FEWEST:  # the errors of the two medians, added in quadrature on a logarithmic scale
        (upper_minus, upper_plus), (lower_minus, lower_plus) = _median_errors(upper), _median_errors(lower)
        p10 = middle * math.exp(-math.hypot(upper_minus, lower_plus))
        p90 = middle * math.exp(math.hypot(upper_plus, lower_minus))
    return Ratio(median=middle, p10=p10, p90=p90, n=n, pairing=Pairing.MEDIANS)


def in_rounds(of: Timed, to: Timed) -> list[tuple[list[float], list[float]]]:
    """For each round, the values of the one run's turn and of the other's."""
    ordered = sorted([*((t, 0, v) for t, v in of), *((t, 1, v) for t, v in to)])
    turns: tuple[list[list[float]], list[list[float]]] = ([], [])
    for side, group in groupby(ordered, key=itemgetter(1)):
        turns[side].append([v for _, _, v in group])
    return list(zip(*turns, strict=False))  # the last round may lack the other's turn


def _median_errors(values: Sequence[float]) -> tuple[float, float]:
    """The distances below and above the sample's median at which the true one may be, as logarithms of ratios."""
    reach = min(0.5, NORMAL_90 / 2 / math.sqrt(len(values)))
    low, middle, high = (quantile(values, q) or 0.0 for q in (0.5 - reach, 0.5, 0.5 + reach))
    return math.log(middle / low), math.log(high / middle)


# -- the table of the last steps -----------------------------------------------------------------------------------


def step_table(steps: Sequence[Step], specs: dict[str, Trained], caption: str = "", notes: Sequence[str] = ()) -> Table:
    """One row per step over all ranks: greatest time, summed throughput, mean TFLOPS, mean communication and the exposed
    part of it, greatest peak."""
    marked = any(step.events[0].first_after_switch or step.events[0].ledger for step in steps)
    legend = ["* first step after a switch, or slowed by measuring: not counted in medians"] if marked else []
    peaks = Peaks(steps)
    shares = {"MFU": peaks.mfu}
    if any(e.recompute_flops for step in steps for e in step.events):
        shares["HFU"] = peaks.hfu
    # What utilisation is relative to, where a peak is known.
    best = "; ".join(f"{flop_rate(peak)} a rank ({source})" for source, peak in peaks.by_source.items())
    recompute = " (HFU counts recompute)" if "HFU" in shares else ""
    relation = (f"{' and '.join(shares)}{recompute} relative to {best}",) if best else ()
    if any(e.comm for step in steps for e in step.events):
        legend.append("comm in flight: issue to completion, mean of ranks; collectives that overlap count each")
    measured = ("step", "loss", "grad norm", "lr", "step time", "tokens/s", "FLOPS/rank")
    return Table(
        columns=(*measured, *shares, "peak/rank", "comm in flight", "exposed", "how"),
        rows=tuple(_row(step, specs.get(step.spec_id), tuple(shares.values())) for step in steps),
        caption=caption,
        notes=(*legend, *relation, *notes),
        left=frozenset({"how"}),
    )


Share = Callable[[StepEvent], float | None]


def _row(step: Step, spec: Trained | None, shares: Sequence[Share]) -> tuple[str, ...]:
    events = step.events
    rate = events[0].lr
    return (
        f"{step.number}{'' if step.counts else '*'}",
        known_or_dash(step.mean_loss, ".4f"),
        known_or_dash(events[0].grad_norm, ".3f"),
        "–" if rate is None else f"{rate:.3g}",
        duration(step.step_time_s),
        count(step.tokens_per_s),
        flop_rate(1e12 * statistics.fmean(e.tflops for e in events)),
        *(known_or_dash(of_ranks(step, share), ".1%") for share in shares),
        size(max(e.memory.peak_bytes for e in events) or None),  # 0: not measured
        duration(statistics.fmean(sum(t.seconds for t in e.comm.values()) for e in events)),
        duration(statistics.fmean(e.exposed_comm_s for e in events)),
        describe_strategy(spec) if spec else "",
    )
