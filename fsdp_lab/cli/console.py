"""What the commands share: refusals and failures, signals that end a command, its output, and files of results.

The file of `run` and `compare`: {"runs": [a summary, ...], "refused": [{"spec", "reason"}, ...]}; that of compare has a
"comparison" as well: {"baseline", "records", "recommendation"}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fsdp_lab.core import files

if TYPE_CHECKING:
    from rich.console import Console

LOG_WIDTH = 150  # columns where there is no terminal


class Refused(Exception):
    """The command cannot do this. `str()` is a sentence: what, why, and what to do instead. Exit code 2."""


class Failed(Exception):
    """The command was started and failed. `str()` is a sentence. Exit code 1."""


class CommandEnded(KeyboardInterrupt):
    """SIGTERM or SIGHUP (a closed terminal), raised where Ctrl-C would be, so that both clean up alike."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise `CommandEnded`. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise CommandEnded(number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), end) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Ignores Ctrl-C, SIGTERM and SIGHUP within it: for a clean-up of bounded time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), signal.SIG_IGN) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def at_least(args: argparse.Namespace, name: str, least: int, why: str = "") -> None:
    """Raises Refused if the option is given and less than `least`."""
    if (value := getattr(args, name)) is not None and value < least:
        number = f"{least} or more{why}" if why else f"a whole number of {least} or more"
        raise Refused(f"--{name.replace('_', '-')} {value} is refused; give {number}")


def terminal() -> Console:
    """The terminal; where there is none (a log, a pipe), lines are wide enough for the tables."""
    from rich.console import Console

    found = Console()
    return found if found.is_terminal else Console(width=LOG_WIDTH)


def say_json(content: Any) -> None:
    print(json.dumps(content, indent=1))


def say(text: str) -> None:
    """Prints text unchanged: lines of a table are not wrapped, and a pipe gets what a terminal shows."""
    terminal().print(text, markup=False, highlight=False, soft_wrap=True)


# -- files of results --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Results:
    """Summaries of runs and refused combinations; written after every run, so that Ctrl-C loses none."""

    file: Path | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    comparison: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises ArgumentError if the file cannot be written; to be called before anything is started."""
        check_file(self.file)

    def add_run(self, summary: Mapping[str, Any]) -> None:
        self.runs.append(dict(summary))
        self.write()

    def add_refused(self, spec: Mapping[str, Any], reason: str) -> None:
        self.refused.append({"spec": dict(spec), "reason": reason})

    def write(self) -> None:
        if self.file is not None:
            more = {} if self.comparison is None else {"comparison": self.comparison}
            write_file(self.file, {"runs": self.runs, "refused": self.refused, **more})


def check_file(file: Path | None) -> None:
    """Raises ArgumentError if the file of `--json` cannot be written."""
    if file is not None:
        files.check_file(file, field="--json")


def write_file(file: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON atomically: a reader never sees half a file."""
    files.write_whole(file, (json.dumps(content, indent=1) + "\n").encode(), field="--json")
