"""`fsdp-lab`: parses the command line, runs one command, and turns exceptions into a sentence and an exit code: 0 done;
1 the command failed, or reports a failure; 2 refused, nothing was started; 130 Ctrl-C."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

from fsdp_lab.base import __version__
from fsdp_lab.base.errors import FieldError, SentenceError, not_installed
from fsdp_lab.bench.plan import option
from fsdp_lab.cli import bench, compare, doctor, drill, history, jupyter, plan, run
from fsdp_lab.cli.console import CommandEnded, Failed, Refused, add_command, signals_raise
from fsdp_lab.cluster import ClusterError, StartError
from fsdp_lab.spec.fields import ALIASES

CHECKPOINTS = "list the checkpoints in a folder, or export a model for transformers"
# Name, function that adds the arguments, function that runs it, description.
COMMANDS = (
    ("lab", jupyter.add_arguments, jupyter.run, "start JupyterLab on the notebooks"),
    ("run", run.add_arguments, run.run, "train one Spec in this terminal"),
    ("compare", compare.add_arguments, compare.run, "train every combination of the given lists and compare them"),
    ("watch", run.add_script, run.watch_script, "run a training script as it is, and watch what it trains"),
    ("prove", compare.add_scripts, compare.prove_scripts, "prove that two training scripts compute the same"),
    ("plan", plan.add_arguments, plan.run, "predict memory and step time of a Spec on any hardware"),
    ("checkpoints", run.add_checkpoints, run.checkpoints, CHECKPOINTS),
    ("history", history.add_arguments, history.run, "list, show, name, annotate and delete stored runs"),
    ("ranks", history.add_ranks_arguments, history.ranks, "list and end persistent ranks"),
    ("report", history.add_report_arguments, history.report, "write stored runs as one HTML report"),
    ("export", run.add_export, run.export_spec, "write a Spec as a torchrun script, or JSON"),
    ("drill", drill.add_arguments, drill.run, "inject random faults into small runs and count the recoveries"),
    ("bench", bench.add_arguments, bench.run, "run a benchmark"),
    ("kernel", jupyter.add_kernel_arguments, jupyter.install_kernel, "register this environment as a Jupyter kernel"),
    ("doctor", doctor.add_arguments, doctor.run, "check this machine and suggest fixes"),
)

# Options of other programs -> ours.
OTHERS = {option(n): option(f) for n, f in ALIASES.items()} | {"--epochs": "--steps", "--world-size": "--ranks"}


def parser() -> argparse.ArgumentParser:
    about = "A laboratory for Fully Sharded Data Parallel."
    top = argparse.ArgumentParser(prog="fsdp-lab", description=about, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"fsdp-lab {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, add_arguments, run_command, help_text in COMMANDS:
        command = add_command(commands, name, help_text)
        command.set_defaults(run=run_command)
        add_arguments(command)
        command.usage = command.usage or f"fsdp-lab {name} [OPTION ...] [ARGUMENT ...]"  # an error repeats it
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Errors of argparse raise SystemExit(2)."""
    top, words = parser(), sys.argv[1:] if argv is None else argv
    if not words or words[0] == "help":
        top.print_help()
        return 0
    names = [name for name, *_ in COMMANDS]
    if words[0] not in names and (close := difflib.get_close_matches(words[0], names, n=1, cutoff=0.65)):
        top.error(f"there is no command {words[0]!r}; did you mean {close[0]}")
    args, unknown = top.parse_known_args(words)
    if unknown:
        options, word = [*map(option, vars(args))], unknown[0].partition("=")[0].replace("_", "-")
        similar = {OTHERS.get(word)} & {*options} or difflib.get_close_matches(word, options, n=1)
        top.error(f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; use {one}" for one in similar))
    try:
        with signals_raise():
            code: int = args.run(args)
        return code
    except (Refused, Failed, SentenceError) as e:
        print(f"fsdp-lab: {e.words if isinstance(e, FieldError) else e}", file=sys.stderr)
        failed = isinstance(e, Failed | ClusterError) and not isinstance(e, StartError)
        return 1 if failed else 2
    except ModuleNotFoundError as missing:
        if (missing.name or "fsdp_lab").startswith("fsdp_lab"):
            raise  # ours: a bug, not an installation that lacks something
        print(f"fsdp-lab: {not_installed('this command', missing)}", file=sys.stderr)
        print("`fsdp-lab doctor` lists everything that is missing.", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("fsdp-lab: interrupted; what was started has been ended", file=sys.stderr)
        return interrupt.exit_code if isinstance(interrupt, CommandEnded) else 130
    except BrokenPipeError:  # `fsdp-lab ... | head`: the reader has gone, and flushing at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def entry() -> None:
    """The console script."""
    sys.exit(main())
