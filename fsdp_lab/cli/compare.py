"""`fsdp-lab compare`: the same work under every combination of the given lists, on the same resident ranks.

Options are the fields of Workload and Strategy, `--ranks` and `--steps`. What cannot be combined is listed with its
reason; a run that fails is listed there too, and the exit code is 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.cli import fields
from fsdp_lab.cli.console import Refused
from fsdp_lab.cli.results import Results
from fsdp_lab.spec import Spec, SpecError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fsdp_lab.lab import Lab

WAITING = "waiting"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", default="2", metavar="N,N", help="ranks of each run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default: %(default)s)")
    parser.add_argument("--devices", metavar="D,D", help="one for each rank: cpu, or cuda:0,cuda:2 (default: chosen)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, after every run")
    fields.add_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise Refused(f"--steps {args.steps} is refused; give a whole number of 1 or more")
    results = Results(file=args.json)
    results.check()
    specs = split(wanted(args), results)
    results.write()

    from fsdp_lab.cli import session

    console = session.console()
    failed = compare(console, specs, args.steps, results) if specs else 0
    if results.refused:
        console.print(refusals(results.refused))
    if args.json is not None:
        console.print(f"written: {args.json}", markup=False, highlight=False)
    if not specs:
        raise Refused("every combination is refused; nothing was started")
    return 1 if failed else 0


def wanted(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The product of the lists, as Spec dicts."""
    ranks = fields.whole_numbers("--ranks", args.ranks)
    made = list(fields.product(Spec(), fields.chosen(args), ranks))
    if args.devices is not None:
        devices = [word.strip() for word in args.devices.split(",")]
        for spec in made:
            spec["devices"] = devices * spec["world_size"] if len(devices) == 1 else devices
    return made


def split(dicts: Sequence[Mapping[str, Any]], results: Results) -> list[Spec]:
    """The Specs that can be; the others go to the results with their reasons. Starts nothing."""
    from fsdp_lab.models.check import check

    specs: list[Spec] = []
    for made in dicts:
        try:
            spec = Spec.from_dict(made)
            check(spec.workload)
            specs.append(spec)
        except SpecError as e:
            results.add_refused(made, str(e))
    return specs


def compare(console: Console, specs: Sequence[Spec], steps: int, results: Results) -> int:
    """Runs them one after the other and returns how many failed."""
    from fsdp_lab.cli import session

    varying = [name for name in specs[0].flat() if len({str(spec.flat()[name]) for spec in specs}) > 1]
    shown = varying or ["backend", "sharding", "precision"]
    rows = [[WAITING, *([""] * len(FIGURES))] for _ in specs]
    failed = 0
    with session.lab(console, specs[0].world_size, specs[0].devices) as lab, session.live(console) as show:

        def draw() -> None:
            show(table(specs, shown, rows, console.width))

        for spec, row in zip(specs, rows, strict=True):
            failed += not one(lab, spec, steps, row, draw, results)
            if not console.is_terminal:  # a log: a line for each run, and the table at the end
                console.print(": ".join([label(spec, shown), row[0]]), markup=False, highlight=False)
    if not console.is_terminal:
        console.print(table(specs, shown, rows, console.width))
    return failed


def one(lab: Lab, spec: Spec, steps: int, row: list[str], draw: Callable[[], None], results: Results) -> bool:
    """One run, its row of the table kept up to date. Returns whether it went well."""
    from fsdp_lab.cli import session

    try:
        run = lab.run(spec, steps=steps)

        def look() -> None:
            row[:] = [f"step {run.step} of {steps}" if run.step else run.state.value, *figures(session.recent(run))]
            draw()

        session.watch(run, look)
    except KeyboardInterrupt:
        row[0] = "interrupted"
        raise
    except Exception as e:  # the next combination can still go well
        row[0] = "failed"
        results.add_refused(spec.to_dict(), session.reason_of(e))
        results.write()
        return False
    finally:
        draw()
    summary = run.summary()
    row[:] = ["done", *figures(summary)]
    results.add_run(summary)
    draw()
    return True


# -- what is shown ---------------------------------------------------------------------------------------------------

WIDE = 110  # columns of a terminal
FIGURES = ("loss", "step time", "tokens/s", "TFLOPS/rank", "peak/rank", "comm/step")


def figures(summary: Mapping[str, Any]) -> list[str]:
    """The cells of FIGURES; empty before the first step."""
    from fsdp_lab.runs.table import count, duration, size

    if not summary["losses"]:
        return [""] * len(FIGURES)
    return [
        f"{summary['losses'][-1]:.4f}",
        duration(summary["step_time_s"]["median"]),
        count(summary["tokens_per_s"]),
        f"{sum(summary['tflops_per_rank']) / len(summary['tflops_per_rank']):.3g}",
        size(max(summary["peak_memory_bytes"])),
        duration(sum(summary["comm_s_per_step"].values())),
    ]


def table(specs: Sequence[Spec], shown: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """A row for each Spec; a narrow terminal does without some of the figures."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column(", ".join(name.replace("_", " ") for name in shown), overflow="fold")
    drawn.add_column("state", no_wrap=True)
    kept = [name for name in FIGURES if width >= WIDE or name not in ("TFLOPS/rank", "peak/rank")]
    for name in kept:
        drawn.add_column(name, justify="right", no_wrap=True)
    for spec, (state, *cells) in zip(specs, rows, strict=True):
        style = {"failed": "red", WAITING: "dim", "done": ""}.get(state, "bold")
        by_name = dict(zip(FIGURES, cells, strict=True))
        drawn.add_row(label(spec, shown), state, *(by_name[name] for name in kept), style=style)
    return drawn


def cell(spec: Spec, name: str) -> str:
    value = spec.flat()[name]
    return "own config" if isinstance(value, dict) else fields.shown(value)


def label(spec: Spec, shown: Sequence[str]) -> str:
    return " ".join(cell(spec, name) for name in shown)


def refusals(refused: Sequence[Mapping[str, Any]]) -> Table:
    """Each reason once, with the combinations that it refuses."""
    from rich import box
    from rich.table import Table

    by_reason: dict[str, list[str]] = {}
    for entry in refused:
        strategy = entry["spec"]["strategy"]
        words = [
            entry["spec"]["workload"]["model"],
            *(strategy[n] for n in ("backend", "sharding", "precision", "offload")),
            *([f"link {link}"] if (link := entry["spec"].get("link")) else []),
        ]
        by_reason.setdefault(entry["reason"], []).append(" ".join(fields.shown(word) for word in words))
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="not run", title_justify="left")
    drawn.add_column("combination")
    drawn.add_column("reason", overflow="fold")
    for reason, combinations in by_reason.items():
        drawn.add_row("\n".join(combinations), reason)
    return drawn
