"""`fsdp-lab bench gpu` without a GPU: what it refuses, what it would run, what it writes, and a rehearsal of it."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.bench import gpu
from fsdp_lab.bench.gpu import FIGURES, BenchPart, Place, Record, chosen, listed
from fsdp_lab.bench.plan import BenchError
from fsdp_lab.cli.main import main
from fsdp_lab.spec.spec import Spec
from tests.bench.in_pool import launched_in
from tests.pool import Pool
from tests.test_house import JUPYTER, REPO, without

GIB = 1 << 30


# -- refusals, and the list --------------------------------------------------------------------------------------------
def test_without_a_gpu_it_names_the_way_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["bench", "gpu"]) == 2
    said = "--device: torch finds no GPU here; give --device cpu to rehearse the same list with small models"
    assert capsys.readouterr().err == f"fsdp-lab: {said}\n"


def test_what_this_machine_cannot_run_is_skipped_with_the_reason() -> None:
    def skips(gpus: int, gib: float) -> dict[str, str]:
        return {part.name: part.skipped for part in listed(Place(gpus=gpus, memory_bytes=gib * GIB))}

    one, two, small = skips(1, 78), skips(2, 78), skips(1, 24)
    over_nccl = ["nccl", "nccl-step"]
    assert {name: why for name, why in one.items() if why} == dict.fromkeys(over_nccl, "it needs 2 GPUs or more")
    assert not any(two.values()) and list(two)[:2] == over_nccl, "first, where time is short"
    assert small["step-llama-1b"] == "its 3 forms take 55.2 GiB, and the GPU has 24.0 GiB"
    assert not small["step-gpt2-124m"]
    names = [part.name for part in chosen(listed(Place()), "step, strat,")]
    assert names == ["strategies", "step-gpt2-1m", "step-llama-1m"], "by the beginnings of names"
    with pytest.raises(ArgumentError, match="there is no part ','"):
        chosen(listed(Place()), ",")


def test_a_commit_that_git_does_not_tell_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(gpu, "REPOSITORY", tmp_path)
    assert gpu._commit() == "", "git fails"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu._commit() == "", "there is no git"


# -- the file ----------------------------------------------------------------------------------------------------------
def part(name: str, measure: Any, **more: Any) -> BenchPart:
    return BenchPart(name=name, title=f"the part {name}", limit_s=60, measure=measure, **more)


def figures_in(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text().partition(FIGURES)[2])


def test_a_part_that_fails_is_told_and_the_rest_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.txt"
    seen: list[dict[str, Any]] = []

    def first(say: Any, limit_s: float) -> dict[str, Any]:
        say("a line\nand another")
        seen.append(figures_in(file))
        raise BenchError("it did other work")

    def last(say: Any, limit_s: float) -> dict[str, Any]:
        seen.append(figures_in(file))
        return {"figure": 4.5}

    some = (part("first", first), part("no", first, skipped="there is 1 GPU"), part("last", last))
    monkeypatch.setattr(gpu, "listed", lambda at: some)
    assert main(["bench", "gpu", "--device", "cpu", "--out", str(file)]) == 1
    said, found = capsys.readouterr(), figures_in(file)
    assert said.err == f"fsdp-lab: 1 of 3 parts failed: first; see {file}\n"
    outcomes = [(p["name"], p["outcome"], p["reason"], p["printed"], p["figures"]) for p in found["parts"]]
    assert outcomes == [
        ("first", "failed", "it did other work", ["a line", "and another"], {}),
        ("no", "skipped", "there is 1 GPU", [], {}),
        ("last", "passed", "", [], {"figure": 4.5}),
    ]
    assert all(p["begun"].endswith(" UTC") and p["seconds"] >= 0 for p in found["parts"])
    text = file.read_text().partition(FIGURES)[0]
    assert "== first: the part first\na line\nand another\n" in text and "failed: it did other work" in text
    facts = ("date: 20", f"torch {torch.__version__}", "transformers ", "command: fsdp-lab")
    assert all(fact in text.partition("== first")[0] for fact in facts) and text.strip() in said.out
    begun = seen[0]["parts"][0]
    assert begun["outcome"] == "not finished" and begun["printed"] == ["a line", "and another"]
    assert [p["outcome"] for p in seen[1]["parts"]] == ["failed", "skipped", "not finished"]


def test_a_session_that_is_cut_off_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cut = tmp_path / "gpu.txt", Mock(side_effect=KeyboardInterrupt)
    some = (part("done", lambda say, limit_s: say("so far") or {"a": 1}), part("cut", cut), part("after", cut))
    monkeypatch.setattr(gpu, "listed", lambda at: some)
    assert main(["bench", "gpu", "--device", "cpu", "--out", str(file)]) == 130
    kept = figures_in(file)["parts"]
    assert [p["outcome"] for p in kept] == ["passed", "not finished", "not begun"]
    assert kept[0]["figures"] == {"a": 1} and kept[0]["printed"] == ["so far"]


def test_what_no_time_is_left_for_is_skipped(tmp_path: Path) -> None:
    limits: list[float] = []

    def measure(say: Any, limit_s: float) -> dict[str, Any]:
        limits.append(limit_s)
        return {}

    for limit_s in (0.0, 45.0, 24.0):  # a program under torchrun needed more than 24 of its 60 s, and failed for it
        record = Record(facts={}, file=tmp_path / "gpu.txt", parts=[part("one", measure)])
        record.run(limit_s)
    assert limits == [60, pytest.approx(45, abs=1)]
    assert record.parts[0].said.endswith("skipped: 24 s were left, and it may need 60; give --only one")


# -- what is wrong, is found -------------------------------------------------------------------------------------------
def trained(losses: Sequence[float] = (6.0, 5.0), total: int = 7) -> dict[str, Any]:
    kernels = {"count": 1493, "busy_s": 0.025, "exposed_s": None}
    return {"losses": list(losses), "checksum": total, "step_s": 0.1, "peak_bytes": GIB, "kernels": kernels}


@pytest.mark.parametrize(("other", "said"), [
    (trained([6.0, 5.01]), "lab in fp32: losses differ by 2.0e-03, 0.0001 allowed"),
    (trained([6.0, math.nan]), "lab in fp32: losses differ by inf"),
    ({"error": "rank 0: RuntimeError: no"}, "lab in fp32: rank 0: RuntimeError: no"),
])  # fmt: skip
def test_a_strategy_that_trains_something_else_fails(other: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch):
    named = {name: gpu.STRATEGIES[name] for name in ("fsdp2", "lab", "ddp")}
    found = [trained(), other, trained([6.0, 5.0], 8)]
    monkeypatch.setattr(gpu, "trained", lambda *given: found)
    lines: list[str] = []
    with pytest.raises(BenchError, match="1 of 3 are wrong") as raised:
        gpu.strategies(named, ["fp32"], ["cuda:0"], lines.append, 60)
    assert said in str(raised.value)
    rows = lines[0].splitlines()
    assert rows[1].split()[5:9] == ["1.00", "GiB", "1,493", "25%"], "beside its time, who had the GPU"
    assert "equal bit for bit" in rows[1] and "losses differ by 0.0e+00" in rows[3], "equal losses, other parameters"


def test_ranks_that_do_not_agree_are_an_error() -> None:
    spec = Spec(world_size=2)
    assert gpu._joined(spec, [trained(total=1 << 63), trained(total=1 << 63)])["checksum"] == 0
    assert gpu._joined(spec.replace(backend="ddp", sharding="no_shard"), [trained(), trained()])["checksum"] == 7
    assert "do not agree" in gpu._joined(spec, [trained(), trained([6.0, 5.5])])["error"]


# -- on ranks ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_spec_that_fails_hides_no_other(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP1 refuses this without a GPU, on both ranks; the next Spec trains."""
    monkeypatch.setattr(gpu, "launch", launched_in(pool))
    base = Spec(world_size=2).replace(model="gpt2-1m", seq_len=16, micro_batch=1)
    wanted = [base.replace(backend="fsdp1", offload="all"), base, base.replace(backend="fsdp2")]
    refused, ours, theirs = gpu.trained(wanted, 2, ("cpu", "cpu"), 100)
    assert refused["error"].startswith("rank 0: SpecError: strategy.offload")
    assert ours["losses"] == theirs["losses"] and ours["checksum"] == theirs["checksum"] and len(ours["losses"]) == 2


@pytest.mark.nightly
def test_every_part_is_rehearsed_where_there_is_no_jupyter(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(without(JUPYTER | {"rich"}))  # of the command and of all that it starts
    file = tmp_path / "gpu.txt"
    command = [sys.executable, "-m", "fsdp_lab", "bench", "gpu", "--device", "cpu", "--out", str(file)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, cwd=REPO, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    written = figures_in(file)
    assert written["facts"]["fsdp-lab bench gpu"] == "a rehearsal on the CPU"
    at = {part.name: part.skipped for part in listed(Place())}
    assert {each["name"]: each["reason"] for each in written["parts"]} == at, "all that need no GPU have passed"
    for each in written["parts"]:
        assert each["outcome"] == ("skipped" if at[each["name"]] else "passed"), each["name"]
        assert bool(each["figures"]) == (each["outcome"] == "passed")
        assert all(line in done.stdout for line in each["printed"])
