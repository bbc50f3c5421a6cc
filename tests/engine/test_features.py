"""What the engine does with all kinds of models and calls: each trains beside the plain model, equal bit for bit.

Every function below a test runs in two ranks; `train_beside` does the comparing.
"""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from fsdp_lab.engine import (
    Scaler,
    build_mesh,
    clip_gradients,
    full_state,
    fully_shard,
    gradient_norm,
    no_sync,
    parameter_groups,
    runtime_of,
    sharded_parameters,
    split_unused,
    units_of,
    unshard,
    upcast_gradients,
)
from fsdp_lab.engine.errors import ShardError
from fsdp_lab.engine.parameters import ShardedParameter
from fsdp_lab.engine.unit import UnitState
from fsdp_lab.spec.spec import OFFLOADS, SHARDINGS, Precision, Strategy
from tests.engine.toys import (
    WIDTH,
    Block,
    Net,
    assert_equal,
    batch,
    by_block,
    gradients,
    make,
    mean_square,
    options_of,
    plain_step,
    train_beside,
)
from tests.pool import Place, Pool

Scenario = Callable[[Place], None]


def everywhere(*scenarios: Scenario) -> Any:
    """A test for each of them."""
    return pytest.mark.parametrize("scenario", scenarios, ids=lambda s: s.__name__)


def kept_gathered(model: nn.Module) -> list[str]:
    return [unit.name for unit in units_of(model) if unit.state is not UnitState.SHARDED]


# -- which parameters train --------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)
        return out


def lora(place: Place) -> None:
    model = make(block=Adapted)
    model.first.requires_grad_(False)
    model.last.requires_grad_(False)
    sharded, _ = train_beside(place, model)
    flats = [flat for unit in units_of(sharded) for flat in unit.flats]
    trained = [{p.requires_grad for p in flat.sharded} for flat in flats]
    assert sorted(trained, key=str) == [{False}] * 4 + [{True}] * 3  # the root's is frozen as a whole
    assert sum(p.to_local().numel() for p in sharded_parameters(sharded)) < 3 * 4 * WIDTH  # no room for what is frozen


def a_frozen_first_unit(place: Place) -> None:
    model = make()
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    train_beside(place, model)


def a_frozen_unit_in_the_middle(place: Place) -> None:
    model = make()
    model.blocks[1].requires_grad_(False)
    train_beside(place, model)


def all_frozen_but_the_input(place: Place) -> None:
    model, plain = make().requires_grad_(False), make().requires_grad_(False)
    by_block(model)
    x, y = batch(0, place.rank).requires_grad_(), batch(0, place.rank).requires_grad_()
    mean_square(model, x).backward()
    mean_square(plain, y).backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    assert sharded_parameters(model) == [] and gradient_norm(model) == 0.0
    assert kept_gathered(model) == []


def ignored(place: Place) -> None:
    """It stays what it was, with a gradient of its own on each rank."""
    model, plain = make(), make()
    left_alone = [model.last.bias, model.blocks[1].norm.weight]
    by_block(model, ignored_params=left_alone)
    assert model.last.bias is left_alone[0] and not isinstance(left_alone[1], ShardedParameter)
    x = batch(0, place.rank)
    mean_square(model, x).backward()
    own = gradients(plain, mean_square, [x])
    assert left_alone[0].grad is not None and torch.equal(left_alone[0].grad, own["last.bias"])
    assert left_alone[1].grad is not None and torch.equal(left_alone[1].grad, own["blocks.1.norm.weight"])
    names = [name for name, _ in full_state(model)]
    assert "last.bias" not in names and "blocks.1.norm.weight" not in names
    assert len(names) == len(list(plain.parameters())) - 2


@everywhere(lora, a_frozen_first_unit, a_frozen_unit_in_the_middle, all_frozen_but_the_input, ignored)
def test_frozen_and_ignored(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- which parameters are used -----------------------------------------------------------------------------------------


class Chosen(Net):
    """Calls the blocks of `order`, one after the other."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i in self.order:
            x = self.blocks[i](x)
        return self.last(x)


def a_unit_that_is_never_used(place: Place) -> None:
    sharded, _ = train_beside(place, make(Chosen), at_step=lambda model, step: setattr(model, "order", (0, 2)))
    mean_square(sharded, batch(0, place.rank)).backward()
    of = {unit.name: flat for unit in units_of(sharded) for flat in unit.flats}
    assert [p.grad for p in of["blocks.1"].gradients.regions.values()] == [None]
    assert [p.grad is None for p in of["blocks.0"].gradients.regions.values()] == [False]


def a_unit_used_on_some_steps(place: Place) -> None:
    orders = ((0, 1, 2), (0, 2), (2,), (2, 1, 0), (0, 1, 2))
    train_beside(place, make(Chosen), steps=5, at_step=lambda model, step: setattr(model, "order", orders[step]))


class PartlyUsed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.randn(3))


def a_parameter_that_is_never_used(place: Place) -> None:
    """It has no gradient, and AdamW leaves it as it is, also where it is given flat tensors, which then are split."""
    for held in (nn.Module.parameters, sharded_parameters):
        model, plain = make(block=PartlyUsed), make(block=PartlyUsed)
        by_block(model)
        optimizer = torch.optim.AdamW(held(model), lr=0.1, foreach=True)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=True)
        for at in range(3):
            batches = [batch(at, rank) for rank in range(place.world_size)]
            mean_square(model, batches[place.rank]).backward()
            assert model.blocks[0].idle.grad is None and model.blocks[0].up.weight.grad is not None
            if held is sharded_parameters:
                if at == 0:
                    with pytest.raises(ShardError, match="blocks.0.idle has no gradient, and a flat optimizer would"):
                        optimizer.step()
                split_unused(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            plain_step(plain, mean_square, batches, theirs)
            assert_equal(model, plain)


class Doors(nn.Module):
    """One of two layers is used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.door = 0

    def forward(self, x: Tensor) -> Any:
        return (self.right if self.door else self.left)(x)


def a_parameter_that_some_ranks_use(place: Place) -> None:
    """It has a gradient on all of them."""
    model, plain = make(block=Doors), make(block=Doors)
    by_block(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=True)
    for at in range(4):
        doors = [at > 1 and rank == at % 2 for rank in range(place.world_size)]
        batches = [batch(at, rank) for rank in range(place.world_size)]

        def loss(m: nn.Module, x: Tensor, doors: list[bool] = doors, batches: list[Tensor] = batches) -> Tensor:
            rank = next(i for i, b in enumerate(batches) if b is x)
            for block in m.blocks:
                block.door = doors[rank]
            return mean_square(m, x)

        loss(model, batches[place.rank]).backward()
        absent = [name for name, p in model.named_parameters() if p.grad is None]
        assert absent == [f"blocks.{i}.right.{kind}" for i in range(3) if at < 2 for kind in ("weight", "bias")]
        whole = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters() if p.grad is not None])
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        torch.testing.assert_close(norm.full_tensor(), whole.norm())
        optimizer.step()
        optimizer.zero_grad()
        plain_step(plain, loss, batches, theirs)
        assert_equal(model, plain)


def a_unit_called_more_than_once(place: Place) -> None:
    for order in ((0, 1, 0, 2, 1), (0, 0, 0), (0, 0, 1, 1, 2, 2)):
        sharded, _ = train_beside(place, make(Chosen), at_step=lambda model, step: setattr(model, "order", order))  # noqa: B023
        assert kept_gathered(sharded) == []


class InsideItself(Block):
    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        deeper = x if depth == 0 else self(x, depth - 1)
        return super().forward(deeper)


def a_unit_called_inside_itself(place: Place) -> None:
    for strategy in (Strategy(), Strategy(forward_prefetch=2, backward_prefetch=2)):
        train_beside(place, make(block=InsideItself), lambda model: by_block(model, strategy=strategy))  # noqa: B023


@everywhere(
    a_unit_that_is_never_used,
    a_unit_used_on_some_steps,
    a_parameter_that_is_never_used,
    a_parameter_that_some_ranks_use,
    a_unit_called_more_than_once,
    a_unit_called_inside_itself,
)
def test_unused_and_used_again(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- tied parameters, mixed dtypes -------------------------------------------------------------------------------------


def tied(*pairs: tuple[str, str]) -> Any:
    model = make()
    for one, other in pairs:
        holder, _, attribute = other.rpartition(".")
        setattr(model.get_submodule(holder), attribute, model.get_parameter(one))
    return model


def tied_inside_a_unit(place: Place) -> None:
    sharded, _ = train_beside(place, tied(("blocks.1.norm.weight", "blocks.1.down.bias")))
    assert sharded.blocks[1].norm.weight is sharded.blocks[1].down.bias


def tied_between_root_and_unit(place: Place) -> None:
    sharded, _ = train_beside(place, tied(("first.bias", "blocks.2.down.bias"), ("blocks.0.norm.weight", "first.bias")))
    assert sharded.first.bias is sharded.blocks[0].norm.weight and sharded.first.bias is not sharded.blocks[2].down.bias


def tied_between_two_units(place: Place) -> None:
    """Sharded in either order, the one that comes first has the values."""
    for order in ((0, 1, 2), (2, 1, 0)):

        def shard(model: Any) -> None:
            for i in order:  # noqa: B023
                fully_shard(model.blocks[i])
            fully_shard(model)

        model = tied(("blocks.0.up.weight", "blocks.2.up.weight"), ("blocks.0.norm.bias", "blocks.1.norm.bias"))
        sharded, _ = train_beside(place, model, shard)
        assert sharded.blocks[0].up.weight is sharded.blocks[2].up.weight
        owners = {p.flat for p in (sharded.blocks[0].up.weight, sharded.blocks[0].norm.bias)}
        assert owners == set(units_of(sharded)[0].flats)  # the lowest unit that contains all their uses: the root


def ties_lose_no_bit_of_the_masters(place: Place) -> None:
    model, plain = (
        tied(("blocks.0.up.weight", "blocks.2.up.weight")),
        tied(("blocks.0.up.weight", "blocks.2.up.weight")),
    )
    by_block(model, strategy=Strategy(precision="bf16"))
    assert_equal(model, plain)


class Mixed(Block):
    """Three dtypes of parameters, one of them no float."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.coded = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.wide(x.double()).float() + 0.1 * self.coded)


def mixed_dtypes(place: Place) -> None:
    sharded, _ = train_beside(place, make(block=Mixed))
    flats = units_of(sharded)[1].flats
    assert {flat.dtype for flat in flats} == {torch.float32, torch.float64, torch.int8}
    assert {p.dtype for p in sharded_parameters(sharded)} == {torch.float32, torch.float64}


@everywhere(
    tied_inside_a_unit,
    tied_between_root_and_unit,
    tied_between_two_units,
    ties_lose_no_bit_of_the_masters,
    mixed_dtypes,
)
def test_tied_and_mixed(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- how units lie in one another --------------------------------------------------------------------------------------


def _pairs(*lists: tuple[int, ...]) -> Callable[[Any], None]:
    def shard(model: Any) -> None:
        for some in lists:
            fully_shard([model.blocks[i] for i in some])
        fully_shard(model)

    return shard


def two_modules_in_a_unit(place: Place) -> None:
    sharded, _ = train_beside(place, make(depth=4), _pairs((0, 1), (2, 3)))
    assert [unit.name for unit in units_of(sharded)] == ["", "blocks.0", "blocks.2"]


def two_modules_are_gathered_once(place: Place) -> None:
    sharded, _ = train_beside(place, make(depth=6), _pairs((0, 1), (2, 3), (4, 5)), steps=2)
    said: list[tuple[str, str]] = []
    runtime_of(sharded).watch = lambda phase, unit, direction: said.append((phase, unit))
    mean_square(sharded, batch(0, place.rank)).backward()
    runtime_of(sharded).watch = None
    assert said.count(("unshard", "blocks.0")) == 2  # forward and backward
    assert said.count(("unshard", "blocks.4")) == 1  # the backward begins with it: it stays
    assert said.count(("reduce", "blocks.0")) == said.count(("reduce", "blocks.4")) == 1


def two_modules_in_the_other_order(place: Place) -> None:
    train_beside(place, make(depth=4), _pairs((1, 0), (3, 2)))


def two_modules_with_others_between(place: Place) -> None:
    train_beside(place, make(depth=4), _pairs((0, 3), (1, 2)))


def one_of_two_modules_used_on_some_steps(place: Place) -> None:
    orders = ((0, 1, 2, 3), (1, 2), (0, 3), (0, 0, 1, 3))
    at_step: Any = lambda model, step: setattr(model, "order", orders[step])  # noqa: E731
    train_beside(place, make(Chosen, depth=4), _pairs((0, 1), (2, 3)), steps=4, at_step=at_step)


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.inner:
            x = block(x)
        return x


def units_inside_units(place: Place) -> None:
    for strategy in (Strategy(), Strategy(sharding="shard_grad_op"), Strategy(forward_prefetch=1, backward_prefetch=3)):
        options = options_of(strategy)

        def shard(model: Any) -> None:
            for stage in model.blocks:
                for block in stage.inner:
                    fully_shard(block.up, **options)  # noqa: B023
                    fully_shard(block, **options)  # noqa: B023
                fully_shard(stage, **options)  # noqa: B023
            fully_shard(model, **options)  # noqa: B023

        sharded, _ = train_beside(place, make(depth=2, block=Stage), shard)
        assert len(units_of(sharded)) == 1 + 2 * (1 + 2 * 2)
        assert kept_gathered(sharded) == []


@everywhere(
    two_modules_in_a_unit,
    two_modules_are_gathered_once,
    two_modules_in_the_other_order,
    two_modules_with_others_between,
    one_of_two_modules_used_on_some_steps,
    units_inside_units,
)
def test_units_of_several_modules_and_inside_others(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- forwards without a backward ---------------------------------------------------------------------------------------


def _looks(model: Any, plain: Any, x: Tensor) -> None:
    """Every kind of forward that has no backward gives what the plain model gives."""
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            assert torch.equal(model(x), plain(x))
    model.eval()
    plain.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    model.train()
    plain.train()
    assert kept_gathered(model) == []


class Dropping(Block):
    """Another forward in training than in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x + self.up(self.norm(x))[:, :WIDTH]


def between_steps(place: Place) -> None:
    for strategy in (Strategy(offload="optimizer"), Strategy(sharding="zero1"), Strategy(forward_prefetch=2)):
        model, plain = make(block=Dropping), make(block=Dropping)
        by_block(model, strategy=strategy)
        _looks(model, plain, batch(9, place.rank))  # before any training
        ours = torch.optim.SGD(sharded_parameters(model), lr=0.1)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(3):
            batches = [batch(step, rank) for rank in range(place.world_size)]
            mean_square(model, batches[place.rank]).backward()
            ours.step()
            ours.zero_grad()
            for name, g in gradients(plain, mean_square, batches).items():
                plain.get_parameter(name).grad = g
            theirs.step()
            assert_equal(model, plain)
            _looks(model, plain, batch(9, place.rank))


def between_forward_and_backward(place: Place) -> None:
    model, plain = make(block=Dropping), make(block=Dropping)
    by_block(model)
    batches = [batch(0, rank) for rank in range(place.world_size)]
    loss = mean_square(model, batches[place.rank])
    _looks(model, plain, batch(9, place.rank))
    loss.backward()
    _has_gradients(model, gradients(plain, mean_square, batches))


def _has_gradients(model: Any, wanted: dict[str, Tensor], times: float = 1.0) -> None:
    """The reduced gradients of the parameters are `times` these, bit for bit; others have none."""
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    differ = [name for name, g in wanted.items() if not torch.equal(found[name], times * g)]
    assert not differ and found.keys() == wanted.keys(), differ


def a_graph_that_is_dropped(place: Place) -> None:
    """A forward with gradients whose outputs are let go is no pending backward."""
    model, plain = make(), make()
    by_block(model)
    out = model(batch(3, place.rank))
    del out
    batches = [batch(0, rank) for rank in range(place.world_size)]
    mean_square(model, batches[place.rank]).backward()
    _has_gradients(model, gradients(plain, mean_square, batches))


class PartlyWithout(Net):
    """One block is called without gradients, inside a forward that has them."""

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            shift = self.blocks[0](x)
        return self.last(self.blocks[2](self.blocks[1](self.first(x) + shift)))


def without_gradients_inside(place: Place) -> None:
    train_beside(place, make(PartlyWithout))


@everywhere(between_steps, between_forward_and_backward, a_graph_that_is_dropped, without_gradients_inside)
def test_forwards_without_backward(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- what goes in and comes out ----------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    nothing: None = None


@dataclasses.dataclass
class Output(BaseModelOutput):
    x: Tensor | None = None


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda x: (x, None, 3), lambda out: out[0]),
    "list": (lambda x: [x], lambda out: out[0]),
    "named tuple": (lambda x: Pair(x, x.detach()), lambda out: out.x),
    "dict": (lambda x: {"x": x, "none": None}, lambda out: out["x"]),
    "nested": (lambda x: {"a": (Record(x), [])}, lambda out: out["a"][0].x),
    "frozen dataclass": (lambda x: Record(x), lambda out: out.x),
    "model output": (lambda x: Output(last_hidden_state=x.detach(), x=x), lambda out: out.x),
    "two": (lambda x: (x[:1], x[1:]), lambda out: torch.cat([out[1], out[0]])),
    "one of two": (lambda x: (x * 2, x), lambda out: out[1]),
}


class Forms(Net):
    """Blocks, and the model itself, return things of one form."""

    form = "tuple"

    def forward(self, x: Tensor) -> Any:
        pack, unpack = FORMS[self.form]
        x = self.first(x)
        for block in self.blocks:
            x = unpack(block(x))
        return pack(self.last(x))


class FormBlock(Block):
    form = "tuple"

    def forward(self, x: Tensor) -> Any:
        return FORMS[self.form][0](super().forward(x))


def outputs(place: Place) -> None:
    for form, (pack, unpack) in FORMS.items():
        model = make(Forms, block=FormBlock)
        model.form = form
        for block in model.blocks:
            block.form = form

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            out = model(x)
            assert type(out) is type(pack(x))  # noqa: B023
            return unpack(out).square().mean()  # noqa: B023

        sharded, _ = train_beside(place, model, loss=loss, steps=2)
        assert kept_gathered(sharded) == []


def outputs_in_another_dtype(place: Place) -> None:
    """The cast of the root's outputs reaches into them, and leaves their form."""
    for form, (pack, unpack) in FORMS.items():
        model = make(Forms, block=FormBlock)
        model.form = form
        for block in model.blocks:
            block.form = form
        by_block(model, strategy=Strategy(precision=Precision(output="bf16")))
        out = model(batch(0, place.rank))
        assert type(out) is type(pack(torch.zeros(3, 1)))
        assert unpack(out).dtype is torch.bfloat16
        unpack(out).float().mean().backward()


class Silent(Net):
    """Its forward returns nothing: the loss is left in an attribute."""

    def forward(self, x: Tensor) -> None:
        self.loss = super().forward(x).square().mean()


def nothing_comes_out(place: Place) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        model(x)
        found: Tensor = model.loss
        del model.loss
        return found

    train_beside(place, make(Silent), loss=loss)
    train_beside(place, make(Silent), fully_shard, loss=loss)  # no inner unit sees the backward begin


class ByKeyword(Net):
    def forward(self, x: Tensor, *, shift: dict[str, Any]) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x=x + shift["by"][0])
        return self.last(x)


def inputs_by_keyword(place: Place) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x=x, shift={"by": (x[:1] * 0.1, "no tensor")})
        return out.square().mean()

    sharded, _ = train_beside(place, make(ByKeyword), loss=loss)
    assert kept_gathered(sharded) == []


def inputs_that_require_gradients(place: Place) -> None:
    model, plain = make(), make()
    by_block(model)
    for shape in ((3, WIDTH), (WIDTH,)):
        x = torch.ones(shape, requires_grad=True)
        y = torch.ones(shape, requires_grad=True)
        mean_square(model, x).backward()
        mean_square(plain, y).backward()
        assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu_(x))


def inputs_changed_in_place(place: Place) -> None:
    train_beside(place, make(block=InPlace))


@everywhere(
    outputs,
    outputs_in_another_dtype,
    nothing_comes_out,
    inputs_by_keyword,
    inputs_that_require_gradients,
    inputs_changed_in_place,
)
def test_inputs_and_outputs(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- backwards of every kind -------------------------------------------------------------------------------------------


def a_second_backward(place: Place) -> None:
    for strategy in (Strategy(), Strategy(sharding="zero1"), Strategy(sharding="no_shard")):
        model, plain = make(), make()
        by_block(model, strategy=strategy)
        batches = [batch(0, rank) for rank in range(place.world_size)]
        loss = mean_square(model, batches[place.rank])
        loss.backward(retain_graph=True)
        wanted = gradients(plain, mean_square, batches)
        _has_gradients(model, wanted)
        loss.backward()
        _has_gradients(model, wanted, times=2)
        assert kept_gathered(model) == []


def gradients_by_function(place: Place) -> None:
    """`torch.autograd.grad` gives this rank's own; nothing is reduced, and nothing stays behind."""
    model, plain = make(), make()
    by_block(model)
    x = batch(0, place.rank).requires_grad_()
    y = batch(0, place.rank).requires_grad_()
    (found,) = torch.autograd.grad(mean_square(model, x), [x])
    (wanted,) = torch.autograd.grad(mean_square(plain, y), [y])
    assert torch.equal(found, wanted)
    names = [name for name, _ in plain.named_parameters()]
    with unshard(model):
        ours = torch.autograd.grad(mean_square(model, x), [model.get_parameter(name) for name in names])
    theirs = torch.autograd.grad(mean_square(plain, y), list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(p.grad is None for p in sharded_parameters(model)) and kept_gathered(model) == []
    batches = [batch(1, rank) for rank in range(place.world_size)]
    mean_square(model, batches[place.rank]).backward()
    _has_gradients(model, gradients(plain, mean_square, batches))


def part_of_the_graph(place: Place) -> None:
    """A backward that ends in the middle of the model is over, and the next forward may come."""
    model = by_block(make())
    seen: list[Tensor] = []
    handle = model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    loss = mean_square(model, batch(0, place.rank))
    torch.autograd.grad(loss, [seen[0]])
    handle.remove()
    loss = None
    seen.clear()
    assert kept_gathered(model) == []
    mean_square(model, batch(0, place.rank)).backward()


def parameters_in_the_loss(place: Place) -> None:
    """A penalty on a parameter itself, read inside `unshard`."""
    model, plain = make(), make()
    by_block(model)
    for m in (model, plain):
        with unshard(m) if m is model else torch.enable_grad():
            (m.blocks[1].up.weight.square().sum() * 0.5).backward()
    assert plain.blocks[1].up.weight.grad is not None
    _has_gradients(model, {"blocks.1.up.weight": plain.blocks[1].up.weight.grad})


def parameters_in_a_loss_of_their_own(place: Place) -> None:
    """Before the forward; an optimizer of regions sees it too."""
    model, plain = make(), make()
    by_block(model)
    optimizer = torch.optim.SGD(sharded_parameters(model), lr=0.1)
    for m in (model, plain):
        total = sum(p.square().sum() for p in m.parameters())
        assert isinstance(total, Tensor)
        (0.25 * total).backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_equal(model, plain)


def a_graph_that_is_not_used(place: Place) -> None:
    """What was kept gathered for it is freed at the next step, at the latest."""
    model, plain = make(), make()
    by_block(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for i in range(2):
        x = batch(10 + i, place.rank).requires_grad_()
        torch.autograd.grad(mean_square(model, x), x, create_graph=True)
        mean_square(model, batch(i, place.rank)).backward()
        assert kept_gathered(model) == []
        optimizer.step()
        optimizer.zero_grad()
        plain_step(plain, mean_square, [batch(i, rank) for rank in range(2)], plain_optimizer)
        assert_equal(model, plain)


def gradients_that_cannot_be_reduced(place: Place) -> None:
    model = by_block(make())
    with pytest.raises(ShardError, match=r"has a graph \(create_graph=True\), which its reduction would cut"):
        mean_square(model, batch(0, place.rank)).backward(create_graph=True)
    with pytest.raises(ShardError, match=r"torch.func transforms, as grad or vmap, of a sharded model"):
        torch.func.grad(lambda x: mean_square(model, x))(batch(0, place.rank))
    mean_square(model, batch(0, place.rank)).backward()
    sparse = fully_shard(nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, 2)))
    with pytest.raises(ShardError, match="the gradient of 0.weight is sparse, and only dense ones can be reduced"):
        sparse(torch.tensor([1, 2])).sum().backward()


@everywhere(
    a_second_backward,
    gradients_by_function,
    part_of_the_graph,
    parameters_in_the_loss,
    parameters_in_a_loss_of_their_own,
    a_graph_that_is_not_used,
    gradients_that_cannot_be_reduced,
)
def test_backwards(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- accumulation, clipping, scaling -----------------------------------------------------------------------------------


def accumulation(place: Place) -> None:
    """Communication at every micro-batch or at the last; both give the big batch's gradients.

    In float64: the two orders of summation differ by less than one part in 10^12 of the largest gradient.
    """
    micro = [[batch(m, rank).double() for m in range(3)] for rank in range(place.world_size)]
    wanted = gradients(make().double(), mean_square64, [torch.cat(x) for x in micro])
    bound = 1e-12 * max(float(g.abs().max()) for g in wanted.values())
    for every in (True, False):
        model = make().double()
        by_block(model)
        for m, x in enumerate(micro[place.rank]):
            if every or m == 2:
                (mean_square64(model, x) / 3).backward()
            else:
                with no_sync(model):
                    (mean_square64(model, x) / 3).backward()
                assert all(p.grad is None for p in sharded_parameters(model))
                assert all(flat.gradients.unsharded is not None for unit in units_of(model) for flat in unit.flats)
        found = _gradients_of(model)
        assert all(torch.allclose(found[name], g, rtol=0, atol=bound) for name, g in wanted.items())
        assert all(flat.gradients.unsharded is None for unit in units_of(model) for flat in unit.flats)


def mean_square64(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def accumulation_with_units_that_come_and_go(place: Place) -> None:
    """What a micro-batch without communication left is reduced, though the last one does not use that unit."""
    model, plain = make(Chosen), make(Chosen)
    by_block(model)
    batches = [batch(0, rank) for rank in range(place.world_size)]
    with no_sync(model):
        mean_square(model, batches[place.rank]).backward()
    wanted = gradients(plain, mean_square, batches)
    model.order = (0, 2)
    (0 * mean_square(model, batches[place.rank])).backward()
    _has_gradients(model, wanted)


def _gradients_of(model: Any) -> dict[str, Tensor]:
    """Whole, by name; the parameters are overwritten with them."""
    for unit in units_of(model):
        for flat in unit.flats:
            for region in flat.gradients.regions.values():
                assert region.grad is not None
                region.data.copy_(region.grad)
    return dict(full_state(model))


def clipping(place: Place) -> None:
    """Against torch's `clip_grad_norm_` on the unsharded model.

    Both take norms of n float32 numbers in some order: each is off by at most n units in the last place (2^-24), relative.
    """
    plain = make()
    batches = [batch(0, rank) for rank in range(place.world_size)]
    wanted = gradients(plain, mean_square, batches)
    bound = 2 * sum(g.numel() for g in wanted.values()) * 2**-24
    for strategy in (Strategy(), Strategy(sharding="no_shard"), Strategy(sharding="zero1", offload="all")):
        for norm_type in (1.0, 2.0, 3.0, float("inf")):
            for name, g in wanted.items():
                plain.get_parameter(name).grad = g.clone()
            model = by_block(make(), strategy=strategy)
            mean_square(model, batches[place.rank]).backward()
            norm = gradient_norm(model, norm_type)
            theirs = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5 * norm, norm_type))
            assert abs(norm - theirs) <= bound * theirs, (norm_type, norm, theirs)
            assert clip_gradients(model, 2 * norm, norm_type) == norm
            _has_gradients(model, wanted)  # below the limit: untouched
            assert clip_gradients(model, 0.5 * norm, norm_type) == norm
            assert abs(gradient_norm(model, norm_type) - 0.5 * norm) <= (bound + 2e-6 / norm) * norm
            clipped = _gradients_of(model)
            for name, p in plain.named_parameters():
                assert p.grad is not None and torch.allclose(clipped[name], p.grad, rtol=2 * bound, atol=0)


def norms_of_low_precision(place: Place) -> None:
    """Half gradients whose squares would overflow in their own dtype."""
    strategy = Strategy(precision=Precision(param="fp16", reduce="fp16", keep_low_precision_gradients=True))
    model = by_block(make(), strategy=strategy)
    mean_square(model, batch(0, place.rank)).backward()
    for p in sharded_parameters(model):
        assert p.grad is not None and p.grad.dtype is torch.float16
        p.grad.fill_(3e4)
    regions = [r for unit in units_of(model) for flat in unit.flats for r in flat.layout.regions.values()]
    count = sum(stop - start for start, stop in regions)
    assert gradient_norm(model) == pytest.approx(3e4 * count**0.5, rel=1e-3)


@everywhere(accumulation, accumulation_with_units_that_come_and_go, clipping, norms_of_low_precision)
def test_accumulation_and_clipping(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


class WithAnElement(Net):
    """Returns an element of a parameter too, whose gradient can be made what one likes."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.last.bias[0].float()


def overflow_on_one_rank(place: Place) -> bool:
    """Returns whether this rank itself saw it."""
    model = by_block(make(WithAnElement), strategy=Strategy(precision="fp16"))
    scaler = Scaler(enabled=True)
    optimizer = torch.optim.SGD(sharded_parameters(model), lr=0.1)
    before = {name: t.clone() for name, t in full_state(model)}

    def step(factor: float) -> tuple[bool, bool]:
        out, element = model(batch(0, place.rank))
        loss = out.float().square().mean() + (factor if place.rank == 1 else 0.0) * element
        scaler.scale_loss(loss).backward()
        whole = all(p.grad is None or bool(p.grad.to_local().isfinite().all()) for p in sharded_parameters(model))
        may_step = scaler.unscale_gradients(model)
        if may_step:
            optimizer.step()
        optimizer.zero_grad()
        scaler.update(overflowed=not may_step)
        return may_step, whole

    may_step, whole = step(1e6)
    assert not may_step and scaler.scale == 2.0**15
    assert all(torch.equal(t, before[name]) for name, t in full_state(model))
    assert step(0.0) == (True, True) and scaler.scale == 2.0**15 and scaler.good_steps == 1
    assert not all(torch.equal(t, before[name]) for name, t in full_state(model))
    return not whole


def test_an_overflow_on_one_rank_is_skipped_by_all(pool: Pool) -> None:
    assert sorted(pool.run(overflow_on_one_rank, 2)) == [False, True]


def small_gradients_in_fp16(place: Place) -> None:
    """The scale is what keeps them: they are divided by it in fp32, also where gradients stay in fp16 until then."""
    for keep in (False, True):
        precision = Precision(param="fp16", reduce="fp16", keep_low_precision_gradients=keep)
        model = by_block(make(), strategy=Strategy(precision=precision))
        scaler = Scaler(enabled=True)
        scaler.scale_loss(mean_square(model, batch(0, place.rank)) * 1e-6).backward()
        assert scaler.unscale_gradients(model)
        wanted = gradients(make(), mean_square, [batch(0, rank) for rank in range(place.world_size)])
        found = _gradients_of(model)
        for name, g in wanted.items():  # of fp16, 11 bits: some roundings of the largest
            assert torch.allclose(found[name], g * 1e-6, rtol=0, atol=1e-6 * float(g.abs().max()) / 64), (keep, name)


def test_the_scale_keeps_small_gradients(pool: Pool) -> None:
    pool.run(small_gradients_in_fp16, 2)


# -- precision ---------------------------------------------------------------------------------------------------------


class Seen(Block):
    """Writes down the dtypes that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, torch.dtype] = {}
        self.register_buffer("shift", torch.full((WIDTH,), 0.125))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.norm.register_forward_hook(lambda module, args, out: self.dtypes.update(norm_in=args[0].dtype))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        normed = self.norm(x + self.shift.to(x.dtype))
        self.dtypes |= {"input": x.dtype, "weight": self.up.weight.dtype, "norm": self.norm.weight.dtype}
        self.dtypes |= {"norm_out": normed.dtype, "buffer": self.shift.dtype, "count": self.count.dtype}
        return x + self.down(torch.tanh(self.up(normed)))


HALF, FULL = torch.bfloat16, torch.float32

# precision -> what is seen: in the block, of the whole gradient, of the gradient shard, of the output
PRECISIONS: tuple[tuple[str | Precision, dict[str, torch.dtype]], ...] = (
    ("fp32", {}),
    ("bf16", {"input": HALF, "weight": HALF, "norm": HALF, "norm_in": HALF, "norm_out": HALF, "output": HALF}),
    ("bf16-pure", {"input": HALF, "weight": HALF, "norm": HALF, "norm_in": HALF, "norm_out": HALF, "buffer": HALF,
                   "whole": HALF, "output": HALF}),
    (Precision(param="bf16", norm="fp32", output="fp32"), {"input": HALF, "weight": HALF, "norm_out": HALF}),
    (Precision(reduce="bf16", keep_low_precision_gradients=True), {"whole": HALF, "shard": HALF}),
    (Precision(param="bf16", reduce="bf16", keep_low_precision_gradients=True),
     {"input": HALF, "weight": HALF, "norm": HALF, "norm_in": HALF, "norm_out": HALF, "whole": HALF, "shard": HALF,
      "output": HALF}),
    (Precision(output="bf16", buffer="bf16"), {"output": HALF, "buffer": HALF}),
)  # fmt: skip


def dtypes(place: Place) -> None:
    for precision, low in PRECISIONS:
        model = make(block=Seen)
        by_block(model, strategy=Strategy(precision=precision))
        out = model(batch(0, place.rank).double().float())
        found = {**model.blocks[1].dtypes, "output": out.dtype}
        with no_sync(model):
            out.float().square().mean().backward()
        assert all(flat.gradients.unsharded is not None for unit in units_of(model) for flat in unit.flats)
        found["whole"] = next(
            flat.gradients.unsharded.dtype for flat in units_of(model)[1].flats if flat.gradients.unsharded is not None
        )
        mean_square(model, batch(0, place.rank)).backward()
        found["shard"] = next(p.grad.dtype for p in sharded_parameters(model) if p.grad is not None)
        wanted = dict.fromkeys(found, FULL) | {"count": torch.int64} | low
        assert found == wanted, (precision, {k: v for k, v in found.items() if wanted[k] is not v})
        assert {p.dtype for p in sharded_parameters(model)} == {FULL}
        assert {flat.master.dtype for unit in units_of(model) for flat in unit.flats} == {FULL}
        upcast_gradients(model)
        assert {p.grad.dtype for p in sharded_parameters(model) if p.grad is not None} == {FULL}
        torch.optim.AdamW(sharded_parameters(model)).step()


def integers_are_not_cast(place: Place) -> None:
    seen: list[torch.dtype] = []
    model = make()
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.extend(t.dtype for t in args), with_kwargs=True)
    model.forward = lambda x, ids, mask: Net.forward(model, x)
    by_block(model, strategy=Strategy(precision="bf16"))
    model(batch(0, 0), torch.tensor([1]), torch.tensor([True]))
    assert seen == [torch.bfloat16, torch.int64, torch.bool]


def mixed_precision_by_hand(place: Place) -> None:
    """bf16 compute, fp32 reduction, fp32 masters: equal bit for bit to the same done by hand."""
    model, masters = make(), make()
    by_block(model, strategy=Strategy(precision="bf16"))
    ours = torch.optim.SGD(sharded_parameters(model), lr=0.1)
    theirs = torch.optim.SGD(masters.parameters(), lr=0.1)
    for step in range(3):
        batches = [batch(step, rank) for rank in range(place.world_size)]
        mean_square(model, batches[place.rank]).backward()
        ours.step()
        ours.zero_grad()
        summed: dict[str, Tensor] = {}
        for x in batches:
            low = make().bfloat16()
            low.load_state_dict({name: p.bfloat16() for name, p in masters.state_dict().items()})
            mean_square(low, x.bfloat16()).backward()
            for name, p in low.named_parameters():
                assert p.grad is not None
                summed[name] = summed[name] + p.grad.float() if name in summed else p.grad.float()
        for name, p in masters.named_parameters():
            p.grad = summed[name] / len(batches)
        theirs.step()
        assert_equal(model, masters)


@everywhere(dtypes, integers_are_not_cast, mixed_precision_by_hand)
def test_precision(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- a strategy in the engine's terms ----------------------------------------------------------------------------------


def rules_of_the_schedule(place: Place) -> None:
    """The engine goes by the very rules that the planner simulates."""
    changes: tuple[dict[str, Any], ...] = (
        *({"sharding": sharding} for sharding in SHARDINGS),
        *({"offload": offload} for offload in OFFLOADS),
        {"reshard_size": 2},
        {"forward_prefetch": 2, "backward_prefetch": 3, "backward_prefetch_point": "after", "limit_all_gathers": 1},
    )
    for given in changes:
        strategy = Strategy(**given)
        model = by_block(make(), strategy=strategy)
        assert {unit.policy.rules for unit in units_of(model)} == {strategy.schedule_rules}, given
        assert runtime_of(model).rules == strategy.schedule_rules
        assert units_of(model)[0].mesh.shard_size == strategy.shard_factor(place.world_size)


def test_engine_and_planner_have_the_same_rules(pool: Pool) -> None:
    pool.run(rules_of_the_schedule, 4)


# -- torch's own policies ---------------------------------------------------------------------------------------------


def torchs_policies(place: Place) -> None:
    """`fully_shard` takes them, and gives FSDP2's numbers, bit for bit; without a reduce_dtype too."""
    half = torch.bfloat16
    for mp in (
        fsdp.MixedPrecisionPolicy(param_dtype=half),
        fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32),
        fsdp.MixedPrecisionPolicy(param_dtype=half, cast_forward_inputs=False),
    ):
        for offload in (fsdp.OffloadPolicy(), fsdp.CPUOffloadPolicy(pin_memory=False)):
            ours, theirs = make(), make()
            options: dict[str, Any] = {"mesh": build_mesh("cpu"), "mp_policy": mp, "offload_policy": offload}
            for model, shard in ((ours, fully_shard), (theirs, fsdp.fully_shard)):
                for module in (*model.blocks, model):
                    shard(module, **options)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
            for at in range(3):
                x = batch(at, place.rank).to(half)
                losses = [m(x).square().mean() for m in (ours, theirs)]
                assert losses[0].dtype == losses[1].dtype and torch.equal(*losses), (mp, offload)
                for loss, optimizer in zip(losses, optimizers, strict=True):
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                assert torch.equal(p.full_tensor(), q.full_tensor()), (name, mp, offload)
    for wrong in ({"mp_policy": "bf16"}, {"offload_policy": "host"}):
        with pytest.raises(ShardError, match="policy is "):
            fully_shard(make(), **wrong)


def test_torchs_policies(pool: Pool) -> None:
    pool.run(torchs_policies, 2)


# -- offload -----------------------------------------------------------------------------------------------------------


def offload(place: Place) -> None:
    """On a CPU host and device are one place, so that results are the same to the bit; what is kept where is not."""
    for where in ("none", "optimizer", "all"):
        for sharding in ("full_shard", "zero1", "no_shard"):
            strategy = Strategy(offload=where, sharding=sharding)
            sharded, _ = train_beside(place, make(), lambda model: by_block(model, strategy=strategy), steps=2)  # noqa: B023
            for flat in (flat for unit in units_of(sharded) for flat in unit.flats):
                held = [t.untyped_storage().size() for t in flat.tensors()]
                own = flat.layout.shard_numel * 4
                wanted = [own]  # the master shard
                if sharding == "no_shard":
                    wanted += [own]  # the very same storage: it is what is gathered
                    assert flat.master.untyped_storage().data_ptr() == flat.full.untyped_storage().data_ptr()
                elif where == "optimizer":
                    wanted += [own]  # a copy to gather from
                wanted += (
                    [own * place.world_size] if sharding == "zero1" else []
                )  # gathered parameters keep their storage
                assert sorted(h for h in held if h) == sorted(wanted), (where, sharding)
                assert {flat.master.device.type, *(p.device.type for p in flat.gradients.regions.values())} == {"cpu"}


def test_offload(pool: Pool) -> None:
    pool.run(offload, 2)


# -- activation checkpoints --------------------------------------------------------------------------------------------


class Checkpointed(Net):
    """Its own forward calls torch's checkpoint around every block."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class CheckpointedInside(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.down(torch.tanh(self.up(y))), self.norm(x), use_reentrant=False)


def wrapped_inside(model: Any) -> None:
    """The checkpoint's wrapper is the unit's module."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    by_block(model)


def wrapped_around(model: Any) -> None:
    """The unit is inside the checkpoint's wrapper."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(fully_shard(block))
    fully_shard(model)


def checkpoints(place: Place) -> None:
    calls: list[int] = []
    for kind, block, shard in (
        (Net, CheckpointedInside, by_block),
        (Checkpointed, Block, by_block),
        (Checkpointed, Stage, by_stage),
        (Net, Block, wrapped_inside),
        (Net, Block, wrapped_around),
    ):
        model = make(kind, block=block)
        inner = model.blocks[1].up if block is not Stage else model.blocks[1].inner[0].up
        inner.register_forward_hook(lambda *_: calls.append(1))
        sharded, _ = train_beside(place, model, shard, steps=2)
        assert kept_gathered(sharded) == []
        calls.clear()
        mean_square(sharded, batch(0, place.rank)).backward()
        assert len(calls) == 2  # it was computed again
        assert not runtime_of(sharded).recomputes


def by_stage(model: Any) -> None:
    for stage in model.blocks:
        for block in stage.inner:
            fully_shard(block)
        fully_shard(stage)
    fully_shard(model)


def checkpoints_in_bf16(place: Place) -> None:
    """Casts are computed again alike: torch compares the metadata of what both forwards saved."""
    model = by_block(make(Checkpointed, block=Seen), strategy=Strategy(precision=Precision(param="bf16", norm="fp32")))
    mean_square(model, batch(0, place.rank)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sharded_parameters(model))


@everywhere(checkpoints, checkpoints_in_bf16)
def test_checkpoints(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- torch.compile -----------------------------------------------------------------------------------------------------


def compiled(place: Place, backend: str, when: str) -> None:
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    model, plain = make(depth=2), make(depth=2)
    if when == "before":
        for block in model.blocks:
            block.compile(backend=backend)
    by_block(model)
    if when == "after":
        for block in model.blocks:
            block.compile(backend=backend)
    called = torch.compile(model, backend=backend) if when == "whole" else model
    ours = torch.optim.SGD(sharded_parameters(model), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        batches = [batch(step, rank) for rank in range(place.world_size)]
        mean_square(called, batches[place.rank]).backward()
        ours.step()
        ours.zero_grad()
        for name, g in gradients(plain, mean_square, batches).items():
            plain.get_parameter(name).grad = g
        theirs.step()
    for name, t in full_state(model):  # a compiler may fuse and reorder: some roundings of fp32
        assert torch.allclose(t, plain.get_parameter(name), rtol=1e-5, atol=1e-6), name
    assert kept_gathered(model) == []
    assert counters["stats"]["unique_graphs"] >= 1, counters
    assert counters["frames"]["ok"] <= 4, counters["frames"]  # it did not compile our hooks
    assert sum(counters["graph_break"].values()) <= 4, counters["graph_break"]


def compiled_step(place: Place) -> None:
    torch._dynamo.reset()
    model, plain = by_block(make(depth=0)), by_block(make(depth=0))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain)]
    steps = [torch.compile(optimizers[0].step, backend="eager"), optimizers[1].step]
    for i in range(2):
        for m, optimizer, step in zip((model, plain), optimizers, steps, strict=True):
            mean_square(m, batch(i, place.rank)).backward()
            step()
            optimizer.zero_grad()
    for (name, a), (_, b) in zip(full_state(model), full_state(plain), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), name


def test_a_compiled_step_of_an_optimizer(pool: Pool) -> None:
    """SGD's: Dynamo takes ten seconds a rank to trace AdamW's."""
    pool.run(compiled_step, 2, timeout_s=200)


@pytest.mark.parametrize("when", ["before", "after", "whole"])
def test_compile(pool: Pool, when: str) -> None:
    """Traced and differentiated ahead of time, but run by torch's own kernels: needs no compiler."""
    pool.run(compiled, 2, "aot_eager", when, timeout_s=200)


# -- hooks of users ----------------------------------------------------------------------------------------------------


def hooks_of_users(place: Place) -> None:
    """Hooks on modules, put on before sharding and after it, run as often as on the plain model and see the same."""

    def listen(model: Any) -> list[tuple[str, Tensor]]:
        heard: list[tuple[str, Tensor]] = []
        block, up = model.blocks[1], model.blocks[1].up
        block.register_forward_pre_hook(lambda m, args: heard.append(("pre", args[0].detach())))
        block.register_forward_hook(lambda m, args, out: heard.append(("post", out.detach())))
        block.register_full_backward_pre_hook(lambda m, grad: heard.append(("backward pre", grad[0])))
        block.register_full_backward_hook(lambda m, into, out: heard.append(("backward", into[0])))
        up.register_forward_hook(lambda m, args, out: heard.append(("inner", out.detach())))
        up.weight.register_hook(lambda grad: heard.append(("weight", grad)))
        return heard

    for early in (True, False):
        model, plain = make(), make()
        theirs = listen(plain)
        if early:
            heard = listen(model)
        by_block(model)
        if not early:
            heard = listen(model)
        x = batch(0, place.rank)
        mean_square(model, x).backward()
        mean_square(plain, x).backward()
        if early:  # those on parameters went with them: the module holds other ones now
            theirs[:] = [h for h in theirs if h[0] != "weight"]
        assert [name for name, _ in heard] == [name for name, _ in theirs]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(heard, theirs, strict=True))


def hooks_that_change_things(place: Place) -> None:
    def hooked() -> Any:
        model = make()
        model.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model.blocks[1].register_forward_hook(lambda m, args, out: out + 1)
        return model

    model, plain = hooked(), hooked()
    by_block(model)
    batches = [batch(0, rank) for rank in range(place.world_size)]
    mean_square(model, batches[place.rank]).backward()
    _has_gradients(model, gradients(plain, mean_square, batches))


def optimizer_groups(place: Place) -> None:
    model = make()
    by_block(model, group_of=lambda name, p: "matrices" if p.dim() > 1 else "vectors")
    groups = parameter_groups(model)
    assert set(groups) == {"matrices", "vectors"}
    assert len(groups["matrices"]) == len(groups["vectors"]) == len(units_of(model))
    before = {name: t.clone() for name, t in full_state(model)}
    mean_square(model, batch(0, place.rank)).backward()
    torch.optim.SGD(groups["vectors"], lr=0.1).step()
    changed = {name for name, t in full_state(model) if not torch.equal(t, before[name])}
    assert changed == {name for name, t in before.items() if t.dim() == 1}


def transposed_copies(place: Place) -> None:
    """They follow their source, whoever writes to it: torch's are views."""
    model, plain = by_block(make()), make()
    for m in (model, plain):
        weight = m.first.weight.detach()
        turned = weight.permute(1, 0)
        weight.mul_(2)
        turned.add_(1)
        m.blocks[0].up.weight.data.zero_()  # of another parameter, in another buffer or in the same
        m.first.weight.data.add_(turned.clone())
        m.last.weight.data[:2].copy_((turned * 3)[:2])
    assert_equal(model, plain)


def drawn_after_sharding(place: Place) -> None:
    """Equal seeds give what one process draws; where seeds differ, replicas draw alike all the same."""
    for sharding in ("full_shard", "no_shard"):
        model, plain = by_block(make(), Strategy(sharding=sharding)), make()
        for m in (model, plain):
            torch.manual_seed(7)
            m.apply(lambda inner: inner.reset_parameters() if hasattr(inner, "reset_parameters") else None)
        assert_equal(model, plain)
    torch.manual_seed(place.rank)
    with torch.no_grad():
        nn.init.normal_(model.first.weight)
        model.last.bias.uniform_()
    for p in (model.first.weight, model.last.bias):
        mine = p.to_local().detach()
        parts = [torch.empty_like(mine) for _ in range(place.world_size)]
        dist.all_gather(parts, mine)
        assert all(torch.equal(part, mine) for part in parts)


@everywhere(transposed_copies, drawn_after_sharding)
def test_values_between_steps(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


@everywhere(hooks_of_users, hooks_that_change_things, optimizer_groups)
def test_hooks_and_groups(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)
