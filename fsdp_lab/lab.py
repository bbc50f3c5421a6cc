"""`Lab`: the one object that a notebook holds. Ranks that stay, runs that come and go, and what is known of both."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from fsdp_lab.cluster import Call, Cluster, ClusterError, RankLost, RankStatus, StartProgress
from fsdp_lab.core.checkpoint_format import Checkpoint, check_folder, check_same, find
from fsdp_lab.core.errors import ArgumentError, SpecError
from fsdp_lab.core.faults import SIGNALS, fault_of
from fsdp_lab.core.formatting import Table, duration, size
from fsdp_lab.core.spec import Spec, part_of
from fsdp_lab.history.history import History
from fsdp_lab.history.run_list import RunList
from fsdp_lab.planner.calibration import Calibration
from fsdp_lab.planner.plan import Plan
from fsdp_lab.planner.questions import Target, planned, planned_here
from fsdp_lab.runs.comparison import Refusal
from fsdp_lab.runs.environment import PASSES, calibrate
from fsdp_lab.runs.evaluation import EvalConfig
from fsdp_lab.runs.recovery import RecoveryPolicy
from fsdp_lab.runs.run import Drill, Run
from fsdp_lab.runs.saving import CheckpointConfig
from fsdp_lab.runs.slow_motion import SlowMotion, SlowStep
from fsdp_lab.runs.sweep import ROUNDS, Sweep, combine
from fsdp_lab.runs.view import RunState

if TYPE_CHECKING:
    from fsdp_lab.dashboard import Dashboard

SAVE_S = 600.0  # for a checkpoint that somebody waits for

REPLACE_S = 15.0  # for a run to end that another one replaces; ranks that do not answer are ended before that

WAITING_S = 2.0  # what a rank waits for is worth a word after so long

KEY = "_fsdp_lab_open"  # in the notebook's namespace

Say = Callable[[StartProgress], None]


class Lab:
    """Resident ranks, and the runs that use them.

        lab = Lab(ranks=2)
        run = await lab.run(sharding="shard_grad_op", steps=20)      # or lab.run(...).wait()
        run.table()

    The constructor starts the ranks and returns when they are ready; some seconds, most of them torch's import.
    `close()` ends them, as do `with`, `async with`, and, unless they are persistent, the kernel's exit, restart and death.

    Args:
        ranks: how many; None: 2, or all engines of a given cluster.
        devices: one for each rank ("cuda:0", "cpu"), "cpu" for all, or None: one GPU a rank where GPUs are free, shared
            GPUs where there are fewer than ranks, CPUs otherwise. `notes` says what that does to the figures.
        cluster: your own ipyparallel Cluster or Client, a profile name, a cluster id, or the path of a connection file.
            Its engines need this package; they are used as they are and never stopped.
        progress: True shows a bar in a notebook; a callable is told instead; False is silent.
        reduction: "auto", "rank_ordered" (equal bits for every backend) or "native".
        take_busy: use GPUs that somebody else is using, too.
        timeout_s: for starting, and for a collective whose peer is missing.
        hang_s: how long a collective may wait for a rank; then the run fails with `RankHung`, which names the rank that does
            not come and shows where it is. The first steps count too: compiling, for one. None: half of `timeout_s`.
        persist: the ranks outlive their kernel, however it ends, with what they have trained. `Lab` with the same arguments
            in the next one (the same cell, run again) takes them over: `attached` is true then, and
            `lab.run(lab.spec, fresh=False)` continues. True: they wait for a day; a number: so many hours. `close()` ends
            them, as does `fsdp-lab ranks --end`.
        alongside: in a notebook, a new lab closes the one before it, because a cell that is run again would leave that
            one's ranks behind; True keeps both.
        history: where runs are kept (`fsdp_lab.History`): True in the usual place, a path in that file, False nowhere.
        options: for `fsdp_lab.cluster.Cluster`.

    Raises:
        StartError, FieldError: one sentence; nothing is left running.
    """

    def __init__(
        self,
        ranks: int | None = None,
        *,
        devices: Sequence[str] | str | None = None,
        cluster: Any = None,
        progress: bool | Say = True,
        reduction: str = "auto",
        take_busy: bool = False,
        timeout_s: float = 60,
        hang_s: float | None = None,
        persist: bool | float = False,
        alongside: bool = False,
        history: History | str | os.PathLike[str] | bool = True,
        **options: Any,
    ) -> None:
        if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
            raise SpecError("world_size", f"{ranks!r} ranks are refused", "give a whole number of 1 or more")
        self._devices = each_device(devices, ranks or 2)
        self._history = kept_in(history)
        self._current: Run | None = None
        self._slow_step: SlowStep | None = None
        self._here: Calibration | None = None
        self._sweep: Sweep | None = None
        self._newest: Run | SlowStep | None = None
        self._slow: weakref.ref[SlowMotion] | None = None  # weak: one that is dropped lets its step end
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._closed = False
        self._say = progress if callable(progress) else (ProgressBar() if progress else lambda p: None)
        self._cluster = Cluster(
            ranks,
            devices=self._devices,
            given=cluster,
            reduction=reduction,
            take_busy=take_busy,
            timeout_s=timeout_s,
            hang_s=hang_s,
            persist=persist,
            report=self._say,
            **options,
        )
        self._at_exit = _closer(weakref.ref(self), self._owner)
        if not alongside:
            self._succeed()
        self._cluster.start()
        self._activate()
        atexit.register(self._at_exit)

    def _succeed(self) -> None:
        """Takes the place of this notebook's former lab, which its namespace remembers."""
        from IPython.core.getipython import get_ipython

        shell = get_ipython()
        if shell is None:
            return
        former = shell.user_ns.get(KEY)
        if isinstance(former, Lab):
            persistent = self.persistent and former.persistent
            again = persistent and former.cluster.running and former.cluster.asked == self.cluster.asked
            former.detach() if again else former.close()
        shell.user_ns[KEY] = self

    # -- runs -------------------------------------------------------------------------------------------------------

    def run(
        self,
        spec: Spec | Mapping[str, Any] | None = None,
        *,
        steps: int | None = None,
        fresh: bool = True,
        ledger_every: int | None = None,
        save: CheckpointConfig | str | os.PathLike[str] | None = None,
        recover: RecoveryPolicy | str | bool = False,
        evaluate: EvalConfig | int | None = None,
        **changes: Any,
    ) -> Run:
        """Starts a run and returns it at once: `await` it, `wait()` for it, or go on and look at `table()`.

        A run that is still going is stopped first, with its reason saying so: there is one at a time on these
        ranks. Lost ranks are replaced, and another `world_size` starts or ends ranks; such a run begins at step 0.

        Args:
            spec: a Spec or its dict; None: the default one for this lab's ranks.
            steps: None trains until it is stopped.
            fresh: begin at step 0 with initial values; False goes on with what the ranks hold, where that fits.
            ledger_every: make each n-th step a ledger step, which measures memory and is left out of medians; None: only
                those that `Run.ledger` asks for, and the third after a switch.
            save: a folder for its checkpoints, or a `CheckpointConfig`, which says how often and how many are kept.
            recover: what to do when ranks fail, or a step does: True goes on by itself, "ask" waits for `recover` or
                `stop`; see `RecoveryPolicy`, which says also on how many ranks. `run.incidents` tells what happened.
            evaluate: find the loss on held-out samples after so many steps each, and stop by it: see `EvalConfig`.
            changes: flat field names, as in `Spec.replace`.

        Raises:
            SpecError: a field or a combination that cannot be.
        """
        wanted = self._wanted(spec, changes)
        return self._begin(
            wanted, steps=steps, fresh=fresh, ledger_every=ledger_every, saving=CheckpointConfig.of(save),
            recovering=RecoveryPolicy.of(recover), evaluate=evaluate,
        )  # fmt: skip

    def resume(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        *,
        steps: int | None = None,
        ledger_every: int | None = None,
        save: CheckpointConfig | str | os.PathLike[str] | None = None,
        recover: RecoveryPolicy | str | bool = False,
        evaluate: EvalConfig | int | None = None,
        **changes: Any,
    ) -> Run:
        """Starts a run that goes on from a checkpoint: parameters, optimizer state, data and random numbers.

            lab.resume("checkpoints", backend="fsdp2", world_size=3)

        Bit for bit in fp32 with as many ranks as it was saved on; with others the data goes on where it was.

        Args:
            checkpoint: one, or a folder of them, of which the newest whole one is taken.
            steps: how many more.
            changes: flat field names: any backend, sharding, precision and number of ranks; but the model, the seed and the
                optimizer stay.
            the others: as in `run`.

        Raises:
            FieldError: there is none that is whole, or a field or a combination that cannot be.
        """
        saved = checkpoint if isinstance(checkpoint, Checkpoint) else find(checkpoint)
        wanted = self._wanted(saved.spec, changes)
        check_same(saved, wanted)
        return self._begin(
            wanted,
            steps=steps,
            ledger_every=ledger_every,
            saving=CheckpointConfig.of(save),
            recovering=RecoveryPolicy.of(recover),
            start=saved,
            evaluate=evaluate,
        )

    def recover(self, ranks: str | None = None) -> Run:
        """Goes on with the newest run after it failed, and returns the run that does: itself where it waits for that, else
        a new one, from what its ranks still hold, from its newest checkpoint, or from the beginning.

        Args:
            ranks: "same" replaces those that are lost, "fewer" goes on with those that are left; None: as the run says.

        Raises:
            SpecError: of `ranks`, or the strategy cannot be on so few ranks. ClusterError: nothing has failed.
        """
        with self._lock:
            run = self._current
            if run is None or run.state not in (RunState.BROKEN, RunState.FAILED):
                raise ClusterError(
                    "there is no run to recover: " + (repr(run) if run is not None else "none was started")
                )
            if run.state is RunState.BROKEN:
                run.recover(ranks)
                return run
            how = replace(run.recovering, ranks=ranks or run.recovering.ranks)
            return self._begin(run.spec, steps=run.left or None, ledger_every=run.ledger_every, saving=run.saving,
                               evaluate=run.evaluate, recovering=how, broken=run)  # fmt: skip

    def drill(self, kind: str, rank: int = 1) -> Drill:
        """Makes a failure in the run that goes on, and returns at once: `await lab.drill("kill", rank=1)`.

        What becomes of it depends on how the run recovers (`run(recover=...)`), and stands in `run.incidents`.

        Args:
            kind: see `fsdp_lab.core.faults.DRILLS`: kill, stop, stall, cut, slow, out-of-memory, nan, raise.

        Raises:
            ArgumentError: there is no such drill, or no such rank. ClusterError: no run trains, or the rank is not ours.
        """
        fault = fault_of(kind, rank)
        with self._lock:
            self._must_be_open()
            run = self._current
            if run is None or run.state is not RunState.RUNNING:
                raise ClusterError("no run trains: start one with lab.run(recover=True), then drill")
            fault.check(run.spec.world_size, run.step)
            drill = Drill(kind, rank, run)
            if kind in SIGNALS:
                self._cluster.send_signal(rank, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                run.strike(drill.made_unix_s)
            else:
                run.arm(fault)
        return drill

    def save(self, folder: str | os.PathLike[str]) -> Checkpoint:
        """Saves what the ranks hold, and returns when it is whole. A run that goes on is saved by `run.save`.

        Raises:
            ArgumentError: the folder. ClusterError: it could not be written, or a run goes on.
        """
        root = check_folder(folder, field="folder")
        if self._current is not None and not self._current.done:
            raise ClusterError(f"{self._current!r} goes on: start it with lab.run(save=folder), then run.save()")
        self._cluster.call("save", root=str(root), kind="step", last=1 << 30)
        told = self._cluster.call("saves", wait_s=SAVE_S)[0]["ended"]
        if not told or told[-1]["error"]:
            raise ClusterError(
                "the checkpoint could not be written: " + (told[-1]["error"] if told else "it takes too long")
            )
        return find(told[-1]["path"])

    def calibrate(self, beside: Sequence[Spec] = (), *, passes: int = PASSES) -> Calibration:
        """Measures this machine on all ranks at once, in a minute or two, for `plan`. What the ranks hold stays.

        Args:
            beside: Specs whose steps are timed in turns with it, for a comparison; see `Calibration.beside_s`.
            passes: how often each figure is taken; with fewer it is shorter, and worth less.

        Raises:
            FieldError: of a Spec, or of `passes`. ClusterError: a run goes on.
        """
        self._must_be_open()
        for one in (self._sweep, self._current):
            if one is not None and not one.done:
                raise ClusterError(f"{one!r} goes on, and would be measured too; stop it or wait for it")
        if passes < 1:
            raise ArgumentError("passes", f"{passes} is refused", "give a whole number of 1 or more")
        self._here = calibrate(self._cluster, beside, passes=passes)
        return self._here

    def plan(self, spec: Spec | None = None, hardware: str | None = None, *, hosts: int | None = None,
             network_gbit_per_s: float | None = None) -> Plan:  # fmt: skip
        """Predicts a step's memory, time and communication; nothing is trained. Takes milliseconds.

        Args:
            spec: None: that of the run, or the lab's.
            hardware: a GPU such as "h100", of which nothing need be here; None: these ranks, as `calibrate` measured them.

        Raises:
            ArgumentError: no calibration, or of other ranks; hardware that is unknown or cannot hold the ranks.
        """
        wanted = self.spec if spec is None else spec
        if hardware is not None:
            return planned(wanted, Target(hardware=hardware, hosts=hosts, network_gbit_per_s=network_gbit_per_s))
        if self._here is None:
            raise ArgumentError(
                "hardware", "this machine is not calibrated", "call lab.calibrate(), or name a GPU such as h100"
            )
        return planned_here(wanted, self._here)

    def _begin(self, spec: Spec, **options: Any) -> Run:
        """A new run is the current one."""
        with self._lock:
            self._must_be_open()
            prepare = self._preparation("another run was started")
            run = Run(_Link(self), spec, prepare=prepare, **options)
            self._current = self._newest = run
        if self._history is not None:
            self._history.record(run)
        return run

    def compare(
        self,
        spec: Spec | Mapping[str, Any] | Sequence[Spec | Mapping[str, Any]] | None = None,
        *,
        steps: int = 50,
        rounds: int = ROUNDS,
        **lists: Any,
    ) -> Sweep:
        """Trains every combination side by side: `sweep = await lab.compare(sharding=["full_shard", "no_shard"])`.

        All begin with the same initial values and see the same batches. They take turns of `steps / rounds` steps, three at
        least, so that drift meets all alike; between its turns a run waits on the host, bit for bit. What cannot be
        combined, or fails, is kept with its reason and ends nothing. Returns at once, like `run`, which ends it.

        Args:
            spec: what the lists are changes of, one or several; None: the default one for this lab's ranks.
            steps: of each run.
            rounds: 1 trains them one after the other, and needs no room on the host for those that wait.
            lists: flat field name, as in `Spec.replace`, with a list of values, or one for all.

        Raises:
            FieldError: a field that is none, a list without values, or nothing that could run.
        """
        for name, value in (("steps", steps), ("rounds", rounds)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(name, f"{value!r} is refused", "give a whole number of 1 or more")
        several = spec if isinstance(spec, Sequence) else [spec]
        bases = [self._wanted(one, {}) for one in several]
        combined = [one for base in bases for one in combine(base, _as_lists(lists), self._wanted)]
        specs = [one for one in combined if isinstance(one, Spec)]
        refused = [one for one in combined if isinstance(one, Refusal)]
        if not specs:
            why = (
                f"every combination is refused, the first because of {refused[0].reason}"
                if refused
                else "it has no Spec"
            )
            raise ArgumentError("compare", why, "change a list")
        with self._lock:
            self._must_be_open()
            clear = self._preparation("a comparison was started", seat=False)
            self._sweep = Sweep(specs, refused, steps=steps, rounds=rounds, make=self._turn_of, drop=self._drop,
                                clear=lambda: clear(specs[0]))  # fmt: skip
            return self._sweep

    def _turn_of(self, spec: Spec, steps: int, share: int) -> Run:
        """One of a sweep's runs."""
        run = Run(_Link(self), spec, steps=steps, share=share, prepare=self._seat)
        self._current = self._newest = run
        if self._history is not None:
            self._history.record(run)
        return run

    def _drop(self, runs: list[str]) -> None:
        self._cluster.call("discard", timeout_s=5.0, runs=runs)

    @property
    def history(self) -> History | None:
        """Where runs are kept; None: nowhere."""
        return self._history

    def runs(self, **filters: Any) -> RunList:
        """The runs that are kept, newest first, those of other labs and of earlier kernels too; see `History.runs`.

            lab.runs(backend="fsdp2", since="2026-11-20")[0].table()

        Raises:
            ArgumentError: a field that there is not. HistoryError: the file cannot be read.
        """
        if self._history is None:
            return RunList((), of=0, where="this lab", notes=("this lab keeps none: it was made with history=False",))
        return self._history.runs(**filters)

    def slow_motion(self, spec: Spec | Mapping[str, Any] | None = None, **changes: Any) -> SlowMotion:
        """One training step, phase by phase: `for moment in lab.slow_motion(): ...` (see `SlowMotion`).

        It goes on with what the ranks hold. A run that is going is stopped when the first moment is asked for, and keeps
        its parameters; `lab.run(lab.spec, fresh=False)` goes on with them afterwards. A Spec that the ranks do not hold yet
        is applied first, with their parameters where they fit.

        Args:
            spec: a Spec or its dict; None: what the ranks hold, or the default one where they hold nothing.
            changes: flat field names, as in `Spec.replace`.

        Raises:
            SpecError: a field or a combination that cannot be, or another backend than lab.
        """
        if spec is None:
            newest = self._newest
            spec = newest.spec if isinstance(newest, SlowStep) and newest.ready else self.spec
            if spec.world_size != self.ranks:  # the lab was resized since that run
                spec = spec.replace(world_size=self.ranks, devices=None)
        wanted = self._wanted(spec, changes)
        if (backend := wanted.strategy.backend) != "lab":
            raise SpecError("strategy.backend", f"slow motion shows our own engine, and this Spec is for {backend}",
                            "use backend lab", {"backend": "lab"})  # fmt: skip
        with self._lock:
            self._must_be_open()
            step = SlowStep(_Link(self), wanted, self._preparation("slow motion was started"))
            slow = SlowMotion(step)
            self._slow_step = self._newest = step
            self._slow = weakref.ref(slow)
        return slow

    def _wanted(self, spec: Spec | Mapping[str, Any] | None, changes: Mapping[str, Any]) -> Spec:
        if spec is None:
            base = Spec(world_size=self.ranks, devices=self._devices)
        else:
            base = spec if isinstance(spec, Spec) else Spec.from_dict(spec)
        more = dict(changes)
        if isinstance(more.get("devices"), str):
            more["devices"] = each_device(more["devices"], more.get("world_size", base.world_size))
        if more.get("world_size", base.world_size) != base.world_size:
            more.setdefault("devices", None)  # those of other ranks say nothing about these
        return base.replace(**more)

    def _preparation(self, why: str, *, seat: bool = True) -> Callable[[Spec], None]:
        """What is to be done before something new begins. Who came before is settled now, and under the lock: then
        everyone ends only those who came earlier, and no two wait for each other."""
        slow, former = [self._slow_step], [self._sweep, self._current]

        def prepare(spec: Spec) -> None:
            """On the driver of what is new: what was going on is over, and the ranks are as the Spec wants them."""
            if (step := slow[0]) is not None:
                step.end(why)
            for one in former:
                if one is not None and not one.done and not one.stop(REPLACE_S, why):
                    raise ClusterError(
                        f"{one!r} did not end within {REPLACE_S:.0f} s; close the lab and make another one"
                    )
            slow[0] = None
            former.clear()  # what is over is not kept by what comes after: each would keep the one before it
            if seat:
                self._seat(spec)

        return prepare

    def _seat(self, spec: Spec) -> None:
        """The ranks are as the Spec wants them."""
        devices = spec.devices or (self._devices if self._fits(spec.world_size) else None)
        seats = self._cluster.placement.devices
        healthy = self._cluster.running and self._cluster.ranks == spec.world_size
        if not healthy or (devices is not None and tuple(devices) != seats):
            self._resize(spec.world_size, devices)

    def _fits(self, ranks: int) -> bool:
        return self._devices is not None and len(self._devices) == ranks

    @property
    def current(self) -> Run | None:
        """The newest run, over or not."""
        return self._current

    @property
    def slow(self) -> SlowMotion | None:
        """The newest slow motion that somebody still holds, over or not."""
        return self._slow() if self._slow is not None else None

    @property
    def sweep(self) -> Sweep | None:
        """The newest comparison, over or not."""
        return self._sweep

    @property
    def spec(self) -> Spec:
        """The Spec of the newest run; before the first, what ranks hold that were taken over, else the default one."""
        if self._current is not None:
            return self._current.spec
        held = next((told["spec"] for told in self._cluster.held), None)
        return self._wanted(held, {})

    def interrupt(self) -> None:
        """Ends what the ranks are doing, as Ctrl-C would; parameters stay. A run that goes on stops, and says why.

        A step in slow motion that waits for its next phase runs to its end.
        """
        if (sweep := self._sweep) is not None and not sweep.done:
            sweep.stop(reason="interrupted")
        elif (run := self._current) is not None and not run.done:
            run.stop(reason="interrupted")
        else:
            self._cluster.interrupt()
        self._end_slow("interrupted", 2.0)

    def _end_slow(self, why: str, limit_s: float) -> None:
        if self._slow_step is not None:
            self._slow_step.end(why, limit_s)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def resize(self, ranks: int, devices: Sequence[str] | str | None = None) -> None:
        """Another number of ranks, or other devices: stops the run, starts or ends engines, and joins them anew.

        The next run starts fresh: parameters are not carried from one world size to another. Replaces lost ranks,
        too, so `lab.resize(lab.ranks)` is a repair.
        """
        self._must_be_open()
        why = f"the lab went to {ranks} ranks"
        for one in (self._sweep, self._current):
            if one is not None and not one.done:
                one.stop(REPLACE_S, why)
        self._end_slow(why, REPLACE_S)
        self._devices = each_device(devices, ranks)
        self._resize(ranks, self._devices)

    def _resize(self, ranks: int, devices: Sequence[str] | None) -> None:
        self._must_be_open()
        self._cluster.resize(ranks, devices)
        self._activate()

    def _activate(self) -> None:
        with contextlib.suppress(Exception):  # magics are a convenience: no reason to lose the ranks
            self._cluster.activate()

    @property
    def ranks(self) -> int:
        return self._cluster.ranks

    @property
    def devices(self) -> tuple[str, ...]:
        """Where each rank computes."""
        return self._cluster.placement.devices

    @property
    def most_ranks(self) -> int | None:
        """How many ranks a given cluster has engines for; None: as many as are asked for."""
        return self._cluster.most_ranks

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures are worth on this machine, and what else there is to know, in words."""
        return (*self._cluster.notes, *self._cluster.remarks)

    @property
    def cluster(self) -> Cluster:
        return self._cluster

    @property
    def client(self) -> Any:
        """An `ipyparallel.Client` of the ranks' engines, for views of your own."""
        return self._cluster.client

    @property
    def lost(self) -> dict[int, RankLost]:
        """Ranks that are gone, by rank; the next run replaces them."""
        return self._cluster.lost

    def on_lost(self, callback: Callable[[RankLost], None]) -> None:
        """`callback(lost)` when a rank dies, on another thread: set a widget's state there, do not wait."""
        self._cluster.on_lost(callback)

    def rank_status(self) -> list[RankStatus]:
        """Every rank as data; never waits for a rank."""
        return self._cluster.status()

    def status(self) -> Table:
        """Every rank: process, device, memory, step, what it is doing and since when, and the collective that it waits for,
        if it does. Never waits for a rank."""
        now = time.time()
        rows = [
            (
                str(s.rank),
                "alive" if s.alive else "gone",
                _doing(s),
                f"{max(0.0, now - s.since_unix_s):.0f} s",
                "–" if s.step is None else str(s.step),
                s.device,
                size(s.rss_bytes),
                str(s.pid),
                s.host,
            )
            for s in self.rank_status()
        ]
        run = self._current
        return Table(
            columns=("rank", "process", "doing", "since", "step", "device", "RSS", "pid", "host"),
            rows=tuple(rows),
            caption=f"{self!r}" + (f" {run!r}" if run is not None else ""),
            notes=(
                *self.notes,
                *([self._history.problem] if self._history is not None and self._history.problem else []),
            ),
            left=frozenset({"process", "doing", "device", "host"}),
        )

    @property
    def waiting(self) -> str:
        """Which rank has waited for some seconds, and in which collective, in a sentence; "" where none has."""
        return self._cluster.waiting(WAITING_S)

    def dashboard(self, **options: Any) -> Dashboard:
        """The dashboard widget of this lab. Its options are those of `Dashboard`."""
        from fsdp_lab import Dashboard  # imports Bokeh; where it is missing, the error says how to install it

        return Dashboard(self, **options)

    # -- end --------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def persistent(self) -> bool:
        """Whether the ranks outlive this kernel."""
        return self._cluster.persistent

    @property
    def attached(self) -> bool:
        """Whether these are ranks that a former kernel left, with what they have trained."""
        return self._cluster.attached

    def close(self) -> None:
        """Stops the run and ends the ranks that we started; about 10 s at most, in any state. Idempotent."""
        self._end(self._cluster.close, "the lab was closed")

    def detach(self) -> None:
        """Stops the run and leaves the ranks as they are for the next kernel, as its exit does. The lab is closed then.

        Raises:
            ClusterError: they are not persistent.
        """
        if not self.persistent:
            raise ClusterError("these ranks end with their lab; make it with Lab(persist=True) to leave them")
        self._end(self._cluster.detach, "its kernel left the ranks")

    def _end(self, part: Callable[[], None], why: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self._at_exit)
        for one in (self._sweep, self._current):
            if one is not None and not one.done:
                one.stop(2.0, why)
        self._end_slow(why, 2.0)
        part()
        if self._history is not None:
            self._history.flush()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Lab:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def _must_be_open(self) -> None:
        if self._closed:
            raise ClusterError("this lab is closed; make another one with Lab()")

    def __repr__(self) -> str:
        if self._closed:
            return "<Lab: closed>"
        lost = f", lost: {sorted(self.lost)}" if self.lost else ""
        return f"<Lab: {self.ranks} rank{'s' * (self.ranks != 1)} on {', '.join(sorted(set(self.devices)))}{lost}>"


class _Link:
    """What a run sees of its lab's ranks."""

    def __init__(self, lab: Lab) -> None:
        self._cluster = lab.cluster

    @property
    def notes(self) -> tuple[str, ...]:
        return self._cluster.notes

    @property
    def lost(self) -> Mapping[int, RankLost]:
        return self._cluster.lost

    def submit(self, what: str, *, take: Callable[[Mapping[str, Any]], None] | None = None, **arguments: Any) -> Call:
        return self._cluster.submit(what, take=take, **arguments)

    def settle(self) -> dict[int, Any]:
        return self._cluster.settle()

    def ask(self, what: str, ranks: Collection[int], **arguments: Any) -> dict[int, Any]:
        return self._cluster.ask(what, ranks, **arguments)


class ProgressBar:
    """A progress bar in a notebook cell; nothing elsewhere. IPython's display alone, so that it needs no widget."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, progress: StartProgress) -> None:
        with contextlib.suppress(Exception):  # a bar that cannot be drawn keeps nobody from starting
            self._show(progress)

    def _show(self, p: StartProgress) -> None:
        from IPython.core.getipython import get_ipython
        from IPython.display import HTML, display

        shell = get_ipython()
        if shell is None or getattr(shell, "kernel", None) is None:
            return
        words = f"{p.stage} ({p.done} of {p.total}), {duration(p.seconds)}"
        bar = f'<progress max="{p.total}" value="{p.done}"></progress>' if p.stage != "ready" else "✓"
        html = HTML(f"<div>{bar} <span>{escape(words)}</span></div>")  # type: ignore[no-untyped-call]
        if self._handle is None:
            self._handle = display(html, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(html)
        if p.stage == "ready":
            self._handle = None  # a resize shows a bar of its own


def each_device(devices: Sequence[str] | str | None, ranks: int) -> tuple[str, ...] | None:
    """One device for each rank, from one for all, or a list, or None."""
    if devices is None:
        return None
    return (devices,) * ranks if isinstance(devices, str) else tuple(devices)


def _as_lists(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Flat field name -> its values. Raises SpecError."""
    lists: dict[str, list[Any]] = {}
    for name, values in given.items():
        part_of(name)
        one = not isinstance(values, (list, tuple)) or (name == "devices" and all(isinstance(v, str) for v in values))
        lists[name] = [values] if one else list(values)
        if not lists[name]:
            raise SpecError(name, "no value is given", "give a list of values, or leave it out")
    return lists


def kept_in(history: History | str | os.PathLike[str] | bool) -> History | None:
    """Raises ArgumentError for what is neither."""
    if isinstance(history, bool):
        return History() if history else None
    if isinstance(history, (str, os.PathLike)):
        return History(history)
    if not isinstance(history, History):
        raise ArgumentError("history", f"{history!r} is refused", "give True, False, the path of a file, or a History")
    return history


def _doing(s: RankStatus) -> str:
    """In words: what a rank does, and the collective that it waits for."""
    if not s.alive:
        return s.reason or "gone"
    waits_s = s.heard.waits_s if s.heard is not None else None
    return f"{s.state}, in {s.waits_for} for {waits_s:.0f} s" if s.waits_for and waits_s else s.state


def _closer(lab: weakref.ref[Lab], owner: int) -> Callable[[], None]:
    """For atexit: ends or leaves a lab that is still there, in the process that made it; a forked child has no say."""

    def close() -> None:
        if (found := lab()) is not None and os.getpid() == owner:
            found.detach() if found.persistent else found.close()

    return close
