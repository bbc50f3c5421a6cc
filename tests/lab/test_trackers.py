"""Metrics of a run in each tracker, read back from what its own client wrote; and what happens where one cannot have them."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_lab
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import UNKNOWN_TRAFFIC, Memory, StepEvent, Traffic
from fsdp_lab.cli.main import main
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState
from fsdp_lab.runs.history import History
from fsdp_lab.runs.steps import Step
from fsdp_lab.runs.trackers import Reporter, step_metrics
from fsdp_lab.spec.spec import Spec
from tests.lab.events import event
from tests.lab.telling import Telling
from tests.lab.test_watch import CELL, cell, watched
from tests.pool import Place, Pool

GIB = 2**30
SMALL = {"model": "gpt2-1m", "micro_batch": 1, "seq_len": 64}
Points = list[tuple[int, dict[str, float]]]  # (step, metrics), as a tracker has them


def lines(file: Path) -> Points:
    read = [json.loads(line) for line in file.read_text().splitlines()]
    return [(line.pop("step"), line) for line in read]


class Board:
    """Has what it was told, as a user's own; `fails_at`: the step at which it raises. `wait`: before each."""

    def __init__(self, fails_at: int = -1, wait: Callable[[], object] = lambda: None) -> None:
        self.points: Points = []
        self._fails_at, self._wait = fails_at, wait

    def log(self, metrics: dict[str, float], *, step: int) -> None:
        self._wait()
        if step == self._fails_at:
            raise OSError(f"no more room at step {step}.\nA second line.")
        self.points.append((step, metrics))


# -- names -----------------------------------------------------------------------------------------------------------


def test_names_are_torchtitans_and_what_is_unknown_is_left_out():
    gathers = {"all_gather": Traffic(exposed_seconds=0.02), "control": Traffic(exposed_seconds=0.01)}
    known: dict[str, Any] = {"peak_flops_per_s": 1e11, "lr": 0.5, "input_s": 0.01, "comm": gathers}
    memory = Memory(peak_bytes=GIB, reserved_bytes=2 * GIB, alloc_retries=1)
    events = [event(rank, 3, loss=5.0 + rank, **{**known, "memory": memory}) for rank in range(2)]
    events[1] = replace(events[1], step_time_s=0.2, eval_loss=4.0, comm={}, memory=replace(memory, peak_bytes=3 * GIB))
    assert step_metrics(Step(events=tuple(events))) == pytest.approx({
        "loss_metrics/global_avg_loss": 2.0, "loss_metrics/global_max_loss": 6.0, "validation_metrics/loss": 4.0,
        "grad_norm": 1.0, "lr": 0.5, "throughput(tps)": 500.0, "tflops": 0.005, "mfu(%)": 7.5,
        "time_metrics/end_to_end(s)": 0.2, "time_metrics/data_loading(s)": 0.01, "time_metrics/data_loading(%)": 5.0,
        "memory/max_active(GiB)": 3.0, "memory/max_reserved(GiB)": 2.0,
        "comm_metrics/exposed(s)": 0.015, "comm_metrics/exposed(%)": 7.5,
        "comm_metrics/all_gather_exposed(s)": 0.01, "comm_metrics/all_gather_exposed(%)": 5.0,
        "comm_metrics/control_exposed(s)": 0.005, "comm_metrics/control_exposed(%)": 2.5,
    })  # fmt: skip
    unknown: dict[str, Any] = dict.fromkeys(("loss", "mean_loss", "grad_norm"), math.nan)
    bare = event(0, 0, **unknown, tokens=0, flops=0, memory=Memory(), comm=UNKNOWN_TRAFFIC)
    assert step_metrics(Step(events=(bare,))) == {"time_metrics/end_to_end(s)": 0.1}


def test_events_that_were_stored_before_these_fields_are_read():
    stored = event(0, 0).to_dict()
    del stored["input_s"], stored["memory"]["alloc_retries"], stored["memory"]["ooms"]
    read = StepEvent.from_dict(stored)
    assert (read.input_s, read.memory.alloc_retries, read.memory.ooms) == (None, 0, 0)
    told = replace(event(0, 0), input_s=0.5, memory=Memory(alloc_retries=2, ooms=1))
    assert StepEvent.from_dict(told.to_dict()) == told


# -- each client, by its own reader ----------------------------------------------------------------------------------


def read_tensorboard(folder: Path, run: str) -> tuple[Points, str]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder / "runs" / run))
    read.Reload()
    points: dict[int, dict[str, float]] = {}
    for tag in read.Tags()["scalars"]:
        for scalar in read.Scalars(tag):
            points.setdefault(scalar.step, {})[tag.replace("_s_", "(s)").replace("_tps_", "(tps)")] = scalar.value
    return sorted(points.items()), str(read.Tensors("config/text_summary"))


def read_mlflow(folder: Path, run: str) -> tuple[Points, str]:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient()
    (stored,) = client.search_runs(["0"], f"attributes.run_name = '{run}'")
    assert stored.info.status == "FINISHED"
    points: dict[int, dict[str, float]] = {}
    for name in stored.data.metrics:
        for metric in client.get_metric_history(stored.info.run_id, name):
            shown = name.removesuffix("_tps") + "(tps)" if name.endswith("_tps") else name
            points.setdefault(metric.step, {})[shown] = metric.value
    return sorted(points.items()), str(stored.data.params)


def read_trackio(folder: Path, run: str) -> tuple[Points, str]:
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    return [(log["step"], log) for log in storage.get_logs(PROJECT, run)], str(storage.get_run_config(PROJECT, run))


def read_wandb(folder: Path, run: str) -> tuple[Points, str]:
    """Of the offline file: a log of records as LevelDB's, of protocol buffers."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    data, at, record, points, config = file.read_bytes(), 7, b"", [], ""
    while len(data) - at > 7:
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part of it
            told, record = records.Record.FromString(record), b""
            if told.WhichOneof("record_type") == "run":
                assert (told.run.display_name, told.run.project) == (run, PROJECT)
                config = str(told.run.config)
            elif told.WhichOneof("record_type") == "history":
                metrics = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in told.history.item}
                points.append((metrics["step"], metrics))
    return points, config


def read_jsonl(folder: Path, run: str) -> tuple[Points, str]:
    return lines(folder / f"{run}.jsonl"), "shard_grad_op"


PROJECT = "fsdp_lab"
READERS = {"jsonl": read_jsonl, "mlflow": read_mlflow, "tensorboard": read_tensorboard, "trackio": read_trackio,
           "wandb": read_wandb}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where every client writes, without a network."""
    own = {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "TRACKIO_DIR": tmp_path / "trackio",
           "MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true",
           "TENSORBOARD_LOGGING_DIR": tmp_path / "runs"}  # fmt: skip
    for name, value in own.items():
        monkeypatch.setenv(name, str(value))
    yield tmp_path


@pytest.mark.parametrize("name", READERS)
def test_each_client_has_every_step_when_the_run_is_over(name: str, folder: Path):
    """Of a run that goes on while it is told, with its Spec, under its id."""
    if name != "jsonl":
        pytest.importorskip(name, reason=f"{name} is not installed, with whose own client this is read back")
    run = Telling(Spec().replace(sharding="shard_grad_op"))
    reporter = Reporter(name, History(folder / "runs.sqlite3")).checked()
    reporter.follow(run)
    run.tell(3)
    run.tell(3)
    run.end()
    reporter.flush(60)
    (note,) = reporter.notes
    assert note.startswith(f"Metrics go to {name}: ") and (run.id in note or name in ("wandb", "mlflow"))
    points, config = READERS[name](folder, run.id)
    assert [step for step, _ in points] == list(range(6)) and "shard_grad_op" in config
    for step, (_, metrics) in zip(run.events.steps(), points, strict=True):
        for metric in ("loss_metrics/global_avg_loss", "throughput(tps)", "grad_norm"):
            assert metrics[metric] == pytest.approx(step_metrics(step)[metric]), metric
        assert metrics["memory/num_ooms"] == 0


def test_one_that_raises_or_is_slow_stops_no_other_and_steps_after_a_restart_come_again(folder: Path):
    freed = threading.Event()
    fails, slow = Board(fails_at=2), Board(wait=freed.wait)
    run = Telling()
    reporter = Reporter([fails, slow, "jsonl"], History(folder / "runs.sqlite3")).checked()
    reporter.follow(run)
    run.tell(4)
    run.events.restart(2)
    run.events.add(event(rank, 2, memory=Memory(ooms=1)) for rank in range(2))
    run.end(RunState.FAILED)
    reporter.flush(2)  # in vain, for the slow one
    written = lines(folder / f"{run.id}.jsonl")
    assert [step for step, _ in written] in ([0, 1, 2], [0, 1, 2, 3, 2]) and written[-1][1]["memory/num_ooms"] == 2
    assert [step for step, _ in fails.points] == [0, 1] and not slow.points
    assert "Board gets no more metrics: no more room at step 2." in reporter.notes
    freed.set()
    reporter.flush()
    assert len(slow.points) == len(written)


# -- refused before anything starts ----------------------------------------------------------------------------------


def test_what_cannot_be_reported_to_is_said_in_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for bad in ("wanbd", "jsonl,wanbd", ["jsonl", 7], object(), {}):
        with pytest.raises(ArgumentError, match=r"^report_to: .* is refused; give one or several of jsonl, mlflow"):
            Reporter(bad)
    spec = folder / "spec.json"
    spec.write_text(Spec().to_json())
    assert main(["run", str(spec), "--report-to", "wanbd"]) == 2
    assert "--report-to: 'wanbd' is refused" in capsys.readouterr().err
    file = folder / "taken"
    file.touch()
    with pytest.raises(ArgumentError, match="jsonl cannot write to .*taken.*; set FSDP_LAB_HISTORY"):
        Reporter("jsonl", file / "runs.sqlite3").checked()
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not installed
    monkeypatch.setattr("fsdp_lab.runs.trackers.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=f"needs trackio, .*: {sys.executable} -m pip install trackio"):
        Reporter("trackio").checked()
    assert main(["run", str(spec), "--report-to", "trackio"]) == 2 and "pip install trackio" in capsys.readouterr().err


# -- runs and loops --------------------------------------------------------------------------------------------------


def test_a_run_reports_and_goes_on_when_a_tracker_fails(real_lab: Lab):
    board = Board(fails_at=1)
    run = real_lab.run(**SMALL, steps=4, report_to=["jsonl", board]).wait(90)
    run.reporter.flush()
    assert run.state is RunState.FINISHED and real_lab.history is not None
    file = real_lab.history.path.parent / f"{run.id}.jsonl"
    assert f"Metrics go to jsonl: {file}." in run.notes and any("no more room at step 1" in n for n in run.notes)
    points = lines(file)
    assert [step for step, _ in points] == [0, 1, 2, 3] and [step for step, _ in board.points] == [0]
    assert all(0 < m["time_metrics/data_loading(s)"] < m["time_metrics/end_to_end(s)"] for _, m in points)
    os.unlink(file)


@pytest.mark.slow
def test_a_loop_in_a_cell_is_reported_by_the_kernel(real_lab: Lab):
    before = real_lab.current
    code = CELL.replace("tokens=4", "tokens=4, report_to={to}")
    cell(real_lab, code.format(steps=6, then="", to='"jsonl"'))()
    run = watched(real_lab, before).wait(10)
    run.reporter.flush()
    assert real_lab.history is not None
    file = real_lab.history.path.parent / f"{run.id}.jsonl"
    assert [step for step, _ in lines(file)] == list(range(6)) and str(file) in " ".join(run.notes)
    os.unlink(file)
    with pytest.raises(Exception, match="an object cannot be sent to the notebook's kernel"):
        cell(real_lab, textwrap.dedent(code).format(steps=1, then="", to="type('Own', (), {'log': print})()"))()


def _watch(place: Place, path: str) -> str:
    model = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters())
    with fsdp_lab.watch(model, sgd, history=path, report_to="jsonl") as watch:
        for _ in range(3):
            with watch.step(tokens=4):
                loss = model(torch.ones(2, 4)).sum()
                loss.backward()
                sgd.step()
                watch.loss(loss + place.rank)
    return str(watch.run)


def test_of_a_loop_elsewhere_rank_0_reports_all_ranks(pool: Pool, tmp_path: Path):
    (run, _) = pool.run(_watch, 2, str(tmp_path / "runs.sqlite3"))
    (file,) = tmp_path.glob("*.jsonl")
    points = lines(file)
    assert file.stem == run and [step for step, _ in points] == [0, 1, 2]
    assert all(m["loss_metrics/global_max_loss"] > m["loss_metrics/global_avg_loss"] for _, m in points)
