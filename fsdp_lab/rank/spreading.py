"""`spread`: the files of a checkpoint, from the hosts that have them to those that lack them, over the wire.

Ranks of one host write to its disk. Where hosts share no folder, another set of ranks would not find what was written, as
after a change of their number or the loss of a host. What is written for that alone has a relative path: each host has a
temporary folder of its own, which this user alone can read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import distributed as dist

from fsdp_lab.backends.state import gather_json
from fsdp_lab.core.checkpoint_format import MANIFEST, PARTIAL
from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.core.process import host_id

PIECE_BYTES = 16 << 20
RECEIVED = ".received"  # of a file that is not whole yet


def on_this_host(path: str | os.PathLike[str]) -> Path:
    """The path itself, or a relative one in this host's temporary folder, where its first folder is made, and is this user's
    alone. Raises OSError: it is not."""
    given = Path(path)
    if given.is_absolute():
        return given
    top = Path(tempfile.gettempdir()) / given.parts[0]
    with contextlib.suppress(FileExistsError):
        top.mkdir(mode=0o700)
    found = os.lstat(top)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{top} is not this user's alone")
    return Path(tempfile.gettempdir()) / given


def drop(path: str) -> None:
    """Removes the first folder of a relative path."""
    with contextlib.suppress(OSError):
        shutil.rmtree(on_this_host(Path(path).parts[0]), ignore_errors=True)


def spread(folder: Path, manifest: Mapping[str, Any], rank: int) -> int:
    """Makes each host have all files of a checkpoint in `folder`; collective. Returns the bytes that this rank wrote. Raises
    ArgumentError on every rank: no host has a file, or one cannot be read or written."""
    with contextlib.suppress(OSError):  # another rank of this host was faster
        if not folder.exists():
            folder.with_name(folder.name + PARTIAL).rename(folder)
    own = {file.name: file.stat().st_size for file in folder.glob("*")} if folder.is_dir() else {}
    everyone: list[dict[str, Any]] = gather_json({"host": host_id(), "files": own})
    first: dict[str, int] = {}  # the rank of each host that writes there
    for r, found in enumerate(everyone):
        first.setdefault(found["host"], r)
    written, files = 0, sorted(manifest["files"].items())
    for name, nbytes in files:
        owner = next((r for r, found in enumerate(everyone) if found["files"].get(name) == nbytes), None)
        if owner is None:
            raise ArgumentError(
                "checkpoint", f"no host of a rank has {folder / name}", "save to a folder that all hosts share"
            )
        if lacking := [r for r in first.values() if everyone[r]["files"].get(name) != nbytes]:
            _agree(_send(folder / name, nbytes, owner, rank, writes=rank in lacking))
            if rank in lacking:
                (folder / (name + RECEIVED)).replace(folder / name)
                written += nbytes
    _agree(_write_manifest(folder, manifest) if rank == first[host_id()] and MANIFEST not in own else "")
    return written


def _agree(error: str) -> None:
    """Raises ArgumentError on every rank for an error of any; collective."""
    if failed := next((f"rank {r}: {e}" for r, e in enumerate(gather_json(error)) if e), ""):
        raise ArgumentError("checkpoint", f"its files could not be sent to all hosts ({failed})", "make room there")


def _write_manifest(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Returns an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = folder / (MANIFEST + RECEIVED)
        part.write_text(json.dumps(manifest), encoding="utf-8")
        part.replace(folder / MANIFEST)
    except OSError as e:
        return f"{folder / MANIFEST}: {e.strerror or e}"
    return ""


def _send(path: Path, nbytes: int, owner: int, rank: int, *, writes: bool) -> str:
    """One file, from its owner to all ranks, of which some write it beside its place; collective, also after an error, which
    is returned."""
    error = ""
    file: Any = None
    with contextlib.ExitStack() as stack:
        try:
            if writes:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if writes or rank == owner:
                file = stack.enter_context(
                    path.with_name(path.name + RECEIVED).open("wb") if writes else path.open("rb")
                )
        except OSError as e:
            error = f"{path}: {e.strerror or e}"
        for n in _pieces(nbytes):
            piece = torch.zeros(n, dtype=torch.uint8)
            if rank == owner and file is not None and not error:
                data, error = _read(file, n)
                piece = torch.frombuffer(bytearray(data), dtype=torch.uint8) if not error else piece
            dist.broadcast(piece, src=owner)
            if writes and file is not None and not error:
                try:
                    file.write(piece.numpy().tobytes())
                except OSError as e:
                    error = f"{path}: {e.strerror or e}"
    return error


def _read(file: BinaryIO, n: int) -> tuple[bytes, str]:
    """n bytes, or an error."""
    try:
        data = file.read(n)
    except OSError as e:
        return b"", f"{file.name}: {e.strerror or e}"
    return data, "" if len(data) == n else f"{file.name} is shorter than it was"


def _pieces(nbytes: int) -> Iterator[int]:
    for at in range(0, nbytes, PIECE_BYTES):
        yield min(PIECE_BYTES, nbytes - at)
