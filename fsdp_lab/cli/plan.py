"""`fsdp-lab plan`: predicts memory and step time of a Spec on any hardware; searches (`--find`); and a page with the answer
to each combination of lists (`--page`)."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.files import check_file
from fsdp_lab.base.formatting import plural, size
from fsdp_lab.bench.plan import option
from fsdp_lab.cli import fields
from fsdp_lab.cli.console import Refused, memory_limit, say, say_json, terminal
from fsdp_lab.spec.describe import field_title
from fsdp_lab.spec.fields import rows_of
from fsdp_lab.spec.spec import PARTS, Spec
from fsdp_lab.spec.user_code import is_code

if TYPE_CHECKING:
    from fsdp_lab.planner.plan import Plan
    from fsdp_lab.planner.questions import Target
    from fsdp_lab.report.what_if_page import Axis, Product

SEARCHES = ("strategy", "largest", "fewest")
POINT = ("ranks", "fits", "step_time_s", "tokens_per_s", "tflops_per_rank", "mfu", "exposed_comm_s", "binding")
PAGE = "write an HTML page that answers every combination of the lists; without lists, those of a set for teaching"
# The options of a page for which none is given.
TEACHING = {
    "model": "llama-125m,llama-1b,llama-7b,llama-13b,llama-70b,llama-405b",
    "hardware": "l40s,a100-80,h100,h200,b200",
    "ranks": "1,2,4,8,16,32,64,128,256,512,1024",
    "sharding": "full_shard,shard_grad_op,hybrid_shard,no_shard",
    "recompute": "none,full",
    "micro_batch": "1,2,8",
    "seq_len": "2048",
    "precision": "bf16",
}
TAUGHT_FIRST = {"model": "llama-7b", "hardware": "h100", "world_size": 64}
OF_ALL = ("hosts", "network", "memory", "global_batch")  # options with one value for the whole page
AXES = ("hardware", "ranks", "link", *(name for kind in PARTS.values() for name in rows_of(kind)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("where").add_argument
    add("--hardware", metavar="NAME", help="a GPU: a100-80, h100, h200, v100, t4, ...; several with commas for --page")
    add("--ranks", metavar="N,N", help="GPUs, one rank each (default: 8)")
    add("--hosts", type=int, metavar="N", help="number of hosts (default: 8 GPUs per host)")
    network = "network bandwidth of a host, Gb/s (default: typical for the GPU)"
    add("--network", type=float, metavar="GB", help=network)
    add("--memory", type=float, metavar="GIB", help="memory limit per GPU")
    add = parser.add_argument_group("what").add_argument
    add("--global-batch", type=int, metavar="N", help="samples per step; sets the number of micro-batches")
    searches = (
        "the fastest strategies that fit; the largest preset of the family that fits; the fewest GPUs that hold it"
    )
    add("--find", choices=SEARCHES, help=searches)
    add("--page", type=Path, metavar="FILE", help=PAGE)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    fields.add_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.page is not None:
        return write_page(args)
    check_options(args)
    if "," in args.hardware:
        raise Refused(f"--hardware {args.hardware} is a list, which only --page takes; name one GPU")
    from fsdp_lab.planner.questions import Target, curve, planned

    target = Target(hardware=args.hardware, hosts=args.hosts, network_gbit_per_s=args.network)
    specs, refused = fields.requested(args, partial(spec_of, args, target))
    if not specs:
        raise refused[0][1]
    if args.find is not None:
        if len(specs) + len(refused) > 1:
            raise Refused(f"--find {args.find} takes one value of each option; give no lists")
        return find(args, specs[0], target)
    limit_bytes = memory_limit(args)
    plans = [planned(spec, target) for spec in specs]
    if limit_bytes is not None:
        plans = [plan.within(limit_bytes) for plan in plans]
    scaling, bottleneck = curve(specs[0], target) if len(specs) + len(refused) == 1 else ([], "")
    if args.json:
        points = [{name: whole[name] for name in POINT} for whole in (p.to_dict() for p in scaling)]
        curve_json = {"scaling": points, "limit": bottleneck} if scaling else {}
        reasons = [{"spec": combination, "reason": str(error)} for combination, error in refused]
        say_json({"plans": [p.to_dict() for p in plans], "refused": reasons, **curve_json})
        return 0
    show_plans(plans, scaling, bottleneck)
    for _, error in refused:
        say(f"refused: {error}")
    return 0


def spec_of(args: argparse.Namespace, target: Target, combination: dict[str, Any]) -> Spec:
    """The Spec of a combination on the hardware of the options, with their global batch. Raises FieldError."""
    from fsdp_lab.planner.questions import on_hosts

    spec, samples = on_hosts(Spec.from_dict(combination), target), args.global_batch
    per_host = target.machine(spec.world_size).per_host
    if spec.strategy.is_hybrid and spec.strategy.shard_size is None and 1 < per_host < spec.world_size:
        spec.replace(shard_size=per_host)  # raises: it does not divide the ranks
    if samples is None:
        return spec
    once = spec.workload.micro_batch * spec.world_size
    if samples < once or samples % once:
        reason = f"{samples} samples are no multiple of micro_batch x ranks, {once}"
        hint = f"use {max(1, round(samples / once)) * once}, or a smaller micro_batch"
        raise ArgumentError("global_batch", reason, hint)
    return spec.replace(accumulate=samples // once)


def answer(args: argparse.Namespace, limit_bytes: int | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as a dict, for flat fields of a Spec and `hardware`. Raises FieldError."""
    from fsdp_lab.planner.questions import Target, planned

    target = Target(hardware=values["hardware"], hosts=args.hosts, network_gbit_per_s=args.network)
    asked = fields.with_values({name: value for name, value in values.items() if name != "hardware"})
    spec = spec_of(args, target, asked)
    plan = planned(spec, target)
    plan = plan if limit_bytes is None else plan.within(limit_bytes)
    if spec.strategy.shard_size == asked["strategy"]["shard_size"]:
        return plan.to_dict()
    assumed = {**plan.assumed, "shard size": f"{spec.strategy.shard_size}, the GPUs of a host"}
    return {**plan.to_dict(), "assumed": assumed}


def find(args: argparse.Namespace, spec: Spec, target: Target) -> int:
    """Runs one of the searches. Returns 0, or 1 if nothing fits."""
    from fsdp_lab.planner.plan import parameter_count
    from fsdp_lab.planner.questions import fewest_ranks, largest_model, searched

    limit_bytes, device = memory_limit(args), target.machine(spec.world_size).device.name
    model, result = spec.workload.model, dict[str, Any]()
    if args.find == "largest":
        gpus = f"{spec.world_size:,} x {device}"
        text = f"No preset of {model}'s family fits on {gpus}."
        if (shape := largest_model(spec, target, limit_bytes=limit_bytes)) is not None:
            result = {"model": shape.name, "blocks": len(shape.units) - 1, "parameters": shape.parameters}
            text = f"{gpus} hold {shape.name}: {parameter_count(shape.parameters)}."
    if args.find == "fewest":
        text = f"{model} does not fit on any number of {device} that divides a global batch of {spec.global_batch:,}."
        if (machine := fewest_ranks(spec, target, limit_bytes=limit_bytes)) is not None:
            result = {"ranks": machine.ranks, "hosts": machine.hosts}
            text = f"{model} fits on {machine.ranks:,} x {device} in {plural(machine.hosts, 'host')}."
    if args.find != "strategy":
        say_json({args.find: result or None}) if args.json else say(text)
        return 0 if result else 1
    search = searched(spec, target, limit_bytes=limit_bytes)
    if args.json:
        top = [{"why": one.why, "is_apart": one.is_apart, **one.plan.to_dict()} for one in search.top]
        nearest = None if search.nearest is None else search.nearest.to_dict()
        say_json({"top": top, "considered": search.considered, "fitting": search.fitting, "nearest": nearest})
    else:
        say(repr(search))
    return 0 if search.top else 1


def show_plans(plans: Sequence[Plan], scaling: Sequence[Plan], bottleneck: str) -> None:
    """Prints one plan in full with its scaling curve, or several as a table."""
    from fsdp_lab.planner.plan import memory_table, plan_table, sentences, time_table

    if len(plans) > 1 or not scaling:
        say(repr(plan_table(plans)))
        return
    (plan,) = plans
    tables = (time_table(plan), memory_table(plan), plan_table(scaling))
    end = f"{bottleneck[0].upper()}{bottleneck[1:]}."
    say("\n".join([*sentences(plan), *(f"\n{table!r}" for table in tables), "", end]))


def write_page(args: argparse.Namespace) -> int:
    """Writes the page. Raises Refused and FieldError before anything is predicted."""
    limit_bytes = memory_limit(args)
    from fsdp_lab.report import SUFFIXES
    from fsdp_lab.report.what_if_page import write_what_if

    check_file(args.page, SUFFIXES, field="--page")
    product, predict = product_of(args), partial(answer, args, limit_bytes)
    with terminal().status("predicting") as status:
        show = lambda done: status.update(f"predicting: {done:,} of {product.combinations:,}")  # noqa: E731
        file = write_what_if(args.page, product, predict, progress=show)
    say(f"written: {file}, {product.combinations:,} combinations, {size(file.stat().st_size)}")
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Completes `--ranks`. Raises Refused without hardware, and for an option that no plan takes."""
    if args.hardware is None:
        raise Refused("no hardware is named; give --hardware a100-80, h100, h200, ...")
    if args.link is not None:
        raise Refused("--link emulates a network while training; a plan's is --network, in Gb/s of a host")
    args.ranks = args.ranks or "8"


def product_of(args: argparse.Namespace) -> Product:
    """The axes of the options, or of `TEACHING`; completes `args` with the latter. Raises Refused, FieldError."""
    from fsdp_lab.report.what_if_page import Product

    if others := [name for name in ("find", "json") if getattr(args, name)]:
        raise Refused(f"--page and --{others[0]} are different results; give one of them")
    given = text_of(args, (*AXES, *OF_ALL))
    is_taught = not any(getattr(args, name) is not None for name in AXES)
    if is_taught:
        vars(args).update(TEACHING)
    check_options(args)
    return Product(
        axes=axes_of(args),
        options=" ".join(text_of(args, OF_ALL)),
        command=" ".join(["fsdp-lab plan --page", shlex.quote(args.page.name), *given]),
        start=TAUGHT_FIRST if is_taught else None,
    )


def text_of(args: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """The options of these names that are given, as on the command line."""
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return [f"{option(name)} {shlex.quote(str(value))}" for name, value in given.items()]


def axes_of(args: argparse.Namespace) -> list[Axis]:
    """The model, the hardware and the ranks, then the other fields that are given. Raises Refused and FieldError."""
    from fsdp_lab.models.check import model_facts
    from fsdp_lab.planner.devices import device

    lists = fields.parse_lists(args)
    models = lists.pop("model", [Spec().workload.model])
    for model in models:
        if not is_code(model):
            model_facts(model)
    hardware = [device(word).name for word in args.hardware.split(",")]
    return [
        axis("model", models),
        axis("hardware", hardware),
        axis("world_size", fields.parse_whole_numbers("--ranks", args.ranks), label="ranks", named="--ranks"),
        *(axis(name, values) for name, values in lists.items()),
    ]


def axis(name: str, values: list[Any], *, label: str = "", named: str = "") -> Axis:
    """Repeated values count once."""
    from fsdp_lab.report.what_if_page import Axis

    unique = tuple(value for i, value in enumerate(values) if value not in values[:i])
    words = tuple(shlex.quote(fields.format_value(name, value)) for value in unique)
    return Axis(name=name, label=label or field_title(name), option=named or option(name), values=unique, words=words)
