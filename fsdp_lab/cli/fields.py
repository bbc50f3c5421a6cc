"""The fields of a Spec as command-line options, whose values may be comma-separated lists."""

import argparse
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from fsdp_lab.base.errors import FieldError
from fsdp_lab.bench.plan import option
from fsdp_lab.cli.console import Refused
from fsdp_lab.spec import link
from fsdp_lab.spec.describe import written
from fsdp_lab.spec.fields import FieldRow, rows_of
from fsdp_lab.spec.spec import PARTS, Spec, Strategy, changed_dict, check_field
from fsdp_lab.spec.workload import Workload

LINK = (
    'emulate a slower interconnect: "0.25 GB/s", "0.25 GB/s, 50 us", or scaled to what is computed here: '
    '"nvlink of h100", "pcie4 of a100", "100 Gb/s of h100"'
)


def add_options(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    """Adds an option for each field of Workload and Strategy, and for the link. `several`: each takes a list, too."""
    metavar, title = ("V,V", " (a value, or a comma-separated list)") if several else ("V", "")
    for part, kind in PARTS.items():
        group = parser.add_argument_group(f"{part}{title}")
        for name, row in rows_of(kind).items():
            choices = ", ".join([*row.tokens, *filter(None, [row.others])]) or row.wanted
            about = row.help.replace(". A change begins at step 0", "")
            sentence = f"{about}: {choices}" if about and choices else about or choices
            default = f"default: {written(name, getattr(kind, name))}"
            group.add_argument(option(name), metavar=metavar, help=f"{sentence} ({default})".replace("%", "%%"))
    parser.add_argument("--link", metavar=metavar, help=f"{LINK}; none: the real wire")


def parse_lists(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Flat field name -> its values, for the options that were given. Raises Refused, SpecError."""
    lists: dict[str, list[Any]] = {}
    for name, row in (rows_of(Workload) | rows_of(Strategy)).items():
        if (text := getattr(args, name)) is not None:
            lists[name] = parse_values(row, text)
            for value in lists[name]:
                check_field(name, value)
    if args.link is not None:
        lists["link"] = [Spec(link=word).link for word in link.split_list(args.link)]
    return lists


def parse_values_of_one(args: argparse.Namespace) -> dict[str, Any]:
    """Flat field name -> value, for the options that were given. Raises Refused for a list, SpecError."""
    lists = parse_lists(args)
    for name, several in lists.items():
        if len(several) > 1:
            raise Refused(f"{option(name)} has {len(several)} values; give one, or compare them with fsdp-lab compare")
    return {name: value for name, (value,) in lists.items()}


def parse_values(row: FieldRow, text: str) -> list[Any]:
    """The values of an option, of the type of its field. Raises Refused."""
    if text.strip() and row.means_none(text.strip()):
        return [None]
    if row.json:
        try:
            return list(json.loads(f"[{text}]"))
        except json.JSONDecodeError:
            wanted = f"give JSON: {row.wanted}, or several with commas"
            raise Refused(f"{option(row.name)} {text!r} is refused; {wanted}") from None
    values: list[Any] = []
    for word in map(str.strip, text.split(",")):
        values.append(row.read(word) if word else word)
        if isinstance(values[-1], str) and (not word or "str" not in row.type):
            wanted = {"int": "a whole number", "bool": "true or false"}.get(row.type.partition(" ")[0], "a number")
            raise Refused(f"{option(row.name)} {word!r} is refused; give {wanted}")
    return values


def requested(
    args: argparse.Namespace, prepare: Callable[[dict[str, Any]], Spec]
) -> tuple[list[Spec], list[tuple[dict[str, Any], FieldError]]]:
    """The Specs that `prepare` makes from the combinations of the options, and the combinations that it refuses."""
    specs, refused = list[Spec](), list[tuple[dict[str, Any], FieldError]]()
    for combination in combinations(args):
        try:
            specs.append(prepare(combination))
        except FieldError as e:
            refused.append((combination, e))
    return specs, refused


def combinations(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every combination of the lists, --ranks included, as the dict of a Spec, without duplicates."""
    lists = {"world_size": parse_whole_numbers("--ranks", args.ranks), **parse_lists(args)}
    combined = [with_values(dict(zip(lists, values, strict=True))) for values in itertools.product(*lists.values())]
    return [one for i, one in enumerate(combined) if one not in combined[:i]]


def with_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The dict of a Spec with these fields, by their flat names; the others have their defaults."""
    return changed_dict(Spec(world_size=values["world_size"]), values)


def parse_whole_numbers(name: str, text: str, least: int = 1) -> list[int]:
    """A comma-separated list of whole numbers. Raises Refused."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) >= least for word in words):
        raise Refused(f"{name} {text!r} is refused; give a whole number of {least} or more, or several with commas")
    return list(dict.fromkeys(map(int, words)))
