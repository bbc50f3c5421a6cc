"""An exported script gives the run's losses, bit for bit, and does not know the lab."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.spec import Precision, Spec
from fsdp_lab.export import export_script, text_of
from tests.export.ranks import exported, in_the_lab, losses_of, spec, torchrun
from tests.pool import Pool

STEPS = 3
DDP = {"backend": "ddp", "sharding": "no_shard"}
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 384,
         "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "vocab_size": 384, "max_position_embeddings": 64}  # fmt: skip


def same(pool: Pool, folder: Path, cases: dict[str, dict[str, Any]], world_size: int) -> dict[str, Any]:
    specs = {name: spec(world_size, **changes) for name, changes in cases.items()}
    lab = in_the_lab(pool, specs, STEPS)
    assert all(len(set(losses)) == STEPS for losses in lab.values())  # it learns
    assert exported(folder, specs, STEPS) == lab
    return lab


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_the_labs_bit_for_bit_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 40)
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / "b" / "two.txt").write_bytes(b"of the second " * 300)
    (folder / "one.txt").write_bytes(b"of the first " * 300)
    (folder / "zero.bin").write_bytes(b"\0not text" * 300)
    cases: dict[str, dict[str, Any]] = {
        "fsdp2": {"backend": "fsdp2", "clip_norm": 0.1, "seed": 3, "accumulate": 4, "sync": 2,
                  "optimizer_args": {"betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": True}},
        "fsdp1": {"backend": "fsdp1", "accumulate": 3, "sync": 2, "sharding": "shard_grad_op", "data": str(folder)},
        "ddp": {**DDP, "accumulate": 3, "sync": 2, "clip_norm": 0.1, "optimizer": "sgd", "lr": 1.0,
                "optimizer_args": {"momentum": 0.5, "nesterov": True}},
        "lab": {"recompute": "every:2", "wrap": "every:2", "forward_prefetch": 1, "backward_prefetch": 2,
                "accumulate": 2, "sync": "last", "data": str(text)},
        "lab_offload": {"sharding": "shard_grad_op", "offload": "all", "wrap": "min_params:3000", "model": BERT},
        "lab_no_shard": {"sharding": "no_shard"},
        "fsdp1_fused": {"backend": "fsdp1", "seed": 7, "optimizer_args": {"fused": True}},  # sharded alike
        "fsdp2_bf16": {"backend": "fsdp2", "precision": "bf16"},
        "fsdp2_bf16_buffers": {"backend": "fsdp2", "precision": "bf16-pure", "model": LLAMA},
        "ddp_bf16_buffers": {**DDP, "precision": "bf16-pure", "model": LLAMA, "accumulate": 3, "sync": 2},
    }  # fmt: skip
    lab = same(pool, tmp_path, cases, 2)
    assert len(set(map(tuple, lab.values()))) == len(
        cases
    )  # other work gives other losses: the comparison is not blind


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_the_labs_bit_for_bit_where_the_order_of_a_sum_matters(pool: Pool, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "lab": {"reshard_size": 2},
        "fsdp1": {"backend": "fsdp1"},
        "hybrid": {"backend": "fsdp2", "sharding": "hybrid_shard", "clip_norm": 0.1},
    }
    same(pool, tmp_path, cases, 4)
    same(pool, tmp_path, {"ddp_of_three": DDP}, 3)  # whose mean is no power of two


@pytest.mark.slow
def test_as_a_user_runs_it(pool: Pool, tmp_path: Path) -> None:
    """By torchrun itself, with the options of the script."""
    asked = spec(seed=5)
    script = export_script(asked.replace(seed=0), tmp_path / "train.py")
    printed = torchrun(2, script, "--steps", "3", "--seed", "5")
    assert [line.split()[:2] for line in printed.splitlines() if line] == [["step", str(i)] for i in range(3)]
    assert losses_of(printed) == in_the_lab(pool, {"it": asked}, 3)["it"]


EVERY = [
    spec(),
    spec(4, sharding="hybrid_shard", compile=True, recompute="full", precision="bf16-pure", clip_norm=1.0),
    spec(8, backend="fsdp2", sharding="hybrid_shard_zero2", shard_size=4, precision=Precision(param="bf16", output="fp32")),
    spec(4, backend="fsdp1", sharding="hybrid_shard", precision="fp16", clip_norm=1.0, accumulate=2, sync="last",
         wrap="class:GPT2Attention", backward_prefetch_point="after", limit_all_gathers=0, offload="none"),
    spec(3, **DDP, precision="bf16-pure", recompute="every:2", compile=True, accumulate=3, sync=2),
    spec(backend="fsdp1", accumulate=4, sync=2),
    spec(model="t5-1m", data="stdlib", wrap="every:2", offload="all", backward_prefetch=3),
    spec(model="bert-1m", backend="fsdp1", wrap="whole", offload="all", devices=("cuda:0", "cuda:2")),
    spec(model="llama-1m", wrap="min_params:100000", devices=("cpu", "cpu")),
    spec(model={"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 32, "ffn_dim": 64, "vocab_size": 384,
                "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
]  # fmt: skip


def test_scripts_are_clean(tmp_path: Path) -> None:
    for i, each in enumerate(EVERY):
        text = text_of(each, "script")
        compile(text, f"{i}.py", "exec")
        assert "import fsdp_lab" not in text and "from fsdp_lab" not in text
        (tmp_path / f"script{i}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120", "--select", "E,F,I,W,C4,SIM,RUF100",
         str(tmp_path)], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_a_script_holds_nothing_that_its_spec_does_not_need() -> None:
    plain = text_of(spec(), "script")
    for word in ("CLIP_NORM", "ACCUMULATE", "checkpoint_wrapper", "Offload", "MixedPrecision", "scale", "RankOrdered",
                 "compile", "prefetch", "SHARD_SIZE", "DEVICES", "math"):  # fmt: skip
        assert word not in plain, word
    assert "RankOrdered" in text_of(spec(3), "script")


@pytest.mark.parametrize("model", ["vit-1m", "resnet-1m"])
def test_images_are_refused(model: str) -> None:
    with pytest.raises(SpecError, match="a script reads only text") as refused:
        text_of(Spec().replace(model=model, data="images"), "script")
    assert refused.value.field == "workload.model"
