"""What a run was, in figures: the entry of `fsdp-lab compare`'s JSON, `Figures`, and the table of its last steps.

The rule of what counts, everywhere: figures are of the steps trained with the Spec that was applied last. A step's
time is that of its slowest rank. Medians and percentiles of time, throughput, TFLOPS and communication leave out
the first step after a switch (allocations, first-time set-up) and ledger steps (slowed by measuring memory); where
nothing is left, as in a run of one step, they take all. Losses and memory leave out nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from fsdp_lab.events import Classes, Role, StepEvent
from fsdp_lab.spec import Spec
from fsdp_lab.table import Table, count, duration, size

Step = Sequence[StepEvent]  # one step's events, in rank order

# The rule of what counts, for whoever reads the figures.
RULE = ("Medians (and p10 to p90) leave out the first step after a change and ledger steps; a step's time is that of its "
        "slowest rank.")  # fmt: skip


def summarize(spec: Spec, events: Sequence[StepEvent]) -> dict[str, Any]:
    """The `runs` entry of compare's JSON. Figures that nothing was measured for are None, lists are empty."""
    steps = whole_steps(spec, events)
    counted = counting(steps)
    ranks = range(len(steps[0]) if steps else 0)
    times = [slowest(s) for s in counted]
    kinds = sorted({kind for s in counted for e in s for kind in e.comm})
    return {
        "spec": spec.to_dict(),
        "losses": [s[0].mean_loss for s in steps],
        "step_time_s": {"median": quantile(times, 0.5), "p10": quantile(times, 0.1), "p90": quantile(times, 0.9)},
        "tokens_per_s": median([throughput(s) for s in counted]),
        "tflops_per_rank": [median([s[r].tflops for s in counted]) for r in ranks],
        "mfu_per_rank": [median([share for s in counted if (share := s[r].mfu) is not None]) for r in ranks],
        "hfu_per_rank": [median([share for s in counted if (share := s[r].hfu) is not None]) for r in ranks],
        "peak_flops_source": steps[-1][0].peak_source if steps else "",
        "peak_memory_bytes": [max(s[r].memory.peak_bytes for s in steps) for r in ranks],
        "memory_at_peak_bytes": {k.value: [steps[-1][r].memory.at_peak.of_role(k) for r in ranks] for k in Role},
        "rss_bytes": [steps[-1][r].memory.rss_bytes for r in ranks],
        "comm_s_per_step": {k: median([statistics.fmean(seconds(e, k) for e in s) for s in counted]) for k in kinds},
        "comm_bytes_per_step": {k: rounded(median([link_bytes(s[0], k) for s in counted])) for k in kinds},
        "exposed_comm_s_per_step": {
            k: median(known([statistics.fmean(exposed(e, k) for e in s) for s in counted])) for k in kinds
        },
        **evaluated(steps),
    }


def evaluated(steps: Sequence[Step]) -> dict[str, Any]:
    """Evaluation losses and the least of those that are finite; nothing of a run without."""
    found = [{"step": s[0].step, "loss": s[0].eval_loss} for s in steps if s[0].eval_loss is not None]
    finite = [e for e in found if math.isfinite(e["loss"])]
    best = min(finite, key=lambda e: float(e["loss"]), default=None)
    return {"evaluations": found, "best_evaluation": best} if found else {}


def whole_steps(spec: Spec, events: Sequence[StepEvent]) -> list[Step]:
    """The last unbroken stretch of steps under `spec` that every rank has told, in order of step."""
    spec_id = spec.id  # computed anew each time it is asked for
    found: dict[int, dict[int, StepEvent]] = {}
    for event in events:
        if event.spec_id != spec_id:
            if event.rank == 0:
                found = {}
            continue
        if event.step == 0 and event.rank in found.get(0, {}):
            found = {}  # begun again with the same Spec
        found.setdefault(event.step, {})[event.rank] = event
    return [
        [by_rank[r] for r in sorted(by_rank)] for _, by_rank in sorted(found.items()) if len(by_rank) == spec.world_size
    ]


def counting(steps: Sequence[Step]) -> Sequence[Step]:
    """Those whose times belong in a median; where there is none, all."""
    return [s for s in steps if s[0].counts] or steps


def slowest(step: Step) -> float:
    return max(e.step_time_s for e in step)


def seconds(event: StepEvent, kind: str) -> float:
    return event.comm[kind].seconds if kind in event.comm else 0.0


def exposed(event: StepEvent, kind: str) -> float:
    return event.comm[kind].exposed_seconds if kind in event.comm else 0.0


def link_bytes(event: StepEvent, kind: str) -> float:
    return event.comm[kind].link_bytes if kind in event.comm else 0.0


def known(values: Sequence[float]) -> list[float]:
    """Without what was not measured."""
    return [v for v in values if math.isfinite(v)]


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def quantile(values: Sequence[float], q: float) -> float | None:
    """With linear interpolation between neighbours; None of nothing."""
    if not values:
        return None
    ordered, place = sorted(values), q * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# -- figures of a whole run, one value each with its spread ---------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median of `n` values with the 10th and the 90th percentile."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Of the finite ones; None where there is none."""
        finite = known(values)
        m, low, high = quantile(finite, 0.5), quantile(finite, 0.1), quantile(finite, 0.9)
        if m is None or low is None or high is None:
            return None
        return cls(median=m, p10=low, p90=high, n=len(finite))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """A run under the Spec applied last, by the rule of this module. None: not measured.

    Memory is that of the fullest rank: `at_peak` says what its peak was made of. `outside_bytes`, `host_bytes`: the most of
    any rank at the last step; `limit_bytes`: the least.
    """

    steps: int = 0  # told by all ranks
    counted: int = 0  # of them, in medians
    first_step: int | None = None
    step_time_s: Spread | None = None
    tokens_per_s: Spread | None = None  # of all ranks
    tflops_per_rank: Spread | None = None  # mean over ranks, as are the next four
    mfu: Spread | None = None
    hfu: Spread | None = None
    comm_s: Spread | None = None  # a step, issue to completion, all kinds
    exposed_comm_s: Spread | None = None  # a step, all kinds
    link_bytes: Spread | None = None  # that rank 0 sends in a step
    comm_s_by_kind: Mapping[str, float] = field(default_factory=dict)  # medians
    peak_memory_bytes: int | None = None
    at_peak: Classes = field(default_factory=Classes)
    host_bytes: int = 0
    outside_bytes: int = 0
    limit_bytes: int | None = None
    last_step: int | None = None
    last_loss: float | None = None  # mean over ranks
    peak_flops_source: str = ""
    notes: tuple[str, ...] = ()  # what the times are worth


def figures(steps: Sequence[Step]) -> Figures:
    """Of the steps that `whole_steps` found."""
    if not steps:
        return Figures()
    counted, last = counting(steps), steps[-1]
    fullest = max((e.memory for s in steps for e in s), key=attrgetter("peak_bytes"))
    kinds = sorted({kind for s in counted for e in s for kind in e.comm})

    def spread(value: Callable[[StepEvent], float | None]) -> Spread | None:
        return Spread.of([of_ranks(s, value) for s in counted])

    return Figures(
        steps=len(steps),
        counted=len(counted),
        first_step=steps[0][0].step,
        step_time_s=Spread.of([slowest(s) for s in counted]),
        tokens_per_s=Spread.of([throughput(s) for s in counted]),
        tflops_per_rank=spread(attrgetter("tflops")),
        mfu=spread(attrgetter("mfu")),
        hfu=spread(attrgetter("hfu")),
        comm_s=spread(lambda e: sum(t.seconds for t in e.comm.values())),
        exposed_comm_s=spread(attrgetter("exposed_comm_s")),
        link_bytes=Spread.of([sum(t.link_bytes for t in s[0].comm.values()) for s in counted]),
        comm_s_by_kind={
            k: statistics.median(statistics.fmean(seconds(e, k) for e in s) for s in counted) for k in kinds
        },
        peak_memory_bytes=fullest.peak_bytes or None,
        at_peak=fullest.at_peak,
        host_bytes=max(e.memory.host_bytes for e in last),
        outside_bytes=max(e.memory.outside_bytes for e in last),
        limit_bytes=min((e.memory.limit_bytes for e in last if e.memory.limit_bytes), default=None),
        last_step=last[0].step,
        last_loss=last[0].mean_loss,
        peak_flops_source=last[0].peak_source,
        notes=tuple(dict.fromkeys(note for e in last for note in e.notes)),
    )


def throughput(step: Step) -> float:
    """Tokens a second, of all ranks."""
    return sum(e.tokens for e in step) / slowest(step)


def of_ranks(step: Step, value: Callable[[StepEvent], float | None]) -> float:
    """The mean over the ranks that know it; NaN where none does, or one knows that it does not."""
    told = [v for e in step if (v := value(e)) is not None]
    return statistics.fmean(told) if told else math.nan


# -- the table of the last steps -----------------------------------------------------------------------------------


def step_table(steps: Sequence[Step], specs: dict[str, Spec], caption: str = "", notes: Sequence[str] = ()) -> Table:
    """One row a step over all ranks: slowest time, summed throughput, mean TFLOPS, communication and what of it
    is exposed, highest peak."""
    marked = any(e[0].first_after_switch or e[0].ledger for e in steps)
    legend = ("* first step after a switch, or slowed by measuring: not counted in medians",) if marked else ()
    recomputes = any(e.recompute_flops for step in steps for e in step)
    shares = ("MFU", "HFU") if recomputes else ("MFU",)
    figures = ("step", "loss", "grad norm", "step time", "tokens/s", "TFLOPS/rank", *shares, "peak/rank", "comm/rank")
    return Table(
        columns=(*figures, "exposed", "how"),
        rows=tuple(row(step, specs.get(step[0].spec_id), hfu=recomputes) for step in steps),
        caption=caption,
        notes=(*legend, *relation(steps, shares), *notes),
        left=frozenset({"how"}),
    )


def relation(steps: Sequence[Step], shares: Sequence[str]) -> tuple[str, ...]:
    """What utilisation is relative to, in words: the best of the device, and where that figure is from."""
    peaks = {e.peak_source: e.peak_flops_per_s for step in steps for e in step if e.peak_flops_per_s}
    said = "; ".join(f"{peak / 1e12:.3g} TFLOPS a rank ({source})" for source, peak in peaks.items())
    counted = " (HFU counts recompute)" if "HFU" in shares else ""
    return (f"{' and '.join(shares)}{counted} relative to {said}",) if peaks else ()


def percent(shares: Sequence[float | None]) -> str:
    """The mean of those that are known."""
    known = [share for share in shares if share is not None]
    return f"{statistics.fmean(known):.1%}" if known else "–"


def row(step: Step, spec: Spec | None, *, hfu: bool = False) -> tuple[str, ...]:
    first, time_s = step[0], slowest(step)
    return (
        f"{first.step}{'' if first.counts else '*'}",
        f"{first.mean_loss:.4f}",
        f"{first.grad_norm:.3f}",
        duration(time_s),
        count(sum(e.tokens for e in step) / time_s),
        f"{statistics.fmean(e.tflops for e in step):.3g}",
        percent([e.mfu for e in step]),
        *([percent([e.hfu for e in step])] if hfu else []),
        size(max(e.memory.peak_bytes for e in step)),
        duration(statistics.fmean(sum(t.seconds for t in e.comm.values()) for e in step)),
        duration(statistics.fmean(e.exposed_comm_s for e in step)),
        how(spec),
    )


def how(spec: Spec | None) -> str:
    """The strategy in a few words."""
    if spec is None:
        return ""
    s = spec.strategy
    precision = s.precision if isinstance(s.precision, str) else f"{s.precision.param}/{s.precision.reduce}"
    words = [s.backend, s.sharding, precision, *([f"offload {s.offload}"] if s.offload != "none" else [])]
    return " ".join([*words, *([f"link {spec.link}"] if spec.link else [])])
