"""A live switch never holds two models, moves every bit, and is undone where it fails."""

from itertools import pairwise
from typing import Any

import pytest

from fsdp_lab.backends.base import storage_id
from fsdp_lab.base.events import Role
from fsdp_lab.models import flops
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.wrapping import units
from fsdp_lab.rank import Session
from fsdp_lab.rank.trainer import checksum
from fsdp_lab.spec.spec import Spec
from tests.engine.scenarios.meter import growths
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, session, trainer_of

DEEP = {"model_type": "gpt2", "n_layer": 5, "n_embd": 192, "n_head": 4, "vocab_size": 512, "n_positions": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "lab zero1": {"backend": "lab", "sharding": "zero1"},
    "lab offload": {"backend": "lab", "sharding": "no_shard", "offload": "optimizer"},
    "lab bf16": {"backend": "lab", "offload": "all", "precision": "bf16"},
    "fsdp2 offload": {"backend": "fsdp2", "sharding": "shard_grad_op", "offload": "all"},
    "fsdp1 bf16": {"backend": "fsdp1", "sharding": "shard_grad_op", "precision": "bf16"},
}


def spec(**changes: Any) -> Spec:
    return Spec(world_size=2).replace(model=DEEP, seq_len=16, micro_batch=1, lr=0.01).replace(**changes)


def held(s: Session) -> int:
    """Bytes of parameters and optimizer state between steps, and of what the backend keeps beside them."""
    backend = trainer_of(s).backend
    sizes = {storage_id(t): t.untyped_storage().nbytes() for t in (getattr(t, "_local_tensor", t)
             for role, t in backend.persistent_tensors() if role is not Role.GRADIENTS)}  # fmt: skip
    return sum(sizes.values()) + backend.resident_bytes()


def walk(place: Place, way: list[dict[str, Any]]) -> list[Any]:
    """For each switch: the bytes held before and after, how far its peak is above those before, and both checksums."""
    found = []
    with growths() as (mark, grown), pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "_EDGES", {"cpu": (64,)})  # a new dtype's peak is measured: here by small products
        s = session(place, reduction="rank_ordered")
        s.apply("run", way[0])
        s.train(1)
        for given in way[1:]:
            old, before, first = trainer_of(s).backend, held(s), checksum(trainer_of(s).backend)
            mark()
            if Spec.from_dict(given) == trainer_of(s).spec:
                s._lifecycle.rebuild()
            else:
                s.apply("run", given)
            mark()
            assert trainer_of(s).backend is not old
            found.append((before, held(s), first, checksum(trainer_of(s).backend)))
        s.train(1)
        s.close()
    return [(*one, grew) for one, grew in zip(found, grown(), strict=True)]


def unit_bytes() -> int:
    """Of the parameters of the largest unit, in fp32."""
    skeleton = build_skeleton(resolve(DEEP))
    inside = [sum(p.numel() for m in group for p in m.parameters()) for group in units(skeleton, "block")]
    root = sum(p.numel() for p in skeleton.parameters()) - sum(inside)
    return 4 * max(root, *inside)


@pytest.mark.slow
def test_a_switch_never_holds_two_models(pool: Pool) -> None:
    """From each backend and to each, and to other layouts, one after the other."""
    layouts, unit = {**BACKENDS, **OTHERS}, unit_bytes()
    names = ["lab", "lab", "fsdp2", "fsdp1", "fsdp1", "ddp", "lab zero1", "fsdp1 bf16", "lab bf16", "fsdp2 offload", "ddp",
             "lab offload"]  # fmt: skip
    way = [spec(**layouts[name]) for name in names]
    by_rank = pool.run(walk, 2, [s.to_dict() for s in way], reduction=None, timeout_s=280)
    for i, (one, other) in enumerate(pairwise(names)):
        sums = []
        for before, after, first, last, grown in (rank[i] for rank in by_rank):
            building = 2.5 * unit if layouts[other]["backend"] == "fsdp1" else 0.0  # torch flattens a unit by a copy
            bound = max(before, after) + max(3 * unit, building)  # parameters, and AdamW's two slots
            assert before + grown <= bound * 1.01, f"{one} -> {other}: {before + after:,} for both"
            sums.append((first, last))
        for n, s in enumerate(way[i : i + 2]):
            sums.append(sum(pair[n] for pair in sums[: s.shard_factor]) % (1 << 64))
        assert sums[-1] == sums[-2], f"{one} -> {other}"
