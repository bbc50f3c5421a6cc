"""Metrics of a run in each tracker, read back from what its own client wrote, and what happens where it cannot have them."""

import json
import math
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_lab
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import UNKNOWN_TRAFFIC, Memory, Traffic
from fsdp_lab.cli.main import main
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState
from fsdp_lab.runs.history import History
from fsdp_lab.runs.steps import Step
from fsdp_lab.runs.trackers import PROJECT, Reporter, step_metrics
from fsdp_lab.spec.spec import Spec
from tests.lab.events import event
from tests.lab.telling import Telling
from tests.lab.test_watch import CELL, cell, watched
from tests.pool import Place, Pool
from tests.waiting import until

GIB = 2**30
Points = list[tuple[int, dict[str, float]]]  # (step, metrics), as a tracker has them


class Board:
    """A user's own tracker."""

    def __init__(self, fails_at: int = -1, wait: Callable[[], object] = lambda: None) -> None:
        self.points: Points = []
        self._fails_at, self._wait = fails_at, wait

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self._wait()
        if step == self._fails_at:
            raise OSError(f"no more room at step {step}.\nA second line.")
        self.points.append((step, metrics))


def test_names_are_torchtitans_and_what_is_unknown_is_left_out():
    gathers = {"all_gather": Traffic(exposed_seconds=0.02), "control": Traffic(exposed_seconds=0.01)}
    memory = Memory(peak_bytes=GIB, reserved_bytes=2 * GIB)
    known = {"peak_flops_per_s": 1e11, "lr": 0.5, "input_s": 0.01, "comm": gathers, "memory": memory}
    events = [event(rank, 3, loss=5.0 + rank, eval_metrics={"f1": 0.5}, **known) for rank in range(2)]
    events[1] = replace(events[1], step_time_s=0.2, eval_loss=4.0, comm={}, memory=replace(memory, peak_bytes=3 * GIB))
    assert step_metrics(Step(events=tuple(events))) == pytest.approx({
        "loss_metrics/global_avg_loss": 2.0, "loss_metrics/global_max_loss": 6.0, "validation_metrics/loss": 4.0,
        "validation_metrics/f1": 0.5, "grad_norm": 1.0, "lr": 0.5, "throughput(tps)": 500.0, "tflops": 0.005, "mfu(%)": 7.5,
        "time_metrics/end_to_end(s)": 0.2, "time_metrics/data_loading(s)": 0.01, "time_metrics/data_loading(%)": 5.0,
        "memory/max_active(GiB)": 3.0, "memory/max_reserved(GiB)": 2.0,
        "comm_metrics/exposed(s)": 0.015, "comm_metrics/exposed(%)": 7.5,
        "comm_metrics/all_gather_exposed(s)": 0.01, "comm_metrics/all_gather_exposed(%)": 5.0,
        "comm_metrics/control_exposed(s)": 0.005, "comm_metrics/control_exposed(%)": 2.5,
    })  # fmt: skip
    unknown: dict[str, Any] = dict.fromkeys(("loss", "mean_loss", "grad_norm"), math.nan)
    bare = event(0, 0, **unknown, tokens=0, flops=0, memory=Memory(), comm=UNKNOWN_TRAFFIC)
    assert step_metrics(Step(events=(bare,))) == {"time_metrics/end_to_end(s)": 0.1}


def by_step(values: Iterable[tuple[int, str, float]]) -> Points:
    points: dict[int, dict[str, float]] = {}
    for step, name, value in values:
        points.setdefault(step, {})[name] = value
    return sorted(points.items())


def read_tensorboard(folder: Path, run: str) -> tuple[Points, str]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder / "runs" / run)).Reload()
    points = by_step((s.step, tag, s.value) for tag in read.Tags()["scalars"] for s in read.Scalars(tag))
    return points, str(read.Tensors("config/text_summary"))


def read_mlflow(_: Path, run: str) -> tuple[Points, str]:
    client = pytest.importorskip("mlflow").MlflowClient()
    (stored,) = client.search_runs(["0"], f"attributes.run_name = '{run}'")
    assert stored.info.status == "FINISHED" and {"mfu_pct", "throughput_tps"} <= set(stored.data.metrics)
    values = {name: client.get_metric_history(stored.info.run_id, name) for name in stored.data.metrics}
    return by_step((m.step, name, m.value) for name in values for m in values[name]), str(stored.data.params)


def read_trackio(_: Path, run: str) -> tuple[Points, str]:
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    return [(log["step"], log) for log in storage.get_logs(PROJECT, run)], str(storage.get_run_config(PROJECT, run))


def read_wandb(folder: Path, run: str) -> tuple[Points, str]:
    """Of the offline file: records of protocol buffers, in blocks as LevelDB's log has them."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    data, at, record, lines, runs = file.read_bytes(), 7, b"", [], ""
    while len(data) - at > 7:
        at += left if (left := -at % 32768) < 7 else 0
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part of it
            told, record = records.Record.FromString(record), b""
            runs += str(told.run)
            lines.append({item.nested_key[0]: json.loads(item.value_json) for item in told.history.item})
    assert run in runs and PROJECT in runs
    return [(line["step"], line) for line in lines if line], runs


def read_jsonl(folder: Path, run: str) -> tuple[Points, str]:
    read = [json.loads(line) for line in (folder / f"{run}.jsonl").read_text().splitlines()]
    return [(line.pop("step"), line) for line in read], "shard_grad_op"


@pytest.mark.parametrize("read", [read_jsonl, read_mlflow, read_tensorboard, read_trackio, read_wandb])
def test_each_client_has_every_step_when_the_run_is_over(
    read: Callable[[Path, str], tuple[Points, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without a network. `read` returns the points that the client stored of a run, and the config as text."""
    if (name := read.__name__.removeprefix("read_")) != "jsonl":
        pytest.importorskip(name, reason=f"{name} is not installed, with whose own client this is read back")
    for variable, value in {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "TENSORBOARD_LOGGING_DIR": tmp_path / "runs",
                            "TRACKIO_DIR": tmp_path / "trackio", "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(),
                            "MLFLOW_ALLOW_FILE_STORE": "true"}.items():  # fmt: skip
        monkeypatch.setenv(variable, str(value))
    run = Telling(Spec().replace(sharding="shard_grad_op"))
    reporter = Reporter(name, History(tmp_path / "runs.sqlite3")).checked()
    reporter.follow(run)
    run.tell(6)
    run.end()
    reporter.flush(60)
    (note,) = reporter.notes
    assert note.startswith(f"Metrics go to {name}: ") and (run.id in note or name in ("wandb", "mlflow"))
    points, config = read(tmp_path, run.id)
    assert [step for step, _ in points] == list(range(6)) and "shard_grad_op" in config
    for metric in ("loss_metrics/global_avg_loss", "grad_norm"):
        told = [step_metrics(step)[metric] for step in run.events.steps()]
        assert [metrics[metric] for _, metrics in points] == pytest.approx(told)


def test_one_that_raises_or_is_slow_stops_no_other_and_steps_after_a_restart_come_again(tmp_path: Path):
    freed = threading.Event()
    fails, slow = Board(fails_at=2), Board(wait=freed.wait)
    run = Telling()
    reporter = Reporter([fails, slow, "jsonl"], History(tmp_path / "runs.sqlite3")).checked()
    reporter.follow(run)
    run.tell(4)
    run.events.restart(2)
    run.events.add(event(rank, 2, memory=Memory(ooms=1)) for rank in range(2))
    run.end(RunState.FAILED)
    file = tmp_path / f"{run.id}.jsonl"
    until(lambda: file.exists() and '"memory/num_ooms": 2.0' in file.read_text())
    written, _ = read_jsonl(tmp_path, run.id)
    assert [step for step, _ in written] in ([0, 1, 2], [0, 1, 2, 3, 2]) and not slow.points
    freed.set()
    reporter.flush()
    assert len(slow.points) == len(written) and [step for step, _ in fails.points] == [0, 1]
    assert "Board gets no more metrics: no more room at step 2." in reporter.notes


def test_what_cannot_be_reported_to_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for bad in ("wanbd", "jsonl,wanbd", ["jsonl", 7], object(), {}):
        with pytest.raises(ArgumentError, match=r"^report_to: .* is refused; give one or several of jsonl, mlflow"):
            Reporter(bad)
    (taken := tmp_path / "taken").touch()
    with pytest.raises(ArgumentError, match="jsonl cannot write to .*taken.*; set FSDP_LAB_HISTORY"):
        Reporter("jsonl", taken / "runs.sqlite3").checked()
    monkeypatch.setattr("fsdp_lab.runs.trackers.find_spec", lambda name: ModuleSpec(name, None))  # as of a mere folder
    (spec := tmp_path / "spec.json").write_text(Spec().to_json())
    assert main(["run", str(spec), "--report-to", "trackio"]) == 2
    assert "-m pip install 'fsdp-lab[trackers]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_and_a_loop_in_a_cell_report_from_the_kernel_and_go_on_when_a_tracker_fails(
    real_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(real_lab, "history", History(tmp_path / "runs.sqlite3"))
    board = Board(fails_at=1)
    run = real_lab.run(model="gpt2-1m", seq_len=64, steps=4, report_to=["jsonl", board]).wait(90)
    run.reporter.flush()
    points, _ = read_jsonl(tmp_path, run.id)
    assert [step for step, _ in points] == [0, 1, 2, 3] and [step for step, _ in board.points] == [0]
    assert all(0 < m["time_metrics/data_loading(s)"] < m["time_metrics/end_to_end(s)"] for _, m in points)
    assert run.state is RunState.FINISHED and any("no more room at step 1" in note for note in run.notes)
    assert f"Metrics go to jsonl: {tmp_path / run.id}.jsonl." in run.notes

    code = CELL.replace("tokens=4", "tokens=4, report_to={to}")
    cell(real_lab, code.format(steps=6, then="", to='"jsonl"'))()
    loop = watched(real_lab, run).wait(10)
    loop.reporter.flush()
    assert [step for step, _ in read_jsonl(tmp_path, loop.id)[0]] == list(range(6))
    with pytest.raises(Exception, match="an object cannot be sent to the notebook's kernel"):
        cell(real_lab, code.format(steps=1, then="", to="type('Own', (), {'log': print})()"))()


def _watch(place: Place, path: str) -> None:
    with fsdp_lab.watch(model := torch.nn.Linear(4, 4), history=path, report_to="jsonl") as watch:
        for _ in range(3):
            with watch.step():
                loss = model(torch.ones(2, 4)).sum() + place.rank
                loss.backward()
                watch.loss(loss)


def test_of_a_loop_elsewhere_rank_0_reports_all_ranks(pool: Pool, tmp_path: Path):
    pool.run(_watch, 2, str(tmp_path / "runs.sqlite3"))
    (file,) = tmp_path.glob("*.jsonl")
    points, _ = read_jsonl(tmp_path, file.stem)
    assert [step for step, _ in points] == [0, 1, 2]
    assert all(m["loss_metrics/global_max_loss"] > m["loss_metrics/global_avg_loss"] for _, m in points)
