"""`write_what_if`: what-if as one HTML file without a kernel, for a teacher to host anywhere.

A page has axes: fields with the values that a reader may choose. The answer of every combination is predicted when the page
is made, by the planner, and kept in a table of float32 columns. The page's script finds a row of it and draws it."""

import base64
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_lab.base import __version__
from fsdp_lab.base.errors import ArgumentError, FieldError
from fsdp_lab.base.files import check_file, write_whole
from fsdp_lab.dashboard import theme
from fsdp_lab.planner.plan import Training
from fsdp_lab.report.report import FOLDER, SUFFIXES, filled
from fsdp_lab.spec.describe import describe_value

SCRIPT = FOLDER / "what_if.js"
STYLES = (FOLDER / "page.css", FOLDER / "what_if.css")
MOST_COMBINATIONS = 20_000  # about a minute, and 5 MB
RANKS = "world_size"

ENTRIES = ("memory_at_peak_bytes", "comm_s_per_step")  # dicts in `Plan.to_dict`, with a column for each entry
TEXTS = ("binding", "assumed")
# Part of a step -> token of its colour, label.
PARTS = {
    "computing": ("timeline.backward", "computing"),
    "slowed": ("timeline.forward", "slowed by sending"),
    "exposed": ("timeline.waiting", "exposed communication"),
    "host": ("timeline.host_copy", "waiting for the host"),
    "optimizer": ("timeline.optimizer", "optimizer"),
    "rest": ("timeline.compute", "the loop"),
}


def look() -> dict[str, Any]:
    """The colours, hatches and labels of what a page draws."""
    reduced = ("all_gather", "reduce_scatter", "all_reduce")
    kinds = {k: (f"communication.{k}", theme.COMMUNICATION[k].label) for k in reduced}
    return {
        "tokens": theme.tokens(),
        "memory": {name: {"label": fill.label, "hatch": fill.hatch} for name, fill in theme.MEMORY.items()},
        "parts": _fills(PARTS),
        "kinds": _fills(kinds),
    }


def _fills(fills: Mapping[str, tuple[str, str]]) -> dict[str, dict[str, str]]:
    return {name: {"fill": token.replace(".", "-"), "label": label} for name, (token, label) in fills.items()}


def row_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The figures and texts that a page shows of a plan. plan: as `Plan.to_dict` makes it."""
    row: dict[str, Any] = {name: float(value) for name, value in plan.items() if isinstance(value, int | float)}
    row |= {f"{entry}.{key}": float(number) for entry in ENTRIES for key, number in plan[entry].items()}
    workload = plan["spec"]["workload"]
    assumed = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in plan["assumed"].items())
    row["global_batch"] = plan["ranks"] * workload["micro_batch"] * workload["accumulate"]
    return {**row, "binding": plan["binding"], "assumed": assumed}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A field with the values that can be chosen; one value is the same for the whole page."""

    name: str  # of a field of the Spec, or "hardware"
    label: str
    option: str  # of the command line, such as "--micro-batch"
    values: tuple[Any, ...]
    words: tuple[str, ...]  # the values as that option takes them, quoted for a shell

    @property
    def labels(self) -> list[str]:
        return [describe_value(self.name, value) for value in self.values]


@dataclass(frozen=True, kw_only=True)
class Product:
    """The axes of a page, and how it was asked for."""

    axes: Sequence[Axis]
    options: str = ""  # of `fsdp-lab plan` beside those of the axes, for the command that repeats an answer
    command: str = ""  # that made the page
    start: Mapping[str, Any] | None = None  # what a reader sees first; None: the first combination that is not refused
    training: Mapping[str, Training] = field(default_factory=dict)  # by hardware: with what the bill's inputs begin

    @property
    def combinations(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The combinations, in the order of the table: the last axis changes first."""
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield {axis.name: value for axis, value in zip(self.axes, values, strict=True)}


def write_what_if(
    path: str | os.PathLike[str],
    product: Product,
    predict: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Writes the page; returns its path. It takes about 2 ms for each combination.

    Args:
        path: ends in .html or .htm. An existing file is replaced.
        predict: `Plan.to_dict` for a combination, by the names of the axes. It raises FieldError for one that is refused,
            which the page then says.
        progress: called with the number of combinations that are done.

    Raises ArgumentError: the path cannot be written, or there are too many combinations. It is raised first. FieldError:
    every combination is refused; that of the first."""
    file = check_file(path, SUFFIXES)
    check_size(product)
    rows, refusals = list[dict[str, Any]](), dict[str, FieldError]()
    for i, combination in enumerate(product):
        try:
            rows.append(row_of(predict(combination)))
        except FieldError as e:
            refusals.setdefault(str(e), e)
            rows.append({"refused": [*refusals].index(str(e))})
        progress(i + 1)
    if all("refused" in row for row in rows):
        raise next(iter(refusals.values()))
    return write_whole(file, render(product, rows, list(refusals.values())).encode())


def check_size(product: Product) -> None:
    """Raises ArgumentError if there are too many combinations for a page."""
    number, longest = product.combinations, max(product.axes, key=lambda axis: len(axis.values))
    if number > MOST_COMBINATIONS:
        hint = f"shorten a list, such as {longest.option} with {len(longest.values)} values"
        raise ArgumentError("page", f"{number:,} combinations are more than the {MOST_COMBINATIONS:,} of a page", hint)


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Name -> little-endian float32 as base64; NaN where a row has no such figure."""
    names = ["refused", *dict.fromkeys(name for row in rows for name in row if name != "refused")]
    packed = {name: np.asarray([row.get(name, math.nan) for row in rows], dtype="<f4") for name in names}
    return {name: base64.b64encode(numbers.tobytes()).decode() for name, numbers in packed.items()}


def render(product: Product, rows: Sequence[Mapping[str, Any]], refusals: Sequence[FieldError]) -> str:
    """The file's content. The texts of users are escaped; CSS, script and JSON are our own. In the JSON values are known by
    their place on their axis, and texts that repeat, as refusals, by their place in a list."""
    names = ("name", "label", "option", "words", "labels")
    texts = {kind: list(dict.fromkeys(row[kind] for row in rows if kind in row)) for kind in TEXTS}
    numbered = [{n: texts[n].index(value) if n in texts else value for n, value in row.items()} for row in rows]
    data = {
        "axes": [{name: getattr(axis, name) for name in names} for axis in product.axes],
        "ranks": next(([*axis.values] for axis in product.axes if axis.name == RANKS), []),
        "start": _start(product, rows),
        "bills": {name: bill_inputs(training) for name, training in product.training.items()},
        "options": product.options,
        "columns": columns(numbered),
        "texts": texts,
        "refusals": [_refusal(product, error) for error in refusals],
        "look": look(),
    }
    return filled(
        "what_if.html.jinja",
        css="".join(style.read_text(encoding="utf-8") for style in STYLES),
        version=__version__,
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        combinations=f"{len(rows):,}",
        command=product.command,
        data=data,
        js=SCRIPT.read_text(encoding="utf-8"),
    )


def bill_inputs(training: Training | None) -> dict[str, Any]:
    """What the page's inputs of tokens and price begin with."""
    tokens, price = (training.tokens, training.price_per_gpu_hour) if training else (None, None)
    return {"tokens": f"{tokens / 1e9:g}B" if tokens else "", "price": f"{price:g}" if price else ""}


def _start(product: Product, rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the values of the first combination that is shown."""
    if product.start is not None:
        start = product.start
        return [axis.values.index(start[axis.name]) if axis.name in start else 0 for axis in product.axes]
    first = next(i for i, row in enumerate(rows) if "refused" not in row)
    return [int(i) for i in np.unravel_index(first, [len(axis.values) for axis in product.axes])]


def _refusal(product: Product, error: FieldError) -> dict[str, Any]:
    """`fix`: axis -> place of the value that the error advises; empty if the page does not have all of them."""
    axes = {axis.name: (i, axis.values) for i, axis in enumerate(product.axes)}
    has_all = all(name in axes and value in axes[name][1] for name, value in error.fix.items())
    fix = {axes[name][0]: axes[name][1].index(value) for name, value in error.fix.items()} if has_all else {}
    return {"words": error.words, "fix": fix}
