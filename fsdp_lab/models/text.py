"""Real text as token ids: bytes of files, and the windows of them that a step trains on.

A token is a byte plus 3, as in transformers' ByT5Tokenizer (whose ids 0, 1 and 2 are padding, end and
unknown), so that no vocabulary file is needed and no text is out of vocabulary. The tokenizer alone would
read a literal "</s>" or "<extra_id_0>" in the text as one special token; here it stays the bytes it is.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fsdp_lab.core.errors import SpecError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ids: TypeAlias = npt.NDArray[np.int64]

BYTE_OFFSET = 3
SMALLEST_VOCABULARY = 256 + BYTE_OFFSET

STDLIB_CAP_BYTES = 4 * 2**20
FOLDER_CAP_BYTES = 64 * 2**20
_NOT_TEXT_OF_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
_SNIFF_BYTES = 1024


@dataclass(frozen=True)
class Text:
    """Bytes to train on; `fingerprint` tells whether two ranks read the same ones."""

    data: Bytes
    description: str
    fingerprint: str

    def windows(self, seq_len: int) -> Bytes:
        """(count, seq_len) bytes, one window after another without overlap; a shorter rest is left out."""
        count = len(self.data) // seq_len
        return self.data[: count * seq_len].reshape(count, seq_len)


def open_text(data: str) -> Text:
    """The text that `Workload.data` names.

    "stdlib" is Python's own library: its *.py files in the order of their paths, without its tests, up to
    `STDLIB_CAP_BYTES`. A file is mapped, not read, so that its size is no matter. Of a folder, every file
    that looks like text (no zero byte at its start, not hidden) is read in the order of the paths, up to
    `FOLDER_CAP_BYTES`.

    Raises:
        SpecError: nothing there, not allowed, or no text in it.
    """
    if data == "stdlib":
        version = platform.python_version()
        return _joined(_stdlib_files(), STDLIB_CAP_BYTES, f"the standard library of Python {version}")
    path = Path(data).expanduser()
    try:
        if path.is_dir():
            return _joined(_text_files(path), FOLDER_CAP_BYTES, str(path))
        if not path.is_file():
            raise _refusal(data, "there is no such file or folder")
        if path.stat().st_size == 0:
            raise _refusal(data, "the file is empty")
        mapped: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as e:
        raise _refusal(data, f"cannot be read ({e.strerror or e})") from None
    if not _looks_like_text(bytes(mapped[:_SNIFF_BYTES])):
        raise _refusal(data, "the file is not text: a zero byte is near its start")
    return Text(mapped, f"{path} ({_size(len(mapped))})", _fingerprint(mapped))


def encode(window: Bytes) -> Ids:
    """Token ids of bytes, of the same shape."""
    return window.astype(np.int64) + BYTE_OFFSET


def _refusal(data: str, reason: str) -> SpecError:
    return SpecError(
        "workload.data",
        f"{data}: {reason}",
        'give a text file or a folder of them, or "stdlib"',
        {"data": "stdlib"},
    )


def _stdlib_files() -> Iterator[Path]:
    for path in _walk(Path(sysconfig.get_paths()["stdlib"]), _NOT_TEXT_OF_STDLIB):
        if path.suffix == ".py":
            yield path


def _text_files(folder: Path) -> Iterator[Path]:
    for path in _walk(folder, frozenset()):
        with path.open("rb") as f:
            if _looks_like_text(f.read(_SNIFF_BYTES)):
                yield path


def _walk(root: Path, skip: frozenset[str]) -> Iterator[Path]:
    """Files below `root` in an order that does not depend on the file system; hidden ones are left out."""

    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, files in os.walk(root, onerror=fail):
        subfolders[:] = sorted(s for s in subfolders if s not in skip and not s.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _looks_like_text(start: bytes) -> bool:
    return bool(start) and 0 not in start


def _joined(paths: Iterator[Path], cap_bytes: int, name: str) -> Text:
    parts: list[bytes] = []
    total = 0
    for path in paths:
        parts.append(path.read_bytes()[: cap_bytes - total])
        total += len(parts[-1])
        if total >= cap_bytes:
            break
    if not total:
        raise _refusal(name, "holds no text")
    data = np.frombuffer(b"".join(parts), dtype=np.uint8)
    first = "the first " if total >= cap_bytes else ""
    return Text(data, f"{name} ({first}{_size(total)} in {len(parts)} files)", _fingerprint(data))


def _fingerprint(data: Bytes) -> str:
    """Of the length and of up to 2 MiB at either end: all of a large mapped file would take too long."""
    ends = data if len(data) <= 4 * 2**20 else np.concatenate([data[: 2**21], data[-(2**21) :]])
    return hashlib.blake2b(ends.tobytes() + str(len(data)).encode(), digest_size=8).hexdigest()


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
