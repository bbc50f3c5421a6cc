"""Ours against the naive one, which shares no line with it: in fp32 every loss and every parameter has the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_lab.engine import full_state, fully_shard, parameter_groups
from fsdp_lab.spec.spec import Strategy
from tests.covering import tiered
from tests.engine.naive import Naive
from tests.engine.toys import options_of
from tests.pool import Place, Pool

STEPS = 3
Optimizers = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(width), nn.Linear(width, 37), nn.Linear(37, width, bias=False)
        self.gate = nn.Parameter(torch.tensor(0.5))  # no dimension at all

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.outer(F.gelu(self.inner(self.norm(x))))


class Model(nn.Module):
    """Sizes that nothing divides; the embedding is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(53, 19)
        self.blocks = nn.ModuleList(Block(19) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(19), nn.Linear(19, 53)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.3, momentum=0.9)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def decays(name: str, p: Tensor) -> str:
    return "decays" if p.dim() >= 2 else "does not"


def grouped(groups: dict[Any, list[nn.Parameter]], make: Optimizers) -> torch.optim.Optimizer:
    decay = {"decays": 0.1, "does not": 0.0}
    return make([{"params": groups[name], "weight_decay": wd} for name, wd in decay.items()])


def train(place: Place, make: Optimizers, strategies: list[Strategy]) -> list[str]:
    """Naive, then ours by each strategy, on the same batches. Returns what differs."""
    torch.manual_seed(7)
    initial = Model()
    losses, wanted = by_naive(place, copy.deepcopy(initial), make, strategies[0])
    wrong = []
    if all(torch.equal(wanted[name], p) for name, p in initial.named_parameters()):
        wrong.append("naive did not learn")
    for strategy in strategies:
        model = copy.deepcopy(initial)
        got_losses, got = by_ours(place, model, make, strategy)
        if got_losses != losses:
            wrong.append(f"{strategy}: losses {got_losses}, not {losses}")
        wrong += [f"{strategy}: {name}" for name in wanted if not torch.equal(wanted[name], got[name])]
    return wrong


def batches(place: Place) -> list[Tensor]:
    generator = torch.Generator().manual_seed(place.rank)
    return [torch.randint(53, (2, 11), generator=generator) for _ in range(STEPS)]


def by_naive(place: Place, model: Model, make: Optimizers, strategy: Strategy) -> Any:
    def optimizer(shards: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        shapes = dict(model.named_parameters())
        groups: dict[Any, list[nn.Parameter]] = {}
        for name, shard in shards:
            groups.setdefault(decays(name, shapes[name]), []).append(shard)
        return grouped(groups, make)

    naive = Naive(model, optimizer, strategy.shard_size)
    losses = [naive.step(lambda m, batch=batch: m(batch)) for batch in batches(place)]  # type: ignore[misc]
    naive.gather()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def by_ours(place: Place, model: Model, make: Optimizers, strategy: Strategy) -> Any:
    options = {**options_of(strategy), "group_of": decays}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = grouped(parameter_groups(model), make)
    losses = []
    for batch in batches(place):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(full_state(model))


@pytest.mark.parametrize(
    ("make", "world_size"),
    tiered([(adamw, 1), (sgd, 2), (adamw, 3), (sgd, 4), (adamw, 4)], lambda make, world_size: world_size in (2, 3)),
)
def test_ours_equals_the_naive_one_bit_for_bit(pool: Pool, world_size: int, make: Optimizers) -> None:
    strategies = [Strategy(sharding=s) for s in ("full_shard", "shard_grad_op", "zero1", "no_shard")]
    strategies += [Strategy(reshard_size=2)] if world_size == 4 else []
    for wrong in pool.run(train, world_size, make, strategies, reduction="rank_ordered"):
        assert not wrong


@pytest.mark.parametrize("factor", tiered([1, 2, 4], lambda factor: factor == 2))
def test_hybrid_equals_the_naive_one_that_averages_in_groups(pool: Pool, factor: int) -> None:
    strategies = [Strategy(sharding=s, shard_size=factor) for s in ("hybrid_shard", "hybrid_shard_zero2")]
    for wrong in pool.run(train, 4, sgd, strategies, reduction="rank_ordered"):
        assert not wrong
