"""Plans in words and tables, for a terminal as for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsdp_lab.events import Role
from fsdp_lab.spec import Spec
from fsdp_lab.table import Table, count, duration, size

if TYPE_CHECKING:
    from fsdp_lab.planner.plan import Plan
    from fsdp_lab.planner.search import Search

PARTS = ("computing", "slowed by sending", "exposed communication", "optimizer")
FIGURES = ("fits", "memory", "step", "tokens/s", "TFLOPS", "MFU", "exposed", "bound by")
CHOSEN = ("shard_size", "recompute", "offload", "micro_batch", "accumulate", "forward_prefetch")
LEFT = frozenset({"strategy", "why", "bound by", "fits"})


def sentences(plan: Plan) -> list[str]:
    """What is planned, whether it fits, how fast it is, and what was assumed."""
    s, w, m = plan.spec.strategy, plan.spec.workload, plan.machine
    network = f" at {m.network_bytes_per_s * 8 / 1e9:,.0f} Gb/s a host" if m.hosts > 1 else ""
    model = w.model if isinstance(w.model, str) else str(w.model.get("model_type", "model"))
    assumed = "; ".join(f"{name} {value}" for name, value in plan.assumed.items())
    return [
        f"{model}, {parameters(plan.shape.parameters)}, {s.backend} {s.sharding}, {s.precision}, on {m.ranks:,} x "
        f"{m.device.name} in {m.hosts:,} host{'s' * (m.hosts > 1)}{network}",
        f"It {fits(plan)}.",
        f"Step {duration(plan.step_time_s)}, {count(plan.tokens_per_s)} tokens/s, {plan.flops_per_s / 1e12:.3g} TFLOPS a "
        f"rank, MFU {plan.mfu:.1%}, HFU {plan.hfu:.1%}; bound by {plan.binding}.",
        *([f"Assumed: {assumed}."] if assumed else []),
    ]


def parameters(number: int) -> str:
    return f"{number / 1e9:.2f} billion parameters" if number >= 1e9 else f"{number / 1e6:.1f} million parameters"


def fits(plan: Plan) -> str:
    words, limit = size(plan.memory.reserved_bytes), size(plan.machine.device.memory_bytes)
    if plan.fits:
        return f"fits: {words} of {limit}, {size(plan.margin_bytes)} to spare"
    return f"does not fit: {words} of {limit}, {size(-plan.margin_bytes)} too much"


def time_table(plan: Plan) -> Table:
    """Where a step's time goes."""
    step, kinds = plan.step, tuple(plan.comm_s)
    parts = (step.computing_s, step.slowed_s, step.exposed_comm_s, step.optimizer_s)
    sent = [f"{duration(plan.comm_s[kind])}, {size(plan.link_bytes[kind])}" for kind in kinds]
    return Table(columns=(*PARTS, *(kind.replace("_", " ") for kind in kinds)), rows=((*map(duration, parts), *sent),))


def memory_table(plan: Plan) -> Table:
    """What the peak is made of."""
    held = plan.memory
    kinds = [role for role in Role if held.at_peak.of_role(role)]
    sizes = [size(held.at_peak.of_role(role)) for role in kinds]
    return Table(columns=(*(role.value for role in kinds), "peak", "reserved"),
                 rows=((*sizes, size(held.peak_bytes), size(held.reserved_bytes)),))  # fmt: skip


def table(plans: Sequence[Plan]) -> Table:
    """A row a plan: what sets it apart from the others, and its figures."""
    flat = [p.spec.flat() for p in plans]
    differing = [name for name in flat[0] if any(one[name] != flat[0][name] for one in flat)]
    names = tuple({"world_size": "ranks"}.get(name, name).replace("_", " ") for name in differing)
    rows = ((*(_cell(one[n]) for n in differing), *figures(p)) for p, one in zip(plans, flat, strict=True))
    return Table(columns=(*names, *FIGURES), rows=tuple(rows), left=LEFT | {n for n in names if n != "ranks"})


def _cell(value: Any) -> str:
    if value is None:
        return "auto"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def figures(p: Plan) -> tuple[str, ...]:
    """Of the columns `FIGURES`."""
    return (
        "yes" if p.fits else "no", size(p.memory.reserved_bytes), duration(p.step_time_s), count(p.tokens_per_s),
        f"{p.flops_per_s / 1e12:.3g}", f"{p.mfu:.1%}", f"{p.exposed_share:.0%}", p.binding,
    )  # fmt: skip


def search_table(search: Search) -> Table:
    rows = (
        (str(i), strategy(search.asked, one.plan.spec), one.why, duration(one.plan.step_time_s), f"{one.plan.mfu:.1%}",
         size(one.plan.memory.reserved_bytes))
        for i, one in enumerate(search.top, 1)
    )  # fmt: skip
    return Table(columns=("", "strategy", "why", "step", "MFU", "memory"), rows=tuple(rows), left=LEFT)


def search_sentence(search: Search) -> str:
    """How many fit; or what comes nearest."""
    if search.top:
        return f"{search.fitting} of {search.considered} strategies fit."
    if search.nearest is None:
        return f"{search.asked.strategy.backend} has no strategy to choose from here."
    nearest = f"{strategy(search.asked, search.nearest.spec)}. It {fits(search.nearest)}."
    return f"None of {search.considered} strategies fits. Nearest: {nearest}"


def strategy(asked: Spec, found: Spec) -> str:
    """What was chosen, where it is neither as asked nor as it is by itself."""
    changed = {**Spec(world_size=found.world_size).difference(found), **asked.difference(found)}
    told = [
        f"{name.replace('_', ' ')} {changed[name][1]}" for name in CHOSEN if changed.get(name, (0, None))[1] is not None
    ]
    return ", ".join([found.strategy.sharding, *told])
