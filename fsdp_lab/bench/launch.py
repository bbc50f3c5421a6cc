"""`measure`: starts a process for each rank, listens to them, and ends them, whatever happens. No torch in here.

Each rank has a pipe from this process as its standard input and ends when that closes, so that none outlives a launcher
that was killed. They are in sessions of their own: Ctrl-C reaches this process alone, which ends them by their pids.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from fsdp_lab.bench.plan import BenchPlan, PlanError
from fsdp_lab.bench.ratios import BenchError, BenchResult
from fsdp_lab.core.process import HOST_MEMORY

SILENCE_S = 600.0  # without a word of any rank: longer than any wait of theirs that ends by itself
_END_S = 3.0

Word = tuple[int, str, Any]  # rank, kind, value


def place(ranks: int, device: str | None) -> tuple[str, ...]:
    """A device for each rank: `device` of all, or GPUs where there is one for each, else CPUs.

    With "cuda" and fewer GPUs than ranks, ranks share them. Raises PlanError where there is none.
    """
    if device == "cpu":
        return ("cpu",) * ranks
    import torch

    gpus = torch.cuda.device_count()
    if device == "cuda" and not gpus:
        raise PlanError("--device cuda: torch finds no GPU here; give --device cpu")
    if device is None and gpus < ranks:
        return ("cpu",) * ranks
    return tuple(f"cuda:{rank % gpus}" for rank in range(ranks))


def measure(
    plan: BenchPlan, tell: Callable[[int], None], take: Callable[[list[dict[str, Any]]], None] = lambda events: None
) -> BenchResult:
    """`launch`, as figures of the forms' steps."""
    return BenchResult.of_ranks(launch(plan, {"task": "steps"}, tell, take))


def launch(
    plan: BenchPlan,
    job: Mapping[str, Any],
    tell: Callable[[int], None],
    take: Callable[[list[dict[str, Any]]], None] = lambda events: None,
) -> list[Any]:
    """Runs the plan on processes of its own, and returns each rank's result; `tell` is called with the number of each round
    that is over, `take` with the step events of metered forms, as dicts. `job`: the "task" and what it needs (__main__.py).

    Raises BenchError with the first reason that a rank gave, or with how it ended.
    """
    with _processes(plan, job) as ranks:
        words = _listen(ranks)
        results: dict[int, Any] = {}
        while len(results) < plan.ranks:
            rank, kind, value = _next(words)
            if kind == "port":
                for other in ranks[1:]:
                    other.give(value)
            elif kind == "round":
                tell(value)
            elif kind == "events":
                take(value)
            elif kind == "result":
                results[rank] = value
            elif kind == "error":
                raise BenchError(f"rank {rank} failed: {value}")
            elif rank not in results:  # "gone"
                raise BenchError(f"rank {rank} ended with code {ranks[rank].code()}: {ranks[rank].last_words()}")
        for started in ranks:
            started.code()
    return [results[rank] for rank in range(plan.ranks)]


@dataclass(kw_only=True)
class _Rank:
    """One process of ours."""

    process: subprocess.Popen[str]
    errors: IO[bytes]  # its standard error

    def give(self, value: Any) -> None:
        """A line on its standard input. One that is gone is heard of by the end of its output."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def code(self) -> int | None:
        """How it ended; it is waited for, as it may still close its groups."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        return self.process.returncode

    def last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait(_END_S)
        self.errors.close()


@contextlib.contextmanager
def _processes(plan: BenchPlan, job: Mapping[str, Any]) -> Iterator[Sequence[_Rank]]:
    """A process for each rank, told what to do; all are gone after it."""
    ranks: list[_Rank] = []
    try:
        for rank in range(plan.ranks):
            ranks.append(_start())
            ranks[-1].give({**job, "plan": plan.to_dict(), "rank": rank})
        yield ranks
    finally:
        for started in ranks:
            started.end()


def _start() -> _Rank:
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_lab.bench"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env={
            **HOST_MEMORY,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        },
        start_new_session=True,
    )
    return _Rank(process=process, errors=errors)


def _listen(ranks: Sequence[_Rank]) -> queue.Queue[Word]:
    """What the ranks say, in the order of its coming; ("gone") at the end of each one's output."""
    words: queue.Queue[Word] = queue.Queue()

    def read(rank: int, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                kind, value = json.loads(line)
                words.put((rank, kind, value))
        words.put((rank, "gone", None))

    for rank, started in enumerate(ranks):
        assert started.process.stdout is not None
        threading.Thread(target=read, args=(rank, started.process.stdout), daemon=True).start()
    return words


def _next(words: queue.Queue[Word]) -> Word:
    try:
        return words.get(timeout=SILENCE_S)
    except queue.Empty:
        raise BenchError(f"no rank has said anything for {SILENCE_S:.0f} s") from None
