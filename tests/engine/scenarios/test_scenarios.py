"""One scenario, four engines: losses and parameters are equal, and a fault in any of them would be seen."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.scenarios import loops, models, optimizers
from tests.engine.scenarios.engines import Kind, Meter, Run, Scenario, agree, differences, run
from tests.engine.scenarios.faults import FAULTS, GENERAL
from tests.pool import Place, Pool

SCENARIOS = {s.name: s for s in (*loops.SCENARIOS, *models.SCENARIOS, *optimizers.SCENARIOS)}
RANKS = 2


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
                # with more than two ranks sums have one order only where the wire gives them one
                self._known[key] = agree(
                    self._pool.run(_in_rank, key[2], scenario.name, kind, self._meter, reduction="rank_ordered")
                )
            except AssertionError as e:
                self._known[key] = e
        known = self._known[key]
        if isinstance(known, Exception):
            raise known
        return known


@pytest.fixture(scope="session")
def meter() -> Meter | None:
    """What measures the peak of a run's memory, in bytes; with None memory is not compared."""
    return None


@pytest.fixture(scope="session")
def runs(pool: Pool, meter: Meter | None) -> Runs:
    return Runs(pool, meter)


def skip_without(scenario: Scenario) -> None:
    if scenario.needs == "a compiler":
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            pytest.skip("no C++ compiler here")
    elif scenario.needs and importlib.util.find_spec(scenario.needs) is None:
        pytest.skip(f"{scenario.needs} is not installed here")


def cases(of: Callable[[Scenario], list[Any]]) -> list[Any]:
    return [
        pytest.param(s.name, case, marks=[pytest.mark.slow] * s.slow, id=f"{s.name}-{getattr(case, 'value', case)}")
        for s in SCENARIOS.values()
        for case in of(s)
    ]


@pytest.mark.parametrize(("name", "kind"), cases(lambda s: [k for k in Kind if k not in {Kind.ONE, *s.not_under}]))
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
        assert differences(found.log, peer.log, None if scenario.bits else scenario.bound) == {}
        if kind is Kind.OURS and found.peak_bytes is not None and peer.peak_bytes is not None:
            assert found.peak_bytes <= peer.peak_bytes


@pytest.mark.parametrize(("name", "fault"), cases(lambda s: [f for f in (*GENERAL, *s.faults) if f not in s.unseen]))
def test_a_fault_is_seen(name: str, fault: str) -> None:
    scenario = SCENARIOS[name]
    skip_without(scenario)
    sound, faulty = run(scenario, Kind.ONE), run(scenario, Kind.ONE, fault=FAULTS[fault])
    assert differences(faulty.log, sound.log, scenario.bound)
