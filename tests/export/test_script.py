"""An exported script gives the run's losses, bit for bit, without the lab; it has one's own code, or imports it."""

import itertools
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.cli.main import main
from fsdp_lab.export import export_model, export_script, export_spec
from fsdp_lab.export.script import script
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.configs import resolve
from fsdp_lab.spec.spec import Precision, Spec
from tests.export.ranks import exported, in_the_lab, losses_of, spec, torchrun
from tests.models import words
from tests.models.small import filled
from tests.own import TEXT, cell, own, spec as spec_of_own
from tests.pool import Pool
from tests.rank.test_own import saved, train_afresh

STEPS = 3
DDP = {"backend": "ddp", "sharding": "no_shard"}
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 384,
         "intermediate_size": 64, "max_position_embeddings": 64}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "vocab_size": 384, "max_position_embeddings": 64}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 384}
MOE = {**LLAMA, "model_type": "mixtral", "num_key_value_heads": 4, "num_local_experts": 4, "bos_token_id": None}
GROUPS = [{"match": ["transformer.h.0.*"], "lr": 0.001}, {"match": ["*.ln_*", "*.bias"], "weight_decay": 0.5}]
LORA = {"r": 4, "targets": ["q_proj", "down_proj", "embed_tokens"]}
COSINE = {"lr_schedule": "cosine", "decay_steps": 3, "lr_end": 0.1}  # other rates from the second update on
CHATS = [words.chat(*(words.text(*range(i, i + 1 + (i + j) % 4)) for j in range(2 + i % 3))) for i in range(80)]

OWN: dict[str, dict[str, Any]] = {
    "own": {"backend": "fsdp2", "clip_norm": 0.1, "accumulate": 2, "sync": "last", "seed": 3},
    "own fsdp1": {"backend": "fsdp1", "wrap": "class:Block"},
    "own dropout": {**DDP, "optimizer": "sgd", "lr": 0.1, "recompute": "every:2", "accumulate": 2},
}


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """For two ranks. All that can be in a script is in one of them."""
    (texts := folder / "texts").mkdir()
    (texts / "one.txt").write_bytes(b"of the first " * 300)
    (texts / "zero.bin").write_bytes(b"\0not text" * 300)
    tokenizer = words.word_tokenizer(folder / "tokenizer")
    records = words.json_lines(folder / "some.jsonl", [*words.uneven(200, 30), "", "<end>"], "story")
    chats = words.json_lines(folder / "chats.jsonl", CHATS, "messages")
    word_tokens = {"data": records, "tokenizer": tokenizer, "text_field": "story"}
    model = folder / "model"
    filled(LLAMA, 9).bfloat16().save_pretrained(model, max_shard_size="30KB")  # type: ignore[operator]
    shutil.copytree(model, partly := folder / "partly")
    held = {name: t for file in sorted(partly.glob("*.safetensors")) for name, t in load_file(file).items()}
    for file in partly.glob("model*"):
        file.unlink()
    save_file({n: t for n, t in held.items() if "layers.1.mlp" not in n}, partly / "trained.safetensors")
    return {
        "fsdp2": {"backend": "fsdp2", "clip_norm": 0.1, "seed": 3, "accumulate": 4, "sync": 2,
                  "optimizer_args": {"betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": True}},
        "fsdp1": {"backend": "fsdp1", "accumulate": 3, "sync": 2, "sharding": "shard_grad_op", "data": str(texts),
                  "dropout": "config", "param_groups": GROUPS, "freeze": ["*.attn.*"], "clip_norm": 0.1, **COSINE},
        "ddp": {**DDP, "accumulate": 3, "sync": 2, "clip_norm": 0.1, "optimizer": "sgd", "lr": 1.0,
                "optimizer_args": {"momentum": 0.5, "nesterov": True}, "param_groups": GROUPS},
        "lab": {"recompute": "every:2", "wrap": "every:2", "forward_prefetch": 1, "backward_prefetch": 2,
                "accumulate": 2, "sync": "last", "dropout": "config", "freeze": ["transformer.w?e.*", "*.bias"]},
        "masked": {**word_tokens, "model": BERT, "held_out": 0.2, "sharding": "shard_grad_op", "offload": "all",
                   "wrap": "min_params:3000"},
        "experts": {"model": MOE},
        "bf16": {"backend": "fsdp2", "precision": "bf16-pure", "model": LLAMA},
        "ddp bf16": {**DDP, "precision": "bf16-pure", "model": LLAMA, "accumulate": 3, "sync": 2},
        "chats": {"data": chats, "tokenizer": tokenizer, "backend": "fsdp1", "accumulate": 3, "sync": 2},
        "halves": {**word_tokens, "model": T5, "seq_len": 31, "packing": "padded", "warmup_steps": 2, **DDP},
        "fresh": {"backend": "fsdp1", "model": str(partly), "fresh_weights": ["model.layers.1.mlp.*"]},
        "lora": {"model": str(model), "lora": LORA, "recompute": "full"},
        "lora fsdp1": {"backend": "fsdp1", "model": str(model), "lora": LORA},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_the_labs_bit_for_bit_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    """All under one torchrun: to start that takes longer than most scripts."""
    specs = {name: spec(**case) for name, case in cases(tmp_path).items()}
    dropout = cell(TEXT.replace("self.fc(self.norm(x))", "F.dropout(self.fc(self.norm(x)), 0.2, self.training)"), 13)
    others = {name: spec_of_own(**own(dropout if DDP.items() <= c.items() else None, **c)) for name, c in OWN.items()}
    longer = in_the_lab(pool, specs, STEPS + 1) | train_afresh(pool, others, STEPS)
    specs |= others
    lab = {name: losses[:STEPS] for name, losses in longer.items()}
    assert all(len(set(losses)) == STEPS for losses in lab.values())  # it learns
    assert exported(tmp_path, specs, STEPS) == lab
    # Other work gives other losses: the comparison is not blind.
    alike = {frozenset(pair) for pair in itertools.combinations(specs, 2) if lab[pair[0]] == lab[pair[1]]}
    assert alike == {frozenset({"lora", "lora fsdp1"})}
    saved_in = (tmp_path / f"{name}.saved" for name in ("lora", "lora fsdp1"))
    adapters, of_fsdp1 = (load_file(folder / "adapter_model.safetensors") for folder in saved_in)
    torch.testing.assert_close(adapters, of_fsdp1, rtol=0, atol=0)
    # What peft opens goes on with the loss of the run's next step.
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    model, asked = PeftModel.from_pretrained(base, tmp_path / "lora.saved"), specs["lora"]
    given = Batches(asked.workload, base.config, rank=0, world_size=1)
    with torch.no_grad():
        found = [float(model(**given.batch(STEPS * asked.global_batch + 2 * rank)).loss) for rank in range(2)]
    assert sum(found) / 2 == pytest.approx(longer["lora"][-1], rel=1e-6)


@pytest.mark.slow
def test_losses_are_the_labs_where_the_order_of_a_sum_matters(pool: Pool, tmp_path: Path) -> None:
    specs = {"lab": spec(3, clip_norm=0.1), "fsdp1": spec(3, backend="fsdp1"), "ddp": spec(3, **DDP)}
    of_scripts, of_the_lab = exported(tmp_path, specs, STEPS), in_the_lab(pool, specs, STEPS)
    assert of_scripts.pop("ddp") == pytest.approx(of_the_lab.pop("ddp"), rel=1e-6)  # as its script says
    assert of_scripts == of_the_lab


@pytest.mark.nightly
def test_as_a_user_runs_it(pool: Pool, tmp_path: Path) -> None:
    """By torchrun itself; two replicas of two."""
    asked = spec(4, sharding="hybrid_shard", clip_norm=0.1)
    printed = torchrun(4, export_script(asked, tmp_path / "train.py"), "--steps", "3")
    assert [line.split()[:2] for line in printed.splitlines() if line] == [["step", str(i)] for i in range(3)]
    assert losses_of(printed) == in_the_lab(pool, {"it": asked}, 3)["it"]


@pytest.mark.parametrize("name", ["masked", "few words", "padded", "halves", "chats"])
def test_batches_and_their_weights_are_the_labs(name: str, tmp_path: Path) -> None:
    """On three ranks, over two epochs and more."""
    tokenizer = words.word_tokenizer(tmp_path / "tokenizer")
    (few := tmp_path / "special.txt").write_text("<end> " * 80 + "w1 w2 " + "<end> " * 60 + words.text(*range(90)))
    texts = {"data": words.json_lines(tmp_path / "some.jsonl", words.uneven(200, 30), "story"), "text_field": "story"}
    chats = {"data": words.json_lines(tmp_path / "chats.jsonl", CHATS, "messages")}
    changes: dict[str, Any] = {"masked": {**texts, "model": BERT, "held_out": 0.2},
                               "few words": {"data": str(few), "model": BERT},
                               "padded": {**texts, "packing": "padded", "accumulate": 2},
                               "halves": {**texts, "packing": "padded", "model": T5, "seq_len": 31},
                               "chats": {**chats, "accumulate": 3}}[name]  # fmt: skip
    asked = spec(3, tokenizer=tokenizer, **changes)
    w, script = asked.workload, runpy.run_path(str(export_script(asked, tmp_path / "script.py")), run_name="script")
    for rank in range(3):
        theirs = Batches(w, resolve(w.model), rank=rank, world_size=3)
        steps = range(1 + 2 * theirs.source.count // asked.global_batch)
        places = [(step * asked.global_batch, micro) for step in steps for micro in range(w.accumulate)]
        for place, (first, batch, *weight) in zip(places, script["batches"](rank, 3), strict=False):
            wanted = theirs.batch(*place)
            assert (first, batch.keys()) == (theirs.samples(*place)[0], wanted.keys())
            assert all(torch.equal(batch[key], tensor) for key, tensor in wanted.items())
            assert (weight or [1.0]) == [theirs.weight(*place)]


def test_scripts_are_clean_and_short(tmp_path: Path) -> None:
    """Those of many Specs, among them some that no test runs."""
    hybrid = {"world_size": 8, "sharding": "hybrid_shard_zero2", "shard_size": 4}
    for i, changes in enumerate((
        {}, {**hybrid, "precision": Precision(param="bf16", output="fp32"), "compile": True, "recompute": "full"},
        {**hybrid, "backend": "fsdp1", "precision": "fp16", "clip_norm": 1.0, "accumulate": 4, "sync": "last",
         "wrap": "class:GPT2Attention", "backward_prefetch_point": "after", "limit_all_gathers": 0},
        {**DDP, "precision": "bf16-pure", "accumulate": 3, "sync": 2, "lora": {"r": 2}, "devices": ("cuda:0", "cuda:2")},
        {"model": T5, "wrap": "every:2", "offload": "all", "backward_prefetch": 3, "devices": ("cpu", "cpu")},
        {"model": BERT, "backend": "fsdp1", "wrap": "whole", "offload": "all", "dropout": "config", "warmup_steps": 3},
        {"precision": "fp16", "param_groups": GROUPS, "lr_schedule": "linear", "decay_steps": 9, "freeze": ["*.bias"]},
    )):  # fmt: skip
        (tmp_path / f"script{i}.py").write_text(text := script(spec(**changes))[0])
        assert "import fsdp_lab" not in text and "from fsdp_lab" not in text and len(text.splitlines()) <= 350
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "120", "--select",
               "E,F,I,W,C4,SIM,RUF100", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    plain = script(spec())[0]
    for word in ("CLIP_NORM", "checkpoint_wrapper", "Offload", "MixedPrecision", "scale", "RankOrdered", "compile",
                 "prefetch", "SHARD_SIZE", "DEVICES"):  # fmt: skip
        assert word not in plain, word


@pytest.mark.parametrize(("changes", "field"), [
    ({"model": "vit-1m", "data": "images", "seq_len": 128}, "workload.model"),
    ({"model": BERT, "packing": "padded"}, "workload.packing"),
])  # fmt: skip
def test_what_a_script_does_not_read_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match="a script .* or export the Spec itself") as refused:
        script(spec(**changes))
    assert refused.value.field == field


# -- one's own code -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", OWN.values(), ids=OWN)
def test_a_script_has_the_code_once_and_nothing_of_transformers(changes: dict[str, Any]) -> None:
    text = script(spec_of_own(**own(**changes)))[0]
    assert all(text.count(word) == 1 for word in ("WIDTH = 16", "class Net(", "class Block(", "class Samples("))
    assert "OWN_MODEL, OWN_LOSS, OWN_DATA = build, loss, Samples" in text
    assert "transformers import" not in text and "SEQ_LEN" not in text and "fsdp_lab import" not in text


def test_a_script_imports_what_can_be_imported() -> None:
    made = Spec().replace(model="tests.own_module:build", loss="tests.own_module:loss", data="tests.own_module:Samples")
    text = script(made)[0]
    assert " tests.own_module, " in text.replace("\n", " ") and "from tests.own_module import build\n" in text
    assert "from tests.own_module import Samples\n" in text


REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("SCALE = torch.ones(1)\n\ndef build():\n    return Net() if SCALE else None\n", {},
     "workload.model: the source of build does not contain SCALE; define it inside"),
    ("def make_optimizer():\n    return Net()\n", {"build": "make_optimizer"},
     "workload.model: make_optimizer has two meanings in a script; rename it"),
    ("from numpy import random\n\ndef build():\n    return Net() if random.rand() < 2 else None\n", {},
     "workload.model: random has two meanings in a script; rename it"),
    ("samples = Samples()\n", {"Samples": "samples"},
     "workload.data: it is an object, and a script has code alone; give a function that makes it: def data(): return "),
]  # fmt: skip


@pytest.mark.parametrize(("more", "others", "said"), REFUSED)
def test_what_a_script_cannot_contain_is_named(more: str, others: dict[str, str], said: str) -> None:
    names = cell(f"{TEXT}\n\n{more}", 12)
    names |= {name: names[other] for name, other in others.items()}
    with pytest.raises(SpecError) as refused:
        script(spec_of_own(**own(names)))
    assert str(refused.value).startswith(said)


@pytest.mark.slow
def test_its_checkpoint_is_no_model_of_transformers(pool: Pool, tmp_path: Path) -> None:
    saved(pool, spec_of_own(), tmp_path)
    sentence = "checkpoint: .* is of a model of your own, which transformers does not know"
    with pytest.raises(ArgumentError, match=sentence):
        export_model(tmp_path, tmp_path / "model")


# -- where an export goes, and what is refused before it is made ----------------------------------------------------------
def test_files_are_written_whole_and_not_twice(tmp_path: Path) -> None:
    for export, name in ((export_script, "train.py"), (export_spec, "spec.json")):
        file = export(spec(), tmp_path / name)
        (plain := tmp_path / "plain").touch()
        assert file == tmp_path / name and file.stat().st_mode == plain.stat().st_mode
        plain.unlink()
        before = file.read_text()
        with pytest.raises(ArgumentError, match=f"path: .*{name} exists already; name another file, or give force"):
            export(spec(seed=9), file)
        assert file.read_text() == before and export(spec(seed=9), file, force=True).read_text() != before
    assert sorted(os.listdir(tmp_path)) == ["spec.json", "train.files", "train.py"]  # no part is left


def test_a_folder_that_is_no_scripts_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "train.files").mkdir()
    with pytest.raises(ArgumentError, match=r"path: .*train\.files exists already"):
        export_script(spec(), tmp_path / "train.py", force=True)
    with pytest.raises(ArgumentError, match="path: .*no folder"):  # before what else is wrong
        export_script(spec(sharding="zero1"), tmp_path / "none" / "other.py")
    with pytest.raises(SpecError, match=r"strategy\.sharding"):  # what is refused leaves no file
        export_script(spec(sharding="zero1"), tmp_path / "other.py")
    assert os.listdir(tmp_path) == ["train.files"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, script, again = tmp_path / "spec.json", tmp_path / "train.py", tmp_path / "again.json"
    given.write_text(spec().to_json())
    (refused := tmp_path / "refused.json").write_text(spec(sharding="zero1").to_json())
    to_script = ["--to", "script", "--output", str(script)]
    for file, arguments, code, said in (
        (given, to_script, 0, f"{script}\n"), (given, to_script, 2, "--output: "),
        (given, [*to_script, "--force", "--ranks", "3"], 0, f"{script}\n"),
        (given, ["--to", "spec", "--output", str(again)], 0, f"{again}\n"),
        (given, ["--to", "script"], 2, "--output: a script reads samples and a model"),
        (given, ["--to", "spec"], 0, '"workload": {'), (tmp_path / "none.json", ["--to", "spec"], 2, "none.json"),
        (refused, [*to_script, "--force"], 2, "sharding: zero1 is not available with fsdp2"),
    ):  # fmt: skip
        assert main(["export", str(file), *arguments]) == code
        printed = capsys.readouterr()
        assert said in (printed.err if code else printed.out)
    assert "fully_shard" in script.read_text() and "--nproc-per-node 3" in script.read_text()
    assert Spec.from_json(again.read_text()) == spec()  # which is what `fsdp-lab run` reads
