"""What cannot be is refused: with a sentence that names the parameter or module and says what to do, on every rank."""

import copy
import io
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributions import Normal
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fsdp_lab import engine
from fsdp_lab.engine import MixedPrecisionPolicy, PrefetchPolicy, build_mesh, full_state, fully_shard, load_full_state
from fsdp_lab.engine.unit import UnitState
from fsdp_lab.spec.spec import Strategy
from tests.engine import toys
from tests.engine.toys import WIDTH, Net, assert_equal, batch, by_block, is_clean, make, mean_square, refused, update
from tests.pool import Place, Pool

SHARDINGS = (Strategy(), Strategy(sharding="no_shard"), Strategy(sharding="zero1"))
Refused = tuple[Callable[[Any], Any], str]  # what is done with a model, and what is said


def step(model: Any, place: Place) -> Tensor:
    loss = mean_square(model, batch(0, place.rank))
    loss.backward()
    return loss.detach()


def _plain_of(model: Any) -> Any:
    plain = make(type(model))
    with torch.no_grad():
        for name, t in full_state(model):
            plain.get_parameter(name).copy_(t)
    return plain


def trains_on(model: Any, place: Place) -> None:
    """From here on the model trains as the plain one does that has its values, bit for bit."""
    plain = _plain_of(model)
    ours = torch.optim.SGD(engine.sharded_parameters(model), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours.zero_grad()
    for _ in range(2):
        step(model, place)
        update(ours)
        toys.plain_step(plain, mean_square, [batch(0, rank) for rank in range(place.world_size)], theirs)
        assert_equal(model, plain)
    is_clean(model)


# -- meshes and arguments ----------------------------------------------------------------------------------------------
def meshes(place: Place) -> None:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    cube = init_device_mesh("cpu", (2, 2, 1))
    copies = init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",))
    for size in (3, 5):
        with refused(f"4 ranks cannot be divided into shard groups of {size}; use a divisor of the world size"):
            build_mesh("cpu", shard_size=size)
        with refused(f"4 shards cannot be divided into groups of {size}; use a divisor"):
            fully_shard(make(), reshard_after_forward=size)
    with refused("the mesh has its dimensions in the wrong order"):
        fully_shard(make(), mesh=turned)
    with refused(r'a mesh of .*\("replicate", "shard"\) is needed, and this one has 3 dimensions; .*build_mesh'):
        fully_shard(make(), mesh=cube)
    with refused("1 shards cannot be divided into groups of 2; use a divisor of 1, or True"):
        fully_shard(make(), mesh=copies, reshard_after_forward=2)
    for mesh, size, replicas in ((flat, 4, 1), (square, 2, 2), (copies, 1, 4)):
        model = make()
        fully_shard(model, mesh=mesh)  # what was refused has left nothing behind
        found = engine.units_of(model)[0].mesh
        assert (found.shard_size, found.replicas) == (size, replicas)
        step(model, place)


def all_refused(model: Any, rows: Iterable[Refused]) -> None:
    for i, (how, says) in enumerate(rows):
        with toys.noted(f"row {i}: {says}"), torch.no_grad(), refused(says):
            how(model)


def given(**options: Any) -> Callable[[Any], Any]:
    return lambda m: fully_shard(m, **options)


def called_first(_: Any) -> None:
    model = make()
    fully_shard(model.blocks[0])
    model.blocks[0](batch(0, 0))
    fully_shard(model)


NO_FORWARD = r"a \w+ has no forward at which its parameters could be gathered; .* list\(modules\)"
FACTOR = "2 ranks cannot be divided into shard groups of"
REFUSED_TO_SHARD: tuple[Refused, ...] = (
    (given(mesh="cpu"), "a str was given as a mesh; make it with"),
    (given(reshard_after_forward=1.5), "reshard_after_forward is 1.5; give True, False, or a number of ranks"),
    (given(mp_policy=MixedPrecisionPolicy(param_dtype=torch.int32)), "param_dtype=torch.int32; give a floating dtype"),
    (given(offload_policy="cpu"), "offload_policy is 'cpu'; give one of none, optimizer, all"),
    (given(prefetch_policy=PrefetchPolicy(backward_prefetch=-1)), "prefetch=-1; give a number of units, 0 or more"),
    (given(prefetch_policy=PrefetchPolicy(limit_reductions=0)), "reductions=0; give a number of units, 1 or more"),
    (given(ignored_params=["last.weight"]), "ignored_params has a str; give parameters"),
    *((lambda m, n=n: build_mesh("cpu", shard_size=n), FACTOR) for n in (0, 1.5)),
    (lambda m: build_mesh("tpu"), "the mesh is to be for 'tpu', and there is no such device here"),
    (lambda m: fully_shard(m.blocks), NO_FORWARD),  # they are not called, so nothing would gather them
    (lambda m: fully_shard(nn.ParameterList([m.first.bias])), NO_FORWARD),
    (lambda m: fully_shard([]), "an empty list of modules was given"),
    (lambda m: fully_shard([m, None]), "a NoneType was given to fully_shard; give it a module, or a list of modules"),
    (lambda m: fully_shard(fully_shard(make()).blocks[0]), "norm.weight was sharded already, with a module around"),
    (called_first, "Block was called before Net, which contains it, was sharded; shard Net first"),
)


def asked_to_shard(place: Place) -> None:
    """Each is refused before a parameter is taken from the model. A list of modules is one unit."""
    model = make()
    all_refused(model, REFUSED_TO_SHARD)
    one = DeviceMesh("cpu", [0])
    if place.rank:
        all_refused(model, [(given(mesh=one), r"rank 1 is not in the mesh, which has ranks \[0\]")])
    fully_shard(list(model.blocks))
    none: Any = dict.fromkeys(("reshard_after_forward", "mp_policy", "offload_policy", "ignored_params"))
    trains_on(fully_shard(model, **none), place)  # as FSDP2's own arguments may be


# -- what is asked of a sharded model at the wrong time, or of one that is not sharded ---------------------------------
def whole(model: Any, **changed: Any) -> dict[str, Any]:
    """All values of a model, but for some (`last_weight` is that of last.weight)."""
    values = {name: t.clone() for name, t in full_state(model)}
    return {**values, **{name.replace("_", "."): value for name, value in changed.items()}}


TWICE = r"(Net|Block) is sharded already; call fully_shard once for each module"
COPIED = r"\w+ is sharded, and cannot be copied or pickled; copy it before fully_shard, or take the values"
CAST = "first.weight is sharded, and cannot be given data of another shape, dtype or device, as by .to"
PLAIN, NO_MODULE = r"Net is not sharded; call fully_shard\(module\) first", "a list was given where a module is needed"
BENT = r"last.weight was given one of the shape \(6, 5\); give a plain tensor of the shape \(5, 6\)"
NONE, ON_META = "first.weight was given no value", "last.weight was given one on meta, without values"
VIEWS = (Tensor.t, lambda p: p.expand(2, WIDTH, WIDTH), lambda p: p.chunk(2), lambda p: p[:, 0])
IS_VIEW = "of a sharded tensor would be a view of elements that are on"
CASTS: tuple[Refused, ...] = (
    (nn.Module.half, CAST),
    (lambda m: m.to(torch.bfloat16), CAST),
    (lambda m: m.apply(lambda inner: inner.half() if isinstance(inner, nn.Linear) else inner), CAST),
)
REFUSED: tuple[Refused, ...] = (
    *CASTS,
    (fully_shard, TWICE),
    (lambda m: fully_shard([m.blocks[1], m.blocks[2]]), TWICE),
    (copy.deepcopy, COPIED),
    (lambda m: copy.deepcopy(engine.sharded_parameters(m)), "a flat parameter is a part of its model, and not copied"),
    *((lambda m, view=view: view(m.first.weight.detach()), IS_VIEW) for view in VIEWS),
    (
        lambda m: torch._foreach_add_([torch.zeros(p.shape) for p in m.parameters()], list(m.parameters())),
        "aten::_foreach_add_ was given a sharded tensor and a plain one",
    ),
    (lambda m: nn.functional.linear(batch(0, 0), m.first.weight), "call the module that was sharded, or its root"),
    (lambda m: setattr(m.first.weight, "grad", torch.zeros(5, 6)), r"first.weight has the shape \(6, 6\)"),
    (lambda m: m.last.weight.t_(), "aten::t_ would give a sharded tensor another shape"),
    *(
        (lambda m, ask=ask: ask(make()), PLAIN)
        for ask in (engine.sharded_parameters, engine.shards_of, engine.runtime_of)
    ),
    *((lambda m, ask=ask: ask(make()).__enter__(), PLAIN) for ask in (engine.no_sync, engine.unshard)),
    (lambda m: dict(full_state(make())), PLAIN),
    *((lambda m, ask=ask: ask([*m.parameters()]), NO_MODULE) for ask in (engine.sharded_parameters, engine.shards_of)),
    (lambda m: load_full_state(m, None), "a NoneType was given where values are needed"),  # type: ignore[arg-type]
    (lambda m: load_full_state(m, whole(m, first_weight=None)), NONE),
    (lambda m: load_full_state(m, whole(m, last_weight=torch.zeros(5, WIDTH, device="meta"))), ON_META),
    (lambda m: load_full_state(m, {}), NONE),
    (lambda m: load_full_state(m, whole(m, last_weight=torch.zeros(WIDTH, 5))), BENT),
)


def asked_of_a_model(place: Place) -> None:
    """Nothing changes by what is refused, and the model trains on."""
    for sharding, rows in (("full_shard", REFUSED), ("no_shard", CASTS)):
        model = by_block(make(), Strategy(sharding=sharding))
        step(model, place)
        model.zero_grad()
        before = whole(model)
        all_refused(model, rows)
        assert all(torch.equal(t, before[name]) for name, t in full_state(model))
        trains_on(model.to("cpu").float(), place)  # which changes nothing


# -- what cannot be sharded --------------------------------------------------------------------------------------------
class Packed(nn.Parameter):
    """Numbers packed into bytes, as quantized layers have them."""


def _dtensor() -> nn.Parameter:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return nn.Parameter(distribute_tensor(torch.zeros(4, WIDTH), mesh, [Shard(0)]))


def _quantized() -> nn.Parameter:
    return nn.Parameter(torch.quantize_per_tensor(torch.ones(7), 0.1, 0, torch.qint8), requires_grad=False)


def _with_wide_gradients() -> nn.Parameter:
    p: Any = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    p.grad_dtype = torch.float32
    return p  # type: ignore[no-any-return]


BAD_PARAMETERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a DTensor": (_dtensor, "blocks.1.more is a DTensor, which is distributed already; give fully_shard plain"),
    "sparse": (
        lambda: nn.Parameter(torch.eye(3).to_sparse()),
        "blocks.1.more is stored as torch.sparse_coo, and only dense parameters can be cut; make it dense, or pass it in ig",
    ),
    "quantized": (_quantized, "blocks.1.more is quantized, and only dense parameters can be cut"),
    "packed": (
        lambda: Packed(torch.zeros(3, dtype=torch.uint8), requires_grad=False),
        "blocks.1.more is a Packed, whose elements cannot be cut as numbers; make it a plain nn.Parameter, or pass it in",
    ),
    "of another gradient": (_with_wide_gradients, "more has grad_dtype=torch.float32, .* choose dtypes by mp_policy"),
    "lazy": (nn.UninitializedParameter, "blocks.1.more has no shape yet; run one forward, or give the sizes"),
}


def bad_parameters(place: Place) -> None:
    """On every rank, though only the last one has it: nothing has been taken from the model then."""
    last = place.world_size - 1
    for made, says in BAD_PARAMETERS.values():
        more = made()  # collective for one of them
        for ranks in (range(place.world_size), (last,)):
            model = make()
            if place.rank in ranks:
                model.blocks[1].more = more
            with refused(says):
                fully_shard(model)
            for name, p in make().named_parameters():
                assert torch.equal(model.get_parameter(name), p)
    if place.rank == last:
        del model.blocks[1].more
    trains_on(fully_shard(model), place)


def ignored_may_be_anything(place: Place) -> None:
    model = make()
    model.blocks[1].more = _quantized()
    trains_on(fully_shard(model, ignored_params=[model.blocks[1].more]), place)


def inner_unit_of_two_roots(place: Place) -> None:
    teacher, student = make(), make()
    student.blocks[0] = fully_shard(teacher.blocks[0])
    fully_shard(teacher)
    for _ in range(2):  # before the first was called, and after
        with refused("Block is in Net too, which was sharded around it, and a unit has one root; shard a module"):
            fully_shard(student)
        assert torch.equal(student.first.weight, make().first.weight)
        trains_on(teacher, place)


def parameter_of_two_roots(place: Place) -> None:
    """Inside one model it is found when the root is sharded; two models never have a root in common."""
    one, other = make(), make()
    other.first.weight = one.first.weight
    fully_shard(one)
    fully_shard(other)
    says = "first.weight belongs to another model too, which was sharded first and has its values; shard a module"
    for _ in range(2):
        with refused(says):
            other(batch(0, 0))
        with refused(says):
            engine.runtime_of(other)
    trains_on(one, place)


class Empty(nn.Module):
    """Its unit has parameters, and no element."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.none.sum()


class Odd(nn.Module):
    """A complex weight, one without elements, one without dimensions, and a module without any."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.complex64))
        self.none, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList([nn.Tanh(), nn.Linear(5, 5), Empty(), nn.ReLU()])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.view_as_real(x.to(self.wave.dtype) @ self.wave).sum(-1)
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.none.sum()


def odd_parameters(place: Place) -> None:
    for strategy in SHARDINGS:
        trains_on(by_block(make(Odd), strategy=strategy), place)


def nothing_to_shard(place: Place) -> None:
    model = fully_shard(nn.Sequential(nn.Tanh(), fully_shard(nn.ReLU())))
    x = torch.ones(2, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and engine.sharded_parameters(model) == [] and dict(full_state(model)) == {}


# -- ranks that build different models ---------------------------------------------------------------------------------
def _wider(model: Any) -> None:
    model.blocks[1].up, model.blocks[1].down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)


DIFFERENCES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shape": (_wider, r"up.weight \(7, 6\) .* in Block on rank 0 of the mesh, up.weight \(9, 6\) .* in Block on rank"),
    "a parameter less": (lambda m: setattr(m.blocks[1].down, "bias", None), r"down.bias \(6,\) .* on rank 0"),
    "frozen": (lambda m: m.blocks[1].norm.weight.requires_grad_(False),
               r"norm.weight \(6,\) .*requires_grad=True.* on rank 0 .* norm.weight .*requires_grad=False"),
    "a block less": (lambda m: m.blocks.pop(1), r"norm.weight .* in Block on rank 0 .* first.weight"),
    "tied": (lambda m: setattr(m.first, "bias", m.blocks[0].norm.bias),
             r"on rank 0 of the mesh, norm.bias of Block tied in Net on rank"),
}  # fmt: skip
SHARDED_DIFFERENTLY: dict[str, tuple[Callable[[Any], Any], str]] = {
    "groups": (given(group_of=lambda name, p: "matrices" if p.dim() > 1 else "all"), "group=1"),
    "policies": (given(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), "param_dtype=torch.bfloat16"),
}


def differ(place: Place, sharding: str) -> list[str]:
    """What this rank is told where the last one is different."""
    odd, told = place.rank == place.world_size - 1, []
    for change, _ in DIFFERENCES.values():
        model = make()
        if odd:
            change(model)
        with pytest.raises(engine.ShardError) as e:
            by_block(model, strategy=Strategy(sharding=sharding))
        told.append(str(e.value))
    for other, _ in SHARDED_DIFFERENTLY.values():
        with pytest.raises(engine.ShardError) as e:
            (other if odd else fully_shard)(make())
        told.append(str(e.value))
    matrices, vectors = object(), object()  # groups that print differently in each process are the same all the same
    step(fully_shard(make(), group_of=lambda name, p: matrices if p.dim() > 1 else vectors), place)
    return told


@pytest.mark.parametrize(("world_size", "sharding"), [(2, "no_shard"), (4, "hybrid_shard")])
def test_ranks_that_build_or_shard_differently(pool: Pool, world_size: int, sharding: str) -> None:
    """Whichever rank it is, and in hybrid sharding too, where it shares a group with some of the others only."""
    told, *others = pool.run(differ, world_size, sharding, timeout_s=60)
    assert all(other == told for other in others)
    for found, (what, (_, says)) in zip(told, [*DIFFERENCES.items(), *SHARDED_DIFFERENTLY.items()], strict=True):
        assert found.startswith("what is sharded differs between ranks: "), what
        assert re.search(says, found), (what, found)
        assert f"on rank {world_size - 1}; build the same model on every rank before fully_shard" in found


# -- parameters changed behind the engine's back -----------------------------------------------------------------------
def replaced(place: Place) -> None:
    model = by_block(make())
    step(model, place)
    before = model.blocks[1].up.weight
    model.blocks[1].up.weight = nn.Parameter(torch.zeros(7, WIDTH))
    for _ in range(2):  # and again, as long as it is so
        with refused("blocks.1.up.weight was replaced by another one after it was sharded; write to it under torch.no"):
            model(batch(0, 0))
    model.blocks[1].up.weight = before
    trains_on(model, place)


WRITES_THAT_ARE_LOST: tuple[Refused, ...] = (
    (
        lambda m: m.first.weight.mul_(0.5),  # the root's are gathered between forward and backward
        "first.weight was written to between forward and backward, where that is lost; write to it after the",
    ),
    (lambda m: setattr(m.last.weight, "data", torch.zeros(5, WIDTH)), "last.weight was given other data"),
    (lambda m: m.first.weight.data.add_(1.0), "first.weight was written to between forward and backward"),
)


def written_to_while_gathered(place: Place) -> None:
    for strategy, (write, says) in itertools.product(SHARDINGS, WRITES_THAT_ARE_LOST):
        model = by_block(make(), strategy=strategy)
        loss = mean_square(model, batch(0, place.rank))
        with torch.no_grad():
            for p in (model.first.weight, model.blocks[-1].up.weight):
                p.set_(p)  # as torch's parametrizations do in a forward; it is no write
            write(model)
        loss.backward()
        with refused(says):
            model(batch(0, 0))


def a_frozen_model_is_written_to(place: Place) -> None:
    """Without a graph there is no backward, and nothing is between."""
    frozen, plain = by_block(make().requires_grad_(False)), make()
    for m in (frozen, plain):
        mean_square(m, batch(0, place.rank))
        for p in m.parameters():
            p.data += 1.0
    with torch.no_grad():
        assert torch.equal(mean_square(frozen, batch(0, place.rank)), mean_square(plain, batch(0, place.rank)))


def written_to_between_steps(place: Place) -> None:
    """In place, by `.data` or by `out=`: whole tensors are cut, and what is cut already is copied."""
    for strategy in SHARDINGS:
        model, plain = by_block(make(), strategy=strategy), make()
        step(model, place)
        for m in (model, plain):
            with torch.no_grad():
                m.blocks[1].up.weight.fill_(2.0)
                m.blocks[1].up.weight[1].mul_(3.0)
                m.first.weight.copy_(torch.eye(WIDTH))
                m.blocks[0].up.bias.data = torch.arange(7.0)
                m.last.weight.data = m.last.weight.data * 0.0
                nn.init.eye_(m.blocks[0].up.weight)
                weight = m.blocks[1].up.weight
                torch.where(weight > 0, weight, torch.zeros_like(weight), out=weight)
                torch.mul(m.blocks[0].norm.bias, 2.0, out=m.blocks[0].norm.bias)
        assert_equal(model, plain)  # all others are as they were
        trains_on(model, place)


def written_to_inside_unshard(place: Place) -> None:
    """In place, or by `.data`: both are taken over; also where more bytes are gathered than the master has."""
    in_double = MixedPrecisionPolicy(param_dtype=torch.float64)
    for options in ({"mp_policy": in_double}, {"strategy": SHARDINGS[1]}, {"strategy": Strategy(offload="optimizer")}):
        model, plain = by_block(make(), **options), make()  # type: ignore[arg-type]
        for m in (model, plain):
            with engine.unshard(m) if m is model else torch.enable_grad():
                with torch.no_grad():
                    m.blocks[1].up.weight.mul_(2)
                m.last.bias.data = torch.arange(5.0, dtype=m.last.bias.dtype)
        assert_equal(model, plain)
        if "strategy" in options:
            trains_on(model, place)
    with engine.unshard(model):
        model.last.bias.data = torch.arange(4.0)
    with refused("last.bias was given other data"):
        model(batch(0, 0))


# -- calls and outputs that would go wrong -----------------------------------------------------------------------------
def inner_module_by_itself(place: Place) -> None:
    """It has no hooks of ours, and its parameters are sharded."""
    model = by_block(make())
    for inner in (model.blocks[1].up, model.first):
        with refused("of a sharded tensor would be a view .*; call the module that was sharded, or its root"):
            inner(batch(0, 0))
    with engine.unshard(model):
        assert torch.equal(model.first(batch(0, 0)), make().first(batch(0, 0)))
    trains_on(model, place)


class Hiding:
    """An object in which nobody looks for tensors."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class HidingBlock(toys.Block):
    def forward(self, x: Tensor, how: Any = Hiding) -> Any:
        return how(super().forward(x))


class LeavingBlock(nn.Module):
    """Leaves its output in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> None:
        self.x = self.norm(x)


class HidingNet(Net):
    def through(self, block: Any, x: Tensor) -> Any:
        out = block(x)
        return block.x if out is None else out.x


def outputs_that_are_not_found(place: Place) -> None:
    """In an object that nobody knows, and left in an attribute."""
    model = by_block(make(HidingNet, block=HidingBlock))
    says = "blocks.0 returned a Hiding, in which tensors are not found, .* return tensors, or tuples, lists, dicts"
    with refused(says):
        model(batch(0, 0))
    with torch.no_grad():
        model(batch(0, 0))
    hidings: tuple[Any, ...] = (lambda x: {1: frozenset([x])}, lambda x: Normal(x, 1.0), lambda x: Hiding([Hiding(x)]))
    for how, kind in zip(hidings, ("frozenset", "Normal", "Hiding"), strict=True):
        with refused(f"blocks.0 returned a {kind}, in which"):
            model.blocks[0](batch(0, 0), how)
    loss = mean_square(by_block(make(HidingNet, block=LeavingBlock)), batch(0, 0))
    says = r"the gradient of blocks.\d.norm.\w+ came while blocks.\d was not gathered: .* let its forward return"
    with refused(says):
        loss.backward()


def parameters_taken_while_gathered(place: Place) -> None:
    """Between a forward and its backward a module holds gathered parameters. Afterwards they have gradients, which may be
    clipped, but no values, so an optimizer that has them cannot step."""
    for strategy in SHARDINGS:
        model, other = (by_block(make(), strategy=strategy) for _ in range(2))
        losses = [mean_square(m, batch(0, place.rank)) for m in (model, other)]
        taken = list(model.parameters())
        slopes = torch.autograd.grad(losses[0], taken, retain_graph=True, allow_unused=True)
        assert sum(slope is not None for slope in slopes) > 2  # this rank's own
        for loss in losses:
            loss.backward()
        norms = [torch.nn.utils.clip_grad_norm_(parameters, 0.1) for parameters in (taken, other.parameters())]
        assert norms[0] == norms[1]
        for m in (model, other):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(full_state(model), full_state(other), strict=True))
        assert (taken[0].shape, taken[0].requires_grad) == ((WIDTH, WIDTH), True)
        assert strategy.sharding == "no_shard" or taken[0].isnan().all()
        model.zero_grad()
        loss = mean_square(model, batch(0, place.rank))
        late = torch.optim.AdamW(model.parameters(), lr=0.1)
        model.zero_grad()
        loss.backward()
        with refused("an optimizer was made while first.weight was gathered, .* make it before the forward, or after"):
            late.step()
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(full_state(model), full_state(other), strict=True))
        trains_on(model, place)


def collectives_of_a_caller(place: Place, over_wire: bool) -> None:
    """They would see ranges of other elements, and what they write would be lost."""
    says = "such as a sharded parameter" if over_wire else "was given a sharded tensor, of which each rank holds other"
    if not over_wire:
        dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.world_size)
    model = by_block(make())
    mean_square(model, batch(0, place.rank)).backward()
    p = model.first.weight
    for use in (lambda: dist.all_reduce(p.grad), lambda: dist.broadcast(p.data, 0),
                lambda: dist.all_gather([torch.zeros(p.shape) for _ in range(place.world_size)], p.detach())):  # fmt: skip
        with refused(says, TypeError if over_wire else engine.ShardError):
            use()
    norm = p.grad.norm().full_tensor()
    dist.all_reduce(norm)
    assert norm == place.world_size * p.grad.norm()
    model.zero_grad()
    trains_on(model, place)
    if not over_wire:
        dist.destroy_process_group()


@pytest.mark.parametrize("over_wire", [False, True])
def test_collectives_of_a_caller(pool: Pool, over_wire: bool) -> None:
    pool.run(collectives_of_a_caller, 2, over_wire, reduction="auto" if over_wire else None)


# -- state and optimizers ----------------------------------------------------------------------------------------------
def state_inside_unshard(place: Place) -> None:
    model, plain = by_block(make()), make()
    with engine.unshard(model):
        state = {name: t.clone() for name, t in model.state_dict().items()}
        assert all(torch.equal(t, plain.state_dict()[name]) for name, t in state.items())
        model.load_state_dict({name: 2 * t for name, t in state.items()})
        pickled = io.BytesIO()
        torch.save(model.state_dict(), pickled)
    assert all(torch.equal(t, 2 * plain.get_parameter(name)) for name, t in full_state(model))
    trains_on(model, place)


def state_of_another_rank(place: Place) -> None:
    model = by_block(make())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    files: list[bytes] = [b""] * place.world_size
    dist.all_gather_object(files, file.getvalue())
    other = 1 - place.rank
    with refused(f"a sharded tensor was saved by rank {other} of 2, and this is rank {place.rank} of 2; let each rank"):
        torch.load(io.BytesIO(files[other]), weights_only=True)


def shards_in_safetensors(place: Place, folder: Path) -> None:
    """torch's writer keeps the last of several boxes that a range is in. Whole tensors are read into any shards."""
    # of a matrix of 5 x 5, rank 0 has 2 rows and 3 elements
    model = fully_shard(make(nn.Linear, in_features=5, out_features=5, bias=False))
    says = "weight is in several parts on a rank, of which a file of safetensors keeps one; give the writer whole"
    with pytest.raises(CheckpointException, match=says):
        dcp.save(model.state_dict(), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    whole = {name: t.clone() for name, t in full_state(model)}
    dcp.save(model.state_dict(), checkpoint_id=folder / "parts")
    parts = torch.zeros(5, 5)
    dcp.load({"weight": parts}, checkpoint_id=folder / "parts")
    assert torch.equal(parts, whole["weight"])
    if place.rank == 0:
        dcp.save(whole, storage_writer=HuggingFaceStorageWriter(str(folder / "whole")), no_dist=True)
    dist.barrier()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    dcp.load(model.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder / "whole")))
    assert all(torch.equal(t, whole[name]) for name, t in full_state(model))


def test_shards_in_safetensors(pool: Pool, tmp_path: Path) -> None:
    pool.run(shards_in_safetensors, 2, tmp_path)


def optimizer_from_before(place: Place) -> None:
    """It is refused before it changes anything. Optimizers of others are left alone."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = make()
        early: Any = kind(model.parameters(), lr=0.1)
        by_block(model)
        for _ in range(2):  # also where it sets its gradients to None between two steps
            early.zero_grad()
            step(model, place)
            with refused(r"\w+.weight was sharded, and this is the parameter that the model had before; make the"):
                early.step()
        trains_on(model, place)
        assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks


def unfrozen_later(place: Place) -> None:
    """After an optimizer was made, which then lacks it. Who leaves out what is trainable, or has no gradients, may."""
    for held in (engine.sharded_parameters, lambda m: [p for p in m.parameters() if p.requires_grad]):
        model: Any = make()
        model.blocks[0].requires_grad_(False)
        by_block(model)
        optimizer = torch.optim.SGD(held(model)[1:], lr=0.1)
        for _ in range(2):
            step(model, place)
            update(optimizer)
        model.blocks[0].requires_grad_(True)
        step(model, place)
        before = _plain_of(model)
        with refused("blocks.0.norm.weight is trainable now, and was frozen when the optimizer was made, .* changing"):
            optimizer.step()
        assert_equal(model, before)
        model.blocks[0].zero_grad()
        optimizer.step()
        step(model, place)
        torch.optim.SGD(held(model), lr=0.1).step()
        trains_on(model, place)


def beside_an_optimizer(place: Place) -> None:
    """What is done with parameters while an optimizer steps regions, though another one has been made of them."""
    model = by_block(make())
    torch.optim.AdamW(model.parameters())  # dropped
    optimizer = torch.optim.AdamW(engine.sharded_parameters(model), lr=0.1)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i in range(3):
        step(model, place)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].mul_(0.9).add_(p, alpha=0.1)
                assert p.grad.norm() <= 0.1
                p.clamp_(-0.2, 0.2)
                p.copy_(average[name])
        if i:
            optimizer.zero_grad()
    trains_on(model, place)


def two_views_of_the_same_values(place: Place) -> None:
    """In one optimizer, or in two that step by the same gradients; one after the other, as when replaced, they may."""
    says = r"would be stepped twice, in model.parameters\(\) and in sharded_parameters\(model\)"
    groups: tuple[Callable[[Any], Any], ...] = (
        lambda m: [*m.parameters(), *engine.sharded_parameters(m)],
        lambda m: [{"params": engine.sharded_parameters(m)}, {"params": m.parameters()}],
        lambda m: [{"params": m.parameters()}, {"params": engine.sharded_parameters(m)}],
    )
    for make_groups in groups:
        model = by_block(make())
        both = torch.optim.AdamW(make_groups(model), lr=0.1)
        both.zero_grad()
        step(model, place)
        with refused(says):
            both.step()
    for order in (1, -1):
        model = by_block(make())
        one, other = [torch.optim.SGD(p, 0.1) for p in (engine.sharded_parameters(model), model.parameters())][::order]
        step(model, place)
        one.step()
        once = _plain_of(model)
        with refused(says):
            other.step()
        assert_equal(model, once)
        one.zero_grad()
        other.zero_grad()
        step(model, place)
        other.step()


def a_layer_that_came_later(place: Place) -> None:
    """As a new head for another task: its gradient is reduced by nobody."""
    model = by_block(make())
    step(model, place)
    model.last = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: t.clone() for name, t in [*full_state(model), *model.last.named_parameters()]}
    step(model, place)
    with refused("last.weight came into the model after it was sharded, so each rank would train one of its own"):
        optimizer.step()
    assert all(torch.equal(t, before[name]) for name, t in [*full_state(model), *model.last.named_parameters()])
    model = make()
    by_block(model, ignored_params=list(model.last.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, place)
    optimizer.step()  # the caller's own


def assigned_under_an_optimizer(place: Place) -> None:
    """Under torch the optimizer would hold tensors that nobody uses."""
    says = r"load_state_dict\(assign=True\) has put other parameters into the model, .* make the optimizer afterwards"
    for held in (nn.Module.parameters, engine.sharded_parameters):
        model = by_block(make())
        early = torch.optim.SGD(held(model), lr=0.1)
        state = {name: t + 1 for name, t in full_state(model)}
        model.load_state_dict(state, assign=True)
        step(model, place)
        for use in (early.step, early.zero_grad):
            with refused(says):
                use()
        assert all(torch.equal(t, state[name]) for name, t in full_state(model))
        model.load_state_dict(model.state_dict())
        trains_on(model, place)


# -- exceptions in the middle of a step --------------------------------------------------------------------------------
def _fail(*_: Any) -> None:
    raise ValueError("trouble in the forward")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


STRATEGIES = (
    Strategy(),
    Strategy(sharding="zero1", forward_prefetch=2, backward_prefetch=2, limit_all_gathers=0, offload="all"),
)


def exceptions_in_a_step(place: Place) -> None:
    for strategy in STRATEGIES:
        model = by_block(make(), strategy=strategy)
        places = (model.first, model.blocks[1], model.blocks[1].up, model.last, model)
        for where in places:
            handle = where.register_forward_hook(_fail)
            with refused("trouble in the forward", ValueError):
                step(model, place)
            with torch.no_grad(), refused("trouble in the forward", ValueError):
                model(batch(0, place.rank))
            handle.remove()
            with torch.no_grad():
                assert torch.equal(model(batch(0, place.rank)), make()(batch(0, place.rank)))
            is_clean(model)
        trains_on(model, place)
        for where in places:  # Ctrl-C, of which torch's modules tell nobody
            handle = where.register_forward_hook(_interrupt)
            with torch.set_grad_enabled(where is not model), pytest.raises(KeyboardInterrupt):
                step(model, place)
            handle.remove()
        trains_on(model, place)
        for where in places:  # the next forward follows the schedule
            handle = where.register_forward_hook(lambda module, args, out: toys.FailsBackward.apply(out))
            loss = mean_square(model, batch(0, place.rank))
            with refused("trouble in the backward", ValueError):
                loss.backward()
            handle.remove()
            if where is model:
                del loss  # that backward came to its end before it came to the model, which still waits for it
            step(model, place)  # else the broken graph is alive until here
            is_clean(model)
        trains_on(model, place)


def exceptions_while_accumulating(place: Place) -> None:
    """A forward that fails takes nothing away from what micro-batches before it left."""
    model, plain = by_block(make()), make()
    with engine.no_sync(model):
        step(model, place)
        handle = model.blocks[2].register_forward_hook(_fail)
        with refused("trouble in the forward", ValueError):
            step(model, place)
        handle.remove()
    step(model, place)
    wanted = toys.gradients(plain, mean_square, [batch(0, rank) for rank in range(place.world_size)])
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.allclose(p.grad.full_tensor(), 2 * wanted[name], rtol=1e-5)
    trains_on(model, place)


def exceptions_inside_unshard(place: Place) -> None:
    model = by_block(make())
    with refused("trouble", ValueError), engine.unshard(model):
        raise ValueError("trouble")
    assert all(unit.pins == 0 and unit.state is UnitState.SHARDED for unit in engine.units_of(model))
    trains_on(model, place)


class Catching(Net):
    """Goes on without a block that fails."""

    def through(self, block: Any, x: Tensor) -> Any:
        try:
            return block(x)
        except ValueError:
            return x + 1


def exceptions_that_the_model_catches(place: Place) -> None:
    model = by_block(make(Catching))
    handle = model.blocks[1].up.register_forward_hook(_fail)
    for _ in range(2):
        try:
            raise ValueError("handled while the model is called")
        except ValueError:
            step(model, place)
    handle.remove()
    trains_on(model, place)


@toys.everywhere(globals(), of_four=(meshes,))
def test_in_ranks(pool: Pool, scenario: toys.Scenario, ranks: int) -> None:
    pool.run(scenario, ranks)
