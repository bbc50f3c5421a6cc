"""`fsdp-lab plan`: predicts memory and step time of a Spec on any hardware.

Options are the fields of Workload and Strategy, as for `compare`, and the hardware. Besides plans: searches (`--find`),
all rows of a CSV file (`--batch`), and the errors of predictions against published measurements (`--validate`).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.cli import fields
from fsdp_lab.cli.console import Refused, say, say_json
from fsdp_lab.core.errors import ArgumentError, FieldError
from fsdp_lab.core.formatting import Table, count
from fsdp_lab.core.spec import Spec

if TYPE_CHECKING:
    from fsdp_lab.core.model_shape import ModelShape
    from fsdp_lab.planner.devices import Machine
    from fsdp_lab.planner.plan import Plan
    from fsdp_lab.planner.questions import Target

GIB = 1 << 30
FINDS = ("strategy", "largest", "fewest")
POINT = ("ranks", "fits", "step_time_s", "tokens_per_s", "tflops_per_rank", "mfu", "exposed_comm_s", "binding")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    where.add_argument("--hardware", metavar="NAME", help="a GPU: a100-80, h100, h200, v100, t4, ...")
    where.add_argument("--ranks", default="8", metavar="N,N", help="GPUs, one rank each (default: %(default)s)")
    where.add_argument("--hosts", type=int, metavar="N", help="number of hosts (default: 8 GPUs per host)")
    where.add_argument(
        "--network", type=float, metavar="GB", help="network bandwidth of a host, Gb/s (default: typical for the GPU)"
    )
    where.add_argument("--memory", type=float, metavar="GIB", help="memory limit per GPU")
    what = parser.add_argument_group("what")
    what.add_argument(
        "--global-batch", type=int, metavar="N", help="samples per step; sets the number of micro-batches"
    )
    what.add_argument("--find", choices=FINDS, help="the fastest strategies that fit; the largest model that fits; the "
                      "fewest GPUs that hold it")  # fmt: skip
    what.add_argument("--batch", type=Path, metavar="FILE", help="predict every row of a CSV file")
    what.add_argument("--validate", action="store_true", help="hold predictions against published measurements that they "
                      "were not calibrated on; takes minutes")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    fields.add_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.validate:
        return validate(args)
    if args.batch is not None:
        return batch(args)
    if args.hardware is None:
        raise Refused("no hardware is named; give --hardware a100-80, h100, h200, ... (or --batch, --validate)")
    from fsdp_lab.planner.questions import Target, curve, planned

    where = Target(hardware=args.hardware, hosts=args.hosts, network_gbit_per_s=args.network)
    specs, refused = wanted(args, where)
    if args.find is not None:
        if len(specs) + len(refused) > 1:
            raise Refused(f"--find {args.find} takes one value of each option; give no lists")
        return find(args, specs[0], where)
    limit_bytes = limit(args)
    plans = [limited(planned(spec, where), limit_bytes) for spec in specs]
    along, binds = curve(specs[0], where) if len(specs) + len(refused) == 1 else ([], "")
    if args.json:
        scaling = {"scaling": [point(p) for p in along], "limit": binds} if along else {}
        say_json({"plans": [p.to_dict() for p in plans], "refused": refused, **scaling})
        return 0
    show_plans(plans, along, binds)
    for one in refused:
        say(f"refused: {one['reason']}")
    return 0


def wanted(args: argparse.Namespace, where: Target) -> tuple[list[Spec], list[dict[str, Any]]]:
    """The product of the lists: valid Specs, and the others with reasons. Raises Refused; FieldError if none is valid."""
    if args.link is not None:
        raise Refused("--link emulates a network while training; a plan's is --network, in Gb/s of a host")
    specs, refused, reasons = list[Spec](), list[dict[str, Any]](), list[FieldError]()
    for made in fields.product(Spec(), fields.chosen(args), fields.whole_numbers("--ranks", args.ranks)):
        try:
            spec = with_batch(Spec.from_dict(on_hosts(made, where)), args.global_batch)
            where.machine(spec.world_size)
            specs.append(spec)
        except FieldError as e:
            refused.append({"spec": made, "reason": str(e)})
            reasons.append(e)
    if not specs:
        raise reasons[0]
    return specs, refused


def on_hosts(made: dict[str, Any], where: Target) -> dict[str, Any]:
    """A Spec's dict; hybrid sharding without a shard size gets that of a host."""
    strategy, ranks = made["strategy"], made["world_size"]
    if strategy["sharding"].startswith("hybrid") and strategy["shard_size"] is None:
        per_host = where.machine(ranks).per_host
        if 1 < per_host < ranks:
            return {**made, "strategy": {**strategy, "shard_size": per_host}}
    return made


def with_batch(spec: Spec, samples: int | None) -> Spec:
    """The Spec with the number of micro-batches that makes this global batch. Raises ArgumentError."""
    if samples is None:
        return spec
    once = spec.workload.micro_batch * spec.world_size
    if samples < once or samples % once:
        nearest = max(1, round(samples / once)) * once
        raise ArgumentError("global_batch", f"{samples} samples are no multiple of micro_batch x ranks, {once}",
                        f"use {nearest}, or a smaller micro_batch")  # fmt: skip
    return spec.replace(accumulate=samples // once)


def limit(args: argparse.Namespace) -> int | None:
    """`--memory` in bytes. Raises Refused."""
    if args.memory is None:
        return None
    if not 0 < args.memory < 1e6:
        raise Refused(f"--memory {args.memory:g} is refused; give the GiB of a GPU that may be used, such as 70")
    return int(args.memory * GIB)


def limited(plan: Plan, limit_bytes: int | None) -> Plan:
    return plan if limit_bytes is None else plan.within(limit_bytes)


def find(args: argparse.Namespace, spec: Spec, where: Target) -> int:
    """Runs one of the searches. Returns 0, or 1 if nothing fits."""
    from fsdp_lab.planner.questions import fewest_ranks, largest_model, searched

    limit_bytes, device = limit(args), where.machine(spec.world_size).device.name
    if args.find == "largest":
        shape = largest_model(spec, where, limit_bytes=limit_bytes)
        found = None if shape is None else {"blocks": len(shape.units) - 1, "parameters": shape.parameters}
        say_json({"largest": found}) if args.json else say(largest_text(shape, spec, device))
        return 0 if shape else 1
    if args.find == "fewest":
        there = fewest_ranks(spec, where, limit_bytes=limit_bytes)
        found = None if there is None else {"ranks": there.ranks, "hosts": there.hosts}
        say_json({"fewest": found}) if args.json else say(fewest_text(there, spec, device))
        return 0 if there else 1
    search = searched(spec, where, limit_bytes=limit_bytes)
    if args.json:
        top = [{"why": one.why, **one.plan.to_dict()} for one in search.top]
        nearest = None if search.nearest is None else search.nearest.to_dict()
        say_json({"top": top, "considered": search.considered, "fitting": search.fitting, "nearest": nearest})
    else:
        say(repr(search))
    return 0 if search.top else 1


def batch(args: argparse.Namespace) -> int:
    """Predicts every row of a CSV file, in its order. As JSON: {"rows": [...]}."""
    from fsdp_lab.planner.questions import predict

    rows = predict(read_rows(args.batch))
    if args.json:
        say_json({"rows": rows})
    else:
        say(repr(rows_table(rows)))
    return 0


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header. Raises Refused."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened)
            rows = [
                {k: v or "" for k, v in row.items() if isinstance(k, str) and not isinstance(v, list)} for row in reader
            ]
    except OSError as e:
        raise Refused(f"cannot read {file} ({e.strerror}); give the path of a CSV file") from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise Refused(f"{file} is no CSV ({e}); give a table with a header, as of fsdp_measurements.csv") from e
    columns = set(reader.fieldnames or ())
    if not columns & {"model", "n_layers"}:
        raise Refused(f"{file} has no column model or n_layers; its first line is to name the columns")
    return rows


def validate(args: argparse.Namespace) -> int:
    """Compares predictions with published measurements: step times, each fitted without its own source, and peak memory."""
    from fsdp_lab.planner import validate as against

    rows = against.published()
    found, (peaks, _) = against.validate(rows), against.memory_rows(rows)
    if args.json:
        say_json({**found.to_dict(), "memory": [peak.to_dict() for peak in peaks]})
    else:
        say("\n".join([*found.lines(), "", "Peak memory:", *against.memory_lines(peaks)]))
    return 0


def point(plan: Plan) -> dict[str, Any]:
    """One point of a scaling curve."""
    d = plan.to_dict()
    return {name: d[name] for name in POINT}


# -- text ----------------------------------------------------------------------------------------------------------


def show_plans(plans: Sequence[Plan], along: Sequence[Plan], binds: str) -> None:
    """Prints one plan in full with its scaling curve, or several as a table."""
    from fsdp_lab.planner.plan import memory_table, plan_table, sentences, time_table

    if len(plans) > 1 or not along:
        say(repr(plan_table(plans)))
        return
    (plan,) = plans
    tables = (time_table(plan), memory_table(plan), plan_table(along))
    say("\n".join([*sentences(plan), *(f"\n{table!r}" for table in tables), "", f"{binds[0].upper()}{binds[1:]}."]))


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Predictions of `--batch`; a dash for what is not predicted."""
    last = "assumed, or why not"
    cells = []
    for row in rows:
        speed, peak, why = ("–", "–"), "–", row.get("error")
        if why is None:
            speed = (count(row["tokens_per_s_per_gpu"]), f"{row['tflops_per_gpu']:.0f}")
            peak = "–" if row["peak_mem"] is None else f"{row['peak_mem']:.1f}"
            why = ", ".join(row["assumed"])
        cells.append((row["id"], *speed, peak, why))
    columns = ("id", "tokens/s/GPU", "TFLOPS/GPU", "memory", last)
    return Table(columns=columns, rows=tuple(cells), left=frozenset({"id", last}))


def largest_text(shape: ModelShape | None, spec: Spec, device: str) -> str:
    from fsdp_lab.planner.plan import parameter_count

    gpus, model = f"{spec.world_size:,} x {device}", spec.workload.model
    if shape is None:
        return f"Not even one block of {model} fits on {gpus}."
    return f"{gpus} hold {len(shape.units) - 1:,} blocks of {model}: {parameter_count(shape.parameters)}."


def fewest_text(machine: Machine | None, spec: Spec, device: str) -> str:
    model = spec.workload.model
    if machine is None:
        batch = f"a global batch of {spec.global_batch:,}"
        return f"{model} does not fit on any number of {device} that divides {batch}."
    return f"{model} fits on {machine.ranks:,} x {device} in {machine.hosts:,} host{'s' * (machine.hosts > 1)}."
