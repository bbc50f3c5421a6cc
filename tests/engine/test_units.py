"""Units of one root that are sharded in different ways, and in groups that are made once."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab import engine
from fsdp_lab.engine import OffloadPolicy, PrefetchPolicy, buffer, build_mesh, fully_shard, known_groups, runtime_of
from fsdp_lab.engine.mesh import choose_device
from fsdp_lab.engine.schedule import Direction, Phase
from fsdp_lab.engine.unit import UnitState
from fsdp_lab.spec.spec import Strategy
from tests.engine.toys import Scenario, batch, by_block, everywhere, gradients, is_clean, make, mean_square, refused
from tests.pool import Place, Pool

Options = dict[str, Any]
STEPS = 4
CLIP = 0.05


def norm_of(model: Any, norm_type: float = 2.0) -> float:
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def train_by_units(place: Place, of_blocks: list[Options], of_root: Options) -> list[float]:
    """Train clipped beside a plain model on the batches of all ranks; the replicas stay equal. Returns the norms."""
    model, plain = make(), make()
    for block, options in zip(model.blocks, of_blocks, strict=True):
        fully_shard(block, **options)
    fully_shard(model, **of_root)
    ours = torch.optim.AdamW(engine.sharded_parameters(model), lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        batches = [batch(step, rank) for rank in range(place.world_size)]
        mean_square(model, batches[place.rank]).backward()
        for name, g in gradients(plain, mean_square, batches).items():
            plain.get_parameter(name).grad = g
        for norm_type in (float("inf"), 1.0, 3.0):
            wanted, found = (norm_of(m, norm_type) for m in (plain, model))
            assert found == pytest.approx(wanted, rel=1e-5)
        norms.append(float(torch.nn.utils.clip_grad_norm_(engine.sharded_parameters(model), CLIP).full_tensor()))  # type: ignore[attr-defined]
        wanted = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP))
        assert wanted > CLIP and norms[-1] == pytest.approx(wanted, rel=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        for name, t in engine.full_state(model):
            torch.testing.assert_close(t, plain.get_parameter(name), rtol=1e-5, atol=1e-6)
            copies = [torch.empty_like(t) for _ in range(place.world_size)]
            dist.all_gather(copies, t)
            assert all(torch.equal(t, other) for other in copies), name
    is_clean(model)
    return norms


def by_units(place: Place, name: str) -> list[float]:
    copies: Options = {"mesh": build_mesh("cpu", shard_size=1)}
    hybrid: Options = {"mesh": build_mesh("cpu", shard_size=2)} if place.world_size == 4 else {}
    kept, held = {"reshard_after_forward": False}, {"shard_optimizer_only": True}
    ahead = PrefetchPolicy(forward_prefetch=1, limit=1)
    of_units: dict[str, tuple[list[Options], Options]] = {  # the blocks', and the root's
        "replicated root": ([{}, {}, {}], copies),
        "all kinds": (
            [{**hybrid, **kept}, {"reshard_after_forward": 2}, copies],
            {**hybrid, "offload_policy": OffloadPolicy.ALL},
        ),
        "own resharding": ([kept, {}, held], {"offload_policy": OffloadPolicy.OPTIMIZER, "prefetch_policy": ahead}),
    }
    return train_by_units(place, *of_units[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"),
                         [("replicated root", 3), ("all kinds", 4), ("own resharding", 2)])  # fmt: skip
def test_units_of_different_strategies(pool: Pool, name: str, world_size: int) -> None:
    """Against a plain model on the whole batch; and every rank clips by the same number."""
    norms = pool.run(by_units, world_size, name)
    assert all(other == norms[0] for other in norms), norms


def resharded(place: Place) -> None:
    """Each unit is freed after its forward as it was asked for, and copied from the host if it is there."""
    model = make()
    fully_shard(model.blocks[0], reshard_after_forward=False)
    fully_shard(model.blocks[1], offload_policy=OffloadPolicy.ALL)
    fully_shard(model.blocks[2])
    fully_shard(model, prefetch_policy=PrefetchPolicy(backward_prefetch=0, limit=1))
    mean_square(model, batch(0, place.rank)).backward()  # by which the next ones are scheduled
    seen: list[tuple[Phase, str, Direction]] = []
    runtime_of(model).watch = lambda *event: seen.append(event)
    for _ in range(2):
        loss = mean_square(model, batch(0, place.rank))
        gathered = {unit.name for unit in engine.units_of(model) if unit.state is UnitState.UNSHARDED}
        assert gathered == {"", "blocks.0", "blocks.2"}  # the root's, what asked for it, and what comes first
        loss.backward()
    for unit in ("blocks.0", "blocks.1", "blocks.2"):
        gathers = [e for e in seen if e[:2] == (Phase.UNSHARD, unit)]
        assert len(gathers) == (4 if unit == "blocks.1" else 2), unit
        copies = [e for e in seen if e[:2] == (Phase.HOST_COPY, unit)]
        assert len(copies) == (6 if unit == "blocks.1" else 0), unit


def precision_of_their_own(place: Place) -> None:
    model, half = make(), engine.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    seen: list[torch.dtype] = []

    def widen(module: Any, args: Any, out: Tensor) -> Tensor:
        seen.append(module.up.weight.dtype)
        return out.float()

    for i, block in enumerate(model.blocks):
        block.register_forward_hook(widen)
        fully_shard(block, mp_policy=half if i == 1 else None)
    fully_shard(model)
    mean_square(model, batch(0, place.rank)).backward()
    assert seen == [torch.float32, torch.bfloat16, torch.float32]
    plain = gradients(make(), mean_square, [batch(0, rank) for rank in range(place.world_size)])
    wanted = float(torch.cat([g.reshape(-1) for g in plain.values()]).norm())
    assert norm_of(model) == pytest.approx(wanted, rel=0.02)


def state_of_units(place: Place) -> None:
    model = make()
    for i, block in enumerate(model.blocks):
        fully_shard(block, mesh=build_mesh("cpu", shard_size=(1, 2, 4)[i]))
    fully_shard(model, mesh=build_mesh("cpu", shard_size=1))
    values = {name: torch.full_like(p, i) for i, (name, p) in enumerate(make().named_parameters())}
    engine.load_full_state(model, values)
    assert all(torch.equal(t, values[name]) for name, t in engine.full_state(model))


def not_together(place: Place) -> None:
    def refuses(says: str, of_block: Options, of_root: Options) -> None:
        model = make()
        fully_shard(model.blocks[1], **of_block)
        with refused(says):
            fully_shard(model, **of_root)
        assert torch.equal(model.first.weight, make().first.weight)
        fully_shard(model, **of_block)
        mean_square(model, batch(0, place.rank)).backward()

    refuses(
        r"prefetch_policy is one for all units of a model, and Net was given limit=3, blocks.1 limit=2; give it to the out",
        {"prefetch_policy": PrefetchPolicy()},
        {"prefetch_policy": PrefetchPolicy(limit=3)},
    )
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = DeviceMesh.from_group(halves[place.rank // 2], "cpu", mesh_dim_names=("shard",))
    says = r"blocks.1 was sharded over ranks \[\d, \d\], and Net around it is to be over \[0, 1, 2, 3\]; give all units"
    refuses(says + " of a model meshes of the same ranks", {"mesh": half}, {})


def prefetching_of_an_inner_unit(place: Place) -> None:
    """It is taken for all of them where the root was given none."""
    model = make()
    for block in model.blocks:
        fully_shard(block, prefetch_policy=PrefetchPolicy(forward_prefetch=2))
    assert runtime_of(fully_shard(model)).rules.forward_prefetch == 2


# -- groups and devices ------------------------------------------------------------------------------------------------
def groups_made(place: Place) -> list[int]:
    counts = [len(known_groups())]
    for _ in range(2):  # two models
        model = by_block(make(depth=5))
        mean_square(model, batch(0, place.rank)).backward()
        counts.append(len(known_groups()))
    for _ in range(2):
        model = by_block(make(depth=5), reshard_after_forward=2)
        mean_square(model, batch(0, place.rank)).backward()
        counts.append(len(known_groups()))
    hybrid = build_mesh("cpu", shard_size=2)
    counts.append(len(known_groups()))
    mean_square(by_block(make(), mesh=hybrid), batch(0, place.rank)).backward()
    return [*counts, len(known_groups())]


@pytest.mark.slow
def test_groups_are_made_once_for_all_units(pool: Pool) -> None:
    """None at all over all ranks, which are the default group; one for each size of an integer."""
    for counts in pool.run(groups_made, 4):
        none, one, other, first, second, made, used = counts
        assert none == one == other and first == second == none + 1 and used == made


CPU, META, GPU = torch.device("cpu"), torch.device("meta"), [torch.device("cuda", i) for i in range(2)]
GLOO, NCCL, BOTH = {"cpu": "gloo", "cuda": "gloo"}, {"cuda": "nccl"}, {"cpu": "gloo", "cuda": "nccl"}
DEVICES: list[tuple[dict[str, str], list[torch.device], torch.device | None, torch.device | str]] = [
    (GLOO, [CPU], GPU[0], CPU),  # a GPU exists, and nobody asked for it
    (GLOO, [META], GPU[0], CPU),
    (GLOO, [], None, CPU),
    (GLOO, [GPU[1], CPU], GPU[0], GPU[1]),
    (NCCL, [CPU], GPU[1], GPU[1]),  # moved there, as FSDP2 does
    (NCCL, [GPU[0], META], GPU[1], GPU[0]),
    (BOTH, [CPU], GPU[0], GPU[0]),
    (BOTH, [CPU], None, CPU),
    (NCCL, GPU, GPU[0], "parameters are on cuda:0 and cuda:1; a rank shards on one device, so bring"),
    (NCCL, [CPU], None, "the process group has no backend for cpu, .* choose one in init_process_group"),
    ({"cpu": "gloo"}, GPU[:1], GPU[0], "the process group has no backend for cuda"),
]


def test_the_device_comes_from_the_group_and_the_parameters() -> None:
    """Or there is none, and a sentence says why."""
    for backends, holding, current, wanted in DEVICES:
        with refused(wanted) if isinstance(wanted, str) else nullcontext():
            assert choose_device(backends, holding, current) == wanted


def no_group(place: Place) -> None:
    with refused("there is no process group; call torch.distributed.init_process_group before"):
        fully_shard(make())


def destroyed(place: Place) -> None:
    """A model keeps no group alive, nor the threads of it."""
    dist.init_process_group("gloo", store=place.store, rank=place.rank, world_size=place.world_size)
    model = by_block(make())
    mean_square(model, batch(0, place.rank)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    assert group() is None
    with refused("the process group of this model was destroyed; init_process_group and shard a"):
        model(batch(0, place.rank))


@pytest.mark.parametrize(("scenario", "world_size"), [(no_group, 1), (destroyed, 2)])
def test_a_group_that_is_not_there(pool: Pool, scenario: Scenario, world_size: int) -> None:
    pool.run(scenario, world_size, reduction=None)


WRITES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda p: p.mul_(0.5), "data": lambda p: p.data.mul_(0.5), "detached": lambda p: p.detach().mul_(0.5),
    "flattened": lambda p: p.view(-1).mul_(0.5), "first part": lambda p: p[:1].mul_(0.5),
    "rows": lambda p: [p[i].mul_(0.5) for i in range(len(p))], "local": lambda p: p.to_local().mul_(0.5),
}  # fmt: skip


def written_while_gathered(place: Place) -> None:
    """Units stay gathered after a forward whose backward does not come; parameters that were taken before are written."""
    for i, (by, write) in enumerate(WRITES.items()):
        sharding = ("full_shard", "shard_grad_op", "no_shard")[i % 3]
        model, plain = by_block(make(), strategy=Strategy(sharding=sharding)), make()
        held = list(model.parameters())
        mean_square(model, batch(0, place.rank))
        with torch.no_grad():
            for p in held:
                write(p)
            for q in plain.parameters():
                WRITES["itself" if by == "local" else by](q)
            assert torch.equal(model(batch(1, place.rank)), plain(batch(1, place.rank))), (by, sharding)


@everywhere(globals(), (no_group, destroyed), (state_of_units, not_together))
def test_in_ranks(pool: Pool, scenario: Scenario, ranks: int) -> None:
    pool.run(scenario, ranks)


# -- hybrid sharding's all-reduce --------------------------------------------------------------------------------------
class Recorded(dist.Work):
    """Passes a work on, and writes down when it is waited for."""

    def __init__(self, inner: Any, what: str, log: list[str]) -> None:
        super().__init__()
        self._inner, self._what, self._log = inner, what, log

    def wait(self, timeout: Any = None) -> bool:
        self._log.append(f"wait {self._what}")
        return bool(self._inner.wait())


def order_of_collectives(place: Place) -> list[str]:
    """The events of one backward; `backward` is the begin of a block's."""
    log: list[str] = []
    model = by_block(make(), mesh=build_mesh("cpu", shard_size=2))
    runtime, units = runtime_of(model), [""]

    def recording(kind: str, issue: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            what = f"{kind} {units[-1] or 'root'}"
            log.append(what)
            return Recorded(issue(*args), what, log)

        return call

    def inside(phase: Phase, unit: str, around: Any = runtime.around) -> Any:
        units.append(unit)
        return around(phase, unit)

    def watch(phase: Phase, unit: str, direction: Direction) -> None:
        if phase is Phase.COMPUTE and direction is Direction.BACKWARD:
            log.append(f"backward {unit or 'root'}")

    runtime.around, runtime.watch = inside, watch
    with (patch.object(buffer, "reduce_scatter", recording("scatter", buffer.reduce_scatter)),
          patch.object(buffer, "all_reduce", recording("across", buffer.all_reduce))):  # fmt: skip
        mean_square(model, batch(0, place.rank)).backward()
    return log


def test_an_all_reduce_is_under_way_while_later_units_compute(pool: Pool) -> None:
    """On all ranks in one order, and never more than one whole gradient in flight."""
    told = pool.run(order_of_collectives, 4)
    assert all(log == told[0] for log in told)
    (log, *_) = told
    at = {event: i for i, event in enumerate(log)}
    assert at["backward blocks.1"] < at["across blocks.2"] < at["scatter blocks.1"] < at["backward blocks.0"]
    assert at["backward blocks.0"] < at["wait across blocks.2"]  # a whole backward later
    assert at["across blocks.2"] < at["wait scatter blocks.1"]
    for earlier, later in (("blocks.2", "blocks.1"), ("blocks.1", "blocks.0"), ("blocks.0", "root")):
        assert at[f"wait scatter {earlier}"] < at[f"scatter {later}"]
    assert log[-1] == "wait across root"
