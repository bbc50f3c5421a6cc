"""`Reporter`: the metrics of a run, as it goes, in wandb, trackio, tensorboard, mlflow, or a file of JSON lines.

It reads the run's events as the history does (`fsdp_lab.runs.history.writer`), on one thread for each tracker, which imports
its client: a slow one holds up nobody. What a client raises is a note of the run, and it gets no more.

Where metrics go is said by each client's own environment variables, such as WANDB_MODE, WANDB_PROJECT, TRACKIO_DIR and
MLFLOW_TRACKING_URI. TENSORBOARD_LOGGING_DIR, else "runs", gets a folder for each run, named by the run's id."""

import json
import math
import os
import re
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from fsdp_lab.base.errors import ArgumentError, not_installed
from fsdp_lab.base.events import Traffic
from fsdp_lab.base.files import path_errors
from fsdp_lab.runs.history.history import VARIABLE, History
from fsdp_lab.runs.steps import Assembler, Step
from fsdp_lab.runs.view import RunState, RunView

PROJECT = "fsdp_lab"
READ_EVERY_S = 0.4


def step_metrics(step: Step) -> dict[str, float]:
    """The metrics of a step by torchtitan's names, and "comm_metrics/" for exposed communication. Rates (of one device) and
    communication are means over the ranks; memory and time in the input are of the rank with most. None is unknown."""
    events, seconds = step.events, step.step_time_s or math.nan
    losses = [e.loss for e in events]
    input_s = max((e.input_s for e in events if e.input_s is not None), default=math.nan)
    found: dict[str, float | None] = {
        "loss_metrics/global_avg_loss": step.mean_loss,
        "loss_metrics/global_max_loss": None if math.isnan(sum(losses)) else max(losses),
        "validation_metrics/loss": step.eval_loss,
        **{f"validation_metrics/{name}": value for name, value in step.eval_metrics.items()},
        "grad_norm": next((e.grad_norm for e in events if not math.isnan(e.grad_norm)), None),
        "lr": events[0].lr,
        "throughput(tps)": fmean(e.tokens for e in events) / seconds or None,
        "tflops": fmean(e.flops for e in events) / seconds / 1e12 or None,
        "mfu(%)": 100 * fmean(math.nan if e.mfu is None else e.mfu for e in events) or None,
        "time_metrics/end_to_end(s)": seconds,
        "time_metrics/data_loading(s)": input_s,
        "time_metrics/data_loading(%)": 100 * input_s / seconds,
        "memory/max_active(GiB)": max(e.memory.peak_bytes for e in events) / 2**30 or None,
        "memory/max_reserved(GiB)": max(e.memory.reserved_bytes or 0 for e in events) / 2**30 or None,
    }
    for kind in ("", *sorted({kind for e in events for kind in e.comm})):
        exposed_s = fmean(e.comm.get(kind, Traffic()).exposed_seconds if kind else e.exposed_comm_s for e in events)
        name = "comm_metrics/" + "_".join(filter(None, [kind, "exposed"]))
        found |= {f"{name}(s)": exposed_s, f"{name}(%)": 100 * exposed_s / seconds}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


class Tracker:
    """Where the metrics of one run go; of this class itself, `run`, an object of the user's, who ends it. `begin` returns
    where to look, for a note. `folder`, if there is one, is checked before the run, and `variable` names another."""

    folder: Path | None = None
    variable = ""

    def __init__(self, run: Any = None) -> None:
        self._run = run

    def begin(self, run: str, config: dict[str, Any]) -> str:
        return "an object of yours"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def end(self, state: RunState) -> None: ...


class Trackio(Tracker):
    def begin(self, run: str, config: dict[str, Any]) -> str:
        import trackio

        self._run = trackio.init(project=PROJECT, name=run, config=config, embed=False)
        return f"run {run} of `trackio show --project {PROJECT}`"

    def end(self, state: RunState) -> None:
        self._run.finish()


class Wandb(Tracker):
    def begin(self, run: str, config: dict[str, Any]) -> str:
        import wandb

        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):  # where `init` would ask
            raise RuntimeError("there is no API key; run `wandb login`, or set WANDB_MODE=offline")
        project, settings = os.environ.get("WANDB_PROJECT", PROJECT), wandb.Settings(console="off", silent=True)
        self._run = wandb.init(project=project, name=run, config=config, reinit="create_new", settings=settings)
        self._run.define_metric("*", step_metric="step")  # wandb's own step cannot go back, as after a recovery
        return str(self._run.dir if self._run.offline else self._run.url)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def end(self, state: RunState) -> None:
        self._run.finish(exit_code=int(state is RunState.FAILED))


class Mlflow(Tracker):
    def begin(self, run: str, config: dict[str, Any]) -> str:
        import mlflow

        self._run, begun = mlflow, mlflow.start_run(run_name=run)  # the active one of this thread alone
        mlflow.log_params(config)
        return f"run {begun.info.run_id} in {mlflow.get_tracking_uri()}"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        allowed = {re.sub(r"[^\w/]", "_", name.replace("%", "pct").rstrip(")")): v for name, v in metrics.items()}
        self._run.log_metrics(allowed, step=step)  # such as "mfu_pct": it allows neither brackets nor %

    def end(self, state: RunState) -> None:
        self._run.end_run({RunState.FAILED: "FAILED", RunState.STOPPED: "KILLED"}.get(state, "FINISHED"))


class Tensorboard(Tracker):
    variable = "TENSORBOARD_LOGGING_DIR"

    def __init__(self, _: Any) -> None:
        self.folder = Path(os.environ.get(self.variable) or "runs").absolute()

    def begin(self, run: str, config: dict[str, Any]) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._run = SummaryWriter(f"{self.folder}/{run}", flush_secs=5)
        self._run.add_text("config", f"```\n{json.dumps(config, indent=2)}\n```")
        return f"run {run} of `tensorboard --logdir {self.folder}`"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._run.add_scalar(name, value, step)

    def end(self, state: RunState) -> None:
        self._run.close()


class Jsonl(Tracker):
    variable = VARIABLE

    def __init__(self, history: Any) -> None:
        self.folder = (History.of(history or True) or History()).path.parent

    def begin(self, run: str, config: dict[str, Any]) -> str:
        self._run = open(f"{self.folder}/{run}.jsonl", "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        return str(self._run.name)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.write(json.dumps({"step": step, **metrics}) + "\n")

    def end(self, state: RunState) -> None:
        self._run.close()


KINDS = {"jsonl": Jsonl, "mlflow": Mlflow, "tensorboard": Tensorboard, "trackio": Trackio, "wandb": Wandb}


class Reporter:
    """Reports one run to `report_to`: one of `KINDS`, an object with `log(metrics, step=...)`, several in a list, or names
    with commas between them; None: nowhere. `history`: as of a `Lab`; JSON lines lie beside it. `notes`: where the metrics
    are, and what failed, a sentence each. Raises ArgumentError of `field`."""

    def __init__(self, report_to: Any = None, history: Any = None, field: str = "report_to") -> None:
        self.history, self.notes, self._field = history, list[str](), field
        self._trackers, self._threads = list[tuple[str, Tracker]](), list[threading.Thread]()
        given = report_to.replace(" ", "").split(",") if isinstance(report_to, str) else report_to
        given = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
        self.given = [one for i, one in enumerate(given) if one not in given[:i]]
        for one in self.given:
            if isinstance(one, str) and one in KINDS:
                self._trackers.append((one, KINDS[one](history)))
            elif callable(getattr(one, "log", None)):
                self._trackers.append((type(one).__name__, Tracker(one)))
            else:
                hint = f"give one or several of {', '.join(KINDS)}, or an object with log(metrics, step=...)"
                raise ArgumentError(field, f"{one!r} is refused", hint)

    def checked(self) -> Self:
        """Raises ModuleNotFoundError: a client is not installed. ArgumentError: its folder cannot be written."""
        for name, tracker in self._trackers:
            if name in KINDS and name != "jsonl" and not getattr(find_spec(name), "origin", ""):  # ./wandb has none
                raise not_installed(f"{self._field} {name}", ModuleNotFoundError(name=name))
            if (folder := tracker.folder) is not None:
                with path_errors(self._field, f"{name} cannot write to {folder}", f"set {tracker.variable}"):
                    folder.mkdir(parents=True, exist_ok=True)
                    tempfile.TemporaryFile(dir=folder).close()
        return self

    def follow(self, run: RunView) -> None:
        """Reports a live run from now on until it is over. Returns at once."""
        for each in self._trackers:
            self._threads.append(threading.Thread(target=self._report, args=(run, *each), daemon=True))
            self._threads[-1].start()

    def flush(self, timeout_s: float = 20.0) -> None:
        """Waits until the trackers have all of a run that is over, or for `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _report(self, run: RunView, name: str, tracker: Tracker) -> None:
        assembler, cursor, over = Assembler(), 0, False
        counts = {"memory/num_alloc_retries": 0.0, "memory/num_ooms": 0.0}  # since the begin, as torchtitan's
        try:
            self.notes.append(f"Metrics go to {name}: {tracker.begin(run.id, run.spec.flat())}.")
            while not over:
                over = run.state.over  # read before the events, so that none is missed
                new, cursor = run.events.since(cursor)
                for step in [*assembler.add(new), *(assembler.flush() if over else ())]:
                    counts["memory/num_alloc_retries"] += sum(e.memory.alloc_retries for e in step.events)
                    counts["memory/num_ooms"] += sum(e.memory.ooms for e in step.events)
                    tracker.log(step.number, step_metrics(step) | counts)
                time.sleep(0 if over else READ_EVERY_S)
            tracker.end(run.state)
        except Exception as e:  # whatever a client raises, the run goes on
            reason = str(e).strip().partition("\n")[0] or type(e).__name__
            self.notes.append(f"{name} gets no more metrics: {reason.rstrip('.')}.")
            with suppress(Exception):
                tracker.end(RunState.FAILED)
