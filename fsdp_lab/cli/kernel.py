"""`fsdp-lab kernel install`: registers this environment as a kernel for a JupyterLab that runs from another one.

JupyterLab itself serves the browser part of the widgets. Where it runs from another environment than the kernel, as on
most cloud machines, two extensions have to be installed in that environment; `missing` and `running_servers` find out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.cli.console import Refused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    add = actions.add_parser("install", help="register the kernel", allow_abbrev=False).add_argument
    add("--name", default="fsdp-lab", help="the kernel's name (default: %(default)s)")
    add("--prefix", type=Path, help="an environment to register it in (default: the user's own folder)")


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("ipykernel") is None:
        raise Refused(f"ipykernel is not installed for {sys.executable}; pip install ipykernel")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.name):  # Jupyter would replace the folder ".."
        hint = "use letters and digits, with '.', '_' and '-' between"
        raise Refused(f"--name {args.name!r} is not a kernel's name; {hint}")
    where = register(args.name, args.prefix)
    print(f"Registered: the kernel {args.name!r} runs {sys.executable}\n  in {where}")
    print(f"Choose it in the notebook's menu: Kernel, Change Kernel, {display_name()}.\n")
    print("\n".join(what_servers_need()))
    return 0


def display_name() -> str:
    torch = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = f", torch {importlib.metadata.version('torch')}"
    return f"fsdp_lab (Python {platform.python_version()}{torch})"


def register(name: str, prefix: Path | None) -> str:
    """Writes the kernel spec and returns its folder. Raises Refused if it cannot be written."""
    from ipykernel.kernelspec import install

    into: dict[str, Any] = {"user": True} if prefix is None else {"prefix": str(prefix)}
    try:
        return str(install(**into, kernel_name=name, display_name=display_name()))
    except OSError as e:
        where = e.filename or prefix or "the user's Jupyter folder"
        raise Refused(f"cannot write {where} ({e.strerror}); choose another place with --prefix DIR") from e


def what_servers_need() -> list[str]:
    """Lines on what each running server of another environment lacks; if none runs, what any of them needs."""
    others = [server for server in running_servers() if not server.ours]
    if not others:
        lines = ["The JupyterLab server that shows the notebooks needs two packages in ITS environment:"]
        return [*lines, "  pip install " + " ".join(f"'{e.requirement}'" for e in NEEDED)]
    lines = []
    for server in others:
        lacking = missing(server.prefix)
        state = "lacks:" if lacking else "has what it needs."
        lines.append(f"The server on port {server.port} ({server.prefix}) {state}")
        if lacking:
            lines += [f"  {server.install_command(lacking)}", "  then reload its page in the browser"]
    return lines


@dataclass(frozen=True, kw_only=True)
class Extension:
    """A prebuilt JupyterLab extension: the pip requirement that brings it, and its folder below `labextensions`."""

    requirement: str
    folder: str


NEEDED = (
    Extension(requirement="anywidget>=0.9.18", folder="anywidget"),
    Extension(requirement="jupyterlab_widgets>=3", folder="@jupyter-widgets/jupyterlab-manager"),
)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running Jupyter server."""

    pid: int
    port: int
    python: str  # the interpreter that runs it
    prefix: Path  # its environment

    @property
    def ours(self) -> bool:
        """Tells whether it runs from this environment."""
        return self.prefix.resolve() == Path(sys.prefix).resolve()

    def install_command(self, missing: Sequence[Extension]) -> str:
        return " ".join([self.python, "-m pip install", *(f"'{extension.requirement}'" for extension in missing)])


def missing(prefix: Path) -> list[Extension]:
    """The required extensions that JupyterLab of that environment would not find."""
    data = [prefix / "share/jupyter", Path.home() / ".local/share/jupyter", Path("/usr/local/share/jupyter")]
    data += [Path(p) for p in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if p]
    return [e for e in NEEDED if not any((d / "labextensions" / e.folder).is_dir() for d in data)]


def running_servers() -> list[Server]:
    """The Jupyter servers of this user, from the files in Jupyter's runtime folder."""
    try:
        import psutil
        from jupyter_core.paths import jupyter_runtime_dir
    except ImportError:
        return []
    servers = []
    for file in sorted(Path(jupyter_runtime_dir()).glob("jpserver-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError, psutil.Error):
            record = json.loads(file.read_text(encoding="utf-8"))
            python = psutil.Process(record["pid"]).cmdline()[0]
            prefix = Path(python).parents[1]  # not resolved: a virtual environment's python is a link to its base
            servers.append(Server(pid=record["pid"], port=record["port"], python=python, prefix=prefix))
    return servers
