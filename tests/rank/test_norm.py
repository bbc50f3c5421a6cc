"""The gradient's norm is exact enough to be the same whatever the shards are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fsdp_lab.rank.trainer import _rounded, squared_norm

CPU = torch.device("cpu")


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)


@pytest.mark.parametrize("shape", [(1200, 2500), (1, 3_000_000), ()], ids=str)
def test_it_is_exact_of_a_large_tensor(shape: tuple[int, ...]) -> None:
    """Of which torch sums the squares one after the other, in fp32, where it is asked for the norm of all at once."""
    t = random(*shape)
    for one in (t, t.t() if t.dim() == 2 else t, t.reshape(-1)):
        assert float(squared_norm([one], CPU)) == pytest.approx(float(one.double().square().sum()), rel=1e-13)


def test_it_has_the_same_bits_however_the_elements_are_cut() -> None:
    t = random(200_003)
    cuts = [[t], list(t.split(77)), list(t.split(40_000)), list(reversed(t.split(12_345)))]
    assert len({_rounded(math.sqrt(float(squared_norm(cut, CPU)))) for cut in cuts}) == 1
    assert float(squared_norm([], CPU)) == 0.0


@pytest.mark.parametrize("norm", [0.0, 1.0, 1 / 3, 1e-300, 1e300])
def test_it_is_rounded_to_the_precision_of_fp32_and_not_to_its_range(norm: float) -> None:
    rounded = _rounded(norm)
    assert rounded == pytest.approx(norm, rel=2.0**-24) and _rounded(rounded) == rounded
    assert norm in (0.0, 1.0) or rounded != norm
