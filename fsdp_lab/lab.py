"""`Lab`: resident ranks, and the runs that use them. The one object that a notebook holds."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdp_lab.base.errors import ArgumentError, SpecError, check_whole, is_whole
from fsdp_lab.base.formatting import Table
from fsdp_lab.base.generation import Prompt, Sampling, checked_prompts
from fsdp_lab.base.process import ranks_per_host
from fsdp_lab.cluster import ClusterError, RankLost
from fsdp_lab.cluster.assembly import StartProgress
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.hosts import CUT_S, Hosts, SlurmHosts, ssh_hosts
from fsdp_lab.cluster.membership import RankStatus
from fsdp_lab.cluster.sent_code import with_code
from fsdp_lab.planner.calibration import Calibration, references
from fsdp_lab.planner.plan import Plan, Training
from fsdp_lab.planner.questions import Target, planned, planned_here, require_memory
from fsdp_lab.runs.activities import Activities
from fsdp_lab.runs.comparison import Refusal
from fsdp_lab.runs.engine_check import LEAST_STEPS, SMALL_MODEL, EngineCheck, check_engine
from fsdp_lab.runs.evaluation import EvalConfig, generated
from fsdp_lab.runs.history.history import History, RunList
from fsdp_lab.runs.notebook import LabMagics, ProgressBar, progress_bar, rank_table
from fsdp_lab.runs.recovery import RecoveryPolicy
from fsdp_lab.runs.run import Drill, Run
from fsdp_lab.runs.saving import CheckpointConfig
from fsdp_lab.runs.slow_motion import SlowMotion
from fsdp_lab.runs.sweep import ROUNDS, Sweep, combine, value_lists
from fsdp_lab.runs.trackers import Reporter
from fsdp_lab.runs.watched import WatchedRun
from fsdp_lab.spec.checkpoint_format import Checkpoint, check_folder, check_same, find
from fsdp_lab.spec.spec import Spec, Strategy
from fsdp_lab.spec.user_code import code_name

if TYPE_CHECKING:
    from pathlib import Path

    from fsdp_lab.dashboard import Dashboard
    from fsdp_lab.runs.view import RunView

KEY = "_fsdp_lab_open"  # of the open lab, in the notebook's namespace
PASSES = 6  # measurements of each figure by `calibrate`
SAVE_S = 600.0  # limit for a checkpoint that the caller waits for
WAITING_S = 2.0  # a rank that waits longer than this for a collective is reported


class Lab:
    """Resident ranks, and the runs that use them.

        lab = Lab(ranks=2)
        run = await lab.run(sharding="shard_grad_op", steps=20)      # or lab.run(...).wait()
        run.table()

    The constructor returns when the ranks are ready. `close()` ends them, as do `with`, `async with`, and, unless they are
    persistent, the kernel's exit, restart and death.

    Args:
        ranks: None: one on each free GPU where there are two or more, else 2; or all engines of a given cluster.
        devices: one per rank ("cuda:0", "cpu"), "cpu" for all, or None: one GPU per rank where GPUs are free, shared
            GPUs where there are fewer than ranks, CPUs otherwise. A GPU that another process uses is taken only by name.
            `notes` says what that means for the figures.
        cluster: your own ipyparallel Cluster or Client, a profile name, a cluster id, or the path of a connection file.
            Its engines need this package; they are used as they are and never stopped.
        progress: True shows progress bars in a notebook, and lines in a script; a callable receives each `StartProgress`.
        reduction: "auto", "rank_ordered" (equal bits for every backend) or "native".
        timeout_s: for starting, and for a collective whose peer is missing.
        hang_s: how long a collective may wait for a rank, compilation included, before the run fails with `RankHung`, which
            names the rank and shows its stack. None: half of `timeout_s`.
        persist: the ranks outlive their kernel with what they hold: True for up to a day, a number for so many hours. `Lab`
            with the same arguments in the next kernel attaches to them: `attached` is True then, and
            `lab.run(lab.spec, fresh=False)` continues. `close()` ends them, as does `fsdp-lab ranks --end`.
        alongside: keep the previous lab of this notebook, which a new one closes otherwise.
        history: where runs are stored (`fsdp_lab.History`): True in the default file, a path in that file, False nowhere.
        options: for `fsdp_lab.cluster.Cluster`.

    Attributes:
        cluster: the ranks. history: where runs are stored; None: nowhere.

    Raises StartError, FieldError: one sentence; nothing is left running."""

    def __init__(
        self,
        ranks: int | None = None,
        *,
        devices: Sequence[str] | str | None = None,
        cluster: Any = None,
        progress: bool | Callable[[StartProgress], None] = True,
        reduction: str = "auto",
        timeout_s: float = 60,
        hang_s: float | None = None,
        persist: bool | float = False,
        alongside: bool = False,
        history: History | str | os.PathLike[str] | bool = True,
        **options: Any,
    ) -> None:
        if ranks is not None and not is_whole(ranks):
            raise SpecError("world_size", f"{ranks!r} ranks are refused", "give a whole number of 1 or more")
        self._devices = each_device(devices, ranks or 2)
        self._shows_progress = progress is True
        self.history = History.of(history)
        self._reporters: list[Reporter] = []
        self._calibration: Calibration | None = None
        self.cluster = Cluster(
            ranks,
            devices=self._devices,
            given=cluster,
            reduction=reduction,
            timeout_s=timeout_s,
            hang_s=hang_s,
            persist=persist,
            report=progress if callable(progress) else ProgressBar() if progress else None,
            **options,
        )
        self._activities = Activities(self.cluster, self._place_ranks, self._record)
        self.cluster.supervisor.monitor.on_loop = self._activities.take_loop
        self.cluster.supervisor.on_loop_hung = self._activities.end_hung_loops
        self.cluster.on_lost(self._activities.lose_rank)
        self._process, self._is_notebooks = os.getpid(), False
        if not alongside:
            self._replace_former()
        self.cluster.start()
        atexit.register(self._at_exit)

    @classmethod
    def ssh(
        cls,
        hosts: Sequence[str] | str,
        *,
        gpus_per_host: int | None = None,
        ranks_per_host: int | None = None,
        python: str | None = None,
        ssh_args: Sequence[str] = (),
        sync: bool = False,
        tunnel: bool | None = None,
        cut_s: float = CUT_S,
        **options: Any,
    ) -> Lab:
        """A lab whose ranks are on other hosts, reached by SSH: `Lab.ssh(["gpu1", "gpu2"], gpus_per_host=8)`.

        `ssh gpu1` must work without a question: with a key, and a known host. Whether Python and packages are the same is
        checked first. However this kernel ends, nothing is left on a host; with `persist` the ranks stay, and this call in
        the next kernel on this machine attaches to them.

        Args:
            hosts: names or addresses, as for ssh; a list, or with commas between them.
            options: as for `Lab`.
            the others: those of `SshHosts` (`fsdp_lab.cluster.hosts`).

        Raises StartError: one sentence that names the host. ArgumentError, FieldError."""
        where = ssh_hosts(
            hosts,
            gpus_per_host=gpus_per_host,
            ranks_per_host=ranks_per_host,
            python=python,
            ssh_args=ssh_args,
            sync=sync,
            tunnel=tunnel,
            cut_s=cut_s,
        )
        return cls(where.ranks, hosts=where, **options)

    @classmethod
    def slurm(
        cls,
        hosts: int = 1,
        *,
        gpus_per_host: int | None = None,
        ranks_per_host: int | None = None,
        time: str | None = None,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        slurm_options: Sequence[str] = (),
        python: str | None = None,
        sync: bool = False,
        cut_s: float = CUT_S,
        **options: Any,
    ) -> Lab:
        """A lab whose ranks are on hosts that Slurm grants: `Lab.slurm(hosts=4, gpus_per_host=8, time="1:00:00")`.

        This kernel is on a machine with Slurm's commands, such as a login node. The cell waits in the queue, with the reason
        that Slurm gives, and can be interrupted. The job is given back when the lab is closed, or however this kernel ends;
        with `persist` it stays for the next kernel on this machine.

        Args:
            slurm_options: more options of salloc, such as ["--constraint=h100", "--cpus-per-task=12"].
            options: as for `Lab`.
            the others: those of `SlurmHosts` (`fsdp_lab.cluster.hosts`).

        Raises StartError: one sentence. ArgumentError, FieldError."""
        where = SlurmHosts(
            hosts=hosts,
            gpus_per_host=gpus_per_host,
            ranks_per_host=ranks_per_host,
            time=time,
            partition=partition,
            account=account,
            qos=qos,
            options=tuple(slurm_options),
            python=python,
            sync=sync,
            cut_s=cut_s,
        )
        return cls(where.ranks, hosts=where, **options)

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
        report_to: Any = None,
        name: str = "",
        note: str = "",
        anyway: bool = False,
        **changes: Any,
    ) -> Run:
        """Starts a run and returns it at once: `await` it, `wait()` for it, or read its `table()` meanwhile.

        A run in progress is stopped first. Lost ranks are replaced, and another `world_size` starts or ends ranks. In a
        script, `wait()` prints how far it is each ten seconds, on standard error.

        Args:
            spec: a Spec or its dict; None: the default one for this lab's ranks.
            steps: None trains until it is stopped.
            fresh: begin at step 0 with initial values; False continues with the state that the ranks hold, where it fits.
            ledger_every: make each n-th step a ledger step, which measures memory and is left out of medians; None: only
                the third after a switch, and those that `Run.ledger` requests.
            save: a folder for its checkpoints, or a `CheckpointConfig`.
            recover: what to do when ranks or a step fail: True recovers automatically, "ask" waits for `recover` or
                `stop`; or a `RecoveryPolicy`.
            evaluate: compute the loss on held-out samples every so many steps; or an `EvalConfig`. That of the model before
                training, and its texts (`generate`): `lab.run(steps=1, lr=1e-30, evaluate=1)`, which changes no weight.
            report_to: where its metrics go too: "wandb", "trackio", "tensorboard", "mlflow", "jsonl", several in a list or
                as "a,b", or an object with `log(metrics, step=...)`; see `fsdp_lab.runs.trackers`.
            name, note: for lists, comparisons and reports; `run.rename` and `run.annotate` change them.
            anyway: start it although its memory does not suffice by the plan.
            changes: flat field names, as in `Spec.replace`. For a module of your own, three together: `model`, a function
                without arguments that builds it, or its class; `loss`, a function of (model, batch) that returns a scalar
                tensor and calls `model(...)` only; `data`, a function that returns a map-style dataset, or one, which
                `export_script` cannot write. They are sent to the ranks with all that they use. Initial values are those
                that `model` gives under the seed. `engine`, a class, shards in place of a backend: see `check_engine`.

        Raises SpecError: an invalid field or combination, or code that cannot be sent. ModuleNotFoundError: of `report_to`.
        """
        wanted = self._wanted(spec, changes, "lab.run", anyway=anyway)
        options = {"fresh": fresh, "steps": steps, "ledger_every": ledger_every, "evaluate": evaluate}
        return self._begin(wanted, save, recover, report_to, name=name, note=note, **options)

    def resume(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoint,
        *,
        steps: int | None = None,
        ledger_every: int | None = None,
        save: CheckpointConfig | str | os.PathLike[str] | None = None,
        recover: RecoveryPolicy | str | bool = False,
        evaluate: EvalConfig | int | None = None,
        report_to: Any = None,
        name: str = "",
        note: str = "",
        anyway: bool = False,
        **changes: Any,
    ) -> Run:
        """Starts a run that continues from a checkpoint: parameters, optimizer state, position in the data, random state.

            lab.resume("checkpoints", backend="fsdp2", world_size=3)

        Bit for bit in fp32 on as many ranks as it was saved on; on another number the data continues at the same sample.

        Args:
            checkpoint: a checkpoint, or a folder of them, of which the newest complete one is taken.
            changes: flat field names: any backend, sharding, precision and number of ranks, but not the model, the seed or
                the optimizer.
            the others: as in `run`; `steps` is the number of further ones.

        Raises FieldError: there is no complete checkpoint, or an invalid field or combination."""
        saved = checkpoint if isinstance(checkpoint, Checkpoint) else find(checkpoint)
        wanted = self._wanted(saved.spec, changes, "lab.resume", anyway=anyway)
        check_same(saved, wanted)
        options = {"start": saved, "steps": steps, "ledger_every": ledger_every, "evaluate": evaluate}
        return self._begin(wanted, save, recover, report_to, name=name, note=note, **options)

    def _begin(self, wanted: Spec, save: Any, recover: Any, report_to: Any, **options: Any) -> Run:
        options |= {"saving": CheckpointConfig.of(save), "recovering": RecoveryPolicy.of(recover)}
        return self._activities.begin_run(wanted, reporter=Reporter(report_to, self.history).checked(), **options)

    def recover(self, ranks: str | None = None) -> Run:
        """Recovers the newest run after a failure and returns the run that continues it: from the state of the surviving
        ranks, the newest checkpoint, or the beginning.

        `ranks`: "same" replaces the lost ranks, "fewer" continues on the remaining ones; None: as the run's policy says.

        Raises SpecError: of `ranks`, or the strategy does not support so few ranks. ClusterError: no run has failed."""
        return self._activities.recover(ranks)

    def drill(self, kind: str, rank: int = 1) -> Drill:
        """Injects a fault into the running run and returns at once: `await lab.drill("kill", rank=1)`.

        `kind` is one of `fsdp_lab.spec.faults.DRILLS`: kill, stop, stall, cut, slow, out-of-memory, nan, raise. What follows
        depends on the run's recovery policy (`run(recover=...)`) and is recorded in `run.incidents`.

        Raises ArgumentError: no such fault, or no such rank. ClusterError: no run is training, or the rank's process is
        not ours."""
        return self._activities.drill(kind, rank)

    def compare(
        self,
        spec: Spec | Mapping[str, Any] | Sequence[Spec | Mapping[str, Any]] | None = None,
        *,
        steps: int = 50,
        rounds: int = ROUNDS,
        **lists: Any,
    ) -> Sweep:
        """Trains every combination side by side: `sweep = await lab.compare(sharding=["full_shard", "no_shard"])`.

        All begin with the same initial values and see the same batches, in turns of `steps / rounds` steps, so that drift of
        the machine affects all alike. Combinations that are invalid or fail are listed with their reason, and the others
        continue. Returns at once. A run in progress is suspended and goes on afterwards, or is stopped where a combination
        needs other ranks. A new run ends the comparison.

        Args:
            spec: the Spec that the lists change, or several; None: the default one for this lab's ranks.
            steps: of each run.
            rounds: 1 trains them one after the other, and needs no host memory for suspended runs.
            lists: flat field names, as in `Spec.replace`, each with a list of values or one value for all.

        Raises FieldError: an unknown field, an empty list, or no combination that is valid."""
        for name, value in (("steps", steps), ("rounds", rounds)):
            check_whole(name, value)
        bases = [self._wanted(one, {}) for one in (spec if isinstance(spec, Sequence) else [spec])]
        values = {name: [with_code({name: v})[name] for v in some] for name, some in value_lists(lists).items()}
        combinations = [c for base in bases for c in combine(base, values, self._wanted)]
        specs = [c for c in combinations if isinstance(c, Spec)]
        refused = [c for c in combinations if isinstance(c, Refusal)]
        if not specs:
            first = f"every combination is refused, the first because of {refused[0].reason}" if refused else ""
            raise ArgumentError("compare", first or "it has no Spec", "change a list")
        sweep = self._activities.begin_sweep(specs, refused, steps=steps, rounds=rounds)
        if self._shows_progress:
            sweep.while_awaited = partial(ProgressBar().sweep, sweep)
        return sweep

    def check_engine(
        self,
        engine: Any,
        *,
        sharding: str = Strategy().sharding,
        steps: int = 6,
        most: Mapping[str, float] = {},
        **changes: Any,
    ) -> EngineCheck:
        """Tries an engine of your own: `lab.check_engine(Mine, sharding="zero1")`. Waits for it, some seconds.

        It trains for some steps as backend "yours", then torch's backend, or the lab's, does the same. What it returns says
        whether the engine passed, and what is wrong if not.

        Args:
            engine: a class with the methods shard, gather, free and reduce, and perhaps prefetch: see
                `fsdp_lab.backends.yours`.
            sharding: when the lab calls which: "no_shard", "zero1", "shard_grad_op" or "full_shard".
            steps: 5 or more; the first three do not count.
            most: what it may take, in sizes of the whole model, a rank and step: "sent", "gathered", "gradients",
                "parameters", "optimizer"; and "exposed", the share of communication that computing waits for.
            changes: flat field names, as in `Spec.replace`, such as link="0.1 GB/s".

        Raises FieldError: of an argument. A mistake of the engine is no exception."""
        check_whole("steps", steps, LEAST_STEPS)
        spec = self._wanted(None, {"model": SMALL_MODEL} | changes | {"engine": engine, "sharding": sharding})
        s, name = spec.strategy, code_name(spec.strategy.engine)
        return check_engine(lambda backend: self.run(spec.replace(backend=backend), steps=steps), s, name, most)

    def slow_motion(self, spec: Spec | Mapping[str, Any] | None = None, **changes: Any) -> SlowMotion:
        """One training step, phase by phase: `lab.slow_motion().plot()`, or `for moment in lab.slow_motion(): ...`.

        It continues with the state that the ranks hold. A run in progress is stopped when the first moment is requested;
        `lab.run(lab.spec, fresh=False)` continues afterwards. Another Spec than that of the ranks is applied first, with
        their parameters where they fit.

        Args:
            spec: None: that of the ranks, or the default one where they have none.
            changes: flat field names, as in `Spec.replace`.

        Raises SpecError: an invalid field or combination, or another backend than lab."""
        if spec is None:
            spec = self._activities.slow_spec or self.spec
            if spec.world_size != self.ranks:  # the lab was resized since that run
                spec = spec.replace(world_size=self.ranks, devices=None)
        wanted = self._wanted(spec, changes)
        if not wanted.strategy.is_lab:
            reason = f"slow motion shows our own engine, and this Spec is for {wanted.strategy.backend}"
            raise SpecError("strategy.backend", reason, "use backend lab", {"backend": "lab"})
        return self._activities.begin_slow_motion(wanted)

    def _wanted(
        self, spec: Spec | Mapping[str, Any] | None, changes: Mapping[str, Any], call: str = "", *, anyway: bool = False
    ) -> Spec:
        """The Spec, or the default one, with the changes. Raises SpecError; with `anyway` not for want of memory."""
        spec = Spec(world_size=self.ranks, devices=self._devices) if spec is None else spec
        base = spec if isinstance(spec, Spec) else Spec.from_dict(spec)
        fields: dict[str, Any] = {"world_size": base.world_size, **with_code(changes)}
        if isinstance(fields.get("devices"), str):
            fields["devices"] = each_device(fields["devices"], fields["world_size"])
        if fields["world_size"] != base.world_size:
            fields.setdefault("devices", None)  # a list for another number of ranks
        wanted = base.replace(**fields)
        self.cluster.delivery.check(wanted)
        if not anyway:
            require_memory(wanted, self.cluster.memory, call)
        return wanted

    def interrupt(self) -> None:
        """Interrupts the ranks, as Ctrl-C would; parameters stay. A run in progress stops; a slow step runs to its end."""
        self._activities.interrupt()

    @property
    def current(self) -> Run | WatchedRun | None:
        """The newest run, or loop of your own in a cell (`fsdp_lab.watch`), running or over."""
        return self._activities.current

    @property
    def slow(self) -> SlowMotion | None:
        """The newest slow motion, running or over."""
        return self._activities.slow

    @property
    def sweep(self) -> Sweep | None:
        """The newest comparison, running or over."""
        return self._activities.sweep

    @property
    def spec(self) -> Spec:
        """The Spec of the newest run; before the first, that of the ranks that were attached to, else the default one."""
        if (run := self._activities.run) is not None:
            return run.spec
        held = next((status["spec"] for status in self.cluster.assembly.attached_status), None)
        return self._wanted(held, {}, anyway=True)

    # -- stored runs, checkpoints, plans ----------------------------------------------------------------------------

    def runs(self, **filters: Any) -> RunList:
        """The stored runs, newest first, those of other labs and of earlier kernels included; see `History.runs`.

            lab.runs(backend="fsdp2", since="2026-11-20")[0].table()

        Raises ArgumentError: an unknown field. HistoryError: the file cannot be read."""
        if self.history is None:
            return RunList((), of=0, where="this lab", notes=("this lab stores none: it was made with history=False",))
        return self.history.runs(**filters)

    def _record(self, run: Run | WatchedRun) -> None:
        if self.history is not None:
            self.history.record(run)
        if isinstance(run, WatchedRun):
            run.reporter = Reporter(run.reporter.given, self.history)
        elif self._shows_progress and sys.modules["IPython"].get_ipython() is None:
            run.while_waiting = lambda run: print(f"fsdp_lab: {run.line}", file=sys.stderr, flush=True)
        run.reporter.follow(run)
        self._reporters.append(run.reporter)

    def save(self, folder: str | os.PathLike[str]) -> Checkpoint:
        """Saves the state of the ranks and returns the complete checkpoint; of a run in progress as `run.save` does.

        Raises ArgumentError: of the folder. ClusterError: it could not be written, or a loop of yours is in progress.
        """
        root = check_folder(folder, field="folder")
        if (run := self.current) is not None and not run.done:
            if isinstance(run, WatchedRun):
                raise ClusterError(f"{run!r} has the ranks: wait for its cell")
            return run.save(root).wait(SAVE_S)
        self.cluster.call("save", root=str(root), kind="step", last=1 << 30)
        saves = self.cluster.call("saves", wait_s=SAVE_S)[0]["ended"]
        error = saves[-1]["error"] if saves else "it takes too long"
        if error:
            raise ClusterError(f"the checkpoint could not be written: {error}")
        return find(saves[-1]["path"])

    def generate(self, prompts: Prompt | Sequence[Prompt], **sampling: Any) -> list[str]:
        """Continues a text or several by the model that the ranks hold; a run in progress does it after its chunk.

            lab.generate("The capital of France is", new_tokens=8)
            lab.generate([{"role": "user", "content": "What is the capital of France?"}])

        A chat becomes tokens by the tokenizer's template, as does a text where the data of the run are chats.
        `sampling`: fields of `fsdp_lab.base.generation.Sampling`: new_tokens, temperature, top_k, top_p, seed.

        Raises ArgumentError: of a prompt or of `sampling`, or the model does not continue texts. ClusterError: the ranks
        hold no model."""
        run, newest = self._activities.run, self.current
        if isinstance(newest, WatchedRun) and not newest.done:
            raise ClusterError(f"{newest!r} has the ranks: wait for its cell")
        if run is None:
            raise ClusterError("the ranks hold no model: start a run; lab.run(..., steps=1, lr=1e-30) trains nothing")
        if not run.done:
            return run.generate(prompts, **sampling).wait()
        return generated(self.cluster.call, run.id, checked_prompts(prompts), Sampling(**sampling))

    def calibrate(self, beside: Sequence[Spec] = (), *, passes: int = PASSES) -> Calibration:
        """Measures this machine on all ranks at once, in a minute or two, for `plan`. The state of the ranks stays.

        Args:
            beside: Specs whose steps are timed in turns with the calibration's, for comparison: `Calibration.beside_s`.
            passes: number of measurements of each figure.

        Raises FieldError: of a Spec, or of `passes`. ClusterError: a run is in progress."""
        self._activities.require_open()
        if unfinished := self._activities.unfinished:
            reason = f"{unfinished[0]!r} is in progress and would be measured as well"
            raise ClusterError(f"{reason}; stop it or wait for it")
        check_whole("passes", passes)
        begun_s, devices = time.monotonic(), self.devices
        # Matrix products in fp16 are not useful on a CPU.
        dtypes = ("fp32", "bf16") if devices[0] == "cpu" else ("fp32", "bf16", "fp16")
        per_host = ranks_per_host([seat.host for seat in self.cluster.membership.placement.seats])
        timed = references(len(devices), dtypes, devices, per_host)
        specs = [spec.to_dict() for spec in (*(spec for _, spec in timed), *beside)]
        for spec in beside:
            self.cluster.delivery.provide(spec)
        with progress_bar("measuring this machine") if self._shows_progress else contextlib.nullcontext():
            by_rank = self.cluster.call("calibrate", specs=specs, dtypes=dtypes, passes=passes)
            name = str(self.cluster.call("status")[0]["device_name"])
        took_s = time.monotonic() - begun_s
        self._calibration = Calibration.of(by_rank, unix_s=time.time(), seconds=took_s, name=name, devices=devices)
        return self._calibration

    def plan(
        self,
        spec: Spec | None = None,
        hardware: str | None = None,
        *,
        hosts: int | None = None,
        network_gbit_per_s: float | None = None,
        tokens: float | str | None = None,
        price_per_gpu_hour: float | None = None,
    ) -> Plan:
        """Predicts a step's memory, time and communication in milliseconds, without training.

        Args:
            spec: None: that of the run, or the lab's.
            hardware: a GPU such as "h100", which need not be present, as for `planner.devices.device`; None: these ranks, as
                `calibrate` measured them.
            hosts: how many; of the calibrated one, if no hardware is named.
            network_gbit_per_s: of a host's network cards together, one way; None: the usual rate.
            tokens, price_per_gpu_hour: of a whole training, such as "15B" and 2.49 in any currency: `Plan.bill` has its
                time, GPU hours and cost, with ranges. A price alone is for a billion tokens.

        Raises ArgumentError: no calibration, or of other ranks; hardware that is unknown or cannot hold the ranks."""
        wanted, training = self.spec if spec is None else spec, Training.of(tokens, price_per_gpu_hour)
        if hardware is not None:
            where = Target(hardware=hardware, hosts=hosts, network_gbit_per_s=network_gbit_per_s, training=training)
            return planned(wanted, where)
        if self._calibration is None:
            hint = "call lab.calibrate(), or name a GPU such as h100"
            raise ArgumentError("hardware", "this machine is not calibrated", hint)
        return replace(planned_here(wanted, self._calibration, hosts, network_gbit_per_s), training=training)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def resize(self, ranks: int, devices: Sequence[str] | str | None = None) -> None:
        """Changes the number of ranks, or their devices, and replaces lost ranks: stops the run, starts or ends engines, and
        connects them again. The next run starts fresh."""
        self._activities.require_open()
        self._activities.stop(f"the lab was resized to {ranks} ranks")
        self._devices = each_device(devices, ranks)
        self.cluster.resize(ranks, self._devices)

    def move(
        self, hosts: Hosts | None, ranks: int | None = None, *, progress: Callable[[StartProgress], None] | None = None
    ) -> None:
        """Ends the ranks and starts others elsewhere.

            lab.move(SshHosts(names=("gpu1", "gpu2"), gpus_per_host=8))

        Where the hosts cannot be used, nothing has changed. Else the run is stopped, and the next one starts fresh, or from
        a checkpoint in a folder that the hosts have too.

        Args:
            hosts: a `SshHosts` or `SlurmHosts` of `fsdp_lab.cluster.hosts`; None: this machine.
            ranks: on this machine; None: 2. On other hosts these say how many.
            progress: receives each `StartProgress`, and cancels the start by raising; None: as for the lab.

        Raises StartError: one sentence. ArgumentError: the lab's engines are yours."""
        self._activities.require_open()
        count, stop = ranks if hosts is None else hosts.ranks, partial(self._activities.stop, "the ranks were moved")
        self.cluster.move(hosts, count, progress, stop)
        self._devices = self._calibration = None

    def _place_ranks(self, spec: Spec) -> None:
        """Gives the cluster the ranks and devices that the Spec wants, if it has others."""
        own = self._devices or ()
        devices = spec.devices or (own if len(own) == spec.world_size else None)
        healthy = self.cluster.running and self.cluster.ranks == spec.world_size
        if not healthy or (devices is not None and tuple(devices) != self.devices):
            self.cluster.resize(spec.world_size, devices)

    @property
    def ranks(self) -> int:
        return self.cluster.ranks

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each rank."""
        return self.cluster.membership.placement.devices

    @property
    def most_ranks(self) -> int | None:
        """The number of engines of a given cluster; None: no limit."""
        return self.cluster.most_ranks

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures mean on this machine, and how the ranks were started, in sentences."""
        return self.cluster.notes

    @property
    def client(self) -> Any:
        """An `ipyparallel.Client` of the ranks' engines, for views of your own."""
        return self.cluster.client

    @property
    def lost(self) -> dict[int, RankLost]:
        """Ranks whose process has ended, by rank; the next run replaces them."""
        return self.cluster.lost

    def rank_status(self) -> list[RankStatus]:
        """Every rank as data. Never blocks."""
        return self.cluster.status()

    def status(self) -> Table:
        """A table of the ranks: process, device, memory, step, state, the collective that each waits for. Never blocks."""
        problem = self.history.problem if self.history is not None else ""
        caption = " ".join(map(repr, filter(None, (self, self.current))))
        return rank_table(self.rank_status(), caption=caption, notes=(*self.notes, *filter(None, [problem])))

    @property
    def waiting(self) -> str:
        """A sentence on the rank that has waited longest for a collective, if for seconds; "" otherwise."""
        waits = ((s.waits_s, s.rank, s.waits_for) for s in self.rank_status())
        waits_s, rank, name = max(waits, default=(0.0, 0, ""))
        return f"rank {rank} has waited {waits_s:.0f} s in {name}" if waits_s > WAITING_S else ""

    def dashboard(self, **options: Any) -> Dashboard:
        """The dashboard widget of this lab. Its options are those of `Dashboard`."""
        from fsdp_lab import Dashboard  # imports Bokeh; where it is missing, the error says how to install it

        return Dashboard(self, **options)

    def report(self, path: str | os.PathLike[str] | None = None, runs: Sequence[RunView | Refusal] = ()) -> Path:
        """Writes a report to one HTML file, as `write_report` does; returns its path.

        Args:
            path: ends in .html; None: "fsdp-lab-<id of the first run>.html" in the working folder.
            runs: what it compares; empty: the newest run.

        Raises ArgumentError: there is no run, or the path cannot be written."""
        from fsdp_lab import write_report  # as above

        shown = runs or [run for run in [self.current] if run is not None]
        if not shown:
            raise ArgumentError("report", "there is no run yet", "start one first")
        first = next((run.id for run in shown if not isinstance(run, Refusal)), "comparison")
        return write_report(path or f"fsdp-lab-{first}.html", shown)

    # -- end --------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._activities.closed

    @property
    def persistent(self) -> bool:
        """True if the ranks outlive this kernel."""
        return self.cluster.assembly.config.persist_s is not None

    @property
    def attached(self) -> bool:
        """True if these ranks, and the state that they hold, are those of a former kernel."""
        return self.cluster.attached

    def close(self) -> None:
        """Stops the run and ends the ranks that we started; within about 10 s, in any state, or later where a tracker of
        its run is slow. Idempotent. In a notebook the process that has imported torch stays until the kernel ends, and the
        next lab starts with it."""
        self._close(keep=self._is_notebooks)

    def _close(self, *, keep: bool) -> None:
        self._end(partial(self.cluster.close, keep=keep), "the lab was closed")

    def detach(self) -> None:
        """Stops the run, leaves the ranks as they are for the next kernel, and closes the lab, as this kernel's exit does.

        Raises ClusterError: the ranks are not persistent."""
        if not self.persistent:
            raise ClusterError("these ranks end with their lab; make it with Lab(persist=True) to leave them")
        self._end(self.cluster.detach, "its kernel left the ranks")

    def _replace_former(self) -> None:
        """Closes the lab that this notebook opened before, and registers this one in its place. The ranks are detached
        instead where they are persistent and this lab is to attach to them."""
        from IPython.core.getipython import get_ipython

        if (shell := get_ipython()) is None:
            return
        if isinstance(former := shell.user_ns.get(KEY), Lab):
            was, wanted = former.cluster.assembly.config, self.cluster.assembly.config
            same = self.persistent and former.persistent and former.cluster.running and was.identity == wanted.identity
            former.detach() if same else former.close()
            self.cluster.assembly.kept, former.cluster.assembly.kept = former.cluster.assembly.kept, None
        shell.user_ns[KEY], self._is_notebooks = self, True

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # else it is a forked child
            self.detach() if self.persistent else self._close(keep=False)

    def _end(self, release_ranks: Callable[[], None], why: str) -> None:
        if not self._activities.close(why):
            return
        atexit.unregister(self._at_exit)
        release_ranks()
        if self.history is not None:
            self.history.flush()
        for reporter in self._reporters:
            reporter.flush()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Lab:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        if self.closed:
            return "<Lab: closed>"
        lost = f", lost: {sorted(self.lost)}" if self.lost else ""
        return f"<Lab: {self.ranks} rank{'s' * (self.ranks != 1)} on {', '.join(sorted(set(self.devices)))}{lost}>"


def each_device(devices: Sequence[str] | str | None, ranks: int) -> tuple[str, ...] | None:
    """One device per rank: the one for all repeated, or the list; None stays None."""
    return None if devices is None else (devices,) * ranks if isinstance(devices, str) else tuple(devices)


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext fsdp_lab`, by IPython: adds the magics `%lab` and `%%ranks`."""
    LabMagics(ipython=ipython, make=Lab, key=KEY).register()
