"""Files with keys in them: whoever can read a connection file can run code as its owner."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fsdp_lab.cli.doctor.finding import Finding, State

ABOVE = Path("/")  # where others come from


def findings() -> list[Finding]:
    files = connection_files()
    readable = [file for file in files if others_read(file)]
    if not readable:
        return [Finding("connection files", f"{len(files)}, which nobody else can read")]
    names = ", ".join(map(str, readable[:3])) + (", ..." if len(readable) > 3 else "")
    fix = "whoever reads one can run code as you: chmod go-rwx " + " ".join(f"'{file}'" for file in readable[:3])
    return [Finding("connection files", f"others can read {names}", State.WARN, fix)]


def connection_files() -> list[Path]:
    """Of Jupyter's servers and kernels, and of ipyparallel's profiles."""
    home = Path(os.environ.get("IPYTHONDIR") or Path.home() / ".ipython")
    found = [*home.glob("profile_*/security/*.json")]
    try:
        from jupyter_core.paths import jupyter_runtime_dir
    except ImportError:
        return found
    runtime = Path(jupyter_runtime_dir())
    return [
        *found,
        *runtime.glob("kernel-*.json"),
        *runtime.glob("jpserver-*.json"),
        *runtime.glob("jupyter_cookie_secret"),
    ]


def others_read(file: Path) -> bool:
    """Whether the file can be read, and every folder above it passed, by more than its owner."""
    folders = [folder for folder in file.absolute().parents if ABOVE in folder.parents]
    try:
        if not os.stat(file).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            return False
        return all(os.stat(folder).st_mode & (stat.S_IXGRP | stat.S_IXOTH) for folder in folders)
    except OSError:
        return False
