"""`fsdp-lab plan`: predicts memory, step time and cost of a Spec on any hardware; searches (`--find`); and a page with the
answer to each combination of lists (`--page`)."""

from __future__ import annotations

import argparse
import math
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
from fsdp_lab.planner.devices import DEVICES, device, device_table
from fsdp_lab.spec.describe import field_title, written
from fsdp_lab.spec.fields import FieldRow, rows_of
from fsdp_lab.spec.spec import PARTS, Spec
from fsdp_lab.spec.user_code import is_code

if TYPE_CHECKING:
    from fsdp_lab.planner.plan import Plan
    from fsdp_lab.planner.questions import Target
    from fsdp_lab.report.what_if_page import Axis, Product

SEARCHES = ("strategy", "largest", "fewest", "cheapest")
ANY_RANKS = SEARCHES[2:]  # they say how many
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
BILL = ("price", "tokens")  # beginnings of what can be changed on it
AXES = ("hardware", "ranks", "link", *(name for kind in PARTS.values() for name in rows_of(kind)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("where").add_argument
    own = "or figures of your own, TFLOPS/GIB/TBS[/GBS]: dense in bf16, usable memory, its TB/s, and NVLink's GB/s, one way"
    names = f"a GPU: {', '.join(DEVICES)}; list: their figures; {own}. --page and --find cheapest take several"
    add("--hardware", metavar="NAME", help=names)
    add("--ranks", metavar="N,N", help="GPUs, one rank each (default: 8)")
    add("--hosts", type=int, metavar="N", help="number of hosts (default: 8 GPUs per host)")
    network = "of all network cards of a host together, gigabits a second, one way (default: typical for the GPU)"
    add("--network", type=float, metavar="GBIT", help=network)
    add("--memory", type=float, metavar="GIB", help="memory limit per GPU")
    add = parser.add_argument_group("a whole training: its time, GPU hours and cost").add_argument
    add("--tokens", metavar="N", help="tokens to train, such as 15B (default, with --price: 1B)")
    add("--price", metavar="P,P", help="of an hour of one GPU, in any currency; one for all of --hardware, or for each")
    add("--days", type=float, metavar="DAYS", help="with --find cheapest: the longest time that it may take")
    add = parser.add_argument_group("what").add_argument
    add("--global-batch", type=int, metavar="N", help="samples per step; sets the number of micro-batches")
    searches = (
        "the fastest strategies that fit; the largest preset of the model's family that fits; the fewest GPUs that hold it; "
        "the cheapest GPUs and their number. Without --global-batch the last two give each GPU the same work"
    )
    add("--find", choices=SEARCHES, help=searches)
    add("--page", type=Path, metavar="FILE", help=PAGE)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    fields.add_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.page is not None:
        return write_page(args)
    if args.hardware == "list":
        say(repr(device_table()))
        return 0
    check_options(args)
    from fsdp_lab.planner.questions import curve, planned

    target, *others = targets_of(args).values()
    if args.find == "cheapest":
        return find_cheapest(args, [target, *others])
    if others:
        raise Refused(f"--hardware {args.hardware} is a list, which --page and --find cheapest take; name one GPU")
    specs, refused = fields.requested(args, partial(spec_of, args, target))
    if not specs:
        raise refused[0][1]
    if args.find is not None:
        if len(specs) + len(refused) > 1:
            raise Refused(f"--find {args.find} takes one value of each option; give no lists")
        return find(args, specs[0], target)
    plans = [planned(spec, target).within(memory_limit(args)) for spec in specs]
    scaling, bottleneck = curve(specs[0], target) if len(specs) + len(refused) == 1 else ([], "")
    if args.json:
        points = [{name: whole[name] for name in POINT} for whole in (p.to_dict() for p in scaling)]
        curve_json = {"scaling": points, "limit": bottleneck} if scaling else {}
        why = [{"spec": combination, "reason": str(error)} for combination, error in refused]
        say_json({"plans": [p.to_dict() for p in plans], "refused": why, **curve_json})
        return 0
    reasons = [f"refused: {error.words}" for _, error in refused]
    say("\n".join([plans_text(plans, scaling, bottleneck), *reasons, *bill_notes(args, plans)]))
    return 0


def spec_of(args: argparse.Namespace, target: Target, combination: dict[str, Any]) -> Spec:
    """The Spec of a combination on the hardware of the options, with their global batch. Raises FieldError."""
    from fsdp_lab.planner.questions import on_hosts

    spec, samples = on_hosts(Spec.from_dict(combination), target), args.global_batch
    per_host = target.machine(spec.world_size).per_host
    if spec.strategy.is_hybrid and spec.strategy.shard_size is None and 1 < per_host < spec.world_size:
        spec.replace(shard_size=per_host)  # raises: it does not divide the ranks
    if samples is None or args.find in ANY_RANKS:
        return spec
    once = spec.workload.micro_batch * spec.world_size
    if samples < once or samples % once:
        reason = f"{samples} samples are no multiple of micro_batch x ranks, {once}"
        hint = f"use {max(1, round(samples / once)) * once}, or a smaller micro_batch"
        raise ArgumentError("global_batch", reason, hint)
    return spec.replace(accumulate=samples // once)


def answer(args: argparse.Namespace, targets: Mapping[str, Target], values: Mapping[str, Any]) -> dict[str, Any]:
    """A plan as a dict, for flat fields of a Spec and `hardware`. Raises FieldError."""
    from fsdp_lab.planner.questions import planned

    target = targets[values["hardware"]]
    asked = fields.with_values({name: value for name, value in values.items() if name != "hardware"})
    spec = spec_of(args, target, asked)
    plan = planned(spec, target).within(memory_limit(args))
    if spec.strategy.shard_size == asked["strategy"]["shard_size"]:
        return plan.to_dict()
    assumed = {**plan.assumed, "shard size": f"{spec.strategy.shard_size}, the GPUs of a host"}
    return {**plan.to_dict(), "assumed": assumed}


def find(args: argparse.Namespace, spec: Spec, target: Target) -> int:
    """Runs one of the searches. Returns 0, or 1 if nothing fits."""
    from fsdp_lab.planner.plan import parameter_count
    from fsdp_lab.planner.questions import fewest_ranks, largest_model, searched
    from fsdp_lab.planner.search import MOST_RANKS

    limit_bytes, device = memory_limit(args), target.machine(spec.world_size).device.name
    model, result = spec.workload.model, dict[str, Any]()
    if args.find == "largest":
        if args.model is None:
            raise Refused("--find largest needs a family; name one of its presets with --model, such as llama-7b")
        gpus = f"{spec.world_size:,} x {device}"
        text = f"No preset of {model}'s family fits on {gpus}."
        if (shape := largest_model(spec, target, limit_bytes=limit_bytes)) is not None:
            result = {"model": shape.name, "blocks": len(shape.units) - 1, "parameters": shape.parameters}
            text = f"{gpus} hold {shape.name}: {parameter_count(shape.parameters)}."
    if args.find == "fewest":
        batch = args.global_batch
        divides = "; give a larger --global-batch" if batch is not None else ""
        text = f"{model} does not fit on {MOST_RANKS:,} x {device} or fewer{divides}."
        if (machine := fewest_ranks(spec, target, global_batch=batch, limit_bytes=limit_bytes)) is not None:
            samples = batch or spec.rank_samples * machine.ranks
            result = {"ranks": machine.ranks, "hosts": machine.hosts, "global_batch": samples}
            where = f"{machine.ranks:,} x {device} in {plural(machine.hosts, 'host')}"
            text = f"{model} fits on {where}, with a global batch of {samples:,}."
    if args.find != "strategy":
        say_json({args.find: result or None}) if args.json else say(text)
        return 0 if result else 1
    search = searched(spec, target, limit_bytes=limit_bytes)
    if args.json:
        top = [{"why": one.why, "is_apart": one.is_apart, **one.plan.to_dict()} for one in search.top]
        nearest = None if search.nearest is None else search.nearest.to_dict()
        say_json({"top": top, "considered": search.considered, "fitting": search.fitting, "nearest": nearest})
    else:
        say("\n".join([repr(search), *bill_notes(args, [one.plan for one in search.top])]))
    return 0 if search.top else 1


def find_cheapest(args: argparse.Namespace, targets: Sequence[Target]) -> int:
    """Says on which GPUs, and how many, the training is cheapest. Returns 0, or 1 if none fits or is quick enough."""
    from fsdp_lab.planner.questions import CURVE, cheapest
    from fsdp_lab.planner.search import cheapest_table

    if len(targets) > 1 and args.price is None:
        raise Refused("GPUs are compared by what they cost; give --price one for each, such as --price 2.49,1.29")
    ranks = CURVE[:11] if args.ranks is None else fields.parse_whole_numbers("--ranks", args.ranks)
    args.ranks = str(max(ranks))
    limit_bytes = memory_limit(args)
    specs, refused = fields.requested(args, partial(spec_of, args, targets[0]))
    if len(specs) + len(refused) > 1:
        raise Refused("--find cheapest takes one value of each option but --hardware, --price and --ranks")
    if refused:
        raise refused[0][1]
    limit_s = math.inf if args.days is None else 86_400 * args.days
    with terminal().status("predicting"):
        batch = args.global_batch
        plans = cheapest(specs[0], targets, ranks=ranks, global_batch=batch, limit_bytes=limit_bytes, limit_s=limit_s)
    if args.json:
        say_json({"cheapest": [p.to_dict() for p in plans]})
    elif plans:
        say("\n".join([repr(cheapest_table(specs[0], plans)), *bill_notes(args, plans)]))
    else:
        say(f"{specs[0].workload.model} fits on none of these" + (f" within {args.days:g} days." if args.days else "."))
    return 0 if plans else 1


def plans_text(plans: Sequence[Plan], scaling: Sequence[Plan], bottleneck: str) -> str:
    """One plan in full with its scaling curve, or several as a table."""
    from fsdp_lab.planner.plan import memory_table, plan_table, sentences, time_table

    if len(plans) > 1 or not scaling:
        return repr(plan_table(plans))
    (plan,) = plans
    tables = (time_table(plan), memory_table(plan), plan_table(scaling))
    end = f"{bottleneck[0].upper()}{bottleneck[1:]}. A rank keeps its batch, so the global batch grows with the ranks."
    return "\n".join([*sentences(plan), *(f"\n{table!r}" for table in tables), "", end])


def bill_notes(args: argparse.Namespace, plans: Sequence[Plan]) -> list[str]:
    """What time and cost depend on and was not given."""
    names = ("seq_len", "micro_batch", "precision")[any(p.shape.image_tokens for p in plans) :]
    taken = [f"{option(n)} {written(n, Spec().flat()[n])}" for n in names if getattr(args, n) is None]
    is_billed = taken and any(p.training for p in plans)
    return [f"note: by default {' '.join(taken)}; time and cost depend on them"] if is_billed else []


def write_page(args: argparse.Namespace) -> int:
    """Writes the page. Raises Refused and FieldError before anything is predicted."""
    from rich.progress import Progress

    from fsdp_lab.report import SUFFIXES
    from fsdp_lab.report.what_if_page import check_size, write_what_if

    check_file(args.page, SUFFIXES, field="--page")
    product = product_of(args)
    check_size(product)
    predict = partial(answer, args, targets_of(args))
    say(f"{product.combinations:,} combinations are predicted, some milliseconds each")
    console = terminal()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("predicting", total=product.combinations)
        file = write_what_if(args.page, product, predict, progress=lambda done: bar.update(task, completed=done))
    say(f"written: {file}, {product.combinations:,} combinations, {size(file.stat().st_size)}")
    return 0


def targets_of(args: argparse.Namespace) -> dict[str, Target]:
    """A target for each of `--hardware`, with its price, by name. Raises Refused, ArgumentError."""
    from fsdp_lab.planner.plan import Training
    from fsdp_lab.planner.questions import Target

    devices = [device(word) for word in args.hardware.split(",")]
    prices = [None] if args.price is None else [FieldRow(type="float").read(word) for word in args.price.split(",")]
    if len(prices) not in (1, len(devices)):
        gpus = plural(len(devices), "GPU")
        raise Refused(f"--price {args.price} is not one for {gpus}; give one for each, or for all")
    prices *= len(devices) if len(prices) == 1 else 1
    tokens = args.tokens or ("1B" if args.find == "cheapest" else None)
    where = partial(Target, hosts=args.hosts, network_gbit_per_s=args.network)
    pairs = zip(devices, prices, strict=True)
    return {one.name: where(hardware=one, training=Training.of(tokens, price)) for one, price in pairs}


def check_options(args: argparse.Namespace) -> None:
    """Completes `--ranks`, but for the search that tries several. Raises Refused without hardware, and for an option that no
    plan takes or a value of --memory that it refuses."""
    memory_limit(args)
    if args.hardware is None:
        raise Refused("no hardware is named; give --hardware a100-80, h100, h200, ..., or list")
    if args.link is not None:
        raise Refused("--link emulates a network while training; a plan's is --network, in Gb/s of a host")
    if args.days is not None and args.find != "cheapest":
        raise Refused("--days is of --find cheapest; a plan says how long a training takes with --tokens")
    if args.find != "cheapest":
        args.ranks = args.ranks or "8"


def product_of(args: argparse.Namespace) -> Product:
    """The axes of the options, or of `TEACHING`; completes `args` with the latter. Raises Refused, FieldError."""
    from fsdp_lab.report.what_if_page import Product

    if others := [name for name in ("find", "json") if getattr(args, name)]:
        raise Refused(f"--page and --{others[0]} are different results; give one of them")
    given = text_of(args, (*AXES, *OF_ALL, *BILL))
    is_taught = not any(getattr(args, name) is not None for name in AXES)
    if is_taught:
        vars(args).update(TEACHING)
    check_options(args)
    targets = targets_of(args)
    return Product(
        axes=axes_of(args, [*targets]),
        training={name: one.training for name, one in targets.items() if one.training is not None},
        options=" ".join(text_of(args, OF_ALL)),
        command=" ".join(["fsdp-lab plan --page", shlex.quote(args.page.name), *given]),
        start=TAUGHT_FIRST if is_taught else None,
    )


def text_of(args: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """The options of these names that are given, as on the command line."""
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return [f"{option(name)} {shlex.quote(str(value))}" for name, value in given.items()]


def axes_of(args: argparse.Namespace, hardware: list[str]) -> list[Axis]:
    """The model, the hardware and the ranks, then the other fields that are given. Raises Refused and FieldError."""
    from fsdp_lab.models.check import model_facts

    lists = fields.parse_lists(args)
    models = lists.pop("model", [Spec().workload.model])
    for model in models:
        if not is_code(model):
            model_facts(model)
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
    words = tuple(shlex.quote(written(name, value)) for value in unique)
    return Axis(name=name, label=label or field_title(name), option=named or option(name), values=unique, words=words)
