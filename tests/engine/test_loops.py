"""Training loops that somebody else wrote: ours does what FSDP2 and a plain model do there, with the same numbers.

Each loop is written once. FSDP2's parameters have the same bits as ours after every step; the plain model's, whose gradients
are averaged over the ranks before each step, differ by roundings where a parameter's gradient comes in several parts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import fsdp
from torch.utils.checkpoint import checkpoint

from fsdp_lab.base.tensors import move
from fsdp_lab.engine import (
    MixedPrecisionPolicy,
    ShardError,
    TrainingState,
    UnitState,
    full_state,
    fully_shard,
    gradient_norm,
    no_sync,
    register_fsdp_forward_method,
    reshard,
    runtime_of,
    units_of,
    unshard,
)
from tests.covering import pairwise
from tests.engine.toys import WIDTH, Block, Net, batch, make, mean_square
from tests.pool import Place, Pool

Scenario = Callable[[Place], None]
STEPS = 2  # the first one, and one after an optimizer has changed what may still be gathered


def everywhere(*scenarios: Any) -> Any:
    return pytest.mark.parametrize("scenario", scenarios, ids=lambda s: s.__name__)


# -- three engines -----------------------------------------------------------------------------------------------------


class Ours:
    """The engine under test, in the words of a training script."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.models: list[Any] = []

    def shard(self, model: Any, *, inner: bool = True) -> Any:
        for block in model.blocks if inner else ():
            fully_shard(block, **self.options)
        self.models.append(fully_shard(model, **self.options))
        return model

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    def quiet(self, module: Any) -> AbstractContextManager[Any]:
        return no_sync(module)

    def method(self, module: Any, name: str) -> None:
        register_fsdp_forward_method(module, name)

    def values(self, model: Any) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in full_state(model)}

    def check(self) -> None:
        """Between steps nothing is gathered, and nothing under way."""
        for model in self.models:
            assert all(unit.state is UnitState.SHARDED for unit in units_of(model))
            assert not runtime_of(model).reducing and runtime_of(model).backward is None


class Theirs(Ours):
    """FSDP2."""

    def shard(self, model: Any, *, inner: bool = True) -> Any:
        options = {"mesh": dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)), **self.options}
        for block in model.blocks if inner else ():
            fsdp.fully_shard(block, **options)
        return fsdp.fully_shard(model, **options)

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    @contextmanager
    def quiet(self, module: Any) -> Iterator[None]:
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)

    def method(self, module: Any, name: str) -> None:
        fsdp.register_fsdp_forward_method(module, name)

    def values(self, model: Any) -> dict[str, Tensor]:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()  # it leaves some gathered, as after a recomputed forward
        return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


class Plain(Ours):
    """Nothing is sharded; gradients are averaged before the step."""

    def shard(self, model: Any, *, inner: bool = True) -> Any:
        return model

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        super().step(optimizer)

    def quiet(self, module: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def method(self, module: Any, name: str) -> None:
        pass

    def values(self, model: Any) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in model.named_parameters()}


Compared = Iterator[tuple[Any, Any]]  # a model and a number, whenever they are to be compared
Loop = Callable[[Any, Place], Compared]


@contextmanager
def noted(*what: Any) -> Iterator[None]:
    """What fails says of what it is."""
    try:
        yield
    except BaseException as e:
        e.add_note(str(what))
        raise


def alike(loop: Loop, place: Place, *, as_fsdp2: bool = True, **options: Any) -> None:
    """Run the loop under all engines side by side; without `as_fsdp2` where FSDP2 refuses it, or has other numbers."""
    engines = [Ours(**options), Plain(), *([Theirs(**options)] if as_fsdp2 else [])]
    before = None
    for found in zip(*(loop(engine, place) for engine in engines), strict=True):
        values = [engine.values(model) for engine, (model, _) in zip(engines, found, strict=True)]
        numbers = [torch.as_tensor(number).detach() for _, number in found]
        for name, ours in values[0].items():
            torch.testing.assert_close(ours, values[1][name], rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023
            assert not as_fsdp2 or torch.equal(ours, values[2][name]), (name, (ours - values[2][name]).abs().max())
        torch.testing.assert_close(numbers[0], numbers[1], rtol=1e-5, atol=1e-6)
        assert not as_fsdp2 or torch.equal(numbers[0], numbers[2])
        engines[0].check()
        assert before is None or any(not torch.equal(t, before[name]) for name, t in values[0].items())
        before = values[0]
    assert before is not None


def each_strategy(loop: Loop, place: Place, *, as_fsdp2: bool = True) -> None:
    for reshard_after_forward in (True, False):
        alike(loop, place, as_fsdp2=as_fsdp2, reshard_after_forward=reshard_after_forward)


def training(make_loss: Callable[[Any, Tensor, Tensor], Tensor], kind: Any = Net, **made: Any) -> Loop:
    """An ordinary loop whose loss is of two batches."""

    def loop(engine: Any, place: Place) -> Compared:
        model = engine.shard(make(kind, **made))
        optimizer = engine.optimizer(model)
        for step in range(STEPS):
            loss = make_loss(model, batch(step, place.rank), batch(10 + step, place.rank))
            loss.backward()
            engine.step(optimizer)
            yield model, loss

    return loop


# -- several forwards --------------------------------------------------------------------------------------------------


def contrastive(place: Place) -> None:
    """Two and three forwards, one loss, one backward; the second may take what the first gave."""
    each_strategy(training(lambda m, x, y: (m(x) - m(y)).square().mean()), place)
    each_strategy(training(lambda m, x, y: (m(x) * m(y) + m(x + y)).mean()), place)
    again = nn.functional.pad
    each_strategy(training(lambda m, x, y: m(again(m(x), (0, 1)) + y).square().mean()), place)


def dpo(place: Place) -> None:
    """A policy on two batches, and a frozen reference on the same, sharded too."""

    def loop(engine: Any, place: Place) -> Compared:
        policy, reference = engine.shard(make()), engine.shard(make().requires_grad_(False))
        optimizer = engine.optimizer(policy)
        for step in range(STEPS):
            x, y = batch(step, place.rank), batch(10 + step, place.rank)
            chosen, rejected = policy(x).mean(1), policy(y).mean(1)
            with torch.no_grad():
                margin = reference(x).mean(1) - reference(y).mean(1)
            loss = -nn.functional.logsigmoid(chosen - rejected - margin).mean()
            loss.backward()
            engine.step(optimizer)
            yield policy, loss

    each_strategy(loop, place)


class Generator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)


def gan(place: Place) -> None:
    """The discriminator sees true and false, then false once more, whose gradients are thrown away."""

    def loop(engine: Any, place: Place) -> Compared:
        g, d = engine.shard(make(Generator)), engine.shard(make())
        of_g, of_d = engine.optimizer(g), engine.optimizer(d)
        for step in range(STEPS):
            fake = g(batch(step, place.rank))
            loss = (d(batch(10 + step, place.rank)) - 1).square().mean() + d(fake.detach()).square().mean()
            loss.backward()
            engine.step(of_d)
            adversarial = (d(fake) - 1).square().mean()
            adversarial.backward()
            engine.step(of_g)
            of_d.zero_grad()
            yield d, loss
            yield g, adversarial

    each_strategy(loop, place)


def backwards_in_turn(place: Place) -> None:
    """Three graphs alive; each has its own backward, first in first out and the other way round."""
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):

        def loop(engine: Any, place: Place, order: Any = order) -> Compared:
            model = engine.shard(make())
            optimizer = engine.optimizer(model)
            for step in range(STEPS):
                losses = [mean_square(model, batch(10 * i + step, place.rank)) for i in range(3)]
                with torch.no_grad():
                    seen = mean_square(model, batch(step, place.rank))
                for i in order:
                    losses[i].backward()
                engine.step(optimizer)
                yield model, seen

        each_strategy(loop, place)


def dropped(place: Place) -> None:
    """Outputs that nobody uses. The optimizer steps after that: what is still gathered is old. (FSDP2 goes on with it.)"""

    def loop(engine: Any, place: Place) -> Compared:
        model = engine.shard(make())
        optimizer = engine.optimizer(model)
        for step in range(STEPS):
            loss = mean_square(model, batch(step, place.rank))
            loss.backward()
            out = model(batch(5, place.rank))
            kept = model.blocks[1](batch(5, place.rank)) if step % 2 else None
            engine.step(optimizer)
            del out
            again = mean_square(model, batch(step, place.rank))
            again.backward()
            del kept
            engine.step(optimizer)
            yield model, loss + again

    each_strategy(loop, place, as_fsdp2=False)


def retained(place: Place) -> None:
    def twice(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) * model(y)).mean()
        loss.backward(retain_graph=True)
        return loss

    each_strategy(training(twice), place)


class TwoHeads(Net):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.last(x), self.last(self.blocks[-1](x))


def parts_of_the_outputs(place: Place) -> None:
    def one_after_the_other(model: Any, x: Tensor, y: Tensor) -> Tensor:
        early, late = model(x)
        early.square().mean().backward(retain_graph=True)
        loss: Tensor = late.square().mean()
        return loss

    each_strategy(training(one_after_the_other, TwoHeads), place)
    each_strategy(training(lambda m, x, y: m(x)[0].square().mean(), TwoHeads), place)


OF_A_SCENARIO = [
    pytest.param(loop, marks=pytest.mark.slow) for loop in (contrastive, gan)
]  # the quick tier has it there


@everywhere(*OF_A_SCENARIO, dpo, backwards_in_turn, dropped, retained, parts_of_the_outputs)
def test_several_forwards(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


def smaller_groups(place: Place) -> None:
    """Between forward and backward each group of `size` holds what its replica does, as under FSDP2."""
    for shape, size in (((2, 2), 2), ((2, 2), 1), ((1, 4), 2)):
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        alike(training(lambda m, x, y: (m(x) - m(y)).square().mean()), place, mesh=mesh, reshard_after_forward=size)


def test_smaller_groups_of_replicas(pool: Pool) -> None:
    pool.run(smaller_groups, 4, reduction="rank_ordered")


# -- units by themselves -----------------------------------------------------------------------------------------------


def inner_units(place: Place) -> None:
    """After the root, or before it (which FSDP2 refuses later): with and without gradients."""

    def loop(engine: Any, place: Place, first: bool = False) -> Compared:
        model = engine.shard(make())
        optimizer = engine.optimizer(model)
        for step in range(STEPS):
            x, y = batch(step, place.rank), batch(10 + step, place.rank)
            whole = None if first else mean_square(model, x)
            with torch.no_grad():
                teacher = model.blocks[1](y)
            for block in model.blocks:
                y = block(y)
            loss = (y - teacher).square().mean() + (mean_square(model, x) if whole is None else whole)
            loss.backward()
            engine.step(optimizer)
            yield model, loss

    each_strategy(loop, place)
    each_strategy(lambda engine, place: loop(engine, place, True), place, as_fsdp2=False)


def only_inner_units(place: Place) -> None:
    """The root is never called: a pipeline over blocks. No more than two of them are gathered at a time."""

    def loop(engine: Any, place: Place) -> Compared:
        model = engine.shard(make(depth=4))
        optimizer = engine.optimizer(model)
        for step in range(STEPS):
            x = batch(step, place.rank)
            for block in model.blocks:
                x = block(x)
                gathered = [u.name for u in units_of(model) if not u.is_sharded] if type(engine) is Ours else []
                assert len(gathered) <= 1
            loss = x.square().mean()
            loss.backward()
            engine.step(optimizer)
            yield model, loss

    alike(loop, place, as_fsdp2=False)


class Speaking(Net):
    def __init__(self, depth: int = 2) -> None:
        super().__init__(depth, SpeakingBlock)

    def generate(self, x: Tensor, *, steps: int) -> Tensor:
        for _ in range(steps):
            x = nn.functional.pad(self(x), (0, 1)) + self.first(x)
        return x

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.look(x)
        return self.first(x)


class SpeakingBlock(Block):
    def look(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x)[:, :WIDTH]
        return out


def methods(place: Place) -> None:
    """Other methods than forward, of the root and of units inside, which call forward or not."""

    def loop(engine: Any, place: Place) -> Compared:
        model = engine.shard(make(Speaking))
        for block in model.blocks:
            engine.method(block, "look")
        engine.method(model, "encode")
        engine.method(model, "generate")
        optimizer = engine.optimizer(model)
        mean_square(model, batch(0, place.rank)).backward()
        optimizer.zero_grad()
        for step in range(STEPS):
            x = batch(step, place.rank)
            with torch.no_grad():
                said = model.generate(x, steps=3)
            with torch.no_grad():
                looked = model.blocks[1].look(x)
            loss = (model.encode(x) - said).square().mean() + mean_square(model, x + looked)
            loss.backward()
            engine.step(optimizer)
            yield model, loss

    each_strategy(loop, place, as_fsdp2=False)  # whose root, called inside its own method, loses its place
    model = Ours().shard(make(Speaking))
    with pytest.raises(ShardError, match="Speaking has no method sing; name one that it has"):
        register_fsdp_forward_method(model, "sing")
    register_fsdp_forward_method(make(), "sing")  # not sharded


class Recursive(Block):
    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        x = super().forward(x)
        return self(x, times - 1) + self.up(x)[:, :WIDTH] if times else x


def a_unit_that_calls_itself(place: Place) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            alone = model.blocks[0](x, times=2)
        return model.blocks[1](y, times=2).square().mean() + (model(x) * alone[:, :5]).mean()

    each_strategy(training(loss, block=Recursive), place, as_fsdp2=False)


@everywhere(inner_units, only_inner_units, methods, a_unit_that_calls_itself)
def test_units_by_themselves(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- gradients on and off ----------------------------------------------------------------------------------------------


class PartlyWithout(Net):
    """A unit is called under no_grad, on what requires a gradient; with one input and with two."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        doubled = x * 2
        with torch.no_grad():
            shift = self.blocks[0](x) + self.blocks[1](x, doubled)
        return self.last(self.blocks[2](self.blocks[1](x + shift, x)))


class TwoInputs(Block):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x if y is None else x + y)


def without_gradients_inside(place: Place) -> None:
    each_strategy(training(lambda m, x, y: m(x).square().mean(), PartlyWithout, block=TwoInputs), place)


class PartlyWith(Net):
    """A unit under enable_grad inside a forward without gradients, whose own backward is inside that forward: forces."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.blocks[1](self.blocks[0](at)).sum()
            (force,) = torch.autograd.grad(energy, [at])
        return self.last(self.blocks[2](self.first(x) + force))


def a_backward_inside_a_forward(place: Place) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            seen = model(y)
        return (model(x) - seen).square().mean()

    each_strategy(training(loss, PartlyWith), place, as_fsdp2=False)


class Odd(Block):
    """By `how`: what is special about its inputs and outputs."""

    how = ""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        match self.how:
            case "unchanged":
                return x
            case "unchanged beside":
                return x, out
            case "detached":
                return out.detach()
            case "view":
                return out.view(1, -1).view(out.shape)
            case "view of an input":
                return x[:]
        return out


class OddNet(Net):
    change = "none"

    def forward(self, x: Tensor) -> Any:
        if self.change == "no gradient before":
            x = self.blocks[1](x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x = x[0] + x[1]
            if self.change == "in place":
                x += 1
                x.mul_(0.5)
        return self.last(x)


def odd_inputs_and_outputs(place: Place) -> None:
    """FSDP2 says itself that it may be wrong where a view is changed in place."""
    hows = ("", "unchanged", "unchanged beside", "detached", "view", "view of an input")
    for how, change in itertools.product(hows, ("none", "in place", "no gradient before")):

        def loop(engine: Any, place: Place, how: str = how, change: str = change) -> Compared:
            model = make(OddNet, block=Odd)
            model.blocks[0].how, model.change = how, change  # no schedule keeps it gathered for the backward
            engine.shard(model)
            optimizer = engine.optimizer(model)
            for step in range(STEPS):
                loss = mean_square(model, batch(step, place.rank))
                loss.backward()
                engine.step(optimizer)
                yield model, loss

        with noted(how, change):
            alike(loop, place, as_fsdp2=change != "in place")


@everywhere(without_gradients_inside, a_backward_inside_a_forward, odd_inputs_and_outputs)
def test_gradients_on_and_off(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- forwards inside a backward ----------------------------------------------------------------------------------------


class Recomputing(torch.autograd.Function):
    """A custom function that keeps nothing and calls the module again in its backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Any:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.module(x).backward(grad)
        return None, x.grad


class CheckpointedInside(Block):
    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(
            lambda y: self.down(torch.tanh(self.up(y))), self.norm(x), use_reentrant=self.reentrant
        )
        return x + inner


class CheckpointedNet(Net):
    """By `how`: what is computed again."""

    how = ""

    def forward(self, x: Tensor) -> Any:
        if self.how == "several on an input":
            x = checkpoint(nn.Sequential(self.first, *self.blocks[:2]), x.requires_grad_(), use_reentrant=True)
            return self.last(self.blocks[2](x))
        x = self.first(x)
        match self.how:
            case "each, reentrant":
                for block in self.blocks:
                    x = checkpoint(block, x, use_reentrant=True)
            case "some, reentrant":
                x = self.blocks[2](checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=True))
            case "several, reentrant":
                x = checkpoint(nn.Sequential(*self.blocks[:2]), x, use_reentrant=True)
                x = checkpoint(nn.Sequential(self.blocks[2], nn.Tanh()), x, use_reentrant=True)
            case "one twice, reentrant":
                x = checkpoint(nn.Sequential(*self.blocks[:2]), x, use_reentrant=True)
                x = checkpoint(nn.Sequential(self.blocks[2], self.blocks[0]), x, use_reentrant=True)
            case "several":
                x = checkpoint(nn.Sequential(*self.blocks, nn.Tanh()), x, use_reentrant=False)
            case "one in the other":
                x = checkpoint(lambda x: checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=True), x,
                               use_reentrant=True)  # fmt: skip
                x = self.blocks[2](x)
            case "function":
                for block in self.blocks:
                    x = Recomputing.apply(block, x)
        return self.last(x)


WAYS = ("each, reentrant", "some, reentrant", "several, reentrant", "one twice, reentrant", "several on an input", "several",
        "one in the other", "function")  # fmt: skip


def recomputed(place: Place) -> None:
    """Where a backward goes through a unit's reentrant checkpoints twice, FSDP2 loses gradients of one of them."""
    for how, block, twice in pairwise(WAYS, (Block, CheckpointedInside), (False, True)):

        def loop(engine: Any, place: Place, how: str = how, block: Any = block, twice: bool = twice) -> Compared:
            model = make(CheckpointedNet, block=block)
            model.how = how
            engine.shard(model)
            optimizer = engine.optimizer(model)
            for step in range(STEPS):
                loss = mean_square(model, batch(step, place.rank))
                if twice:
                    loss = loss + mean_square(model, batch(10 + step, place.rank))
                loss.backward()
                engine.step(optimizer)
                yield model, loss

        with noted(how, block, twice):
            each_strategy(loop, place, as_fsdp2=not twice and how != "one twice, reentrant")


def the_whole_model_recomputed(place: Place) -> None:
    for reentrant in (True, False):

        def loss(model: Any, x: Tensor, y: Tensor, reentrant: bool = reentrant) -> Tensor:
            out: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            alone: Tensor = checkpoint(model.blocks[1], y.requires_grad_(), use_reentrant=reentrant)
            return out.square().mean() + alone.square().mean()

        each_strategy(training(loss), place, as_fsdp2=False)


def freed_in_time(place: Place) -> None:
    """Reentrant checkpoints free and reduce each unit after its own backward."""
    model = make(CheckpointedNet, depth=6)
    model.how = "each, reentrant"
    Ours().shard(model)
    for _ in range(2):
        loss = mean_square(model, batch(0, place.rank))
        most: list[int] = []
        reduced: list[str] = []

        def see(phase: Any, unit: str, direction: Any, most: Any = most, reduced: Any = reduced) -> None:
            most.append(sum(not u.is_sharded for u in units_of(model)))
            if phase == "reduce":
                reduced.append(unit)

        runtime_of(model).watch = see
        loss.backward()
        runtime_of(model).watch = None
        assert max(most) <= 2, most  # the root and a block
        assert reduced == [f"blocks.{i}" for i in range(5, -1, -1)] + [""]


@everywhere(pytest.param(recomputed, marks=pytest.mark.slow), the_whole_model_recomputed, freed_in_time)
def test_forwards_inside_a_backward(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- what a caller asks for --------------------------------------------------------------------------------------------


def handles(place: Place) -> None:
    model = Ours().shard(make())
    plain = make()
    block = model.blocks[1]
    for _ in range(2):
        handle = unshard(block, async_op=True)
        (unit,) = units_of(block)
        assert unit.state is UnitState.GATHERING
        handle.wait()
        handle.wait()
        assert torch.equal(block.up.weight, plain.blocks[1].up.weight)
        reshard(block)
        assert unit.state is UnitState.SHARDED
    unshard(model, recurse=False)
    assert [u.name for u in units_of(model) if not u.is_sharded] == [""]
    assert torch.equal(model.first.weight, plain.first.weight)
    reshard(model)
    said: list[str] = []
    runtime_of(model).watch = lambda phase, unit, direction: said.append(f"{phase} {unit}")
    unshard(block, async_op=True)  # ahead of a forward, which then gathers all the others only
    with torch.no_grad():
        assert torch.equal(model(batch(0, 0)), plain(batch(0, 0)))
    assert "unshard blocks.0" in said and "unshard blocks.1" not in said
    runtime_of(model).watch = None
    Ours.check(_of(model))
    with unshard(model, async_op=True) as whole, torch.no_grad():
        whole.first.weight.fill_(0.5)
    assert all(bool((t == 0.5).all()) for name, t in full_state(model) if name == "first.weight")
    Ours.check(_of(model))


def _of(model: Any) -> Ours:
    engine = Ours()
    engine.models.append(model)
    return engine


def every_other_micro_batch(place: Place) -> None:
    """Of five micro-batches the second, the fourth and the last communicate; a part of the model never but at the last."""
    for part in (lambda model: model, lambda model: model.blocks[1]):

        def loop(engine: Any, place: Place, part: Any = part) -> Compared:
            model = engine.shard(make())
            optimizer = engine.optimizer(model)
            for step in range(STEPS):
                seen = torch.zeros(())
                for i in range(5):
                    loss = mean_square(model, batch(10 * step + i, place.rank)) / 5
                    with engine.quiet(part(model)) if i % 2 == 0 and i < 4 else nullcontext():
                        loss.backward()
                    seen += loss.detach()
                engine.step(optimizer)
                yield model, seen

        each_strategy(loop, place)


@everywhere(handles, every_other_micro_batch)
def test_what_a_caller_asks_for(pool: Pool, scenario: Scenario) -> None:
    pool.run(scenario, 2)


# -- exceptions --------------------------------------------------------------------------------------------------------


class Trouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("trouble")


def exceptions_in_a_loop(place: Place) -> None:
    """One backward of two fails, one forward of a unit by itself, one generation: the others count as ever."""

    def loop(engine: Any, place: Place) -> Compared:
        model = engine.shard(make(Speaking))
        engine.method(model, "generate")
        optimizer = engine.optimizer(model)
        for step in range(STEPS):
            handle = model.blocks[0].register_forward_hook(lambda module, args, out: Trouble.apply(out))
            broken = mean_square(model, batch(20 + step, place.rank))
            handle.remove()
            loss = mean_square(model, batch(step, place.rank))
            other = mean_square(model, batch(10 + step, place.rank))
            loss.backward()
            if type(engine) is Ours:  # a plain model would keep a part of its gradients
                with pytest.raises(ValueError, match="trouble"):
                    broken.backward()
            other.backward()  # with no forward in between
            if type(engine) is Ours:
                with pytest.raises(TypeError):
                    model.blocks[1](None)
                with torch.no_grad(), pytest.raises(TypeError):
                    model.generate(None, steps=2)
            with torch.no_grad():
                seen = model.blocks[1](batch(step, place.rank)).sum()
            engine.step(optimizer)
            yield model, seen + mean_square(model, batch(step, place.rank)).detach()
            del broken

    def without_the_last(engine: Any, place: Place) -> Compared:
        for model, seen in loop(engine, place):
            with torch.no_grad():
                model(batch(0, place.rank))  # the number's own graph was dropped: this frees what it left
            assert type(engine) is not Ours or runtime_of(model).state is TrainingState.IDLE
            yield model, seen

    each_strategy(without_the_last, place, as_fsdp2=False)


def test_exceptions(pool: Pool) -> None:
    pool.run(exceptions_in_a_loop, 2)


# -- dtypes and devices ------------------------------------------------------------------------------------------------


def casts(place: Place) -> None:
    """Inputs and outputs of every unit have FSDP2's dtypes, and the outputs its bits."""
    bf16 = torch.bfloat16
    for given in (
        {"param_dtype": bf16},
        {"param_dtype": bf16, "output_dtype": torch.float32},
        {"param_dtype": bf16, "cast_forward_inputs": False, "output_dtype": torch.float32},
    ):
        seen: list[list[Any]] = []
        for engine in (
            Ours(mp_policy=MixedPrecisionPolicy(**given)),
            Theirs(mp_policy=fsdp.MixedPrecisionPolicy(**given)),
        ):
            model = engine.shard(make(Careful, block=CarefulBlock))
            said: list[Any] = []
            for block in model.blocks:
                block.said = said
            out = model(batch(0, place.rank))
            out.float().sum().backward()
            seen.append([*said, out.dtype, out.detach()])
        ours, theirs = seen
        assert ours[:-1] == theirs[:-1] and torch.equal(ours[-1], theirs[-1]), (given, ours, theirs)


class CarefulBlock(Block):
    """Says in which dtype its input comes, and takes any."""

    said: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        self.said.append(x.dtype)
        return super().forward(x.to(self.up.weight.dtype))


class Careful(Net):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x)
            block.said.append(x.dtype)
        return self.last(x.to(self.last.weight.dtype))


def test_dtypes(pool: Pool) -> None:
    pool.run(casts, 2)


def test_inputs_are_moved_to_the_device() -> None:
    """Of the outermost call, and only there: shown with the only other device that is everywhere."""
    given = {"x": torch.ones(2), "more": (torch.ones(1, device="meta"), "no tensor")}
    moved = move(given, torch.device("meta"))
    assert moved["x"].device.type == "meta" and moved["more"][0] is given["more"][0] and moved["more"][1] == "no tensor"
    assert move(given["x"], torch.device("cpu")) is given["x"]


# -- unequal numbers of batches ----------------------------------------------------------------------------------------


def unequal(place: Place, where: str) -> str:
    """Rank 1 has a batch less, and waits for rank 0 elsewhere. Plain groups of torch's, with a short timeout."""
    from datetime import timedelta

    dist.init_process_group(
        "gloo", store=place.store, rank=place.rank, world_size=place.world_size, timeout=timedelta(seconds=3)
    )
    model = Ours().shard(make())
    optimizer = Ours().optimizer(model)
    try:
        for step in range(2):
            mean_square(model, batch(step, place.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if place.rank == 0:
            WHERE[where](model)
        place.store.wait(["over"])
    except ShardError as e:
        place.store.set("over", "")
        return str(e)
    finally:
        dist.destroy_process_group()
    return ""


WHERE: dict[str, Callable[[Any], Any]] = {
    "3 (unshard root)": lambda model: mean_square(model, batch(2, 0)),
    "2 (unshard root)": lambda model: unshard(model).wait(),
    "2 (a norm)": lambda model: torch.nn.utils.get_total_norm(list(model.parameters())),
    "2 (gradient_norm)": gradient_norm,
    "2 (a whole tensor)": lambda model: model.last.weight.full_tensor(),
    "0 (fully_shard)": lambda model: fully_shard(make()),
}


@pytest.mark.parametrize("where", WHERE)
def test_unequal_numbers_of_batches(pool: Pool, where: str) -> None:
    said, other = pool.run(unequal, 2, where, reduction=None)
    told = r"rank 0 waited [34]\.\d s in step " + re.escape(where) + " for rank 1, which did not come; "
    assert re.match(told, said) and other == "", said
