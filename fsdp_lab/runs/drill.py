"""`Drill`: a failure that was made on purpose in a run, and what becomes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from fsdp_lab.cluster import ClusterError
from fsdp_lab.runs.recovery import Incident

if TYPE_CHECKING:
    from fsdp_lab.runs.run import Run


class Drill:
    """Made by `Lab.drill`. `wait()` or `await` it for the Incident: when the run goes on after the failure.

    Attributes:
        kind, rank, run: what was done, to whom. made_unix_s: when. step: committed by then.
    """

    def __init__(self, kind: str, rank: int, run: Run) -> None:
        self.kind, self.rank, self.run = kind, rank, run
        self.made_unix_s, self.step = time.time(), run.step
        self._before = len(run.incidents)

    @property
    def incident(self) -> Incident | None:
        """What the kernel has found; None: nothing yet."""
        return next(iter(self.run.incidents[self._before :]), None)

    @property
    def over(self) -> bool:
        """The run goes on after it, or has ended. One that is to be asked how to go on is not over."""
        found = self.incident
        return self.run.done or self.kind == "slow" or (found is not None and found.resumed_unix_s is not None)

    def wait(self, timeout_s: float | None = None) -> Incident | None:
        """Blocks until it is over; None for a link that is slow, which fails nothing.

        Raises: what the run failed with, where it did not go on; TimeoutError after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.over:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self!r} was not over after {timeout_s} s")
            time.sleep(0.02)
        found = self.incident
        if found is not None and found.resumed_unix_s is None and self.run.error is not None:
            raise self.run.error
        if found is None and self.run.done and self.kind != "slow":
            raise self.run.error or ClusterError(f"{self.run!r} ended before anything failed")
        return found

    def __await__(self) -> Generator[Any, None, Incident | None]:
        return asyncio.to_thread(self.wait).__await__()

    def end(self) -> None:
        """What it did to a link is undone, from the next chunk on."""
        self.run.arm(None)

    def __repr__(self) -> str:
        found = self.incident
        said = found.words if found is not None else "nothing was found yet"
        return f"<Drill: {self.kind} of rank {self.rank} at step {self.step}: {said}>"
