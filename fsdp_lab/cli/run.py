"""`fsdp-lab run`: one Spec in a terminal, for `--steps` or until Ctrl-C; `export`, `checkpoints`: a Spec or a trained model
in a form that other programs use; `watch`: a training script as it is."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.base.errors import ArgumentError, FieldError
from fsdp_lab.base.files import check_file
from fsdp_lab.base.formatting import plural, size
from fsdp_lab.cli import console as shared, fields
from fsdp_lab.cli.console import Failed, Refused, Results, at_least, live, open_lab, say, terminal, watch
from fsdp_lab.export import EXPORTS
from fsdp_lab.spec import checkpoint_format
from fsdp_lab.spec.checkpoint_format import Checkpoint, check_same, find
from fsdp_lab.spec.describe import describe_strategy
from fsdp_lab.spec.spec import Spec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from fsdp_lab.cluster.hosts import Hosts
    from fsdp_lab.runs import CheckpointConfig, EvalConfig, Run

LINE_S = 2.0  # between two lines of output if there is no terminal
NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # of transformers, which writes a file or two
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)  # to a script's command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    help_text = 'a file with fields of a Spec, {"model": "gpt2-1m", "world_size": 2}; options for fields precede it'
    add("spec", type=Path, nargs="?", help=help_text)
    add("--anyway", action="store_true", help="start it although the planner knows that its memory does not suffice")
    add("--steps", type=int, help="number of steps (default: train until Ctrl-C)")
    add("--ranks", type=int, help="number of ranks (default: the file's world_size, or 2)")
    add("--evaluate-every", type=int, metavar="N", help="evaluate on held-out samples every N steps")
    add("--patience", type=int, metavar="N", help="stop after N evaluations without improvement")
    add("--json", type=Path, metavar="FILE", help="write the summary to FILE, as compare does")
    trace = "write traced steps (.json or .json.gz) for ui.perfetto.dev or chrome://tracing"
    add("--trace", type=Path, metavar="FILE", help=trace)
    resume = "resume from a checkpoint, or from the newest in a folder; under the given Spec, or the saved one"
    add("--resume", type=Path, metavar="DIR", help=resume)
    add("--save", type=Path, metavar="DIR", help="save a checkpoint of the last step to DIR; see --save-every")
    add("--save-every", type=int, metavar="N", help="save every N steps")
    recover = "when a rank is lost, recover automatically: on as many ranks, or on those that remain"
    add("--recover", choices=("same", "fewer"), help=recover)
    trackers = "report metrics to wandb, trackio, tensorboard, mlflow or jsonl, or to several: a,b"
    add("--report-to", metavar="TRACKER", help=trackers)
    add("--name", default="", help="of the run, for lists, comparisons and reports")
    add("--note", default="", metavar="TEXT", help="stored with the run")
    fields.add_options(parser, several=False)
    shared.add_hosts(parser)


def run(args: argparse.Namespace) -> int:
    at_least(args, "steps", 1)
    results = Results.to(args.json)
    if args.trace is not None:
        from fsdp_lab.runs.timeline import check_trace_path

        check_trace_path(args.trace, field="--trace")
    spec, start = spec_and_checkpoint(args)
    hosts = shared.hosts_of(args)
    if hosts is not None and args.ranks is not None:
        raise Refused("--ranks is given beside hosts; the ranks are those of all hosts")
    if hosts is not None:
        spec = spec.replace(world_size=hosts.ranks, devices=None)
    evaluate = eval_config(args)
    from fsdp_lab.models.check import check
    from fsdp_lab.planner.questions import DoesNotFit

    check(spec.workload, evaluated=evaluate.samples if evaluate else 0, begins=start is None)
    from fsdp_lab.runs.recovery import RecoveryPolicy
    from fsdp_lab.runs.trackers import Reporter

    Reporter(args.report_to, field="--report-to").checked()
    options: dict[str, Any] = {"steps": args.steps, "evaluate": evaluate, "anyway": args.anyway}
    options |= {"report_to": args.report_to, "name": args.name, "note": args.note, "save": checkpoint_config(args)}
    options["recover"] = RecoveryPolicy() if args.recover is None else RecoveryPolicy(how="auto", ranks=args.recover)
    try:
        train(terminal(), spec, options, results, args.trace, start, hosts)
    except DoesNotFit as e:
        raise e.with_way_out("--anyway") from e
    return 0


def spec_and_checkpoint(args: argparse.Namespace) -> tuple[Spec, Checkpoint | None]:
    """The Spec of the options, the file, the checkpoint, in this order; and the checkpoint to resume from. Raises Refused,
    FieldError."""
    start = None if args.resume is None else find(args.resume, field="--resume")
    changes = fields.parse_values_of_one(args)
    if args.spec is None and start is None and not changes:
        raise Refused("no Spec is given; say what to train, as --model gpt2-1m, in a JSON file, or with --resume")
    base = Spec() if start is None else start.spec
    changes |= {} if args.ranks is None else {"world_size": args.ranks, "devices": None}  # with what needs so many
    spec = (base if args.spec is None else read_spec(args.spec)).replace(**changes)
    if start is not None:
        check_same(start, spec)
    return spec, start


def checkpoint_config(args: argparse.Namespace) -> CheckpointConfig | None:
    """The config of `--save` and its options. Raises FieldError, Refused."""
    if args.save is None and args.save_every is not None:
        raise Refused("--save-every is given and no folder; name it with --save")
    if args.save is None:
        return None
    from fsdp_lab.runs.saving import CheckpointConfig

    return CheckpointConfig(folder=args.save, every=args.save_every)


def eval_config(args: argparse.Namespace) -> EvalConfig | None:
    """The config of `--evaluate-every` and its options. Raises Refused if that one is missing, FieldError for values."""
    from fsdp_lab.runs.evaluation import EvalConfig

    if args.evaluate_every is None:
        if args.patience is not None:
            raise Refused("--patience needs evaluations; give --evaluate-every too")
        return None
    return EvalConfig(every=args.evaluate_every, patience=args.patience)


def read_spec(path: Path) -> Spec:
    """The Spec in a JSON file. Raises Refused if it cannot be read, SpecError for its content."""
    try:
        return Spec.from_json(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise Refused(f"cannot read {path} ({e.strerror}); give the path of a JSON file, or --model {path}") from e
    except UnicodeDecodeError as e:
        raise Refused(f"{path} is not text; give the path of a JSON file") from e


def train(
    console: Console,
    spec: Spec,
    options: Mapping[str, Any],
    results: Results,
    trace: Path | None = None,
    start: Checkpoint | None = None,
    hosts: Hosts | None = None,
) -> None:
    """Trains with live output; at the end, also after Ctrl-C, prints and writes the summary and the trace."""
    with open_lab(console, spec.world_size, spec.devices, hosts=hosts) as lab:
        if start is None:
            run = lab.run(spec, **options)
        else:
            changes = {name: wanted for name, (_, wanted) in start.spec.difference(spec).items()}
            run = lab.resume(start, **options, **changes)
            say(start.resumed(spec), console)
        printed_s = time.monotonic()
        try:
            with live(console, transient=True) as draw:

                def show() -> None:
                    nonlocal printed_s
                    if console.is_terminal:
                        draw(view(run, console))
                    elif time.monotonic() - printed_s > LINE_S:
                        printed_s = time.monotonic()
                        say(run.line, console)

                watch(run, show)
        except Exception as e:
            text = e.words if isinstance(e, FieldError) else str(e).strip().partition("\n")[0]
            raise Failed(text or type(e).__name__) from e
        finally:
            if run.done:
                run.reporter.flush()  # so that its notes are complete
            saves = [s.words for s in run.saves if s.error] + [s.words for s in run.saves[-1:] if not s.error]
            told = [incident.words for incident in run.incidents] + saves + [str(d) for d in run.diagnoses]
            for text in filter(None, [run.details, *told]):
                say(text, console)
            if len(run.events):
                console.print(view(run, console))
                results.add_run(run.summary())
                say(f"stored as {run.id}: fsdp-lab report {run.id}", console)
            if trace is not None:
                say(write_trace(run, trace), console)


def write_trace(run: Run, file: Path) -> str:
    """Writes the traced steps. Returns a sentence on success as on failure, which must not fail the command."""
    try:
        run.export_trace(file)
    except FieldError as e:
        return f"no trace was written: {e.reason}"
    steps = plural(len(run.events.traced()), "traced step")
    return f"{steps} in {file}: open it at ui.perfetto.dev or chrome://tracing"


def view(run: Run, console: Console) -> Text:
    """The state of the run and a table of its newest steps."""
    from rich.text import Text

    return Text(shared.wrapped(repr(run.table()), console), no_wrap=True, overflow="crop")


def add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", type=Path, help='a file with {"workload": {...}, "strategy": {...}, "world_size": 2}')
    to = "script: for torchrun, with torch's own FSDP2, FSDP1 or DDP"
    parser.add_argument("--to", choices=EXPORTS, required=True, help=f"{to}; spec: for fsdp-lab run")
    output = "output file (default: standard output, but not for a script)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--ranks", type=int, help="instead of the file's world_size")


def export_spec(args: argparse.Namespace) -> int:
    if args.output is not None:
        check_file(args.output, replace=args.force, field="--output")
    spec = read_spec(args.spec)
    if args.ranks is not None:
        spec = spec.replace(world_size=args.ranks)
    os.environ.setdefault(NO_BARS, "1")
    if args.output is not None:
        print(EXPORTS[args.to](spec, args.output, force=args.force))
    elif args.to == "script":
        raise ArgumentError("--output", "a script reads samples and a model that lie beside it", "name its file")
    else:
        print(spec.to_json())
    return 0


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a folder of checkpoints, or one checkpoint")
    parser.add_argument("--export", type=Path, metavar="DIR", help="export the newest model, for from_pretrained")
    parser.add_argument("--force", action="store_true", help="overwrite an existing model")


def checkpoints(args: argparse.Namespace) -> int:
    if args.export is not None:
        from fsdp_lab.export import export_model

        os.environ.setdefault(NO_BARS, "1")
        print(export_model(find(args.folder, field="folder"), args.export, force=args.force))
        return 0
    if not args.folder.is_dir():
        raise Refused(f"there is no folder {args.folder}; name one that a run was saved in")
    print("\n".join(checkpoint_lines(args.folder)))
    return 0


def checkpoint_lines(folder: Path) -> Iterator[str]:
    """A line for each checkpoint, oldest first; then the incomplete ones."""
    complete, incomplete = checkpoint_format.checkpoints(folder), checkpoint_format.incomplete_checkpoints(folder)
    for c in complete:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(c.saved_unix_s))
        strategy = f"{describe_strategy(c.spec)} on {c.spec.world_size} ranks"
        what = f"after {plural(c.step, 'step')}, {size(c.nbytes)}, {c.kind}, of run {c.run}"
        yield f"{c.path.name}  {what}, {when}: {strategy}"
    yield from (f"incomplete: {reason}" for reason in incomplete.values())
    if not complete and not incomplete:
        yield f"{folder} contains no checkpoint"


# -- fsdp-lab watch: a script that knows nothing of it -----------------------------------------------------------------


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.usage = "fsdp-lab watch [OPTION ...] -- COMMAND [ARGUMENT ...]"
    add = parser.add_argument
    add("--title", default="", help="of the run (default: the script and its arguments)")
    add("--listen", action="store_true", help="leave the script its own process group: no communication")
    add("--no-ledger", action="store_true", help="no memory by class: for a script that uses torch's profiler")
    add("--history", default="", metavar="FILE", help="where it is stored (default: as fsdp-lab history)")
    add("--no-audit", action="store_true", help="do not look whether the updates are what they should be")
    add("--report-to", default="", metavar="TRACKER", help="as of fsdp-lab run")
    add("command", nargs="*", metavar="COMMAND", help="such as torchrun --nproc-per-node 2 train.py")


def watch_script(args: argparse.Namespace) -> int:
    """The command's own exit code; 128 and the signal's number, if one ended it."""
    command: list[str] = args.command
    if not command:
        raise Refused("no command was given; write it after --: fsdp-lab watch -- torchrun --nproc-per-node 2 train.py")
    if shutil.which(command[0]) is None:
        hint = f"python {command[0]}" if command[0].endswith(".py") else "a program that is on the PATH"
        raise Refused(f"{command[0]} was not found, or is no program; give {hint}")
    if args.report_to:
        from fsdp_lab.runs.trackers import Reporter

        Reporter(args.report_to, field="--report-to").checked()
    site = Path(__file__).parents[1] / "runs" / "site"
    start = next((i for i, word in enumerate(command) if word.endswith(".py")), 0)
    title = args.title or " ".join([Path(command[start]).name, *command[start + 1 :]])
    options = {"listen": args.listen, "ledger": not args.no_ledger, "title": title, "history": args.history}
    options |= {"audit": not args.no_audit, "report_to": args.report_to}
    with tempfile.TemporaryDirectory(prefix="fsdp_lab_watch_") as folder:
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
        asked = json.dumps({"folder": folder, **options})  # `fsdp_lab.runs.attach.AttachOptions`
        code = call(command, {**os.environ, "FSDP_LAB_WATCH": asked, "PYTHONPATH": path})
        said = [json.loads(path.read_text()) for path in Path(folder).glob("process-*.json")]
    for line in told(said, args.history or None, code):
        print(f"fsdp-lab: {line}", file=sys.stderr)
    return code


def call(command: Sequence[str], environment: dict[str, str]) -> int:
    """Runs a command to its end; signals are its own affair. Ctrl-C reaches it from the terminal, as it would alone."""
    process = subprocess.Popen(command, env=environment)
    before = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in _PASSED_ON}
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                code = process.wait()
                return code if code >= 0 else 128 - code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def told(said: Sequence[Mapping[str, Any]], history: str | None, code: int) -> list[str]:
    """What was seen, a sentence each. said: what the command's processes say (`fsdp_lab.runs.attach.Attached`)."""
    from fsdp_lab.runs.history import History

    lines = list(dict.fromkeys(note for one in said for note in one["notes"]))
    for run in dict.fromkeys(one["run"] for one in sorted(said, key=lambda one: one["rank"]) if one["run"]):
        ranks = [one for one in said if one["run"] == run]
        first, made = ranks[0], plural(max(one["steps"] for one in ranks), "step")
        what = f"{made} of {first['model']} under {first['backend']} on {plural(first['world_size'], 'rank')}"
        lines.append(f"watched {what}; fsdp-lab history show {run}, fsdp-lab report {run}")
        for stored in (one for one in History(history).runs() if one.id == run):
            audit, ended = stored.audit(), f"the command ended with exit code {code} after {made}"
            nothing = f"audit: nothing found in {made}" if audit.done else "audit: none"
            lines += [stored.blame().sentence, *(repr(audit).splitlines() if audit else [nothing])]
            lines += [f"{ended}: {stored.reason}" if stored.state.value == "failed" else ended] if code else []
        if any(one["state"] == "watching" for one in ranks):
            lost = "as by a signal or os._exit; its last steps may be missing"
            lines.append(f"a rank ended without Python's own end, {lost}")
    if not any(one["run"] for one in said):
        made = sum(one["optimizers"] for one in said)
        some = f"{plural(made, 'optimizer')} of torch's made, and none stepped a model"
        none = "no Python process of the command made an optimizer of torch's"
        lines.append(f"nothing was watched: {some if made else none}")
    return lines
