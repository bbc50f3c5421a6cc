"""The audit of updates: loops that are wrong in silence, each named by parameter within 20 steps, and loops that are right,
of which nothing is said."""

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed as dist, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fsdp_lab
from fsdp_lab import engine
from fsdp_lab.base.events import AuditFinding, AuditKind
from fsdp_lab.rank.watch import loop as watch_module
from fsdp_lab.rank.watch.loop import Watch, plain_host
from fsdp_lab.runs.view import Audit
from fsdp_lab.runs.watched import AuditLog
from tests.pool import Place, Pool
from tests.rank.test_session import session

STEPS = 20
BF16 = torch.bfloat16
Messages = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Loop:
    """`step(i)` makes the i-th step, update included."""

    model: Any
    optimizers: list[optim.Optimizer]
    step: Callable[[int], object]


Make = Callable[[], Loop]


def watched(loop: Loop, steps: int, host: Any = None, messages: Messages | None = None) -> Messages:
    told: Messages = [] if messages is None else messages
    watch = Watch(loop.model, loop.optimizers, host or plain_host(loop.model, told.append), flops=False, copies=True)
    with mock.patch.object(watch_module, "LEDGER_STEP", steps), watch:
        for i in range(steps):
            with watch.step():
                loop.step(i)
    assert told[-1]["end"]["notes"] == [], told[-1]["end"]["notes"]
    return told


def findings(by_rank: list[Messages]) -> list[AuditFinding]:
    log = AuditLog(len(by_rank))
    for rank, messages in enumerate(by_rank):
        for message in messages:
            log.take(rank, message.get("audit", {}))
    return log.findings


def seeded(*layers: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*[layer() for layer in layers])


def linear(width: int = 8, out: int = 8) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, out)


def mlp(width: int = 16) -> Any:
    return seeded(linear(out=width), nn.Tanh, lambda: nn.LayerNorm(width), linear(width))


def batch(i: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).to(dtype)


def adamw(parameters: Any, lr: float = 1e-2, **options: Any) -> optim.AdamW:
    return optim.AdamW(parameters.parameters() if isinstance(parameters, nn.Module) else parameters, lr, **options)


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> optim.SGD:
    return optim.SGD(model.parameters(), lr, **options)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def fit(model: Any, *optimizers: optim.Optimizer, output: Callable[[int], Tensor] | None = None, keep: bool = False,
        then: Callable[[], object] = lambda: None, before: Callable[[int], object] = lambda i: None) -> Loop:  # fmt: skip
    """The plain loop. `output`: of the model, for the i-th batch. `keep`: gradients are set to zero, not to None."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())

    def step(i: int) -> None:
        before(i)
        ((model(batch(i, dtype)) if output is None else output(i)) - 1).square().float().mean().backward()
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=not keep)
        then()

    return Loop(model, list(optimizers), step)


class LoRA(nn.Module):
    """A frozen layer with an adapter, which is cut off from what follows if `cut`."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.base, self.cut = nn.Linear(8, 8).requires_grad_(False), cut
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        adapted = x @ self.lora_A.T @ self.lora_B.T
        return self.base(x) + (adapted.detach() if self.cut else adapted)


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


def scaled(optimizer: Callable[[Any], optim.Optimizer], init_scale: float, factor: float) -> Loop:
    model, scaler = mlp(), torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=4)
    one = optimizer(model)

    def step(i: int) -> None:
        scaler.scale(factor * model(batch(i)).square().mean()).backward()
        scaler.step(one)
        scaler.update()
        one.zero_grad()

    return Loop(model, [one], step)


# -- wrong in silence -------------------------------------------------------------------------------------------------


def norms_that_stay_one() -> Loop:
    model = mlp().to(BF16)
    model[0].weight.data *= 0.5
    return fit(model, adamw(model, 1.5e-3, weight_decay=0.1))


def norms_and_embeddings_beside_adapters() -> Loop:
    model = seeded(lambda: nn.Embedding(10, 8), lambda: nn.LayerNorm(8), LoRA, linear())
    model[3].requires_grad_(False)
    return fit(model, adamw(trained(model)), output=lambda i: model(torch.arange(4) + i % 6))


def a_parameter_twice_in_a_group() -> Loop:
    model = mlp()
    with pytest.warns(UserWarning, match="duplicate"):
        return fit(model, optim.SGD([*model.parameters(), model[3].weight], 0.1))


def frozen_with_momentum() -> Loop:
    model = mlp()
    loop = fit(model, sgd(model, momentum=0.9), keep=True)
    loop.step(0)
    model[0].requires_grad_(False)
    return loop


class OnlyMatrices(optim.SGD):
    """Leaves out what it is not made for."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for p in self.param_groups[0]["params"] if p.dim() == 2):
            p.data -= 0.1 * p.grad


LOST, NONE, TWICE, MOVED = AuditKind.LOW_PRECISION, AuditKind.NO_GRADIENT, AuditKind.TWICE, AuditKind.FROZEN_MOVED
EVERY = {f"{i}.{name}" for i in (0, 2, 3) for name in ("weight", "bias")}
WRONG: dict[str, tuple[Make, AuditKind, set[str]]] = {
    "bf16 masters": (lambda: fit(m := mlp().to(BF16), adamw(m, 1e-5)), LOST, EVERY - {"2.bias"}),
    "norms that stay one": (norms_that_stay_one, LOST, {"2.weight"}),
    "fp16 masters": (lambda: fit(m := seeded(linear()).half(), sgd(m, 1e-4)), LOST, {"0.weight", "0.bias"}),
    "adapters of one layer of many": (
        lambda: fit(m := seeded(LoRA, *[lambda: LoRA(cut=True)] * 95), adamw(trained(m), 1e-3)),
        NONE, {f"{i}.lora_{x}" for i in range(1, 96) for x in "AB"}),
    "norms beside adapters": (
        norms_and_embeddings_beside_adapters, AuditKind.BESIDE_ADAPTERS, {"0.weight", "1.weight", "1.bias"}),
    "quantised weights": (lambda: fit(m := seeded(lambda: Quantised(True)), adamw([m[0].lora_A])), MOVED, {"0.packed"}),
    "in no optimizer": (
        lambda: fit(m := mlp(), adamw(m[0])), AuditKind.NOT_IN_OPTIMIZER, EVERY - {"0.weight", "0.bias"}),
    "in two optimizers": (lambda: fit(m := mlp(), adamw(m), sgd(m[0])), TWICE, {"0.weight", "0.bias"}),
    "twice in a group": (a_parameter_twice_in_a_group, TWICE, {"3.weight"}),
    "frozen with momentum": (frozen_with_momentum, MOVED, {"0.weight", "0.bias"}),
    "a shut gate": (
        lambda: fit(m := mlp(), adamw(m), output=lambda i: m[3](0 * m[2](m[0](batch(i))))),
        AuditKind.ZERO_GRADIENT, {"0.weight", "2.weight", "3.weight"}),
    "a detached encoder": (
        lambda: fit(m := mlp(), adamw(m), output=lambda i: m[3](m[2](m[0](batch(i)).detach()))),
        NONE, {"0.weight", "0.bias"}),
    "a scaler that skips all": (lambda: scaled(adamw, 2.0**100, 2.0**50), AuditKind.SKIPPED, {""}),
    "an optimizer of matrices": (
        lambda: fit(m := mlp(), OnlyMatrices(m.parameters(), 0.1)), AuditKind.STUCK, EVERY - {"0.weight", "3.weight"}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_silence_is_named_by_parameter(name: str) -> None:
    make, kind, names = WRONG[name]
    found = findings([watched(make(), STEPS)])
    assert {(f.kind, f.parameter) for f in found} == {(kind, one) for one in names}
    assert all(f.step < STEPS and f.rank == 0 for f in found)


# -- right ------------------------------------------------------------------------------------------------------------


def by(kind: Any, lr: float = 1e-2, **options: Any) -> Make:
    return lambda: fit(m := mlp(), kind(m.parameters(), lr=lr, **options))


def scheduled(dtype: torch.dtype, schedule: Callable[[Any], Any]) -> Make:
    def make() -> Loop:
        one = adamw(model := mlp().to(dtype))
        return fit(model, one, then=schedule(one).step)

    return make


def an_update_every_fourth_step() -> Loop:
    one = adamw(model := mlp())

    def step(i: int) -> None:
        model(batch(i)).square().mean().backward()
        if i % 4 == 3:
            one.step()
            one.zero_grad()

    return Loop(model, [one], step)


def embedding(sparse: bool) -> Make:
    """Most rows are in no batch."""

    def make() -> Loop:
        model = seeded(lambda: nn.Embedding(500, 4, sparse=sparse))
        return fit(model, sgd(model), output=lambda i: model(torch.tensor([i, i + 1])))

    return make


def unfrozen_later() -> Loop:
    model = mlp()
    model[0].requires_grad_(False)
    one = adamw(trained(model))

    def unfreeze(i: int) -> None:
        if i == 6:
            one.add_param_group({"params": list(model[0].requires_grad_().parameters())})

    return fit(model, one, before=unfreeze)


def tied_weights() -> Loop:
    model = seeded(lambda: nn.Embedding(20, 8), lambda: nn.Linear(8, 20, bias=False))
    model[1].weight = model[0].weight
    return fit(model, adamw(model), output=lambda i: model(torch.tensor([i % 7, 3])))


def a_gate_that_opens() -> Loop:
    model = mlp()
    model.gate = nn.Parameter(torch.zeros(1))
    return fit(model, adamw(model), output=lambda i: batch(i) + model.gate * model[3](model[2](model[0](batch(i)))))


def adversaries() -> Loop:
    """Each is frozen while the other one is trained."""
    g, d = model = seeded(linear(), linear(out=1))
    ones = [adamw(g), optim.Adam(d.parameters(), 1e-2)]

    def step(i: int) -> None:
        for part, one in zip((g, d), ones, strict=True):
            g.requires_grad_(part is g)
            d.requires_grad_(part is d)
            (d(g(batch(i))) - float(part is g)).square().mean().backward()
            one.step()
            one.zero_grad()

    return Loop(model, list(ones), step)


def teacher(in_forward: bool) -> Make:
    """A mean of the weights, made by hand, in the forward or by a hook of the optimizer."""

    def make() -> Loop:
        model = mlp()
        model.teacher = copy.deepcopy(model).requires_grad_(in_forward)
        students = [p for n, p in model.named_parameters() if not n.startswith("teacher")]

        def mean(*_: Any) -> None:
            for t, s in zip(model.teacher.parameters(), students, strict=True):
                t.data.lerp_(s.data, 0.1)

        one = adamw(students)
        if not in_forward:
            one.register_step_post_hook(mean)
        before = mean if in_forward else lambda i: None
        return fit(model, one, before=before, output=lambda i: model[3](model[2](model[0](batch(i)))))

    return make


class Attention(nn.Module):
    """By symmetry the gradient of the keys' bias is nothing but rounding, and that of the score is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.score = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        nn.init.constant_(self.k.bias, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return self.score(mixed[0]) - self.score(mixed[1])


def dropout_and_recomputation() -> Loop:
    model = seeded(linear(out=16), lambda: nn.Dropout(0.5), nn.ReLU, linear(16))
    return fit(model, adamw(model), output=lambda i: checkpoint(
        model, batch(i).requires_grad_(), use_reentrant=bool(i % 2)))  # fmt: skip


def compiled() -> Loop:
    model = mlp()
    model.compile(backend="eager")
    return fit(model, adamw(model))


def an_optimizer_in_the_backward() -> Loop:
    model = mlp()
    ones = {p: optim.SGD([p], 0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: (ones[p].step(), ones[p].zero_grad())[0])
    return Loop(model, list(ones.values()), lambda i: model(batch(i)).square().mean().backward())


def closures() -> Loop:
    one = optim.LBFGS((model := mlp()).parameters(), max_iter=3)

    def loss() -> float:
        one.zero_grad()
        (value := model(batch(0)).square().mean()).backward()
        return float(value)

    return Loop(model, [one], lambda i: one.step(loss))


def a_parameter_that_the_loop_moves() -> Loop:
    model = mlp()

    def move() -> None:
        for p in [*model[0].parameters(), *model[2].parameters()]:
            p.data -= 0.1 * p.grad
            p.grad = None

    return fit(model, adamw(model[3]), then=move)


class StochasticSGD(optim.SGD):
    """Rounds an update that bf16 loses up or down by chance."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            new = p.data.float() - self.param_groups[0]["lr"] * p.grad.float()
            noise = torch.randint(0, 1 << 16, new.shape, dtype=torch.int32)
            p.data.copy_(((new.view(torch.int32) + noise) & -65536).view(torch.float32))


def convolution_in_channels_last() -> Loop:
    model = seeded(lambda: nn.Conv2d(8, 32, 3), lambda: nn.BatchNorm2d(32)).to(memory_format=torch.channels_last)
    data = torch.randn(2, 8, 5, 5)
    return fit(model, sgd(model), output=lambda i: model(data).square())


def experts(count: int, of: Callable[[int], int]) -> Make:
    return lambda: fit(m := seeded(*[linear()] * count), adamw(m), output=lambda i: m[of(i)](m[0](batch(i))))


RIGHT: dict[str, Make] = {
    "adamw": by(optim.AdamW), "fused": by(optim.AdamW, fused=True), "foreach": by(optim.Adam, foreach=True),
    "sgd": by(optim.SGD), "momentum": by(optim.SGD, momentum=0.9, nesterov=True), "adagrad": by(optim.Adagrad),
    "rmsprop": by(optim.RMSprop), "adafactor": by(optim.Adafactor), "tiny rate": by(optim.AdamW, lr=1e-7),
    "rate is a tensor": by(optim.AdamW, lr=torch.tensor(1e-2)), "closures": closures,
    "bf16 that moves": lambda: fit(m := mlp().to(BF16), adamw(m, 2e-2)),
    "stochastic rounding": lambda: fit(m := mlp(64).to(BF16), StochasticSGD(m.parameters(), 1e-3)),
    "warm-up in bf16": scheduled(BF16, lambda one: optim.lr_scheduler.LambdaLR(one, lambda i: i / 2000)),
    "rate to zero": scheduled(torch.float32, lambda one: optim.lr_scheduler.CosineAnnealingLR(one, 8)),
    "accumulation": an_update_every_fourth_step, "embedding": embedding(False), "sparse embedding": embedding(True),
    "unused experts": experts(4, lambda i: 1 + i % 2), "a head for each task": experts(6, lambda i: 1 + i % 5),
    "frozen": lambda: fit(m := seeded(lambda: nn.Linear(8, 8).requires_grad_(False), linear()), adamw(m)),
    "unfrozen later": unfrozen_later, "tied": tied_weights, "a gate that opens": a_gate_that_opens,
    "adapters": lambda: fit(m := seeded(LoRA, LoRA, linear(out=2)), adamw(trained(m))),
    "quantised": lambda: fit(m := seeded(lambda: Quantised(False)), adamw(trained(m))),
    "adversaries": adversaries, "teacher": teacher(False), "teacher in forward": teacher(True),
    "weight norm": lambda: fit(m := seeded(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), adamw(m)),
    "biases": lambda: fit(m := seeded(Attention), sgd(m, 0.05)),
    "biases in bf16": lambda: fit(m := seeded(Attention).to(BF16), sgd(m, 0.05)),
    "recomputation": dropout_and_recomputation, "compiled": compiled, "in the backward": an_optimizer_in_the_backward,
    "scaler": lambda: scaled(adamw, 2.0**91, 2.0**40),
    "fused scaler": lambda: scaled(lambda m: adamw(m, fused=True), 2.0**91, 2.0**40),
    "moved by hand": a_parameter_that_the_loop_moves, "channels last": convolution_in_channels_last,
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_of_what_is_right_nothing_is_said(name: str) -> None:
    assert findings([watched(RIGHT[name](), 2 * STEPS)]) == []


# -- on several ranks -------------------------------------------------------------------------------------------------


def wrapped(how: str, model: Any, **options: Any) -> Any:
    """Each layer, and the whole."""
    kind, _, variant = how.partition(" ")
    if kind == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if variant == "hybrid" else None
    if kind == "fsdp1":
        strategy = {"whole": ShardingStrategy.NO_SHARD, "hybrid": ShardingStrategy.HYBRID_SHARD}
        return FullyShardedDataParallel(
            model, use_orig_params=variant != "flat", device_id=torch.device("cpu"), device_mesh=mesh,
            sharding_strategy=strategy.get(variant, ShardingStrategy.FULL_SHARD),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )  # fmt: skip
    shard = engine.fully_shard if kind == "lab" else fully_shard
    options |= {"mesh": mesh} if mesh else {}
    for layer in [*(layer for layer in model if list(layer.parameters())), model]:
        shard(layer, **options)
    return model


def own_data(model: Any, *optimizers: optim.Optimizer, **options: Any) -> Loop:
    """Each rank has batches of its own."""
    dtype = next(model.parameters()).dtype
    return fit(model, *optimizers, output=lambda i: model(batch(2 * i + dist.get_rank(), dtype)), **options)


def sharded(how: str) -> Make:
    def make() -> Loop:
        model = wrapped(how, mlp())
        return own_data(model, adamw(engine.sharded_parameters(model) if how == "lab regions" else model))

    return make


def adapters_beside_shards(how: str) -> Make:
    def make() -> Loop:
        own = trained(model := seeded(LoRA, LoRA))
        return own_data(wrapped(how, model, ignored_params=set(own)), adamw(own))

    return make


def experts_of_each_rank() -> Loop:
    """Not sharded, and other ones on each rank from the beginning, though their biases begin equal."""
    model = mlp()
    model[0].bias.data.zero_()
    nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(dist.get_rank()))
    fully_shard(model, ignored_params=set(model[0].parameters()))
    return own_data(model, adamw(model))


def plain(averaged: bool) -> Make:
    def make() -> Loop:
        one = adamw(model := mlp())
        if averaged:
            one.register_step_pre_hook(lambda *_: [dist.all_reduce(p.grad) for p in model.parameters()] and None)
        return own_data(model, one)

    return make


def never_synchronised() -> Loop:
    model = wrapped("ddp", mlp())
    return own_data(model, adamw(model), before=lambda i: setattr(model, "require_backward_grad_sync", False))


def never_reduced_between_replicas() -> Loop:
    model = wrapped("fsdp2 hybrid", mlp())
    model.set_requires_all_reduce(False)
    return own_data(model, adamw(model))


def rows(factor: int) -> Make:
    """Of an embedding, all in the first rank's shard."""

    def make() -> Loop:
        model = wrapped("fsdp2", seeded(lambda: nn.Embedding(8, 8), linear()))
        return fit(model, adamw(model), output=lambda i: model[1](factor * model[0](torch.tensor([i % 3]))))

    return make


def bf16_shards(how: str) -> Make:
    return lambda: own_data(m := wrapped(how, mlp().to(BF16)), adamw(m, 1e-5))


def gathered_by_a_property(asks: bool) -> Loop:
    """Of a sharded layer, in each forward and in full. `asks`: its type is to be gathered in another form, as fp8."""
    model, mesh = seeded(linear(), nn.Tanh), init_device_mesh("cpu", (dist.get_world_size(),))
    for name, p in list(model[0].named_parameters()):
        model[0]._parameters[name] = shard = nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)]))
        if asks:
            shard._local_tensor.fsdp_pre_all_gather = None  # type: ignore[attr-defined]
    whole: Any = lambda name: property(lambda layer: layer._parameters[name].full_tensor())  # noqa: E731
    model[0].__class__ = type("Gathering", (nn.Linear,), {name: whole(name) for name in ("weight", "bias")})
    return own_data(model, adamw(model))


def accumulated(how: str, waits: bool) -> Make:
    """Two micro-batches for an update."""

    def make() -> Loop:
        model = wrapped(how, mlp())
        set_to = getattr(model, "set_requires_all_reduce", lambda on: setattr(model, "require_backward_grad_sync", on))

        def first(i: int) -> None:
            set_to(not waits)
            model(batch(i + 99 * dist.get_rank())).square().mean().backward()
            set_to(True)

        return own_data(model, adamw(model), before=first)

    return make


def an_optimizer_of_what_was_replaced() -> Loop:
    """Adapters do not move, as where they are placed or sharded after it was made. While B is zero, A's gradient is."""
    one = adamw(trained(model := seeded(LoRA, LoRA)))
    return own_data(wrapped("fsdp2", model), one, keep=True)


DIFFER, LORA = AuditKind.REPLICAS_DIFFER, {f"{i}.lora_{x}" for i in range(2) for x in "AB"}
TABLES: dict[int, dict[str, tuple[Make, AuditKind | None, set[str]]]] = {
    2: {
        "adapters beside FSDP2": (adapters_beside_shards("fsdp2"), DIFFER, LORA),
        "adapters beside the engine": (adapters_beside_shards("lab"), DIFFER, LORA),
        "no wrapper": (plain(averaged=False), DIFFER, EVERY),
        "no_sync for ever": (never_synchronised, DIFFER, EVERY),
        "a form that is ignored": (
            lambda: gathered_by_a_property(True), AuditKind.FORM_IGNORED, {"0.weight", "0.bias"}),
        "reduced often": (accumulated("ddp", False), AuditKind.REDUCED_OFTEN, EVERY),
        "same batches": (lambda: fit(m := wrapped("ddp", mlp()), adamw(m)), AuditKind.SAME_DATA, {""}),
        "replaced": (an_optimizer_of_what_was_replaced, AuditKind.NOT_IN_OPTIMIZER, {"0.lora_B", "1.lora_B"}),
        "a wrapper that is bypassed": (lambda: own_data(wrapped("ddp", m := mlp()).module, adamw(m)), DIFFER, EVERY),
        "a shut gate": (rows(0), AuditKind.ZERO_GRADIENT, {"0.weight", "1.weight"}),
        **{f"bf16 {how}": (bf16_shards(how), LOST, EVERY - {"2.bias"}) for how in ("fsdp1", "fsdp1 flat", "fsdp2", "lab")},
        **{how: (sharded(how), None, set()) for how in
           ("ddp", "fsdp1", "fsdp1 flat", "fsdp1 whole", "fsdp2", "lab", "lab regions")},
        "averaged by hand": (plain(averaged=True), None, set()),
        "experts": (experts_of_each_rank, None, set()),
        "rows of one rank": (rows(1), None, set()),
        "gathered by a property": (lambda: gathered_by_a_property(False), None, set()),
        "reduced once": (accumulated("ddp", True), None, set()),
    },
    4: {
        "no all-reduce": (never_reduced_between_replicas, NONE, EVERY),
        "reduced often": (accumulated("fsdp2 hybrid", False), AuditKind.REDUCED_OFTEN, EVERY),
        "reduced once": (accumulated("fsdp2 hybrid", True), None, set()),
        **{how: (sharded(how), None, set()) for how in ("fsdp1 hybrid", "fsdp2 hybrid", "lab hybrid")},
    },
}  # fmt: skip


def _watched(place: Place) -> list[Messages]:
    told: list[Messages] = []
    with closing(session(place)) as s:
        for make, kind, _ in TABLES[place.world_size].values():
            told.append([])
            watched(make(), STEPS if kind else 2 * STEPS, s.loop_host(told[-1].append), told[-1])
    return told


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_are_compared_and_shards_are_looked_at(pool: Pool, ranks: int) -> None:
    by_rank = pool.run(_watched, ranks, reduction=None)
    for (name, (_, kind, names)), told in zip(TABLES[ranks].items(), zip(*by_rank, strict=True), strict=True):
        found = findings(list(told))
        assert {(f.kind, f.parameter) for f in found} == {(kind, one) for one in names}, (name, Audit(found, name))
        assert all(f.step < STEPS for f in found)


# -- what becomes of it -----------------------------------------------------------------------------------------------


def test_findings_are_in_the_history_and_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.sqlite3"
    for audit in (False, True):
        loop = fit(m := mlp(), adamw(m[0]))
        with fsdp_lab.watch(loop.model, loop.optimizers, audit=audit, history=path) as watch:
            for i in range(STEPS):
                with watch.step():
                    loop.step(i)
    found, nothing = (run.audit() for run in fsdp_lab.History(path).runs())
    assert len(found) == 4 and found.done and found.to_dict()["findings"][0]["kind"] == "NOT_IN_OPTIMIZER"
    assert "2.weight, 2.bias and 2 more" in repr(found) and "give it to the optimizer" in found._repr_html_()
    assert not nothing and "not audited" in repr(nothing)


def test_an_error_of_the_audit_ends_the_audit_and_not_the_loop() -> None:
    told: Messages = []
    model = mlp()
    with mock.patch("fsdp_lab.rank.watch.audit._sample", side_effect=ValueError("a strange tensor")):
        watch = Watch(model, one := adamw(model), plain_host(model, told.append), flops=False)
        with watch, watch.step():
            fit(model, one).step(0)
        with Watch(model, one, plain_host(model, told.append), flops=False) as watch:
            for i in range(2):
                with watch.step():
                    fit(model, one).step(i)
    assert told[-1]["end"]["notes"] == ["The audit ended by an error of its own: a strange tensor"]
    assert sum(len(message["events"]) for message in told) == 3
