"""Specs of any values: each is refused with a field, a reason and a way out before anything starts, or it trains."""

import argparse
import dataclasses
import math
import random
import shlex
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from fsdp_lab.base.errors import SpecError
from fsdp_lab.cli import run
from fsdp_lab.spec.describe import command
from fsdp_lab.spec.spec import Spec, Strategy
from fsdp_lab.spec.workload import Workload
from tests.pool import Place, Pool
from tests.rank.test_session import SMALL, session
from tests.spec.test_spec import GOOD

NAMES = [f.name for part in (Workload, Strategy) for f in dataclasses.fields(part)] + ["world_size", "devices", "link"]
JUNK: list[Any] = [None, "", "none", "every:0", "every:2", "min_params:x", "class:", True, False, -1, 0, 1, 2, 3, 1 << 70,
                   0.0, -0.5, 1e-3, math.nan, math.inf, [], {}, "cpu", ["cpu"], {"param": "fp32"}, "µ\n", b"x", "a.b:c",
                   {"code": "b"}]  # fmt: skip


@settings(max_examples=10)
@given(st.randoms(use_true_random=False))
def test_every_spec_is_refused_with_a_reason_or_is_whole(chance: random.Random) -> None:
    """A hundred Specs at a time; and what the command line says of each is read back."""
    run.add_arguments(parser := argparse.ArgumentParser())
    for _ in range(100):
        fields = {n: chance.choice(JUNK + GOOD.get(n, []) * 4) for n in chance.sample(NAMES, chance.randrange(7))}
        try:
            spec = Spec().replace(**fields)
        except SpecError as e:
            assert e.field and e.reason and e.hint and "\n" not in str(e), fields
            continue
        assert Spec.from_json(spec.to_json()) == spec and spec.replace() == spec, fields
        assert Spec.from_json(spec.to_json()).id == spec.id and not spec.difference(spec.replace())
        text, unsaid = command(spec)
        args = parser.parse_args(["--seed=0", *shlex.split(text)[2:]])  # one at least
        assert {*run.spec_and_checkpoint(args)[0].difference(spec)} == {*unsaid}, text
        assert all(fields.get(n) not in GOOD.get(n, []) for n in unsaid), unsaid
        assert spec.global_batch >= 1 and spec.world_size % spec.shard_factor == 0


def _trained(place: Place, given: list[dict[str, Any]]) -> list[str]:
    """Of each Spec "trained", or how it was refused; whatever else comes is an error."""
    s, told = session(place), []
    for fields in given:
        try:
            s.apply("run", fields, fresh=True)
            assert len(s.train(2)["events"]) == 2
            told.append("trained")
        except SpecError as e:
            assert e.field and e.reason and e.hint
            told.append(e.field)
    s.close()
    return told


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_not_refused_trains(pool: Pool, ranks: int) -> None:
    chance, good = random.Random(ranks), list[dict[str, Any]]()
    while len(good) < 8:
        fields = {name: chance.choice(GOOD[name]) for name in chance.sample(list(GOOD), 6)}
        try:
            spec = Spec(world_size=ranks).replace(model=SMALL, seq_len=32, **{**fields, "world_size": ranks})
        except SpecError:
            continue
        good.append(spec.to_dict())
    told = pool.run(_trained, ranks, good, reduction=None)
    assert all(each == told[0] for each in told), "refused on all ranks alike"
    assert told[0].count("trained") >= 4
