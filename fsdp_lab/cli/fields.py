"""The fields of a Spec as command-line options, whose values may be comma-separated lists."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fsdp_lab.base.errors import FieldError
from fsdp_lab.cli.console import Refused
from fsdp_lab.spec import link, spec as spec_module
from fsdp_lab.spec.describe import NONE_IS_OFF
from fsdp_lab.spec.lr_schedule import LR_SCHEDULES
from fsdp_lab.spec.optimizer import OPTIMIZERS
from fsdp_lab.spec.spec import PARTS, Spec, check_field, part_of
from fsdp_lab.spec.workload import DROPOUTS, OWN, PACKINGS, RANDOM

LINK = ("emulate a slower interconnect: \"0.25 GB/s\", \"0.25 GB/s, 50 us\", or scaled to what is computed here: "
        "\"nvlink of h100\", \"pcie4 of a100\", \"100 Gb/s of h100\"")  # fmt: skip
TOKENS: Mapping[str, Sequence[str]] = {
    "backend": spec_module.BACKENDS,
    "sharding": spec_module.SHARDINGS,
    "precision": tuple(spec_module.PRECISIONS),
    "offload": spec_module.OFFLOADS,
    "gather": spec_module.GATHERS,
    "optimizer": (*OPTIMIZERS, "or another class of torch.optim"),
    "lr_schedule": LR_SCHEDULES,
    "weights": (RANDOM, OWN, "or a folder"),
    "packing": PACKINGS,
    "tokenizer": ("bytes", "own", "or a folder"),
    "dropout": DROPOUTS,
    "sync": (*spec_module.SYNCS, "or n: every n-th micro-batch"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of Workload and Strategy, and for the link."""
    for part, kind in PARTS.items():
        group = parser.add_argument_group(f"{part} (a value, or a comma-separated list)")
        for field in dataclasses.fields(kind):
            tokens = ", ".join(TOKENS.get(field.name, ()))
            help_text = f"{tokens + '; ' if tokens else ''}default: {format_value(field.name, field.default)}"
            group.add_argument(option(field.name), metavar="V,V", help=help_text)
    parser.add_argument(
        "--link", metavar="V,V", help=f"{LINK}; none: the real wire. A value, or a comma-separated list"
    )


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def format_value(name: str, value: Any) -> str:
    """A value as written on the command line."""
    if value is None:
        return "none" if name in NONE_IS_OFF else "auto"
    return value if isinstance(value, str) else json.dumps(dict(value) if isinstance(value, Mapping) else value)


def parse_lists(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Flat field name -> its values, for the options that were given.

    Raises:
        Refused: a value of the wrong type.
        SpecError: a value that its field refuses in any combination.
    """
    lists: dict[str, list[Any]] = {}
    for kind in PARTS.values():
        for field in dataclasses.fields(kind):
            text = getattr(args, field.name)
            if text is None:
                continue
            lists[field.name] = parse_values(field, text)
            for value in lists[field.name]:
                check_field(field.name, value)
    if args.link is not None:
        lists["link"] = [parse_link(word) for word in link.split_list(args.link)]
    return lists


def parse_values(field: dataclasses.Field[Any], text: str) -> list[Any]:
    """The values of an option. Raises Refused."""
    if text.strip().lower() in _none_of(field):
        return [None]
    if not field.metadata.get("json"):
        return [parse_value(field, word.strip()) for word in text.split(",")]
    try:
        return list(json.loads(f"[{text}]"))
    except json.JSONDecodeError:
        raise Refused(f"{option(field.name)} {text!r} is refused; give JSON: {field.metadata['wanted']}, or several with "
                      "commas") from None  # fmt: skip


def _none_of(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The words for no value, in lower case."""
    if "None" not in str(field.type):
        return ()
    return ("null", "none", "off" if field.name in NONE_IS_OFF else "auto")


def parse_link(text: str) -> str | None:
    """One value of --link. Raises SpecError."""
    return None if text.lower() in ("none", "null") else Spec(link=text).link


def parse_value(field: dataclasses.Field[Any], word: str) -> Any:
    """The word converted to the type of its field. Raises Refused."""
    kind = str(field.type)
    if "str" in kind and "int" in kind and word.isdecimal():
        return int(word)
    if word.lower() in _none_of(field):
        return None
    if word and "str" in kind:
        return word
    try:
        value = json.loads(word.lower())
    except json.JSONDecodeError:
        value = None
    if value is None or isinstance(value, (str, list, dict)):
        wanted = {"int": "a whole number", "bool": "true or false"}.get(kind.partition(" ")[0], "a number")
        raise Refused(f"{option(field.name)} {word!r} is refused; give {wanted}")
    return value


def requested(
    args: argparse.Namespace, prepare: Callable[[dict[str, Any]], Spec]
) -> tuple[list[Spec], list[tuple[dict[str, Any], FieldError]]]:
    """The Specs that `prepare` makes from the combinations of the options, and the combinations that it refuses.

    Raises Refused and SpecError as `parse_lists`.
    """
    specs, refused = list[Spec](), list[tuple[dict[str, Any], FieldError]]()
    for combination in list(combinations(args)):
        try:
            specs.append(prepare(combination))
        except FieldError as e:
            refused.append((combination, e))
    return specs, refused


def combinations(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every combination of the lists, --ranks included, as the dict of a Spec, without duplicates."""
    seen: list[dict[str, Any]] = []
    lists = {"world_size": parse_whole_numbers("--ranks", args.ranks), **parse_lists(args)}
    for values in itertools.product(*lists.values()):
        combination = with_values(dict(zip(lists, values, strict=True)))
        if combination not in seen:
            seen.append(combination)
            yield combination


def with_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The dict of a Spec with these fields, by their flat names; the others have their defaults."""
    made = Spec(world_size=values["world_size"]).to_dict()
    for name, value in values.items():
        (made[part] if (part := part_of(name)) else made)[name] = value
    return made


def parse_whole_numbers(name: str, text: str, least: int = 1) -> list[int]:
    """A comma-separated list of whole numbers. Raises Refused."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) >= least for word in words):
        raise Refused(f"{name} {text!r} is refused; give a whole number of {least} or more, or several with commas")
    return list(dict.fromkeys(map(int, words)))
