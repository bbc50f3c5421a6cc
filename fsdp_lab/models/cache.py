"""`cached`: files that are slow to make, each made once on a machine; `hub_folder`: those of the Hugging Face Hub.

Note: one process of a machine makes a file, under a lock (filelock), which is free again when that process ends, however it
ends. Others poll, so that they can be interrupted; where the file grows, the work that they wait for makes progress.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdp_lab.base.errors import SpecError

VARIABLE = "FSDP_LAB_CACHE"  # the folder; else the user's cache folder of fsdp_lab
_POLL_S = 0.05
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TIMEOUT_S = 5.0

Progress = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Progresses:
    """The functions that are called while a file is made."""

    made: Progress = lambda: None  # here, after each part
    awaited: Progress = lambda: None  # by another process, after each part of it
    check: Progress = lambda: None  # often, while it is awaited: it raises to give up


NO_PROGRESS = Progresses()


def cached(name: str, make: Callable[[Path], None], progress: Progresses = NO_PROGRESS) -> Path:
    """The file of that name in the cache, made by `make` at a place of its own if nobody has.

    Raises SpecError: there is no room for it, or it cannot be written; and what `make` raises.
    """
    import platformdirs
    from filelock import FileLock, Timeout

    given = os.environ.get(VARIABLE)
    root = Path(given).expanduser() if given else platformdirs.user_cache_path("fsdp_lab", appauthor=False)
    file, part, size = root / name, root / f"{name}.part", -1
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{name}.lock", timeout=0)
        while not file.exists():
            try:
                with lock:
                    if not file.exists():
                        try:
                            make(part)
                            part.rename(file)
                        finally:
                            part.unlink(missing_ok=True)
            except Timeout:
                progress.check()
                with suppress(OSError):
                    if (now := part.stat().st_size) != size:
                        size = now
                        progress.awaited()
                time.sleep(_POLL_S)
    except OSError as e:
        what = "there is no room" if e.errno in (errno.ENOSPC, errno.EDQUOT) else f"no place ({e.strerror or e})"
        hint = f"make room, or name another folder in {VARIABLE} and start again"
        raise SpecError("workload.data", f"{what} in {root} for its tokens", hint) from e
    return file


def is_hub_name(name: object) -> bool:
    """Returns whether it is as "org/name", and neither a file nor a folder here."""
    return isinstance(name, str) and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def hub_folder(name: str, field: str, files: Sequence[str] | None = None, *, kind: str = "model") -> Path:
    """The folder with those files of a repository of the Hub, fetched if this machine has not. `files`: patterns; None: all.

    Raises SpecError: of `field`: the Hub has no such repository, or cannot be reached.
    """

    def fetch(path: Path) -> None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            patterns = None if files is None else [*files]
            folder = snapshot_download(name, repo_type=kind, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S)
        except RepositoryNotFoundError:
            reason = f"{name} is no file or folder here and no {kind} that the Hugging Face Hub shows you"
            raise SpecError(field, reason, "correct the name, or log in: hf auth login") from None
        except Exception as e:  # of many classes
            command = f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
            said = " ".join(str(e).split())[:100]
            reason = f"{name} is no file or folder here, and the Hugging Face Hub cannot be reached ({said})"
            hint = f"give a file or folder, such as one that this printed on a machine with a network: {command}"
            raise SpecError(field, reason, hint) from None
        path.write_text(folder)

    key = hashlib.blake2b(repr((name, kind, files)).encode(), digest_size=8).hexdigest()
    pointer = cached(f"hub-{name.replace('/', '--')}-{key}", fetch)
    folder = Path(pointer.read_text())
    if not folder.is_dir():  # somebody has emptied the Hub's own cache
        pointer.unlink(missing_ok=True)
        return hub_folder(name, field, files, kind=kind)
    return folder
