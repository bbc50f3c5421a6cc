"""`fsdp-lab bench step` and `host`, small: what they refuse, what they print, and that nothing of it stays."""

import contextlib
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.bench.host import FORMS, OURS
from fsdp_lab.bench.plan import STEP, BenchError, BenchPlan, forms_named, place
from fsdp_lab.bench.results import BenchResult, Spread, spread, step_figures
from fsdp_lab.cli.main import main
from tests.waiting import until

TINY = ["--model", "gpt2-1m", "--seq-len", "8", "--device", "cpu"]


# -- what is refused -------------------------------------------------------------------------------------------------
def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert place(2, None) == ("cpu", "cpu")
    with pytest.raises(ArgumentError, match="--device: torch finds no GPU"):
        place(2, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert place(2, None) == ("cpu", "cpu"), "one for each rank, or none"
    assert place(2, "cuda") == ("cuda:0", "cuda:0")
    assert BenchPlan(devices=place(2, "cuda")).shares_gpu and not BenchPlan(devices=place(2, "cpu")).shares_gpu


def test_a_peers_name_stands_for_its_forms() -> None:
    assert forms_named("ddp") == ("ddp-raw", "ddp-wire")
    assert forms_named("ddp-wire, lab") == ("lab", "lab-again", "ddp-wire"), "in the order of turns"
    assert forms_named("fsdp2,ddp,lab") == STEP
    assert forms_named("lab-gloo,lab") == ("lab", "lab-again", "lab-gloo"), "that one by its name alone"


# -- the figures -----------------------------------------------------------------------------------------------------
def measured(**seconds: list[float]) -> BenchResult:
    named_seconds = {form.replace("_", "-"): s for form, s in seconds.items()}
    losses = {form: [5.0, 6.0] for form in named_seconds}
    norms, shared = dict.fromkeys(named_seconds, 1.0), frozenset(f for f in named_seconds if not f.endswith("-raw"))
    return BenchResult(seconds=named_seconds, losses=losses, gradient_norms=norms, peak_bytes={}, shared=shared)


def test_a_spread_is_a_median_and_two_deciles_and_a_step_as_long_as_its_slowest_rank() -> None:
    assert spread([float(x) for x in range(11)]) == Spread(median=5.0, p10=1.0, p90=9.0, n=11)
    assert spread([3.0]) == Spread(median=3.0, p10=3.0, p90=3.0, n=1)
    ranks = [
        {"lab": {"seconds": [1.0, 4.0], "loss": 5.0, "squared_norm": 9.0, "peak_bytes": 3, "is_shared": True}},
        {"lab": {"seconds": [2.0, 3.0], "loss": 6.0, "squared_norm": 16.0, "peak_bytes": 4, "is_shared": True}},
    ]
    found = BenchResult.of_ranks(ranks)
    assert found.seconds == {"lab": [2.0, 4.0]} and found.losses == {"lab": [5.0, 6.0]}
    assert found.gradient_norms == {"lab": 5.0} and found.peak_bytes == {"lab": 4}


def test_ratios_are_of_the_same_round_and_against_the_fastest_form() -> None:
    lab, again, ddp = [1.0, 10.0, 4.0], [1.0, 20.0, 4.0], [2.0, 5.0, 4.0]
    found = measured(lab=lab, lab_again=again, fsdp2_raw=[4.0, 40.0, 8.0], fsdp2_wire=[2.0, 40.0, 7.0], ddp_raw=ddp)
    assert found.fastest == {
        "fsdp2": "fsdp2-wire", "fsdp2-raw": "fsdp2-raw", "fsdp2-shared": "fsdp2-wire", "ddp": "ddp-raw", "ddp-raw": "ddp-raw"
    }  # fmt: skip
    lines: list[str] = []
    figures = step_figures(found, {"cores": 2}, lines.append)
    assert {name: ratio["median"] for name, ratio in figures["ratios"].items()} == {
        "lab/fsdp2": 0.5, "lab/fsdp2-raw": 0.25, "lab/fsdp2-shared": 0.5, "lab/ddp": 1.0, "lab/ddp-raw": 1.0
    }  # fmt: skip
    assert figures["control"] == {"lab/lab": {"median": 1.0, "p10": 0.6, "p90": 1.0, "n": 3}}
    assert figures["step_time_s"]["lab"]["median"] == 4.0 and figures["environment"] == {"cores": 2}
    printed = "\n".join(lines)
    assert all(form in printed for form in found.seconds) and "fsdp2-wire is the fastest of them" in printed
    assert "lab-again does the same as lab" in printed


def test_memory_is_compared_where_it_was_counted() -> None:
    found = measured(fsdp2_raw=[2.0], ddp_raw=[1.0])
    assert found.ratios == found.control == {}, "without the lab there are times"
    found = measured(lab=[1.0], fsdp2_raw=[2.0], ddp_raw=[3.0])
    assert found.memory_ratios == {}
    on_gpu = replace(found, peak_bytes={"lab": 30, "fsdp2-raw": 40, "ddp-raw": 60})
    assert on_gpu.memory_ratios == {"lab/fsdp2": 0.75, "lab/ddp": 0.5}
    lines: list[str] = []
    step_figures(on_gpu, {}, lines.append)
    assert "lab/fsdp2, peak allocated memory: 0.750" in lines


@pytest.mark.parametrize("other", [5.01, float("nan")])
def test_a_form_that_trains_something_else_fails_the_run(other: float) -> None:
    found = measured(lab=[1.0], fsdp2_raw=[1.0])
    found.check_same_work("fp32")
    with pytest.raises(BenchError, match="lab did other work than fsdp2-raw"):
        replace(found, losses={**found.losses, "lab": [5.0, other]}).check_same_work("fp32")
    with pytest.raises(BenchError, match="lab did other work"):
        replace(found, gradient_norms={"lab": 2.0, "fsdp2-raw": 1.0}).check_same_work("bf16")


# -- on ranks ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_step_measures_every_form_and_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In processes of its own; forms over Gloo do the same work as those through shared memory."""
    file, forms = tmp_path / "step.json", (*STEP, "lab-gloo", "fsdp2-gloo", "ddp-gloo", "lab-mapped")
    few = ["--steps", "2", "--warmup", "1", "--only", ",".join(forms)]
    assert main(["bench", "step", *TINY, *few, "--json", str(file)]) == 0
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    keys = "ratios control environment step_time_s fastest peak_bytes kernels memory_ratios"
    assert list(written) == keys.split()
    peers = {f"lab/{peer}{group}" for peer in ("fsdp2", "ddp") for group in ("", "-raw", "-shared")}
    assert set(written["ratios"]) == peers and set(written["control"]) == {"lab/lab"}
    assert set(written["step_time_s"]) == set(forms) and all(form in printed for form in forms)
    assert all(time_s["n"] == 2 and 0 < time_s["p10"] <= time_s["p90"] for time_s in written["step_time_s"].values())
    assert f"{written['ratios']['lab/ddp']['median']:.3f}" in printed
    assert "largest difference of losses and gradient norms to fsdp2-raw: " in printed
    assert written["environment"]["preset"] == "gpt2-1m" and written["environment"]["devices"] == ["cpu", "cpu"]
    assert {"cores", "torch", "load_average"} < written["environment"].keys() and not ranks_of(psutil.Process())


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "precision", "tolerance"), [(1, "bf16", 2e-2), (2, "fp32", 1e-4)])
def test_host_time_is_that_beyond_plain_torch(
    ranks: int, precision: str, tolerance: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes of their own; all forms of all backends do the same work. One rank alone sends nothing under ours."""
    file, few = tmp_path / "host.json", ["--rounds", "2", "--blocks", "2", "--layers", "1", "--device", "cpu"]
    assert main(["bench", "host", *few, "--ranks", str(ranks), "--precision", precision, "--json", str(file)]) == 0
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    on = f"{ranks} rank{'s' * (ranks > 1)}, {precision}"
    figures, forms = written[on], {f.name for f in FORMS if ranks > 1 or f.group == "raw" or f.peer not in OURS}
    assert set(figures["losses"]) == {*forms, "plain"} and set(figures["microseconds"]) == {*forms, "plain itself"}
    losses = [loss for form, loss in figures["losses"].items() if form != "plain" or ranks == 1]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=tolerance)
    pairs = {f"{on}, {ours}-raw/fsdp2-raw" for ours in OURS} | {f"{on}, ddp-wire/ddp-raw"}
    assert pairs < set(written["ratios"]) and set(written["control"]) == {f"{on}, lab-raw-again/lab-raw"}
    assert all(form in printed for form in forms)
    plain = figures["microseconds"]["plain itself"]
    assert 0 < plain["forward+backward"]["median"] < plain["whole"]["median"] and plain["whole"]["n"] == 2
    for form, shares in figures["places"].items():
        assert sum(shares.values()) == pytest.approx(1) and shares["hooks"] > 0 and shares["gradients"] > 0
        assert (shares["wire"] > 0.01) == (ranks == 2) and len(figures["made"][form][0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_launcher(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "fsdp_lab", "bench", "step", *TINY, "--steps", "100000", "--only", "ddp-raw"]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        until(lambda: len(ranks_of(psutil.Process(launcher.pid))) == 2)
        ranks = ranks_of(psutil.Process(launcher.pid))
    finally:
        launcher.send_signal(number)
        try:
            _, said = launcher.communicate(timeout=20)
        finally:
            launcher.kill()
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    if number == signal.SIGINT:
        assert launcher.returncode == 130 and said == "fsdp-lab: interrupted; what was started has been ended\n"


def ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in launcher.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # also one that has ended and was not waited for
            if "fsdp_lab.bench.launch" in child.cmdline():
                found.append(child)
    return found
