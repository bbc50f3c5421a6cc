"""A live switch never holds two models, moves every bit, and is undone where it fails."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from fsdp_lab.backends.storage import storage_id
from fsdp_lab.base.events import Role
from fsdp_lab.engine.api import flats_of
from fsdp_lab.models import build_skeleton, flops, resolve
from fsdp_lab.models.wrapping import units
from fsdp_lab.rank import Session
from fsdp_lab.rank.trainer import checksum
from fsdp_lab.spec.spec import Spec
from tests.engine.scenarios.meter import growths
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, session

DEEP = {"model_type": "gpt2", "n_layer": 5, "n_embd": 192, "n_head": 4, "vocab_size": 512, "n_positions": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "lab zero1": {"backend": "lab", "sharding": "zero1"},
    "lab replicas": {"backend": "lab", "sharding": "no_shard"},
    "lab offload": {"backend": "lab", "sharding": "shard_grad_op", "offload": "optimizer"},
    "lab bf16": {"backend": "lab", "offload": "all", "precision": "bf16"},
    "fsdp2 offload": {"backend": "fsdp2", "sharding": "shard_grad_op", "offload": "all"},
    "fsdp1 replicas": {"backend": "fsdp1", "sharding": "no_shard"},
    "fsdp1 bf16": {"backend": "fsdp1", "sharding": "shard_grad_op", "precision": "bf16"},
}


def spec(**changes: Any) -> Spec:
    return Spec(world_size=2).replace(model=DEEP, seq_len=16, micro_batch=1, lr=0.01).replace(**changes)


def every_pair(names: list[str]) -> list[str]:
    """A way over the names in which each one follows each one once, itself too."""
    way, left = [names[0]], {name: [*names] for name in names}
    while left[way[-1]]:
        way.append(left[way[-1]].pop())
    assert len(way) == len(names) ** 2 + 1
    return way


def test_every_pair_is_on_the_way() -> None:
    way = every_pair([*BACKENDS])
    assert len(set(pairwise(way))) == len(way) - 1


# -- in a rank -------------------------------------------------------------------------------------------------------


def held(s: Session) -> int:
    """Bytes of parameters and optimizer state between steps, and of what the backend keeps beside them."""
    assert s.trainer is not None
    backend = s.trainer.backend
    sizes = {storage_id(t): t.untyped_storage().nbytes() for t in (getattr(t, "_local_tensor", t)
             for role, t in backend.persistent_tensors() if role is not Role.GRADIENTS)}  # fmt: skip
    return sum(sizes.values()) + backend.resident_bytes()


def walk(place: Place, way: list[dict[str, Any]]) -> list[Any]:
    """For each switch: the bytes held before and after, how far its peak is above those before, and both checksums."""
    found = []
    with growths() as (mark, grown), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            flops, "_EDGES", {"cpu": (64,)}
        )  # a new dtype's peak is measured: on a fast core by larger products
        s = session(place, reduction="rank_ordered")
        s.apply("run", way[0])
        for given in way[1:]:
            s.train(1)
            assert s.trainer is not None
            old, before, first = s.trainer.backend, held(s), checksum(s.trainer.backend)
            mark()
            if Spec.from_dict(given) == s.trainer.spec:
                s._lifecycle.rebuild()
            else:
                s.apply("run", given)
            mark()
            assert s.trainer.backend is not old
            found.append((before, held(s), first, checksum(s.trainer.backend)))
        s.close()
    return [(*one, grew) for one, grew in zip(found, grown(), strict=True)]


# -- what a switch takes ---------------------------------------------------------------------------------------------


def unit_bytes() -> int:
    """Of the parameters of the largest unit, in fp32."""
    skeleton = build_skeleton(resolve(DEEP))
    inside = [sum(p.numel() for m in group for p in m.parameters()) for group in units(skeleton, "block")]
    root = sum(p.numel() for p in skeleton.parameters()) - sum(inside)
    return 4 * max(root, *inside)


def assert_bounded(pool: Pool, names: list[str], layouts: dict[str, dict[str, Any]], optimizer: str) -> None:
    way = [spec(**layouts[name], optimizer=optimizer) for name in names]
    unit, slots = unit_bytes(), {"adamw": 2, "sgd": 0}[optimizer]
    by_rank = pool.run(walk, 2, [s.to_dict() for s in way], reduction=None, timeout_s=600)
    for i, (one, other) in enumerate(pairwise(names)):
        sums = []
        for before, after, first, last, grown in (rank[i] for rank in by_rank):
            building = 2.5 * unit if layouts[other]["backend"] == "fsdp1" else 0.0  # torch flattens a unit by a copy
            bound = max(before, after) + max(unit * (1 + slots), building)
            print(f"{optimizer} {one} -> {other}: {before + grown:,} of {bound:,.0f}; {before + after:,} for both")
            assert before + grown <= bound * 1.01, f"{one} -> {other}"
            sums.append((first, last))
        for n, s in enumerate(way[i : i + 2]):
            sums.append(sum(pair[n] for pair in sums[: s.shard_factor]) % (1 << 64))
        assert sums[-1] == sums[-2], f"{one} -> {other}"


@pytest.mark.slow
def test_a_switch_never_holds_two_models(pool: Pool) -> None:
    assert_bounded(pool, every_pair([*BACKENDS]), BACKENDS, "adamw")


@pytest.mark.slow
def test_nor_where_the_optimizer_keeps_nothing(pool: Pool) -> None:
    assert_bounded(pool, ["lab", "ddp", "fsdp2", "fsdp1", "lab", "lab"], BACKENDS, "sgd")


@pytest.mark.slow
def test_nor_between_other_layouts(pool: Pool) -> None:
    """There and back, by way of each."""
    assert_bounded(pool, ["lab", *OTHERS, "ddp", *reversed(OTHERS), "fsdp2"], {**BACKENDS, **OTHERS}, "adamw")


# -- the pool of shared memory -----------------------------------------------------------------------------------------


def pools(place: Place) -> tuple[int, int, int]:
    """What the pool takes: after steps of the last of some models, and when that is unloaded; and what is gathered in a
    backend that was retired between forward and backward."""
    s = session(place)
    for layers in (5, 4, 3):
        s.apply("run", spec(model={**DEEP, "n_layer": layers, "n_embd": 64 * layers}).to_dict(), fresh=True)
        s.train(2)
    trained = s.context.pool_bytes
    s.apply("run", spec(sharding="shard_grad_op").to_dict(), fresh=True)
    assert s.trainer is not None
    backend = s.trainer.backend
    backend.module(torch.zeros(1, 16, dtype=torch.int64))
    assert all(flat.is_gathered for flat in flats_of(backend.module))
    backend.retire()
    gathered = sum(flat.is_gathered for flat in flats_of(backend.module))
    s.unload()
    left = s.context.pool_bytes
    s.close()
    return trained, left, gathered


def test_a_pool_that_is_not_needed_is_given_back(pool: Pool) -> None:
    largest = 4 * (12 * 320**2 + (512 + 64) * 320)  # of the first model: a block, and the root
    for trained, left, gathered in pool.run(pools, 2, reduction=None):
        assert 0 < trained < 3 * largest and left < largest / 10 and gathered == 0
