"""The engine's core needs none of its extras: it imports none, and trains to the bits of the whole engine by itself."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fsdp_lab import engine
from fsdp_lab.engine import ShardMesh, build_mesh, full_state, fully_shard, shard, sharded_parameters, shards_of
from fsdp_lab.engine.policy import ShardPolicy
from fsdp_lab.engine.schedule import Rules
from tests.engine.toys import batch, make, mean_square, update
from tests.pool import Place, Pool

CORE = [path for path in Path(engine.__file__).parent.glob("*.py") if path.name != "__init__.py"]
MOST_LINES, MOST_FILES = 2_595, 12  # they only fall


def test_it_imports_none_of_the_extras_and_stays_small() -> None:
    imports = {path.name: re.findall(r"(?:from|import) fsdp_lab\.engine\.extras\S*", path.read_text()) for path in CORE}
    assert not {name: some for name, some in imports.items() if some}
    lines = sum(len(path.read_text().splitlines()) for path in CORE)
    assert len(CORE) <= MOST_FILES and lines <= MOST_LINES, (len(CORE), lines)


def trained(place: Place, core: bool, bf16: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of three steps, one of them with a forward without gradients before it."""
    torch.manual_seed(0)
    model, mesh = make(), ShardMesh.of(build_mesh("cpu"))
    mp = engine.MixedPrecisionPolicy(**{"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {})
    policy = ShardPolicy(mp=mp, rules=Rules(), has_own_prefetch=False, shard_optimizer_only=False)
    for module in (*model.blocks, model):
        if core:
            shard([module], mesh, policy)
        else:
            fully_shard(module, mesh=mesh, mp_policy=mp)
    given = {id(s.param) for s in shards_of(model)}
    assert given == {id(p) for p in (model.parameters() if core else sharded_parameters(model))}, "what the lab steps"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        with torch.no_grad():
            model(batch(step, place.rank))
        loss = mean_square(model, batch(step, place.rank))
        loss.backward()
        losses.append(float(loss.detach()))
        update(optimizer)
    return losses, dict(full_state(model))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_trains_by_itself_to_the_same_bits(pool: Pool, ranks: int, bf16: bool) -> None:
    alone, whole = (pool.run(trained, ranks, core, bf16) for core in (True, False))
    for (losses, values), (other_losses, others) in zip(alone, whole, strict=True):
        assert losses == other_losses and losses[0] != losses[-1] and values.keys() == others.keys()
        assert all(torch.equal(values[name], others[name]) for name in values)
