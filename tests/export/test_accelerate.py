"""The real Accelerate takes an exported config, and makes of it what the Spec says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_lab.export import export_accelerate
from fsdp_lab.spec.spec import Spec
from tests.export.ranks import spec

pytest.importorskip("accelerate")


def made_of(file: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The launcher's arguments after it read the file, and the plugin that a launched process makes."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = ["--config_file", str(file), "--main_process_port", "0", __file__]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    with monkeypatch.context() as here:
        for name in [n for n in os.environ if n.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_"))]:
            here.delenv(name)
        for name, value in prepare_multi_gpu_env(args).items():
            here.setenv(name, value)
        here.setenv("FSDP_SYNC_MODULE_STATES", "false")  # for which it wants a GPU at once
        plugin = FullyShardedDataParallelPlugin() if args.use_fsdp else None
        if plugin is not None and args.mixed_precision != "no":
            plugin.set_mixed_precision(args.mixed_precision)  # as its state does
        if args.use_parallelism_config:
            from accelerate.parallelism_config import ParallelismConfig

            args.parallelism = ParallelismConfig()
    return args, plugin


def test_accelerate_makes_of_it_what_the_spec_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, ShardingStrategy

    def made(name: str, asked: Spec) -> tuple[Any, Any]:
        return made_of(export_accelerate(asked, tmp_path / f"{name}.yaml"), monkeypatch)

    args, plugin = made("lab", spec(3, offload="all", recompute="full", precision="bf16-pure", compile=True))
    assert (args.use_fsdp, args.num_processes, args.mixed_precision) == (True, 3, "bf16")
    assert (plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing) == (2, True, True)
    assert plugin.transformer_cls_names_to_wrap == ["GPT2Block"] and isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.bfloat16)
    assert (args.dynamo_backend, args.dynamo_use_regional_compilation) == ("INDUCTOR", True)

    args, plugin = made(
        "fsdp2", spec(8, backend="fsdp2", sharding="hybrid_shard_zero2", shard_size=4, wrap="min_params:99")
    )
    assert (plugin.reshard_after_forward, plugin.min_num_params, plugin.activation_checkpointing) == (False, 99, False)
    assert (args.parallelism.dp_replicate_size, args.parallelism.dp_shard_size, args.num_processes) == (2, 4, 8)
    assert args.mixed_precision == "no" and not isinstance(plugin.cpu_offload, CPUOffloadPolicy)

    args, plugin = made("fsdp1", spec(backend="fsdp1", sharding="shard_grad_op", wrap="class:GPT2MLP", forward_prefetch=1,
                                      backward_prefetch_point="after", offload="all", precision="fp16"))  # fmt: skip
    assert (plugin.fsdp_version, plugin.sharding_strategy) == (1, ShardingStrategy.SHARD_GRAD_OP)
    assert plugin.backward_prefetch == BackwardPrefetch.BACKWARD_POST and plugin.forward_prefetch
    assert plugin.transformer_cls_names_to_wrap == ["GPT2MLP"] and plugin.use_orig_params
    assert args.fsdp_sync_module_states
    assert plugin.cpu_offload.offload_params and plugin.mixed_precision_policy.reduce_dtype == torch.float16

    _, plugin = made("whole", spec(backend="fsdp1", wrap="whole", backward_prefetch=0))
    assert plugin.auto_wrap_policy is None and plugin.backward_prefetch is None
    assert plugin.sharding_strategy == ShardingStrategy.FULL_SHARD

    args, plugin = made("ddp", spec(backend="ddp", sharding="no_shard", devices=("cuda:1", "cuda:3"), precision="bf16"))
    assert plugin is None and (args.multi_gpu, args.gpu_ids, args.mixed_precision) == (True, "1,3", "bf16")
