"""`cached`: files that are slow to make, each made once on a machine; `hub_folder`: those of the Hugging Face Hub.

Note: one process of a machine makes a file, under a lock (filelock), which is free again when that process ends, however it
ends. Others poll, so that they can be interrupted.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from fsdp_lab.base.errors import SpecError

VARIABLE = "FSDP_LAB_CACHE"  # the folder; else the user's cache folder of fsdp_lab
_POLL_S = 0.05
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TIMEOUT_S = 5.0

# Called often while a file is made, with whether another process makes it; what it raises ends that.
Progress = Callable[[bool], None]


def no_progress(awaits: bool) -> None:
    """A Progress of nobody."""


def cached(name: str, make: Callable[[Path], None], progress: Progress = no_progress) -> Path:
    """The file of that name in the cache, made by `make` at a place of its own if nobody has.

    Raises SpecError: it cannot be written, as where there is no room; and what `make` raises.
    """
    import platformdirs
    from filelock import FileLock, Timeout

    given = os.environ.get(VARIABLE)
    root = Path(given).expanduser() if given else platformdirs.user_cache_path("fsdp_lab", appauthor=False)
    file, part = root / name, root / f"{name}.part"
    try:
        root.mkdir(parents=True, exist_ok=True)
        while not file.exists():
            try:
                with FileLock(root / f"{name}.lock", timeout=0):
                    if not file.exists():
                        try:
                            make(part)
                            part.rename(file)
                        finally:
                            part.unlink(missing_ok=True)
            except Timeout:
                progress(True)
                time.sleep(_POLL_S)
    except OSError as e:
        reason = f"its tokens cannot be kept in {root} ({e.strerror or e})"
        hint = f"make room, or name another folder in {VARIABLE} and start again"
        raise SpecError("workload.data", reason, hint) from e
    return file


def is_hub_name(name: object) -> bool:
    """Returns whether it is as "org/name", and neither a file nor a folder here."""
    return isinstance(name, str) and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


@functools.cache
def hub_folder(name: str, field: str, files: tuple[str, ...] | None = None, *, kind: str = "model") -> Path:
    """The folder with those files of a repository of the Hub, fetched if this machine has not, and looked for once in a
    process. `files`: patterns; None: all.

    Raises SpecError: of `field`: the Hub has no such repository, or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        patterns = None if files is None else [*files]
        return Path(snapshot_download(name, repo_type=kind, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S))
    except RepositoryNotFoundError:
        reason = f"{name} is no file or folder here and no {kind} that the Hugging Face Hub shows you"
        raise SpecError(field, reason, "correct the name, or log in: hf auth login") from None
    except Exception as e:  # of many classes
        command = f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
        said = " ".join(str(e).split())[:100]
        reason = f"{name} is no file or folder here, and the Hugging Face Hub cannot be reached ({said})"
        hint = f"give a file or folder, such as one that this printed on a machine with a network: {command}"
        raise SpecError(field, reason, hint) from None
