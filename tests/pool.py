"""Resident rank processes: importing torch takes seconds, forking a process that has imported it milliseconds.

`pool.run(function, world_size, *args)` calls `function(place, *args)` on that many processes, each with its `Place`
(info, context, open wire), and returns the results by rank; an exception of a rank is raised here, with its traceback. Where
a rank does not answer in time, what its threads do is in the error, and all ranks are replaced: the next run finds
none that is still busy with this one.

The ranks are forked from a server process that imports torch and transformers once and starts no thread of Gloo."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMPORTED_ONCE = [
    "torch.distributed.fsdp", "transformers.models.gpt2.modeling_gpt2", "fsdp_lab.rank", "tests.remembered",
]  # fmt: skip


@dataclass
class Place:
    """What a function of a test is given in its rank."""

    info: Any
    context: Any
    world: Any
    store: Any
    sharing: int = 1  # ranks on this one's GPU

    @property
    def rank(self) -> int:
        return int(self.info.rank)

    @property
    def world_size(self) -> int:
        return int(self.info.world_size)


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


def _serve(pipe: Any, stacks: Path) -> None:
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    import torch

    from fsdp_lab.rank.rendezvous import RankInfo, close_groups, find_store, open_groups
    from fsdp_lab.wire import ReductionOrder, WireContext
    from tests.remembered import remember

    torch.set_num_threads(1)
    remember()
    gc.collect()
    gc.freeze()  # modules stay, and are most of what the collections below would walk
    while True:
        task = pickle.loads(pipe.recv())
        if task is None:
            os._exit(0)
        function, rank, world_size, place, reduction, shared, devices, args = task
        joined = reduction is not None
        try:
            order = ReductionOrder(reduction or "auto")
            context = WireContext(reduction=order, timeout_s=15, shared_memory=shared)
            device = devices[rank] if devices else "cpu"
            sharing = max(1, devices.count(device))
            info = RankInfo(rank=rank, world_size=world_size, device=torch.device(device), shares_gpu=sharing > 1)
            store = find_store(place)
            world = open_groups(info, store, context, 0) if joined else None
            # a rank that leaves at once would break connections that others still open
            if world is not None and not shared:
                world._gloo.barrier().wait()
            try:
                answer = ("ok", function(Place(info, context, world, store, sharing), *args))
            except BaseException as e:
                context.abort(str(e))  # others may wait in a collective that this rank left
                raise
            finally:
                if joined:
                    close_groups(context)
        except BaseException:
            answer = ("error", traceback.format_exc())
        pipe.send(pickle.dumps(answer))
        del task, function, args, answer
        world = context = store = None
        if torch.distributed.is_initialized():  # by a function that raised before it gave its groups up
            torch.distributed.destroy_process_group()
        gc.collect()  # a mesh and its groups are a cycle, and each group has threads


@dataclass
class Worker:
    """One process, the pipe to it, and the file into which it writes its stacks on SIGUSR1."""

    process: Any
    pipe: Any
    stacks: Path

    def give(self, value: Any) -> None:
        """By value: torch would send each tensor as a file, which stays open, and there may be no more than 1,024."""
        self.pipe.send(pickle.dumps(value))

    def take(self) -> Any:
        """By value as well."""
        return pickle.loads(self.pipe.recv())

    def read_stacks(self) -> str:
        """Those of all threads; the one that was interrupted comes last."""
        os.kill(self.process.pid, signal.SIGUSR1)
        end, text, before = time.monotonic() + 5, "", ""
        while ("Current thread" not in text or text != before) and time.monotonic() < end:
            time.sleep(0.1)
            before, text = text, self.stacks.read_text()
        return text


class Pool:
    def __init__(self, size: int) -> None:
        self._runs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="fsdp_lab_pool_")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED_ONCE)
        self._workers = [self._start(rank) for rank in range(size)]

    def _start(self, rank: int) -> Worker:
        here, there = self._context.Pipe()
        stacks = Path(self._folder.name) / f"rank{rank}_run{self._runs}"
        process = self._context.Process(target=_serve, args=(there, stacks), daemon=True)
        process.start()
        return Worker(process, here, stacks)

    def renew(self) -> None:
        """New processes, which hold nothing of earlier runs."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
        self._workers = [self._start(rank) for rank in range(len(self._workers))]

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, reduction: str | None = "auto",
            shared_memory: bool = False, devices: Sequence[str] = (), timeout_s: float = 120) -> list[Any]:  # fmt: skip
        """With `reduction` None no process group is opened: the function does that. `devices`: of the ranks; (): CPUs."""
        if not all(worker.process.is_alive() for worker in self._workers):
            self.renew()  # one was killed between two runs: for its memory, say
        self._runs += 1
        chosen = self._workers[:world_size]
        # not in memory, which would cost a descriptor in each run
        store = Path(self._folder.name) / f"store{self._runs}"
        store.touch(mode=0o600)
        end = time.monotonic() + timeout_s
        try:
            for rank, worker in enumerate(chosen):
                worker.give((function, rank, world_size, f"file:{store}", reduction, shared_memory, devices, args))
            late = [i for i, worker in enumerate(chosen) if not worker.pipe.poll(max(0.0, end - time.monotonic()))]
            if late:
                stacks = "\n".join(f"rank {rank}:\n{chosen[rank].read_stacks()}" for rank in late)
                raise RankError(f"ranks {late} did not answer in {timeout_s} s\n{stacks}")
            answers = [worker.take() for worker in chosen]
        except (EOFError, ConnectionError):
            codes = [worker.process.exitcode for worker in self._workers]
            self.renew()
            raise RankError(f"a rank's process ended while it worked; exit codes by rank: {codes}") from None
        except BaseException:  # the test's time is over, perhaps: no later run may find an answer to this one
            self.renew()
            raise
        errors = [f"rank {rank}: {text}" for rank, (state, text) in enumerate(answers) if state == "error"]
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in answers]

    def close(self) -> None:
        for worker in self._workers:
            if worker.process.is_alive():
                worker.give(None)
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
        self._folder.cleanup()
