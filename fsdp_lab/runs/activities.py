"""`Activities`: what uses a lab's ranks, one at a time: a run, a sweep of runs in turns, or a step in slow motion."""

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fsdp_lab.cluster import ClusterError, RankHung, RankLost
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.runs.comparison import Refusal
from fsdp_lab.runs.run import Drill, Run
from fsdp_lab.runs.slow_motion import SlowMotion
from fsdp_lab.runs.sweep import Sweep
from fsdp_lab.runs.trackers import Reporter
from fsdp_lab.runs.view import RunState
from fsdp_lab.runs.watched import WatchedRun
from fsdp_lab.spec.faults import SIGNALS, fault_of
from fsdp_lab.spec.spec import Spec

REPLACE_S = 15.0  # limit for an activity to end when another one replaces it; hung ranks are ended before that
END_S = 2.0  # the same when the lab is interrupted or closed


class Activities:
    """Starts runs, sweeps and slow steps; each ends the one before it. `place_ranks` gives the cluster the ranks and devices
    of a Spec, on the thread of the new activity; `record` is called with each new run.

    `run`, `sweep`, `slow`: the newest, running or over; None before the first. `closed`: nothing can be started."""

    def __init__(
        self, cluster: Cluster, place_ranks: Callable[[Spec], None], record: Callable[[Run | WatchedRun], None]
    ) -> None:
        self._cluster, self._place_ranks, self._record = cluster, place_ranks, record
        self.run: Run | None = None
        self.sweep: Sweep | None = None
        self.closed = False
        self.slow: SlowMotion | None = None
        self._newest: Run | SlowMotion | WatchedRun | None = None
        self._watched: dict[str, WatchedRun] = {}  # loops in cells that are not over, by id
        self._ended_loops: set[str] = set()  # ids: a rank's first message may come after another one was lost
        self._lock = threading.RLock()

    def begin_run(self, spec: Spec, **options: Any) -> Run:
        """Starts a run; `options` are those of `Run`."""
        with self._lock:
            self.require_open()
            prepare = self._preparation("another run was started")
            run = self.run = self._newest = Run(self._cluster, spec, prepare=prepare, **options)
        self._record(run)
        return run

    def begin_sweep(self, specs: Sequence[Spec], refused: Sequence[Refusal], *, steps: int, rounds: int) -> Sweep:
        with self._lock:
            self.require_open()
            run = self._suspendable(specs)
            clear = self._preparation("a comparison was started", place_ranks=False, but=run)
            drop = partial(self._end_turns, run)
            self.sweep = Sweep(
                specs, refused, steps=steps, rounds=rounds, make=self._begin_turn, suspended=run, drop=drop, clear=clear
            )
            return self.sweep

    def _suspendable(self, specs: Sequence[Spec]) -> Run | None:
        """The run in progress, if it can wait for a sweep of these Specs: its state needs the ranks that it is on."""
        run = self.run if self.sweep is None or self.sweep.done else self.sweep.suspended
        if run is None or run.done or run.state in (RunState.BROKEN, RunState.STOPPING):
            return None
        on = run.pending or run.spec
        return run if all((s.world_size, s.devices) == (on.world_size, on.devices) for s in specs) else None

    def _begin_turn(self, spec: Spec, steps: int, share: int) -> Run:
        """Starts one of a sweep's runs. Under the lock the sweep is known before its first run is, else the run would be
        taken for one of its own."""
        with self._lock:
            run = Run(self._cluster, spec, steps=steps, share=share, prepare=self._place_ranks)
            self.run = self._newest = run
        self._record(run)
        return run

    def _end_turns(self, suspended: Run | None, runs: list[str]) -> None:
        """Drops the states of a sweep's runs. The run that was suspended is the newest again, unless there is another."""
        with self._lock:
            if suspended is not None and self.run is not None and self.run.id in runs:
                self._newest = suspended if self._newest is self.run else self._newest
                self.run = suspended
        stopped = [suspended.id] if suspended is not None and suspended.done else []
        self._cluster.call("discard", timeout_s=5.0, runs=[*runs, *stopped])

    def begin_slow_motion(self, spec: Spec) -> SlowMotion:
        with self._lock:
            self.require_open()
            prepare = self._preparation("slow motion was started")
            slow = self.slow = self._newest = SlowMotion(self._cluster, spec, prepare)
        return slow

    def _preparation(self, why: str, *, place_ranks: bool = True, but: Run | None = None) -> Callable[[Spec], None]:
        """The function that a new activity calls on its own thread before anything is sent to the ranks. What it ends, all
        but `but`, is fixed now, under the lock: so everyone ends only earlier activities, and no two wait for each other."""
        former = [one for one in (self.slow, *self.unfinished) if one is not None and one is not but]

        def prepare(spec: Spec) -> None:
            for one in former:
                if isinstance(one, SlowMotion):
                    one.end(why)
                elif not one.done and not one.stop(REPLACE_S, why):
                    limit = f"{REPLACE_S:.0f} s"
                    raise ClusterError(f"{one!r} did not end within {limit}; close the lab and make another one")
            former.clear()  # otherwise each activity would keep the one before it in memory
            if place_ranks:
                self._place_ranks(spec)

        return prepare

    def take_loop(self, message: Mapping[str, Any]) -> None:
        """What a watched loop in a cell reports, on the client's IO thread."""
        run = known = self._watched.get(message["run"])
        if run is None:
            if "begin" not in message or message["run"] in self._ended_loops:
                return  # of a run that is over: it has all that counts
            run = WatchedRun(message, partial(self._cluster.interrupt, cells=True))
            self._watched[run.id] = self._newest = run
        run.take(message)
        self._drop_if_over(run)
        if known is None:
            self._record(run)

    def lose_rank(self, lost: RankLost) -> None:
        """Ends the loops that the rank was in."""
        for run in list(self._watched.values()):
            run.lose(lost.rank, str(lost))
            self._drop_if_over(run)

    def end_hung_loops(self, hung: RankHung) -> None:
        """Ends the loops whose ranks wait for each other, and interrupts their cells."""
        for run in list(self._watched.values()):
            run.hang(hung)
            self._drop_if_over(run)

    def _drop_if_over(self, run: WatchedRun) -> None:
        if run.done:
            self._ended_loops.add(run.id)
            self._watched.pop(run.id, None)

    @property
    def current(self) -> Run | WatchedRun | None:
        """The newest run, a watched loop included."""
        return self._newest if isinstance(self._newest, WatchedRun) else self.run

    def recover(self, ranks: str | None) -> Run:
        with self._lock:
            run = self.run
            if run is None or run.state not in (RunState.BROKEN, RunState.FAILED):
                raise ClusterError(f"there is no run to recover: {'none was started' if run is None else repr(run)}")
            if run.state is RunState.BROKEN:
                run.recover(ranks)
                return run
            return self.begin_run(
                run.spec,
                steps=run.left or None,
                ledger_every=run.ledger_every,
                saving=run.saving,
                recovering=replace(run.recovering, ranks=ranks or run.recovering.ranks),
                evaluate=run.evaluate,
                reporter=Reporter(run.reporter.given, run.reporter.history),
                broken=run,
                name=run.name,
                note=run.note,
            )

    def drill(self, kind: str, rank: int) -> Drill:
        fault = fault_of(kind, rank)
        with self._lock:
            self.require_open()
            run = self.run
            if run is None or run.state is not RunState.RUNNING:
                raise ClusterError("no run trains: start one with lab.run(recover=True), then drill")
            fault.check(run.spec.world_size, run.step)
            drill = Drill(kind, rank, run)
            if kind in SIGNALS:
                self._cluster.send_signal(rank, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                run.fault_injected(drill.made_unix_s)
            else:
                drill.request = run.arm(fault)
        return drill

    @property
    def unfinished(self) -> list[Sweep | Run | WatchedRun]:
        """The newest sweep, the run that it has suspended, the newest run and watched loops, where they are not over."""
        suspended = None if self.sweep is None else self.sweep.suspended
        newest = dict.fromkeys((self.sweep, suspended, self.run, *self._watched.values()))
        return [one for one in newest if one is not None and not one.done]

    @property
    def slow_spec(self) -> Spec | None:
        """The Spec that the ranks hold since a slow step; None where a run is newer, or the step has not applied it."""
        newest = self._newest
        return newest.spec if isinstance(newest, SlowMotion) and newest.ready else None

    def require_open(self) -> None:
        if self.closed:
            raise ClusterError("this lab is closed; make another one with Lab()")

    def interrupt(self) -> None:
        if unfinished := self.unfinished:
            unfinished[0].stop(reason="interrupted")
        else:
            self._cluster.interrupt()
        self.end_slow_step("interrupted", END_S)

    def stop(self, why: str, limit_s: float = REPLACE_S) -> None:
        """Stops all activities; waits at most `limit_s` for each."""
        for one in self.unfinished:
            one.stop(limit_s, why)
        self.end_slow_step(why, limit_s)

    def end_slow_step(self, why: str, limit_s: float) -> None:
        if self.slow is not None:
            self.slow.end(why, limit_s)

    def close(self, why: str) -> bool:
        """Stops all activities for good. Returns False if that was done before."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
        self.stop(why, END_S)
        return True
