"""Parameters with learning rates and weight decays of their own: the same under every backend, and in changes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.backends import check
from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.rank import lifecycle
from fsdp_lab.spec.param_groups import key_of
from fsdp_lab.spec.spec import Spec
from tests.backends.test_parity import BACKENDS, SMALL, outcome, sharded, spec
from tests.engine.parity import Outcomes, assert_equal, plan
from tests.pool import Place, Pool
from tests.rank import test_session as sessions

GROUPS = [
    {"match": ["transformer.h.0.*", "*.wte.*"], "lr": 0.001},
    {"match": ["*.ln_*", "*.bias"], "weight_decay": 0.5},
]


@pytest.mark.slow
def test_all_backends_have_the_same_groups_and_a_switch_carries_and_changes_them(outcomes: Outcomes) -> None:
    phases = (GROUPS, None, GROUPS[:1])
    paths = [plan(*((sharded(b, 2, param_groups=g), 1) for g in phases)) for b in BACKENDS]
    paths += [plan(*((sharded(b, 2, param_groups=g), 1) for b, g in zip(BACKENDS[1:], phases, strict=True)))]
    offloaded = {"wrap": "whole", "offload": "all", "sharding": "zero1"}
    paths += [plan(*((spec(2, param_groups=g, **offloaded), 1) for g in phases))]
    first, *others = outcomes.of(*paths)
    for other in others:
        assert_equal(other, first)
    plain = outcome(outcomes, (sharded("lab", 2), 3))
    assert any(not torch.equal(t, plain.parameters[n]) for n, t in first.parameters.items())


def _live(place: Place, plan_: list[dict[str, Any]]) -> tuple[list[Any], int]:
    built = mock.Mock(wraps=lifecycle.build)
    with mock.patch.object(lifecycle, "build", built):
        s = sessions.session(place)
        for given in plan_:
            s.apply("run", given)
            s.train(2)
        groups = [(g["lr"], g["weight_decay"]) for g in sessions.trainer_of(s).backend.optimizer.param_groups]
        s.close()
    return groups, built.call_count


def test_rates_change_without_a_new_backend_and_patterns_with_one(pool: Pool) -> None:
    other = [{**GROUPS[0], "lr": 0.5}, {**GROUPS[1], "weight_decay": 0.25}]
    specs = [sessions.spec(1, param_groups=g, weight_decay=d).to_dict() for g, d in ((GROUPS, 0.1), (other, 0.3))]
    [(groups, built)] = pool.run(_live, 1, specs, reduction=None)
    assert built == 1 and set(groups) == {(0.01, 0.3), (0.5, 0.3), (0.5, 0.0), (0.01, 0.25)}
    [(_, built)] = pool.run(_live, 1, [specs[0], sessions.spec(1).to_dict()], reduction=None)
    assert built == 2


def test_the_first_match_counts_and_wrong_groups_are_refused() -> None:
    groups = Spec().replace(param_groups=GROUPS).workload.param_groups
    assert key_of(groups, "transformer.h.0.ln_1.bias", 1) == (0, False)
    assert key_of(groups, "transformer.h.1.ln_1.bias", 1) == (1, False) and key_of(groups, "x.weight", 2) == (-1, True)
    spec_ = Spec().replace(model=SMALL, param_groups=GROUPS)
    assert (
        Spec.from_json(spec_.to_json()) == spec_
        and hash(spec_.replace(model="gpt2-1m"))
        and Spec().replace(param_groups=None).id == Spec().id
    )
    for wrong in ([], [{}], [{"match": ["*"]}], [{"match": "*", "lr": 1}], [{"match": ["*"], "lr": 0}], {"match": ["*"]},
                  [{"match": ["*"], "lr": 1, "betas": 2}], [{"match": ["*"], "weight_decay": -1}]):  # fmt: skip
        refused = Spec().validate(param_groups=wrong)
        assert refused is not None and refused.field == "workload.param_groups", wrong
    with pytest.raises(
        SpecError, match=r"workload.param_groups: 'h.\*' matches no parameter; give a pattern of names such as"
    ):
        skeleton = build_skeleton(resolve(SMALL))
        check(skeleton, spec_.replace(param_groups=[{"match": ["h.*"], "lr": 1}]), torch.device("cpu"))
