"""`fsdp-lab run spec.json`: one Spec in a terminal, for `--steps` or until Ctrl-C."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.cli import compare, fields
from fsdp_lab.cli.console import Failed, Refused
from fsdp_lab.cli.results import Results
from fsdp_lab.spec import Spec, SpecError

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from fsdp_lab.events import StepEvent
    from fsdp_lab.runs import Run

LINE_S = 2.0  # between two lines where there is no terminal to draw on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", type=Path, help='a file with {"workload": {...}, "strategy": {...}, "world_size": 2}')
    parser.add_argument("--steps", type=int, help="end after this many steps (default: train until Ctrl-C)")
    parser.add_argument("--ranks", type=int, help="instead of the file's world_size")
    parser.add_argument("--link", metavar="LINK", help=f"instead of the file's: {fields.LINK}; none: the real wire")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary there, as compare does")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="write the traced steps there (.json or .json.gz), for ui.perfetto.dev or chrome://tracing",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.steps is not None and args.steps < 1:
        raise Refused(f"--steps {args.steps} is refused; give a whole number of 1 or more, or leave it out")
    results = Results(file=args.json)
    results.check()
    if args.trace is not None:
        from fsdp_lab.runs.trace import check_path

        check_path(args.trace, field="--trace")
    spec = read_spec(args.spec)
    if args.ranks is not None:
        spec = spec.replace(world_size=args.ranks)
    if args.link is not None:
        spec = spec.replace(link=fields.link_of(args.link))

    from fsdp_lab.models.check import check

    check(spec.workload)

    from fsdp_lab.cli import session

    train(session.console(), spec, args.steps, results, args.trace)
    return 0


def read_spec(path: Path) -> Spec:
    """Raises Refused for a file that cannot be read, SpecError for what stands in it."""
    try:
        return Spec.from_json(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise Refused(f"cannot read {path} ({e.strerror}); give the path of a JSON file") from e
    except UnicodeDecodeError as e:
        raise Refused(f"{path} is not text; give the path of a JSON file") from e


def train(console: Console, spec: Spec, steps: int | None, results: Results, trace: Path | None = None) -> None:
    """Trains and draws; at the end, Ctrl-C's included, says and writes the summary, and the trace."""
    from fsdp_lab.cli import session

    with session.lab(console, spec.world_size, spec.devices) as lab:
        run = lab.run(spec, steps=steps)
        spoken_s = time.monotonic()
        try:
            with session.live(console, transient=True) as show:

                def look() -> None:
                    nonlocal spoken_s
                    if console.is_terminal:
                        show(view(run))
                    elif time.monotonic() - spoken_s > LINE_S:
                        spoken_s = time.monotonic()
                        console.print(line(run), markup=False, highlight=False)

                session.watch(run, look)
        except Exception as e:
            raise Failed(session.reason_of(e)) from e
        finally:
            if run.details:
                console.print(run.details, markup=False, highlight=False)
            if len(run.events):
                console.print(view(run))
                results.add_run(run.summary())
            if trace is not None:
                console.print(write_trace(run, trace), markup=False, highlight=False)


def write_trace(run: Run, file: Path) -> str:
    """Writes the traced steps and says so; or why not, since what was trained is not to end in an error."""
    try:
        run.export_trace(file)
    except SpecError as e:
        return f"no trace was written: {e.reason}"
    steps = len(run.events.traced())
    return f"{steps} traced step{'s' * (steps != 1)} in {file}: open it at ui.perfetto.dev or chrome://tracing"


# -- what is shown ---------------------------------------------------------------------------------------------------


def line(run: Run) -> str:
    """For a log: one line."""
    from fsdp_lab.cli import session

    told = ", ".join(f"{name} {word}" for name, word in compare.figures(session.recent(run)).items())
    return (
        f"step {run.step}"
        + (f" of {run.steps}" if run.steps else "")
        + (f": {told}" if told else f": {run.state.value}")
    )


def view(run: Run) -> Group:
    """The headline, and a row for each rank with its newest step."""
    from rich.console import Group
    from rich.text import Text

    from fsdp_lab.runs.summary import how

    latest = list(run.events.latest().values())
    head = f"{how(run.spec)} on {run.spec.world_size} ranks: {run.state.value}" + (
        f" ({run.reason})" if run.reason else ""
    )
    return Group(Text(head, style="bold"), Text(line(run)), *([ranks(latest)] if latest else []))


def ranks(latest: Sequence[StepEvent]) -> Table:
    from rich import box
    from rich.table import Table

    from fsdp_lab.runs.table import count, duration, size

    kinds = sorted({kind for event in latest for kind, traffic in event.comm.items() if traffic.calls})
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    recomputes = any(e.recompute_flops for e in latest)
    shares = ("MFU", "HFU") if recomputes else ("MFU",)
    for name in ("rank", "step", "step time", "tokens/s", "TFLOPS", *shares, "peak", "RSS", *kinds):
        drawn.add_column(name.replace("_", " "), justify="right")
    for e in latest:
        comm = [duration(e.comm[kind].seconds) if kind in e.comm else "" for kind in kinds]
        used = [f"{share:.1%}" if share is not None else "–" for share in ((e.mfu, e.hfu) if recomputes else (e.mfu,))]
        numbers = [duration(e.step_time_s), count(e.tokens_per_s), f"{e.tflops:.3g}", *used]
        drawn.add_row(str(e.rank), str(e.step), *numbers, size(e.memory.peak_bytes), size(e.memory.rss_bytes), *comm)
    return drawn
