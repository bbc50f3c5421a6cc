"""Launched by `accelerate launch`: rank 0 prints, as JSON, what Accelerate made of a config, and a step is trained.

Accelerate takes FSDP on accelerators alone, so on a CPU its plugin is made here, from the environment that it launched with.
"""

from __future__ import annotations

import json
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin


def train(accelerator: Accelerator) -> None:
    """By itself, so that DDP is gone before its group is: it would end the group holding Python's lock, which can hang."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).square().mean())
    optimizer.step()


def main() -> None:
    accelerator = Accelerator()
    train(accelerator)
    plugin = FullyShardedDataParallelPlugin()
    if accelerator.is_main_process:
        said = {
            "processes": accelerator.num_processes,
            "fsdp": os.environ.get("ACCELERATE_USE_FSDP"),
            "version": plugin.fsdp_version,
            "reshard": plugin.reshard_after_forward,
            "classes": plugin.transformer_cls_names_to_wrap,
            "checkpointing": plugin.activation_checkpointing,
        }
        print("said " + json.dumps(said), flush=True)
    accelerator.end_training()
    time.sleep(0.3)  # a thread of Gloo that still holds a tensor when Python ends would abort this process


if __name__ == "__main__":
    main()
