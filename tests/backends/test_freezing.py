"""Parameters that are not trained: the same values under every backend, without gradients or optimizer state; switches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.build import build_skeleton, freeze, frozen_names
from fsdp_lab.models.configs import resolve
from fsdp_lab.spec.param_groups import matches
from fsdp_lab.spec.spec import Spec
from tests.backends.test_parity import BACKENDS, SMALL, outcome, sharded, spec
from tests.backends.train import start, steps
from tests.covering import tiered
from tests.engine.parity import Outcomes, assert_equal, plan
from tests.pool import Place, Pool

EARLY = ["transformer.wte.*", "transformer.wpe.*", "transformer.h.0.*"]  # nothing needs their backward
INSIDE = ["transformer.h.*.attn.*", "*.bias"]  # a unit with both kinds
STRATEGIES = [
    {"backend": "fsdp2"},
    {"offload": "all", "wrap": "whole"},
    {"offload": "optimizer", "sharding": "zero1"},
    {"recompute": "full", "wrap": "every:2", "forward_prefetch": 2},
    {"backend": "fsdp2", "offload": "all"},
    {"backend": "fsdp1", "recompute": "every:2", "wrap": "whole"},
]


def test_all_backends_freeze_the_same(outcomes: Outcomes) -> None:
    lab, *others = outcomes.of(*(plan((sharded(b, 2, freeze=INSIDE), 3)) for b in BACKENDS))
    for other in others:
        assert_equal(other, lab)
    before = outcome(outcomes, (sharded("lab", 2), 0)).parameters
    still = {name for name, t in before.items() if torch.equal(lab.parameters[name], t)}
    assert still == {name for name in before if matches(name, INSIDE)}


def test_strategies_change_nothing_of_it(outcomes: Outcomes) -> None:
    wanted, *found = outcomes.of(*(plan((spec(2, freeze=EARLY, **changes), 2)) for changes in STRATEGIES))
    for got in found:
        assert_equal(got, wanted)


@pytest.mark.slow
def test_what_is_frozen_can_change_and_all_backends_agree(outcomes: Outcomes) -> None:
    """Also from one backend to another in the same switch."""
    phases = [EARLY, None, INSIDE, EARLY]
    paths = [[sharded(b, 2, freeze=f) for f in phases] for b in ("lab", "fsdp1")]
    paths += [[sharded(b, 2, freeze=f) for b, f in zip(("fsdp2", "ddp", "fsdp1", "lab"), phases, strict=True)]]
    first, *others = outcomes.of(*(plan(*((p, 1) for p in path)) for path in paths))
    for other in others:
        assert_equal(other, first)


def _held(place: Place, given: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Under each Spec, after switches: elements of optimizer state, and of gradients before the update."""
    backend, found = None, []
    for i, part in enumerate(map(Spec.from_dict, given)):
        backend = start(place, part, backend)
        gradients: list[int] = []
        backend.optimizer.register_step_pre_hook(
            lambda *_, b=backend, g=gradients: g.append(sum(t.numel() for t in b.gradients()))
        )
        steps(place, part, backend, i, 1)
        state = (t for s in backend.optimizer.state.values() for t in s.values() if t.dim())
        found.append((sum(getattr(t, "_local_tensor", t).numel() for t in state), gradients[0]))
        assert not backend.parked
    assert backend is not None
    backend.release()
    return found


@pytest.mark.parametrize("backend", tiered(BACKENDS, lambda backend: backend in ("lab", "fsdp1")))
def test_frozen_parameters_have_no_gradients_and_no_optimizer_state(pool: Pool, backend: str) -> None:
    plain, frozen = sharded(backend, 1, wrap="block").to_dict(), sharded(backend, 1, freeze=EARLY).to_dict()
    skeleton = build_skeleton(resolve(SMALL))
    whole = sum(p.numel() for p in skeleton.parameters())
    freeze(skeleton, EARLY)
    trained = sum(p.numel() for p in skeleton.parameters() if p.requires_grad)
    assert trained < 0.8 * whole
    [found] = pool.run(_held, 1, [plain, frozen, plain])
    for (state, gradients), numel in zip(found, (whole, trained, whole), strict=True):  # padding
        assert state == pytest.approx(2 * numel, rel=0.02) and gradients == pytest.approx(numel, rel=0.02)


@pytest.mark.parametrize(("patterns", "said"), [
    (["transformer.wte.*", "transformer.q.*"], "'transformer.q.*' matches no parameter; give a pattern of names such as tr"),
    (["Transformer.*"], "'Transformer.*' matches no parameter"),
    (["lm_head.*"], "'lm_head.*' matches no parameter"),  # it is tied, and goes by its first name
    (["*"], "nothing is left to train; leave a pattern out"),
], ids=str)  # fmt: skip
def test_patterns_that_freeze_nothing_or_everything_are_refused(patterns: list[str], said: str) -> None:
    skeleton = build_skeleton(resolve(SMALL))
    with pytest.raises(SpecError) as refused:
        freeze(skeleton, patterns)
    assert str(refused.value).startswith(f"workload.freeze: {said}")
    assert all(p.requires_grad for p in skeleton.parameters())
    frozen_names(skeleton, refused.value.fix["freeze"])


def test_a_spec_keeps_its_patterns_once_each_and_takes_nothing_else() -> None:
    one = Spec().replace(freeze=["a.*", "b", "a.*"])
    assert one.workload.freeze == ("a.*", "b") and Spec.from_json(one.to_json()) == one and hash(one)
    assert Spec().replace(freeze=None).id == Spec().id != one.id
    for value in ("transformer.wte.*", [], [""], [3], {}, 1):
        refused = Spec().validate(freeze=value)
        assert refused is not None and str(refused).startswith("workload.freeze: ") and "give patterns" in str(refused)
