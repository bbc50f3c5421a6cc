"""`Checkpointer`: the checkpoints of one rank. Training stops for a snapshot, and continues while it is written. `spread`
brings their files to hosts that lack them.

Note: writing needs no collective. A snapshot is the rank's own share, copied to the host; a thread writes it. Ranks
report through rank 0's store that their file is on disk, and rank 0 commits the files as a checkpoint
(`fsdp_lab.spec.checkpoint_format`). So writing is not ordered with training, and a rank that dies meanwhile leaves an
incomplete checkpoint and blocks no other rank. The files are safetensors in the Hugging Face format of torch's
Distributed Checkpoint, whose readers read them too (`write_shard`, `read_shards`). The layout is known beforehand
(backends/state.py), so that there is nothing to negotiate."""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import distributed as dist

from fsdp_lab.backends import Backend, state
from fsdp_lab.backends.state import Chunk, Layout, gather_json
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.hang import LongWork
from fsdp_lab.base.process import host_id
from fsdp_lab.rank.heartbeat import LongWorkLog
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.trainer import Scaler, Trainer, TrainingProgress
from fsdp_lab.spec import checkpoint_format
from fsdp_lab.spec.checkpoint_format import MANIFEST, PARTIAL, Checkpoint
from fsdp_lab.spec.spec import Spec

_OFFSETS = "DCP_SHARDING_INFO"  # in a file's metadata: where each tensor begins in the whole one


def write_shard(folder: Path, rank: int, chunks: Sequence[Chunk]) -> tuple[str | None, int]:
    """Writes this rank's file; returns its name and size in bytes, or None and 0 without chunks. Not collective. Each
    name occurs at most once. Raises OSError."""
    if not chunks:
        return None, 0
    offsets = {c.name: {"saved_offsets": [c.start]} for c in chunks}
    metadata = {_OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    file = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
    with file.open("wb") as to:
        to.write(save({c.name: c.values for c in chunks}, metadata))
        to.flush()
        os.fsync(to.fileno())
    return file.name, file.stat().st_size


def read_shards(folder: Path, targets: Sequence[Chunk], optional: tuple[str, ...]) -> None:
    """Fills the targets from the files of all ranks that saved. Not collective.

    `optional`: prefixes of names that may be missing; such a target, or the missing part of it, is left unchanged.

    Raises LookupError if the files do not have all of a target, OSError if one cannot be read."""
    lacking = {c.name: (c, c.values.numel()) for c in targets}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            offsets = json.loads(file.metadata()[_OFFSETS])
            for name in lacking.keys() & set(file.keys()):
                (c, left), saved, first = lacking[name], file.get_slice(name), offsets[name]["saved_offsets"][0]
                start, stop = max(c.start, first), min(c.stop, first + saved.get_shape()[0])
                if start < stop:
                    values = saved[start - first : stop - first]
                    if values.dtype != c.values.dtype:
                        raise LookupError(f"its {name} is {values.dtype}, not {c.values.dtype}")
                    c.values[start - c.start : stop - c.start].copy_(values)
                    lacking[name] = c, left - (stop - start)
    for name, (c, left) in lacking.items():
        if left and not name.startswith(optional):
            raise LookupError(f"it lacks {left} elements of {name}[{c.start}:{c.stop}]")


POLL_S = 0.02
PART_S = 300.0  # for the other ranks to report their files, from when rank 0 has written its own
EARLIER_S = 2 * PART_S  # for an earlier checkpoint to be written, before another one is begun
CLOSE_S = 1.0  # for a file to be finished when its rank closes


class Checkpointer:
    """One per rank. `store`: a separate connection to rank 0's store."""

    def __init__(self, info: RankInfo, store: dist.Store) -> None:
        self._info, self._store = info, store
        self._part_s, self._earlier_s = PART_S, EARLIER_S
        self._backend: Backend | None = None
        self._layouts: Sequence[Layout] = ()  # by rank
        self._writing: threading.Thread | None = None
        self._own_written = True  # this rank's file; rank 0 then waits for the others' reports
        self._ended: list[dict[str, Any]] = []
        self._closed = threading.Event()

    def register(self, backend: Backend) -> None:
        """Gather the layouts of a new backend, so that saving needs no communication; collective, once per backend."""
        if backend is not self._backend:
            self._backend, self._layouts = backend, gather_json(state.layout_of(backend.param_shards()))

    def unregister(self) -> None:
        """Forget a backend that is released."""
        self._backend, self._layouts = None, ()

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, trainer: Trainer, root: str, *, kind: str, last: int) -> int:
        """Take a snapshot and write it in a thread to a new folder below `root`; collective. Returns its bytes on this rank.
        Call `wait_for_earlier` before. `last`: how many of the run are kept. Raises ArgumentError on every rank."""
        folder, failed = "", ""
        if self._info.rank == 0:
            try:
                folder = str(checkpoint_format.begin(Path(root), trainer.progress.step))
            except OSError as e:
                failed = str(e.strerror)
        folder, failed = gather_json((folder, failed))[0]
        if failed:
            reason = f"no checkpoint can be written to {root}: {failed}"
            raise ArgumentError("save", reason, "make room, or name another folder")
        partial = Path(folder)
        chunks, part_state = self._take(trainer, range(self._info.world_size))
        begin_s, step = time.perf_counter(), trainer.progress.step

        def write() -> None:
            part = _written(partial, self._info.rank, chunks, part_state)
            self._own_written = True
            with contextlib.suppress(RuntimeError):  # rank 0 and its store are gone: the checkpoint stays incomplete
                self._store.set(_key(partial, self._info.rank), json.dumps(part))
            if self._info.rank == 0:
                result = {"kind": kind, "step": step, **self._commit(partial, kind, last)}
                self._ended.append({**result, "seconds": time.perf_counter() - begin_s})

        self._own_written = False
        self._writing = threading.Thread(target=write, name="fsdp-lab-checkpoint", daemon=True)
        self._writing.start()
        return sum(c.values.nbytes for c in chunks)

    def rescue(self, trainer: Trainer, partial: Path, writers: Collection[int]) -> dict[str, Any]:
        """Write this rank's share when other ranks are lost, to a folder of this host. Not collective. Returns its part for
        `checkpoint_format.finish`. Raises OSError, or LookupError if the writers do not hold all of the model."""
        chunks, part_state = self._take(trainer, writers)
        partial.mkdir(parents=True, exist_ok=True, mode=0o700)  # the kernel's folder may be on another host
        part = _written(partial, self._info.rank, chunks, part_state)
        if "error" in part:
            raise OSError(part["error"])
        return part

    def wait(self, timeout_s: float) -> bool:
        """Waits at most so long; returns whether nothing is being written."""
        if self._writing is not None:
            self._writing.join(timeout_s)
            if not self._writing.is_alive():
                self._writing = None
        return self._writing is None

    def wait_for_earlier(self, check: Callable[[], None], work: LongWorkLog) -> None:
        """Waits for the checkpoint before, as long work; collective. Raises ArgumentError on every rank if it is late."""
        deadline_s = time.monotonic() + self._earlier_s
        with work.during(LongWork.EARLIER_CHECKPOINT):
            while not self.wait(0.05) and time.monotonic() < deadline_s:
                check()
        by_rank = gather_json((self._writing is None, self._own_written))
        if not all(done for done, _ in by_rank):
            busy = [str(rank) for rank, (_, own) in enumerate(by_rank) if not own] or ["0"]
            ranks = f"rank{'s' * (len(busy) > 1)} {', '.join(busy)}"
            late = f"{ranks} did not finish writing the checkpoint before this one in {self._earlier_s:g} s"
            raise ArgumentError("save", late, "look whether its disk answers, or save less often")

    def ended(self) -> list[dict[str, Any]]:
        """On rank 0, what has been written since the last call: {"kind", "step", "path" or None, "bytes", "seconds",
        "error"}."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self.wait(CLOSE_S)
        self._closed.set()

    def _take(self, trainer: Trainer, writers: Collection[int]) -> tuple[list[Chunk], dict[str, Any]]:
        if trainer.backend is not self._backend:
            raise LookupError("a switch was interrupted, and the state is in two layouts; nothing was saved")
        rank = self._info.rank
        chunks = state.snapshot(trainer.backend, self._layouts, rank, writers) + self._random_states()
        modules = {c.name: c.values for c in chunks if c.name.startswith(state.MODULE)}
        digests = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in modules.items()}
        part_state = {
            "run": trainer.run,
            "spec": trainer.spec.to_dict(),
            "step": trainer.progress.step,
            "samples": trainer.progress.samples,
            "scaler": asdict(trainer.scaler),
            "optimizer": state.slots_of(trainer.backend),
            "parameters": state.shapes_of(trainer.backend),
            "modules": {name: (t.numel(), digests[name]) for name, t in modules.items()},
            "writers": sorted(writers),
            "torch": str(torch.__version__),
        }
        return chunks, part_state

    def _random_states(self) -> list[Chunk]:
        rank, device = self._info.rank, self._info.device
        states = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(device)
        return [Chunk(name=f"random.{rank}.{of}", start=0, values=numbers) for of, numbers in states.items()]

    def _commit(self, partial: Path, kind: str, last: int) -> dict[str, Any]:
        """On rank 0: commit the checkpoint when all ranks have written their files, or discard it."""
        parts: list[dict[str, Any]] = []  # what each rank reports of its file
        deadline_s = time.monotonic() + self._part_s
        try:
            for key in (_key(partial, rank) for rank in range(self._info.world_size)):
                while not self._store.check([key]):
                    if self._closed.wait(POLL_S):
                        raise RuntimeError("the ranks were closed before it was written")
                    if time.monotonic() > deadline_s:
                        late = f"rank {len(parts)} did not report its file within {self._part_s:g} s"
                        why = "after rank 0 had written its own, so the checkpoint was given up"
                        raise TimeoutError(f"{late} {why}")
                parts.append(json.loads(self._store.get(key)))
                self._store.delete_key(key)
            error = "; ".join(f"rank {rank}: {part['error']}" for rank, part in enumerate(parts) if "error" in part)
            if not error:
                made = checkpoint_format.finish(partial, parts, kind=kind)
                checkpoint_format.prune(partial.parent, made.run, last=last)
                return {"path": str(made.path), "bytes": made.nbytes, "error": ""}
        except (TimeoutError, RuntimeError) as e:
            error = _message(e)
        except (OSError, ValueError) as e:
            error = f"rank 0: {_message(e)}"
        checkpoint_format.discard(partial)
        return {"path": None, "bytes": 0, "error": error}

    # -- loading --------------------------------------------------------------------------------------------------

    def find(self, path: str, spec: Spec) -> Checkpoint:
        """Returns the checkpoint at `path`, for a training under `spec`; collective. Raises FieldError on every rank, even
        if only one cannot find it, for example in a folder of one machine."""

        def look() -> Checkpoint:
            saved = checkpoint_format.find(path)
            checkpoint_format.check_same(saved, spec)
            return saved

        return state.together(look)

    def load(self, saved: Checkpoint, backend: Backend) -> tuple[TrainingProgress, Scaler, list[str]]:
        """Fill a new backend. Not collective. Returns notes, too, on what could not be restored. Raises ArgumentError if
        it is of another model; LookupError or OSError if its files cannot be read."""
        m, rank = saved.manifest, self._info.rank
        shapes = state.shapes_of(backend)
        if shapes != m["parameters"]:
            other = min(n for n in {*shapes, *m["parameters"]} if shapes.get(n) != m["parameters"].get(n))
            reason = f"{saved.path.name} is of another model: {other} differs"
            raise ArgumentError("checkpoint", reason, "resume with the model of the checkpoint")
        writers, kept = m["writers"], m["optimizer"]
        buffers_of = writers[rank % len(writers)]
        modules = {name: n for name, (n, _) in m["modules"][rank % len(writers)].items()}
        wanted = state.targets(backend, kept["slots"], kept["scalars"], buffers_of, modules)
        same_rank = saved.spec.world_size == self._info.world_size and rank in writers
        random = self._random_states() if same_rank else []
        with torch.no_grad():
            read_shards(saved.path, [*wanted, *random], optional=("optimizer.", "random."))
            state.set_modules(backend, wanted)
        for chunk in random:
            if chunk.name.endswith(".cuda"):
                torch.cuda.set_rng_state(chunk.values, self._info.device)
            else:
                torch.set_rng_state(chunk.values)
        lost = ["random numbers that your own code draws on a rank do not continue from the saved state"]
        if buffer := next((c.name.split(".", 2)[2] for c in wanted if c.name.startswith("buffer.")), None):
            lost += [f"rank r has the buffers of rank r mod {len(writers)} now, such as {buffer}"]
        progress = TrainingProgress(step=saved.step, samples=saved.samples)
        return progress, Scaler(**m["scaler"]), [] if same_rank else lost


def _written(partial: Path, rank: int, chunks: Sequence[Chunk], part_state: Mapping[str, Any]) -> dict[str, Any]:
    """Writes this rank's file. Returns its part for `finish`, or {"error"}."""
    try:
        file, nbytes = write_shard(partial, rank, chunks)
        return {"file": file, "bytes": nbytes, "state": part_state}
    except Exception as e:
        return {"error": _message(e)}


def _message(e: BaseException) -> str:
    text = e.strerror if isinstance(e, OSError) and e.strerror else " ".join(str(e).split())
    return text or type(e).__name__


def _key(partial: Path, rank: int) -> str:
    return f"checkpoint/{partial.name}/{rank}"


# -- `spread`: files from the hosts that have them to those that lack them -------------------------------------------
#
# Ranks of one host write to its disk. Where hosts share no folder, another set of ranks would not find what was written, as
# after a change of their number or the loss of a host. What is written for that alone has a relative path: each host has a
# temporary folder of its own, which this user alone can read.


PIECE_BYTES = 16 << 20
RECEIVED = ".received"  # of a file that is not whole yet


def on_this_host(path: str | os.PathLike[str]) -> Path:
    """Returns the path itself, or a relative one in this host's temporary folder, where its first folder is made, and is
    this user's alone. Raises OSError: it is not."""
    given = Path(path)
    if given.is_absolute():
        return given
    top = Path(tempfile.gettempdir()) / given.parts[0]
    with contextlib.suppress(FileExistsError):
        top.mkdir(mode=0o700)
    status = os.lstat(top)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
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
    for r, one in enumerate(everyone):
        first.setdefault(one["host"], r)
    written = 0
    for name, nbytes in sorted(manifest["files"].items()):
        owner = next((r for r, one in enumerate(everyone) if one["files"].get(name) == nbytes), None)
        if owner is None:
            reason = f"no host of a rank has {folder / name}"
            raise ArgumentError("checkpoint", reason, "save to a folder that all hosts share")
        if lacking := [r for r in first.values() if everyone[r]["files"].get(name) != nbytes]:
            _agree(_send(folder / name, nbytes, owner, rank, writes=rank in lacking))
            if rank in lacking:
                (folder / (name + RECEIVED)).replace(folder / name)
                written += nbytes
    error = ""
    if rank == first[host_id()] and MANIFEST not in own:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = folder / (MANIFEST + RECEIVED)
            part.write_text(json.dumps(manifest), encoding="utf-8")
            part.replace(folder / MANIFEST)
        except OSError as e:
            error = f"{folder / MANIFEST}: {e.strerror or e}"
    _agree(error)
    return written


def _agree(error: str) -> None:
    """Raises ArgumentError on every rank for an error of any; collective."""
    if failed := next((f"rank {r}: {e}" for r, e in enumerate(gather_json(error)) if e), ""):
        raise ArgumentError("checkpoint", f"its files could not be sent to all hosts ({failed})", "make room there")


def _send(path: Path, nbytes: int, owner: int, rank: int, *, writes: bool) -> str:
    """Sends one file, of which some ranks write a copy beside its place; collective. Returns the error, or ""."""
    errors: list[str] = []
    file: Any = None

    @contextlib.contextmanager
    def noting() -> Iterator[None]:
        try:
            yield
        except OSError as e:
            errors.append(f"{path}: {e.strerror or e}")

    with contextlib.ExitStack() as stack:
        with noting():
            if writes:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                file = stack.enter_context(path.with_name(path.name + RECEIVED).open("wb"))
            elif rank == owner:
                file = stack.enter_context(path.open("rb"))
        for at in range(0, nbytes, PIECE_BYTES):
            piece = torch.zeros(min(PIECE_BYTES, nbytes - at), dtype=torch.uint8)
            with noting():
                if rank == owner and not errors and file.readinto(piece.numpy()) != piece.numel():
                    errors.append(f"{path} is shorter than it was")
            dist.broadcast(piece, src=owner)
            with noting():
                if writes and not errors:
                    file.write(piece.numpy())
    return errors[0] if errors else ""
