"""What the feature tests share: a small model, and training it sharded beside the plain one on the batches of all ranks."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist, nn

from fsdp_lab.backends.flat import engine_options
from fsdp_lab.engine import ShardError, UnitState, build_mesh, full_state, fully_shard, runtime_of, units_of
from fsdp_lab.models.wrapping import units
from fsdp_lab.spec.spec import Strategy
from tests.pool import Place

WIDTH = 6  # no multiple of it is a power of two, so shards are padded and cut through parameters

SGD = partial(torch.optim.SGD, lr=0.1)
Loss = Callable[[nn.Module, Tensor], Tensor]
Scenario = Callable[[Place], None]


def everywhere(module: dict[str, Any], but: Sequence[Scenario] = (), of_four: Sequence[Scenario] = (),
               slow: Sequence[Scenario] = ()) -> Any:  # fmt: skip
    """A test for each of a module's functions so far that are given a place alone and return nothing, with its ranks."""
    own = [s for s in module.values() if getattr(s, "__module__", "") == module["__name__"] and s not in but]
    noted = [{k: getattr(v, "__name__", str(v)) for k, v in getattr(s, "__annotations__", {}).items()} for s in own]
    found = [s for s, of in zip(own, noted, strict=True) if of == {"place": "Place", "return": "None"}]
    rows = [pytest.param(s, 4 if s in of_four else 2, marks=[pytest.mark.slow] * (s in slow)) for s in found]
    return pytest.mark.parametrize(("scenario", "ranks"), rows, ids=lambda v: getattr(v, "__name__", str(v)))


def refused(says: str, kind: type[Exception] = ShardError) -> Any:
    return pytest.raises(kind, match=says)


@contextmanager
def noted(*what: Any) -> Iterator[None]:
    """What fails says of what it is."""
    try:
        yield
    except BaseException as e:
        e.add_note(", ".join(map(str, what)))
        raise


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A linear layer, blocks, and a linear layer; the root's unit has the first and the last."""

    def __init__(self, depth: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList([block() for _ in range(depth)])

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = self.through(block, x)
        return self.last(x)

    def through(self, block: Any, x: Tensor) -> Tensor:
        """How each block is called."""
        return block(x)  # type: ignore[no-any-return]


def make(kind: Callable[..., nn.Module] = Net, **options: Any) -> Any:
    """The same values on every rank."""
    torch.manual_seed(0)
    return kind(**options)


def options_of(strategy: Strategy) -> dict[str, Any]:
    """A strategy as arguments of `fully_shard`, over all ranks; collective."""
    return engine_options(strategy, build_mesh("cpu", shard_size=strategy.shard_factor(dist.get_world_size())))


def by_block(model: Any, strategy: Strategy | None = None, **options: Any) -> Any:
    """Each block a unit, and the rest the root's, which alone has the output dtype of a strategy."""
    whole = {**(options_of(strategy) if strategy is not None else {}), **options}
    inner = dict(whole)
    if strategy is not None and "mp_policy" not in options:
        inner["mp_policy"] = dataclasses.replace(whole["mp_policy"], output_dtype=None)
    for block in model.blocks:
        fully_shard(block, **inner)
    return fully_shard(model, **whole)


def by_policy(model: Any, wrap: str | Callable[[nn.Module], list[list[nn.Module]]], **options: Any) -> Any:
    """Units by a name of `Strategy.wrap`, or by any function from the model to the modules of each unit."""
    for group in wrap(model) if callable(wrap) else units(model, wrap):
        fully_shard(group, **options)
    return fully_shard(model, **options)


def batch(step: int, rank: int, rows: int = 3) -> Tensor:
    """[rows, WIDTH]; another one for every step and rank."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def gradients(model: nn.Module, loss: Loss, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """The mean over `batches` of a plain model's gradients: summed in their order, then divided, as the ranks do it."""
    summed: dict[str, Tensor] = {}
    for x in batches:
        model.zero_grad()
        loss(model, x).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                summed[name] = summed[name] + p.grad if name in summed else p.grad
    model.zero_grad()
    return {name: g / len(batches) for name, g in summed.items()}


def plain_step(model: nn.Module, loss: Loss, batches: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    found = gradients(model, loss, batches)
    for name, p in model.named_parameters():
        p.grad = found.get(name)
    update(optimizer)


def assert_equal(sharded: nn.Module, plain: nn.Module) -> None:
    """Every parameter, bit for bit."""
    wanted, found = dict(plain.named_parameters()), dict(full_state(sharded))
    assert found.keys() <= wanted.keys()
    differ = {name: (t - wanted[name]).abs().max() for name, t in found.items() if not torch.equal(t, wanted[name])}
    assert not differ, differ


def is_clean(model: Any) -> None:
    """Between two steps: nothing is gathered, nothing is under way."""
    assert [unit.name for unit in units_of(model) if unit.state is not UnitState.SHARDED] == []
    runtime = runtime_of(model)
    assert runtime.backward is None and not runtime.reducing


class FailsBackward(torch.autograd.Function):
    """The same values forward; its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("trouble in the backward")


def train_beside(
    place: Place, model: Any, shard: Callable[[Any], Any] = by_block, loss: Loss = mean_square, steps: int = 3,
    at_step: Callable[[Any, int], None] = lambda model, step: None,
    held: Callable[[Any], Iterable[nn.Parameter]] = nn.Module.parameters,
    make_optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    before_update: Callable[[Any, torch.optim.Optimizer, int], None] = lambda model, optimizer, step: None,
) -> tuple[Any, Any]:  # fmt: skip
    """Train `model`, sharded by `shard`, and a plain copy of it, and compare every loss and every parameter, bit for bit.

    `at_step` is called on both before each step, `before_update` on the sharded one; `held` is what its optimizer is given.
    Returns both. With two ranks a sum has the same bits in any order."""
    plain = copy.deepcopy(model)
    shard(model)
    before = [p.detach().clone() for p in plain.parameters() if p.requires_grad]
    optimizer = make_optimizer([p for p in held(model) if p.requires_grad])
    plain_optimizer = make_optimizer([p for p in plain.parameters() if p.requires_grad])
    for step in range(steps):
        at_step(model, step)
        at_step(plain, step)
        batches = [batch(step, rank) for rank in range(place.world_size)]
        found = loss(model, batches[place.rank])
        assert torch.equal(found, loss(plain, batches[place.rank])), (step, found)
        found.backward()
        before_update(model, optimizer, step)
        update(optimizer)
        plain_step(plain, loss, batches, plain_optimizer)
        assert_equal(model, plain)
    after = [p for p in plain.parameters() if p.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))  # training does something
    return model, plain
