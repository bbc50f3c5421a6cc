"""One scenario, three engines: losses and parameters are equal."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_lab import engine
from tests.covering import tiered
from tests.engine.scenarios import checkpoints, loops, models, optimizers
from tests.engine.scenarios.engines import BOUND, Kind, Meter, Run, Scenario, agree, differences, run
from tests.engine.scenarios.meter import allocated
from tests.pool import Place, Pool

SCENARIOS = {s.name: s for s in (*loops.SCENARIOS, *models.SCENARIOS, *optimizers.SCENARIOS)}
# Of ours beside FSDP2's peak. Models here are of kilobytes: up to 64 parameters are padded to 16 bytes each in the master
# shard, the gathered buffer, the gradient as it is sent and as it is reduced, and two moments; each has a placeholder of
# three numbers; and what a thread of Gloo's frees late is seen late. `bench memory` compares byte by byte.
MORE, MORE_BYTES = 1.05, 16 * 1024


def _runs(place: Place, name: str, kinds: list[Kind], meter: Meter | None) -> list[Run]:
    """By each engine; and by ours with units that stay gathered after a forward, where the script's loop is what differs."""
    where = {"rank": place.rank, "world_size": place.world_size}
    runs = [run(SCENARIOS[name], kind, meter, **where) for kind in kinds]
    if SCENARIOS[name] in loops.SCENARIOS:
        with patch.object(engine, "fully_shard", partial(engine.fully_shard, reshard_after_forward=False)):
            runs.append(run(SCENARIOS[name], Kind.OURS, **where))
    return runs


@pytest.mark.parametrize("name", tiered(SCENARIOS, lambda name: SCENARIOS[name].quick))
def test_every_engine_has_the_numbers_of_one_process(pool: Pool, name: str) -> None:
    """Within the bound; of FSDP2 and ours bit for bit, where sums have one order."""
    scenario = SCENARIOS[name]
    wanted = run(scenario, Kind.ONE)
    kinds = [kind for kind in (Kind.FSDP2, Kind.OURS) if kind not in scenario.not_under]
    meter = allocated if scenario.quick else None
    # Over shared memory sums have one order, and no thread of Gloo's frees a tensor later than its user.
    by_rank = pool.run(_runs, scenario.ranks, name, kinds, meter, shared_memory=True)
    seen = [agree(runs) for runs in zip(*by_rank, strict=True)]
    for i, one in enumerate(seen):
        assert differences(one.log, wanted.log, scenario.bound) == {}, kinds[i : i + 1] or "ours, kept"
    if len(kinds) == 2:
        fsdp2, ours, *_ = seen
        assert differences(ours.log, fsdp2.log, None if scenario.bits else scenario.bound) == {}
        if ours.peak_bytes is not None and fsdp2.peak_bytes is not None:
            assert ours.peak_bytes <= MORE * fsdp2.peak_bytes + MORE_BYTES


# -- checkpoints -------------------------------------------------------------------------------------------------------
def _of_checkpoints(place: Place, script: Any, kind: Kind, folder: Path) -> Run:
    return run(Scenario(script=script), kind, rank=place.rank, world_size=place.world_size, folder=folder)


Engines = tuple[Kind, int]  # on how many ranks
# The format, who writes, and who reads.
SAVED = [("sharded", (Kind.OURS, 2), (Kind.OURS, 4)), ("sharded", (Kind.FSDP2, 4), (Kind.OURS, 2)),
         ("plain", (Kind.OURS, 2), (Kind.FSDP2, 2)), ("whole", (Kind.OURS, 4), (Kind.ONE, 1)),
         ("whole everywhere", (Kind.ONE, 1), (Kind.OURS, 2)), ("by rank", (Kind.OURS, 2), (Kind.OURS, 2)),
         ("meanwhile", (Kind.OURS, 2), (Kind.FSDP2, 2))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("how", "writer", "reader"), SAVED, ids=str)
def test_what_was_saved_goes_on(pool: Pool, tmp_path: Path, how: str, writer: Engines, reader: Engines) -> None:
    """As what was never interrupted, in one process."""
    folder = tmp_path / "saved"
    (saves, before), (reads, after) = writer, reader
    pool.run(_of_checkpoints, before, partial(checkpoints.written, how=how), saves, folder)
    found = agree(pool.run(_of_checkpoints, after, partial(checkpoints.read, how=how), reads, folder))
    assert differences(found.log, run(Scenario(script=checkpoints.unbroken), Kind.ONE).log, BOUND) == {}
