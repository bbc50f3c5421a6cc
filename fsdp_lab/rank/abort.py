"""How ranks leave a step together: `AbortMonitor` wakes this rank and informs the others, `AbortProtocol` settles the step.

Note: aborting a step. A rank is stopped by SIGINT, or reads in the store that another rank aborted. Both must work while
the main thread is blocked in C++, where no Python signal handler runs. But the interpreter's C handler writes a byte to the
wakeup descriptor at once, and the monitor's thread reads it. It aborts the wire (see wire/context.py and wire/nccl.py: the
main thread may be waiting for its GPU) and writes the reason to the store, where the monitors of the other ranks find it.
The wire raises the exception at the next collective, so that no code of ours is interrupted in the middle.

Note: after an abort. First the ranks agree on the last committed step (`_settle`): a rank that was waiting for a vote's
result when a peer already had it takes the result from the peer's record and commits too; all others discard the step.
A rank whose device had the result, but whose host had not read it, first finds that out (`Trainer.read_vote`).
On the next call all ranks see that this epoch was aborted and open new process groups under the next one (`reopen`); then
each rebuilds its backend from its own master shards, since a wrapper that was left in the middle of a backward cannot be
used again (`Lifecycle.rebuild`)."""

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from torch import distributed as dist

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.process import Identity, machine
from fsdp_lab.rank.rendezvous import RankInfo, close_groups, open_groups, own_connection
from fsdp_lab.rank.trainer import StepState, Trainer
from fsdp_lab.wire import RankAborted, Wire, WireContext

INTERRUPTED = "was interrupted"  # the end of the reason of a requested stop
ANSWER_S = 5.0  # timeout for rank 0's store when a step is aborted
_LOOP = -1  # the number of a user's loop, which no call has: all ranks have left it when the next call begins
_POLL_S = 0.1
_INSIST_S = 1.0  # a SIGINT this long after the abort is a second request; an earlier one may just be late
_SETTLE_S = 10.0

T = TypeVar("T")


class BoundedStore:
    """Requests to a store, whose answers may take `timeout_s`.

    torch's own requests have no timeout: if the cable is cut, they wait as long as TCP retries, many minutes. So each
    request runs in its own thread, which is left behind if no answer arrives."""

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._unanswered: Future[Any] | None = None

    def call(self, request: Callable[[dist.Store], T]) -> T:
        """Raises what `request` raises; dist.DistNetworkError without an answer, to it or to an earlier request."""
        if self._unanswered is not None and not self._unanswered.done():
            raise self._no_answer()
        answer: Future[T] = Future()
        thread = threading.Thread(target=self._run, args=(request, answer), name="fsdp-lab-store", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a rank that is out of memory has none for a thread, and must still say why it failed
            self._run(request, answer)
        try:
            return answer.result(self._timeout_s)
        except TimeoutError:
            self._unanswered = answer
            raise self._no_answer() from None

    def _run(self, request: Callable[[dist.Store], T], answer: Future[T]) -> None:
        try:
            answer.set_result(request(self._store))
        except BaseException as e:
            answer.set_exception(e)

    def _no_answer(self) -> dist.DistNetworkError:
        return dist.DistNetworkError(f"no answer for {self._timeout_s:g} s")


class Peers:
    """The processes of the other ranks on this machine, so that no rank waits for the answer of one that has ended."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = store
        self._processes: dict[int, Identity | None] = {}  # by rank; None: on another machine
        store.set(f"process/{rank}", json.dumps({"machine": machine(), "process": asdict(Identity.this())}))

    def look_up(self, rank: int) -> None:
        """Read a rank's process from the store, once."""
        key = f"process/{rank}"
        if rank in self._processes or not self._store.check([key]):
            return
        entry = json.loads(self._store.get(key))
        self._processes[rank] = Identity(**entry["process"]) if entry["machine"] == machine() else None

    def ended(self, rank: int) -> bool:
        """Whether the process of a rank that was looked up has ended."""
        process = self._processes.get(rank)
        return process is not None and not process.alive


class AbortMonitor:
    """A thread that aborts this rank and informs the others, by a separate connection to the store. It runs until `close`,
    and acts only inside `active`."""

    def __init__(self, context: WireContext, store: dist.Store, rank: int) -> None:
        self._context, self._store, self._rank = context, store, rank
        self._bounded = BoundedStore(store, ANSWER_S)
        self._epoch: int | None = None  # None: not active
        self._lock = threading.Lock()
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        self._closed = False
        self._aborted_s = 0.0
        self._turn = 0  # the number of the current call
        self.insisted = False  # set by a second SIGINT: the sender knows that a rank will not answer
        self._thread = threading.Thread(target=self._watch, name="fsdp-lab-abort", daemon=True)
        self._thread.start()

    @contextmanager
    def active(self, epoch: int, turn: int, *, raises: bool = False) -> Iterator[None]:
        """The context of call number `turn`, which all ranks make. In the main thread it replaces SIGINT's handler, unless
        that is to raise, too."""
        with self._lock:
            self._epoch, self._turn = epoch, turn
        self.insisted = False
        with contextlib.ExitStack() as restored:
            if threading.current_thread() is threading.main_thread():
                restored.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
                if not raises:
                    signal.signal(signal.SIGINT, lambda number, frame: None)  # the thread reads it from the pipe
                wakeup = signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
                restored.callback(signal.set_wakeup_fd, wakeup)
            try:
                yield
            finally:
                with self._lock:
                    self._epoch = None

    @property
    def working(self) -> bool:
        """Whether this rank is inside `active`."""
        return self._epoch is not None

    def next_epoch(self, epoch: int) -> None:
        """Call it before the wire's context is reset, so that a late abort of the old epoch is ignored."""
        with self._lock:
            self._epoch = epoch

    def announce(self, why: str) -> None:
        """Abort this rank, and inform the others if the store answers."""
        self._context.abort(why)
        epoch = self._epoch
        if epoch is None:
            return
        with contextlib.suppress(RuntimeError):
            key, entry = f"abort/{epoch}", f"{self._turn} {why}"
            self._bounded.call(lambda store: store.compare_set(key, "", entry))  # the first reason wins

    def announced(self, epoch: int) -> tuple[str, bool] | None:
        """Returns why a rank aborted this epoch, and whether it did so in the current call, which the ranks that entered it
        first have then left already. None: no rank aborted it."""
        if not self._store.check([f"abort/{epoch}"]):
            return None
        turn, _, why = self._store.get(f"abort/{epoch}").decode().partition(" ")
        return why, int(turn) == self._turn

    def close(self) -> None:
        self._closed = True
        os.write(self._wakeup_write, b"\0")
        self._thread.join(2)
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)

    def _watch(self) -> None:
        while not self._closed:
            ready, _, _ = select.select([self._wakeup_read], [], [], _POLL_S)
            interrupted = bool(ready) and signal.SIGINT in os.read(self._wakeup_read, 1024)
            with self._lock:
                epoch = self._epoch
            if epoch is None or self._context.aborted is not None:
                self.insisted |= interrupted and time.monotonic() - self._aborted_s > _INSIST_S
                continue
            try:
                self._aborted_s = time.monotonic()  # ends up at the last round, the one that finds an abort
                if interrupted:
                    self.announce(f"rank {self._rank} {INTERRUPTED}")
                elif (why := self._context.failure()) is not None:
                    self.announce(f"rank {self._rank}: {why}")
                elif (announced := self.announced(epoch)) is not None:
                    self._abort_in(epoch, announced[0])
            except RuntimeError as e:
                self._abort_in(epoch, f"the store of rank 0 is gone ({str(e).splitlines()[0]})")

    def _abort_in(self, epoch: int, why: str) -> None:
        with self._lock:
            if self._epoch == epoch:  # otherwise the main thread has moved on
                self._context.abort(why)


class AbortProtocol:
    """The process groups of one epoch, and what ranks do when one of them aborts a step: see the notes.

    Attributes:
        world: the default process group; another one after an abort.
        turn: the number of the call in progress. The kernel sets it; without a kernel it is counted here."""

    def __init__(self, info: RankInfo, context: WireContext, store: dist.Store) -> None:
        self._info, self._context, self._store = info, context, store
        self._bounded = BoundedStore(store, ANSWER_S)
        self.monitor = AbortMonitor(context, own_connection(store), info.rank)
        self._peers = Peers(store, info.rank)
        self._epoch = 0
        self.turn = self._last_turn = 0
        self.world: Wire = self._open()

    def _open(self) -> Wire:
        return open_groups(self._info, dist.PrefixStore("groups", self._store), self._context, self._epoch)

    @contextmanager
    def collective_call(self) -> Iterator[None]:
        """The context of a call that all ranks make: it can be interrupted, and a failure is announced to the others."""
        if self.turn == self._last_turn:
            self.turn += 1
        self._last_turn = self.turn
        with self.monitor.active(self._epoch, self.turn):
            try:
                yield
            except SpecError:  # refused on every rank (prepare.py): no rank waits
                raise
            except BaseException as e:
                self.monitor.announce(self._failure(e))
                raise

    @contextmanager
    def loop(self) -> Iterator[None]:
        """The context of a user's loop, which all ranks enter: an interrupt or a failure of one of them frees the others."""
        with self.monitor.active(self._epoch, _LOOP, raises=True):
            try:
                yield
            except BaseException as e:
                interrupted = isinstance(e, KeyboardInterrupt)
                why = f"rank {self._info.rank} {INTERRUPTED}" if interrupted else self._failure(e)
                self.monitor.announce(str(e) if isinstance(e, RankAborted) else why)
                raise

    def abort_step(self, trainer: Trainer, why: BaseException) -> None:
        """End a step that raised, on all ranks. Raises `why` again, unless it was an interrupt."""
        aborted = isinstance(why, RankAborted)  # it announces too: a broken connection is noticed by one side first
        if not (isinstance(why, RankAborted) and why.others_know):
            self.monitor.announce(str(why) if aborted else self._failure(why))
        self._settle(trainer)
        if not (aborted and str(why).endswith(INTERRUPTED)):
            raise why

    def reopen(self) -> bool:
        """Open new groups if any rank aborted this epoch. Returns whether one did; then backends must be rebuilt. Raises
        RankAborted if that happened in this very call: the aborting rank takes part again in the next one."""
        if (announced := self.monitor.announced(self._epoch)) is None:
            return False
        why, now = announced
        if now:
            self._context.abort(why)
            raise RankAborted(why)
        self._context.abort("the epoch is over")  # also on a rank that was idle when it happened
        self._epoch += 1
        self.monitor.next_epoch(self._epoch)
        close_groups(self._context)
        self.world = self._open()
        return True

    def record(self, trainer: Trainer, *, settled: bool) -> None:
        """Publish this rank's progress: at the end of a chunk, and when it aborts a step."""
        p = trainer.progress
        text = json.dumps({"step": p.step, "vote": list(p.vote), "settled": settled})
        self._store.set(f"at/{self._epoch}/{self._info.rank}", text)

    def close(self) -> None:
        self.monitor.close()
        close_groups(self._context)

    def _settle(self, trainer: Trainer) -> None:
        """Agree on the last committed step. Raises RankAborted if a rank, or rank 0's store, does not answer."""
        try:
            trainer.read_vote(aborted=True)
            mine, deadline_s = trainer.progress.step, time.perf_counter() + _SETTLE_S
            self.record(trainer, settled=True)
            for rank in range(self._info.world_size):
                record = self._await_record(rank, mine, deadline_s)
                if record["step"] == mine + 1 and trainer.state in (StepState.VOTING, StepState.UPDATING):
                    trainer.commit(record["vote"])
                    break
        except dist.DistError as e:
            raise RankAborted(f"the store of rank 0 is gone ({first_line(e)}); {self._context.aborted}") from None
        finally:
            trainer.discard()

    def _await_record(self, rank: int, mine: int, deadline_s: float) -> dict[str, Any]:
        """Wait for a rank's record of this abort, or of a chunk that ended later than this rank's last step."""
        key = f"at/{self._epoch}/{rank}"
        self._bounded.call(lambda _: self._peers.look_up(rank))
        while time.perf_counter() < deadline_s and not self.monitor.insisted:
            ended = self._peers.ended(rank)  # checked before its record is read: the last version still counts
            if text := self._bounded.call(lambda store: store.get(key) if store.check([key]) else b""):
                record: dict[str, Any] = json.loads(text)
                if record["settled"] or record["step"] > mine:
                    return record
            if ended:
                break
            time.sleep(0.01)
        raise RankAborted(f"rank {rank} did not answer after the step was aborted: {self._context.aborted}")

    def _failure(self, e: BaseException) -> str:
        return f"rank {self._info.rank} failed: {type(e).__name__}: {first_line(e)}"


def first_line(e: BaseException) -> str:
    text = str(e).strip()
    return text.splitlines()[0] if text else "no message"
