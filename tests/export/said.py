"""Launched by `accelerate launch said.py SPEC STEPS`: rank 0 prints, as JSON, what Accelerate made of a config, and the
losses of the Spec in the file SPEC, trained through Accelerate as the head of its config says.

Accelerate takes FSDP on accelerators alone, so on a CPU its plugin is made here, from the environment that it launched with.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from transformers import AutoModelForCausalLM

from fsdp_lab.models import Batches, resolve
from fsdp_lab.spec.spec import Spec


def trained(accelerator: Accelerator, spec: Spec, steps: int) -> list[float]:
    """The mean loss of each step."""
    w = spec.workload
    batches = Batches(w, resolve(w.model), rank=accelerator.process_index, world_size=accelerator.num_processes)
    model = AutoModelForCausalLM.from_pretrained(w.model).train()
    groups = [{"params": [p for p in model.parameters() if (p.dim() >= 2) == is_matrix], "weight_decay": decay}
              for is_matrix, decay in ((True, w.weight_decay), (False, 0.0))]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=w.lr, foreach=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, w.rates.factor)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(steps):
        total = torch.zeros(())
        for micro in range(w.accumulate):
            with accelerator.accumulate(model):
                place = step * spec.global_batch, micro
                loss = model(**batches.batch(*place)).loss * batches.weight(*place)
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            total += loss.detach()
        mean = torch.tensor(total.item() / w.accumulate, dtype=torch.float64)
        losses.append(float(accelerator.reduce(mean, "mean")))
    return losses


def main() -> None:
    spec = Spec.from_json(Path(sys.argv[1]).read_text())
    plugin = GradientAccumulationPlugin(num_steps=spec.workload.accumulate, sync_each_batch=spec.sync_interval == 1)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as where there is an accelerator
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = sharding = FullyShardedDataParallelPlugin()
    assert accelerator.is_fsdp2
    losses = trained(accelerator, spec, int(sys.argv[2]))
    if accelerator.is_main_process:
        said = {
            "processes": accelerator.num_processes,
            "fsdp": os.environ.get("ACCELERATE_USE_FSDP"),
            "version": sharding.fsdp_version,
            "reshard": sharding.reshard_after_forward,
            "classes": sharding.transformer_cls_names_to_wrap,
            "checkpointing": sharding.activation_checkpointing,
        }
        print("said " + json.dumps([said, losses]), flush=True)
    accelerator.end_training()
    time.sleep(0.3)  # a thread of Gloo that still holds a tensor when Python ends would abort this process


if __name__ == "__main__":
    main()
