"""Checkpoints on disk: what a folder of them holds, and which are whole. No torch: ranks write them, anyone may look.

A checkpoint is a folder: a safetensors file of each rank that had something to write, in the format of torch's Distributed
Checkpoint (its `HuggingFaceStorageReader` reads it, at any number of ranks), and `checkpoint.json` with all that is no
tensor. Nothing in it is ever unpickled.

Note: torn. A checkpoint is made in a folder whose name ends in `.partial`. When the files of all ranks are on the disk, the
manifest is written beside them, and the folder is given its name in one step of the file system. So one without the ending
is whole, whoever was killed at whatever moment, and no other was touched for its sake. What kept the ending was torn; so is
one whose files are not as long as the manifest says, as after a copy that broke off.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_lab.core.errors import ArgumentError, FieldError, SpecError
from fsdp_lab.core.spec import LINEAGE, Spec

MANIFEST = "checkpoint.json"
PARTIAL = ".partial"
FORMAT = 1
KINDS = ("step", "best", "last", "rescue")  # why it was made; of "best" the newest stays, of the others the newest few
_NAME = re.compile(r"step-\d{8,}-[0-9a-f]{6}")
_FILE = re.compile(r"[\w.-]+\.safetensors")  # no separators: what a manifest names lies beside it


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole one."""

    path: Path
    spec: Spec  # what was trained, on how many ranks
    run: str
    kind: str
    step: int  # steps committed: the number of the next one
    samples: int  # trained on so far, by all ranks: where the data goes on
    saved_unix_s: float
    nbytes: int
    manifest: Mapping[str, Any]  # all of `checkpoint.json`

    def __str__(self) -> str:
        return f"step {self.step} in {self.path}"


@dataclass(frozen=True, kw_only=True)
class IncompleteCheckpoint:
    """One that was never finished, or was damaged later."""

    path: Path
    reason: str


# -- writing ---------------------------------------------------------------------------------------------------------


def check_folder(path: str | os.PathLike[str], *, field: str = "save") -> Path:
    """The absolute path of a folder that takes checkpoints; made if it is not there. Raises ArgumentError."""
    try:
        root = Path(path).expanduser().absolute()
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(13, "it is read-only")
    except (OSError, ValueError, RuntimeError, TypeError) as e:  # RuntimeError: a ~ that is nobody's home
        why = e.strerror if isinstance(e, OSError) else e
        raise ArgumentError(field, f"{path} cannot hold checkpoints: {why}", "name a folder that is yours") from e
    return root


def begin(root: Path, step: int) -> Path:
    """A new folder for the files of a checkpoint: not yet one. Raises OSError."""
    partial = root / f"step-{step:08d}-{secrets.token_hex(3)}{PARTIAL}"
    partial.mkdir()
    return partial


def finish(partial: Path, parts: Sequence[Mapping[str, Any]], *, kind: str) -> Checkpoint:
    """Makes what the ranks wrote a checkpoint.

    Args:
        parts: of each rank, {"file": its file's name or None, "bytes": its length, "state": what is no tensor}.

    Raises:
        ValueError: the parts are not of one moment. OSError: the disk.
    """
    states = [part["state"] for part in parts]
    moments = {(s["run"], s["step"], s["samples"]) for s in states}
    if len(moments) != 1:
        raise ValueError(f"the ranks are not at the same step: {sorted(m[1] for m in moments)}")
    optimizer = {"slots": sorted({slot for s in states for slot in s["optimizer"]["slots"]}),
                 "steps": max(s["optimizer"]["steps"] for s in states)}  # fmt: skip
    files = {part["file"]: part["bytes"] for part in parts if part["file"] is not None}
    manifest = {**states[0], "optimizer": optimizer, "files": files, "format": FORMAT, "kind": kind,
                "saved_unix_s": time.time()}  # fmt: skip
    with open(partial / MANIFEST, "w", encoding="utf-8") as f:
        json.dump(manifest, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    whole = partial.with_name(partial.name.removesuffix(PARTIAL))
    _settle(partial)
    partial.rename(whole)
    _settle(whole.parent)
    return read(whole)


def discard(partial: Path) -> None:
    """Removes one that will not be finished. Does nothing with any other folder."""
    if partial.name.endswith(PARTIAL):
        shutil.rmtree(partial, ignore_errors=True)


def prune(root: Path, run: str, *, last: int) -> list[Path]:
    """Removes the oldest checkpoints of a run beyond the newest `last`, and all its "best" ones but the newest; returns
    them. Those of other runs are left alone. One whose removal breaks off is no checkpoint any more."""
    mine = [c for c in checkpoints(root) if c.run == run]
    best = [c for c in mine if c.kind == "best"]
    others = [c for c in mine if c.kind != "best"]
    gone = [*best[:-1], *others[:-last]]
    for c in gone:
        with contextlib.suppress(OSError):
            discard(c.path.rename(c.path.with_name(c.path.name + PARTIAL)))
    return [c.path for c in gone]


def _settle(folder: Path) -> None:
    """What was made or renamed in the folder is on the disk; where a folder cannot be synchronised, it is left to time."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- looking ---------------------------------------------------------------------------------------------------------


def checkpoints(root: str | os.PathLike[str]) -> list[Checkpoint]:
    """The whole ones in a folder, oldest first; none where there is no such folder."""
    found = []
    for path in _candidates(Path(root)):
        with contextlib.suppress(FieldError):
            found.append(read(path))
    return sorted(found, key=lambda c: (c.saved_unix_s, c.step))


def incomplete_checkpoints(root: str | os.PathLike[str]) -> list[IncompleteCheckpoint]:
    """Those in a folder that are not whole, with the reason."""
    found = []
    for path in _candidates(Path(root)):
        try:
            read(path)
        except FieldError as e:
            found.append(IncompleteCheckpoint(path=path, reason=e.reason))
    return sorted(found, key=lambda t: t.path.name)


def find(path: str | os.PathLike[str], *, field: str = "checkpoint") -> Checkpoint:
    """The checkpoint that this is, or the newest whole one in this folder of them. Raises ArgumentError."""
    try:
        folder = Path(path).expanduser().absolute()
        is_one = _NAME.fullmatch(folder.name.removesuffix(PARTIAL)) is not None or (folder / MANIFEST).exists()
    except (OSError, ValueError, RuntimeError, TypeError) as e:
        raise ArgumentError(field, f"{path!r} is no path: {e}", "name a folder of checkpoints") from e
    if is_one:
        return read(folder, field=field)
    if found := checkpoints(folder):
        return found[-1]
    broken = incomplete_checkpoints(folder)
    why = f"it holds none that is whole ({broken[-1].path.name}: {broken[-1].reason})" if broken else "it holds none"
    if not folder.is_dir():
        why = "there is no such folder"
    raise ArgumentError(field, f"no checkpoint in {path}: {why}", "name a folder that a run was saved in")


def check_same(saved: Checkpoint, spec: Spec) -> None:
    """Raises SpecError where a Spec is of another training than what was saved."""
    if other := [name for name in saved.spec.difference(spec) if name in LINEAGE]:
        raise SpecError(other[0], f"{saved.path.name} is of another training, by its {other[0]}",
                        f"keep its {', '.join(LINEAGE)}")  # fmt: skip


def read(path: Path, *, field: str = "checkpoint") -> Checkpoint:
    """Raises ArgumentError for one that is torn, or was written by a newer version."""

    def refused(reason: str, hint: str = "resume from another one") -> ArgumentError:
        return ArgumentError(field, f"{path.name} {reason}", hint)

    if not path.is_dir():
        raise ArgumentError(field, f"there is no checkpoint {path}", "name a folder that a run was saved in")
    if path.name.endswith(PARTIAL):
        raise refused("was never finished: its ranks were ended, or the disk was full")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise refused(f"has format {manifest['format']}, and this version reads {FORMAT}", "use a newer fsdp_lab")
        files = dict(manifest["files"])
        for name, nbytes in files.items():
            _check_file(path, name, nbytes, refused)
        return Checkpoint(
            path=path,
            spec=Spec.from_dict(manifest["spec"]),
            run=str(manifest["run"]),
            kind=str(manifest["kind"]),
            step=int(manifest["step"]),
            samples=int(manifest["samples"]),
            saved_unix_s=float(manifest["saved_unix_s"]),
            nbytes=sum(files.values()),
            manifest=manifest,
        )
    except FieldError:
        raise
    except FileNotFoundError as e:
        raise refused(f"has no {MANIFEST}") from e
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise refused(f"has a {MANIFEST} that cannot be read ({type(e).__name__}: {e})") from e


def _check_file(path: Path, name: str, nbytes: int, refused: Any) -> None:
    if not _FILE.fullmatch(name):
        raise refused(f"names the file {name!r}, which does not lie in it")
    try:
        length = (path / name).stat().st_size
    except OSError:
        raise refused(f"lacks its file {name}") from None
    if length != nbytes:
        raise refused(f"is damaged: {name} has {length:,} bytes of {nbytes:,}")


def _candidates(root: Path) -> list[Path]:
    """What by its name is a checkpoint or was to become one."""
    with contextlib.suppress(OSError):
        return [p for p in root.iterdir() if _NAME.fullmatch(p.name.removesuffix(PARTIAL)) and p.is_dir()]
    return []
