"""An exported script gives the run's losses, bit for bit, and does not know the lab."""

from __future__ import annotations

import itertools
import json
import runpy
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.spec import Precision, Spec
from fsdp_lab.export import export_script, text_of
from fsdp_lab.models import Batches, resolve
from tests.export.ranks import SMALL, exported, in_the_lab, losses_of, spec, torchrun
from tests.models import words
from tests.models.small import filled
from tests.pool import Pool
from tests.pretrained import minilm_folder

STEPS = 3
DDP = {"backend": "ddp", "sharding": "no_shard"}
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 384,
         "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
GROUPS = [{"match": ["transformer.h.0.*"], "lr": 0.001}, {"match": ["*.ln_*", "*.bias"], "weight_decay": 0.5}]
LORA = {"r": 4, "targets": ["q_proj", "down_proj", "embed_tokens"]}
COSINE = {"lr_schedule": "cosine", "decay_steps": 3, "lr_end": 0.1}  # other rates from the second update on
CHATS = [words.chat(*(words.text(*range(i, i + 1 + (i + j) % 4)) for j in range(2 + i % 3))) for i in range(80)]
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "vocab_size": 384, "max_position_embeddings": 64}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 384}


def same(pool: Pool, folder: Path, cases: dict[str, dict[str, Any]], world_size: int) -> dict[str, Any]:
    specs = {name: spec(world_size, **changes) for name, changes in cases.items()}
    lab = in_the_lab(pool, specs, STEPS)
    assert all(len(set(losses)) == STEPS for losses in lab.values())  # it learns
    assert exported(folder, specs, STEPS) == lab
    return lab


def strategies(folder: Path) -> dict[str, dict[str, Any]]:
    text = folder / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 40)
    texts = folder / "texts"
    (texts / "b").mkdir(parents=True)
    (texts / "b" / "two.txt").write_bytes(b"of the second " * 300)
    (texts / "one.txt").write_bytes(b"of the first " * 300)
    (texts / "zero.bin").write_bytes(b"\0not text" * 300)
    return {
        "fsdp2": {"backend": "fsdp2", "clip_norm": 0.1, "seed": 3, "accumulate": 4, "sync": 2,
                  "optimizer_args": {"betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": True}},
        "fsdp1": {"backend": "fsdp1", "accumulate": 3, "sync": 2, "sharding": "shard_grad_op", "data": str(texts),
                  **COSINE},
        "ddp": {**DDP, "accumulate": 3, "sync": 2, "clip_norm": 0.1, "optimizer": "sgd", "lr": 1.0,
                "optimizer_args": {"momentum": 0.5, "nesterov": True}},
        "lab": {"recompute": "every:2", "wrap": "every:2", "forward_prefetch": 1, "backward_prefetch": 2,
                "accumulate": 2, "sync": "last", "data": str(text)},
        "lab_groups": {"param_groups": GROUPS, **COSINE},
        "ddp_groups": {**DDP, "param_groups": GROUPS, "freeze": ["*.attn.*"]},
        "fsdp1_groups": {"backend": "fsdp1", "param_groups": GROUPS, "freeze": ["*.attn.*"]},
        "lab_dropout": {"dropout": "config", "recompute": "every:2", "accumulate": 2, "sync": "last"},
        "fsdp1_dropout": {"backend": "fsdp1", "dropout": "config"}, "ddp_dropout": {**DDP, "dropout": "config"},
        "lab_frozen": {"freeze": ["transformer.h.0.*", "transformer.w?e.*", "*.bias"], "clip_norm": 0.1},
        "lab_offload": {"sharding": "shard_grad_op", "offload": "all", "wrap": "min_params:3000", "model": BERT},
        "lab_no_shard": {"sharding": "no_shard", "warmup_steps": 2},
        "fsdp1_fused": {"backend": "fsdp1", "seed": 7, "optimizer_args": {"fused": True}},  # sharded alike
        "fsdp2_bf16": {"backend": "fsdp2", "precision": "bf16"},
        "fsdp2_bf16_buffers": {"backend": "fsdp2", "precision": "bf16-pure", "model": LLAMA},
        "ddp_bf16_buffers": {**DDP, "precision": "bf16-pure", "model": LLAMA, "accumulate": 3, "sync": 2},
    }  # fmt: skip


def of_tokens(folder: Path) -> dict[str, dict[str, Any]]:
    tokenizer = words.word_tokenizer(folder / "tokenizer")
    texts = words.uneven(200, 30)
    records = words.json_lines(folder / "records" / "some.jsonl", [*texts, "", "<end>"], "story")
    chats = words.json_lines(folder / "chats.jsonl", CHATS, "messages")
    return {
        "records": {"data": str(folder / "records"), "tokenizer": tokenizer, "text_field": "story", "held_out": 0.2},
        "library": {"tokenizer": str(minilm_folder()), "model": {**LLAMA, "vocab_size": 30522}},
        "padded": {
            "data": records,
            "tokenizer": tokenizer,
            "text_field": "story",
            "packing": "padded",
            "accumulate": 2,
            "clip_norm": 0.1,
        },
        "chats": {"data": chats, "tokenizer": tokenizer, "backend": "fsdp1", "accumulate": 3, "sync": 2},
    }


def trained_weights(folder: Path) -> dict[str, dict[str, Any]]:
    """From files in bf16, some of whose values are missing and drawn."""
    model = folder / "model"
    filled(LLAMA, 9).bfloat16().save_pretrained(model, max_shard_size="30KB")  # type: ignore[operator]
    partly = folder / "partly"
    shutil.copytree(model, partly)
    (partly / "model.safetensors.index.json").unlink()
    held = {name: t for file in sorted(partly.glob("*.safetensors")) for name, t in load_file(file).items()}
    for file in partly.glob("*.safetensors"):
        file.unlink()
    save_file({n: t for n, t in held.items() if "layers.1.mlp" not in n}, partly / "trained.safetensors")
    fresh = {"model": str(partly), "fresh_weights": ["model.layers.1.mlp.*"]}
    return {
        "lab": {"model": str(model)},
        "fsdp1": {"backend": "fsdp1", **fresh},
        "ddp": {**DDP, **fresh, "lora": {"r": 2}},
        "lora": {"model": str(model), "lora": LORA, "recompute": "full"},
        "lora_fsdp1": {"backend": "fsdp1", "model": str(model), "lora": LORA},
    }


@dataclass
class TwoRanks:
    """What scripts for two ranks gave and what the lab did, by group and name of the case."""

    folder: Path
    cases: dict[str, dict[str, dict[str, Any]]]
    lab: dict[str, list[float]]
    scripts: dict[str, list[float]]

    def same(self, group: str) -> dict[str, list[float]]:
        """Losses by name of the case."""
        names = {name: f"{group}_{name}" for name in self.cases[group]}
        assert all(len(set(self.lab[key])) == STEPS for key in names.values())  # it learns
        assert {key: self.scripts[key] for key in names.values()} == {key: self.lab[key] for key in names.values()}
        return {name: self.lab[key] for name, key in names.items()}


@pytest.fixture(scope="module")
def two_ranks(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """All under one torchrun: to start that takes longer than most scripts."""
    folder, groups = tmp_path_factory.mktemp("scripts"), (strategies, of_tokens, trained_weights)
    cases = {group.__name__: group(made_folder(folder / group.__name__)) for group in groups}
    specs = {f"{group}_{name}": spec(**case) for group, some in cases.items() for name, case in some.items()}
    return TwoRanks(folder, cases, in_the_lab(pool, specs, STEPS), exported(folder, specs, STEPS))


def made_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_the_labs_bit_for_bit_on_two_ranks(two_ranks: TwoRanks) -> None:
    lab, cases = two_ranks.same("strategies"), two_ranks.cases["strategies"]
    # Other work gives other losses: the comparison is not blind.
    work = {name: json.dumps(spec(**case).to_dict()["workload"]) for name, case in cases.items()}
    alike = [(a, b) for a, b in itertools.combinations(cases, 2) if lab[a] == lab[b] and work[a] != work[b]]
    assert alike == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_are_the_labs(two_ranks: TwoRanks) -> None:
    """By the losses, bit for bit."""
    lab = two_ranks.same("of_tokens")
    assert len(set(map(tuple, lab.values()))) == len(lab)


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
@pytest.mark.timeout(600)
def test_losses_of_trained_weights_are_the_labs_bit_for_bit(pool: Pool, two_ranks: TwoRanks) -> None:
    lab, folder = two_ranks.same("trained_weights"), two_ranks.folder
    assert lab["fsdp1"][0] == lab["ddp"][0] and len({losses[0] for losses in lab.values()}) == 2
    assert lab["lora"] == lab["lora_fsdp1"] and lab["lora"][0] == lab["lab"][0] and lab["lora"][1] != lab["lab"][1]
    adapters = {
        name: load_file(folder / f"trained_weights_{name}.saved" / "adapter_model.safetensors")
        for name in ("lora", "lora_fsdp1", "ddp")
    }
    torch.testing.assert_close(adapters["lora"], adapters["lora_fsdp1"], rtol=0, atol=0)
    # What peft opens goes on with the loss of the run's next step.
    base = AutoModelForCausalLM.from_pretrained(folder / "trained_weights" / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / "trained_weights_lora.saved")
    asked = spec(**two_ranks.cases["trained_weights"]["lora"])
    given = Batches(asked.workload, base.config, rank=0, world_size=1)
    with torch.no_grad():
        found = [float(model(**given.batch(STEPS * asked.global_batch + 2 * rank)).loss) for rank in range(2)]
    assert sum(found) / 2 == pytest.approx(in_the_lab(pool, {"it": asked}, STEPS + 1)["it"][-1], rel=1e-6)
    assert len(adapters["ddp"]) == 8


@pytest.mark.slow
def test_as_a_user_runs_it(pool: Pool, tmp_path: Path) -> None:
    """By torchrun itself, with the options of the script."""
    asked = spec(seed=5)
    script = export_script(asked.replace(seed=0), tmp_path / "train.py")
    printed = torchrun(2, script, "--steps", "3", "--seed", "5")
    assert [line.split()[:2] for line in printed.splitlines() if line] == [["step", str(i)] for i in range(3)]
    assert losses_of(printed) == in_the_lab(pool, {"it": asked}, 3)["it"]


_FOLDER = tempfile.TemporaryDirectory(prefix="fsdp_lab_scripts_")
TOKENIZER = words.word_tokenizer(Path(_FOLDER.name, "tokenizer"))
RECORDS = words.json_lines(Path(_FOLDER.name, "records.jsonl"), words.uneven(200, 30), "story")
CONVERSATIONS = words.json_lines(Path(_FOLDER.name, "chats.jsonl"), CHATS, "messages")
TABLE = str(Path(_FOLDER.name, "chats.parquet"))
pyarrow.parquet.write_table(
    pyarrow.table({"messages": CHATS, "tools": [[{"function": {"name": "w1"}}]] * len(CHATS)}), TABLE
)
MARKED = words.word_tokenizer(Path(_FOLDER.name, "marked"), words.MARKED_TEMPLATE)
LINES = Path(_FOLDER.name, "lines.txt")
LINES.write_text("\n".join([*words.uneven(60, 30), "", " ", "<end>"]), newline="\r\n")
TEXTS = Path(_FOLDER.name, "texts")
TEXTS.mkdir()
for i in range(3):
    (TEXTS / f"{i}.txt").write_text("\n".join(words.uneven(200, 30)[i::3]))
MOSTLY_SPECIAL = Path(_FOLDER.name, "special.txt")  # some windows of it have fewer words than are to be hidden
MOSTLY_SPECIAL.write_text("<end> " * 80 + "w1 w2 " + "<end> " * 60 + words.text(*range(90)))
PADDED: dict[str, Any] = {"data": RECORDS, "text_field": "story", "tokenizer": TOKENIZER, "packing": "padded"}
ROWS: dict[str, dict[str, Any]] = {  # may have different numbers of labels
    "padded": {**PADDED, "accumulate": 2},
    "padded masked": {**PADDED, "model": BERT, "micro_batch": 5},
    "padded halves": {**PADDED, "model": T5, "seq_len": 31},
    "lines": {**PADDED, "data": str(LINES), "text_field": None},
    "lines of bytes": {**PADDED, "data": str(LINES), "text_field": None, "tokenizer": "bytes", "seq_len": 200,
                       "model": {**SMALL, "n_positions": 200}},
    "with a frame": {**PADDED, "tokenizer": str(minilm_folder()), "seq_len": 128,
                     "model": {**LLAMA, "vocab_size": 30522, "max_position_embeddings": 128}},
    "few words": {"data": str(MOSTLY_SPECIAL), "tokenizer": TOKENIZER, "model": BERT},
    "chats": {"data": CONVERSATIONS, "tokenizer": TOKENIZER, "packing": "padded", "accumulate": 3},
    "chats packed": {"data": CONVERSATIONS, "tokenizer": TOKENIZER, "held_out": 0.2},
    "chats marked": {"data": CONVERSATIONS, "tokenizer": MARKED, "packing": "padded", "model": BERT},
    "chats of a table": {"data": TABLE, "tokenizer": TOKENIZER, "packing": "padded"},
    "chats in halves": {"data": CONVERSATIONS, "tokenizer": MARKED, "model": T5, "seq_len": 9},
}  # fmt: skip
EVERY = [
    spec(),
    spec(4, sharding="hybrid_shard", compile=True, recompute="full", precision="bf16-pure", clip_norm=1.0),
    spec(8, backend="fsdp2", sharding="hybrid_shard_zero2", shard_size=4, precision=Precision(param="bf16", output="fp32")),
    spec(4, backend="fsdp1", sharding="hybrid_shard", precision="fp16", clip_norm=1.0, accumulate=2, sync="last",
         wrap="class:GPT2Attention", backward_prefetch_point="after", limit_all_gathers=0, offload="none"),
    spec(3, **DDP, precision="bf16-pure", recompute="every:2", compile=True, accumulate=3, sync=2),
    spec(backend="fsdp1", accumulate=4, sync=2, **COSINE),
    spec(backend="fsdp1", freeze=["*.bias"], dropout="config"),
    spec(param_groups=GROUPS, warmup_steps=2),
    spec(**DDP, param_groups=GROUPS),
    spec(warmup_steps=3, lr_schedule="linear", decay_steps=9, precision="fp16"),
    spec(model="t5-1m", data="stdlib", wrap="every:2", offload="all", backward_prefetch=3),
    spec(model="bert-1m", backend="fsdp1", wrap="whole", offload="all", devices=("cuda:0", "cuda:2")),
    spec(model="llama-1m", wrap="min_params:100000", devices=("cpu", "cpu")),
    spec(data=RECORDS, text_field="story"),
    spec(data=RECORDS, text_field="story", tokenizer=TOKENIZER, model=BERT),
    spec(data="stdlib", tokenizer=TOKENIZER),
    spec(data="stdlib", packing="padded", seq_len=64),
    *(spec(**ROWS[name]) for name in ("padded", "padded masked", "chats", "chats marked", "chats in halves")),
    spec(lora={"r": 2}, freeze=["*.h.0.*"], clip_norm=1.0, recompute="full"), spec(**DDP, lora={"r": 2}),
    spec(model={"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 32, "ffn_dim": 64, "vocab_size": 384,
                "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
]  # fmt: skip


def same_batches(folder: Path, asked: Spec) -> set[float]:
    """Of a script and of the lab, on three ranks, over two epochs and more. Returns the weights of micro-batches."""
    w = asked.workload
    script = runpy.run_path(str(export_script(asked, folder / "script.py", force=True)), run_name="script")
    weights = set()
    for rank in range(3):
        ours, theirs = script["Batches"](w.seed, rank, 3), Batches(w, resolve(w.model), rank=rank, world_size=3)
        for step in range(1 + 2 * theirs.source.count // asked.global_batch):
            for micro in range(w.accumulate):
                place = (step, micro) if w.accumulate > 1 else (step,)
                batch, wanted = ours(*place), theirs.batch(step * asked.global_batch, micro)
                assert batch.keys() == wanted.keys()
                for key, tensor in wanted.items():
                    torch.testing.assert_close(batch[key], tensor, rtol=0, atol=0)
                weights.add(theirs.weight(step * asked.global_batch, micro))
                assert not hasattr(ours, "weight") or ours.weight(*place) in weights
    return weights


WINDOWS: dict[str, dict[str, Any]] = {
    "bytes": {"data": RECORDS, "text_field": "story"},
    "masked": {"data": RECORDS, "text_field": "story", "tokenizer": TOKENIZER, "model": BERT},
    "texts": {"data": str(TEXTS), "tokenizer": TOKENIZER},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_the_labs(name: str, tmp_path: Path) -> None:
    assert same_batches(tmp_path, spec(3, **WINDOWS[name])) == {1.0}


@pytest.mark.parametrize("name", ROWS)
def test_rows_and_their_weights_are_the_labs(name: str, tmp_path: Path) -> None:
    assert len(same_batches(tmp_path, spec(3, **ROWS[name]))) > 1


def test_records_of_every_format_are_the_labs(tmp_path: Path) -> None:
    import pyarrow
    from datasets import Dataset
    from pyarrow.parquet import write_table

    mixed = tmp_path / "mixed"
    words.json_lines(mixed / "d.jsonl", CHATS[60:], "messages")
    for i, name in enumerate(("a.parquet", "b.arrow", "c.arrow")):
        table = pyarrow.table({"number": range(20), "messages": CHATS[20 * i : 20 * i + 20]})
        if i == 0:
            write_table(table, mixed / name)
        else:
            make = pyarrow.ipc.new_stream if i == 1 else pyarrow.ipc.new_file
            with make(str(mixed / name), table.schema) as file:
                file.write_table(table, max_chunksize=7)
    (texts := tmp_path / "texts").mkdir()
    write_table(pyarrow.table({"story": words.uneven(200, 30)}), texts / "some.parquet", row_group_size=50)
    Dataset.from_dict({"number": range(80), "messages": CHATS}).save_to_disk(tmp_path / "saved")
    assert len(same_batches(tmp_path, spec(3, data=str(mixed), tokenizer=TOKENIZER))) > 1
    assert len(same_batches(tmp_path, spec(3, data=str(tmp_path / "saved"), tokenizer=TOKENIZER, packing="padded"))) > 1
    assert same_batches(tmp_path, spec(3, data=str(texts), tokenizer=TOKENIZER, text_field="story")) == {1.0}
    script = (tmp_path / "script.py").read_text()
    assert "pyarrow 2" in script and "import json" not in script and "import datasets" not in script


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
