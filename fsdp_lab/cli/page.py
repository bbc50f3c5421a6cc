"""`fsdp-lab plan --page FILE`: the options as the axes of a page without a kernel."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsdp_lab.base.formatting import size
from fsdp_lab.cli import fields
from fsdp_lab.cli.console import Refused, say, terminal
from fsdp_lab.spec.describe import field_title
from fsdp_lab.spec.spec import PARTS, Spec
from fsdp_lab.spec.user_code import is_code

if TYPE_CHECKING:
    from fsdp_lab.report.what_if import Axis, Product

HELP = "write an HTML page that answers every combination of the lists; without lists, those of a set for teaching"
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
AXES = ("hardware", "ranks", "link", *(field.name for kind in PARTS.values() for field in dataclasses.fields(kind)))
OTHERS = ("find", "json")  # what else `plan` can do


def run(args: argparse.Namespace, predict: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> int:
    """Writes the page. Raises Refused and FieldError before anything is predicted."""
    from fsdp_lab.base.files import check_file
    from fsdp_lab.report import SUFFIXES
    from fsdp_lab.report.what_if import write_what_if

    check_file(args.page, SUFFIXES, field="--page")
    product = product_of(args)
    with terminal().status("predicting") as status:
        file = write_what_if(
            args.page, product, predict,
            progress=lambda done: status.update(f"predicting: {done:,} of {product.combinations:,}"),
        )  # fmt: skip
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
    """The axes of the options, or of `TEACHING`; completes `args` with the latter.

    Raises:
        Refused: an option that does not go with --page, or no hardware.
        FieldError: an unknown model or GPU, a value that its field refuses, more combinations than a page holds.
    """
    from fsdp_lab.report.what_if import Product, check_size

    if others := [name for name in OTHERS if getattr(args, name)]:
        raise Refused(f"--page and --{others[0]} are different results; give one of them")
    given = text_of(args, (*AXES, *OF_ALL))
    is_taught = not any(getattr(args, name) is not None for name in AXES)
    if is_taught:
        vars(args).update(TEACHING)
    check_options(args)
    product = Product(
        axes=axes_of(args),
        options=" ".join(text_of(args, OF_ALL)),
        command=" ".join(["fsdp-lab plan --page", shlex.quote(args.page.name), *given]),
        start=TAUGHT_FIRST if is_taught else None,
    )
    check_size(product)
    return product


def text_of(args: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """The options of these names that are given, as on the command line."""
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return [f"{fields.option(name)} {shlex.quote(str(value))}" for name, value in given.items()]


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
        axis("world_size", fields.parse_whole_numbers("--ranks", args.ranks), label="ranks", option="--ranks"),
        *(axis(name, values) for name, values in lists.items()),
    ]


def axis(name: str, values: list[Any], *, label: str = "", option: str = "") -> Axis:
    """Repeated values count once."""
    from fsdp_lab.report.what_if import Axis

    unique = [value for i, value in enumerate(values) if value not in values[:i]]
    return Axis(
        name=name, label=label or field_title(name), option=option or fields.option(name), values=tuple(unique),
        words=tuple(shlex.quote(fields.format_value(name, value)) for value in unique),
    )  # fmt: skip
