"""`bench step` and `host`: measurements of ranks, ratios with a control, as text and JSON.

A bench prints each figure once it is known and returns the content of its `--json` file: "ratios" and "control" (a
ratio of equals), each with median, p10, p90 and n; what else was measured; its "environment"."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from fsdp_lab.base.formatting import Spread, Table, plural
from fsdp_lab.bench.launch import launch
from fsdp_lab.bench.plan import CONTROL, FORMS, LAB, PEERS, REFERENCE, BenchError, BenchPlan

Say = Callable[[str], None]
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}  # of losses and gradient norms, relative


def format_spread(values: Spread, unit: str = "", digits: int = 3) -> str:
    """Median, p10, p90 and n of a ratio, or of seconds, which the unit "ms" converts."""
    scale = 1e3 if unit == "ms" else 1
    median, p10, p90 = (f"{scale * value:.{digits}f}" for value in (values.median, values.p10, values.p90))
    return f"{median}{' ' * bool(unit)}{unit}, p10 {p10}, p90 {p90} ({values.n})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of one value or more."""
    result = Spread.of(values)
    assert result is not None
    return result


def ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """Element-wise quotients, one per round."""
    return [one / other for one, other in zip(ones, others, strict=True)]


def relative_difference(ones: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative one; NaN counts as infinite."""
    gaps = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(ones, others, strict=True)]
    return max(gap if math.isfinite(gap) else math.inf for gap in gaps)


BUSY = ("kernels", "GPU busy", "host-bound")  # columns


def busy_cells(kernels: Mapping[str, Any] | None, step_s: float) -> tuple[str, ...]:
    """Cells of `BUSY`, by the share of a profiled step in which kernels run. () on a CPU."""
    if not kernels:
        return ()
    share = min(1.0, kernels["busy_s"] / step_s)
    return f"{kernels['count']:,}", f"{share:.0%}", f"{1 - share:.0%}"


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of the slowest rank, one per round."""
    return [max(seconds) for seconds in zip(*ranks, strict=True)]


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The measurements of each form: seconds per counted step, and what shows that all forms did the same work."""

    seconds: Mapping[str, Sequence[float]]  # of the slowest rank
    losses: Mapping[str, Sequence[float]]  # of the last step, by rank
    gradient_norms: Mapping[str, float]  # of the first step, over all ranks
    peak_bytes: Mapping[str, int]  # of the rank that allocated most; 0 on CPUs
    shared: frozenset[str] = frozenset()  # forms that communicate through shared memory
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # `KernelTimes` of rank 0, on GPUs

    @classmethod
    def of_ranks(cls, ranks: Sequence[Mapping[str, Any]]) -> Self:
        """From the `BuiltForm.result` of each rank, by form."""
        forms = list(ranks[0])
        return cls(
            seconds={f: slowest([r[f]["seconds"] for r in ranks]) for f in forms},
            losses={f: [r[f]["loss"] for r in ranks] for f in forms},
            peak_bytes={f: max(r[f]["peak_bytes"] for r in ranks) for f in forms},
            shared=frozenset(f for f in forms if all(r[f]["is_shared"] for r in ranks)),
            gradient_norms={f: math.sqrt(sum(r[f]["squared_norm"] for r in ranks)) for f in forms},
            kernels={f: ranks[0][f]["kernels"] for f in forms if ranks[0][f].get("kernels")},
        )

    def step_time(self, form: str) -> Spread:
        return spread(self.seconds[form])

    def ratio(self, one: str, other: str) -> Spread:
        """Ratio of the step times of two forms in the same round: below 1, `one` is faster."""
        return spread(ratios(self.seconds[one], self.seconds[other]))

    @property
    def fastest(self) -> dict[str, str]:
        """Measured peer -> its form with the smallest median step time; of forms on torch's own group for "PEER-raw", and
        of those through shared memory, as the lab itself, for "PEER-shared"."""
        fastest = {}
        for peer in PEERS:
            forms = [f for f in self.seconds if FORMS[f].peer == peer]
            raw, shared = [f for f in forms if FORMS[f].group == "raw"], [f for f in forms if f in self.shared]
            for name, some in ((peer, forms), (f"{peer}-raw", raw), (f"{peer}-shared", shared)):
                if some:
                    fastest[name] = min(some, key=lambda f: statistics.median(self.seconds[f]))
        return fastest

    @property
    def reference(self) -> str:
        """The form that losses, norms and printed times are compared with."""
        return REFERENCE if REFERENCE in self.seconds else next(iter(self.seconds))

    @property
    def ratios(self) -> dict[str, Spread]:
        """Step time of the lab over that of `fastest`; empty if the lab was not measured."""
        return {f"{LAB}/{peer}": self.ratio(LAB, form) for peer, form in self.fastest.items() if LAB in self.seconds}

    @property
    def memory_ratios(self) -> dict[str, float]:
        """Peak allocated memory of the lab over that of the fastest form of each peer; empty on CPUs."""
        if not self.peak_bytes.get(LAB):
            return {}
        fastest = {peer: form for peer, form in self.fastest.items() if peer in PEERS}
        return {f"{LAB}/{peer}": self.peak_bytes[LAB] / self.peak_bytes[form] for peer, form in fastest.items()}

    @property
    def control(self) -> dict[str, Spread]:
        """Step time of the lab over that of a second instance of itself: the ratio when nothing differs."""
        return {f"{LAB}/{LAB}": self.ratio(LAB, CONTROL)} if {LAB, CONTROL} <= self.seconds.keys() else {}

    def difference(self) -> tuple[float, str]:
        """The largest relative difference to the reference in last losses and first gradient norms, and its form."""
        told = {form: [*self.losses[form], self.gradient_norms[form]] for form in self.seconds}
        return max((relative_difference(told[form], told[self.reference]), form) for form in told)

    def check_same_work(self, precision: str) -> None:
        """Raises BenchError if a form computed something else than the reference: its step time is meaningless then."""
        difference, form = self.difference()
        if difference > TOLERANCES[precision]:
            raise BenchError(
                f"{form} did other work than {self.reference}: losses or gradient norms differ by {difference:.2g}, "
                f"and {TOLERANCES[precision]:g} is allowed in {precision}; no figure of this run counts"
            )


def step(plan: BenchPlan, say: Say) -> dict[str, Any]:
    """Every form of every backend in one launch, one step of each in turn. Raises BenchError."""
    say(f"{len(plan.forms)} forms, {rounds_of(plan)}, on {' '.join(plan.devices)}")
    result = BenchResult.of_ranks(launch(plan, "steps"))
    figures = step_figures(result, environment(plan), say)
    result.check_same_work(plan.precision)
    return figures


def step_figures(result: BenchResult, environment: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Prints the table of all forms, fastest first, and a line for each ratio; returns the content of the file."""
    lab = LAB in result.seconds
    heading = f"{LAB}/form" if lab else f"form/{result.reference}"
    rows = []
    for form in sorted(result.seconds, key=lambda f: result.step_time(f).median):
        time, ratio = result.step_time(form), result.ratio(LAB, form) if lab else result.ratio(form, result.reference)
        times = (f"{1e3 * s:.1f}" for s in (time.median, time.p10, time.p90))
        shares = (f"{r:.3f}" for r in (ratio.median, ratio.p10, ratio.p90))
        rows.append((form, *times, *shares, *busy_cells(result.kernels.get(form), time.median)))
    columns = ("form", "ms/step", "p10", "p90", heading, "p10 ", "p90 ", *(BUSY if result.kernels else ()))
    say(repr(Table(columns=columns, rows=tuple(rows), left=frozenset({"form"}))))
    for name, ratio in result.ratios.items():
        form = result.fastest[name.partition("/")[2]]
        say(f"{name}: {format_spread(ratio)}; {form} is the fastest of them")
    for name, memory in result.memory_ratios.items():
        say(f"{name}, peak allocated memory: {memory:.3f}")
    for name, ratio in result.control.items():
        say(f"control {name}: {format_spread(ratio)}; {CONTROL} does the same as {LAB}")
    difference, form = result.difference()
    say(f"largest difference of losses and gradient norms to {result.reference}: {difference:.1e} ({form})")
    return {
        "ratios": {name: asdict(ratio) for name, ratio in result.ratios.items()},
        "control": {name: asdict(ratio) for name, ratio in result.control.items()},
        "environment": dict(environment),
        "step_time_s": {form: asdict(result.step_time(form)) for form in result.seconds},
        "fastest": result.fastest,
        "peak_bytes": dict(result.peak_bytes),
        "kernels": dict(result.kernels),
        "memory_ratios": result.memory_ratios,
    }


def host(plans: Sequence[BenchPlan], work: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Host time of a block and step beyond plain torch's; a launch for each plan. Raises BenchError."""
    import numpy as np

    from fsdp_lab.bench.host import AGAIN, OURS, PEERS, PLACES, PLAIN  # needs torch

    figures: dict[str, Any] = {"ratios": {}, "control": {}, "environment": {**environment(plans[0]), **work}}
    parts = {"forward+backward": (0, 0), "optimizer": (0, 1), "whole": (0, 2), "process": (1, 2), "wall": (2, 2)}
    pairs = [(f"{ours}-{group}", f"fsdp2-{group}") for group in ("raw", "wire") for ours in OURS]
    pairs += [*((f"{peer}-wire", f"{peer}-raw") for peer in PEERS), (AGAIN.name, "lab-raw")]
    cell, share = "{median:,.0f} ({p10:,.0f} to {p90:,.0f})".format, "{median:.3f} ({p10:.3f} to {p90:.3f})".format
    left = frozenset({"form"})
    for plan in plans:
        on, clock = f"{plural(plan.ranks, 'rank')}, {plan.precision}", "CPU" if plan.devices[0] == "cpu" else "wall"
        say(f"{on}, {work['blocks']} blocks of {work['layers']} layers on {' '.join(plan.devices)}, {rounds_of(plan)}")
        ranks = launch(plan, "host", **work)
        us = {f: 1e6 / work["blocks"] * np.mean([r["seconds"][f] for r in ranks], 0) for f in ranks[0]["seconds"]}
        plain = us.pop(PLAIN.name)  # [rounds, clocks, parts]
        us = {f: of - plain for f, of in us.items()} | {"plain itself": plain}
        spreads = {f: {part: asdict(spread(list(of[:, *at]))) for part, at in parts.items()} for f, of in us.items()}
        rows, compared, looks = [(f, *(cell(**s) for s in of.values())) for f, of in spreads.items()], [], []
        for one, other in (pair for pair in pairs if us.keys() >= set(pair)):
            first, whole = (spread(ratios(us[one][:, 0, k], us[other][:, 0, k])) for k in (0, 2))
            figures["control" if one == AGAIN.name else "ratios"][f"{on}, {one}/{other}"] = asdict(whole)
            compared.append((f"{one}/{other}", share(**asdict(first)), share(**asdict(whole))))
        for f, (made, kept) in ranks[0]["made"].items():
            each = (f"{n / (2 * work['layers'] * work['blocks']):.2f}" for n in made)
            looks.append((f, *map("{:.0%}".format, ranks[0]["places"][f].values()), " ".join(each), str(kept)))
        say(f"microseconds of host a block and step beyond plain torch, {clock} of the main thread")
        say(repr(Table(columns=("form", *parts), rows=tuple(rows), left=left)))
        say(repr(Table(columns=("form", "forward+backward", "whole"), rows=tuple(compared), left=left)))
        say("shares under a profiler; DTensors made for each parameter in three further steps, and tensors kept")
        say(repr(Table(columns=("form", *PLACES, "DTensors", "kept"), rows=tuple(looks), left=left)))
        figures[on] = {"microseconds": spreads, **{name: ranks[0][name] for name in ("losses", "places", "made")}}
    return figures


def rounds_of(plan: BenchPlan) -> str:
    return f"{plan.steps} rounds after {plan.warmup} of warm-up"


def environment(plan: BenchPlan) -> dict[str, Any]:
    """The plan, and the names of the GPUs where ranks are on GPUs."""
    if plan.devices[0] == "cpu":
        return asdict(plan)
    import torch

    gpus = [torch.cuda.get_device_name(device) for device in plan.devices]
    return {**asdict(plan), "gpus": gpus, "shares_gpu": plan.shares_gpu}
