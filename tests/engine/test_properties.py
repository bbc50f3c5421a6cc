"""Over random models and strategies: what goes into a sharded model comes out of it, bit for bit.

Hypothesis draws several models for each run of the ranks; what fails is told by the number of its case.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings, strategies as st
from torch import Tensor, distributed as dist, nn

from fsdp_lab.backends.base import DTYPES
from fsdp_lab.engine import (
    full_state,
    load_full_state,
    original_parameters,
    parameter_groups,
    sharded_parameters,
    shards_of,
    split_unused,
    units_of,
    unshard,
)
from fsdp_lab.engine.unit import UnitState
from fsdp_lab.spec.spec import Strategy
from tests.covering import tiered
from tests.engine.random_models import Case, Part, build, cases, group_of, ignored_names, inputs, shard
from tests.engine.toys import noted
from tests.pool import Place, Pool

few = settings(
    max_examples=2,
    database=None,
    verbosity=Verbosity.quiet,
    phases=[Phase.explicit, Phase.generate],  # to shrink a case takes minutes; the message tells it whole
    suppress_health_check=list(HealthCheck),
)
EACH = 4  # cases in one run

State = dict[str, Tensor]


def drawn(world_size: int, dtypes: tuple[str, ...] = ("fp32", "bf16", "fp64")) -> st.SearchStrategy[list[Case]]:
    return st.lists(cases(world_size, dtypes), min_size=EACH, max_size=EACH)


def each(place: Place, check: Callable[[Place, Any], None], given: list[Any]) -> None:
    """Run a check on every case; a failure says on which."""
    warnings.simplefilter("ignore")
    for i, case in enumerate(given):
        with noted(f"case {i}: {case}"):
            check(place, case)


# -- what the checks need --------------------------------------------------------------------------------------------


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also of NaN and of the sign of zero."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*as_bytes)


def assert_same(got: State, wanted: State) -> None:
    assert list(got) == list(wanted)
    assert [n for n in wanted if not same_bits(got[n], wanted[n])] == []


def values_of(model: nn.Module) -> State:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def prepared(case: Case, strategy: Strategy | None = None) -> tuple[Part, State]:
    """A sharded model, and the values that it was given, without those that were ignored."""
    model = build(case)
    values = values_of(model)
    shard(model, case, strategy or case.strategy)
    whole = {name: t for name, t in values.items() if name not in ignored_names(model, case)}
    if case.on_meta:
        load_full_state(model, whole)
    return model, whole


def full(model: nn.Module) -> State:
    return dict(full_state(model))


# -- state -----------------------------------------------------------------------------------------------------------


def state_holds(place: Place, case: Case) -> None:
    before = [(name, p.shape, p.dtype, p.requires_grad) for name, p in build(case).named_parameters()]
    model, values = prepared(case)
    assert [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()] == before
    assert_same(full(model), values)
    ranges_partition(place, model, values)
    for _ in range(2):
        not_there_outside(model, values)
        with unshard(model):
            assert_same(inside(model, values), values)
        assert_same(full(model), values)
        assert all(unit.state is UnitState.SHARDED for unit in units_of(model))
    loading_is_exact(model, values)
    written(model, case, values)
    with unshard(model):
        assert_same(inside(model, values), values)


def inside(model: nn.Module, values: State) -> State:
    """What modules see of the parameters that are sharded."""
    return {name: t for name, t in values_of(model).items() if name in values}


def not_there_outside(model: nn.Module, values: State) -> None:
    parameters = dict(model.named_parameters())
    for s, p in zip(shards_of(model), original_parameters(model), strict=True):
        assert parameters[s.name] is p and same_bits(p.full_tensor(), values[s.name])
        if not p.flat.is_view_of_master:
            assert p.flat.policy.shard_optimizer_only or not p.flat.is_gathered


def ranges_partition(place: Place, model: nn.Module, values: State) -> None:
    """The ranks of each group of shards hold every element once, and the right one."""
    shards = {s.name: s for s in shards_of(model)}
    assert list(shards) == list(values)
    for name, s in shards.items():
        assert same_bits(s.local, values[name].reshape(-1)[s.start : s.stop])
        assert s.shape == values[name].shape
    everybodys: list[Any] = [None] * place.world_size
    dist.all_gather_object(everybodys, {name: (s.start, s.stop) for name, s in shards.items()})
    factor = units_of(model)[0].mesh.shard_size
    for name, value in values.items():
        for first in range(0, place.world_size, factor):
            covered = [x for ranges in everybodys[first : first + factor] for x in range(*ranges[name])]
            assert covered == list(range(value.numel()))


def loading_is_exact(model: nn.Module, values: State) -> None:
    other = {name: (t.double() * -1.7 + 0.3).to(t.dtype) for name, t in values.items()}
    load_full_state(model, other)
    assert_same(full(model), other)
    load_full_state(model, values.__getitem__)
    assert_same(full(model), values)


def written(model: nn.Module, case: Case, wanted: State) -> None:
    """Write what the case says, into the model and into `wanted`, one after the other: it is kept, and it alone."""
    names = [name for name, t in wanted.items() if t.numel()]
    for i, element, value in case.written if names else ():
        name = names[i % len(names)]
        with unshard(model), torch.no_grad():
            for t in (dict(model.named_parameters())[name], wanted[name]):
                t.view(-1)[element % t.numel()] = value
        assert_same(full(model), wanted)


def a_lower_precision_changes_nothing_by_itself(place: Place, case: Case) -> None:
    """Masters keep their own dtype and every bit; what is written inside is taken over, and it alone."""
    precision = "bf16" if case.seed % 2 else "fp16"
    model, wanted = prepared(case, dataclasses.replace(case.strategy, precision=precision))
    gathered = DTYPES[precision]
    with unshard(model):
        assert_same(inside(model, wanted), {n: t.to(gathered) for n, t in wanted.items()})
    assert_same(full(model), wanted)
    written(model, case, wanted)


# -- training and the optimizer's state ------------------------------------------------------------------------------


class Naive:
    """A second oracle: sharded data parallelism in twenty lines of torch, with nothing of ours in it.

    Every rank keeps its part of each parameter and no more; a step gathers all of them, computes, gathers all gradients,
    sums them in the order of ranks, divides, and lets each rank update its part. `factor` F: gradients
    are averaged over each F neighbours first, then across; W for plain sharding.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        factor: int | None = None,
    ):
        self.model, self.world, self.factor = model, dist.get_world_size(), factor or dist.get_world_size()
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shards = {name: nn.Parameter(self._mine(p.detach()).clone()) for name, p in self.trained.items()}
        self.optimizer = make(list(self.shards.items()))

    def _mine(self, whole: Tensor) -> Tensor:
        """[n]: this rank's part of a flattened tensor, the last ones filled up with zeros."""
        n = -(-whole.numel() // self.world)
        padded = torch.zeros(n * self.world, dtype=whole.dtype)
        padded[: whole.numel()] = whole.reshape(-1)
        return padded[dist.get_rank() * n : (dist.get_rank() + 1) * n]

    def _everybodys(self, mine: Tensor) -> list[Tensor]:
        got = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(got, mine.detach().contiguous())
        return got

    def gather(self) -> None:
        for name, p in self.trained.items():
            p.data = torch.cat(self._everybodys(self.shards[name]))[: p.numel()].view(p.shape)

    def step(self, loss: Callable[[nn.Module], Tensor]) -> float:
        self.gather()
        value = loss(self.model)
        value.backward()
        for name, p in self.trained.items():
            if p.grad is None:
                continue
            grads = self._everybodys(p.grad)
            near = [grads[i : i + self.factor] for i in range(0, self.world, self.factor)]
            across = in_order([in_order(group) / self.factor for group in near]) / (self.world // self.factor)
            self.shards[name].grad, p.grad = self._mine(across), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.item()


def in_order(summands: list[Tensor]) -> Tensor:
    total = summands[0].clone()
    for s in summands[1:]:
        total += s
    return total


def adamw(groups: dict[Any, list[nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": ps, "weight_decay": decay} for decay, ps in groups.items()], lr=0.05)


def step(place: Place, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(inputs(place.rank)).square().mean()
    if loss.requires_grad:
        loss.backward()
    split_unused(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def averages(strategy: Strategy) -> int | None:
    """Ranks whose gradients are averaged first; None: all."""
    return strategy.shard_size if strategy.is_hybrid else None


def trains_as_the_naive_one(place: Place, case: Case) -> None:
    """Losses and parameters, bit for bit; ignored ones are frozen, as nobody averages their gradients."""
    model = build(case)
    for name, p in model.named_parameters():
        if name in ignored_names(model, case):
            p.requires_grad_(False)
    if not model(inputs(place.rank)).requires_grad:
        return
    plain, values = copy.deepcopy(model), values_of(model)

    def make(shards: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups: dict[Any, list[nn.Parameter]] = {}
        for name, p in shards:
            groups.setdefault(group_of(case, values[name].shape), []).append(p)
        return adamw(groups)

    naive = Naive(plain, make, averages(case.strategy))
    shard(model, case, case.strategy)
    if case.on_meta:
        load_full_state(model, values)
    optimizer = adamw(parameter_groups(model))
    for i in range(2):
        wanted = naive.step(lambda m: m(inputs(place.rank)).square().mean())
        with new_memory_is_nan():
            got = step(place, model, optimizer)
        assert got == wanted, f"step {i}"
        padding_is_zero(model)
    naive.gather()
    after = values_of(plain)
    assert_same(full(model), {name: after[name] for name in full(model)})


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """What is read before it was written shows itself."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def padding_is_zero(model: nn.Module) -> None:
    for flat in (flat for unit in units_of(model) for flat in unit.flats):
        padding = torch.ones_like(flat.master, dtype=torch.bool)
        for slot in flat.layout.slots:
            start, stop = flat.layout.in_shard(slot, flat.mesh.shard_rank)
            padding[start:stop] = False
        assert bool((flat.master[padding] == 0).all())


def trained(place: Place, case: Case) -> State:
    """What a model is after a step, on every rank."""
    model, _ = prepared(case)
    if sharded_parameters(model):
        step(place, model, adamw(parameter_groups(model)))
    return full(model)


def take(place: Place, some: list[Case]) -> list[State]:
    return [trained(place, case) for case in some]


def give(place: Place, some: list[tuple[Case, State]]) -> None:
    """Each has what another world had."""
    for case, state in some:
        model, _ = prepared(case)
        load_full_state(model, state)
        assert_same(full(model), state)


CHECKS: list[tuple[Callable[[Place, Any], None], int]] = [
    (state_holds, 1),
    (state_holds, 4),
    (a_lower_precision_changes_nothing_by_itself, 2),
    (trains_as_the_naive_one, 2),
    (trains_as_the_naive_one, 4),
]


@pytest.mark.parametrize(
    ("check", "world_size"),
    tiered(CHECKS, lambda check, world_size: check is trains_as_the_naive_one and world_size == 2),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_holds_of_any_model(pool: Pool, check: Callable[[Place, Any], None], world_size: int) -> None:
    @few
    @seed(100 * world_size + len(check.__name__))
    @given(drawn(world_size, ("fp32", "fp64")) if check is trains_as_the_naive_one else drawn(world_size))
    def hold(some: list[Case]) -> None:
        pool.run(each, world_size, check, some, reduction="rank_ordered")

    hold()


@pytest.mark.slow
def test_going_on_in_another_world_size(pool: Pool) -> None:
    @few
    @seed(3)
    @given(drawn(3), drawn(2))
    def hold(some: list[Case], others: list[Case]) -> None:
        states = pool.run(take, 3, some)
        for other in states[1:]:
            for state, its in zip(states[0], other, strict=True):
                assert_same(its, state)
        cases = [dataclasses.replace(one, strategy=other.strategy) for one, other in zip(some, others, strict=True)]
        pool.run(give, 2, list(zip(cases, states[0], strict=True)))

    hold()
