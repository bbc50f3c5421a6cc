"""The audit of updates: loops that are wrong in silence, each named by parameter within 20 steps, and loops that are right, of
which nothing is said."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fsdp_lab import engine
from fsdp_lab.base.audit import Audit, AuditKind, AuditLog, Finding
from fsdp_lab.rank.watch import loop as watch_module
from fsdp_lab.rank.watch.loop import Watch, plain_host
from tests.pool import Place, Pool
from tests.rank.test_session import session

STEPS = 20
BF16 = torch.bfloat16


@dataclass
class Loop:
    """`step(i)` makes the i-th step, update included."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[int], None]


def messages_of(loop: Loop, steps: int = STEPS, host: Any = None, told: Any = None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [] if told is None else told
    watch = Watch(loop.model, loop.optimizers, host or plain_host(loop.model, messages.append), flops=False)
    with mock.patch.object(watch_module, "LEDGER_STEP", steps), watch:
        for i in range(steps):
            with watch.step():
                loop.step(i)
    assert messages[-1]["end"]["notes"] == [], "the audit is still there"
    return messages


def findings(by_rank: Iterable[list[dict[str, Any]]]) -> list[Finding]:
    told = list(by_rank)
    log = AuditLog(len(told))
    for rank, messages in enumerate(told):
        for message in messages:
            log.take(rank, message.get("audit", {}))
    return log.findings


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return model()


def mlp(width: int = 16, norm: bool = True) -> nn.Module:
    return seeded(lambda: nn.Sequential(
        nn.Linear(8, width), nn.Tanh(), nn.LayerNorm(width) if norm else nn.Identity(), nn.Linear(width, 8)
    ))  # fmt: skip


def batch(i: int, width: int = 8) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(i))


def fit(model: nn.Module, *optimizers: torch.optim.Optimizer, loss: Callable[[int], Tensor] | None = None,
        keep: bool = False) -> Loop:  # fmt: skip
    """The plain loop. `loss`: of the i-th batch. `keep`: gradients are set to zero, not to None."""

    def mean(i: int) -> Tensor:
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        return (model(batch(i).to(dtype)) - 1).square().float().mean()

    def step(i: int) -> None:
        (loss or mean)(i).backward()
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=not keep)

    return Loop(model, list(optimizers), step)


def adamw(parameters: Any, lr: float = 1e-2, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters.parameters() if isinstance(parameters, nn.Module) else parameters, lr, **options)


class LoRA(nn.Module):
    """A frozen layer with an adapter, which is cut off from what follows if `cut`."""

    def __init__(self, width: int = 8, cut: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.zeros(width, 2))
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        adapted = x @ self.lora_A.T @ self.lora_B.T
        return self.base(x) + (adapted.detach() if self.cut else adapted)


# -- wrong in silence -------------------------------------------------------------------------------------------------


def bf16_masters() -> Loop:
    """An upcast that did nothing."""
    model = mlp().to(BF16)
    return fit(model, adamw(model, 1e-5))


def norms_that_stay_one() -> Loop:
    model = mlp().to(BF16)
    with torch.no_grad():
        model[0].weight *= 0.5
    return fit(model, adamw(model, 1.5e-3, weight_decay=0.1))


def fp16_without_masters() -> Loop:
    model = mlp(norm=False).half()
    return fit(model, torch.optim.SGD(model.parameters(), 1e-4))


def adapters_of_one_layer_only() -> Loop:
    model = seeded(lambda: nn.Sequential(*[LoRA(cut=i > 0) for i in range(96)]))
    return fit(model, adamw([p for p in model.parameters() if p.requires_grad], 1e-3))


def norms_and_embeddings_beside_adapters() -> Loop:
    model = seeded(lambda: nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), LoRA(), nn.Linear(8, 8)))
    model[3].requires_grad_(False)
    return fit(model, adamw(filter(lambda p: p.requires_grad, model.parameters())),
               loss=lambda i: model(torch.arange(4) + i % 6).square().mean())  # fmt: skip


class Quantised(nn.Module):
    """`forward` rewrites what is stored, if `harmed`."""

    def __init__(self, harmed: bool) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randint(0, 255, (8, 8), dtype=torch.uint8), requires_grad=False)
        self.lora_A, self.harmed = nn.Parameter(torch.randn(8, 8)), harmed

    def forward(self, x: Tensor) -> Tensor:
        if self.harmed:
            self.packed.data = self.packed.data.roll(1)
        return x @ (self.packed.float() / 255) + x @ self.lora_A


def quantised_weights_that_change() -> Loop:
    model = seeded(lambda: Quantised(harmed=True))
    return fit(model, adamw([model.lora_A]))


def a_layer_in_no_optimizer() -> Loop:
    model = mlp()
    return fit(model, adamw(model[0]))


def a_parameter_in_two_optimizers() -> Loop:
    model = mlp()
    return fit(model, adamw(model), torch.optim.SGD([model[3].weight], 0.1))


def a_parameter_twice_in_a_group() -> Loop:
    model = mlp()
    with pytest.warns(UserWarning, match="duplicate"):
        return fit(model, torch.optim.SGD([*model.parameters(), model[3].weight], 0.1))


def frozen_with_momentum() -> Loop:
    model = mlp()
    loop = fit(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), keep=True)
    loop.step(0)
    model[0].requires_grad_(False)
    return loop


def a_gate_that_is_shut() -> Loop:
    model = mlp()
    return fit(model, adamw(model), loss=lambda i: model[3](0 * model[2](model[0](batch(i)))).square().mean())


def an_encoder_under_no_grad() -> Loop:
    model = mlp()

    def loss(i: int) -> Tensor:
        return model[3](model[2](model[0](batch(i)).detach())).square().mean()

    return fit(model, adamw(model), loss=loss)


def a_scaler_that_skips_all() -> Loop:
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=2.0**100)
    return scaled(model, adamw(model), scaler, 2.0**50)


class OnlyMatrices(torch.optim.SGD):
    """Leaves out what it is not made for."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.dim() == 2:
                    p -= 0.1 * p.grad


def an_optimizer_that_leaves_vectors_out() -> Loop:
    model = mlp()
    return fit(model, OnlyMatrices(model.parameters(), 0.1))


LOST, NONE = AuditKind.LOW_PRECISION, AuditKind.NO_GRADIENT
WRONG: dict[Callable[[], Loop], tuple[AuditKind, set[str]]] = {
    bf16_masters: (LOST, {"0.weight", "2.weight", "3.weight", "0.bias", "3.bias"}),
    norms_that_stay_one: (LOST, {"2.weight"}),
    fp16_without_masters: (LOST, {"0.weight", "3.weight", "0.bias", "3.bias"}),
    adapters_of_one_layer_only: (NONE, {f"{i}.lora_{x}" for i in range(1, 96) for x in "AB"}),
    norms_and_embeddings_beside_adapters: (AuditKind.BESIDE_ADAPTERS, {"0.weight", "1.weight", "1.bias"}),
    quantised_weights_that_change: (AuditKind.FROZEN_MOVED, {"packed"}),
    a_layer_in_no_optimizer: (AuditKind.NOT_IN_OPTIMIZER, {"2.weight", "2.bias", "3.weight", "3.bias"}),
    a_parameter_in_two_optimizers: (AuditKind.TWICE, {"3.weight"}),
    a_parameter_twice_in_a_group: (AuditKind.TWICE, {"3.weight"}),
    frozen_with_momentum: (AuditKind.FROZEN_MOVED, {"0.weight", "0.bias"}),
    a_gate_that_is_shut: (AuditKind.ZERO_GRADIENT, {"0.weight", "2.weight", "3.weight"}),
    an_encoder_under_no_grad: (NONE, {"0.weight", "0.bias"}),
    a_scaler_that_skips_all: (AuditKind.SKIPPED, {""}),
    an_optimizer_that_leaves_vectors_out: (AuditKind.STUCK, {"0.bias", "2.weight", "2.bias", "3.bias"}),
}


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_what_is_wrong_in_silence_is_named_by_parameter(make: Callable[[], Loop]) -> None:
    kind, names = WRONG[make]
    found = findings([messages_of(make())])
    assert {(f.kind, f.parameter) for f in found} == {(kind, name) for name in names}
    assert all(f.step < STEPS and f.rank == 0 for f in found)


# -- right ------------------------------------------------------------------------------------------------------------


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, factor: float) -> Loop:
    def step(i: int) -> None:
        scaler.scale(factor * model(batch(i)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Loop(model, [optimizer], step)


def by(kind: Any, lr: float = 1e-2, **options: Any) -> Callable[[], Loop]:
    def make() -> Loop:
        model = mlp()
        return fit(model, kind(model.parameters(), lr=lr, **options))

    return make


def bf16_that_moves() -> Loop:
    model = mlp().to(BF16)
    return fit(model, torch.optim.AdamW(model.parameters(), 2e-2))


def warm_up_in_bf16() -> Loop:
    """What is lost while the rate rises may come yet; its first rate is 0."""
    model = mlp().to(BF16)
    one = adamw(model, 1e-2)
    loop, schedule = fit(model, one), torch.optim.lr_scheduler.LambdaLR(one, lambda i: i / 2000)
    return Loop(model, [one], lambda i: (loop.step(i), schedule.step())[0])


def schedule_to_zero() -> Loop:
    model = mlp()
    one = adamw(model)
    loop, schedule = fit(model, one), torch.optim.lr_scheduler.CosineAnnealingLR(one, 8)
    return Loop(model, [one], lambda i: (loop.step(i), schedule.step())[0])


def an_update_every_fourth_step() -> Loop:
    model = mlp()
    one = adamw(model)

    def step(i: int) -> None:
        model(batch(i)).square().mean().backward()
        if i % 4 == 3:
            one.step()
            one.zero_grad()

    return Loop(model, [one], step)


def embedding(sparse: bool) -> Callable[[], Loop]:
    """Most rows are in no batch."""

    def make() -> Loop:
        model = seeded(lambda: nn.Embedding(500, 4, sparse=sparse))
        one = torch.optim.SGD(model.parameters(), 0.1)
        return fit(model, one, loss=lambda i: model(torch.tensor([i, i + 1])).square().mean())

    return make


def experts_that_are_never_used() -> Loop:
    model = seeded(lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
    return fit(model, adamw(model), loss=lambda i: model[i % 2](batch(i)).square().mean())


def a_head_for_each_task() -> Loop:
    model = seeded(lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(6)))
    return fit(model, adamw(model), loss=lambda i: model[1 + i % 5](model[0](batch(i))).square().mean())


def frozen_layers() -> Loop:
    model = mlp()
    model[0].requires_grad_(False)
    return fit(model, adamw(model))


def unfrozen_later() -> Loop:
    model = mlp()
    model[0].requires_grad_(False)
    one = adamw([p for p in model.parameters() if p.requires_grad])
    loop = fit(model, one)

    def step(i: int) -> None:
        if i == 6:
            one.add_param_group({"params": list(model[0].requires_grad_().parameters())})
        loop.step(i)

    return Loop(model, [one], step)


def tied_weights() -> Loop:
    model = seeded(lambda: nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)))
    model[1].weight = model[0].weight
    one = adamw(model)
    return fit(model, one, loss=lambda i: model(torch.tensor([i % 7, 3])).square().mean())


def adapters() -> Loop:
    model = seeded(lambda: nn.Sequential(nn.LayerNorm(8).requires_grad_(False), LoRA(), LoRA(), nn.Linear(8, 2)))
    return fit(model, adamw(p for p in model.parameters() if p.requires_grad))


def quantised_weights() -> Loop:
    model = seeded(lambda: Quantised(harmed=False))
    return fit(model, adamw([model.lora_A]))


def zero_gates() -> Loop:
    """Branches that begin shut, and open."""
    model = mlp()
    gate = nn.Parameter(torch.zeros(1))
    model.register_parameter("gate", gate)
    return fit(model, adamw(model), loss=lambda i: (batch(i)[:, :8] + gate * model[3](model[2](model[0](batch(i))))).square().mean())


def adversaries() -> Loop:
    """Each is frozen while the other one is trained."""
    model = seeded(lambda: nn.ModuleDict({"g": nn.Linear(8, 8), "d": nn.Linear(8, 1)}))
    ones = [adamw(model["g"]), torch.optim.Adam(model["d"].parameters(), 1e-2)]

    def step(i: int) -> None:
        for name, one in zip("gd", ones, strict=True):
            for other in "gd":
                model[other].requires_grad_(other == name)
            (model["d"](model["g"](batch(i))) - float(name == "g")).square().mean().backward()
            one.step()
            one.zero_grad()

    return Loop(model, list(ones), step)


def teacher(moves_in_forward: bool) -> Callable[[], Loop]:
    """A mean of the weights, made by hand."""

    def make() -> Loop:
        model = mlp()
        model.teacher = copy.deepcopy(model).requires_grad_(moves_in_forward)
        students = [p for n, p in model.named_parameters() if not n.startswith("teacher")]

        def mean(*_: Any) -> None:
            with torch.no_grad():
                for t, s in zip(model.teacher.parameters(), students, strict=True):
                    t.lerp_(s, 0.1)

        def loss(i: int) -> Tensor:
            if moves_in_forward:
                mean()
            return (model[3](model[2](model[0](batch(i)))) - 1).square().mean()

        one = adamw(students)
        if not moves_in_forward:
            one.register_step_post_hook(mean)
        return fit(model, one, loss=loss)

    return make


def weight_norm() -> Loop:
    model = seeded(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)))
    return fit(model, adamw(model))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.score = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        nn.init.constant_(self.k.bias, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return self.score(mixed[0]) - self.score(mixed[1])  # whose bias cancels


def biases_without_a_gradient(dtype: torch.dtype) -> Callable[[], Loop]:
    """By symmetry: that of the keys is rounding, that of the score is zero."""

    def make() -> Loop:
        model = seeded(Attention).to(dtype)
        one = torch.optim.SGD(model.parameters(), 0.5)
        return fit(model, one, loss=lambda i: (model(batch(i).to(dtype)) - 3).square().float().mean())

    return make


def dropout_and_recomputation() -> Loop:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 8)))

    def loss(i: int) -> Tensor:
        return (checkpoint(model, batch(i).requires_grad_(), use_reentrant=bool(i % 2)) - 1).square().mean()

    return fit(model, adamw(model), loss=loss)


def compiled() -> Loop:
    model = mlp()
    model.compile(backend="eager")
    return fit(model, adamw(model))


def an_optimizer_in_the_backward() -> Loop:
    model = mlp()
    ones = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(p: Tensor) -> None:
        ones[p].step()
        ones[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return Loop(model, list(ones.values()), lambda i: model(batch(i)).square().mean().backward())


def a_scaler(fused: bool) -> Callable[[], Loop]:
    """Which skips some updates at first."""

    def make() -> Loop:
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**91, growth_interval=4)
        return scaled(model, torch.optim.Adam(model.parameters(), 1e-2, fused=fused), scaler, 2.0**40)

    return make


def closures() -> Loop:
    model = mlp()
    one = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def loss() -> Tensor:
        one.zero_grad()
        value = model(batch(0)).square().mean()
        value.backward()
        return value

    return Loop(model, [one], lambda i: one.step(loss))


def a_parameter_that_the_loop_moves() -> Loop:
    model = mlp()
    loop = fit(model, adamw(model[3]))

    def step(i: int) -> None:
        loop.step(i)
        with torch.no_grad():
            for p in [*model[0].parameters(), *model[2].parameters()]:
                p -= 0.1 * p.grad
                p.grad = None

    return Loop(model, loop.optimizers, step)


class StochasticSGD(torch.optim.SGD):
    """Rounds an update that bf16 loses up or down by chance."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                new = p.float() - self.param_groups[0]["lr"] * p.grad.float()
                noise = torch.randint(0, 1 << 16, new.shape, dtype=torch.int32)
                p.copy_(((new.view(torch.int32) + noise) & -65536).view(torch.float32))


def stochastic_rounding() -> Loop:
    model = mlp(width=64).to(BF16)
    return fit(model, StochasticSGD(model.parameters(), 1e-3))


def convolution_in_channels_last() -> Loop:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32))).to(memory_format=torch.channels_last)
    data = torch.randn(2, 8, 5, 5)
    return fit(model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda i: (model(data) - data.mean()).pow(4).mean())


RIGHT: dict[str, Callable[[], Loop]] = {
    "adamw": by(torch.optim.AdamW), "fused": by(torch.optim.AdamW, fused=True), "foreach": by(torch.optim.Adam, foreach=True),
    "sgd": by(torch.optim.SGD), "momentum": by(torch.optim.SGD, momentum=0.9, nesterov=True), "adagrad": by(torch.optim.Adagrad),
    "rmsprop": by(torch.optim.RMSprop), "adafactor": by(torch.optim.Adafactor), "rate is a tensor":
        by(torch.optim.AdamW, lr=torch.tensor(1e-2)), "tiny rate": by(torch.optim.AdamW, lr=1e-7),
    "embedding": embedding(sparse=False), "sparse embedding": embedding(sparse=True),
    "teacher after": teacher(False), "teacher in forward": teacher(True),
    "biases": biases_without_a_gradient(torch.float32), "biases in bf16": biases_without_a_gradient(BF16),
    "scaler": a_scaler(False), "fused scaler": a_scaler(True),
} | {make.__name__: make for make in (
    bf16_that_moves, warm_up_in_bf16, schedule_to_zero, an_update_every_fourth_step, experts_that_are_never_used,
    a_head_for_each_task, frozen_layers, unfrozen_later, tied_weights, adapters, quantised_weights, zero_gates, adversaries,
    weight_norm, dropout_and_recomputation, compiled, an_optimizer_in_the_backward, closures, stochastic_rounding,
    a_parameter_that_the_loop_moves, convolution_in_channels_last,
)}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_of_what_is_right_nothing_is_said(name: str) -> None:
    assert findings([messages_of(RIGHT[name](), 40)]) == []


# -- on several ranks -------------------------------------------------------------------------------------------------


def wrapped(how: str, model: nn.Module, **options: Any) -> nn.Module:
    """Each layer, and the whole."""
    if how == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    kind, _, variant = how.partition(" ")
    hybrid = variant == "hybrid"
    if kind == "fsdp1":
        mesh = init_device_mesh("cpu", (2, 2)) if hybrid else None
        strategy = {"whole": ShardingStrategy.NO_SHARD, "hybrid": ShardingStrategy.HYBRID_SHARD}
        return FullyShardedDataParallel(
            model, use_orig_params=variant != "flat", device_id=torch.device("cpu"), device_mesh=mesh,
            sharding_strategy=strategy.get(variant, ShardingStrategy.FULL_SHARD),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )  # fmt: skip
    if hybrid:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard = engine.fully_shard if kind == "lab" else fully_shard
    for layer in model:
        if list(layer.parameters()):
            shard(layer, **options)
    shard(model, **options)
    return model


def own_data(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Loop:
    """Each rank has batches of its own."""
    return fit(model, *optimizers, loss=lambda i: (model(batch(2 * i + dist.get_rank())) - 1).square().mean())


def sharded(how: str) -> Callable[[], Loop]:
    def make() -> Loop:
        model = wrapped(how, mlp())
        regions = how == "lab regions"
        return own_data(model, adamw(engine.sharded_parameters(model) if regions else model.parameters()))

    return make


def bf16_shards(how: str) -> Callable[[], Loop]:
    def make() -> Loop:
        model = wrapped(how, mlp().to(BF16))
        return fit(model, adamw(model, 1e-5))

    return make


def adapters_beside_shards(how: str) -> Callable[[], Loop]:
    def make() -> Loop:
        model = seeded(lambda: nn.Sequential(LoRA(), LoRA()))
        trained = [p for p in model.parameters() if p.requires_grad]
        return own_data(wrapped(how, model, ignored_params=set(trained)), adamw(trained))

    return make


def experts_of_each_rank() -> Loop:
    """Not sharded, and other ones on each rank from the beginning."""
    model = mlp()
    nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(dist.get_rank()))
    nn.init.constant_(model[0].bias, dist.get_rank())
    own = set(model[0].parameters())
    fully_shard(model, ignored_params=own)
    return own_data(model, adamw(model))


def plain(averaged: bool) -> Callable[[], Loop]:
    def make() -> Loop:
        model = mlp()
        one = adamw(model)
        if averaged:
            one.register_step_pre_hook(lambda *_: [dist.all_reduce(p.grad) for p in model.parameters()] and None)
        return own_data(model, one)

    return make


def never_synchronised() -> Loop:
    model = wrapped("ddp", mlp())
    loop = own_data(model, adamw(model))

    def step(i: int) -> None:
        with model.no_sync():
            loop.step(i)

    return Loop(model, loop.optimizers, step)


def never_reduced_between_replicas() -> Loop:
    model = wrapped("fsdp2 hybrid", mlp())
    model.set_requires_all_reduce(False)
    return own_data(model, adamw(model))


def rows(shut: bool) -> Callable[[], Loop]:
    """Of an embedding, all in the first rank's shard. Its gradient is zero everywhere if `shut`."""

    def make() -> Loop:
        model = seeded(lambda: nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)))
        model = wrapped("fsdp2", model)
        return fit(model, adamw(model), loss=lambda i: (
            model[1]((0 if shut else 1) * model[0](torch.tensor([i % 3]))) - 1).square().mean())  # fmt: skip

    return make


EVERY = {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"}
DIFFER, LORA = AuditKind.REPLICAS_DIFFER, {f"{i}.lora_{x}" for i in range(2) for x in "AB"}
RANKED: dict[str, tuple[Callable[[], Loop], AuditKind | None, set[str]]] = {
    "adapters beside FSDP2": (adapters_beside_shards("fsdp2"), DIFFER, LORA),
    "adapters beside the engine": (adapters_beside_shards("lab"), DIFFER, LORA),
    "no wrapper": (plain(averaged=False), DIFFER, EVERY),
    "no_sync for ever": (never_synchronised, DIFFER, EVERY),
    "a shut gate": (rows(shut=True), AuditKind.ZERO_GRADIENT, {"0.weight", "1.weight"}),
    **{f"bf16 {how}": (bf16_shards(how), LOST, EVERY - {"2.bias"}) for how in ("fsdp1", "fsdp1 flat", "fsdp2", "lab")},
    **{how: (sharded(how), None, set()) for how in
       ("ddp", "fsdp1", "fsdp1 flat", "fsdp1 whole", "fsdp2", "lab", "lab regions")},
    "averaged by hand": (plain(averaged=True), None, set()),
    "experts": (experts_of_each_rank, None, set()),
    "rows of one rank": (rows(shut=False), None, set()),
}  # fmt: skip
HYBRID: dict[str, tuple[Callable[[], Loop], AuditKind | None, set[str]]] = {
    "no all-reduce": (never_reduced_between_replicas, NONE, EVERY),
    **{how: (sharded(how), None, set()) for how in ("fsdp1 hybrid", "fsdp2 hybrid", "lab hybrid")},
}


def _audited(place: Place, table: str) -> list[list[dict[str, Any]]]:
    told: list[list[dict[str, Any]]] = []
    with closing(session(place)) as s:
        for make, kind, _ in globals()[table].values():
            told.append([])
            messages_of(make(), STEPS if kind else 2 * STEPS, s.loop_host(told[-1].append), told[-1])
    return told


@pytest.mark.parametrize(("table", "ranks"), [("RANKED", 2), pytest.param("HYBRID", 4, marks=pytest.mark.slow)])
def test_ranks_are_compared_and_shards_are_looked_at(pool: Pool, table: str, ranks: int) -> None:
    by_rank = pool.run(_audited, ranks, table, reduction=None)
    for (name, (_, kind, names)), told in zip(globals()[table].items(), zip(*by_rank, strict=True), strict=True):
        found = findings(told)
        assert {(f.kind, f.parameter) for f in found} == {(kind, one) for one in names}, (name, Audit(found, name))
        assert all(f.step < STEPS for f in found)
