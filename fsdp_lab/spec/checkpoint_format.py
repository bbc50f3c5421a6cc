"""Checkpoints on disk: the manifest, atomic commit, and which ones are complete. rank/checkpointing.py writes the tensors.

A checkpoint is a folder with one safetensors file per rank that had something to write, in the format of torch's
Distributed Checkpoint (its `HuggingFaceStorageReader` reads it with any number of ranks), and `checkpoint.json` for
everything that is no tensor. Nothing is pickled but the extra states of a user's modules, which `torch.load` reads with
`weights_only`, so that nothing is run.

Note: atomic commit. A checkpoint is written to a folder whose name ends in `.partial`. When the files of all ranks are on
disk, the manifest is added, and the folder is renamed in one operation of the file system. So a folder without that ending
is complete, even if processes are killed at any time, and no other checkpoint is touched. Incomplete are folders with
the ending, and those whose files do not have the lengths in the manifest, as after a copy that was interrupted."""

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

from fsdp_lab.base.errors import ArgumentError, FieldError, SpecError
from fsdp_lab.base.files import path_errors
from fsdp_lab.spec.describe import describe_changes
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.workload import LINEAGE

MANIFEST = "checkpoint.json"
PARTIAL = ".partial"
FORMAT = 2
# Why it was saved; the newest "best" and the newest few of the others are retained.
KINDS = ("step", "best", "last", "rescue")
_NAME = re.compile(r"step-\d{8,}-[0-9a-f]{6}")
_FILE = re.compile(r"[\w.-]+\.safetensors")  # no separators: the files of a manifest are beside it


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    spec: Spec  # of the training, with its number of ranks
    run: str
    kind: str
    step: int  # committed steps, which is the number of the next one
    samples: int  # trained on so far, by all ranks; the data continues there
    saved_unix_s: float
    nbytes: int
    manifest: Mapping[str, Any]  # all of `checkpoint.json`

    def __str__(self) -> str:
        return f"step {self.step} in {self.path}"

    def resumed(self, spec: Spec) -> str:
        """A sentence: which run and step it is of, and in which fields `spec`, which resumes it, differs."""
        changes = describe_changes(self.spec.difference(spec)) or "the same Spec"
        return f"Resumes run {self.run} from step {self.step} ({self.path.name}), with {changes}."


def check_folder(path: str | os.PathLike[str], *, field: str = "save") -> Path:
    """The absolute path of a folder for checkpoints; created if it is missing. Raises ArgumentError."""
    with path_errors(field, f"{path} cannot hold checkpoints", "name a folder that is yours"):
        root = Path(path).expanduser().absolute()
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK | os.X_OK):
            raise ValueError("it is read-only")
    return root


def begin(root: Path, step: int) -> Path:
    """Creates the `.partial` folder of a checkpoint. Raises OSError."""
    partial = root / f"step-{step:08d}-{secrets.token_hex(3)}{PARTIAL}"
    partial.mkdir()
    return partial


def finish(partial: Path, parts: Sequence[Mapping[str, Any]], *, kind: str, elsewhere: bool = False) -> Checkpoint:
    """Commits the files that the ranks wrote; `elsewhere`: they may be on other hosts, so nobody looks at them. `parts`: of
    each rank, {"file": name of its file or None, "bytes": its length, "state": everything that is no tensor}. Raises
    ValueError: the ranks are not at the same step; OSError: the disk."""
    states = [part["state"] for part in parts]
    positions = {(s["run"], s["step"], s["samples"]) for s in states}
    if len(positions) != 1:
        raise ValueError(f"the ranks are not at the same step: {sorted(p[1] for p in positions)}")
    furthest = max((s["optimizer"] for s in states), key=lambda optimizer: int(optimizer["steps"]))
    optimizer = {**furthest, "slots": sorted({slot for s in states for slot in s["optimizer"]["slots"]})}
    files = {part["file"]: part["bytes"] for part in parts if part["file"] is not None}
    manifest = {**states[0], "optimizer": optimizer, "modules": [s["modules"] for s in states], "files": files}
    manifest |= {"format": FORMAT, "kind": kind, "saved_unix_s": time.time()}
    with open(partial / MANIFEST, "w", encoding="utf-8") as f:
        json.dump(manifest, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    whole = partial.with_name(partial.name.removesuffix(PARTIAL))
    _sync(partial)
    partial.rename(whole)
    _sync(whole.parent)
    return _of_manifest(whole, manifest) if elsewhere else read(whole)


def discard(partial: Path) -> None:
    """Removes a folder that will not be committed. Ignores any other folder."""
    if partial.name.endswith(PARTIAL):
        shutil.rmtree(partial, ignore_errors=True)


def prune(root: Path, run: str, *, last: int) -> list[Path]:
    """Removes all checkpoints of a run except the newest `last` and the newest "best" one; returns their paths. A checkpoint
    whose removal is interrupted is incomplete."""
    of_run = [c for c in checkpoints(root) if c.run == run]
    best = [c for c in of_run if c.kind == "best"]
    others = [c for c in of_run if c.kind != "best"]
    removed = [*best[:-1], *others[:-last]]
    for c in removed:
        with contextlib.suppress(OSError):
            discard(c.path.rename(c.path.with_name(c.path.name + PARTIAL)))
    return [c.path for c in removed]


def _sync(folder: Path) -> None:
    """Flushes the entries of a folder to disk, if the file system supports it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def checkpoints(root: str | os.PathLike[str]) -> list[Checkpoint]:
    """The complete checkpoints in a folder, oldest first; none if there is no such folder."""
    complete = []
    for path in _candidates(Path(root)):
        with contextlib.suppress(FieldError):
            complete.append(read(path))
    return sorted(complete, key=lambda c: (c.saved_unix_s, c.step))


def incomplete_checkpoints(root: str | os.PathLike[str]) -> dict[Path, str]:
    """The incomplete checkpoints in a folder, which were never committed or were damaged later, with reasons."""
    incomplete = {}
    for path in sorted(_candidates(Path(root))):
        try:
            read(path)
        except FieldError as e:
            incomplete[path] = e.reason
    return incomplete


def find(path: str | os.PathLike[str], *, field: str = "checkpoint") -> Checkpoint:
    """The checkpoint at this path, or the newest complete one in this folder of checkpoints. Raises ArgumentError."""
    with path_errors(field, f"{path!r} is not a path", "name a folder of checkpoints"):
        folder = Path(path).expanduser().absolute()
        is_one = _NAME.fullmatch(folder.name.removesuffix(PARTIAL)) is not None or (folder / MANIFEST).exists()
    if is_one:
        return read(folder, field=field)
    if complete := checkpoints(folder):
        return complete[-1]
    broken = [*incomplete_checkpoints(folder).items()]
    why = "it holds none" if folder.is_dir() else "there is no such folder"
    if broken:
        why = f"it holds none that is complete ({broken[-1][0].name}: {broken[-1][1]})"
    raise ArgumentError(field, f"no checkpoint in {path}: {why}", "name a folder that a run was saved in")


def check_same(saved: Checkpoint, spec: Spec) -> None:
    """Raises SpecError if the Spec is a different training from the saved one (`LINEAGE`), or of other ranks than those that
    saved, where these have different states of modules."""
    if other := [name for name in saved.spec.difference(spec) if name in LINEAGE]:
        reason = f"{saved.path.name} is of another training, by its {other[0]}"
        raise SpecError(other[0], reason, f"keep its {', '.join(LINEAGE)}")
    by_rank, ranks = saved.manifest["modules"], saved.spec.world_size
    states = [{name.split(".", 2)[2]: digest for name, (_, digest) in modules.items()} for modules in by_rank]
    differing = sorted(name for name in set().union(*states) if any(s.get(name) != states[0].get(name) for s in states))
    if differing and saved.manifest["writers"] != list(range(spec.world_size)):
        wrote = f"the ranks that wrote {saved.path.name}"
        reason = f"{differing[0]} differs between {wrote}, so that no others can continue it"
        hint = f"resume on {ranks} ranks, or make it a persistent buffer"
        raise SpecError("world_size", reason, hint, {"world_size": ranks})


def read(path: Path, *, field: str = "checkpoint") -> Checkpoint:
    """The checkpoint at `path`. Raises ArgumentError: it is incomplete, or was written by another version."""

    def refused(reason: str, hint: str = "resume from another one") -> ArgumentError:
        return ArgumentError(field, f"{path.name} {reason}", hint)

    if not path.is_dir():
        raise ArgumentError(field, f"there is no checkpoint {path}", "name a folder that a run was saved in")
    if path.name.endswith(PARTIAL):
        raise refused("was never finished: its ranks were ended, or the disk was full")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            reason = f"has format {manifest['format']}, and this version reads {FORMAT}"
            raise refused(reason, "use the fsdp_lab that wrote it")
        for name, nbytes in dict(manifest["files"]).items():
            if not _FILE.fullmatch(name):
                raise refused(f"names the file {name!r}, which does not lie in it")
            try:
                length = (path / name).stat().st_size
            except OSError:
                raise refused(f"lacks its file {name}") from None
            if length != nbytes:
                raise refused(f"is damaged: {name} has {length:,} bytes of {nbytes:,}")
        return _of_manifest(path, manifest)
    except FieldError:
        raise
    except FileNotFoundError as e:
        raise refused(f"has no {MANIFEST}") from e
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise refused(f"has a {MANIFEST} that cannot be read ({type(e).__name__}: {e})") from e


def _of_manifest(path: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(
        path=path,
        spec=Spec.from_dict(manifest["spec"]),
        run=str(manifest["run"]),
        kind=str(manifest["kind"]),
        step=int(manifest["step"]),
        samples=int(manifest["samples"]),
        saved_unix_s=float(manifest["saved_unix_s"]),
        nbytes=sum(manifest["files"].values()),
        manifest=manifest,
    )


def _candidates(root: Path) -> list[Path]:
    """Folders whose name is that of a checkpoint, committed or not."""
    with contextlib.suppress(OSError):
        return [p for p in root.iterdir() if _NAME.fullmatch(p.name.removesuffix(PARTIAL)) and p.is_dir()]
    return []
