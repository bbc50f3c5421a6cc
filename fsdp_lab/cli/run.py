"""`fsdp-lab run spec.json`: one Spec in a terminal, for `--steps` or until Ctrl-C."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.cli import fields
from fsdp_lab.cli.console import Failed, Refused, Results, terminal
from fsdp_lab.core.checkpoint_format import Checkpoint, check_same, find
from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from fsdp_lab.core.events import StepEvent
    from fsdp_lab.runs import CheckpointConfig, EvalConfig, RecoveryPolicy, Run

LINE = ("loss", "step time", "tokens/s", "TFLOPS", "peak/rank", "exposed")
LINE_S = 2.0  # between two lines where there is no terminal to draw on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "spec", type=Path, nargs="?", help='a file with {"workload": {...}, "strategy": {...}, "world_size": 2}'
    )
    parser.add_argument("--steps", type=int, help="number of steps (default: train until Ctrl-C)")
    parser.add_argument("--ranks", type=int, help="instead of the file's world_size")
    parser.add_argument("--link", metavar="LINK", help=f"instead of the file's: {fields.LINK}; none: the real wire")
    parser.add_argument("--evaluate-every", type=int, metavar="N", help="evaluate on held-out samples every N steps")
    parser.add_argument("--evaluate-samples", type=int, metavar="N", help="number of held-out samples")
    parser.add_argument("--patience", type=int, metavar="N", help="stop after N evaluations without improvement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary to FILE, as compare does")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="write traced steps (.json or .json.gz) for ui.perfetto.dev or chrome://tracing",
    )  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from a checkpoint, or the newest in a folder; "
                        "with a Spec under that one, without as it was")  # fmt: skip
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="save a checkpoint of the last step to DIR; see --save-every"
    )
    parser.add_argument("--save-every", type=int, metavar="N", help="save every N steps")
    parser.add_argument("--save-last", type=int, metavar="N", help="number of checkpoints to keep, besides the best")
    parser.add_argument("--recover", choices=("same", "fewer"), help="when a rank is lost, go on by itself: with as many "
                        "ranks, or with those that are left")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    if args.steps is not None and args.steps < 1:
        raise Refused(f"--steps {args.steps} is refused; give a whole number of 1 or more, or leave it out")
    results = Results(file=args.json)
    results.check()
    if args.trace is not None:
        from fsdp_lab.runs.timeline import check_trace_path

        check_trace_path(args.trace, field="--trace")
    spec, start = begun(args.spec, args.resume)
    if args.ranks is not None:
        spec = spec.replace(world_size=args.ranks, devices=None)
    if args.link is not None:
        spec = spec.replace(link=fields.link_of(args.link))

    evaluate = evaluating(args)

    from fsdp_lab.models.check import check

    check(spec.workload, evaluated=evaluate.samples if evaluate else 0)

    options: dict[str, Any] = {"steps": args.steps, "save": saving(args), "recover": recovering(args.recover),
                               "evaluate": evaluate}  # fmt: skip
    train(terminal(), spec, options, results, args.trace, start)
    return 0


def begun(file: Path | None, resume: Path | None) -> tuple[Spec, Checkpoint | None]:
    """What to train, and from where. Raises Refused, FieldError."""
    if resume is None:
        if file is None:
            raise Refused("no Spec is given; name a JSON file, or a folder of checkpoints with --resume")
        return read_spec(file), None
    start = find(resume, field="--resume")
    spec = start.spec if file is None else read_spec(file)
    check_same(start, spec)
    return spec, start


def saving(args: argparse.Namespace) -> CheckpointConfig | None:
    """Raises FieldError, Refused."""
    if args.save is None:
        if args.save_every is not None:
            raise Refused("--save-every is given and no folder; name it with --save")
        return None
    from fsdp_lab.runs.saving import LAST, CheckpointConfig

    return CheckpointConfig(
        folder=args.save, every=args.save_every, last=LAST if args.save_last is None else args.save_last
    )


def recovering(ranks: str | None) -> RecoveryPolicy:
    from fsdp_lab.runs.recovery import RecoveryPolicy

    return RecoveryPolicy() if ranks is None else RecoveryPolicy(how="auto", ranks=ranks)


def evaluating(args: argparse.Namespace) -> EvalConfig | None:
    """Raises Refused for options without the one that they belong to, FieldError for their values."""
    from fsdp_lab.runs.evaluation import EvalConfig

    given = {"every": args.evaluate_every, "samples": args.evaluate_samples, "patience": args.patience}
    given = {name: value for name, value in given.items() if value is not None}
    if given and "every" not in given:
        raise Refused("there are no evaluations to be patient with, or samples for; give --evaluate-every too")
    return EvalConfig(**given) if given else None


def read_spec(path: Path) -> Spec:
    """Raises Refused for a file that cannot be read, SpecError for what stands in it."""
    try:
        return Spec.from_json(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise Refused(f"cannot read {path} ({e.strerror}); give the path of a JSON file") from e
    except UnicodeDecodeError as e:
        raise Refused(f"{path} is not text; give the path of a JSON file") from e


def train(
    console: Console,
    spec: Spec,
    options: Mapping[str, Any],
    results: Results,
    trace: Path | None = None,
    start: Checkpoint | None = None,
) -> None:
    """Trains and draws; at the end, Ctrl-C's included, says and writes the summary, and the trace.

    `options`: of `Lab.run`. `start`: what to go on from, under this Spec.
    """
    from fsdp_lab.cli import session

    with session.lab(console, spec.world_size, spec.devices) as lab:
        if start is None:
            session.tell_unread_weights(console, [spec])
            run = lab.run(spec, **options)
        else:
            changes = {name: there for name, (_, there) in start.spec.difference(spec).items()}
            run = lab.resume(start, **options, **changes)
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
            for words in afterwards(run):
                console.print(words, markup=False, highlight=False)
            if len(run.events):
                console.print(view(run))
                results.add_run(run.summary())
            if trace is not None:
                console.print(write_trace(run, trace), markup=False, highlight=False)


def afterwards(run: Run) -> list[str]:
    """What befell the run, and where it is saved."""
    saves = [s.words for s in run.saves if s.error] + [s.words for s in run.saves[-1:] if not s.error]
    return [incident.words for incident in run.incidents] + saves


def write_trace(run: Run, file: Path) -> str:
    """Writes the traced steps and says so; or why not, since what was trained is not to end in an error."""
    try:
        run.export_trace(file)
    except FieldError as e:
        return f"no trace was written: {e.reason}"
    steps = len(run.events.traced())
    return f"{steps} traced step{'s' * (steps != 1)} in {file}: open it at ui.perfetto.dev or chrome://tracing"


# -- what is shown ---------------------------------------------------------------------------------------------------


def line(run: Run) -> str:
    """For a log: one line."""
    from fsdp_lab.cli import session
    from fsdp_lab.runs.comparison import NONE, cells

    found = cells(session.recent(run))
    told = ", ".join(f"{name} {found[name]}" for name in LINE if found[name] != NONE)
    return (
        f"step {run.step}"
        + (f" of {run.steps}" if run.steps else "")
        + (f": {told}" if told else f": {run.state.value}")
        + (f", {judged}" if (judged := run.judge.words(run.spec.workload)) else "")
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

    from fsdp_lab.core.formatting import count, duration, size

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
