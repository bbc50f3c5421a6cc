"""Files that are asked for by name: refused before anything is made, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fsdp_lab.core.errors import ArgumentError, FieldError


def check_file(
    path: str | os.PathLike[str], suffixes: Sequence[str] = (), *, field: str = "path", replace: bool = True
) -> Path:
    """The absolute path of a file, a pipe or a device that can be written, its name ending in one of `suffixes` if any are
    given. Without `replace` it must not be a file that is there.

    Whether a folder takes a file is found out by making one: permissions alone do not say it.

    Raises:
        ArgumentError: it cannot be; `field` is what asked for it.
    """
    ends = " or ".join(suffixes)
    hint = f"name a {ends + ' ' if ends else ''}file in a folder that exists and is yours"
    try:
        file = Path(path).expanduser().absolute()
        if not file.name.endswith(tuple(suffixes) or ""):
            raise ArgumentError(field, f"{path} does not end in {ends}", hint)
        if file.is_dir():
            raise ArgumentError(field, f"{path} cannot be written: it is a folder", hint)
        if not file.parent.is_dir():
            raise ArgumentError(field, f"{path} cannot be written: there is no folder {file.parent}", hint)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(file)  # a name that is too long, or none at all
        if file.is_file() and not replace:
            raise ArgumentError(
                field, f"{path} is there already", "name another file, or give force (--force) to replace it"
            )
        if file.exists() and not os.access(file, os.W_OK):
            raise ArgumentError(field, f"{path} cannot be written: it is there and read-only", hint)
        if file.is_file() or not file.exists():
            with tempfile.NamedTemporaryFile(dir=file.parent):
                pass
    except (OSError, ValueError, RuntimeError, TypeError) as e:  # RuntimeError: a ~ that is nobody's home
        if isinstance(e, FieldError):
            raise
        why = e.strerror if isinstance(e, OSError) else e
        raise ArgumentError(field, f"{path} cannot be written: {why}", hint) from e
    return file


def write_whole(file: Path, content: bytes, *, field: str = "path") -> Path:
    """Writes the file whole or not at all: a former one stays until the new one is there. Raises ArgumentError."""
    part = ""
    try:
        if file.exists() and not file.is_file():  # /dev/stdout, a pipe
            file.write_bytes(content)
            return file
        mask = os.umask(0o022)  # there is no way to read it but to set it
        os.umask(mask)
        with tempfile.NamedTemporaryFile(dir=file.absolute().parent, delete=False) as made:
            part = made.name
            made.write(content)
        os.chmod(part, 0o666 & ~mask)
        os.replace(part, file)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise ArgumentError(
            field, f"{file} could not be written: {e.strerror}", "make room, or name another place"
        ) from e
    return file
