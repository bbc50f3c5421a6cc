"""Which JupyterLab extensions the pages need, and which JupyterLab servers run here without them.

The widgets' browser halves are served by the JupyterLab server. Where that is another environment than the kernel's, as
on most cloud machines, these two packages have to be installed over there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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
    """A Jupyter server that runs now."""

    pid: int
    port: int
    python: str  # the interpreter that runs it
    prefix: Path  # its environment

    @property
    def ours(self) -> bool:
        """Whether it runs in the environment that this code runs in."""
        return self.prefix.resolve() == Path(sys.prefix).resolve()

    def install_command(self, missing: Sequence[Extension]) -> str:
        return " ".join([self.python, "-m pip install", *(f"'{extension.requirement}'" for extension in missing)])


def missing(prefix: Path) -> list[Extension]:
    """The needed extensions that a JupyterLab of that environment would not find."""
    data = [prefix / "share/jupyter", Path.home() / ".local/share/jupyter", Path("/usr/local/share/jupyter")]
    data += [Path(p) for p in os.environ.get("JUPYTER_PATH", "").split(os.pathsep) if p]
    return [e for e in NEEDED if not any((d / "labextensions" / e.folder).is_dir() for d in data)]


def running_servers() -> list[Server]:
    """The Jupyter servers of this user, by the files that they leave in Jupyter's runtime folder."""
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
            # not resolved: a virtual environment's python is a link to its base, and the environment is what counts
            servers.append(
                Server(pid=record["pid"], port=record["port"], python=python, prefix=Path(python).parents[1])
            )
    return servers
