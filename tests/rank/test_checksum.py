"""The checksum of the parameters and the gradient's norm: the same however they are sharded, another when one element is."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_lab.base.events import StepEvent
from fsdp_lab.engine import ParamShard
from fsdp_lab.rank.trainer import _rounded, checksum, squared_norm
from tests.pool import Pool
from tests.rank.test_session import DDP, apply, play, spec, train

LAYOUTS: list[dict[str, Any]] = [{"sharding": "zero1"}, {"sharding": "hybrid_shard", "shard_size": 2},
                                 {"backend": "fsdp2", "sharding": "hybrid_shard", "shard_size": 2},
                                 {"backend": "fsdp1"}, DDP]  # fmt: skip


def copies(events: list[StepEvent]) -> dict[int, int]:
    """Replica -> the whole checksum of its parameters."""
    found: dict[int, int] = {}
    for e in events:
        found[e.replica] = (found.get(e.replica, 0) + e.checksum) % (1 << 64)
    return found


@pytest.mark.slow
def test_the_checksum_is_that_of_the_parameters_whatever_holds_them(pool: Pool) -> None:
    calls = [c for kind in LAYOUTS for c in (apply(spec(4, **kind), fresh=True), train(1, checks=[0]))]
    by_rank = [answers[1::2] for answers in play(pool, 4, *calls, reduction="rank_ordered")]
    sums: dict[bool, set[int]] = {}
    for changes, told in zip(LAYOUTS, zip(*by_rank, strict=True), strict=True):
        parts = copies([StepEvent.from_dict(one["events"][0]) for one in told])
        hybrid = changes.get("sharding") == "hybrid_shard"  # sums in another order, within groups first
        sums.setdefault(hybrid, set()).update(parts.values())
        replicas = 2 if hybrid else 4 if changes.get("sharding") == "no_shard" else 1
        assert len(parts) == replicas, changes
    assert [len(different) for different in sums.values()] == [1] * len(sums)


def piece(name: str, values: torch.Tensor, start: int = 0, stop: int | None = None) -> Any:
    """A backend as far as a checksum needs one."""
    stop = values.numel() if stop is None else stop
    held: Any = ParamShard(name=name, shape=values.shape, start=start, stop=stop, local=values[start:stop], param=None)
    return SimpleNamespace(param_shards=lambda: [held])


def test_parts_add_up_and_every_element_counts() -> None:
    values = torch.randn(3 << 20, generator=torch.Generator().manual_seed(0))  # more than is summed at a time
    whole, cut = checksum(piece("w", values)), 1_500_001
    assert sum([checksum(piece("w", values, 0, cut)), checksum(piece("w", values, cut))]) % (1 << 64) == whole
    assert checksum(piece("v", values)) != whole  # under another name
    for at in (0, 1 << 20, values.numel() - 1):
        changed = values.clone()
        changed[at] = torch.nextafter(changed[at], torch.tensor(9e9))
        assert checksum(piece("w", changed)) != whole
    changed = values.clone()
    changed[[5, 7]] = changed[[7, 5]]
    assert checksum(piece("w", changed)) != whole
    zeros = (torch.tensor([zero, 1.0]) for zero in (0.0, -0.0))
    assert len({checksum(piece("w", t)) for t in zeros}) == 1, "the sign of zero is nothing"


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)


@pytest.mark.parametrize("shape", [(1200, 2500), (1, 3_000_000), ()], ids=str)
def test_it_is_exact_of_a_large_tensor(shape: tuple[int, ...]) -> None:
    """Of which torch sums the squares one after the other, in fp32, where it is asked for the norm of all at once."""
    t = random(*shape)
    for one in (t, t.t() if t.dim() == 2 else t, t.reshape(-1)):
        exact = float(one.double().square().sum())
        assert float(squared_norm([one], torch.device("cpu"))) == pytest.approx(exact, rel=1e-13)


def test_it_has_the_same_bits_however_the_elements_are_cut() -> None:
    t = random(200_003)
    cuts = [[t], list(t.split(77)), list(t.split(40_000)), list(reversed(t.split(12_345)))]
    assert len({_rounded(math.sqrt(float(squared_norm(cut, torch.device("cpu"))))) for cut in cuts}) == 1
    assert float(squared_norm([], torch.device("cpu"))) == 0.0


@pytest.mark.parametrize("norm", [0.0, 1.0, 1 / 3, 1e-300, 1e300])
def test_it_is_rounded_to_the_precision_of_fp32_and_not_to_its_range(norm: float) -> None:
    rounded = _rounded(norm)
    assert rounded == pytest.approx(norm, rel=2.0**-24) and _rounded(rounded) == rounded
    assert norm in (0.0, 1.0) or rounded != norm
