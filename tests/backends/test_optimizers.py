"""The optimizers of a workload: what is known of torch's classes; their arguments under every backend, and in switches. And
parameters that are not trained, or have a learning rate and a weight decay of their own."""

import inspect
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.backends import check
from fsdp_lab.backends.base import check_optimizer, kept_state, local_tensor
from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.build import build_skeleton, freeze, frozen_names
from fsdp_lab.models.configs import resolve
from fsdp_lab.rank import lifecycle
from fsdp_lab.spec.optimizer import _KNOWN, _SLOTS, ELSEWHERE, KERNELS, OPTIMIZERS, TorchOptimizer
from fsdp_lab.spec.param_groups import key_of, matches
from fsdp_lab.spec.spec import Spec
from tests.backends.test_parity import BACKENDS, SMALL, outcome, sharded, spec
from tests.backends.train import start, steps
from tests.covering import tiered
from tests.engine.parity import Outcome, Outcomes, assert_equal, plan
from tests.pool import Place, Pool
from tests.rank import test_session as sessions

AMSGRAD = {"betas": (0.8, 0.95), "eps": 1e-6, "amsgrad": True}
NESTEROV = {"momentum": 0.9, "nesterov": True}


def spec_of(name: str, args: dict[str, Any], backend: str = "lab", ranks: int = 2, **changes: Any) -> Spec:
    return sharded(backend, ranks, optimizer=name, optimizer_args=args, **changes)


# -- what is known of torch's classes ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_arguments_are_those_of_the_class_with_its_defaults(name: str) -> None:
    _, known = _KNOWN[name]
    signature = dict(inspect.signature(getattr(torch.optim, TorchOptimizer(name=name).class_name)).parameters)
    assert known.keys() == signature.keys() - ELSEWHERE.keys()
    assert {a: signature[a].default for a in KERNELS} == dict.fromkeys(KERNELS)
    defaults = {a: signature[a].default for a in known.keys() - {*KERNELS}}
    assert {a: default for a, default in known.items() if a not in KERNELS} == defaults


# -- every backend -------------------------------------------------------------------------------------------------------
def assert_near(got: Outcome, wanted: Outcome) -> None:
    """As far as rounding explains. The median: AdamW steps by lr, 0.01, also where a gradient is nothing but rounding."""
    for mine, theirs in zip(got.losses, wanted.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    for name, t in wanted.parameters.items():
        assert (got.parameters[name] - t).abs().median() < 1e-6, name


FUSED: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("adamw", {}, "fsdp2", {"offload": "all"}), ("adamw", AMSGRAD, "lab", {"wrap": "whole"}), ("sgd", NESTEROV, "fsdp1", {}),
    ("sgd", {}, "lab", {"offload": "all"}),
]  # fmt: skip


@pytest.mark.slow
def test_fused_updates_are_the_same_but_for_rounding(outcomes: Outcomes) -> None:
    """Also in a switch to a fused kernel and back."""
    for name, args, backend, changes in FUSED:
        fused = outcome(outcomes, (spec_of(name, {**args, "fused": True}, backend, **changes), 4))
        assert_near(fused, outcome(outcomes, (spec_of(name, args), 4)))
    around = [("lab", {}), ("lab", {"fused": True}), ("fsdp2", {}), ("ddp", {"fused": True})]
    switched = outcome(outcomes, *((spec_of("adamw", args, b), 1) for b, args in around))
    assert_near(switched, outcome(outcomes, (spec_of("adamw", {}), 4)))


@pytest.mark.parametrize(("name", "kernel"), [
    ("Rprop", {}), ("Rprop", {"foreach": False}), ("Adagrad", {"fused": True}), ("sgd", {"fused": True})])  # fmt: skip
def test_torch_has_none_of_these_for_the_parameters_of_fsdp2(name: str, kernel: dict[str, bool]) -> None:
    with pytest.raises(SpecError, match="does not take DTensors") as refused:
        spec_of(name, kernel, "fsdp2")
    assert name == "Rprop" or refused.value.fix == {"optimizer_args": {}}


# -- switches --------------------------------------------------------------------------------------------------------------
def _states(place: Place, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each Spec, one after the other: the state of its last parameter after a step."""
    backend, found = None, list[dict[str, Any]]()
    for i, part in enumerate(map(Spec.from_dict, given)):
        backend = start(place, part, backend)
        steps(place, part, backend, i, 1)
        states = (state.items() for state in backend.optimizer.state.values())
        found.append({slot: local_tensor(t).tolist() for state in states for slot, t in state})
    backend.release()
    return found


def test_other_arguments_keep_what_they_share_and_begin_the_rest(pool: Pool) -> None:
    specs = [spec_of("adamw", args).to_dict() for args in ({}, {"amsgrad": True}, {"fused": True})]
    for before, more, after in pool.run(_states, 2, specs):
        assert before.keys() == after.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert more.keys() == {*before, "max_exp_avg_sq"} and (before["step"], more["step"], after["step"]) == (1, 2, 3)
        assert more["max_exp_avg_sq"] == more["exp_avg_sq"], "it begins at 0"
    specs = [spec_of("sgd", args, "fsdp2").to_dict() for args in ({}, NESTEROV, {})]
    for before, more, after in pool.run(_states, 2, specs):
        assert (before.keys(), more.keys(), after.keys()) == (set(), {"momentum_buffer"}, set())


# -- every other class of torch.optim ------------------------------------------------------------------------------------
MORE: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"amsgrad": True}), ("Adam", {"decoupled_weight_decay": True}), ("RMSprop", {}), ("NAdam", {}), ("RAdam", {}),
    ("Adagrad", {"initial_accumulator_value": 0.1}), ("RMSprop", {"momentum": 0.9, "centered": True}), ("Adamax", {}),
    ("Adadelta", {}), ("ASGD", {"t0": 2}), ("Rprop", {"step_sizes": [1e-6, 0.1]}),
]  # fmt: skip


def test_classes_of_torch_are_listed_here_or_refused() -> None:
    """A class that is new in torch fails here: to be added to MORE and to _SLOTS, or refused."""
    found = {n for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    for name, args in MORE:  # their state is known to the planner
        known = spec_of(name, args).workload.torch_optimizer
        assert set(known.slots) == set(kept_state(known, "cpu").slots), (name, args)
    refused = {"LBFGS", "Adafactor", "Muon", "SparseAdam"} & found
    assert found - refused - {"Optimizer"} == {name for name, _ in MORE} | {"AdamW", "SGD"} == set(_SLOTS)
    for name in refused:
        with pytest.raises(SpecError, match=f"workload.optimizer: {name} .* a rank has parts of them, cut anywhere"):
            check_optimizer(spec_of(name, {}).workload)


@pytest.mark.slow
def test_every_class_goes_through_all_backends_without_losing_a_bit(outcomes: Outcomes) -> None:
    """Each begins in another backend; one that loses a slot or an argument ends with other bits."""
    around = [("lab", {"offload": "optimizer"}), ("fsdp2", {}), ("ddp", {}), ("fsdp1", {})]
    rows = [("adamw", AMSGRAD), ("sgd", NESTEROV), *MORE]
    plans = []
    for i, (name, args) in enumerate(rows):
        way = [(b, c) for b, c in [*around[i % 4 :], *around[: i % 4]] if (name, b) != ("Rprop", "fsdp2")]
        switched = plan(*((spec_of(name, args, b, **c), 1) for b, c in way))
        plans += [switched, plan((spec_of(name, args), len(way)))]
    found = outcomes.of(*plans)
    for (name, args), switched, steady in zip(rows, found[::2], found[1::2], strict=True):
        assert len(set(steady.losses[0])) == len(steady.losses[0]), name
        assert_equal(switched, steady)
        assert args not in (AMSGRAD, NESTEROV) or outcome(outcomes, (spec_of(name, {}), 4)).losses != steady.losses


@pytest.mark.parametrize(("name", "args", "said"), [
    ("Lionel", {}, "workload.optimizer: torch.optim has no optimizer 'Lionel'; give adamw, sgd, or another class"),
    ("Optimizer", {}, "workload.optimizer: torch.optim has no optimizer 'Optimizer'"),
    ("RMSprop", {"beta": 1}, "workload.optimizer_args: RMSprop has no argument 'beta'; its arguments are alpha, eps, mo"),
    ("RMSprop", {"alpha": -1}, "workload.optimizer_args: RMSprop refuses its arguments: Invalid alpha value: -1; correct"),
    ("NAdam", {"betas": 3}, "workload.optimizer_args: NAdam refuses its arguments: "),
])  # fmt: skip
def test_what_torch_refuses_is_refused_in_a_sentence(name: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_optimizer(spec_of(name, args).workload)
    assert str(refused.value).startswith(said)
    check_optimizer(spec_of(name, args).replace(**refused.value.fix).workload)


# -- frozen parameters -----------------------------------------------------------------------------------------------
EARLY = ["transformer.wte.*", "transformer.wpe.*", "transformer.h.0.*"]  # nothing needs their backward
INSIDE = ["transformer.h.*.attn.*", "*.bias"]  # a unit with both kinds
GROUPS = [{"match": ["transformer.h.0.*", "*.wte.*"], "lr": 1e-3}, {"match": ["*.ln_*", "*.bias"], "weight_decay": 0.5}]
STRATEGIES = [{"backend": "fsdp2"}, {"offload": "all", "wrap": "whole"}, {"offload": "optimizer", "sharding": "zero1"},
              {"recompute": "full", "wrap": "every:2", "forward_prefetch": 2}, {"backend": "fsdp2", "offload": "all"},
              {"backend": "fsdp1", "recompute": "every:2", "wrap": "whole"}]  # fmt: skip


def test_all_backends_freeze_the_same_and_strategies_change_nothing_of_it(outcomes: Outcomes) -> None:
    lab, *others = outcomes.of(*(plan((sharded(b, 2, freeze=INSIDE), 3)) for b in BACKENDS))
    for other in others:
        assert_equal(other, lab)
    before = outcome(outcomes, (sharded("lab", 2), 0)).parameters
    still = {name for name, t in before.items() if torch.equal(lab.parameters[name], t)}
    assert still == {name for name in before if matches(name, INSIDE)}
    wanted, *found = outcomes.of(*(plan((spec(2, freeze=EARLY, **changes), 2)) for changes in STRATEGIES))
    for got in found:
        assert_equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "phases"),
    [("freeze", [EARLY, None, INSIDE, EARLY]), ("param_groups", [GROUPS, None, GROUPS[:1], GROUPS])],
)
def test_what_is_frozen_and_groups_can_change_and_all_backends_agree(outcomes: Outcomes, field: str, phases: list[Any]):
    """Also from one backend to another in the same switch. All groups under one backend: tests/rank/test_same_bits.py."""
    fields = [{field: value} for value in phases]
    paths = [[sharded(b, 2, **f) for f in fields] for b in ("lab", "fsdp1")]
    paths += [[sharded(b, 2, **f) for b, f in zip(("fsdp2", "ddp", "fsdp1", "lab"), fields, strict=True)]]
    paths += [[spec(2, **f, wrap="whole", offload="all", sharding="zero1") for f in fields]]
    first, *others = outcomes.of(*(plan(*((p, 1) for p in path)) for path in paths))
    for other in others:
        assert_equal(other, first)
    plain = outcome(outcomes, (sharded("lab", 2), len(phases)))
    assert any(not torch.equal(t, plain.parameters[n]) for n, t in first.parameters.items())


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


# -- rates of their own ----------------------------------------------------------------------------------------------
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
    assert Spec.from_json(spec_.to_json()) == spec_ and hash(spec_.replace(model="gpt2-1m"))
    assert Spec().replace(param_groups=None).id == Spec().id
    for wrong in ([], [{}], [{"match": ["*"]}], [{"match": "*", "lr": 1}], [{"match": ["*"], "lr": 0}], {"match": ["*"]},
                  [{"match": ["*"], "lr": 1, "betas": 2}], [{"match": ["*"], "weight_decay": -1}]):  # fmt: skip
        refused = Spec().validate(param_groups=wrong)
        assert refused is not None and refused.field == "workload.param_groups", wrong
    with pytest.raises(SpecError, match=r"workload.param_groups: 'h.\*' matches no parameter; give a pattern of names"):
        skeleton = build_skeleton(resolve(SMALL))
        check(skeleton, spec_.replace(param_groups=[{"match": ["h.*"], "lr": 1}]), torch.device("cpu"))
