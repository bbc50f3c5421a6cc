"""Scripts that differ in their loop: several forwards, several models, accumulation, penalties, averages."""

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.scenarios.engines import Engine, Kind, Scenario, inputs, net, square, step, train
from tests.engine.toys import WIDTH, Net, update


# -- several forwards before one backward ------------------------------------------------------------------------------
def gan_of_modules(e: Engine) -> None:
    """A generator and a discriminator learn in turns. Both are cleared, the generator when its graph is there already."""
    g, d = Net(depth=2), Net(depth=2)
    g.last, d.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    g, d = e.shard(g, g.blocks), e.shard(d, d.blocks)
    of_g, of_d = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (g, d))
    for i in range(3):
        made = g(inputs(e, 100 + i))
        d.zero_grad()
        loss_d = F.softplus(-d(inputs(e, i))).mean() + F.softplus(d(made.detach())).mean()
        loss_d.backward()
        of_d.step()
        loss_g = F.softplus(-d(made)).mean()
        g.zero_grad()
        d.zero_grad(set_to_none=False)
        loss_g.backward()  # gradients of d too, which are cleared before its next step
        of_g.step()
        e.record_loss(loss_d)
        e.record_loss(loss_g)
    e.record_model(g, "g ")
    e.record_model(d, "d ")


def penalty_on_real_data(e: Engine) -> None:
    """R1: the graph of an input's gradient is made, another batch goes through the model, and one backward is for all."""

    def loss(e: Engine, model: Any, i: int) -> Tensor:
        real = inputs(e, i).requires_grad_()
        scores = model(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        return square(e, model, 100 + i) - scores.mean() + slope.square().mean()

    train(e, net(e), loss=loss)


def adaptive_weight(e: Engine) -> None:
    """The second of two losses weighs as much as the first, by their gradients at the last layer, as in VQGAN.

    `torch.autograd.grad` of a parameter gives a rank's own gradient, which the script averages, as it must under DDP."""

    def loss(e: Engine, model: Any, i: int) -> Tensor:
        out = model(inputs(e, i))
        one, two, last = out.square().mean(), out.abs().mean(), model.last.weight
        slopes = [e.mean(torch.autograd.grad(loss, last, retain_graph=True)[0]).norm() for loss in (one, two)]
        weight = (slopes[0] / (slopes[1] + 1e-4)).clamp(0, 10)
        e.record("weight", weight)
        return one + weight * two  # type: ignore[no-any-return]

    train(e, net(e, 2), loss=loss)


def penalty_by_loss(e: Engine) -> None:
    """A penalty on weights, times a number of this rank's data; and a second head with a whole weight of the model."""

    def loss(e: Engine, model: Any, i: int) -> Tensor:
        penalty = e.whole(sum(p.square().sum() for p in model.parameters()))  # type: ignore[arg-type]
        weight, x = e.whole(model.first.weight), inputs(e, i)
        value: Tensor = model(x).square().mean() + F.linear(x, weight).abs().mean()
        return value + 0.1 * penalty * value.detach()

    train(e, net(e, 2), loss=loss)


# -- what is not used, what is not a plain weight ----------------------------------------------------------------------
class EarlyExit(Net):
    """Each depth has an exit; those that are not taken are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in self.blocks])

    def forward(self, x: Tensor, depth: int) -> Tensor:  # type: ignore[override]
        x = self.first(x)
        for block in self.blocks[: depth + 1]:
            x = block(x)
        return self.exits[depth](x)


def early_exit(e: Engine) -> None:
    """Unused parameters under AdamW with weight decay do not move, and keep their moments."""
    model = EarlyExit()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for i, depth in enumerate((0, 1, 0, 2)):
        loss = model(inputs(e, i), depth).square().mean()
        e.record_loss(loss)
        loss.backward()
        unused = sorted(n for n, p in model.named_parameters() if p.grad is None)
        e.record("unused " + " ".join(unused), len(unused))
        update(optimizer)
    e.record_model(model)


def moving_average(e: Engine) -> None:
    """An average of the weights, kept beside the shards and swapped in for an evaluation."""
    model = net(e, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i in range(4):
        step(optimizer, square(e, model, i))
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.3)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(average[name])
        e.record_model(model, "average ")
        e.record_loss(square(e, model, 200))
        e.end_evaluation(model)
        for name, p in model.named_parameters():
            p.copy_(kept[name])
    train(e, model, optimizer, steps=1)


def anchored(e: Engine) -> None:
    """Weights are drawn to a deep copy of those that training began with, which is saved and read again (EWC, L2-SP)."""
    model = net(e, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    file = io.BytesIO()
    torch.save(copy.deepcopy(dict(model.named_parameters())), file)
    file.seek(0)
    anchor = torch.load(file, weights_only=False)
    for i in range(4):
        square(e, model, i).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.grad.add_(p - anchor[name], alpha=0.5)
        update(optimizer)
    e.record_model(model)


_FREED = {Kind.FSDP2: "torch raises in the second backward: a saved weight's storage was freed by the first"}
_SHOWS_NONE = {Kind.FSDP2: "between forward and backward the root shows no gradients, so they are not cleared"}
_OWN = {Kind.FSDP2: "each rank's shard gets that rank's own gradient of a whole tensor, not the mean"}
SCENARIOS = (
    Scenario(script=gan_of_modules, not_under=_SHOWS_NONE), Scenario(script=penalty_on_real_data, not_under=_FREED),
    Scenario(script=adaptive_weight), Scenario(script=penalty_by_loss, not_under=_OWN),
    Scenario(script=early_exit, quick=True), Scenario(script=moving_average),
    Scenario(script=anchored),
)  # fmt: skip
