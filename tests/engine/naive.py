"""A second oracle: sharded data parallelism in twenty lines of torch, with nothing of ours in it.

Every rank keeps its part of each parameter and no more; a step gathers all of them, computes, gathers all gradients, sums
them in the order of ranks, divides, and lets each rank update its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed as dist, nn


class Naive:
    """`factor` F: gradients are averaged over each F neighbours first, then across; W for plain sharding."""

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        factor: int | None = None,
    ):
        self.model, self.world, self.factor = model, dist.get_world_size(), factor or dist.get_world_size()
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shards = {name: nn.Parameter(self._mine(p.detach()).clone()) for name, p in self.trained.items()}
        self.optimizer = make(list(self.shards.items()))

    def _mine(self, whole: Tensor) -> Tensor:
        """[n]: this rank's part of a flattened tensor, the last ones filled up with zeros."""
        n = -(-whole.numel() // self.world)
        padded = torch.zeros(n * self.world, dtype=whole.dtype)
        padded[: whole.numel()] = whole.reshape(-1)
        return padded[dist.get_rank() * n : (dist.get_rank() + 1) * n]

    def _everybodys(self, mine: Tensor) -> list[Tensor]:
        got = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(got, mine.detach().contiguous())
        return got

    def gather(self) -> None:
        for name, p in self.trained.items():
            p.data = torch.cat(self._everybodys(self.shards[name]))[: p.numel()].view(p.shape)

    def step(self, loss: Callable[[nn.Module], Tensor]) -> float:
        self.gather()
        value = loss(self.model)
        value.backward()
        for name, p in self.trained.items():
            if p.grad is None:
                continue
            grads = self._everybodys(p.grad)
            near = [grads[i : i + self.factor] for i in range(0, self.world, self.factor)]
            across = in_order([in_order(group) / self.factor for group in near]) / (self.world // self.factor)
            self.shards[name].grad, p.grad = self._mine(across), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.item()


def in_order(summands: list[Tensor]) -> Tensor:
    total = summands[0].clone()
    for s in summands[1:]:
        total += s
    return total
