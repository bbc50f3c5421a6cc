"""`spread`: the files of a checkpoint, from the hosts that have them to those that lack them, over the wire.

Ranks of one host write to its disk. Where hosts share no folder, another set of ranks would not find what was written, as
after a change of their number or the loss of a host.
"""

from __future__ import annotations

import contextlib
import json
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


def spread(folder: Path, manifest: Mapping[str, Any], rank: int) -> int:
    """Makes each host have all files of a checkpoint in `folder`; collective. Returns the bytes that this rank wrote. Raises
    ArgumentError on every rank: no host has a file, or one cannot be written."""
    with contextlib.suppress(OSError):  # another rank of this host was faster
        if not folder.exists():
            folder.with_name(folder.name + PARTIAL).rename(folder)
    own = {file.name: file.stat().st_size for file in folder.glob("*")} if folder.is_dir() else {}
    everyone: list[dict[str, Any]] = gather_json({"host": host_id(), "files": own})
    first: dict[str, int] = {}  # the rank of each host that writes there
    for r, found in enumerate(everyone):
        first.setdefault(found["host"], r)
    written, error = 0, ""
    for name, nbytes in sorted(manifest["files"].items()):
        owner = next((r for r, found in enumerate(everyone) if found["files"].get(name) == nbytes), None)
        if owner is None:
            raise ArgumentError(
                "checkpoint", f"no host of a rank has {folder / name}", "save to a folder that all hosts share"
            )
        lacking = [r for host, r in first.items() if name not in everyone[r]["files"]]
        if not lacking:
            continue
        try:
            written += _send(folder / name, nbytes, owner, rank, writes=rank in lacking)
        except OSError as e:
            error = error or f"{folder / name}: {e.strerror or e}"
    try:
        if rank == first[host_id()] and MANIFEST not in own:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    except OSError as e:
        error = error or f"{folder / MANIFEST}: {e.strerror or e}"
    if failed := next((f"rank {r}: {e}" for r, e in enumerate(gather_json(error)) if e), ""):
        raise ArgumentError("checkpoint", f"a host could not write it ({failed})", "make room there, or set TMPDIR")
    return written


def _send(path: Path, nbytes: int, owner: int, rank: int, *, writes: bool) -> int:
    """One file, from its owner to all ranks, of which some write it; collective. Raises OSError at the end."""
    failure: OSError | None = None
    with contextlib.ExitStack() as stack:
        file: BinaryIO | None = None
        try:
            if rank == owner:
                file = stack.enter_context(path.open("rb"))
            elif writes:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                file = stack.enter_context(path.open("wb"))
        except OSError as e:
            failure = e
        for n in _pieces(nbytes):
            piece = torch.zeros(n, dtype=torch.uint8)
            if rank == owner and file is not None:
                piece = torch.frombuffer(bytearray(file.read(n)), dtype=torch.uint8)
            dist.broadcast(piece, src=owner)
            if writes and file is not None and failure is None:
                try:
                    file.write(piece.numpy().tobytes())
                except OSError as e:
                    failure = e
    if failure is not None:
        raise failure
    return nbytes if writes else 0


def _pieces(nbytes: int) -> Iterator[int]:
    for at in range(0, nbytes, PIECE_BYTES):
        yield min(PIECE_BYTES, nbytes - at)
