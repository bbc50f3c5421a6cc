"""`fsdp-lab bench` on real ranks, small: what it prints is what it writes, and nothing of it stays."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_lab.bench.benches import BenchResult, interval, measure, overheads, spread, step_figures
from fsdp_lab.bench.launch import place
from fsdp_lab.bench.plan import METERED_PEERS, METERING, STEP, BenchError, BenchPlan, PlanError, forms_named
from fsdp_lab.cli import lab_benches
from fsdp_lab.cli.lab_benches import growth, route, tour
from fsdp_lab.cli.main import main
from fsdp_lab.core.formatting import Spread
from tests.bench import many
from tests.bench.__main__ import main as developers

TINY = ["--layers", "2", "--width", "32", "--heads", "2", "--vocab", "64", "--seq-len", "8", "--device", "cpu"]


@pytest.mark.nightly
def test_live_measures_start_switches_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "live", "--model", "gpt2-1m", "--rounds", "1", "--json", str(file)]) == 0
    seconds = json.loads(file.read_text())["seconds"]
    assert {name: len(waits) for name, waits in seconds.items()} == {
        "start to ranks ready": 1, "start to first step": 1, "switch to first step": 7, "stop": 3}  # fmt: skip
    assert 0 < seconds["start to ranks ready"][0] < seconds["start to first step"][0] < 90
    assert all(0 < s < 60 for s in seconds["switch to first step"])
    assert all(0 <= s < 10 for s in seconds["stop"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in seconds)


@pytest.mark.nightly
def test_toggle_is_measured_beside_a_relaunch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_benches, "WITHIN_S", 0.3)
    file = tmp_path / "toggle.json"
    assert (
        main(["bench", "toggle", "--model", "gpt2-1m", "--pairs", "4", "--relaunches", "1", "--json", str(file)]) == 0
    )
    figures, printed = json.loads(file.read_text()), capsys.readouterr().out.splitlines()
    ratio, seconds = figures["ratios"]["resident/relaunch"], figures["seconds"]
    assert ratio["n"] == seconds["toggle"]["n"] == 4 and seconds["relaunch"]["n"] == 1
    assert ratio["median"] == pytest.approx(seconds["toggle"]["median"] / seconds["relaunch"]["median"])
    assert 0 < ratio["median"] < 1  # staying is the point
    assert printed[1].startswith(f"resident/relaunch: {ratio['median']:.3f}")


@pytest.mark.slow
def test_memory_is_compared_with_fsdp2_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    assert main(["bench", "memory", "--model", "gpt2-1m", "--ranks", "2", "--json", str(file)]) == 0
    rows, printed = json.loads(file.read_text())["rows"], capsys.readouterr().out
    assert len(rows) == 4 and "lab/fsdp2: at most" in printed
    for row in rows:
        assert row["lab/fsdp2"] == pytest.approx(row["lab_bytes"] / row["fsdp2_bytes"])
        assert row["lab/theory"] == pytest.approx(row["lab_bytes"] / row["theory_bytes"])
        assert row["lab/fsdp2"] <= 1.0 and row["lab/plan"] <= 1.02 and row["lab/theory"] <= 1.02
        assert f"{row['lab/fsdp2']:.4f}" in printed


@pytest.mark.slow
def test_shared_memory_is_compared_with_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wire.json"
    assert main(["bench", "wire", "--rounds", "2", "--json", str(file)]) == 0
    figures, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert list(figures["ratios"]) == list(figures["control"])
    assert {"all_gather/65536", "reduce_scatter/67108864"} < figures["ratios"].keys()
    for ratio in figures["ratios"].values():
        assert ratio["n"] == 2 and ratio["median"] > 0 and f"{ratio['median']:.3f}" in printed
    assert figures["ratios"]["reduce_scatter/67108864"]["median"] < 1
    assert 0 < figures["waiting_cores"] < 0.02 and "of a core" in printed


@pytest.mark.slow
def test_forms_over_gloo_do_the_same_work(capsys: pytest.CaptureFixture[str]) -> None:
    forms = "lab,lab-gloo,fsdp2-raw,fsdp2-gloo,ddp-gloo"
    assert main(["bench", "step", *TINY, "--steps", "2", "--only", forms]) == 0
    assert "largest difference of losses and gradient norms to fsdp2-raw: " in capsys.readouterr().out


def test_the_tour_goes_through_every_ordered_pair_once() -> None:
    places = tour(10)
    pairs = list(itertools.pairwise(places))
    assert len(pairs) == len(set(pairs)) == 90 and places[0] == places[-1]
    assert len(route(None)) == 181 and len(route(7)) == 8
    assert all(a != b for a, b in itertools.pairwise(route(500)))


def test_growth_is_of_medians_from_the_hundredth_toggle_on() -> None:
    calm, risen = [100, 90, 110, 100, 400], [102, 102, 1000, 90, 102]
    assert growth(calm, risen) == {"from_bytes": 100, "to_bytes": 102, "growth": pytest.approx(0.02)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["toggle", "--pairs", "1"], "--pairs 1 is refused"),
        (["metering", "--launches", "1", "--device", "cpu"], "--launches 1 is refused; give 2 or more"),
        (["toggle", "--relaunches", "0"], "--relaunches 0 is refused"),
        (["soak", "--toggles", "50"], "--toggles 50 is refused; give 110 or more"),
        (["soak", "--backend", "lab,fsdp3"], "--backend 'fsdp3' is refused"),
    ],
)
def test_what_cannot_be_toggled_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("what", ["live", "step", "wire", "metering", "toggle", "soak", "checkpoint", "load"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", what, "--json", "/nowhere/at/all.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.nightly
def test_steps_of_two_ranks_are_predicted_from_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few strategies over both wires; one of them is refused by them, and left out."""
    wanted = many.specs(2)
    few = {name: wanted[name] for name in ("lab", "fsdp2 accumulate 4", "lab 0.03 GB/s")}
    few["lab fast"] = wanted["lab"].replace(link="1 TB/s")
    monkeypatch.setattr(many, "specs", lambda ranks: few)
    monkeypatch.setattr(many, "_calibrated", functools.cache(many._calibrated))  # before and after: once is enough here
    file = tmp_path / "many.json"
    assert developers(["many", "--ranks", "2", "--passes", "1", "--json", str(file)]) == 0
    assert "errors, 2 ranks, Gloo: mean" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [(r["wire"], r["name"]) for r in found["rows"]] == [
        (w, n) for w in many.WIRES for n in few if n != "lab fast"
    ]
    # One pass beside other tests is noise; the bench's own are four, on a quiet machine.
    assert all(-0.9 < r["error"] < 9 for r in found["rows"])
    sent_s = 3 * 0.5 * 4e6 / 30e6  # half of a million parameters, gathered twice and reduced
    assert all(0.6 * sent_s < r["predicted_s"] < 20 * sent_s for r in found["rows"] if r["name"] == "lab 0.03 GB/s")


# -- bench step: what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0"], "--ranks 0 is refused"),
        (["--steps", "0"], "--steps 0 is refused"),
        (["--warmup", "0"], "--warmup 0 is refused"),
        (["--seq-len", "1"], "--seq-len 1 is refused; give a whole number of 2 or more"),
        (["--micro-batch", "-1"], "--micro-batch -1 is refused"),
        (["--width", "500"], "--heads 8 does not divide --width 500"),
        (["--model", "gpt2-2m"], "--model gpt2-2m is refused; give one of gpt2-1m, "),
        (["--model", "bert-1m"], "--model bert-1m is refused"),
        (["--model", "gpt2-1m", "--seq-len", "2000"], "--seq-len 2000 is refused; gpt2-1m takes 1024 or fewer"),
        (["--only", "fsdp2,fsdp3"], "--only: there is no form fsdp3; choose from lab"),
        (["--only", ","], "--only names no form"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--device", "cpu", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--ranks", "two"], ["--sharding", "zero1"], ["--precision", "fp16"], ["--step", "5"]]
)
def test_what_argparse_refuses(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "step", *arguments])


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert place(2, None) == ("cpu", "cpu")
    with pytest.raises(PlanError, match="--device cuda"):
        place(2, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert place(2, None) == ("cpu", "cpu"), "one for each rank, or none"
    assert place(2, "cuda") == ("cuda:0", "cuda:0")
    assert BenchPlan(devices=place(2, "cuda")).shares_gpu and not BenchPlan(devices=place(2, "cpu")).shares_gpu


def test_a_peers_name_stands_for_its_forms() -> None:
    assert forms_named("ddp") == ("ddp-raw", "ddp-wire")
    assert forms_named("ddp-wire, lab") == ("lab", "lab-again", "ddp-wire"), "in the order of turns"
    assert forms_named("fsdp2,ddp,lab") == STEP
    assert forms_named("lab-fused,lab") == ("lab", "lab-again", "lab-fused"), "that one by its name alone"


# -- bench step: the figures -----------------------------------------------------------------------------------------


def test_a_spread_is_a_median_and_two_deciles() -> None:
    assert spread([float(x) for x in range(11)]) == Spread(median=5.0, p10=1.0, p90=9.0, n=11)
    assert spread([3.0]) == Spread(median=3.0, p10=3.0, p90=3.0, n=1)


def measured(**seconds: list[float]) -> BenchResult:
    named_seconds = {form.replace("_", "-"): s for form, s in seconds.items()}
    losses = {form: [5.0, 6.0] for form in named_seconds}
    return BenchResult(
        seconds=named_seconds,
        losses=losses,
        gradient_norms=dict.fromkeys(named_seconds, 1.0),
        peak_bytes={},
        shared=frozenset(form for form in named_seconds if not form.endswith("-raw")),
    )


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    ranks = [
        {"lab": {"seconds": [1.0, 4.0], "loss": 5.0, "squared_norm": 9.0, "peak_bytes": 3, "is_shared": True}},
        {"lab": {"seconds": [2.0, 3.0], "loss": 6.0, "squared_norm": 16.0, "peak_bytes": 4, "is_shared": True}},
    ]
    found = BenchResult.of_ranks(ranks)
    assert found.seconds == {"lab": [2.0, 4.0]} and found.losses == {"lab": [5.0, 6.0]}
    assert found.gradient_norms == {"lab": 5.0} and found.peak_bytes == {"lab": 4}


def test_the_parts_of_an_overhead_add_up_to_it() -> None:
    """But for the ledger's share. The vote is as long as on the rank that waits least for the other."""
    ranks = [
        {
            "parts": {"norm": [0.1, 0.1, 0.3], "vote": vote, "measuring": [0.2] * 3, "events": [0.0] * 3},
            "ledger_s": [ledger_s],
        }
        for vote, ledger_s in (([0.9, 0.1, 0.2], 60.0), ([0.1, 0.1, 0.4], 9.0))
    ]
    forms: list[dict[str, dict[str, Any]]] = [{}, {}]
    plain = {"loss": 5.0, "squared_norm": 1.0, "peak_bytes": 0, "is_shared": False}
    for rank, of in zip(ranks, forms, strict=True):
        of["ddp-bare"] = of["ddp-bare-again"] = {"seconds": [1.0, 2.0, 3.0], **plain}
        of["ddp-metered"] = {"seconds": [2.0, 3.0, 4.0], **plain, **rank}
    parts = overheads([BenchResult.of_ranks(forms)], "ddp")
    ledger = parts.pop("ledger, over 1000 steps")
    assert parts == pytest.approx({"norm": 0.1, "vote": 0.1, "measuring": 0.2, "events": 0.0, "rest": 0.6})
    assert sum(parts.values()) == pytest.approx(1.0) and ledger == pytest.approx(57e-3)


def test_ratios_are_of_the_same_round_and_against_the_fastest_form() -> None:
    found = measured(
        lab=[1.0, 10.0, 4.0],
        lab_again=[1.0, 20.0, 4.0],
        fsdp2_raw=[4.0, 40.0, 8.0],
        fsdp2_wire=[2.0, 40.0, 7.0],
        ddp_raw=[2.0, 5.0, 4.0],
    )
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
    assert "; its median is 0.500 to 1.000 (95 %); lab-again does the same as lab" in printed


def test_memory_is_compared_where_it_was_counted() -> None:
    found = measured(lab=[1.0], fsdp2_raw=[2.0], ddp_raw=[3.0])
    assert found.memory_ratios == {}
    peaks = {"lab": 30, "fsdp2-raw": 40, "ddp-raw": 60}
    on_gpu = BenchResult(
        seconds=found.seconds, losses=found.losses, gradient_norms=found.gradient_norms, peak_bytes=peaks
    )
    assert on_gpu.memory_ratios == {"lab/fsdp2": 0.75, "lab/ddp": 0.5}
    lines: list[str] = []
    step_figures(on_gpu, {}, lines.append)
    assert "lab/fsdp2, peak allocated memory: 0.750" in lines


def test_without_the_lab_there_are_times_and_no_ratios() -> None:
    found = measured(fsdp2_raw=[2.0], ddp_raw=[1.0])
    assert found.ratios == found.control == {}
    lines: list[str] = []
    assert step_figures(found, {}, lines.append)["ratios"] == {}
    assert "form/fsdp2-raw" in "\n".join(lines)


@pytest.mark.parametrize("other", [5.01, float("nan"), float("inf")])
def test_a_form_that_trains_something_else_fails_the_run(other: float) -> None:
    found = measured(lab=[1.0], fsdp2_raw=[1.0])
    found.check_same_work("fp32")
    apart = BenchResult(
        seconds=found.seconds,
        losses={**found.losses, "lab": [5.0, other]},
        gradient_norms=found.gradient_norms,
        peak_bytes={},
    )
    with pytest.raises(BenchError, match="lab did other work than fsdp2-raw"):
        apart.check_same_work("fp32")
    norms = {"lab": 2.0, "fsdp2-raw": 1.0}
    scaled = BenchResult(seconds=found.seconds, losses=found.losses, gradient_norms=norms, peak_bytes={})
    with pytest.raises(BenchError, match="lab did other work"):
        scaled.check_same_work("bf16")


# -- bench step: real ranks ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_step_measures_every_form_and_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    assert main(["bench", "step", *TINY, "--steps", "2", "--warmup", "1", "--json", str(file)]) == 0
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    assert list(written) == [
        "ratios",
        "control",
        "environment",
        "step_time_s",
        "fastest",
        "peak_bytes",
        "kernels",
        "memory_ratios",
    ]
    peers = {f"lab/{peer}{group}" for peer in ("fsdp2", "ddp") for group in ("", "-raw", "-shared")}
    assert set(written["ratios"]) == peers and set(written["control"]) == {"lab/lab"}
    assert set(written["step_time_s"]) == set(STEP) and all(form in printed for form in STEP)
    assert all(time_s["n"] == 2 and 0 < time_s["p10"] <= time_s["p90"] for time_s in written["step_time_s"].values())
    assert f"{written['ratios']['lab/ddp']['median']:.3f}" in printed
    assert written["environment"]["width"] == 32 and written["environment"]["devices"] == ["cpu", "cpu"]
    assert not ranks_of(psutil.Process())


@pytest.mark.slow
def test_metering_is_measured_beside_nothing_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metering.json"
    few = ["--launches", "2", "--steps", "10"]
    assert main(["bench", "metering", *TINY, "--backend", "ddp", *few, "--json", str(file)]) == 0
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    metered = written["ratios"]["metered/bare"]
    assert metered["n"] == 20 and metered["p10"] <= metered["median"] <= metered["p90"]
    assert len(metered["launches"]) == 2 and metered["mean"] == pytest.approx(sum(metered["launches"]) / 2)
    assert metered["standard_error"] == pytest.approx(abs(metered["launches"][0] - metered["launches"][1]) / 2)
    assert (
        f"metered/bare: mean of launches {metered['mean']:.4f}" in printed and "control bare/bare: mean of" in printed
    )
    assert "largest difference of losses and gradient norms between forms: 0.0e+00" in printed, (
        "measuring changes no bit"
    )
    assert set(written["control"]) == {"bare/bare"} and len(written["step_time_s"]) == 3
    came = int(printed.split(" events published")[0].rsplit("\n", 1)[1])
    assert came > 20, "of two ranks, in 13 rounds of each launch, but for those of the last moment"
    assert ", 0 of them with spans" not in printed
    parts = written["parts_s"]
    assert list(parts) == ["norm", "vote", "measuring", "events", "rest", "ledger, over 1000 steps"]
    assert all(parts[name] > 0 for name in parts if name != "rest")
    assert all(f"  {name}: {1e3 * seconds:.3f} ms" in printed for name, seconds in parts.items())


@pytest.mark.nightly
def test_checkpoints_are_measured_beside_plain_dcp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "checkpoint.json", tmp_path / "here"
    few = [*TINY, "--rounds", "2", "--folder", str(folder), "--json", str(file)]
    assert main(["bench", "checkpoint", *few]) == 0
    written, printed = json.loads(file.read_text()), capsys.readouterr().out
    for name in ("lab/dcp", "dcp/dcp"):
        spread = {**written["ratios"], **written["control"]}[name]
        assert spread["n"] == 2 and 0 < spread["p10"] <= spread["p90"]
    assert f"lab/dcp, save + load: {written['ratios']['lab/dcp']['median']:.3f}" in printed
    assert written["stall_s"]["median"] > 0 and written["step beside/alone"]["n"] == 2
    assert not list(folder.iterdir()), "what it wrote is gone"
    assert main(["bench", "checkpoint", "--rounds", "0"]) == 2
    assert "--rounds 0 is refused" in capsys.readouterr().err


@pytest.mark.nightly
def test_loading_is_measured_beside_from_pretrained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "load.json", tmp_path / "here"
    few = ["--model", "gpt2-1m", "--ranks", "2", "--rounds", "2", "--folder", str(folder), "--json", str(file)]
    assert main(["bench", "load", *few]) == 0
    written, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert written["model_bytes"] == 4 * 973_568 and not list(folder.iterdir())
    for name in ("lab/plain", "plain/plain"):
        spread = {**written["ratios"], **written["control"]}[name]
        assert spread["n"] == 2 and 0 < spread["p10"] <= spread["p90"]
    assert f"lab/plain, first step: {written['ratios']['lab/plain']['median']:.3f}" in printed
    assert set(written["host memory/model"]) == {"lab", "plain", "plain-again"}
    assert main(["bench", "load", "--rounds", "0"]) == 2 and main(["bench", "load", "--model", "bert-1m"]) == 2
    assert "--rounds 0 is refused" in capsys.readouterr().err


@pytest.mark.slow
def test_measuring_changes_no_bit_of_any_backend() -> None:
    """All of them in one launch: a form is compared with the two others of its backend."""
    forms = tuple(form for peer in METERED_PEERS for form in METERING[peer])
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocab": 64, "seq_len": 8}
    plan = BenchPlan(**sizes, steps=10, forms=forms, devices=("cpu", "cpu"))
    spans: list[int] = []
    found = measure(plan, lambda events: spans.extend(len(event["spans"]) for event in events))
    for peer in METERED_PEERS:
        assert all(len(found.seconds[form]) == 10 for form in METERING[peer])
        told = [(found.losses[form], found.gradient_norms[form]) for form in METERING[peer]]
        assert told[0] == told[1] == told[2], peer
    assert len(spans) > 60, "of two ranks, in 13 rounds of four metered forms, but for those of the last moment"
    assert sum(count > 0 for count in spans) >= 2 * len(METERED_PEERS), "the first step of each is traced"


@pytest.mark.slow
def test_a_rank_that_fails_says_why() -> None:
    plan = BenchPlan(layers=1, width=32, heads=2, vocab=64, seq_len=8, forms=("ddp-raw",), devices=("cpu", "cpu:x"))
    with pytest.raises(BenchError, match="rank 1 failed: .*cpu:x"):
        measure(plan)
    assert not ranks_of(psutil.Process())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "after_s"), [(signal.SIGINT, 0), (signal.SIGKILL, 0), (signal.SIGKILL, 6)])
def test_no_rank_outlives_its_launcher(number: signal.Signals, after_s: float) -> None:
    command = [sys.executable, "-m", "fsdp_lab", "bench", "step", *TINY, "--steps", "100000", "--only", "ddp-raw"]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        deadline = time.monotonic() + 30
        while len(ranks := ranks_of(psutil.Process(launcher.pid))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(after_s)  # just started, and at work
        assert len(ranks) == 2 and launcher.poll() is None
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


@pytest.mark.parametrize(("n", "place"), [(3, 0), (5, 0), (6, 0), (20, 5), (30, 9)])
def test_the_interval_of_a_median_is_that_of_order_statistics(n: int, place: int) -> None:
    """As tables of the binomial have it: of 20 values the sixth and the fifteenth."""
    assert interval([float(i) for i in reversed(range(n))]) == (place, n - 1 - place)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["class", "--labs", "1"], "--labs 1 is refused; give a whole number of 2 or more"),
        (["many", "--ranks", "1,2"], "--ranks 1,2 is refused; give numbers of 2 or more"),
        (["many", "--passes", "0"], "--passes 0 is refused"),
    ],
)
def test_benches_for_developers_refuse_as_the_others_do(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert developers(arguments) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.slow
def test_a_family_of_transformers_is_tried_under_every_backend() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.bench", "families", "gpt2"], capture_output=True, text=True,
                          cwd=Path(__file__).parents[2])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "trains: 1 of 1" in done.stdout and "under every backend:\n      gpt2" in done.stdout
