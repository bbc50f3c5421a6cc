"""`watch`, the entry to measuring a loop of one's own; and `LoopRecorder`, which brings its events into the history.

On a rank of a lab's the messages of a loop go to the kernel, which stores them. Elsewhere, as under torchrun, they go to
rank 0's process through the store of the process group, in a thread of each rank, and it writes the history."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import distributed as dist, nn
from torch.distributed import distributed_c10d as c10d

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.rank.rendezvous import own_connection
from fsdp_lab.rank.session import resident_session
from fsdp_lab.rank.watch.loop import TRACE_EVERY, LoopHost, Watch, plain_host

if TYPE_CHECKING:
    from fsdp_lab.runs.history.history import History
    from fsdp_lab.runs.trackers import Reporter
    from fsdp_lab.runs.watched import WatchedRun

POLL_S = 0.2
LAST_S = 10.0  # after a loop, for the other ranks' last messages and for the disk


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    tokens: int | None = None,
    flops: int | bool = True,
    title: str = "",
    ledger_every: int | None = None,
    trace_every: int = TRACE_EVERY,
    hang_s: float | None = None,
    audit: bool = True,
    history: History | str | os.PathLike[str] | bool = True,
    report_to: Any = None,
) -> Watch:
    """Measures a training loop of your own: step time, memory by class, communication, loss.

        with fsdp_lab.watch(model, optimizer) as watch:
            for batch in loader:
                with watch.step():
                    loss = model(**batch).loss
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    watch.loss(loss)

    On the ranks of a lab, in a `%%px` cell, the events appear in the notebook: `lab.current`, its panels and tables.
    Elsewhere rank 0 writes them to the history, which any notebook can open meanwhile. All ranks enter it, since they agree
    on a name.

    What is not known is left out: tokens per second without `tokens`, the loss where it was not given, and communication in
    process groups that are not the lab's (see `fsdp_lab.init_process_group`).

    Args:
        model: under FSDP2, FSDP1, DDP, `fsdp_lab.engine.fully_shard`, or plain.
        optimizer: whose state is counted; several in a list; None: none is.
        tokens: of one rank in one step; `watch.step(tokens=...)` overrides it.
        flops: model FLOPs of one rank's step: True counts them in the first step, which is slower then and in no median.
            Steps with another number of tokens have none.
        title: of the run; "": made from the wrapper and the model.
        ledger_every: make each n-th step a ledger step besides the third, which measures memory by class.
        trace_every: record the timeline of each n-th step.
        hang_s: how long a collective of the loop may wait for a rank before the loop is ended, with the rank named, and the
            cause where it is a known one; None: as long as the lab's, `Lab(hang_s=...)`.
        audit: look whether the updates are what they should be: what is trained moves, what is frozen stays, replicas are
            equal. Read the findings by `run.audit()`.
        history: where events are stored outside of a lab: True in the default file, a path, or False.
        report_to: as of `Lab.run`. Rank 0 reports; on the ranks of a lab its kernel does, under its own environment.

    Raises ArgumentError: for what cannot be watched, in a sentence. ModuleNotFoundError: of `report_to`."""
    session, reporter, sent = resident_session(), None, None
    if report_to is not None:
        from fsdp_lab.runs.trackers import Reporter

        reporter = Reporter(report_to, history)
    if session is not None and session.has_kernel:
        host, sent = session.loop_host(), report_to
        if reporter is not None and not all(isinstance(one, str) for one in reporter.given):
            reason = "an object cannot be sent to the notebook's kernel, which reports"
            raise ArgumentError("report_to", reason, "give the name of a tracker")
    else:
        recorder = LoopRecorder(history, None if reporter is None else reporter.checked())
        host = session.loop_host(recorder.publish) if session is not None else plain_host(model, recorder.publish)
        recorder.serve(host)
    return Watch(
        model,
        optimizer,
        host,
        tokens=tokens,
        flops=flops,
        title=title,
        ledger_every=ledger_every,
        trace_every=trace_every,
        hang_s=hang_s,
        report_to=sent,
        audit=audit,
    )


class LoopRecorder:
    """Carries the messages of one loop to rank 0 and, there, into the history. Nothing waits for it but the loop's end."""

    def __init__(self, history: History | str | os.PathLike[str] | bool, reporter: Reporter | None) -> None:
        self._history_given, self._reporter = history, reporter
        self._records = history is not False or reporter is not None
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._rank, self._world_size = 0, 1
        self._store: dist.Store | None = None
        self._run: WatchedRun | None = None  # on rank 0
        self._flush: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None

    def serve(self, host: LoopHost) -> None:
        """Call it before the first message."""
        self._rank, self._world_size = host.info.rank, host.info.world_size
        if self._world_size > 1 and self._records:
            self._store = own_connection(c10d._get_default_store())

    def publish(self, message: dict[str, Any]) -> None:
        """Takes a message; with the last one it waits until everything is stored, `LAST_S` at most, and reported."""
        if not self._records:
            return
        if self._thread is None:
            work = self._collect if self._rank == 0 else self._send
            self._thread = threading.Thread(target=work, name="fsdp_lab-loop", daemon=True)
            self._thread.start()
        self._queue.put(message)
        if "end" in message:
            self._queue.put(None)
            self._thread.join(LAST_S)
            if self._run is not None and self._run.state.over:
                self._run.reporter.flush()

    # -- on its thread ----------------------------------------------------------------------------------------------

    def _send(self) -> None:
        number = 0
        while (message := self._queue.get()) is not None:
            assert self._store is not None
            self._store.set(_key(message["run"], self._rank, number), json.dumps(message, default=StepEvent.to_dict))
            number += 1

    def _collect(self) -> None:
        """Rank 0: its own messages, and those of the others."""
        numbers = dict.fromkeys(range(1, self._world_size), 0)
        run, ended_s = "", 0.0
        while True:
            try:
                message = self._queue.get(timeout=POLL_S)
                if message is None:
                    ended_s = time.monotonic()
                else:
                    run = message["run"]
                    self._record(message)
            except queue.Empty:
                pass
            if run:
                for rank in list(numbers):
                    self._receive(run, rank, numbers)
            if ended_s and (not numbers or time.monotonic() - ended_s > LAST_S / 2):
                break
        self._flush()

    def _receive(self, run: str, rank: int, numbers: dict[int, int]) -> None:
        """All that a rank has sent meanwhile; without the rank, after its last message."""
        assert self._store is not None
        while self._store.check([key := _key(run, rank, numbers[rank])]):
            message = json.loads(self._store.get(key))
            self._store.delete_key(key)
            numbers[rank] += 1
            self._record(message)
            if "end" in message:
                del numbers[rank]
                return

    def _record(self, message: dict[str, Any]) -> None:
        if self._run is None:
            from fsdp_lab.runs.history.history import History
            from fsdp_lab.runs.watched import WatchedRun

            self._run = WatchedRun(message)
            if (history := History.of(self._history_given)) is not None:
                history.record(self._run)
                self._flush = partial(history.flush, LAST_S / 2)
            self._run.reporter = self._reporter or self._run.reporter
            self._run.reporter.follow(self._run)
        self._run.take(message)


def _key(run: str, rank: int, number: int) -> str:
    return f"fsdp_lab/loop/{run}/{rank}/{number}"
