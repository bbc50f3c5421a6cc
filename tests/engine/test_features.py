"""What the engine does with all kinds of models and calls: each trains beside the plain model, equal bit for bit."""

import dataclasses
import math
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from fsdp_lab import engine
from fsdp_lab.engine import full_state, fully_shard, load_full_state, no_sync, runtime_of, sharded_parameters, units_of
from fsdp_lab.engine.extras.parameters import ShardedParameter
from fsdp_lab.models.build import Initializer, build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.spec.spec import OFFLOADS, SHARDINGS, Precision, Strategy
from tests.engine import toys
from tests.engine.toys import WIDTH, Block, Net, batch, by_block, is_clean, make, mean_square, refused, train_beside
from tests.models.small import SMALL, filled
from tests.pool import Place, Pool


# -- models that differ in what is called, and how units lie in them ---------------------------------------------------
def frozen(model: Any, *names: str) -> Any:
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


class Chosen(Net):
    """Calls the blocks of `order`, one after the other."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i in self.order:
            x = self.blocks[i](x)
        return self.last(x)


def in_turn(*orders: tuple[int, ...]) -> dict[str, Any]:
    """As many steps, each of which calls the blocks in an order of its own."""
    return {"steps": len(orders), "at_step": lambda model, step: setattr(model, "order", orders[step])}


def by_lists(*lists: tuple[int, ...]) -> Callable[[Any], None]:
    def shard(model: Any) -> None:
        for some in lists:
            fully_shard([model.blocks[i] for i in some])
        fully_shard(model)

    return shard


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.inner:
            x = block(x)
        return x


def by_stage(strategy: Strategy) -> Callable[[Any], None]:
    """Units inside units inside units."""

    def shard(model: Any) -> None:
        options = toys.options_of(strategy)
        for stage in model.blocks:
            for block in stage.inner:
                fully_shard(block.up, **options)
                fully_shard(block, **options)
            fully_shard(stage, **options)
        fully_shard(model, **options)
        assert len(units_of(model)) == 1 + len(model.blocks) * (1 + 2 * 2)

    return shard


class Silent(Net):
    """Its forward returns nothing: the loss is left in an attribute."""

    def forward(self, x: Tensor) -> None:
        self.loss = super().forward(x).square().mean()


def left_in_an_attribute(model: Any, x: Tensor) -> Tensor:
    model(x)
    found: Tensor = model.loss
    del model.loss
    return found


class ByKeyword(Net):
    def forward(self, x: Tensor, *, shift: dict[str, Any]) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x=x + shift["by"][0])
        return self.last(x)


def by_keyword(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x=x, shift={"by": (x[:1] * 0.1, "no tensor")})
    return out.square().mean()


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu_(x))


class Mixed(Block):
    """Three dtypes of parameters, one of them no float."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.coded = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.wide(x.double()).float() + 0.1 * self.coded)


class Checkpointed(Net):
    """Its own forward calls torch's checkpoint around every block."""

    def through(self, block: Any, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)


def hooked() -> Any:
    """Users' hooks change what goes into a unit and what comes out of one."""
    model = make()
    model.blocks[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.blocks[1].register_forward_hook(lambda m, args, out: out + 1)
    return model


STAGES = partial(make, depth=2, block=Stage)
AHEAD = Strategy(forward_prefetch=1, backward_prefetch=3)
SILENT: dict[str, Any] = {"loss": left_in_an_attribute}
ONE_OF_TWO = {"shard": by_lists((0, 1), (2, 3)), **in_turn((0, 1, 2, 3), (1, 2), (0, 3), (0, 0, 1, 3))}
ALIKE: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {  # a model, and what `train_beside` is given
    "frozen": (lambda: frozen(make(), "first", "blocks.1"), {}),
    "used on some steps": (lambda: make(Chosen), in_turn((0, 1, 2), (0, 2), (2,), (2, 1, 0), (0, 1, 2))),
    "called more than once": (lambda: make(Chosen), in_turn((0, 1, 0, 2, 1), (0, 0, 0), (0, 0, 1, 1, 2, 2))),
    "two modules in a unit": (lambda: make(depth=4), {"shard": by_lists((0, 1), (2, 3))}),
    "with others between": (lambda: make(depth=4), {"shard": by_lists((0, 3), (1, 2))}),
    "one of two used": (lambda: make(Chosen, depth=4), ONE_OF_TWO),
    "units in units": (STAGES, {"shard": by_stage(AHEAD)}),
    "nothing comes out": (lambda: make(Silent), SILENT),
    "no inner unit sees the backward begin": (lambda: make(Silent), {**SILENT, "shard": fully_shard}),
    "inputs by keyword": (lambda: make(ByKeyword), {"loss": by_keyword}),
    "inputs changed in place": (lambda: make(block=InPlace), {}),
    "hooks that change things": (hooked, {}),
    "mixed dtypes": (lambda: make(block=Mixed), {}),
    "checkpoints around units in units": (lambda: make(Checkpointed, block=Stage), {"shard": by_stage(Strategy())}),
}


def trained_beside(place: Place) -> None:
    for name, (build, options) in ALIKE.items():
        with toys.noted(name):
            sharded, _ = train_beside(place, build(), **{"steps": 2, **options})
            is_clean(sharded)


def two_modules_are_gathered_once(place: Place) -> None:
    sharded, _ = train_beside(place, make(depth=6), by_lists((0, 1), (2, 3), (4, 5)), steps=2)
    assert [unit.name for unit in units_of(sharded)] == ["", "blocks.0", "blocks.2", "blocks.4"]
    said: list[tuple[str, str]] = []
    runtime_of(sharded).watch = lambda phase, unit, direction: said.append((phase, unit))
    mean_square(sharded, batch(0, place.rank)).backward()
    runtime_of(sharded).watch = None
    assert said.count(("unshard", "blocks.0")) == 2  # forward and backward
    assert said.count(("unshard", "blocks.4")) == 1  # the backward begins with it: it stays
    assert said.count(("reduce", "blocks.0")) == said.count(("reduce", "blocks.4")) == 1


def checkpoints_in_bf16(place: Place) -> None:
    """Casts are computed again alike: torch compares the metadata of what both forwards saved."""
    model = by_block(make(Checkpointed, block=Seen), strategy=Strategy(precision=Precision(param="bf16", norm="fp32")))
    mean_square(model, batch(0, place.rank)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sharded_parameters(model))


# -- which parameters train, and which are used ------------------------------------------------------------------------
ADAMW = partial(torch.optim.AdamW, lr=0.1, foreach=True)


def lora(place: Place) -> None:
    """Small trained parts of frozen units."""
    model = make().requires_grad_(False)
    for block in model.blocks:
        block.up.requires_grad_(True)
    sharded, _ = train_beside(place, model)
    flats = [flat for unit in units_of(sharded) for flat in unit.flats]
    trained = [{p.requires_grad for p in flat.sharded} for flat in flats]
    assert sorted(trained, key=str) == [{False}] * 4 + [{True}] * 3  # the root's is frozen as a whole
    assert sum(p.to_local().numel() for p in sharded_parameters(sharded)) < 3 * 5 * WIDTH  # no room for what is frozen


def all_frozen_but_the_input(place: Place) -> None:
    model, plain = make().requires_grad_(False), make().requires_grad_(False)
    by_block(model)
    x, y = batch(0, place.rank).requires_grad_(), batch(0, place.rank).requires_grad_()
    mean_square(model, x).backward()
    mean_square(plain, y).backward()
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
    assert sharded_parameters(model) == []
    is_clean(model)


def ignored(place: Place) -> None:
    """It stays what it was, with a gradient of its own on each rank."""
    model, plain = make(), make()
    left_alone = [model.last.bias, model.blocks[1].norm.weight]
    by_block(model, ignored_params=left_alone)
    assert model.last.bias is left_alone[0] and not isinstance(left_alone[1], ShardedParameter)
    x = batch(0, place.rank)
    mean_square(model, x).backward()
    own = toys.gradients(plain, mean_square, [x])
    assert left_alone[0].grad is not None and torch.equal(left_alone[0].grad, own["last.bias"])
    assert left_alone[1].grad is not None and torch.equal(left_alone[1].grad, own["blocks.1.norm.weight"])
    names = [name for name, _ in full_state(model)]
    assert "last.bias" not in names and "blocks.1.norm.weight" not in names
    assert len(names) == len(list(plain.parameters())) - 2


class PartlyUsed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.randn(3))


def a_parameter_that_is_never_used(place: Place) -> None:
    """It has no gradient, and AdamW leaves it as it is, also where it is given flat tensors, which then are split."""

    def check(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        assert model.blocks[0].idle.grad is None and model.blocks[0].up.weight.grad is not None

    def split(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            with refused("blocks.0.idle has no gradient, and a flat optimizer would"):
                optimizer.step()
        engine.split_unused(model, optimizer)

    train_beside(place, make(block=PartlyUsed), make_optimizer=ADAMW, before_update=check)
    model = make(block=PartlyUsed)
    train_beside(place, model, make_optimizer=ADAMW, before_update=split, held=sharded_parameters)


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
    now = [0]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        for block in model.blocks:
            block.door = now[0] > 1 and torch.equal(x, batch(now[0], now[0] % 2))  # of one rank, by turns
        return mean_square(model, x)

    def check(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        absent = [name for name, p in model.named_parameters() if p.grad is None]
        assert absent == [f"blocks.{i}.right.{kind}" for i in range(3) if step < 2 for kind in ("weight", "bias")]
        whole = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters() if p.grad is not None])
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        torch.testing.assert_close(norm.full_tensor(), whole.norm())
        for p in (p.detach() for p in model.parameters()):  # some ranks have nothing of it
            norm = torch.linalg.vector_norm(p, -1)
            torch.testing.assert_close(norm.full_tensor(), torch.linalg.vector_norm(p.full_tensor(), -1))

    def at_step(model: Any, step: int) -> None:
        now[0] = step

    model = make(block=Doors)
    train_beside(place, model, loss=loss, steps=4, at_step=at_step, make_optimizer=ADAMW, before_update=check)


def gradients_that_are_set_where_ranks_used_others(place: Place) -> None:
    """What came on another rank alone is still there, and what was forgotten does not come back."""
    model: Any = Doors()
    model.door = place.rank % 2
    fully_shard(model)
    for value in (None, torch.zeros(())):
        model(batch(0, place.rank)).sum().backward()
        for p in model.left.parameters():
            p.grad = None if value is None else value.expand(p.shape)
        assert all(p.grad is not None for p in model.right.parameters()) == (place.world_size > 1)
        assert all((p.grad is None) == (value is None) for p in model.left.parameters())
        model.zero_grad()


def tied(*pairs: tuple[str, str]) -> Any:
    model = make()
    for one, other in pairs:
        holder, _, attribute = other.rpartition(".")
        setattr(model.get_submodule(holder), attribute, model.get_parameter(one))
    return model


def tied_in_and_between_units(place: Place) -> None:
    """Sharded in either order, the unit that comes first has the values."""
    sharded, _ = train_beside(place, tied(("blocks.1.norm.weight", "blocks.1.down.bias")))
    assert sharded.blocks[1].norm.weight is sharded.blocks[1].down.bias
    sharded, _ = train_beside(place, tied(("first.bias", "blocks.2.down.bias"), ("blocks.0.norm.weight", "first.bias")))
    assert sharded.first.bias is sharded.blocks[0].norm.weight and sharded.first.bias is not sharded.blocks[2].down.bias
    far = (("blocks.0.up.weight", "blocks.2.up.weight"), ("blocks.0.norm.bias", "blocks.1.norm.bias"))
    for order in ((0, 1, 2), (2, 1, 0)):
        sharded, _ = train_beside(place, tied(*far), by_lists(*((i,) for i in order)))
        assert sharded.blocks[0].up.weight is sharded.blocks[2].up.weight
        owners = {p.flat for p in (sharded.blocks[0].up.weight, sharded.blocks[0].norm.bias)}
        assert owners == set(units_of(sharded)[0].flats)  # the lowest unit that contains all their uses: the root
    low = by_block(tied(*far), strategy=Strategy(precision="bf16"))
    toys.assert_equal(low, tied(*far))  # no bit of the masters is lost


# -- forwards without a backward, inputs and outputs -------------------------------------------------------------------
class Dropping(Block):
    """Another forward in training than in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else x + self.up(self.norm(x))[:, :WIDTH]


def between_steps(place: Place) -> None:
    """Every kind of forward that has no backward gives what the plain model gives."""
    for strategy in (Strategy(offload="optimizer"), Strategy(sharding="zero1"), Strategy(forward_prefetch=2)):
        seen: dict[bool, list[Tensor]] = {True: [], False: []}

        def look(model: Any, step: int, seen: dict[bool, list[Tensor]] = seen) -> None:
            for without in (torch.no_grad, torch.inference_mode):
                for mode in (True, False):
                    with without():
                        seen[isinstance(model.first.weight, ShardedParameter)].append(model.train(mode)(batch(9, 0)))
            model.train()

        train_beside(place, make(block=Dropping), partial(by_block, strategy=strategy), at_step=look)
        assert len(seen[True]) == 12 and all(torch.equal(a, b) for a, b in zip(seen[True], seen[False], strict=True))


def _has_gradients(model: Any, wanted: dict[str, Tensor]) -> None:
    """The reduced gradients of the parameters are these, bit for bit; others have none."""
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    differ = [name for name, g in wanted.items() if not torch.equal(found[name], g)]
    assert not differ and found.keys() == wanted.keys(), differ


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
        return FORMS[self.form][0](super().forward(x))

    def through(self, block: Any, x: Tensor) -> Any:
        return FORMS[self.form][1](block(x))


class FormBlock(Block):
    form = "tuple"

    def forward(self, x: Tensor) -> Any:
        return FORMS[self.form][0](super().forward(x))


def outputs(place: Place) -> None:
    """Gradients reach a model through outputs of every form. The cast of the root's outputs reaches into them, too."""
    for form, (pack, unpack) in FORMS.items():
        model, cast = make(Forms, block=FormBlock), make(Forms, block=FormBlock)
        for module in (model, cast, *model.blocks, *cast.blocks):
            module.form = form

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            out = model(x)
            assert type(out) is type(pack(x))  # noqa: B023
            return unpack(out).square().mean()  # noqa: B023

        sharded, _ = train_beside(place, model, loss=loss, steps=1)
        is_clean(sharded)
        by_block(cast, strategy=Strategy(precision=Precision(output="bf16")))
        out = cast(batch(0, place.rank))
        assert type(out) is type(pack(torch.zeros(3, 1))) and unpack(out).dtype is torch.bfloat16
        unpack(out).float().mean().backward()


# -- backwards of every kind -------------------------------------------------------------------------------------------
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
    is_clean(model)
    mean_square(model, batch(0, place.rank)).backward()


def parameters_in_the_loss(place: Place) -> None:
    """A penalty on a parameter itself, read inside `unshard`."""
    model, plain = make(), make()
    by_block(model)
    for m in (model, plain):
        with engine.unshard(m) if m is model else torch.enable_grad():
            (m.blocks[1].up.weight.square().sum() * 0.5).backward()
    _has_gradients(model, {"blocks.1.up.weight": plain.blocks[1].up.weight.grad})


def gradients_that_cannot_be_reduced(place: Place) -> None:
    model = by_block(make())
    with refused(r"has a graph \(create_graph=True\), which its reduction would cut"):
        mean_square(model, batch(0, place.rank)).backward(create_graph=True)
    with refused(r"torch.func transforms, as grad or vmap, of a sharded model"):
        torch.func.grad(lambda x: mean_square(model, x))(batch(0, place.rank))
    mean_square(model, batch(0, place.rank)).backward()
    sparse = fully_shard(nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), nn.Linear(WIDTH, 2)))
    with refused("the gradient of 0.weight is sparse, and only dense ones can be reduced"):
        sparse(torch.tensor([1, 2])).sum().backward()


def accumulation_with_units_that_come_and_go(place: Place) -> None:
    """What a micro-batch without communication left is reduced, though the last one does not use that unit."""
    model, plain = make(Chosen), make(Chosen)
    by_block(model)
    batches = [batch(0, rank) for rank in range(place.world_size)]
    with no_sync(model):
        mean_square(model, batches[place.rank]).backward()
    wanted = toys.gradients(plain, mean_square, batches)
    model.order = (0, 2)
    (0 * mean_square(model, batches[place.rank])).backward()
    _has_gradients(model, wanted)


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
        engine.upcast_gradients(model)
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


def torchs_policies(place: Place) -> None:
    """`fully_shard` takes them, and gives FSDP2's numbers, bit for bit; without a reduce_dtype too."""
    half, on_host = torch.bfloat16, fsdp.CPUOffloadPolicy(pin_memory=False)
    for mp, offload in (
        (fsdp.MixedPrecisionPolicy(param_dtype=half), on_host),
        (fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32), fsdp.OffloadPolicy()),
        (fsdp.MixedPrecisionPolicy(param_dtype=half, cast_forward_inputs=False), fsdp.OffloadPolicy()),
    ):
        ours, theirs = make(), make()
        options: dict[str, Any] = {"mesh": engine.build_mesh("cpu"), "mp_policy": mp, "offload_policy": offload}
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
                toys.update(optimizer)
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q.full_tensor()), (name, mp, offload)
    for wrong in ({"mp_policy": "bf16"}, {"offload_policy": "host"}):
        with refused("policy is "):
            fully_shard(make(), **wrong)


# -- torch.compile -----------------------------------------------------------------------------------------------------
def compiled(place: Place) -> None:
    """Traced and differentiated ahead of time, but run by torch's own kernels: needs no compiler."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    model, plain = by_block(make(depth=2)), make(depth=2)
    called = torch.compile(model, backend="aot_eager")
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(3):
        batches = [batch(step, rank) for rank in range(place.world_size)]
        mean_square(called, batches[place.rank]).backward()
        toys.update(ours)
        toys.plain_step(plain, mean_square, batches, theirs)
    for name, t in full_state(model):  # a compiler may fuse and reorder: some roundings of fp32
        assert torch.allclose(t, plain.get_parameter(name), rtol=1e-5, atol=1e-6), name
    is_clean(model)
    assert counters["stats"]["unique_graphs"] >= 1, counters
    assert counters["frames"]["ok"] <= 4, counters["frames"]  # it did not compile our hooks
    assert sum(counters["graph_break"].values()) <= 4, counters["graph_break"]


@pytest.mark.slow
def test_compile(pool: Pool) -> None:
    """Of a whole model; test_parity.py has compiled blocks."""
    pool.run(compiled, 2, timeout_s=200)


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


def optimizer_groups(place: Place) -> None:
    model = make()
    by_block(model, group_of=lambda name, p: "matrices" if p.dim() > 1 else "vectors")
    groups = engine.parameter_groups(model)
    assert set(groups) == {"matrices", "vectors"}
    assert len(groups["matrices"]) == len(groups["vectors"]) == len(units_of(model))
    before = {name: t.clone() for name, t in full_state(model)}
    mean_square(model, batch(0, place.rank)).backward()
    torch.optim.SGD(groups["vectors"], lr=0.1).step()
    changed = {name for name, t in full_state(model) if not torch.equal(t, before[name])}
    assert changed == {name for name, t in before.items() if t.dim() == 1}


def drawn_after_sharding(place: Place) -> None:
    """Equal seeds give what one process draws; where seeds differ, replicas draw alike all the same."""
    for sharding in ("full_shard", "no_shard"):
        model, plain = by_block(make(), Strategy(sharding=sharding)), make()
        for m in (model, plain):
            torch.manual_seed(7)
            m.apply(lambda inner: inner.reset_parameters() if hasattr(inner, "reset_parameters") else None)
        toys.assert_equal(model, plain)
    torch.manual_seed(place.rank)
    with torch.no_grad():
        nn.init.normal_(model.first.weight)
        model.last.bias.uniform_()
    for p in (model.first.weight, model.last.bias):
        mine = p.to_local().detach()
        parts = [torch.empty_like(mine) for _ in range(place.world_size)]
        dist.all_gather(parts, mine)
        assert all(torch.equal(part, mine) for part in parts)


# -- deferred initialisation -------------------------------------------------------------------------------------------
STRATEGIES = {
    2: (Strategy(sharding="zero1"), Strategy(sharding="no_shard"), Strategy(precision="bf16", offload="all")),
    3: (Strategy(wrap="min_params:5000"), Strategy(offload="optimizer")),
    4: (Strategy(sharding="hybrid_shard"), Strategy(sharding="hybrid_shard_zero2"), Strategy(reshard_size=2)),
}


def filled_by_turns(place: Place, family: str) -> None:
    """By each strategy in another way: from a function of names, from whole values, and by torch from those of rank 0."""
    for i, strategy in enumerate(STRATEGIES[place.world_size]):
        model = toys.by_policy(build_skeleton(resolve(SMALL[family])), strategy.wrap, **toys.options_of(strategy))
        plain = filled(SMALL[family], seed=3)
        values = {name: p.detach() for name, p in plain.named_parameters()}
        match (i + place.world_size) % 3:
            case 0:
                load_full_state(model, Initializer(build_skeleton(resolve(SMALL[family])), seed=3))
            case 1:
                load_full_state(model, values)
            case _:
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
                set_model_state_dict(model, values if place.rank == 0 else {}, options=options)
        toys.assert_equal(model, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world_size"), [("gpt2", 2), ("llama tied", 3), ("t5", 4)])
def test_a_model_on_meta_gets_the_values_of_an_eager_build(pool: Pool, family: str, world_size: int) -> None:
    pool.run(filled_by_turns, world_size, family)


def without_values(place: Place) -> None:
    """Without values a model says so: what it computes is not a number."""
    with torch.device("meta"):
        model = Net()
    by_block(model)
    assert all(p.is_meta and p.device.type == "meta" for p in model.parameters())
    assert all(bool(t.isnan().all()) for _, t in full_state(model))
    loss = mean_square(model, batch(0, place.rank))
    assert bool(loss.isnan())
    loss.backward()


def built_on_meta(place: Place) -> None:
    """With a tie that is found when the root is sharded, it trains as one that was built with values."""
    with torch.device("meta"):
        model = Net()
    plain = make()
    for m in (model, plain):
        m.blocks[0].up.weight = m.blocks[2].up.weight
    values = {name: p.detach() for name, p in plain.named_parameters()}
    by_block(model)
    load_full_state(model, values)
    toys.assert_equal(model, plain)
    assert model.blocks[0].up.weight is model.blocks[2].up.weight
    assert all(p.device.type == "cpu" for p in model.parameters())
    for m in (model, by_block(plain)):
        mean_square(m, batch(0, place.rank)).backward()
        torch.optim.AdamW(sharded_parameters(m)).step()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(full_state(model), full_state(plain), strict=True))


@toys.everywhere(globals(), (compiled,), (rules_of_the_schedule,),
            (trained_beside, two_modules_are_gathered_once, checkpoints_in_bf16))  # fmt: skip
def test_in_ranks(pool: Pool, scenario: toys.Scenario, ranks: int) -> None:
    pool.run(scenario, ranks)
