"""Every field of a Spec, in every target: expressed, refused by its name, or said to have no effect. Never dropped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.spec import Precision, Spec, Strategy, Workload
from fsdp_lab.export import text_of
from tests.export.ranks import spec

FSDP2, FSDP1 = {"backend": "fsdp2"}, {"backend": "fsdp1"}
DDP = {"backend": "ddp", "sharding": "no_shard"}
Case = tuple[dict[str, Any], str, str]  # the Spec's changes, the field, what shows it in the text
Refusal = tuple[dict[str, Any], str]  # the Spec's changes, the field that is named

SCRIPT: list[Case] = [
    ({"model": "llama-1m"}, "model", '"model_type": "llama"'),
    ({"data": __file__}, "data", f'TEXT = "{Path(__file__)}"'),
    ({"data": "stdlib"}, "data", 'sysconfig.get_paths()["stdlib"]'),
    ({"held_out": 0.25}, "held_out", "HELD_OUT = 0.25"),
    ({"seq_len": 48}, "seq_len", "SEQ_LEN = 48"),
    ({"micro_batch": 3}, "micro_batch", "MICRO_BATCH = 3"),
    ({"accumulate": 5}, "accumulate", "ACCUMULATE = 5"),
    ({"optimizer": "sgd"}, "optimizer", "torch.optim.SGD"),
    ({"optimizer_args": {"fused": True}}, "optimizer_args", "torch.optim.AdamW(groups, lr=LR, fused=True)"),
    ({"optimizer_args": {"fused": True}}, "optimizer_args", "losses agree within rounding, not to the bit"),
    (
        {"optimizer_args": {"betas": [0.8, 0.9], "eps": 1e-6, "amsgrad": True}},
        "optimizer_args",
        "torch.optim.AdamW( groups, lr=LR, foreach=True, betas=(0.8, 0.9), eps=1e-06, amsgrad=True )",
    ),
    ({"lr": 0.125}, "lr", "LR = 0.125"),
    ({"weight_decay": 0.25}, "weight_decay", "WEIGHT_DECAY = 0.25"),
    ({"clip_norm": 0.5}, "clip_norm", "CLIP_NORM = 0.5"),
    ({"seed": 77}, "seed", '"--seed", type=int, default=77'),
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
    ({"data": __file__}, "data", f'data: "{Path(__file__)}"'),
    ({"held_out": 0.25}, "held_out", "held_out: 0.25"),
    ({"seq_len": 48}, "seq_len", "seq_len: 48"),
    ({"micro_batch": 3}, "micro_batch", "micro_batch: 3"),
    ({"accumulate": 5}, "accumulate", "accumulate: 5"),
    ({"optimizer": "sgd"}, "optimizer", 'optimizer: "sgd"'),
    ({"optimizer_args": {"fused": True}}, "optimizer_args", 'optimizer_args: {"fused": true}'),
    ({"lr": 0.125}, "lr", "lr: 0.125"),
    ({"weight_decay": 0.25}, "weight_decay", "weight_decay: 0.25"),
    ({"clip_norm": 0.5}, "clip_norm", "accelerator.clip_grad_norm_(model.parameters(), 0.5)"),
    ({"seed": 77}, "seed", "seed: 77"),
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


def test_the_tables_leave_no_field_out() -> None:
    fields = {f.name for kind in (Spec, Workload, Strategy) for f in dataclasses.fields(kind)} - {
        "workload",
        "strategy",
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
