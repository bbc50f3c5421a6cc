"""Bytes, as numbers: at every phase of real steps, what storages hold is what the formulas of ZeRO and FSDP say."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, distributed as dist, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from fsdp_lab.engine import (
    MemoryBreakdown,
    broadcast_full_state,
    full_state,
    fully_shard,
    load_full_state,
    load_ranges,
    memory_stats,
    no_sync,
    parameter_groups,
    runtime_of,
    shards_of,
    units_of,
)
from fsdp_lab.engine.schedule import Direction, Phase
from fsdp_lab.engine.unit import UnitState
from fsdp_lab.rank.slow_motion import PhaseStepper
from fsdp_lab.spec.spec import Strategy
from tests.covering import tiered
from tests.engine.sizes import Buffer, Expected, Setting
from tests.engine.toys import options_of
from tests.pool import Place, Pool

BLOCKS = 5


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, inner, bias=False), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.relu(self.inner(self.norm(x))))


class Model(nn.Module):
    """A root with parameters at both ends, around blocks; no size is a multiple of another."""

    def __init__(self, width: int = 13, inner: int = 29) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def decays(name: str, p: Tensor) -> str:
    return "decays" if p.dim() >= 2 else "does not"


def sharded(model: Model, strategy: Strategy) -> Model:
    options: dict[str, Any] = {**options_of(strategy), "group_of": decays}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)  # type: ignore[no-any-return]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": ps} for ps in parameter_groups(model).values()])


def batch(rank: int) -> Tensor:
    return torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(rank))


# -- every phase of a step -------------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {  # world size, strategy
    "full_shard": (2, {}),
    "full_shard of 3": (3, {}),
    "full_shard by itself": (1, {}),
    "shard_grad_op": (2, {"sharding": "shard_grad_op"}),
    "zero1": (2, {"sharding": "zero1"}),
    "no_shard": (2, {"sharding": "no_shard"}),
    "hybrid_shard": (4, {"sharding": "hybrid_shard", "shard_size": 2}),
    "hybrid_shard_zero2": (4, {"sharding": "hybrid_shard_zero2", "shard_size": 2}),
    "resharded to 2": (4, {"reshard_size": 2}),
    "bf16": (2, {"precision": "bf16"}),
    "bf16, pure": (2, {"precision": "bf16-pure"}),
    "bf16, no_shard": (2, {"precision": "bf16", "sharding": "no_shard"}),
    "bf16, zero1": (2, {"precision": "bf16", "sharding": "zero1"}),
    "bf16, hybrid_shard": (4, {"precision": "bf16", "sharding": "hybrid_shard", "shard_size": 2}),
    "offload of the optimizer": (2, {"offload": "optimizer"}),
    "offload of all": (2, {"offload": "all"}),
    "bf16, offload of all": (2, {"offload": "all", "precision": "bf16"}),
    "prefetch": (2, {"forward_prefetch": 2, "backward_prefetch": 2}),
    "prefetch after": (2, {"backward_prefetch_point": "after"}),
    "no prefetch": (2, {"forward_prefetch": 0, "backward_prefetch": 0}),
    "limit 1": (2, {"limit_all_gathers": 1, "forward_prefetch": 3, "backward_prefetch": 3}),
    "two reductions": (2, {"limit_reductions": 2}),
    "bf16, hybrid_shard, three reductions": (
        4,
        {"precision": "bf16", "sharding": "hybrid_shard", "shard_size": 2, "limit_reductions": 3},
    ),
    "limit 3": (2, {"limit_all_gathers": 3, "forward_prefetch": 3, "backward_prefetch": 3}),
}


def setting(place: Place, s: Strategy) -> Setting:
    factor = 1 if s.is_replicated else s.shard_size if s.is_hybrid else place.world_size
    assert factor is not None
    sizes = {"fp32": 4, "bf16": 2}
    few = s.reshard_size or 0
    return Setting(
        factor=factor,
        rank=place.rank % factor,
        replicas=place.world_size // factor,
        gathered=sizes[s.dtypes.param],
        reduced=sizes[s.dtypes.reduce],
        is_zero1=s.sharding == "zero1",
        offload=s.offload,
        few=few,
        few_rank=place.rank % few if few else 0,
        most_reducing=s.limit_reductions,
    )


def expected(place: Place, strategy: Strategy) -> Expected:
    plain = Model()
    at = setting(place, strategy)
    buffers = {}
    for unit in ["", *(f"blocks.{i}" for i in range(BLOCKS))]:
        inside = [(name, p) for name, p in plain.named_parameters() if name.startswith("blocks.") == bool(unit)]
        own = [(decays(name, p), tuple(p.shape)) for name, p in inside if name.startswith(unit)]
        late = 0 if unit else plain.embedding.weight.numel()
        buffers[unit] = Buffer.of(own, at.factor, at.gathered, late=late)
    return Expected(buffers, at)


class Auditor:
    """Compares at each phase, and remembers the most that was there."""

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer, wanted: Expected) -> None:
        self.model, self.optimizer, self.wanted = model, optimizer, wanted
        self.phases = 0
        self.most_units = self.most_filling = self.most_reducing = self.most_gathered_bytes = 0
        runtime_of(model).watch = self.see

    def see(self, phase: Phase, unit: str, direction: Direction) -> None:
        self.wanted.before(phase, unit, direction)
        self.check(f"before {phase.value} {unit or 'root'} {direction.value}")
        self.wanted.after(phase, unit, direction)
        self.phases += 1

    def check(self, where: str) -> None:
        got, wanted = memory_stats(self.model, self.optimizer), self.wanted.account
        assert got == wanted, f"{where}: {got}, not {wanted}"
        alive = [u for u in units_of(self.model) if u.state in (UnitState.GATHERING, UnitState.UNSHARDED)]
        assert {u.name for u in alive} == self.wanted.alive, where
        filling = [u for u in units_of(self.model) if u.has_gradient]
        assert {u.name for u in filling} == self.wanted.filling, where
        whole = {id(r.target) for r in runtime_of(self.model).reducing if r.unsharded is not None}
        assert len(whole) <= self.wanted.at.most_reducing, where  # one buffer in each unit here
        self.most_reducing = max(self.most_reducing, len(whole))
        self.most_units = max(self.most_units, len(alive))
        self.most_filling = max(self.most_filling, len(filling))
        self.most_gathered_bytes = max(self.most_gathered_bytes, got.unsharded_bytes)


def audited(place: Place, name: str) -> tuple[int, int, int, int]:
    """Two steps: one of two micro-batches, one with a forward without gradients in it."""
    strategy = Strategy(**SETTINGS[name][1])
    torch.manual_seed(0)
    model = sharded(Model(), strategy)
    optimizer, wanted = adamw(model), expected(place, strategy)
    auditor = Auditor(model, optimizer, wanted)
    auditor.check("before everything")

    def learn(where: str) -> None:
        model(batch(place.rank)).backward()
        wanted.ended()
        auditor.check(f"after {where}")

    def update() -> None:
        optimizer.step()
        wanted.stepped()
        auditor.check("after the update")
        optimizer.zero_grad()
        wanted.zeroed()
        auditor.check("at the end")

    learn("the first micro-batch")
    learn("the second one, added to the first")
    update()
    wanted.with_backward = False
    with torch.no_grad():
        model(batch(place.rank))
    wanted.ended()
    auditor.check("without gradients")
    wanted.with_backward = True
    learn("the second step")
    update()
    assert auditor.most_reducing == strategy.limit_reductions
    return auditor.phases, auditor.most_units, auditor.most_filling, auditor.most_gathered_bytes


@pytest.mark.parametrize("name", tiered(SETTINGS, lambda name: list(SETTINGS).index(name) % 3 == 0))
def test_each_class_is_what_its_formula_says_at_every_phase(pool: Pool, name: str) -> None:
    world_size, changes = SETTINGS[name]
    results = pool.run(audited, world_size, name)
    assert len(set(results)) == 1  # no rank holds more than another, but for its share
    phases, most_units, most_filling, _ = results[0]
    assert phases > 100
    if "zero2" not in name and changes.get("sharding") not in ("shard_grad_op", "zero1", "no_shard"):
        limit = changes.get("limit_all_gathers", 2)
        least = 2 if "no prefetch" in name or "after" in name else limit + 1
        assert least <= most_units <= limit + 1
    assert most_filling <= 2  # the root, and the block inside it


def shares(place: Place, changes: dict[str, Any]) -> tuple[MemoryBreakdown, MemoryBreakdown, int]:
    """With gradients and the optimizer's state, then without."""
    strategy = Strategy(**changes)
    model = sharded(Model(), strategy)
    optimizer = adamw(model)
    model(batch(place.rank)).backward()
    optimizer.step()
    full = memory_stats(model, optimizer)
    optimizer.zero_grad()
    return full, memory_stats(model, optimizer), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("world_size", tiered([1, 2, 3, 4], lambda world_size: world_size == 3))
def test_shares_of_all_ranks_add_up_to_psi(pool: Pool, world_size: int) -> None:
    """s Psi / F, exactly, over a group: parameters, gradients, and AdamW's state twice."""
    for sharding in ("full_shard", "shard_grad_op"):
        results = pool.run(shares, world_size, {"sharding": sharding})
        psi = results[0][2]
        assert sum(full.parameters_bytes for full, _, _ in results) == 4 * psi
        assert sum(full.gradients_bytes for full, _, _ in results) == 4 * psi
        assert sum(full.optimizer_bytes for full, _, _ in results) == 2 * 4 * psi
        for full, rest, _ in results:
            assert rest.gradients_bytes == rest.unsharded_bytes == rest.unsharded_gradients_bytes == 0
            held = rest.parameters_bytes + rest.optimizer_bytes + rest.padding_bytes + rest.counters_bytes
            assert rest.total_bytes == held < full.total_bytes


def test_zero_stages_hold_what_zero_says(pool: Pool) -> None:
    """After a backward, on 2 ranks in fp32 (ZeRO, section 5). ZeRO-1 here has its master shards beside what it gathers."""
    psi = pool.run(shares, 1, {})[0][2]
    for sharding, gradients, unsharded in (
        ("full_shard", 4 * psi, 0),
        ("shard_grad_op", 4 * psi, 0),
        ("zero1", 2 * 4 * psi, 2 * 4 * psi),
        ("no_shard", 2 * 4 * psi, 0),
    ):
        results = [full for full, _, _ in pool.run(shares, 2, {"sharding": sharding})]
        assert sum(a.gradients_bytes for a in results) == gradients
        assert sum(a.unsharded_bytes for a in results) == unsharded
        assert sum(a.unsharded_gradients_bytes for a in results) == 0


def without_communication(place: Place) -> tuple[list[MemoryBreakdown], int]:
    model = sharded(Model(), Strategy())
    seen = []
    for context in (no_sync(model), no_sync(model), nullcontext()):
        with context:
            model(batch(place.rank)).backward()
        seen.append(memory_stats(model))
    return seen, sum(p.numel() for p in model.parameters())


def test_without_communication_gradients_are_whole(pool: Pool) -> None:
    for (first, second, last), psi in pool.run(without_communication, 2):
        assert first == second
        assert first.unsharded_gradients_bytes == 4 * psi and first.gradients_bytes == 0
        assert last.unsharded_gradients_bytes == 0 and last.gradients_bytes == last.parameters_bytes


def looked_at_slowly(place: Place) -> tuple[int, int]:
    """The same through `PhaseStepper`, from the thread that looks on."""
    strategy = Strategy()
    model = sharded(Model(), strategy)
    optimizer, wanted = adamw(model), expected(place, strategy)
    phases = 0

    def step() -> None:
        model(batch(place.rank)).backward()

    for stop in PhaseStepper(model, step):
        wanted.before(stop.phase, stop.unit, stop.direction)
        got = memory_stats(model, optimizer)
        assert got == wanted.account, f"{stop}: {got}, not {wanted.account}"
        wanted.after(stop.phase, stop.unit, stop.direction)
        phases += 1
    return phases, memory_stats(model).unsharded_bytes


def test_slow_motion_shows_the_same_bytes(pool: Pool) -> None:
    for phases, left in pool.run(looked_at_slowly, 2):
        assert phases > 2 * 3 * BLOCKS and left == 0


# -- what the allocator says -----------------------------------------------------------------------------------------


def allocated(do: Callable[[], Any]) -> tuple[int, int]:
    """What torch's CPU allocator counted on this thread meanwhile: the bytes that stayed, and the most at once.

    Where Gloo's thread is the last to let go of a tensor, nobody counts that it was freed. So of several tries the one
    that counted least is the right one; and once one is right on all ranks, no more are needed.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        do()
    alive = peak = 0
    for event in watched.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return alive, peak


TRIES = 20


def right_on_all(is_right: bool) -> bool:
    """Collective."""
    told = torch.tensor(int(is_right))
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return bool(told)


def counted(place: Place, changes: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """What a backward leaves, a second one, and the first update: by the allocator, and by the account."""
    model = sharded(Model(), Strategy(**changes))
    optimizer = adamw(model)
    tokens = batch(place.rank)

    def backward() -> None:
        model(tokens).backward()

    def beside(do: Callable[[], Any], prepare: Callable[[], Any] | None = None, tries: int = TRIES) -> tuple[int, int]:
        found = []
        for _ in range(tries):
            if prepare is not None:
                prepare()
            before = memory_stats(model, optimizer).total_bytes
            stayed, _ = allocated(do)
            found.append((stayed, memory_stats(model, optimizer).total_bytes - before))
            if right_on_all(found[-1][0] == found[-1][1]):
                break
        assert len({by_account for _, by_account in found}) == 1
        return min(found)

    backward()  # what ZeRO-1 gathers once
    return {
        "a backward": beside(backward, optimizer.zero_grad),
        "one more": beside(backward),
        "an update": beside(optimizer.step, tries=1),
    }


@pytest.mark.parametrize("changes", [{}, {"sharding": "zero1"}, {"precision": "bf16"}, {"offload": "all"}], ids=str)
def test_the_allocator_counts_what_the_account_says(pool: Pool, changes: dict[str, Any]) -> None:
    """Nothing that a step leaves behind is missing from the account, to the byte."""
    for found in pool.run(counted, 2, changes):
        for what, (by_allocator, by_account) in found.items():
            assert by_allocator == by_account, what
        assert found["a backward"][0] > found["one more"][0] == 0
        assert found["an update"][0] > 0


# -- deferred initialisation -----------------------------------------------------------------------------------------

SLACK_BYTES = 16 * 1024  # names that are compared between ranks, and single elements


def made_on_meta(place: Place) -> dict[str, int]:
    """The most that is allocated at once while a model is built, and while it is filled, each way; with what it holds."""
    with torch.device("meta"):
        model = Model(97, 389)
    found = {"psi": 4 * sum(p.numel() for p in model.parameters())}
    found["largest parameter"] = 4 * max(p.numel() for p in model.parameters())
    _, found["building"] = allocated(lambda: sharded(model, Strategy()))
    found["largest unit"] = max(4 * flat.layout.numel for unit in units_of(model) for flat in unit.flats)
    found["shards"] = sum(flat.master.nbytes for unit in units_of(model) for flat in unit.flats)
    values = {name: torch.randn(p.shape) for name, p in model.named_parameters()}

    def check() -> None:
        with torch.no_grad():
            for s in shards_of(model):
                assert torch.equal(s.local, values[s.name].view(-1)[s.start : s.stop])
                s.local.zero_()

    def most(do: Callable[[], Any], allowed: int, check: Callable[[], Any] = lambda: None) -> int:
        peaks = []
        for _ in range(TRIES):
            peaks.append(allocated(do)[1])
            check()
            if right_on_all(peaks[-1] <= allowed):
                break
        return min(peaks)

    torch.manual_seed(0)
    for name in values:
        values[name] = torch.randn(values[name].shape)  # the same on all ranks
    one = found["largest parameter"] + SLACK_BYTES
    two = one + found["largest parameter"]
    found["load_full_state"] = most(lambda: load_full_state(model, lambda name: values[name].clone()), one, check)
    found["load_ranges"] = most(
        lambda: load_ranges(model, lambda name, i, j: values[name].view(-1)[i:j].clone()), one, check
    )
    found["broadcast"] = most(lambda: broadcast_full_state(model, values if place.rank == 0 else None), two, check)
    load_full_state(model, values)
    found["full_state"] = most(lambda: [None for _ in full_state(model)], two)
    return found


def test_no_rank_ever_holds_the_whole_model(pool: Pool) -> None:
    """Built on meta: its shards and one unit's buffer at most. Filled: one parameter at a time."""
    for found in pool.run(made_on_meta, 4):
        one = found["largest parameter"]
        assert found["building"] <= found["shards"] + found["largest unit"] + SLACK_BYTES < found["psi"]
        assert found["building"] >= found["shards"]
        assert one <= found["load_full_state"] <= one + SLACK_BYTES
        assert found["load_ranges"] <= one + SLACK_BYTES
        assert one <= found["broadcast"] <= 2 * one + SLACK_BYTES < found["psi"]  # Gloo's thread may let go of one late
        assert one <= found["full_state"] <= 2 * one + SLACK_BYTES  # the caller's, until it takes the next
