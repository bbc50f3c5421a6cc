"""Files that the user names: `check_file` before anything is computed, `write_whole` to write one atomically."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp_lab.base.errors import ArgumentError, FieldError


@contextlib.contextmanager
def path_errors(field: str, what: str, hint: str) -> Iterator[None]:
    """Raises ArgumentError of `field`, "`what`: the reason; `hint`", for the errors of an invalid path inside it."""
    try:
        yield
    except FieldError:
        raise
    except (OSError, ValueError, RuntimeError, TypeError) as e:  # RuntimeError: ~ of an unknown user
        raise ArgumentError(field, f"{what}: {e.strerror if isinstance(e, OSError) else e}", hint) from e


def check_file(
    path: str | os.PathLike[str], suffixes: Sequence[str] = (), *, field: str = "path", replace: bool = True
) -> Path:
    """The absolute path of a file, pipe or device that can be written. Its name has one of the `suffixes`, if there are any,
    and an existing file is accepted to `replace` it. Whether the folder is writable is tested with a temporary file, since
    permissions alone do not show it. Raises ArgumentError of `field`, the argument that names the file."""
    ends = " or ".join(suffixes)
    hint = f"name a {ends + ' ' if ends else ''}file in a folder that exists and is yours"
    with path_errors(field, f"{path} cannot be written", hint):
        file = Path(path).expanduser().absolute()
        if not file.name.endswith(tuple(suffixes) or ""):
            raise ArgumentError(field, f"{path} does not end in {ends}", hint)
        if file.is_dir():
            raise ValueError("it is a folder")
        if not file.parent.is_dir():
            raise ValueError(f"there is no folder {file.parent}")
        with contextlib.suppress(FileNotFoundError):
            os.lstat(file)  # raises OSError for an invalid name, such as one that is too long
        if file.is_file() and not replace:
            reason = f"{path} exists already"
            raise ArgumentError(field, reason, "name another file, or give force (--force) to replace it")
        if file.exists() and not os.access(file, os.W_OK):
            raise ValueError("it is read-only")
        if file.is_file() or not file.exists():
            with tempfile.NamedTemporaryFile(dir=file.parent):
                pass
    return file


def write_whole(file: Path, content: bytes, *, field: str = "path") -> Path:
    """Writes the file atomically: an existing one is replaced when the new one is complete. Raises ArgumentError."""
    part = ""
    try:
        if file.exists() and not file.is_file():  # /dev/stdout, a pipe
            file.write_bytes(content)
            return file
        mask = os.umask(0o022)  # it cannot be read without being set
        os.umask(mask)
        with tempfile.NamedTemporaryFile(dir=file.absolute().parent, delete=False) as made:
            part = made.name
            made.write(content)
        os.chmod(part, 0o666 & ~mask)
        os.replace(part, file)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.unlink(part)
        reason = f"{file} could not be written: {e.strerror}"
        raise ArgumentError(field, reason, "make room, or name another place") from e
    return file
