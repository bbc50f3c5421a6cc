"""The same as `tests.own.TEXT` in small, in a module that the ranks can import too."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks(x))


def build() -> nn.Module:
    return Net()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(8.0) * i / 40
        return x, x.sin()
