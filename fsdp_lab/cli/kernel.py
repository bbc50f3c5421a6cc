"""`fsdp-lab kernel install`: this environment as a kernel of a JupyterLab that runs from another one."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
from pathlib import Path

from fsdp_lab.cli.console import Refused
from fsdp_lab.cli.extensions import NEEDED, missing, running_servers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    install = actions.add_parser("install", help="register the kernel", allow_abbrev=False)
    install.add_argument("--name", default="fsdp-lab", help="the kernel's name (default: %(default)s)")
    install.add_argument(
        "--prefix", type=Path, help="an environment to register it in (default: the user's own folder)"
    )


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("ipykernel") is None:
        raise Refused(f"ipykernel is not installed beside {sys.executable}; pip install ipykernel")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.name):  # ".." is a folder, which Jupyter would replace
        raise Refused(
            f"--name {args.name!r} is not a kernel's name; use letters and digits, with '.', '_' and '-' between"
        )
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
    """Writes the kernel's description and returns its folder. Raises Refused where that cannot be written."""
    from ipykernel.kernelspec import install

    try:
        return str(
            install(
                user=prefix is None,
                prefix=None if prefix is None else str(prefix),
                kernel_name=name,
                display_name=display_name(),
            )
        )
    except OSError as e:
        where = e.filename or prefix or "the user's Jupyter folder"
        raise Refused(f"cannot write {where} ({e.strerror}); choose another place with --prefix DIR") from e


def what_servers_need() -> list[str]:
    """For each running server of another environment what it lacks; where none runs, what any of them needs."""
    others = [server for server in running_servers() if not server.ours]
    if not others:
        lines = ["The JupyterLab server that shows the notebooks needs two packages in ITS environment:"]
        return [*lines, "  pip install " + " ".join(f"'{e.requirement}'" for e in NEEDED)]
    lines = []
    for server in others:
        lacking = missing(server.prefix)
        lines.append(
            f"The server on port {server.port} ({server.prefix}) " + ("lacks:" if lacking else "has what it needs.")
        )
        if lacking:
            lines += [f"  {server.install_command(lacking)}", "  then reload its page in the browser"]
    return lines
