"""The gradient's norm is exact enough to be the same whatever the shards are."""

from __future__ import annotations

import pytest
import torch

from fsdp_lab.rank.trainer import squared_norm


@pytest.mark.parametrize("shape", [(3_000_000,), (1200, 2500), (1, 3_000_000), (3_000_000, 1), ()], ids=str)
def test_of_a_large_tensor(shape: tuple[int, ...]) -> None:
    """Of which torch sums the squares one after the other, in fp32, where it is asked for the norm of all at once."""
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)
    for one in (t, t.t() if t.dim() == 2 else t):
        assert squared_norm([one]) == pytest.approx(float(one.double().square().sum()), rel=1e-5)


def test_of_none() -> None:
    assert squared_norm([]) == 0.0
