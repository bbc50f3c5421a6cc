"""Random trees of modules as data (`Case`), drawn here and built alike in every rank."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_lab.engine import fully_shard
from fsdp_lab.spec.spec import SHARDINGS, Strategy
from tests.engine.toys import options_of

WIDTH = 8  # of what goes from module to module: [3, WIDTH], fp32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
DEPTH = 3
SIZES = st.sampled_from([1, 2, 3, 5, 7, 8])


@dataclass(frozen=True, kw_only=True)
class Node:
    """A module: parameters of its own, then its children, one after the other."""

    kind: str  # "linear", "norm", "embedding", or "odd": parameters of any shapes
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    children: tuple[Node, ...] = ()
    is_unit: bool = False
    times: int = 1  # how often it is called, one after the other; 0: it is there and not used


@dataclass(frozen=True, kw_only=True)
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
    written: tuple[tuple[int, int, float], ...] = field(default=())  # (parameter, element, value)


# -- drawing ---------------------------------------------------------------------------------------------------------


@st.composite
def nodes(draw: st.DrawFn, depth: int = DEPTH, dtypes: tuple[str, ...] = tuple(DTYPES)) -> Node:
    kind = draw(st.sampled_from(["linear", "odd", "odd", "norm", "embedding"]))
    a, b = draw(SIZES), draw(SIZES)
    shapes: tuple[tuple[int, ...], ...]
    if kind == "odd":
        empty_too = st.lists(SIZES | st.sampled_from([0, 1]), max_size=3).map(tuple)
        shapes = tuple(draw(st.lists(empty_too, max_size=3)))
    else:
        shapes = {"linear": ((a, b), (a,)), "norm": ((a,), (a,)), "embedding": ((b, a),)}[kind]
    below = nodes(depth - 1, dtypes)
    return Node(
        kind=kind,
        shapes=shapes,
        dtype=draw(st.sampled_from(dtypes)),
        children=tuple(draw(st.lists(below, min_size=2 * (depth == DEPTH), max_size=3))) if depth else (),
        is_unit=draw(st.sampled_from([True, False])),
        times=draw(st.sampled_from([1, 1, 1, 2, 0])),
    )


@st.composite
def cases(draw: st.DrawFn, world_size: int, dtypes: tuple[str, ...] = tuple(DTYPES)) -> Case:
    some = st.integers(0, 30)
    values = st.sampled_from([0.0, -0.0, 1.5, -3.25, float("inf"), float("nan")])
    return Case(
        tree=draw(nodes(dtypes=dtypes)),
        strategy=draw(strategies(world_size)),
        ties=tuple(draw(st.lists(st.tuples(some, some), max_size=4))),
        frozen=tuple(draw(st.lists(some, max_size=3))),
        ignored=tuple(draw(st.lists(some, max_size=2))),
        on_meta=draw(st.booleans()),
        groups=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
        written=tuple(draw(st.lists(st.tuples(some, st.integers(0, 500), values), max_size=4))),
    )


@st.composite
def strategies(draw: st.DrawFn, world_size: int, precision: str = "fp32") -> Strategy:
    sharding = draw(st.sampled_from(SHARDINGS))
    divisors = [f for f in range(1, world_size + 1) if world_size % f == 0]
    between = [f for f in divisors if 1 < f < world_size]
    return Strategy(
        sharding=sharding,
        shard_size=draw(st.sampled_from(divisors)) if Strategy(sharding=sharding).is_hybrid else None,
        reshard_size=draw(st.sampled_from([None, *between])) if sharding == "full_shard" else None,
        precision=precision,
        offload=draw(st.sampled_from(["none", "none", "optimizer", "all"])),
        forward_prefetch=draw(st.integers(0, 2)),
        backward_prefetch=draw(st.integers(0, 2)),
        backward_prefetch_point=draw(st.sampled_from(["before", "after"])),
        limit_all_gathers=draw(st.integers(0, 3)),
        limit_reductions=draw(st.integers(1, 3)),
    )


# -- building --------------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """What a `Node` says. Every parameter moves the output."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        dtype = DTYPES[node.dtype]
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
                width = self.node.shapes[0][-1]
                y = inner(x[:, :width].to(DTYPES[self.node.dtype]))
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
        fully_shard(unit, group_of=lambda _, p: group_of(case, p.shape), **options)


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
