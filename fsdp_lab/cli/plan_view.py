"""Plans in a terminal: one in full, or several as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_lab.cli.history import say
from fsdp_lab.core.formatting import Table, count
from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.devices import Machine
from fsdp_lab.planner.plan import Plan, memory_table, parameter_count, plan_table, sentences, time_table


def show(plans: Sequence[Plan], along: Sequence[Plan], binds: str) -> None:
    """One plan with its scaling curve, or a table."""
    if len(plans) > 1 or not along:
        say(repr(plan_table(plans)))
        return
    (plan,) = plans
    tables = (time_table(plan), memory_table(plan), plan_table(along))
    say("\n".join([*sentences(plan), *(f"\n{table!r}" for table in tables), "", f"{binds[0].upper()}{binds[1:]}."]))


def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Of a table that was filled in."""
    cells = tuple(_filled(row) for row in rows)
    last = "assumed, or why not"
    columns = ("id", "tokens/s/GPU", "TFLOPS/GPU", "memory", last)
    say(repr(Table(columns=columns, rows=cells, left=frozenset({"id", last}))))


def _filled(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (row["id"], "–", "–", "–", row["error"])
    peak = "–" if row["peak_mem"] is None else f"{row['peak_mem']:.1f}"
    speed = (count(row["tokens_per_s_per_gpu"]), f"{row['tflops_per_gpu']:.0f}")
    return (row["id"], *speed, peak, ", ".join(row["assumed"]))


def largest(shape: ModelShape | None, spec: Spec, device: str) -> str:
    there = f"{spec.world_size:,} x {device}"
    if shape is None:
        return f"Not even one block of {spec.workload.model} fits on {there}."
    return (
        f"{there} hold {len(shape.units) - 1:,} blocks of {spec.workload.model}: {parameter_count(shape.parameters)}."
    )


def fewest(there: Machine | None, spec: Spec, device: str) -> str:
    if there is None:
        batch = f"a global batch of {spec.global_batch:,}"
        return f"{spec.workload.model} does not fit on any number of {device} that divides {batch}."
    return f"{spec.workload.model} fits on {there.ranks:,} x {device} in {there.hosts:,} host{'s' * (there.hosts > 1)}."
