"""The parts that commands share: refusals and failures, signals, output, files of results, and a lab for one command.
Imports rich and the lab when they are needed."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fsdp_lab.base import files
from fsdp_lab.base.formatting import GIB

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fsdp_lab.cluster.hosts import Hosts
    from fsdp_lab.lab import Lab
    from fsdp_lab.runs import Run, Sweep

LOG_WIDTH = 150  # columns if the output is no terminal
POLL_S = 0.2


class Refused(Exception):
    """The command cannot do this. `str()` is a sentence: what, why, and what to do instead. Exit code 2."""


class Failed(Exception):
    """The command was started and failed. `str()` is a sentence. Exit code 1."""


def add_command(commands: Any, name: str, help_text: str) -> argparse.ArgumentParser:
    """Adds a command, or an action of one, to what `add_subparsers` returned."""
    about = f"{help_text[0].upper()}{help_text[1:]}."
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_text, description=about, allow_abbrev=False)
    return parser


def at_least(args: argparse.Namespace, name: str, least: int) -> None:
    """Raises Refused if the option is given and less than `least`."""
    if (value := getattr(args, name)) is not None and value < least:
        raise Refused(f"--{name.replace('_', '-')} {value} is refused; give a whole number of {least} or more")


def memory_limit(args: argparse.Namespace) -> int | None:
    """`--memory`, in GiB, as bytes. Raises Refused."""
    if args.memory is None:
        return None
    if not 0 < args.memory < 1e6:
        raise Refused(f"--memory {args.memory:g} is refused; give the GiB of a device, such as 80")
    return int(args.memory * GIB)


COMMON = ("gpus_per_host", "ranks_per_host", "python")
OF_SLURM = ("time", "partition", "account", "qos")


def add_hosts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks on other hosts (see Lab.ssh and Lab.slurm)").add_argument
    add("--ssh", metavar="HOST,HOST", help="hosts that ssh reaches without a question")
    add("--ssh-config", metavar="FILE", help="for ssh, instead of ~/.ssh/config")
    add("--slurm", type=int, metavar="N", help="N hosts of a job that Slurm grants")
    add("--gpus-per-host", type=int, metavar="N", help="so many ranks on each host, each with a GPU")
    add("--ranks-per-host", type=int, metavar="N", help="so many ranks on each host")
    add("--python", metavar="PATH", help="of Python on the hosts (default: the same path as here)")
    add("--sync-hosts", action="store_true", help="install on the hosts what they lack")
    for name in OF_SLURM:
        add(f"--{name}", help="of the job, as for sbatch")


def hosts_of(args: argparse.Namespace) -> Hosts | None:
    """Raises Refused, ArgumentError."""
    common: dict[str, Any] = {name: getattr(args, name) for name in COMMON} | {"sync": args.sync_hosts}
    of_slurm = {name: value for name in OF_SLURM if (value := getattr(args, name)) is not None}
    if args.ssh is None and args.slurm is None:
        if any(common.values()) or of_slurm or args.ssh_config:
            raise Refused("options for hosts are given and no hosts; name them with --ssh, or give --slurm N")
        return None
    if args.ssh is not None and args.slurm is not None:
        raise Refused("--ssh and --slurm are given; choose one")
    if common["gpus_per_host"] is None and common["ranks_per_host"] is None:
        raise Refused("the ranks of each host are missing; give --gpus-per-host N or --ranks-per-host N")
    from fsdp_lab.cluster.hosts import SlurmHosts, ssh_hosts

    if args.slurm is not None:
        return SlurmHosts(hosts=args.slurm, **common, **of_slurm)
    if of_slurm:
        raise Refused(f"--{next(iter(of_slurm))} is of a Slurm job; leave it out with --ssh")
    return ssh_hosts(args.ssh, **common, ssh_args=("-F", args.ssh_config) if args.ssh_config else ())


class CommandEnded(KeyboardInterrupt):
    """SIGTERM or SIGHUP (a closed terminal), raised where Ctrl-C would be, so that both clean up alike."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def signals_raise() -> AbstractContextManager[None]:
    """Within it SIGTERM and SIGHUP raise `CommandEnded`."""

    def end(number: int, frame: FrameType | None) -> None:
        raise CommandEnded(number)

    return _handler(end, "SIGTERM", "SIGHUP")


def signals_ignored() -> AbstractContextManager[None]:
    """Within it Ctrl-C, SIGTERM and SIGHUP are ignored: for a clean-up of bounded time."""
    return _handler(signal.SIG_IGN, "SIGINT", "SIGTERM", "SIGHUP")


@contextlib.contextmanager
def _handler(handler: Any, *names: str) -> Iterator[None]:
    """Handles these signals, as far as the system has them. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, handler) for n in (getattr(signal, name, None) for name in names) if n is not None}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def terminal() -> Console:
    """The terminal. A log or a pipe instead of one gets lines that are wide enough for the tables."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


def say(text: str, console: Console | None = None, style: str | None = None) -> None:
    """Prints text: a terminal breaks long sentences between words, and lines of a table are not wrapped."""
    console = console or terminal()
    console.print(wrapped(text, console), style=style, markup=False, highlight=False, soft_wrap=True)


def wrapped(text: str, console: Console) -> str:
    """The text with the sentences in it broken to the width of a terminal. Rows of tables have columns of spaces."""
    if not console.is_terminal:
        return text
    fill = partial(textwrap.fill, width=console.width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if "  " in line.strip() else fill(line) for line in text.split("\n"))


def say_json(content: Any) -> None:
    print(json.dumps(content, indent=1))


@contextlib.contextmanager
def live(console: Console, *, transient: bool = False) -> Iterator[Callable[[RenderableType], None]]:
    """A function that replaces what it drew before; it draws nothing if the output is no terminal."""
    from rich.live import Live

    if not console.is_terminal:
        yield lambda content: None
        return
    with Live(console=console, refresh_per_second=5, transient=transient) as drawn:
        yield drawn.update


@dataclass(kw_only=True)
class Results:
    """The file of `run` and `compare`, written after every run, so that Ctrl-C loses none: {"runs": [a summary, ...],
    "refused": [{"spec", "reason"}, ...]}; that of compare has a "comparison" as well."""

    file: Path | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    comparison: dict[str, Any] | None = None

    @classmethod
    def to(cls, file: Path | None) -> Results:
        """Raises ArgumentError if the file cannot be written."""
        return cls(file=file and files.check_file(file, field="--json"))

    def add_run(self, summary: Mapping[str, Any]) -> None:
        self.runs.append(dict(summary))
        self.write()

    def add_refused(self, spec: Mapping[str, Any], reason: str) -> None:
        self.refused.append({"spec": dict(spec), "reason": reason})

    def write(self) -> None:
        if self.file is not None:
            more = {} if self.comparison is None else {"comparison": self.comparison}
            write_file(self.file, {"runs": self.runs, "refused": self.refused, **more})


def write_file(file: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON atomically: a reader never sees half a file."""
    files.write_whole(file, (json.dumps(content, indent=1) + "\n").encode(), field="--json")


@contextlib.contextmanager
def open_lab(
    console: Console, ranks: int, devices: Sequence[str] | None, *, history: bool = True, hosts: Hosts | None = None
) -> Iterator[Lab]:
    """A lab for the duration of a command. Raises ClusterError: the ranks cannot start or join."""
    from fsdp_lab.lab import Lab

    warnings.filterwarnings("ignore", module="ipyparallel|jupyter_client|zmq")
    with console.status("starting") as status:
        opened = Lab(
            ranks,
            devices=devices,
            history=history,
            hosts=hosts,
            progress=lambda p: status.update(f"{p.stage} ({p.done} of {p.total}), {p.seconds:.0f} s"),
        )
    try:
        for note in opened.notes:
            say(f"note: {note}", console, "dim")
        yield opened
    finally:
        with signals_ignored():
            opened.close()


def watch(run: Run | Sweep, show: Callable[[], None]) -> None:
    """Waits for the end, calling `show` about five times a second and at the end. Raises the error of a run that failed;
    Ctrl-C stops the run first."""
    try:
        while True:
            show()
            with contextlib.suppress(TimeoutError):
                run.wait(POLL_S)
                return
    except KeyboardInterrupt:
        with signals_ignored():
            run.stop()
        raise
    finally:
        show()
