"""FSDP2 at its best, with which `bench step` compares: on torch's own group nothing of it crosses the lab's wire."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from fsdp_lab.bench.interleave import _tune
from fsdp_lab.models.wrapping import blocks
from tests.pool import Place, Pool


def _collectives(place: Place, raw: str) -> Counter[str]:
    """Of a step, by kind, that crossed the wire; `raw`: the backend of torch's own group that the model is on, or ""."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=32, n_positions=16))
    group = dist.new_group(backend=raw) if raw else dist.group.WORLD
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    for module in (*blocks(model), model):
        fully_shard(module, mesh=mesh)
    _tune(model, raw=raw)
    place.context.meter.take()
    tokens = torch.arange(8).view(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return Counter(c.kind for c in place.context.meter.take())


@pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="from torch 2.13 on")
def test_reductions_have_a_group_of_torch_s_own(pool: Pool) -> None:
    for found in pool.run(_collectives, 2, "gloo", shared_memory=True):
        assert not found
    for found in pool.run(_collectives, 2, "", shared_memory=True):
        assert found["all_gather"] == 5 and found["reduce_scatter"] == 4, "the last blocks are gathered once"
