"""`fsdp-lab plan`: one plan, a product of them, what is found, a table, a page, and what is refused."""

import base64
import json
import math
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_lab.base.events import Role
from fsdp_lab.cli.main import main
from fsdp_lab.planner.devices import DEVICES

SEVEN = ["plan", "--model", "llama-7b", "--hardware", "a100-80", "--precision", "bf16"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_one_plan_says_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, *SEVEN, "--ranks", "128", "--hosts", "16", "--sharding", "full_shard", "--seq-len", "4096",
                 "--micro-batch", "2")  # fmt: skip
    (plan,) = found["plans"]
    assert (plan["ranks"], plan["hosts"], plan["parameters"]) == (128, 16, 6_738_415_616)
    assert plan["tokens_per_s"] == pytest.approx(128 * 2 * 4096 / plan["step_time_s"])
    assert 0.3 < plan["mfu"] < 0.75 and plan["fits"] is (plan["margin_bytes"] >= 0)
    assert sum(plan["memory_at_peak_bytes"].values()) == plan["peak_memory_bytes"] <= plan["reserved_memory_bytes"]
    assert [p["ranks"] for p in found["scaling"]] == [1 << i for i in range(13)]
    assert found["limit"].endswith("800 Gb/s a host") and "network" in plan["assumed"]
    assert main([*SEVEN, "--ranks", "16", "--seq-len", "2048"]) == 0
    drawn = capsys.readouterr().out
    assert "6.74 billion parameters, lab full_shard, bf16, on 16 x a100-80 in 2 hosts at 800 Gb/s" in drawn
    assert "a host: 4 x 2,048 tokens a rank, global batch 131,072 tokens\n" in drawn and "by default" not in drawn
    assert all(said in drawn for said in ("bound by", "to spare", "4,096", "activations", "the global batch grows"))


def test_a_product_is_a_table_and_what_cannot_be_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SEVEN, "--seq-len", "1024", "--ranks", "8,16", "--sharding", "hybrid_shard,no_shard", "--backend=fsdp2"]
    found = said(capsys, *asked)
    assert [(p["ranks"], p["spec"]["strategy"]["shard_size"]) for p in found["plans"]] == [(8, None), (16, 8)]
    assert [r["reason"].split(":")[0] for r in found["refused"]] == ["strategy.sharding"] * 2
    assert main(asked) == 0
    assert "refused: sharding: no_shard is not available with fsdp2" in capsys.readouterr().out


@pytest.mark.slow
def test_the_best_strategy_the_largest_model_and_the_fewest_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*SEVEN, "--ranks", "16", "--seq-len", "4096", "--micro-batch", "4"]
    best = said(capsys, *asked, "--find", "strategy")
    assert best["considered"] > 100
    times = [one["step_time_s"] / one["fits_probability"] for one in best["top"]]
    assert len(times) == 5 and times == sorted(times) and not best["top"][0]["is_apart"]
    assert all(one["fits"] and one["why"] for one in best["top"])
    workloads = [one["spec"]["workload"] for one in best["top"]]
    assert {w["micro_batch"] * w["accumulate"] for w in workloads} == {4}
    largest = said(capsys, *asked, "--find", "largest")["largest"]
    assert largest["model"] == "llama-13b" and largest["blocks"] == 40 and largest["parameters"] > 1.2e10
    assert 1 < said(capsys, *asked, "--find", "fewest")["fewest"]["ranks"] <= 8
    assert main([*asked, "--memory", "2", "--find", "strategy"]) == 1
    assert "None of " in capsys.readouterr().out


def test_a_model_that_needs_more_gpus_than_samples_gets_a_larger_batch(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama-70b", "--hardware", "h100", "--find", "fewest"]
    assert said(capsys, *asked)["fewest"] == {"ranks": 32, "hosts": 4, "global_batch": 128}
    assert said(capsys, *asked, "--global-batch", "512")["fewest"]["ranks"] == 32
    assert main([*asked, "--global-batch", "4"]) == 1
    assert "does not fit on 4,096 x h100 or fewer; give a larger --global-batch" in capsys.readouterr().out


def test_a_training_has_a_time_and_a_price_and_the_cheapest_gpus_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "gpt2-124m", "--precision", "bf16", "--seq-len", "512", "--tokens", "15B"]
    (plan,) = said(capsys, *asked, "--hardware", "h100", "--price", "2.49")["plans"]
    assert plan["training_s"] == pytest.approx(15e9 / plan["tokens_per_s"])
    assert plan["gpu_hours"] == pytest.approx(8 * plan["training_s"] / 3600)
    assert plan["cost"] == pytest.approx(2.49 * plan["gpu_hours"])
    assert plan["cost_high"] / plan["cost"] == pytest.approx(plan["step_time_s_high"] / plan["step_time_s"])
    assert main([*asked, "--hardware", "h100"]) == 0
    wanted = r"(?s)15.0 billion tokens take [\d.]+ h \(.* GPU hours\..*\nnote: by default --micro-batch 4; time"
    assert re.search(wanted, capsys.readouterr().out)
    cheapest = [*asked, "--find", "cheapest", "--hardware", "t4,h100", "--ranks", "1,2", "--precision", "fp16"]
    found = said(capsys, *cheapest, "--price", "0.01,2.49")["cheapest"]
    assert found == sorted(found, key=lambda p: p["cost"] / p["fits_probability"]) and len(found) == 4
    assert [(p["hardware"], p["price_per_gpu_hour"]) for p in found[:2]] == [("t4", 0.01)] * 2
    assert main([*cheapest, "--hardware", "h100"]) == 0
    assert "without a price those of the fewest GPU hours come first" in capsys.readouterr().out
    days = found[0]["training_s"] / 86_400 - 0.01
    quick = said(capsys, *cheapest, "--price", "0.01,2.49", "--days", f"{days}")["cheapest"]
    assert found[0] not in quick and quick and all(p["training_s"] <= days * 86_400 for p in quick)


def test_hardware_is_listed_and_may_be_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--hardware", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n{name} " in listed for name in DEVICES) and "Ada whitepaper" in listed
    small = ["plan", "--model", "gpt2-124m", "--precision", "bf16", "--ranks", "1"]
    (known,) = said(capsys, *small, "--hardware", "RTX 4090")["plans"]
    (custom,) = said(capsys, *small, "--hardware", "165.2/23.6/1.008")["plans"]
    assert custom["memory_limit_bytes"] == known["memory_limit_bytes"]
    assert custom["mfu"] == pytest.approx(known["mfu"], rel=0.2)


def test_a_preset_is_planned_without_torch() -> None:
    shaped = "from fsdp_lab.planner.shapes import shape_for; shape_for('llama-7b'); assert 'numpy' not in sys.modules"
    code = f"import sys;{shaped}; from fsdp_lab.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *SEVEN], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False"


# -- a page (tests/browser/test_what_if.py opens it) -------------------------------------------------------------------
LISTS = ["--hardware", "t4,h100", "--ranks", "1,16", "--micro-batch", "2", "--precision", "fp16,bf16"]


def test_a_page_has_the_plan_of_each_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    file.write_text("of yesterday")
    rest = ["--model", "llama-1b", "--seq-len", "1024", "--memory", "24", "--global-batch", "64"]
    assert main(["plan", "--page", str(file), *rest, *LISTS]) == 0
    assert re.search(r"written: .*page.html, 8 combinations, [\d.]+ KiB", capsys.readouterr().out)
    (text,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', file.read_text(encoding="utf-8"))
    found: dict[str, Any] = json.loads(text)
    columns = {n: np.frombuffer(base64.b64decode(packed), "<f4").tolist() for n, packed in found["columns"].items()}
    axes = {axis["name"]: axis["labels"] for axis in found["axes"]}
    assert [*axes][:3] == ["model", "hardware", "world_size"] and axes["precision"] == ["fp16", "bf16"]
    options = ("--hardware", "--ranks", "--micro-batch", "--precision")
    lists = product(("t4", "h100"), ("1", "16"), ("2",), ("fp16", "bf16"))
    for cell, words in enumerate(lists):
        refusal = found["refusals"][int(number)] if (number := columns["refused"][cell]) >= 0 else None
        if words[0] == "t4" and words[3] == "bf16":
            assert refusal and refusal["words"] == "precision: a t4 has no matrix products in bf16; use fp16, fp32"
            assert math.isnan(columns["step_time_s"][cell])
            continue
        asked = [word for pair in zip(options, words, strict=True) for word in pair]
        (plan,) = said(capsys, "plan", *rest, *asked)["plans"]
        wanted = {name: float(value) for name, value in plan.items() if isinstance(value, int | float)}
        wanted |= {f"memory_at_peak_bytes.{role}": plan["memory_at_peak_bytes"][role.value] for role in Role}
        assert {name: columns[name][cell] for name in wanted} == pytest.approx(wanted, rel=1e-6)
        assert found["texts"]["binding"][int(columns["binding"][cell])] == plan["binding"]
        assert columns["global_batch"][cell] == 64 and refusal is None
    assert {len(column) for column in columns.values()} == {8}
    assert found["options"] == "--memory 24.0 --global-batch 64"


def test_a_page_without_any_answer_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.html"
    assert main(["plan", "--page", str(file), "--hardware", "t4", "--precision", "bf16", "--ranks", "1,8"]) == 2
    assert "a t4 has no matrix products in bf16" in capsys.readouterr().err and not file.exists()
