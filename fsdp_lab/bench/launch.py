"""`launch`: starts a process for each rank of a bench, receives their messages, and ends them in any case; `main` is a rank.

A rank is `python -m fsdp_lab.bench.launch`. The first line of its standard input is its job as JSON; at the end of the input
the launcher has ended, and the rank ends, so that none outlives a launcher that was killed. It sends messages as lines of
JSON over its standard output; what libraries print goes to its standard error. Ranks have sessions of their own: Ctrl-C
reaches the launcher alone, which ends them by their pids.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from fsdp_lab.bench.plan import BenchError, BenchPlan, PlanError
from fsdp_lab.core.process import HOST_MEMORY

SILENCE_S = 600.0  # without a message of any rank: longer than all timeouts inside the ranks
END_S = 3.0

Message = tuple[int, str, Any]  # rank, kind, value
Send = Callable[[str, Any], None]  # kind, value


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
    on_round: Callable[[int], None],
    on_events: Callable[[list[dict[str, Any]]], None] = lambda events: None,
) -> list[Any]:
    """Runs the plan in new processes and returns the result of each rank.

    Args:
        job: the "task", "steps", "checkpoints", "wire" or one of sessions.TASKS, and its arguments.
        on_round: called with the number of each finished round.
        on_events: called with the step events of metered forms, as dicts.

    Raises:
        BenchError: with the first error of a rank, or with its exit code; or when `plan.limit_s` is over.
    """
    end_s = time.monotonic() + (plan.limit_s or math.inf)
    with _processes(plan, job) as ranks:
        messages = _listen(ranks)
        results: dict[int, Any] = {}
        while len(results) < plan.ranks:
            rank, kind, value = _next(messages, end_s, plan.limit_s)
            if kind == "place":
                for other in ranks[1:]:
                    other.give(value)
            elif kind == "round":
                on_round(value)
            elif kind == "events":
                on_events(value)
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
            self.process.wait(END_S)
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
        self.process.wait(END_S)
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
        [sys.executable, "-m", "fsdp_lab.bench.launch"],
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


def _next(messages: queue.Queue[Message], end_s: float, limit_s: float) -> Message:
    left_s = end_s - time.monotonic()
    try:
        return messages.get(timeout=max(0.0, min(SILENCE_S, left_s)))
    except queue.Empty:
        if left_s <= SILENCE_S:
            raise BenchError(f"the ranks did not end within {limit_s:.0f} s") from None
        raise BenchError(f"no rank has sent anything for {SILENCE_S:.0f} s") from None


# -- in the process of a rank -----------------------------------------------------------------------------------------


def main() -> int:
    send, received = _private_output(), _from_launcher()
    try:
        _measure(json.loads(received.get()), received, send)
    except Exception as e:
        traceback.print_exc()
        send("error", " ".join(str(e).split()) or type(e).__name__)
        return 1
    return 0


def _measure(job: dict[str, Any], received: SimpleQueue[bytes], send: Send) -> None:
    import torch

    from fsdp_lab.bench.checkpoints import save_and_load
    from fsdp_lab.bench.interleave import interleave
    from fsdp_lab.bench.sessions import TASKS, perform
    from fsdp_lab.bench.wire import time_a_wait, time_collectives
    from fsdp_lab.rank.rendezvous import RankInfo, close_groups, find_store, host_store, open_groups
    from fsdp_lab.wire import WireContext

    plan, rank = BenchPlan.from_dict(job["plan"]), int(job["rank"])
    if hosted := host_store() if rank == 0 else None:
        send("place", hosted.place)
    store = hosted or find_store(json.loads(received.get()))
    torch.set_num_threads(1)
    if job["task"] in TASKS:
        send("result", perform(plan, rank, store, job))
        return
    context = WireContext(shared_memory=plan.shares_memory)
    device = torch.device(plan.devices[rank])
    info = RankInfo(rank=rank, world_size=plan.ranks, device=device, shares_gpu=plan.shares_gpu)
    world = open_groups(info, store, context, 0)

    def report_round(done: int) -> None:
        if rank == 0:
            send("round", done)

    result: Any
    if job["task"] == "checkpoints":
        result = save_and_load(plan, info, world, store, Path(job["folder"]), report_round)
    elif job["task"] == "wire":
        result = {"seconds": time_collectives(world, plan.steps, report_round), "waiting": time_a_wait(world)}
    else:
        result = interleave(plan, info, world, report_round, lambda events: send("events", events))
    send("result", result)
    world.control(torch.zeros(1, dtype=torch.float64))  # a barrier: no rank closes its groups while another trains
    close_groups(context)


def _private_output() -> Send:
    """Reserves the standard output for messages, and redirects other output to the standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(kind: str, value: Any) -> None:
        out.write(json.dumps([kind, value]) + "\n")
        out.flush()

    return send


def _from_launcher() -> SimpleQueue[bytes]:
    """A queue of the input's lines. At the end of the input this process ends, even while it imports torch."""
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        part = b""
        while data := os.read(0, 4096):
            *whole, part = (part + data).split(b"\n")
            for line in whole:
                lines.put(line)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return lines


if __name__ == "__main__":
    os._exit(main())  # output is flushed; why not a regular exit: see end_process in rank/rendezvous.py
