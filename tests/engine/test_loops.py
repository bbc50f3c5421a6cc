"""Training loops that somebody else wrote: ours does what FSDP2 and one process do there, with the same numbers.

Each loop is a script as scenarios/engines.py has them, run in every rank under ours, under FSDP2 and on a plain model with
the batches of all ranks; units are freed after each forward, and then kept. FSDP2's parameters equal ours."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import fsdp
from torch.utils.checkpoint import checkpoint

from fsdp_lab import engine
from fsdp_lab.base.tensors import move
from fsdp_lab.engine import UnitState, fully_shard, register_fsdp_forward_method, reshard, runtime_of, units_of, unshard
from fsdp_lab.engine.collectives import ShardError
from tests.covering import tiered
from tests.engine import toys
from tests.engine.scenarios.engines import BOUND, Engine, Kind, Log, Scenario as Script, differences, drawn, run
from tests.engine.toys import WIDTH, Block, Net, batch, by_block, is_clean, make, mean_square, noted, refused, update
from tests.export.ranks import torchrun
from tests.pool import Place, Pool

Loop = Callable[[Engine], None]
STEPS = 2  # the first one, and one after an optimizer has changed what may still be gathered


def log_of(loop: Loop, kind: Kind, place: Place, mesh: Any = None, **options: Any) -> Log:
    """What a loop recorded under an engine whose `fully_shard` has these options."""

    def with_options(e: Any) -> None:
        if mesh is not None:
            e.mesh = mesh
        e.fully_shard = partial(e.fully_shard, **options)
        if kind is Kind.OURS and mesh is not None:
            e.fully_shard = partial(e.fully_shard, mesh=mesh)
        loop(e)

    where = {} if kind is Kind.ONE else {"rank": place.rank, "world_size": place.world_size}
    return run(Script(script=with_options), kind, **where).log


def alike(
    loop: Loop, place: Place, *, as_fsdp2: bool = True, resharded: tuple[Any, ...] = (True, False), mesh: Any = None
) -> None:
    """Without `as_fsdp2` where FSDP2 refuses it, or has other numbers. `resharded`: values of `reshard_after_forward`."""
    wanted = log_of(loop, Kind.ONE, place)
    for reshard_after_forward in resharded:
        options = {"reshard_after_forward": reshard_after_forward, "mesh": mesh}
        found = log_of(loop, Kind.OURS, place, **options)
        assert differences(found, wanted, BOUND) == {}
        assert not as_fsdp2 or differences(found, log_of(loop, Kind.FSDP2, place, **options), None) == {}


def compare(e: Engine, model: Any, number: Any = 0.0) -> None:
    """A model and a number are to be the same; between steps nothing is gathered, and nothing under way."""
    if e.kind is Kind.FSDP2:  # it leaves some gathered, as after a recomputed forward
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
    e.record_loss(torch.as_tensor(number))
    e.record_model(model, f"{len(e.log)} ")
    if e.kind is Kind.OURS:
        is_clean(model)


def started(e: Engine, model: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = e.shard(model, model.blocks)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def rows(e: Engine, seed: int) -> Tensor:
    return e.rows(drawn(3, WIDTH, seed=seed))


Step = Callable[[Engine, Any, torch.optim.Optimizer, int], Tensor]


def stepping(step: Step, kind: Any = Net, **made: Any) -> Loop:
    """A loop of steps, each of which makes gradients and returns a number to compare."""

    def loop(e: Engine) -> None:
        model, optimizer = started(e, make(kind, **made))
        for i in range(STEPS):
            found = step(e, model, optimizer, i)
            update(optimizer)
            compare(e, model, found)

    return loop


def training(make_loss: Callable[[Any, Tensor, Tensor], Tensor], kind: Any = Net, **made: Any) -> Loop:
    """An ordinary loop whose loss is of two batches."""

    def step(e: Engine, model: Any, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        loss = make_loss(model, rows(e, i), rows(e, 10 + i))
        loss.backward()
        return loss

    return stepping(step, kind, **made)


# -- several forwards --------------------------------------------------------------------------------------------------
def what_the_first_gave(place: Place) -> None:
    """Three forwards, one loss, one backward; the last takes what the first gave."""
    pad = nn.functional.pad
    alike(training(lambda m, x, y: (m(x) * m(y) + m(pad(m(x), (0, 1)) + y)).mean()), place)


def backwards_in_turn(place: Place) -> None:
    """Three graphs alive; each has its own backward, first in first out and the other way round."""
    for order in ((0, 1, 2), (2, 0, 1)):

        def step(e: Engine, model: Any, optimizer: Any, at: int, order: Any = order) -> Tensor:
            losses = [mean_square64(model, rows(e, 10 * i + at)) for i in range(3)]
            with torch.no_grad():
                seen = mean_square64(model, rows(e, at))
            for i in order:
                losses[i].backward()
            return seen

        alike(stepping(step), place)


def mean_square64(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def dropped(place: Place) -> None:
    """Outputs that nobody uses. The optimizer steps after that: what is still gathered is old. (FSDP2 goes on with it.)"""

    def step(e: Engine, model: Any, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        loss = mean_square64(model, rows(e, i))
        loss.backward()
        out = model(rows(e, 5))
        kept = model.blocks[1](rows(e, 5)) if i % 2 else None
        update(optimizer)
        del out
        again = mean_square64(model, rows(e, i))
        again.backward()
        del kept
        return loss + again

    alike(stepping(step), place, as_fsdp2=False)


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
        return late.square().mean()

    alike(training(one_after_the_other, TwoHeads), place)
    alike(training(lambda m, x, y: m(x)[0].square().mean(), TwoHeads), place)


# -- units by themselves -----------------------------------------------------------------------------------------------
def inner_units(place: Place) -> None:
    """After the root, or before it (which FSDP2 refuses later): with and without gradients."""

    def loss(model: Any, x: Tensor, y: Tensor, first: bool = False) -> Tensor:
        whole = None if first else mean_square64(model, x)
        with torch.no_grad():
            teacher = model.blocks[1](y)
        for block in model.blocks:
            y = block(y)
        return (y - teacher).square().mean() + (mean_square64(model, x) if whole is None else whole)

    alike(training(loss), place)
    alike(training(partial(loss, first=True)), place, as_fsdp2=False, resharded=(True,))


def only_inner_units(place: Place) -> None:
    """The root is never called: a pipeline over blocks. No more than one of them is gathered at a time."""

    def step(e: Engine, model: Any, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        x = rows(e, i)
        for block in model.blocks:
            x = block(x)
            assert e.kind is not Kind.OURS or sum(not u.is_sharded for u in units_of(model)) <= 1
        loss = x.square().mean()
        loss.backward()
        return loss

    alike(stepping(step, depth=4), place, as_fsdp2=False, resharded=(True,))


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
        return self.up(x)[..., :WIDTH]


def methods(place: Place) -> None:
    """Other methods than forward, of the root and of units inside, which call forward or not."""

    def loop(e: Engine) -> None:
        model, optimizer = started(e, make(Speaking))
        for module, name in (*((block, "look") for block in model.blocks), (model, "encode"), (model, "generate")):
            e.forward_method(module, name)
        for step in range(STEPS):
            x = rows(e, step)
            with torch.no_grad():
                said, looked = model.generate(x, steps=3), model.blocks[1].look(x)
            loss = (model.encode(x) - said).square().mean() + mean_square64(model, x + looked)
            loss.backward()
            update(optimizer)
            compare(e, model, loss)

    alike(loop, place, as_fsdp2=False)  # whose root, called inside its own method, loses its place
    with refused("Speaking has no method sing; name one that it has"):
        register_fsdp_forward_method(by_block(make(Speaking)), "sing")
    register_fsdp_forward_method(make(), "sing")  # not sharded


class Recursive(Block):
    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        x = super().forward(x)
        return self(x, times - 1) + self.up(x)[..., :WIDTH] if times else x


def a_unit_that_calls_itself(place: Place) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            alone = model.blocks[0](x, times=2)
        return model.blocks[1](y, times=2).square().mean() + (model(x) * alone[..., :5]).mean()

    alike(training(loss, block=Recursive), place, as_fsdp2=False)


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
    alike(training(lambda m, x, y: m(x).square().mean(), PartlyWithout, block=TwoInputs), place)


class PartlyWith(Net):
    """A unit under enable_grad inside a forward without gradients, whose own backward is inside that forward: forces."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.blocks[1](self.blocks[0](at)).sum(), [at])
        return self.last(self.blocks[2](self.first(x) + force))


def a_backward_inside_a_forward(place: Place) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            seen = model(y)
        return (model(x) - seen).square().mean()

    alike(training(loss, PartlyWith), place, as_fsdp2=False)


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

    def __init__(self, how: str, change: str) -> None:
        super().__init__(block=Odd)
        self.blocks[0].how, self.change = how, change  # no schedule keeps it gathered for the backward

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
    rows_ = [*((how, "in place") for how in hows), *((how, "none") for how in hows[1:4]), ("", "no gradient before")]
    for how, change in rows_:
        loop = training(lambda m, x, y: m(x).square().mean(), OddNet, how=how, change=change)
        with noted(how, change):
            alike(loop, place, as_fsdp2=change == "none", resharded=(True,))


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
    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(lambda y: self.down(torch.tanh(self.up(y))), self.norm(x), use_reentrant=True)
        return x + inner


again = partial(checkpoint, use_reentrant=True)
series = nn.Sequential
WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {  # what lies between the first and the last layer of a model
    "each": lambda m, x: reduce(lambda y, block: again(block, y), m.blocks, x),
    "some": lambda m, x: m.blocks[2](again(m.blocks[1], m.blocks[0](x))),
    "several": lambda m, x: again(series(m.blocks[2], nn.Tanh()), again(series(*m.blocks[:2]), x)),
    "one twice": lambda m, x: again(series(m.blocks[2], m.blocks[0]), again(series(*m.blocks[:2]), x)),
    "one in the other": lambda m, x: m.blocks[2](again(lambda y: again(m.blocks[1], m.blocks[0](y)), x)),
    "several, not reentrant": lambda m, x: checkpoint(series(*m.blocks, nn.Tanh()), x, use_reentrant=False),
    "function": lambda m, x: Recomputing.apply(m.blocks[2], Recomputing.apply(m.blocks[1], m.blocks[0](x))),
}


class CheckpointedNet(Net):
    def __init__(self, how: str = "each", depth: int = 3, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__(depth, block)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        if self.how == "several on an input":
            return self.last(self.blocks[2](again(series(self.first, *self.blocks[:2]), x.requires_grad_())))
        return self.last(WAYS[self.how](self, self.first(x)))


def recomputed(place: Place) -> None:
    """Where a backward goes through a unit's reentrant checkpoints twice, FSDP2 loses gradients of one of them."""
    for i, how in enumerate((*WAYS, "several on an input")):
        block, twice, reshard_after_forward = (Block, CheckpointedInside)[i % 2], i % 3 == 2, i % 4 < 2

        def loss(model: Any, x: Tensor, y: Tensor, twice: bool = twice) -> Tensor:
            return mean_square64(model, x) + (mean_square64(model, y) if twice else 0)

        with noted(how, block, twice, reshard_after_forward):
            loop, as_fsdp2 = training(loss, CheckpointedNet, how=how, block=block), not twice and how != "one twice"
            alike(loop, place, as_fsdp2=as_fsdp2, resharded=(reshard_after_forward,))


def the_whole_model_recomputed(place: Place) -> None:
    for reentrant in (True, False):

        def loss(model: Any, x: Tensor, y: Tensor, reentrant: bool = reentrant) -> Tensor:
            out: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            alone: Tensor = checkpoint(model.blocks[1], y.requires_grad_(), use_reentrant=reentrant)
            return out.square().mean() + alone.square().mean()

        alike(training(loss), place, as_fsdp2=False)


def freed_in_time(place: Place) -> None:
    """Reentrant checkpoints free and reduce each unit after its own backward."""
    model = by_block(make(CheckpointedNet, depth=6))
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


# -- what a caller asks for, and exceptions ----------------------------------------------------------------------------
def handles(place: Place) -> None:
    model, plain = by_block(make()), make()
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
    is_clean(model)
    with unshard(model, async_op=True) as whole, torch.no_grad():
        whole.first.weight.fill_(0.5)
    assert all(bool((t == 0.5).all()) for name, t in engine.full_state(model) if name == "first.weight")
    is_clean(model)


def a_part_that_does_not_communicate(place: Place) -> None:
    """Of five micro-batches a block, or the model, communicates after the second, the fourth and the last."""
    for whole in (False, True):

        def step(e: Engine, model: Any, optimizer: Any, at: int, whole: bool = whole) -> Tensor:
            for i in range(5):
                loss = mean_square64(model, rows(e, 10 * at + i)) / 5
                with e.no_sync(model if whole else model.blocks[1]) if i % 2 == 0 and i < 4 else nullcontext():
                    loss.backward()
            return loss

        alike(stepping(step), place, resharded=(True,))


def exceptions_in_a_loop(place: Place) -> None:
    """One backward of two fails, one forward of a unit by itself, one generation: the others count as ever."""

    def loop(e: Engine) -> None:
        model, optimizer = started(e, make(Speaking))
        e.forward_method(model, "generate")
        for step in range(STEPS):
            handle = model.blocks[0].register_forward_hook(lambda module, args, out: toys.FailsBackward.apply(out))
            broken = mean_square64(model, rows(e, 20 + step))
            handle.remove()
            loss, other = mean_square64(model, rows(e, step)), mean_square64(model, rows(e, 10 + step))
            loss.backward()
            if e.kind is Kind.OURS:  # a plain model would keep a part of its gradients
                with refused("trouble", ValueError):
                    broken.backward()
            other.backward()  # with no forward in between
            if e.kind is Kind.OURS:
                with pytest.raises(TypeError):
                    model.blocks[1](None)
                with torch.no_grad(), pytest.raises(TypeError):
                    model.generate(None, steps=2)
            with torch.no_grad():
                seen = model.blocks[1](rows(e, step)).mean()
            update(optimizer)
            seen = seen + mean_square64(model, rows(e, step)).detach()
            with torch.no_grad():
                model(rows(e, 0))  # the number's own graph was dropped: this frees what it left
            compare(e, model, seen)
            del broken

    alike(loop, place, as_fsdp2=False)


def test_inputs_are_moved_to_the_device() -> None:
    """Of the outermost call, and only there: shown with the only other device that is everywhere."""
    given = {"x": torch.ones(2), "more": (torch.ones(1, device="meta"), "no tensor")}
    moved = move(given, torch.device("meta"))
    assert moved["x"].device.type == "meta" and moved["more"][0] is given["more"][0] and moved["more"][1] == "no tensor"
    assert move(given["x"], torch.device("cpu")) is given["x"]


# -- unequal numbers of batches ----------------------------------------------------------------------------------------
def unequal(place: Place, where: str) -> str:
    """Rank 1 has a batch less, and waits for rank 0 elsewhere. Plain groups of torch's, with a short timeout."""
    ranks: Any = {"rank": place.rank, "world_size": place.world_size}
    dist.init_process_group("gloo", store=place.store, timeout=timedelta(seconds=1.5), **ranks)
    model = by_block(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(2):
            mean_square(model, batch(step, place.rank)).backward()
            update(optimizer)
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
    "2 (a norm)": lambda model: torch.nn.utils.get_total_norm(list(model.parameters())),
    "0 (fully_shard)": lambda model: fully_shard(make()),
}


@pytest.mark.parametrize("where", tiered(WHERE, lambda where: where == "2 (a norm)"))
def test_unequal_numbers_of_batches(pool: Pool, where: str) -> None:
    said, other = pool.run(unequal, 2, where, reduction=None)
    told = r"rank 0 waited \d\.\d s in step " + re.escape(where) + " for rank 1, which did not come; "
    assert re.match(told, said) and other == "", said


SLOW = (what_the_first_gave, backwards_in_turn, dropped, parts_of_the_outputs, odd_inputs_and_outputs, recomputed)


@toys.everywhere(globals(), slow=SLOW)
def test_in_ranks(pool: Pool, scenario: toys.Scenario, ranks: int) -> None:
    pool.run(scenario, ranks)


# -- the engine's example in the reference, as it stands -------------------------------------------------------------------
REPO = Path(__file__).resolve().parents[2]
ENDING = """
import glob  # a thread of Gloo's that is left may need the interpreter when it ends, and torch would abort
threads = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
assert not any("gloo" in name for name in threads), threads
assert len(whole) == 8 and all(t.isfinite().all() for t in whole.values())
torch.manual_seed(0)  # the same numbers again, without shards: all ranks had one batch
plain = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
optimizer = torch.optim.AdamW(plain.parameters())
for _ in range(3):
    optimizer.zero_grad()
    plain(torch.randn(8, 32)).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    optimizer.step()
assert expected > 0.05, expected  # something was clipped
torch.testing.assert_close(norm.to_local(), expected)
torch.testing.assert_close(whole, {name: p.detach() for name, p in plain.named_parameters()})
"""


@pytest.mark.slow
def test_the_example_in_the_reference_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "notebooks" / "reference.md").read_text(encoding="utf-8"), re.S)
    (example,) = [b for b in blocks if "fsdp_lab.engine" in b]
    script = tmp_path / "example.py"
    script.write_text(example + ENDING)
    printed = torchrun(2, script, timeout_s=100)
    norms = {line for line in printed.splitlines() if "tensor" in line}
    assert len(norms) == 1, printed  # both ranks see the same whole parameter
