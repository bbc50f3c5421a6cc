"""Benches for developers, small: what they print is what they write. On ranks of the pool, but for those on a lab."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench import checkpoint, families, labs, load, metering, switch, tour
from tests.bench.__main__ import main
from tests.bench.in_pool import launched_in
from tests.pool import Pool

TINY = ["--layers", "2", "--width", "32", "--heads", "2", "--vocab", "64", "--seq-len", "8", "--device", "cpu"]


@pytest.fixture
def ranks(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint, load, metering, switch, tour):
        monkeypatch.setattr(module, "launch_here", launched_in(pool))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["toggle", "--pairs", "1"], "--pairs 1 is refused"),
        (["toggle", "--relaunches", "0"], "--relaunches 0 is refused"),
        (["soak", "--toggles", "50"], "--toggles 50 is refused; give 110 or more"),
        (["soak", "--backend", "lab,fsdp3"], "--backend 'fsdp3' is refused"),
        (["metering", "--launches", "1", "--device", "cpu"], "--launches 1 is refused; give 2 or more"),
        (["metering", "--backend", "lab,x", "--device", "cpu"], "--backend 'x' is refused"),
        (["checkpoint", "--rounds", "0"], "--rounds 0 is refused"),
        (["load", "--model", "bert-1m"], "--model bert-1m is refused"),
        (["many", "--ranks", "1,2"], "--ranks 1,2 is refused; give numbers of 2 or more"),
        (["many", "--passes", "0"], "--passes 0 is refused"),
        (["families", "gpt3"], "gpt3 is no family"),
        (["live", "--json", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


# -- on a lab ----------------------------------------------------------------------------------------------------------


def test_the_tour_goes_through_every_ordered_pair_once() -> None:
    places = labs.tour(10)
    pairs = list(itertools.pairwise(places))
    assert len(pairs) == len(set(pairs)) == 90 and places[0] == places[-1]
    assert len(labs.route(None)) == 181 and len(labs.route(7)) == 8
    assert all(a != b for a, b in itertools.pairwise(labs.route(500)))


def test_growth_is_of_medians_from_the_hundredth_toggle_on() -> None:
    calm, risen = [100, 90, 110, 100, 400], [102, 102, 1000, 90, 102]
    assert labs.growth(calm, risen) == {"from_bytes": 100, "to_bytes": 102, "growth": pytest.approx(0.02)}


@pytest.mark.slow
def test_memory_is_compared_with_fsdp2_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    assert main(["memory", "--model", "gpt2-1m", "--ranks", "2", "--json", str(file)]) == 0
    rows, printed = json.loads(file.read_text())["rows"], capsys.readouterr().out
    assert len(rows) == 4 and "lab/fsdp2: at most" in printed
    for row in rows:
        assert row["lab/fsdp2"] == pytest.approx(row["lab_bytes"] / row["fsdp2_bytes"])
        assert row["lab/theory"] == pytest.approx(row["lab_bytes"] / row["theory_bytes"])
        assert row["lab/fsdp2"] <= 1.0 and row["lab/plan"] <= 1.02 and row["lab/theory"] <= 1.02
        assert f"{row['lab/fsdp2']:.4f}" in printed


# -- on ranks of their own ---------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("arguments", "key", "n"),
    [
        (["live", "--model", "gpt2-1m", "--rounds", "1"], "seconds", 4),
        (["toggle", "--model", "gpt2-1m", "--pairs", "4", "--relaunches", "1"], "seconds", 2),
        (["plan", "--rounds", "1", "--seq-len", "16"], "rows", 10),
        (["checkpoint", *TINY, "--rounds", "2"], "stall_s", 4),
        (["load", "--model", "gpt2-1m", "--ranks", "2", "--rounds", "2"], "host memory/model", 3),
    ],
)
def test_a_measurement_writes_what_it_prints(
    arguments: list[str], key: str, n: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "bench.json", tmp_path / "here"
    where = ["--folder", str(folder)] if arguments[0] in ("checkpoint", "load") else []
    assert main([*arguments, *where, "--json", str(file)]) == 0
    written, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert len(written[key]) == n and {"cores", "torch"} < written["environment"].keys()
    for values in {**written.get("ratios", {}), **written.get("control", {})}.values():
        assert 0 < values["p10"] <= values["p90"] and f"{values['median']:.3f}" in printed
    assert not folder.exists() or not list(folder.iterdir()), "what it wrote is gone"


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_metering_is_measured_beside_nothing_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metering.json"
    few = ["--launches", "2", "--steps", "10", "--backend", "ddp,lab"]
    assert main(["metering", *TINY, *few, "--json", str(file)]) == 0
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    assert list(written["backends"]) == ["ddp", "lab"] and written["environment"]["width"] == 32
    of_ddp = written["backends"]["ddp"]
    metered = of_ddp["ratios"]["metered/bare"]
    assert metered["n"] == 20 and metered["p10"] <= metered["median"] <= metered["p90"]
    assert len(metered["launches"]) == 2 and metered["mean"] == pytest.approx(sum(metered["launches"]) / 2)
    assert metered["standard_error"] == pytest.approx(abs(metered["launches"][0] - metered["launches"][1]) / 2)
    assert f"metered/bare: mean of launches {metered['mean']:.4f}" in printed
    assert set(of_ddp["control"]) == {"bare/bare"} and "control bare/bare: mean of" in printed
    assert len(of_ddp["step_time_s"]) == 3 and of_ddp["environment"]["backend"] == "ddp"
    came = int(printed.split(" events published")[0].rsplit("\n", 1)[1])
    assert came > 60, "of two ranks, in 13 rounds of two forms in each launch, but for those of the last moment"
    assert ", 0 of them with spans" not in printed
    parts = of_ddp["parts_s"]
    assert list(parts) == ["norm", "vote", "measuring", "events", "rest", "ledger, over 1000 steps"]
    assert all(parts[name] > 0 for name in parts if name != "rest")
    assert all(f"  {name}: {1e3 * seconds:.3f} ms" in printed for name, seconds in parts.items())


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_measuring_changes_no_bit_of_any_backend() -> None:
    """All of them in one launch: a form is compared with the two others of its backend."""
    sizes = {"layers": 2, "width": 32, "heads": 2, "vocab": 64, "seq_len": 8}
    names = {peer: [form.name for form in metering.forms_of(peer)] for peer in metering.PEERS}
    forms = tuple(itertools.chain(*names.values()))
    result = metering.measure(metering.Plan(**sizes, steps=4, forms=forms, devices=("cpu", "cpu")), []).result
    for peer, of_peer in names.items():
        told = [(result.losses[form], result.gradient_norms[form]) for form in of_peer]
        assert told[0] == told[1] == told[2], peer


def test_the_parts_of_an_overhead_add_up_to_it() -> None:
    """But for the ledger's share. The vote is as long as on the rank that waits least for the other."""
    plain = {"loss": 5.0, "squared_norm": 1.0, "peak_bytes": 0, "is_shared": False}
    ranks: list[dict[str, dict[str, Any]]] = []
    for vote, ledger_s in (([0.9, 0.1, 0.2], 60.0), ([0.1, 0.1, 0.4], 9.0)):
        parts = {"norm": [0.1, 0.1, 0.3], "vote": vote, "measuring": [0.2] * 3, "events": [0.0] * 3}
        bare = {"seconds": [1.0, 2.0, 3.0], **plain}
        metered = {"seconds": [2.0, 3.0, 4.0], **plain, "parts": parts, "ledger_s": [ledger_s]}
        ranks.append({"ddp-bare": bare, "ddp-metered": metered, "ddp-bare-again": bare})
    seconds = metering.overheads([metering.Launch.of_ranks(ranks)], "ddp")
    ledger = seconds.pop("ledger, over 1000 steps")
    assert seconds == pytest.approx({"norm": 0.1, "vote": 0.1, "measuring": 0.2, "events": 0.0, "rest": 0.6})
    assert sum(seconds.values()) == pytest.approx(1.0) and ledger == pytest.approx(57e-3)


@pytest.mark.slow
def test_a_family_of_transformers_is_tried_under_every_backend(pool: Pool) -> None:
    outcome = families._outcome(pool, "gpt2")
    assert families.table({"gpt2": outcome}).startswith("\ntrains: 1 of 1\n  under every backend:\n      gpt2")


# -- for a GPU ---------------------------------------------------------------------------------------------------------

GIB = 1 << 30


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_switches_and_the_tour_are_rehearsed_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--width", "64", "--layers", "3", "--vocab", "384"]
    for arguments, key in ((["switch", *few], "switches"), (["tour"], "differences")):
        file = tmp_path / "bench.json"
        assert main([*arguments, "--device", "cpu", "--json", str(file)]) == 0
        assert len(json.loads(file.read_text())[key]) >= 3
    printed = capsys.readouterr().out
    assert "fsdp1 to lab" in printed and "slow motion: " in printed and "DIFFERENT" not in printed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peak_bytes": int(16.8 * GIB)}, "fsdp2 to fsdp1 takes too much"),
        ({"after_checksum": 4}, "fsdp2 to fsdp1 changes"),
        ({"peak_bytes": int(16.3 * GIB)}, ""),
    ],
)
def test_a_switch_that_takes_too_much_or_loses_a_bit_fails(
    changes: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {
        "before_bytes": 12 * GIB,
        "after_bytes": 16 * GIB,
        "peak_bytes": 16 * GIB,
        "seconds": 1.0,
        "before_checksum": 3,
        "after_checksum": 3,
    }
    told = {
        "layers": 2,
        "parameters": GIB,
        "unit_bytes": GIB // 8,
        "limit_bytes": 20 * GIB,
        "switches": [made, made, made | changes, made],
    }
    monkeypatch.setattr(switch, "launch_here", lambda *given, **more: [told])
    assert main(["switch", "--device", "cpu", "--layers", "2"]) == (1 if said else 0)
    told_lines = capsys.readouterr()
    assert said in told_lines.err
    assert "16.4 GiB" in told_lines.out, "the bound: the larger one, and a unit with its moments"


@pytest.mark.parametrize(("free_bytes", "layers"), [(1 << 30, 3), (6_000_000, 2), (1, 1)])
def test_the_model_that_is_switched_is_as_deep_as_its_step_fits(
    free_bytes: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 1 << 30))
    config, parameters, unit_bytes = switch.deepest(switch.llama(64, 3, 384), torch.device("cuda:0"))
    block = 4 * 64 * 64 + 3 * 64 * 256 + 2 * 64
    assert (config["num_hidden_layers"], parameters) == (layers, layers * block + 384 * 64 + 64)
    assert unit_bytes == 4 * block


def test_a_switch_runs_under_a_limit_which_is_lifted_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: said.append(fraction))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    with pytest.raises(RuntimeError, match="out of memory"), switch.limited(torch.device("cuda:0"), 20 * GIB):
        raise RuntimeError("out of memory")
    assert said == [0.25, 1.0]
