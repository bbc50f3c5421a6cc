"""`fsdp-lab lab --class N`: one JupyterLab for a room of people, each with a folder, a history and a share of the machine.

Each learner opens a link of their own: a workspace of JupyterLab in the learner's folder, which has copies of the notebooks.
The server gives the kernels started in it the learner's history (learners.py), and all labs share the machine as in
cluster/room.py says. All of them are one user of the system, with one token: this keeps people out of each other's way, not
out of each other's files. JupyterHub does that.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_lab.cli.console import Refused
from fsdp_lab.core.formatting import plural

if TYPE_CHECKING:
    from fsdp_lab.cluster.room import RoomLimits

MOST_LEARNERS = 200
TEACHER = "teacher"
FOLDER = "fsdp-lab-class"  # where the command is run, unless --dir names another
LINKS = "links.txt"
KERNELS = "fsdp_lab.cli.learners.LearnersKernels"
DATA = ".fsdp-lab"  # in each learner's folder; JupyterLab does not list it


@dataclass(frozen=True, kw_only=True)
class Classroom:
    """Its folder, what the machine gives, and the folders in it."""

    folder: Path
    limits: RoomLimits

    @property
    def names(self) -> tuple[str, ...]:
        """Of the learners' folders."""
        width = max(2, len(str(self.limits.learners)))
        return tuple(f"learner-{i:0{width}}" for i in range(1, self.limits.learners + 1))

    @property
    def options(self) -> Sequence[str]:
        """Of JupyterLab."""
        return (f"--ServerApp.kernel_manager_class={KERNELS}",)

    def variables(self, room: Path) -> dict[str, str]:
        """Of the server, and so of its kernels and terminals. `room`: a private folder to make it in. Raises Refused."""
        from fsdp_lab.cluster.room import VARIABLE, Room

        try:
            Room.make(room, self.limits)
        except OSError as e:
            raise Refused(f"the folder of the class cannot be made in {room} ({e.strerror}); set TMPDIR") from e
        return {VARIABLE: str(room), **learner_variables(self.folder, "")}

    def page(self, name: str, first: str, base: str, token: str) -> str:
        """The link of a learner, or of the teacher."""
        return f"{base}/lab/workspaces/{name}/tree/{name}/{first}?token={token}"

    def write_links(self, first: str, base: str, token: str) -> Path:
        """All links, one in a line, in a file that only this user can read, since they contain the token. Raises Refused."""
        file = self.folder / LINKS
        lines = [f"{name}\t{self.page(name, first, base, token)}\n" for name in (TEACHER, *self.names)]
        try:
            file.unlink(missing_ok=True)
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
                opened.writelines(lines)
        except OSError as e:
            raise Refused(f"{file} cannot be written ({e.strerror}); name another folder: --dir DIR") from e
        return file

    def summary(self) -> str:
        """Who may do how much, in a line."""
        limits = self.limits
        at_once = f"{plural(limits.labs, 'lab')} at once" + (", so take turns" if limits.labs < limits.learners else "")
        return f"{plural(limits.learners, 'learner')}, {at_once}; {plural(limits.ranks, 'rank')} for each"


def learner_variables(root: Path, learner: str) -> dict[str, str]:
    """Of the kernels in a learner's folder below `root`. "": of what runs in no learner's folder."""
    from fsdp_lab.cluster.room import LEARNER
    from fsdp_lab.history.history import VARIABLE

    return {LEARNER: learner, VARIABLE: str(root / learner / DATA / "history.sqlite3")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--class", type=int, dest="learners", metavar="N", help="for a room of N people, each with a link of their own")
    add("--labs", type=int, metavar="N", help="with --class, labs that may run at once (default: as the machine holds)")
    add("--ranks", type=int, metavar="N", help="with --class, ranks of one learner (default: 2)")
    add("--url", metavar="URL", help="with --class, how the learners reach this server, for their links")


def classroom(args: argparse.Namespace) -> Classroom | None:
    """The class of the options; None without one.

    Raises:
        Refused: an option without --class, or too many learners. ArgumentError: a number that is refused.
    """
    if args.learners is None:
        if given := next((n for n in ("labs", "ranks", "url") if getattr(args, n) is not None), None):
            raise Refused(f"--{given} is of a class; give --class N as well")
        return None
    from fsdp_lab.cluster.room import RoomLimits

    if args.learners > MOST_LEARNERS:
        raise Refused(f"--class {args.learners} is refused; one JupyterLab serves {MOST_LEARNERS} people at most")
    limits = RoomLimits.of_machine(args.learners, args.labs, args.ranks or 2)
    return Classroom(folder=(args.dir or Path.cwd() / FOLDER).expanduser().absolute(), limits=limits)


def base_url(given: str | None, ip: str, port: int) -> str:
    """Where learners reach the server. Raises Refused for what is no address of the web."""
    if given is not None:
        if not given.startswith(("http://", "https://")):
            raise Refused(f"--url {given} is no address of the web; give one such as https://lab.example.org")
        return given.rstrip("/")
    if ip in ("0.0.0.0", "", "*", "::"):
        ip = own_address()
    return f"http://{f'[{ip}]' if ':' in ip else ip}:{port}"


def own_address() -> str:
    """The address of this machine on the network that leads out of it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved for documentation
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
