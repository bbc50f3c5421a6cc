"""Plans in a terminal: one in full, or several as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fsdp_lab.cli import session
from fsdp_lab.events import Role
from fsdp_lab.model_shape import ModelShape
from fsdp_lab.planner.devices import Machine
from fsdp_lab.planner.plan import Plan
from fsdp_lab.planner.search import Search
from fsdp_lab.plans import Where
from fsdp_lab.runs.table import count, duration, size
from fsdp_lab.spec import Spec


def show(plans: Sequence[Plan], along: Sequence[Plan], binds: str) -> None:
    """One plan with its scaling curve, or a table."""
    console = session.console()
    if len(plans) > 1:
        console.print(table(plans))
        return
    for line in whole(plans[0]):
        console.print(line)
    if len(along) > 1:
        console.print(scaling(along))
    say(binds + ".")


def show_search(search: Search, asked: Spec) -> None:
    console = session.console()
    if search.top:
        found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("", "strategy", "why"):
            found.add_column(name)
        for name in ("step", "MFU", "memory"):
            found.add_column(name, justify="right")
        for i, one in enumerate(search.top, 1):
            p = one.plan
            found.add_row(str(i), words(asked, p.spec), one.why, duration(p.step_time_s), f"{p.mfu:.1%}", memory(p))
        console.print(found)
        say(f"{search.fitting} of {search.considered} strategies fit.")
    elif search.nearest is not None:
        nearest = f"{words(asked, search.nearest.spec)}. It {fits(search.nearest)}."
        say(f"None of {search.considered} strategies fits. Nearest: {nearest}")
    else:
        say(f"{asked.strategy.backend} has no strategy to choose from here.")


def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("id", "tokens/s/GPU", "TFLOPS/GPU", "memory", "assumed, or why not"):
        found.add_column(name, justify="left" if name in ("id", "assumed, or why not") else "right")
    for row in rows:
        if "error" in row:
            found.add_row(row["id"], "–", "–", "–", Text(row["error"]))
        else:
            peak = "–" if row.get("peak_mem") is None else f"{row['peak_mem']:.1f}"
            found.add_row(row["id"], count(row["tokens_per_s_per_gpu"]), f"{row['tflops_per_gpu']:.0f}", peak,
                          Text(", ".join(row["assumed"])))  # fmt: skip
    session.console().print(found)


def say(text: str) -> None:
    session.console().print(text, markup=False, highlight=False, soft_wrap=True)


# -- parts -----------------------------------------------------------------------------------------------------------


def whole(plan: Plan) -> list[Text | Table]:
    """What is planned, whether it fits, where memory and time go, and what was assumed."""
    s, w, m = plan.spec.strategy, plan.spec.workload, plan.machine
    network = f" at {m.network_bytes_per_s * 8 / 1e9:,.0f} Gb/s a host" if m.hosts > 1 else ""
    head = (
        f"{w.model}, {plan.shape.parameters / 1e9:.2f} billion parameters, {s.backend} {s.sharding}, {s.precision}, on "
        f"{m.ranks:,} x {m.device.name} in {m.hosts:,} host{'s' * (m.hosts > 1)}{network}"
    )
    speed = (
        f"step {duration(plan.step_time_s)}, {count(plan.tokens_per_s)} tokens/s, "
        f"{plan.flops_per_s / 1e12:.0f} TFLOPS a GPU, MFU {plan.mfu:.1%}, HFU {plan.hfu:.1%}; bound by {plan.binding}"
    )
    lines: list[Text | Table] = [
        Text(head, style="bold"),
        Text(f"It {fits(plan)}."),
        Text(speed),
        times(plan),
        classes(plan),
    ]
    if plan.assumed:
        lines.append(
            Text("assumed: " + "; ".join(f"{name} {value}" for name, value in plan.assumed.items()), style="dim")
        )
    return lines


def times(plan: Plan) -> Table:
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("computing", "exposed communication", "optimizer", *plan.comm_s):
        found.add_column(name.replace("_", " "), justify="right")
    sent = [f"{duration(plan.comm_s[kind])}, {size(plan.link_bytes[kind])}" for kind in plan.comm_s]
    step = plan.step
    found.add_row(duration(step.computing_s), duration(step.exposed_comm_s), duration(step.optimizer_s), *sent)
    return found


def classes(plan: Plan) -> Table:
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    kinds = [role for role in Role if plan.memory.at_peak.of_role(role)]
    for name in (*(role.value for role in kinds), "peak", "reserved"):
        found.add_column(name, justify="right")
    peak = plan.memory.at_peak
    found.add_row(
        *(size(peak.of_role(role)) for role in kinds), size(plan.memory.peak_bytes), size(plan.memory.reserved_bytes)
    )
    return found


def table(plans: Sequence[Plan]) -> Table:
    """A row a plan: what sets it apart, and its figures."""
    flat = [p.spec.flat() for p in plans]
    differing = [name for name in flat[0] if any(one[name] != flat[0][name] for one in flat)]
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in differing:
        found.add_column({"world_size": "ranks"}.get(name, name).replace("_", " "))
    for name in ("fits", "memory", "step", "tokens/s", "TFLOPS", "MFU", "exposed", "bound by"):
        found.add_column(name, justify="right")
    for p, one in zip(plans, flat, strict=True):
        found.add_row(*(str(one[name]) for name in differing), *figures(p))
    return found


def scaling(plans: Sequence[Plan]) -> Table:
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("ranks", "fits", "memory", "step", "tokens/s", "TFLOPS", "MFU", "exposed", "bound by"):
        found.add_column(name, justify="right")
    for p in plans:
        found.add_row(f"{p.machine.ranks:,}", *figures(p))
    return found


def figures(p: Plan) -> list[str]:
    return [
        "yes" if p.fits else "no", memory(p), duration(p.step_time_s), count(p.tokens_per_s), f"{p.flops_per_s / 1e12:.0f}",
        f"{p.mfu:.1%}", f"{p.exposed_share:.0%}", p.binding,
    ]  # fmt: skip


def memory(p: Plan) -> str:
    return size(p.memory.reserved_bytes)


def fits(p: Plan) -> str:
    words, limit = size(p.memory.reserved_bytes), size(p.machine.device.memory_bytes)
    if p.fits:
        return f"fits: {words} of {limit}, {size(p.margin_bytes)} to spare"
    return f"does not fit: {words} of {limit}, {size(-p.margin_bytes)} too much"


def words(asked: Spec, found: Spec) -> str:
    """What was chosen, where it is not what a Spec has by itself."""
    changed = {**Spec(world_size=found.world_size).difference(found), **asked.difference(found)}
    names = ("sharding", "shard_size", "recompute", "offload", "micro_batch", "accumulate", "forward_prefetch")
    told = [f"{name.replace('_', ' ')} {changed[name][1]}" for name in names if name in changed and name != "sharding"]
    return ", ".join([found.strategy.sharding, *(one for one in told if "None" not in one)])


def largest(shape: ModelShape | None, spec: Spec, where: Where) -> str:
    there = f"{spec.world_size:,} x {where.machine(spec.world_size).device.name}"
    if shape is None:
        return f"Not even one block of {spec.workload.model} fits on {there}."
    billions = f"{shape.parameters / 1e9:.1f} billion parameters"
    return f"{there} hold {len(shape.units) - 1:,} blocks of {spec.workload.model}, {billions}."


def fewest(there: Machine | None, spec: Spec, where: Where) -> str:
    name = where.machine(spec.world_size).device.name
    if there is None:
        batch = f"a global batch of {spec.global_batch:,}"
        return f"{spec.workload.model} does not fit on any number of {name} that divides {batch}."
    return f"{spec.workload.model} fits on {there.ranks:,} x {name} in {there.hosts:,} host{'s' * (there.hosts > 1)}."
