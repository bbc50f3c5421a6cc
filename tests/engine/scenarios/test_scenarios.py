"""One scenario, four engines: losses and parameters are equal, and a fault in any of them would be seen."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist

from fsdp_lab.engine import ShardError
from fsdp_lab.wire import group
from tests.engine.scenarios import checkpoints, loops, models, optimizers
from tests.engine.scenarios.engines import (
    BOUND,
    ENGINES,
    Kind,
    Meter,
    Run,
    Scenario,
    agree,
    differences,
    drawn,
    run,
    step,
)
from tests.engine.scenarios.faults import FAULTS, GENERAL
from tests.engine.scenarios.meter import allocated
from tests.engine.toys import WIDTH, Net
from tests.pool import Place, Pool

SCENARIOS = {s.name: s for s in (*loops.SCENARIOS, *models.SCENARIOS, *optimizers.SCENARIOS)}
RANKS = 2
# Of ours beside FSDP2's peak. Models here are of kilobytes: up to 64 parameters are padded to 16 bytes each in the master
# shard, the gathered buffer, the gradient as it is sent and as it is reduced, and two moments; each has a placeholder of
# three numbers; and what a thread of Gloo's frees late is seen late. `bench memory` compares byte by byte.
MORE, MORE_BYTES = 1.05, 16 * 1024
# In the quick tier: each way in which an engine can go wrong, under FSDP2 and ours. The rest is slow.
QUICK = frozenset(
    {
        "contrastive",
        "gan",
        "gan_of_modules",
        "autocast_around_a_step",
        "two_backwards",
        "distillation",
        "generation",
        "unshard_ahead",
        "accumulation",
        "every_second",
        "early_exit",
        "moving_average",
        "tied_weights",
        "uneven_shapes",
        "buffers",
        "recurrent_block",
        "gradual_unfreezing",
        "low_rank_adapters",
        "reentrant_checkpointing",
        "meta_init",
        "bf16",
        "uncast_inputs",
        "llama",
        "peft_lora",
        "groups_with_schedule",
        "clipping_by_norm",
        "grad_scaler",
        "gradient_log",
        "optimizer_in_backward",
    }
)


def _in_rank(place: Place, name: str, kind: Kind, meter: Meter | None) -> Run:
    return run(SCENARIOS[name], kind, meter, rank=place.rank, world_size=place.world_size)


class Runs:
    """Of each scenario under each engine, once for all tests of this file; a failure is kept as well."""

    def __init__(self, pool: Pool, meter: Meter | None) -> None:
        self._pool, self._meter = pool, meter
        self._known: dict[tuple[str, Kind, int], Run | Exception] = {}

    def __call__(self, scenario: Scenario, kind: Kind, ranks: int = RANKS) -> Run:
        key = (scenario.name, kind, 1 if kind is Kind.ONE else ranks)
        if key not in self._known:
            try:
                # Over shared memory sums have one order, and no thread of Gloo's frees a tensor later than its user.
                self._known[key] = agree(
                    self._pool.run(_in_rank, key[2], scenario.name, kind, self._meter, shared_memory=True)
                )
            except AssertionError as e:
                self._known[key] = e
        known = self._known[key]
        if isinstance(known, Exception):
            raise known
        return known


@pytest.fixture(scope="session")
def runs(pool: Pool) -> Runs:
    return Runs(pool, allocated)


def skip_without(scenario: Scenario) -> None:
    if scenario.needs == "a compiler":
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            pytest.skip("no C++ compiler here")
    elif scenario.needs and importlib.util.find_spec(scenario.needs) is None:
        pytest.skip(f"{scenario.needs} is not installed here")


def cases(of: Callable[[Scenario], list[Any]], quick: Callable[[int, Any], bool]) -> list[Any]:
    """`quick`: which cases of the scenario at this place of QUICK are in the quick tier."""
    places = {name: i for i, name in enumerate(name for name in SCENARIOS if name in QUICK)}
    return [
        pytest.param(
            s.name,
            case,
            marks=[pytest.mark.slow] * (s.name not in places or not quick(places[s.name], case)),
            id=f"{s.name}-{getattr(case, 'value', case)}",
        )
        for s in SCENARIOS.values()
        for case in of(s)
    ]


def engines_of(scenario: Scenario) -> list[Kind]:
    """DDP, which is torch's and shards nothing, where something is said of it."""
    kinds = [kind for kind in Kind if kind not in {Kind.ONE, *scenario.not_under}]
    return [kind for kind in kinds if kind is not Kind.DDP or kind in scenario.other_order]


def faults_of(scenario: Scenario) -> list[str]:
    """Its own, and one of the general ones, which every scenario with an optimizer sees alike, by turns."""
    names, general = [*(n for n in SCENARIOS if n in QUICK), *(n for n in SCENARIOS if n not in QUICK)], list(GENERAL)
    place = names.index(scenario.name) % len(general)
    seen = [f for f in (*general[place:], *general[:place], *scenario.faults) if f not in scenario.unseen]
    return [*(f for f in seen if f in GENERAL)][:1] + [f for f in seen if f not in GENERAL]


def by_turns(place: int, fault: str) -> bool:
    """Each scenario's own, and one of the general ones."""
    return fault not in GENERAL or list(GENERAL).index(fault) == place % len(GENERAL)


@pytest.mark.parametrize(("name", "kind"), cases(engines_of, lambda place, kind: kind is not Kind.DDP))
def test_same_numbers(runs: Runs, name: str, kind: Kind) -> None:
    """As in one process within the bound; and between engines of two ranks bit for bit, where sums have one order."""
    scenario = SCENARIOS[name]
    skip_without(scenario)
    found = runs(scenario, kind)
    if found.refusal is not None:
        return
    wanted = runs(scenario, Kind.ONE)
    assert differences(found.log, wanted.log, scenario.bound) == {}
    if kind is not Kind.FSDP2 and Kind.FSDP2 not in scenario.not_under:
        peer = runs(scenario, Kind.FSDP2)
        bits = scenario.bits and kind not in scenario.other_order
        assert differences(found.log, peer.log, None if bits else scenario.bound) == {}
        if kind is Kind.OURS and found.peak_bytes is not None and peer.peak_bytes is not None:
            assert found.peak_bytes <= MORE * peer.peak_bytes + MORE_BYTES


def test_the_meter_counts_what_is_alive_together() -> None:
    with allocated() as peak:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(700)
    assert peak() == 4 * 1500 and len(second) + len(third) == 1200


@pytest.mark.parametrize(("name", "fault"), cases(faults_of, by_turns))
def test_a_fault_is_seen(runs: Runs, name: str, fault: str) -> None:
    """By more than what the engines may differ from one process."""
    scenario = SCENARIOS[name]
    skip_without(scenario)
    faulty = run(scenario, Kind.ONE, fault=FAULTS[fault])
    assert differences(faulty.log, runs(scenario, Kind.ONE).log, scenario.bound)


def _losing_a_rank(place: Place, name: str, kind: Kind) -> Run:
    """The sums of the process group have rank 0's summand alone."""

    def first_alone(summands: torch.Tensor, output: torch.Tensor, op: Any, opts: Any) -> None:
        output.view(-1).copy_(summands[0])

    with patch.object(group, "_sum_in_order", first_alone):
        return run(SCENARIOS[name], kind, rank=place.rank, world_size=place.world_size)


@pytest.mark.parametrize("kind", [Kind.DDP, Kind.FSDP2, Kind.OURS], ids=lambda k: k.value)
def test_a_lost_summand_is_seen(pool: Pool, runs: Runs, kind: Kind) -> None:
    """By the parameters, though no rank fails and all ranks agree."""
    name = "sgd_momentum"
    found = agree(pool.run(_losing_a_rank, RANKS, name, kind, reduction="rank_ordered"))
    differ = differences(found.log, runs(SCENARIOS[name], Kind.ONE).log, BOUND)
    assert {key for key in found.log if key.endswith(".weight")} <= differ.keys()


# -- four ranks: sums in the order of ranks ----------------------------------------------------------------------------

ON_FOUR = ("contrastive", "accumulation", "uneven_shapes", "tied_weights", "low_rank_adapters", "groups_with_schedule")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.FSDP2, Kind.OURS], ids=lambda k: k.value)
@pytest.mark.parametrize("name", ON_FOUR)
def test_same_numbers_on_four_ranks(runs: Runs, name: str, kind: Kind) -> None:
    scenario = SCENARIOS[name]
    found = runs(scenario, kind, 4)
    assert differences(found.log, runs(scenario, Kind.ONE).log, scenario.bound) == {}
    assert differences(found.log, runs(scenario, Kind.FSDP2, 4).log, None) == {}


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _saves(place: Place, how: str, kind: Kind, folder: Path) -> Run:
    script = Scenario(script=checkpoints.writing(how))
    return run(script, kind, rank=place.rank, world_size=place.world_size, folder=folder)


def _reads(place: Place, how: str, kind: Kind, folder: Path) -> Run:
    script = Scenario(script=checkpoints.reading(how))
    return run(script, kind, rank=place.rank, world_size=place.world_size, folder=folder)


# Who writes, on how many ranks, and who reads. The first rows are torch's own, so that a failure elsewhere is ours.
WAYS = [
    (Kind.ONE, 1, Kind.ONE, 1),
    (Kind.FSDP2, 2, Kind.FSDP2, 4),
    (Kind.DDP, 2, Kind.FSDP2, 2),
    (Kind.FSDP2, 2, Kind.OURS, 2),
    (Kind.OURS, 2, Kind.FSDP2, 2),
    (Kind.OURS, 2, Kind.OURS, 2),
    (Kind.OURS, 2, Kind.OURS, 4),
    (Kind.OURS, 4, Kind.OURS, 2),
    (Kind.OURS, 4, Kind.ONE, 1),
    (Kind.ONE, 1, Kind.OURS, 4),
    (Kind.DDP, 2, Kind.OURS, 4),
    (Kind.OURS, 2, Kind.DDP, 4),
]


ALIKE = [(Kind.OURS, 2), (Kind.ONE, 1), (Kind.DDP, 2), (Kind.FSDP2, 2), (Kind.OURS, 4)]
SAVED_WAYS = [
    *itertools.product(
        [how for how in checkpoints.FORMATS if how not in (checkpoints.BY_RANK, checkpoints.MEANWHILE)], WAYS
    ),
    *((checkpoints.BY_RANK, (*alike, *alike)) for alike in ALIKE),
    *((checkpoints.MEANWHILE, way) for way in WAYS[4:6]),
]
SAVED = [
    pytest.param(
        how,
        *way,
        marks=[pytest.mark.slow] * (i % 5 != 3),
        id="-".join([how, *(str(getattr(w, "value", w)) for w in way)]),
    )
    for i, (how, way) in enumerate(SAVED_WAYS)
    if i % 5 in (1, 3)  # in five formats each way is taken twice
]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Kind, int], Path]:
    """The folder that a writer filled, once for all that read it."""

    @functools.cache
    def write(save: Any, how: str, writer: Kind, ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint") / "saved"
        pool.run(_saves, ranks, how, writer, folder)
        return folder

    first = {form.save: how for how, form in reversed(checkpoints.FORMATS.items())}  # two formats are read from one
    return lambda how, writer, ranks: write(save := checkpoints.FORMATS[how].save, first[save], writer, ranks)


@pytest.fixture(scope="module")
def unbroken() -> Run:
    """What was never interrupted, in one process."""
    return run(Scenario(script=checkpoints.unbroken), Kind.ONE)


@pytest.mark.parametrize(("how", "writer", "before", "reader", "after"), SAVED)
def test_what_was_saved_goes_on(
    pool: Pool,
    saved: Callable[[str, Kind, int], Path],
    unbroken: Run,
    how: str,
    writer: Kind,
    before: int,
    reader: Kind,
    after: int,
) -> None:
    found = agree(pool.run(_reads, after, how, reader, saved(how, writer, before)))
    assert differences(found.log, unbroken.log, BOUND) == {}


# -- ranks with unequal numbers of batches -----------------------------------------------------------------------------

LIMIT_S = 2.0


def _unequal(place: Place) -> str:
    """The last rank has a batch less. Returns what a rank was told, or nothing."""
    model = Net()
    model = ENGINES[Kind.OURS](rank=place.rank, world_size=place.world_size).shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    try:
        for i in range(3 - (place.rank == place.world_size - 1)):
            step(optimizer, model(drawn(3, WIDTH, seed=i)).square().mean())
    except (ShardError, TimeoutError, RuntimeError) as e:
        return f"{type(e).__name__}: {e}"
    time.sleep(2 * LIMIT_S)  # an epoch's end: a checkpoint, an evaluation
    return ""


def _unequal_over_wire(place: Place) -> str:
    place.context.timeout_s = LIMIT_S
    return _unequal(place)


def _unequal_over_gloo(place: Place) -> str:
    """A stranger's process group."""
    options = {"rank": place.rank, "world_size": place.world_size, "timeout": timedelta(seconds=LIMIT_S)}
    dist.init_process_group("gloo", store=place.store, **options)  # type: ignore[arg-type]
    try:
        return _unequal(place)
    finally:
        dist.destroy_process_group()


NAMED = r"in step 3 .* for rank 1, which did not come"
NUMBERED = r"collective \d+ \(all_gather in group 0 of 2\) did not complete"  # the wire's own; the lab knows the rank


@pytest.mark.parametrize(
    ("in_rank", "reduction", "says"),
    [
        pytest.param(_unequal_over_gloo, None, NAMED, id="gloo"),
        pytest.param(_unequal_over_wire, "auto", NUMBERED, id="wire", marks=pytest.mark.slow),
    ],
)
def test_unequal_numbers_of_batches_are_named(
    pool: Pool, in_rank: Callable[..., str], reduction: str | None, says: str
) -> None:
    """Under FSDP2 the ranks wait for each other for ever. Ours says which rank did not come to which step, in time."""
    begin = time.monotonic()
    waited, gone = pool.run(in_rank, 2, reduction=reduction, timeout_s=30)
    assert time.monotonic() - begin < 5 * LIMIT_S
    assert re.search(says, waited), waited
    assert not gone
