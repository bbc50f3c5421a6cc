"""Small models really learn from what `Initializer` and `Batches` give them."""

from __future__ import annotations

import math

import pytest
import torch

from fsdp_lab.models import Batches, resolve
from fsdp_lab.models.presets import facts_of
from fsdp_lab.spec.workload import Workload
from tests.models.small import filled


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-1m", "bert-1m", "t5-1m", "vit-1m", "resnet-1m"])
def test_the_loss_starts_at_chance_and_falls(name: str) -> None:
    facts = facts_of(resolve(name))
    data = "stdlib" if facts.is_text else "images"
    workload = Workload(model=name, data=data, micro_batch=8, seq_len=64, lr=1e-3)
    model = filled(name)
    batches = Batches(workload, resolve(name), rank=0, world_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.lr)
    losses = []
    for step in range(30):
        loss = model(**batches.batch(step * 8)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[0] == pytest.approx(math.log(facts.vocab_size or facts.classes), abs=0.8)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
