"""`launch`: starts a process for each rank, receives their messages, and ends them in any case.

A rank ends when the pipe that is its standard input closes, so that none outlives a launcher that was killed. Ranks
have sessions of their own: Ctrl-C reaches this process alone, which ends them by their pids.
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

from fsdp_lab.bench.plan import BenchError, BenchPlan, PlanError
from fsdp_lab.core.process import HOST_MEMORY

SILENCE_S = 600.0  # without a message of any rank: longer than all timeouts inside the ranks
_END_S = 3.0

Message = tuple[int, str, Any]  # rank, kind, value


def place(ranks: int, device: str | None) -> tuple[str, ...]:
    """A device per rank. None: GPUs if there is one for each rank, else CPUs.

    With "cuda" and fewer GPUs than ranks, ranks share them. Raises PlanError if there is no GPU.
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


def launch(
    plan: BenchPlan,
    job: Mapping[str, Any],
    tell: Callable[[int], None],
    take: Callable[[list[dict[str, Any]]], None] = lambda events: None,
) -> list[Any]:
    """Runs the plan in new processes and returns the result of each rank.

    Args:
        job: the "task", "steps" or "checkpoints", and its arguments (__main__.py).
        tell: called with the number of each finished round.
        take: called with the step events of metered forms, as dicts.

    Raises:
        BenchError: with the first error of a rank, or with its exit code.
    """
    with _processes(plan, job) as ranks:
        messages = _listen(ranks)
        results: dict[int, Any] = {}
        while len(results) < plan.ranks:
            rank, kind, value = _next(messages)
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
                raise BenchError(f"rank {rank} ended with code {ranks[rank].code()}: {ranks[rank].last_line()}")
        for started in ranks:
            started.code()
    return [results[rank] for rank in range(plan.ranks)]


@dataclass(kw_only=True)
class _Rank:
    """The process of one rank."""

    process: subprocess.Popen[str]
    errors: IO[bytes]  # its standard error

    def give(self, value: Any) -> None:
        """Writes a line to its standard input. A rank that is gone is noticed by the end of its output."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def code(self) -> int | None:
        """Waits for it, as it may still close its groups, and returns its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        return self.process.returncode

    def last_line(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait(_END_S)
        self.errors.close()


@contextlib.contextmanager
def _processes(plan: BenchPlan, job: Mapping[str, Any]) -> Iterator[Sequence[_Rank]]:
    """Starts a process for each rank and sends its job; ends all of them on exit."""
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


def _listen(ranks: Sequence[_Rank]) -> queue.Queue[Message]:
    """The messages of all ranks in order of arrival; a "gone" at the end of each rank's output."""
    messages: queue.Queue[Message] = queue.Queue()

    def read(rank: int, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                kind, value = json.loads(line)
                messages.put((rank, kind, value))
        messages.put((rank, "gone", None))

    for rank, started in enumerate(ranks):
        assert started.process.stdout is not None
        threading.Thread(target=read, args=(rank, started.process.stdout), daemon=True).start()
    return messages


def _next(messages: queue.Queue[Message]) -> Message:
    try:
        return messages.get(timeout=SILENCE_S)
    except queue.Empty:
        raise BenchError(f"no rank has sent anything for {SILENCE_S:.0f} s") from None
