"""The private folder of a cluster: its connection files, keys and logs, which no other user can read."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "fsdp_lab-"  # nothing else is ever removed


def private_folder() -> Path:
    """A new folder that only this user can read. Raises OSError where none can be made."""
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def private_folders() -> Iterator[Path]:
    """Those of this user that are there. Another user's, or one that others may read, is not trusted."""
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if is_private(folder) and folder.is_dir():
            yield folder


def is_private(path: Path) -> bool:
    """Whether it is there, is this user's, no link, and nobody else may read or write it."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & 0o077


def remove_private(folder: Path) -> None:
    """Removes a folder of `private_folder`, and no other."""
    if folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
