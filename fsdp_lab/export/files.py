"""Where an export goes: refused before anything is made, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from fsdp_lab.spec import SpecError


def check_path(path: str | os.PathLike[str], *, force: bool = False, field: str = "path") -> Path:
    """The absolute path of a file that can be written; only `force` lets it be one that is there.

    Raises:
        SpecError: it cannot, or would replace a file that nobody said may go.
    """
    way_out = "name a file in a folder that exists and is yours"
    try:
        file = Path(path).expanduser().absolute()
        if file.is_dir():
            raise SpecError(field, f"{path} is a folder", way_out)
        if not file.parent.is_dir():
            raise SpecError(field, f"{path} cannot be written: there is no folder {file.parent}", way_out)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(file)  # a name that is too long, or none at all
        if file.is_file() and not force:
            raise SpecError(field, f"{path} is there already", "name another file, or give force (--force) to replace it")
        if file.exists() and not os.access(file, os.W_OK):
            raise SpecError(field, f"{path} cannot be written: it is there and read-only", way_out)
        if file.is_file() or not file.exists():  # a pipe or /dev/stdout takes text as it comes
            with tempfile.NamedTemporaryFile(dir=file.parent):  # permissions alone do not say it
                pass
    except (OSError, ValueError, RuntimeError) as e:  # RuntimeError: a ~ that is nobody's home
        if isinstance(e, SpecError):
            raise
        why = e.strerror if isinstance(e, OSError) else e
        raise SpecError(field, f"{path} cannot be written: {why}", way_out) from e
    return file


def write(file: Path, text: str) -> None:
    """A reader never sees half a file."""
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    made, part = tempfile.mkstemp(dir=file.parent, suffix=file.suffix)
    try:
        with os.fdopen(made, "w", encoding="utf-8") as f:
            f.write(text)
        mask = os.umask(0o022)
        os.umask(mask)
        os.chmod(part, 0o666 & ~mask)
        os.replace(part, file)
    except BaseException:
        os.unlink(part)
        raise
