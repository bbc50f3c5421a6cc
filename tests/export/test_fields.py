"""Every field of a Spec, in every target: expressed, refused by its name, or said to have no effect. Never dropped."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, FileSystemBytecodeCache

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.spec import Precision, Spec, Strategy
from fsdp_lab.core.workload import Workload
from fsdp_lab.export import script, text_of
from fsdp_lab.models import build, check, lora
from tests.export.ranks import SMALL, spec
from tests.models import words
from tests.models.small import filled
from tests.remembered import once, skeleton

FSDP2, FSDP1 = {"backend": "fsdp2"}, {"backend": "fsdp1"}
DDP = {"backend": "ddp", "sharding": "no_shard"}
OWN = {"model": "tests.own_module:build", "loss": "tests.own_module:loss", "data": "tests.own_module:Samples",
       "seq_len": 128}  # fmt: skip
GROUPS = [{"match": ["*.bias"], "lr": 0.5, "weight_decay": 0.25}]
Case = tuple[dict[str, Any], str, str]  # the Spec's changes, the field, what shows it in the text
Refusal = tuple[dict[str, Any], str]  # the Spec's changes, the field that is named

_FOLDER = tempfile.TemporaryDirectory(prefix="fsdp_lab_fields_")
TOKENIZER = words.word_tokenizer(Path(_FOLDER.name, "tokenizer"))
RECORDS = words.json_lines(Path(_FOLDER.name, "records.jsonl"), [f"once upon a time {i}" for i in range(12)], "story")
CHATS = words.json_lines(Path(_FOLDER.name, "chats.jsonl"), [words.chat("w1", "w2")], "messages")
WEIGHTS = str(Path(_FOLDER.name, "weights"))  # of the model of `spec`
WIDER = {"model": {**SMALL, "vocab_size": 400}, "weights": WEIGHTS}  # whose embedding the files have in another shape

SCRIPT: list[Case] = [
    ({"model": "llama-1m"}, "model", '"model_type": "llama"'),
    ({"weights": WEIGHTS}, "weights", f'WEIGHTS = "{WEIGHTS}"'),
    (
        {**WIDER, "fresh_weights": ["transformer.wte.*"]},
        "fresh_weights",
        "or one drawn by seed and name where the files have none of this shape",
    ),
    ({"data": __file__}, "data", f'TEXT = "{Path(__file__)}"'),
    ({"data": "stdlib"}, "data", 'sysconfig.get_paths()["stdlib"]'),
    ({"held_out": 0.25}, "held_out", "HELD_OUT = 0.25"),
    ({"data": __file__, "tokenizer": TOKENIZER}, "tokenizer", f'TOKENIZER = "{TOKENIZER}"'),
    ({"data": RECORDS, "text_field": "story"}, "text_field", 'COLUMN = "story"'),
    ({"packing": "padded", "data": RECORDS, "text_field": "story"}, "packing", "attention_mask"),
    ({"data": CHATS, "tokenizer": TOKENIZER}, "data", "def chat_tokens("),
    ({"seq_len": 48}, "seq_len", "SEQ_LEN = 48"),
    ({"micro_batch": 3}, "micro_batch", "MICRO_BATCH = 3"),
    ({"accumulate": 5}, "accumulate", "ACCUMULATE = 5"),
    ({"optimizer": "sgd"}, "optimizer", "torch.optim.SGD"),
    (
        {"optimizer": "RMSprop", "optimizer_args": {"alpha": 0.5}},
        "optimizer",
        "torch.optim.RMSprop(groups, lr=LR, foreach=True, alpha=0.5)",
    ),
    ({"optimizer_args": {"fused": True}}, "optimizer_args", "torch.optim.AdamW(groups, lr=LR, fused=True)"),
    ({"optimizer_args": {"fused": True}}, "optimizer_args", "losses agree within rounding, not to the bit"),
    (
        {"optimizer_args": {"betas": [0.8, 0.9], "eps": 1e-6, "amsgrad": True}},
        "optimizer_args",
        "torch.optim.AdamW( groups, lr=LR, foreach=True, betas=(0.8, 0.9), eps=1e-06, amsgrad=True )",
    ),
    ({"lr": 0.125}, "lr", "LR = 0.125"),
    ({"lr_schedule": "linear", "decay_steps": 9}, "lr_schedule", "left = 1.0 - done"),
    ({"lr_schedule": "cosine", "decay_steps": 9}, "lr_schedule", "left = (1.0 + math.cos(math.pi * done)) / 2"),
    ({"warmup_steps": 7}, "warmup_steps", "WARMUP_STEPS = 7"),
    ({"lr_schedule": "linear", "decay_steps": 9}, "decay_steps", "DECAY_STEPS = 9"),
    ({"lr_schedule": "linear", "decay_steps": 9, "lr_end": 0.25}, "lr_end", "LR_END = 0.25"),
    ({"weight_decay": 0.25}, "weight_decay", "WEIGHT_DECAY = 0.25"),
    ({"dropout": "config"}, "dropout", "seed_dropout(seed, first * MICRO_BATCH)"),
    ({"freeze": ["transformer.w?e.*"]}, "freeze", 'FREEZE = ["transformer.w?e.*"]'),
    (
        {"param_groups": GROUPS},
        "param_groups",
        'PARAM_GROUPS = [{"match": ["*.bias"], "lr": 0.5, "weight_decay": 0.25}]',
    ),
    (
        {"lora": {"r": 2, "targets": ["c_attn"]}},
        "lora",
        'LORA = { "r": 2, "lora_alpha": 4.0, "target_modules": ["c_attn"], }',
    ),
    ({"clip_norm": 0.5}, "clip_norm", "CLIP_NORM = 0.5"),
    ({"seed": 77}, "seed", '"--seed", type=int, default=77'),
    (OWN, "loss", "from tests.own_module import loss"),
    ({}, "backend", "It was trained by the lab's own engine; FSDP2 does the same work here"),
    (FSDP2, "backend", "fully_shard(model, **options)"),
    (FSDP1, "backend", "FullyShardedDataParallel("),
    (DDP, "backend", "DistributedDataParallel("),
    ({**FSDP2, "sharding": "shard_grad_op"}, "sharding", '"reshard_after_forward": False'),
    ({**FSDP1, "sharding": "shard_grad_op"}, "sharding", "ShardingStrategy.SHARD_GRAD_OP"),
    ({"sharding": "no_shard"}, "sharding", "DDP does the same work here"),
    ({"world_size": 8, "sharding": "hybrid_shard", "shard_size": 2}, "shard_size", "SHARD_SIZE = 2"),
    ({"world_size": 4, "reshard_size": 2}, "reshard_size", '"reshard_after_forward": 2'),
    ({"precision": "bf16"}, "precision", "param_dtype=torch.bfloat16, reduce_dtype=torch.float32"),
    ({"precision": "bf16-pure"}, "precision", "buffer.data = buffer.data.to(torch.bfloat16)"),
    ({**DDP, "precision": Precision(buffer="bf16")}, "precision", "buffer.data = buffer.data.to(torch.bfloat16)"),
    ({**FSDP1, "precision": "bf16-pure"}, "precision", "buffer_dtype=torch.bfloat16"),
    ({"precision": Precision(param="bf16", output="fp32")}, "precision", "output_dtype=torch.float32"),
    ({**DDP, "precision": "bf16-pure"}, "precision", "buffer.to(torch.bfloat16)"),
    ({"precision": "fp16"}, "precision", "scale, good_steps = 2.0**16, 0"),
    ({"offload": "all"}, "offload", "CPUOffloadPolicy("),
    ({"wrap": "every:2"}, "wrap", 'UNITS = [["transformer.h.0", "transformer.h.1"], ["transformer.h.2"]]'),
    ({"wrap": "class:GPT2MLP"}, "wrap", '"transformer.h.1.mlp"'),
    ({**DDP, "wrap": "whole"}, "wrap", "whole has no effect under DDP"),
    ({"forward_prefetch": 2}, "forward_prefetch", "set_modules_to_forward_prefetch(sharded[i + 1 : i + 3])"),
    ({**FSDP1, "forward_prefetch": 1}, "forward_prefetch", "forward_prefetch=True"),
    ({"backward_prefetch": 3}, "backward_prefetch", "sharded[max(0, i - 3) : i][::-1]"),
    ({**FSDP1, "backward_prefetch": 0}, "backward_prefetch", "backward_prefetch=None"),
    ({"limit_reductions": 2}, "limit_reductions", "model.set_reduce_scatter_max_input_buffers(2)"),
    ({"gather": "mapped"}, "gather", "FSDP2 copies what it gathers"),
    ({**DDP, "backward_prefetch": 4}, "backward_prefetch", "4 has no effect under DDP"),
    ({**FSDP1, "backward_prefetch_point": "after"}, "backward_prefetch_point", "BackwardPrefetch.BACKWARD_POST"),
    ({**FSDP1, "limit_all_gathers": 0}, "limit_all_gathers", "limit_all_gathers=False"),
    ({"recompute": "every:2"}, "recompute", "for name in BLOCKS[::2]:"),
    ({"sync": "last", "accumulate": 2}, "sync", "set_requires_gradient_sync(micro == ACCUMULATE - 1)"),
    ({**FSDP1, "sync": 4, "accumulate": 4}, "sync", "nullcontext() if micro == ACCUMULATE - 1 else model.no_sync()"),
    ({"sync": 2, "accumulate": 4}, "sync", "set_requires_gradient_sync((micro + 1) % SYNC == 0)"),
    ({"sync": 3, "accumulate": 5}, "sync", "SYNC = 3"),
    (
        {**DDP, "sync": 2, "accumulate": 3},
        "sync",
        "if (micro + 1) % SYNC == 0 or micro == ACCUMULATE - 1 else model.no_sync()",
    ),
    ({"sync": 2}, "sync", "2 has no effect with one micro-batch"),
    ({"sync": "last"}, "sync", "last has no effect with one micro-batch"),
    ({"compile": True}, "compile", ".compile()"),
    ({"world_size": 6}, "world_size", "--nproc-per-node 6"),
    ({"devices": ("cuda:1", "cuda:3")}, "devices", 'DEVICES = ["cuda:1", "cuda:3"]'),
    ({"link": "0.25 GB/s, 50 us"}, "link", "was emulated"),
]
ACCELERATE: list[Case] = [
    ({"model": "llama-1m"}, "model", 'model: "llama-1m"'),
    ({"weights": WEIGHTS}, "weights", f'from_pretrained("{WEIGHTS}")'),
    ({**WIDER, "fresh_weights": ["transformer.wte.*"]}, "fresh_weights", 'fresh_weights: ["transformer.wte.*"]'),
    ({"data": __file__}, "data", f'data: "{Path(__file__)}"'),
    ({"held_out": 0.25}, "held_out", "held_out: 0.25"),
    ({"tokenizer": "bytes"}, "tokenizer", 'tokenizer: "bytes"'),
    ({"data": RECORDS, "text_field": "story"}, "text_field", 'text_field: "story"'),
    ({"packing": "padded", "seq_len": 64}, "packing", 'packing: "padded"'),
    ({"seq_len": 48}, "seq_len", "seq_len: 48"),
    ({"micro_batch": 3}, "micro_batch", "micro_batch: 3"),
    ({"accumulate": 5}, "accumulate", "accumulate: 5"),
    ({"optimizer": "sgd"}, "optimizer", 'optimizer: "sgd"'),
    ({"optimizer_args": {"fused": True}}, "optimizer_args", 'optimizer_args: {"fused": true}'),
    ({"lr": 0.125}, "lr", "lr: 0.125"),
    ({"lr_schedule": "linear", "decay_steps": 9}, "lr_schedule", "falls in a line from 1 in step 0 to 0.0 in step 9"),
    ({"warmup_steps": 7}, "lr_schedule", "which would step it once for each process"),
    ({"warmup_steps": 7}, "warmup_steps", "rate(step) is (step + 1) / 7 in the first 7 steps, then 1"),
    (
        {"lr_schedule": "cosine", "decay_steps": 9},
        "decay_steps",
        "along half a cosine from 1 in step 0 to 0.0 in step 9",
    ),
    ({"lr_schedule": "cosine", "decay_steps": 9, "lr_end": 0.25}, "lr_end", "to 0.25 in step 9"),
    ({"weight_decay": 0.25}, "weight_decay", "weight_decay: 0.25"),
    ({"dropout": "config"}, "dropout", "seeded torch before each micro-batch"),
    (
        {"freeze": ["*.bias"]},
        "freeze",
        'requires_grad_(False) of the parameters whose names match ["*.bias"] (fnmatch)',
    ),
    ({"lora": {"r": 4, "targets": ["c_attn"]}}, "lora", "LoraConfig(r=4, lora_alpha=8, target_modules=['c_attn'])"),
    ({"param_groups": GROUPS}, "param_groups", "give the optimizer the groups above"),
    ({"clip_norm": 0.5}, "clip_norm", "accelerator.clip_grad_norm_(model.parameters(), 0.5)"),
    ({"seed": 77}, "seed", "seed: 77"),
    (OWN, "loss", 'loss: "tests.own_module:loss"'),
    ({}, "backend", "It was trained by the lab's own engine"),
    (FSDP1, "backend", "fsdp_version: 1"),
    (DDP, "backend", "distributed_type: MULTI_GPU"),
    ({"sharding": "shard_grad_op"}, "sharding", "fsdp_reshard_after_forward: false"),
    ({**FSDP1, "sharding": "no_shard"}, "sharding", "fsdp_sharding_strategy: NO_SHARD"),
    (
        {"world_size": 8, "sharding": "hybrid_shard", "shard_size": 2},
        "shard_size",
        "parallelism_config_dp_shard_size: 2",
    ),
    ({"precision": "bf16-pure"}, "precision", "mixed_precision: bf16"),
    ({"precision": "bf16-pure"}, "precision", "buffers stay in fp32, since FSDP2 has no dtype for them"),
    ({**DDP, "precision": "bf16"}, "precision", "mixed_precision: bf16"),
    ({"offload": "all"}, "offload", "fsdp_offload_params: true"),
    ({"wrap": "class:GPT2MLP"}, "wrap", "fsdp_transformer_layer_cls_to_wrap: GPT2MLP"),
    ({"wrap": "min_params:5000"}, "wrap", "fsdp_min_num_params: 5000"),
    ({"wrap": "whole"}, "wrap", "fsdp_auto_wrap_policy: NO_WRAP"),
    ({**FSDP1, "forward_prefetch": 1}, "forward_prefetch", "fsdp_forward_prefetch: true"),
    ({**FSDP1, "backward_prefetch": 0}, "backward_prefetch", "fsdp_backward_prefetch: NO_PREFETCH"),
    ({**FSDP1, "backward_prefetch_point": "after"}, "backward_prefetch_point", "BACKWARD_POST"),
    ({"recompute": "full"}, "recompute", "fsdp_activation_checkpointing: true"),
    ({"gather": "mapped"}, "gather", "FSDP2 copies what it gathers"),
    ({"sync": "every", "accumulate": 2}, "sync", "sync_each_batch=True"),
    ({"sync": "last", "accumulate": 2}, "sync", "sync_each_batch=False"),
    ({"sync": 2, "accumulate": 2}, "sync", "sync_each_batch=False"),
    ({"sync": 1, "accumulate": 2}, "sync", "sync_each_batch=True"),
    ({"compile": True}, "compile", "dynamo_use_regional_compilation: true"),
    ({"world_size": 6}, "world_size", "num_processes: 6"),
    ({"devices": ("cuda:1", "cuda:3")}, "devices", "gpu_ids: 1,3"),
    ({"link": "0.25 GB/s, 50 us"}, "link", "was emulated"),
]
ONLY_IN_THE_LAB: list[Refusal] = [
    ({"sharding": "zero1"}, "strategy.sharding"),
    ({"backend": "yours", "engine": "tests.your_engines:FullyShard"}, "strategy.backend"),
    ({"offload": "optimizer"}, "strategy.offload"),
    ({"offload": "all", "sharding": "no_shard"}, "strategy.offload"),
    ({"precision": Precision(param="bf16", norm="fp32")}, "strategy.precision.norm"),
    ({"precision": Precision(param="bf16", reduce="bf16", keep_low_precision_gradients=True)},
     "strategy.precision.keep_low_precision_gradients"),
    ({"backward_prefetch": 0}, "strategy.backward_prefetch"),
    ({"backward_prefetch_point": "after"}, "strategy.backward_prefetch_point"),
    ({"limit_all_gathers": 0}, "strategy.limit_all_gathers"),
    ({"forward_prefetch": 1, "sharding": "no_shard"}, "strategy.forward_prefetch"),
    ({"limit_reductions": 2, "sharding": "no_shard"}, "strategy.limit_reductions"),
    ({"wrap": "every:2", "sharding": "no_shard"}, "strategy.wrap"),
    ({"optimizer": "sgd", "optimizer_args": {"fused": True}}, "workload.optimizer_args"),
    ({"devices": ("cuda:0", "cuda:0")}, "devices"),
]  # fmt: skip
NOT_IN_ACCELERATE: list[Refusal] = [
    ({"world_size": 4, "reshard_size": 2}, "strategy.reshard_size"),
    ({"forward_prefetch": 1}, "strategy.forward_prefetch"),
    ({"backward_prefetch": 2}, "strategy.backward_prefetch"),
    ({"limit_reductions": 2}, "strategy.limit_reductions"),
    ({"precision": "bf16"}, "strategy.precision"),
    ({"precision": Precision(param="bf16", reduce="bf16", output="fp32")}, "strategy.precision.output"),
    ({**DDP, "precision": "bf16-pure"}, "strategy.precision"),
    ({"wrap": "every:2"}, "strategy.wrap"),
    ({"recompute": "every:2"}, "strategy.recompute"),
    ({"sync": 2, "accumulate": 4}, "strategy.sync"),
    ({"recompute": "full", "wrap": "whole"}, "strategy.recompute"),
    ({**DDP, "recompute": "full"}, "strategy.recompute"),
    ({**FSDP1, "sharding": "hybrid_shard", "world_size": 4}, "strategy.sharding"),
    ({**FSDP1, "limit_all_gathers": 0}, "strategy.limit_all_gathers"),
    ({"devices": ("cpu", "cpu")}, "devices"),
]


def flat(text: str) -> str:
    """Without the breaks of wrapped comments."""
    return " ".join(text.replace("\n# ", " ").split())


@pytest.fixture(scope="module", autouse=True)
def once_for_all_specs() -> Iterator[None]:
    """Most Specs differ in nothing that a model is built, data listed or a template compiled from."""
    compiled = FileSystemBytecodeCache(_FOLDER.name)
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, lora, script):
            patch.setattr(module, "build_skeleton", skeleton)
        patch.setattr(check, "_facts_of_built", once(check._facts_of_built, lambda w: (json.dumps(w.model), w.seq_len)))
        patch.setattr(check, "data_files", functools.cache(check.data_files))
        patch.setattr(script, "Environment", functools.partial(Environment, bytecode_cache=compiled))
        yield


@pytest.fixture(scope="module", autouse=True)
def weights() -> None:
    filled(SMALL).save_pretrained(WEIGHTS)  # type: ignore[operator]


def checked(target: str, cases: list[Case]) -> None:
    for changes, field, shown in cases:
        assert shown in flat(text_of(spec(**changes), target)), (target, field, changes)


def test_a_script_shows_every_field() -> None:
    checked("script", SCRIPT)


@pytest.mark.slow
def test_an_accelerate_config_shows_every_field() -> None:
    checked("accelerate", ACCELERATE)


@pytest.mark.parametrize(
    ("target", "refusals"),
    [("script", ONLY_IN_THE_LAB), ("accelerate", ONLY_IN_THE_LAB), ("accelerate", NOT_IN_ACCELERATE)],
    ids=["script", "accelerate", "accelerate alone"],
)
def test_what_cannot_be_said_is_refused_by_name(target: str, refusals: list[Refusal]) -> None:
    for changes, field in refusals:
        given = spec(**changes)
        with pytest.raises(SpecError) as refused:
            text_of(given, target)
        e = refused.value
        assert e.field == field, (changes, str(e))
        assert "backend lab" not in e.hint and e.hint.endswith("or export the Spec itself, which contains it")
        if e.fix and "wrap" not in e.fix:  # the way out is one: what is refused next is another field
            again = given.replace(**e.fix)
            assert again != given


def test_weights_are_named_by_an_absolute_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled("gpt2-1m").save_pretrained(tmp_path / "model", max_shard_size="2MB")  # type: ignore[operator]
    monkeypatch.chdir(tmp_path)
    given = spec(model="gpt2-1m", weights="model")
    script = flat(text_of(given, "script"))
    assert f'WEIGHTS = "{tmp_path}/model"' in script and "model-00002-of-" in script and "hashlib" not in script
    assert f'from_pretrained("{tmp_path}/model")' in flat(text_of(given, "accelerate"))
    refused = given.replace(model="gpt2-10m")
    with pytest.raises(SpecError, match="of another shape"):
        text_of(refused, "script")


def test_the_tables_leave_no_field_out() -> None:
    fields = {f.name for kind in (Spec, Workload, Strategy) for f in dataclasses.fields(kind)} - {
        "workload",
        "strategy",
        "engine",  # of backend yours alone, which is refused
    }
    assert {field for _, field, _ in SCRIPT} == fields
    refused = {field.split(".")[-1] for _, field in NOT_IN_ACCELERATE}
    assert {field for _, field, _ in ACCELERATE} | refused >= fields - {"limit_all_gathers"}
    assert "limit_all_gathers" in refused
    roles = {f.name for f in dataclasses.fields(Precision)}
    said = {name for changes, *_ in [*SCRIPT, *ONLY_IN_THE_LAB] if isinstance(p := changes.get("precision"), Precision)
            for name in roles if getattr(p, name) != getattr(Precision(), name)}  # fmt: skip
    assert said == roles


def test_a_spec_goes_out_and_comes_back() -> None:
    for changes, *_ in [*SCRIPT, *ONLY_IN_THE_LAB]:
        given = spec(**changes)
        assert Spec.from_json(text_of(given, "spec")) == given
