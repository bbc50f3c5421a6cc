"""The optimizers of a workload: what is known of torch's classes; their arguments under every backend, and in switches."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from fsdp_lab.backends.base import check_optimizer, kept_state, local_tensor
from fsdp_lab.base.errors import SpecError
from fsdp_lab.spec.optimizer import _ELSEWHERE, _KNOWN, _SLOTS, KERNELS, OPTIMIZERS, TorchOptimizer
from fsdp_lab.spec.spec import Spec
from tests.backends.test_parity import outcome, sharded
from tests.backends.train import start, steps
from tests.engine.parity import Outcome, Outcomes, assert_equal, plan
from tests.pool import Place, Pool

AMSGRAD = {"betas": (0.8, 0.95), "eps": 1e-6, "amsgrad": True}
NESTEROV = {"momentum": 0.9, "nesterov": True}


def spec_of(name: str, args: dict[str, Any], backend: str = "lab", ranks: int = 2, **changes: Any) -> Spec:
    return sharded(backend, ranks, optimizer=name, optimizer_args=args, **changes)


# -- what is known of torch's classes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_arguments_are_those_of_the_class_with_its_defaults(name: str) -> None:
    _, known = _KNOWN[name]
    signature = dict(inspect.signature(getattr(torch.optim, TorchOptimizer(name=name).class_name)).parameters)
    assert known.keys() == signature.keys() - _ELSEWHERE.keys()
    assert {a: signature[a].default for a in KERNELS} == dict.fromkeys(KERNELS)
    assert {a: default for a, default in known.items() if a not in KERNELS} == {
        a: signature[a].default for a in known.keys() - {*KERNELS}
    }


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
    for i, spec in enumerate(map(Spec.from_dict, given)):
        backend = start(place, spec, backend)
        steps(place, spec, backend, i, 1)
        states = (state.items() for state in backend.optimizer.state.values())
        found.append({slot: local_tensor(t).tolist() for state in states for slot, t in state})
    assert backend is not None
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
        with pytest.raises(
            SpecError, match=f"workload.optimizer: {name} .*, and a rank has parts of them, cut anywhere"
        ):
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


def test_a_spec_takes_any_name_and_plain_arguments() -> None:
    spec = Spec().replace(optimizer="RMSprop", optimizer_args={"alpha": 0.5, "x": [1, [2]], "foreach": True})
    assert spec.workload.optimizer_args == {"alpha": 0.5, "x": (1, (2,))} and hash(spec)
    assert Spec.from_json(spec.to_json()) == spec
    assert Spec().replace(optimizer="AdamW") == Spec() and Spec().replace(optimizer="SGD").workload.optimizer == "sgd"
    for args in ({"x": None}, {"x": {}}, {"x": float("nan")}, {"capturable": True}, {"lr": 1}, {"a b": 1}):
        assert Spec().validate(optimizer="RMSprop", optimizer_args=args) is not None, args
    for name in ("", "torch.optim.Adam", "a b", 3, None):
        assert Spec().validate(optimizer=name) is not None, name
