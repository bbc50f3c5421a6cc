"""Over random models and strategies: what goes into a sharded model comes out of it, bit for bit.

Hypothesis draws several models for each run of the ranks; what fails is told by the number of its case."""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings, strategies as st
from torch import Tensor, distributed as dist, nn

from fsdp_lab import engine
from fsdp_lab.backends.base import DTYPES
from fsdp_lab.engine import load_full_state, parameter_groups, shards_of, split_unused, units_of, unshard
from fsdp_lab.engine.unit import UnitState
from fsdp_lab.spec.spec import SHARDINGS, Strategy
from tests.covering import tiered
from tests.engine.toys import noted, options_of
from tests.pool import Place, Pool

# -- random trees of modules as data, drawn here and built alike in every rank ----------------------------------------------
WIDTH = 8  # of what goes from module to module: [3, WIDTH], fp32
DRAWN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
DEPTH = 3
SIZES = st.sampled_from([1, 2, 3, 5, 7, 8])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """A module: parameters of its own, then its children, one after the other."""

    kind: str  # "linear", "norm", "embedding", or "odd": parameters of any shapes
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    children: "tuple[Node, ...]" = ()
    is_unit: bool = False
    times: int = 1  # how often it is called, one after the other; 0: it is there and not used


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is sharded. Numbers choose parameters, modulo how many there are."""

    tree: Node
    strategy: Strategy
    ties: tuple[tuple[int, int], ...] = ()
    frozen: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()
    on_meta: bool = False
    groups: int = 1
    seed: int = 0
    written: tuple[tuple[int, int, float], ...] = dataclasses.field(default=())  # (parameter, element, value)


# -- drawing ---------------------------------------------------------------------------------------------------------
@st.composite
def nodes(draw: st.DrawFn, depth: int = DEPTH, dtypes: tuple[str, ...] = tuple(DRAWN)) -> Node:
    kind = draw(st.sampled_from(["linear", "odd", "odd", "norm", "embedding"]))
    a, b = draw(SIZES), draw(SIZES)
    shapes: tuple[tuple[int, ...], ...]
    if kind == "odd":
        empty_too = st.lists(SIZES | st.sampled_from([0, 1]), max_size=3).map(tuple)
        shapes = tuple(draw(st.lists(empty_too, max_size=3)))
    else:
        shapes = {"linear": ((a, b), (a,)), "norm": ((a,), (a,)), "embedding": ((b, a),)}[kind]
    below = nodes(depth - 1, dtypes)
    return Node(kind=kind, shapes=shapes, dtype=draw(st.sampled_from(dtypes)),
                children=tuple(draw(st.lists(below, min_size=2 * (depth == DEPTH), max_size=3))) if depth else (),
                is_unit=draw(st.sampled_from([True, False])), times=draw(st.sampled_from([1, 1, 1, 2, 0])))  # fmt: skip


@st.composite
def cases(draw: st.DrawFn, world_size: int, dtypes: tuple[str, ...] = tuple(DRAWN)) -> Case:
    some = st.integers(0, 30)
    values = st.sampled_from([0.0, -0.0, 1.5, -3.25, float("inf"), float("nan")])
    return Case(tree=draw(nodes(dtypes=dtypes)), strategy=draw(strategies(world_size)),
                ties=tuple(draw(st.lists(st.tuples(some, some), max_size=4))),
                frozen=tuple(draw(st.lists(some, max_size=3))), ignored=tuple(draw(st.lists(some, max_size=2))),
                on_meta=draw(st.booleans()), groups=draw(st.integers(1, 3)), seed=draw(st.integers(0, 99)),
                written=tuple(draw(st.lists(st.tuples(some, st.integers(0, 500), values), max_size=4))))  # fmt: skip


@st.composite
def strategies(draw: st.DrawFn, world_size: int, precision: str = "fp32") -> Strategy:
    sharding = draw(st.sampled_from(SHARDINGS))
    divisors = [f for f in range(1, world_size + 1) if world_size % f == 0]
    between = [f for f in divisors if 1 < f < world_size]
    return Strategy(sharding=sharding,
                    shard_size=draw(st.sampled_from(divisors)) if Strategy(sharding=sharding).is_hybrid else None,
                    reshard_size=draw(st.sampled_from([None, *between])) if sharding == "full_shard" else None,
                    precision=precision, offload=draw(st.sampled_from(["none", "none", "optimizer", "all"])),
                    forward_prefetch=draw(st.integers(0, 2)), backward_prefetch=draw(st.integers(0, 2)),
                    backward_prefetch_point=draw(st.sampled_from(["before", "after"])),
                    limit_all_gathers=draw(st.integers(0, 3)), limit_reductions=draw(st.integers(1, 3)))  # fmt: skip


# -- building --------------------------------------------------------------------------------------------------------
class Part(nn.Module):
    """What a `Node` says. Every parameter moves the output."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        dtype = DRAWN[node.dtype]
        if node.kind == "linear":
            (out, width), _ = node.shapes
            self.inner: nn.Module = nn.Linear(width, out, dtype=dtype)
        elif node.kind == "norm":
            self.inner = nn.LayerNorm(node.shapes[0], dtype=dtype)
        elif node.kind == "embedding":
            self.inner = nn.Embedding(*node.shapes[0], dtype=dtype)
        else:
            self.odd = nn.ParameterList(nn.Parameter(torch.empty(s, dtype=dtype)) for s in node.shapes)
        self.below = nn.ModuleList(Part(child) for child in node.children)

    def forward(self, x: Tensor) -> Tensor:
        if self.node.kind == "odd":
            for p in self.odd:
                x = x + 0.1 * torch.tanh(p.float()).sum()
        else:
            inner: nn.Module = self.inner
            if isinstance(inner, nn.Embedding):
                y = inner(torch.arange(5) % inner.num_embeddings).mean(0, keepdim=True)
            else:
                y = inner(x[:, : self.node.shapes[0][-1]].to(DRAWN[self.node.dtype]))
            x = x + 0.1 * torch.tanh(y.float()).mean(1, keepdim=True)
        for child in self.below:
            for _ in range(child.node.times):  # type: ignore[union-attr]
                x = child(x)
        return x


def build(case: Case) -> Part:
    """With values drawn by the case's seed; on every rank the same. Parameters are tied and frozen as the case says."""
    model = Part(case.tree)
    _tie(model, case.ties)
    generator = torch.Generator().manual_seed(case.seed)
    every = list(model.parameters())
    for p in every:
        p.data = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.data[torch.rand(p.shape, generator=generator) < 0.2] = 0.0
    for i in case.frozen:
        if every:
            every[i % len(every)].requires_grad_(False)
    return model


def _tie(model: nn.Module, ties: tuple[tuple[int, int], ...]) -> None:
    """Let a parameter's place hold another one that is like it, in the same module or far away."""
    places = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    for i, j in ties if places else ():
        module, name, p = places[i % len(places)]
        alike = [q for _, _, q in places if q.shape == p.shape and q.dtype == p.dtype and q is not p]
        if alike:
            module._parameters[name] = alike[j % len(alike)]


def ignored_names(model: nn.Module, case: Case) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    return {names[i % len(names)] for i in case.ignored} if names else set()


def shard(model: Part, case: Case, strategy: Strategy) -> None:
    """Units inside first, the model last."""
    ignored = ignored_names(model, case)
    if case.on_meta and not ignored:
        on_meta(model)
    left_alone = [p for name, p in model.named_parameters() if name in ignored]
    options: dict[str, Any] = {**options_of(strategy), "ignored_params": left_alone}
    units = [m for m in model.modules() if isinstance(m, Part) and m.node.is_unit and m is not model]
    for unit in [*reversed(units), model]:
        engine.fully_shard(unit, group_of=lambda _, p: group_of(case, p.shape), **options)


def group_of(case: Case, shape: torch.Size) -> Hashable:
    """The optimizer's groups have a weight decay of 0, 0.1, 0.2."""
    return shape.numel() % case.groups / 10


def on_meta(model: nn.Module) -> None:
    """As if it had been built there; ties stay ties."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                made.setdefault(id(p), nn.Parameter(p.to("meta"), requires_grad=p.requires_grad))
                module._parameters[name] = made[id(p)]


def inputs(rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank + 1000))


# -- checks -------------------------------------------------------------------------------------------------------------
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
    return torch.equal(*[t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)])


def assert_same(got: State, wanted: State) -> None:
    assert list(got) == list(wanted) and [n for n in wanted if not same_bits(got[n], wanted[n])] == []


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
    return dict(engine.full_state(model))


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
    for s, p in zip(shards_of(model), engine.original_parameters(model), strict=True):
        assert parameters[s.name] is p and same_bits(p.full_tensor(), values[s.name])
        if not p.flat.is_view_of_master:
            assert p.flat.policy.shard_optimizer_only or not p.flat.gathered.is_held


def ranges_partition(place: Place, model: nn.Module, values: State) -> None:
    """The ranks of each group of shards hold every element once, and the right one."""
    shards = {s.name: s for s in shards_of(model)}
    assert list(shards) == list(values)
    for name, s in shards.items():
        assert same_bits(s.local, values[name].reshape(-1)[s.start : s.stop]) and s.shape == values[name].shape
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
    are averaged over each F neighbours first, then across; W for plain sharding."""

    def __init__(self, model: nn.Module, make: Callable[[Sequence[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
                 factor: int | None = None):  # fmt: skip
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
    if engine.sharded_parameters(model):
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
    (state_holds, 1), (state_holds, 4), (a_lower_precision_changes_nothing_by_itself, 2), (trains_as_the_naive_one, 2),
    (trains_as_the_naive_one, 4),
]  # fmt: skip


@pytest.mark.parametrize(("check", "world_size"),
                         tiered(CHECKS, lambda check, world_size: check is trains_as_the_naive_one and world_size == 2),
                         ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
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
