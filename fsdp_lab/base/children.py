"""Temporary ranks: processes that a parent starts, one for each rank, gives a job, hears, and ends in any case.

A child is `python -m MODULE`. The first line of its standard input is its job as JSON; at the end of the input the parent
has ended, and the child ends, so that none outlives a parent that was killed. It sends messages as lines of JSON over its
standard output; what libraries print goes to its standard error. Children have sessions of their own: Ctrl-C reaches the
parent alone, which ends them by their pids."""

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
from queue import SimpleQueue
from typing import IO, Any, Self

from fsdp_lab.base.errors import SentenceError
from fsdp_lab.base.process import HOST_MEMORY

SILENCE_S = 600.0  # without a message of any child: longer than all timeouts inside the ranks
END_S = 3.0

Send = Callable[[str, Any], None]  # kind, value
Message = tuple[int, str, Any]  # rank, kind, value


class ChildError(SentenceError, RuntimeError):
    """A child failed or is silent. `str()` is a sentence."""


@dataclass(kw_only=True)
class Child:
    """The process of one rank."""

    process: subprocess.Popen[str]
    errors: IO[bytes]  # its standard error

    @classmethod
    def start(cls, module: str) -> Self:
        errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        own = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        own["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environment, pipe = {**HOST_MEMORY, **os.environ, **own}, subprocess.PIPE
        options: dict[str, Any] = {"env": environment, "start_new_session": True, "stdin": pipe, "stdout": pipe}
        process = subprocess.Popen([sys.executable, "-m", module], stderr=errors, text=True, **options)
        return cls(process=process, errors=errors)

    def give(self, value: Any) -> None:
        """Writes a line to its standard input. A child that is gone is noticed by the end of its output."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def code(self) -> int | None:
        """Waits for it, as it may still close its groups, and returns its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        return self.process.returncode

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait(END_S)
        self.errors.close()


def run_children(
    module: str,
    job: Mapping[str, Any],
    ranks: int,
    on_message: Callable[[int, str, Any], None] = lambda rank, kind, value: None,
    *,
    limit_s: float = 0.0,
) -> list[Any]:
    """Starts a child for each rank, gives it the job with its "rank", and returns the result of each, by rank.

    A child sends its value as "result", or a sentence as "error". What rank 0 sends as "place" the others are given, as a
    further line. `on_message` is called with all other messages. Raises ChildError with the first error of a child, or with
    its exit code; or when `limit_s`, of all of it, is over (0: there is no limit)."""
    end_s = time.monotonic() + (limit_s or math.inf)
    with _started(module, job, ranks) as (children, messages):
        results: dict[int, Any] = {}
        while len(results) < ranks:
            rank, kind, value = _next(messages, end_s, limit_s)
            if kind == "place":
                for other in children[1:]:
                    other.give(value)
            elif kind == "result":
                results[rank] = value
            elif kind == "error":
                raise ChildError(f"rank {rank} failed: {value}")
            elif kind != "gone":
                on_message(rank, kind, value)
            elif rank not in results:
                code, errors = children[rank].code(), children[rank].errors
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                raise ChildError(f"rank {rank} ended with code {code}: {lines[-1] if lines else 'it printed nothing'}")
        for child in children:
            child.code()
    return [results[rank] for rank in range(ranks)]


@contextlib.contextmanager
def _started(module: str, job: Mapping[str, Any], ranks: int) -> Iterator[tuple[Sequence[Child], queue.Queue[Message]]]:
    """Starts the children and sends their jobs; ends all of them on exit. Yields their messages too, in order of arrival,
    with a "gone" at the end of each child's output."""
    children: list[Child] = []
    messages: queue.Queue[Message] = queue.Queue()

    def read(rank: int, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                kind, value = json.loads(line)
                messages.put((rank, kind, value))
        messages.put((rank, "gone", None))

    try:
        for rank in range(ranks):
            child = Child.start(module)
            children.append(child)
            child.give({**job, "rank": rank})
            threading.Thread(target=read, args=(rank, child.process.stdout), daemon=True).start()
        yield children, messages
    finally:
        for child in children:
            child.end()


def _next(messages: queue.Queue[Message], end_s: float, limit_s: float) -> Message:
    left_s = end_s - time.monotonic()
    try:
        return messages.get(timeout=max(0.0, min(SILENCE_S, left_s)))
    except queue.Empty:
        if left_s <= SILENCE_S:
            raise ChildError(f"the ranks did not end within {limit_s:.0f} s") from None
        raise ChildError(f"no rank has sent anything for {SILENCE_S:.0f} s") from None


# -- in the process of a child ----------------------------------------------------------------------------------------


def run_child(measure: Callable[[dict[str, Any], SimpleQueue[bytes], Send], None]) -> int:
    """A child's whole life: its exit code. `measure` is given the job, the lines that follow it, and what sends. Other
    output goes to the standard error. At the end of the input this process ends, even while it imports torch."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    received: SimpleQueue[bytes] = SimpleQueue()

    def send(kind: str, value: Any) -> None:
        out.write(json.dumps([kind, value]) + "\n")
        out.flush()

    def read() -> None:
        part = b""
        while data := os.read(0, 4096):
            *whole, part = (part + data).split(b"\n")
            for line in whole:
                received.put(line)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    try:
        measure(json.loads(received.get()), received, send)
    except Exception as e:
        traceback.print_exc()
        send("error", " ".join(str(e).split()) or type(e).__name__)
        return 1
    return 0
