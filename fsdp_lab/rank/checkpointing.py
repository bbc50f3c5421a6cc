"""`Checkpointer`: the checkpoints of one rank. A snapshot while training stands, the writing while it goes on.

Note: without a collective. A snapshot is the rank's own share, copied to the host; a thread writes it. Ranks tell each
other through rank 0's store that their file is on the disk, and rank 0 makes the files a checkpoint
(`fsdp_lab.checkpoints`). So nothing that is written is ordered with what is trained, and a rank that dies meanwhile leaves
a torn one and holds nobody up.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed as dist

from fsdp_lab.backends import Backend
from fsdp_lab.backends.snapshot import Chunk, Layouts, layouts_of, shapes_of, slots_of, snapshot, targets
from fsdp_lab.checkpoints import Checkpoint, begin, check_same, discard, find, finish, prune
from fsdp_lab.engine.scaler import Scaler
from fsdp_lab.rank.rendezvous import Seat
from fsdp_lab.rank.storage import read_shards, write_shard
from fsdp_lab.rank.trainer import Progress
from fsdp_lab.spec import Spec, SpecError

POLL_S = 0.02
CLOSE_S = 1.0  # for a file to be finished when its rank leaves


class Savable(Protocol):
    """What a checkpoint is of: a `Trainer`."""

    run: str
    spec: Spec
    backend: Backend
    progress: Progress
    scaler: Scaler


class Checkpointer:
    """One for a rank. `store`: a connection of its own to rank 0's store."""

    def __init__(self, seat: Seat, store: dist.Store) -> None:
        self._seat, self._store = seat, store
        self._backend: Backend | None = None
        self._layouts: Layouts = ()
        self._writing: threading.Thread | None = None
        self._ended: list[dict[str, Any]] = []
        self._closed = threading.Event()

    def know(self, backend: Backend) -> None:
        """Learn which rank holds what of a backend; collective, and once for each. Later it must do without the others."""
        if backend is not self._backend:
            self._backend, self._layouts = backend, layouts_of(backend)

    def forget(self) -> None:
        """The backend is given up."""
        self._backend, self._layouts = None, ()

    # -- saving ---------------------------------------------------------------------------------------------------

    def begin(self, root: str, step: int) -> Path:
        """A folder for the files of all ranks, which rank 0 makes; collective. Raises SpecError on every rank where rank 0
        cannot."""
        told: list[Any] = [None]
        if self._seat.rank == 0:
            try:
                told = [str(begin(Path(root), step))]
            except OSError as e:
                told = [
                    SpecError("save", f"{root} takes no checkpoint: {e.strerror}", "make room, or name another folder")
                ]
        if self._seat.world_size > 1:
            dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], SpecError):
            raise told[0]
        return Path(told[0])

    def save(self, trainer: Savable, partial: Path, *, kind: str, last: int) -> int:
        """Take a snapshot and write it while training goes on; returns its bytes on this rank. Not collective. None is
        being written (`wait`). `last`: how many of the run are kept."""
        chunks, state = self._take(trainer, range(self._seat.world_size))
        began_s = time.perf_counter()

        def write() -> None:
            part = _written(partial, self._seat.rank, chunks, state)
            self._store.set(_key(partial, self._seat.rank), json.dumps(part))
            if self._seat.rank == 0:
                told = {"kind": kind, "step": trainer_step, **self._complete(partial, kind, last)}
                self._ended.append({**told, "seconds": time.perf_counter() - began_s})

        trainer_step = trainer.progress.step
        self._writing = threading.Thread(target=_quietly, args=(write,), name="fsdp-lab-checkpoint", daemon=True)
        self._writing.start()
        return sum(c.values.nbytes for c in chunks)

    def rescue(self, trainer: Savable, partial: str, writers: Collection[int]) -> dict[str, Any]:
        """Write what this rank has, where others are gone. Not collective. Returns its part for `checkpoints.finish`.

        Raises:
            LookupError: those that are left do not hold all of it.
            OSError: the disk.
        """
        chunks, state = self._take(trainer, writers)
        part = _written(Path(partial), self._seat.rank, chunks, state)
        if "error" in part:
            raise OSError(part["error"])
        return part

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is being written, within so long."""
        if self._writing is not None:
            self._writing.join(timeout_s)
            if not self._writing.is_alive():
                self._writing = None
        return self._writing is None

    def ended(self) -> list[dict[str, Any]]:
        """What has been written since the last call, on rank 0: {"kind", "step", "path" or None, "bytes", "seconds",
        "error"}."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self.wait(CLOSE_S)
        self._closed.set()

    def _take(self, trainer: Savable, writers: Collection[int]) -> tuple[list[Chunk], dict[str, Any]]:
        assert trainer.backend is self._backend
        rank = self._seat.rank
        chunks = snapshot(trainer.backend, self._layouts, rank, writers) + self._random_states()
        state = {
            "run": trainer.run,
            "spec": trainer.spec.to_dict(),
            "step": trainer.progress.step,
            "samples": trainer.progress.samples,
            "scaler": asdict(trainer.scaler),
            "optimizer": slots_of(trainer.backend),
            "parameters": shapes_of(trainer.backend),
            "writers": sorted(writers),
            "torch": str(torch.__version__),
        }
        return chunks, state

    def _random_states(self) -> list[Chunk]:
        rank, device = self._seat.rank, self._seat.device
        states = {"cpu": torch.get_rng_state()}
        if device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(device)
        return [Chunk(name=f"random.{rank}.{of}", start=0, values=state) for of, state in states.items()]

    def _complete(self, partial: Path, kind: str, last: int) -> dict[str, Any]:
        """On rank 0: make it a checkpoint when all ranks have written their files, or throw it away."""
        parts = []
        for rank in range(self._seat.world_size):
            while not self._store.check([_key(partial, rank)]):
                if self._closed.wait(POLL_S):
                    discard(partial)
                    return {"path": None, "bytes": 0, "error": "the ranks were closed before it was written"}
            parts.append(json.loads(self._store.get(_key(partial, rank))))
            self._store.delete_key(_key(partial, rank))
        errors = [f"rank {rank}: {part['error']}" for rank, part in enumerate(parts) if "error" in part]
        try:
            if not errors:
                made = finish(partial, parts, kind=kind)
                prune(partial.parent, made.run, last=last)
                return {"path": str(made.path), "bytes": made.nbytes, "error": ""}
        except (OSError, ValueError) as e:
            errors = [f"rank 0: {_words(e)}"]
        discard(partial)
        return {"path": None, "bytes": 0, "error": "; ".join(errors)}

    # -- loading --------------------------------------------------------------------------------------------------

    def find(self, path: str, spec: Spec) -> Checkpoint:
        """The checkpoint that is there, for a training under `spec`; collective. Raises SpecError on every rank, though one
        alone may not see it, as where a folder is on one machine only."""
        saved, refusal = None, None
        try:
            saved = find(path)
            check_same(saved, spec)
        except SpecError as e:
            refusal = e
        told = [refusal] * self._seat.world_size
        if self._seat.world_size > 1:
            dist.all_gather_object(told, refusal)
        if refused := next((e for e in told if e is not None), None):
            raise refused
        assert saved is not None
        return saved

    def load(self, saved: Checkpoint, backend: Backend) -> tuple[Progress, Scaler, list[str]]:
        """Fill a backend that was just built. Not collective. Returns also notes on what could not go on as it was.

        Raises:
            SpecError: it was saved of another model. LookupError, OSError: its files.
        """
        m, rank = saved.manifest, self._seat.rank
        shapes = shapes_of(backend)
        if shapes != m["parameters"]:
            other = sorted(n for n in {*shapes, *m["parameters"]} if shapes.get(n) != m["parameters"].get(n))
            raise SpecError("checkpoint", f"{saved.path.name} is of another model: {other[0]} is not the same",
                            "resume with the model that it was saved of")  # fmt: skip
        writers = m["writers"]
        whose = writers[rank % len(writers)]
        wanted = targets(backend, m["optimizer"]["slots"], m["optimizer"]["steps"], whose)
        random, notes = self._random_targets(saved)
        with torch.no_grad():
            read_shards(saved.path, [*wanted, *random], optional=("optimizer.", "random."))
        for chunk in random:
            _set_random_state(chunk, self._seat.device)
        return Progress(step=saved.step, samples=saved.samples), Scaler(**m["scaler"]), notes

    def _random_targets(self, saved: Checkpoint) -> tuple[list[Chunk], list[str]]:
        rank = self._seat.rank
        if saved.spec.world_size != self._seat.world_size or rank not in saved.manifest["writers"]:
            return [], ["random numbers that your own code draws on a rank do not go on where they were"]
        return self._random_states(), []


def _set_random_state(chunk: Chunk, device: torch.device) -> None:
    if chunk.name.endswith(".cuda"):
        torch.cuda.set_rng_state(chunk.values, device)
    else:
        torch.set_rng_state(chunk.values)


def _written(partial: Path, rank: int, chunks: Sequence[Chunk], state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part, or {"error"}."""
    try:
        file, nbytes = write_shard(partial, rank, chunks)
        return {"file": file, "bytes": nbytes, "state": state}
    except Exception as e:
        return {"error": _words(e)}


def _words(e: BaseException) -> str:
    said = e.strerror if isinstance(e, OSError) and e.strerror else " ".join(str(e).split())
    return said or type(e).__name__


def _quietly(write: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the store went with rank 0: what was written is torn
        write()


def _key(partial: Path, rank: int) -> str:
    return f"checkpoint/{partial.name}/{rank}"
