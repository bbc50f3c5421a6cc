"""Scripts that differ in what is done with gradients: optimizers, groups, schedules, clipping, scaling, logging."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.engine.scenarios.engines import Engine, Kind, Scenario, drawn, inputs, net, square, step, train
from tests.engine.toys import WIDTH, update


def _with(e: Engine, make: Callable[..., torch.optim.Optimizer]) -> None:
    model = net(e)
    train(e, model, make(model.parameters()), steps=4)


def foreach(e: Engine) -> None:
    """AdamW's loop over lists of tensors."""
    _with(e, partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True))


def adafactor(e: Engine) -> None:
    """Factored second moments: sums over rows and columns of whole matrices."""
    _with(e, partial(torch.optim.Adafactor, lr=1e-2))


def groups_with_schedule(e: Engine) -> None:
    """The usual recipe: decay for matrices alone, warm-up and cosine, one group slower than the other."""
    model = net(e)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    e.record("matrices", len(matrices))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 5e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 3) * math.cos(0.2 * i))
    for i in range(6):
        step(optimizer, square(e, model, i))
        schedule.step()
    e.record_model(model)


def line_search(e: Engine) -> None:
    """L-BFGS flattens all gradients into one vector, and evaluates the loss several times in a step."""
    model = net(e, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = square(e, model, 0)
        loss.backward()
        return e.mean(loss)

    for _ in range(2):
        e.record("loss", optimizer.step(closure))  # type: ignore[arg-type]
    e.record_model(model)


def _between(e: Engine, do: Callable[[Any], None], depth: int = 3, **options: Any) -> None:
    """`do(model)` between backward and step of SGD."""
    model = net(e, depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, **options)
    for i in range(3):
        loss = square(e, model, i)
        e.record_loss(loss)
        loss.backward()
        do(model)
        update(optimizer)
    e.record_model(model)


def clipping_by_norm(e: Engine) -> None:
    """torch's own, of `model.parameters()`; the norm is what is logged, and that of each gradient by its name."""
    limits = iter((0.01, 0.1, 1e3))

    def clip(model: Any) -> None:
        for name, p in model.named_parameters():
            e.record(name, torch.linalg.vector_norm(p.grad))
        of_blocks = [p.grad for p in model.blocks.parameters()]
        e.record("largest", torch.nn.utils.get_total_norm(of_blocks, math.inf))
        e.record("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), next(limits)))

    _between(e, clip, momentum=0.9)


def clipping_by_value(e: Engine) -> None:
    _between(e, lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01))


def gradients_kept(e: Engine) -> None:
    """Gradients are taken, replaced, put back, exchanged, and changed after they were set; some outlive `zero_grad`."""
    model = net(e, 2)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    last = {p.shape: p for p in parameters if p.ndim == 2}.values()
    for i in range(3):
        square(e, model, i).backward()
        before = [p.grad for p in parameters]
        for p in parameters[::2]:
            p.grad = None
        square(e, model, 100 + i).backward()
        for p, first in zip(parameters[::2], before[::2], strict=True):
            e.record("first", first)
            second, p.grad = p.grad, torch.zeros_like(p)
            p.grad = first
            p.grad = doubled = second * 2 - p.grad
            doubled.mul_(0.5)
        for p in last:
            q = next(q for q in parameters if q.shape == p.shape)
            p.grad, q.grad = q.grad, p.grad
        update(optimizer)
    e.record_model(model)


def temperature(e: Engine) -> None:
    """A parameter beside the model, in the same optimizer and under the same norm."""
    model = net(e, 2)
    scale = torch.nn.Parameter(torch.tensor(0.5))
    optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=1e-2)
    for i in range(3):
        (model(inputs(e, i)) * scale.exp()).square().mean().backward()
        scale.grad = e.mean(scale.grad)
        e.record("norm", torch.nn.utils.clip_grad_norm_([*model.parameters(), scale], 0.01))
        update(optimizer)
    e.record_model(model)
    e.record("scale", scale)


def grad_scaler(e: Engine) -> None:
    """fp16 with torch's scaler; in the second step the data of one rank overflow, in the third one gradient, of which a rank
    may hold nothing. All ranks skip both steps. In the last two gradients are unscaled first, then clipped."""
    model = net(e)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i in range(5):
        x = drawn(3, WIDTH, seed=i)
        if i == 1:
            x[0] *= 1e30
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(e.rows(x)).float().square().mean()
        scaler.scale(loss).backward()
        if i == 2:
            [*model.parameters()][-1].grad.mul_(float("inf"))
        if i > 2:
            scaler.unscale_(optimizer)
            e.record("norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        e.record("scale", scaler.get_scale())
        if i != 1:
            e.record_loss(loss)
    e.record_model(model)


def optimizer_in_backward(e: Engine) -> None:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    model = net(e, 2)
    each = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def ready(p: torch.Tensor) -> None:
        each[p].step()  # type: ignore[index]
        each[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(ready)
    for i in range(3):
        square(e, model, i).backward()
    e.record_model(model)


# u = 2^-11 of fp16 in place of bf16's 2^-8: see models.py. Scaled gradients of up to 2^10 stay below fp16's largest.
_FP16_BOUND = 10 * 2.0**-11
_NO_POWER = {Kind.FSDP2: "torch raises: an in-place power of a partial norm of a DTensor"}
_NOT_FLAT = {Kind.FSDP2: "torch raises: it cannot flatten a tensor that is cut unevenly"}
SCENARIOS = (Scenario(script=foreach), Scenario(script=adafactor, bits=False, not_under=_NO_POWER),
             Scenario(script=groups_with_schedule), Scenario(script=line_search, bits=False, not_under=_NOT_FLAT),
             Scenario(script=clipping_by_norm, quick=True, bits=False), Scenario(script=clipping_by_value),
             Scenario(script=gradients_kept), Scenario(script=temperature, bits=False),
             Scenario(script=grad_scaler, dtype=torch.float32, bits=False, bound=_FP16_BOUND),
             Scenario(script=optimizer_in_backward))  # fmt: skip
