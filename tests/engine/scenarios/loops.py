"""Scripts that differ in their loop: several forwards, several models, inner modules, accumulation, evaluation, averages."""

from __future__ import annotations

import copy
import io

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.scenarios.engines import (
    PARTS,
    Engine,
    Kind,
    Scenario,
    drawn,
    frozen_copy,
    step,
    tokens,
)
from tests.engine.toys import WIDTH, Block, Net

VOCABULARY = 11


class Decoder(nn.Module):
    """Tokens to logits, causal by a running mean; `tied`: the head has the embedding's weight."""

    def __init__(self, depth: int = 2, *, tied: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [..., t] -> logits [..., t, VOCABULARY]"""
        x = self.embed(ids)
        for block in self.blocks:
            seen = x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, dtype=x.dtype)[:, None]
            x = block(x + seen)
        out: Tensor = self.head(x)
        return out

    def loss(self, ids: Tensor) -> Tensor:
        return next_token_loss(self(ids), ids)

    @torch.no_grad()
    def generate(self, ids: Tensor, new: int) -> Tensor:
        """Greedy."""
        for _ in range(new):
            ids = torch.cat([ids, self.forward(ids)[..., -1, :].argmax(-1, keepdim=True)], -1)
        return ids


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].flatten(0, -2), ids[..., 1:].flatten())


def sequence_logp(logits: Tensor, ids: Tensor) -> Tensor:
    """[..., t, v], [..., t] -> [...]"""
    logp = logits[..., :-1, :].log_softmax(-1)
    return logp.gather(-1, ids[..., 1:, None]).squeeze(-1).sum(-1)


# -- several forwards before one backward ------------------------------------------------------------------------------


def contrastive(e: Engine) -> None:
    """Two views of each example through one encoder, then one backward."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(4):
        one, two = e.rows(drawn(5, WIDTH, seed=i)), e.rows(drawn(5, WIDTH, seed=100 + i))
        a, b = F.normalize(model(one), dim=-1), F.normalize(model(two + one), dim=-1)
        similar = (a @ b.transpose(-1, -2)) / 0.5  # [parts, 5, 5]
        target = torch.arange(5).expand(similar.shape[0], 5)
        loss = F.cross_entropy(similar.flatten(0, 1), target.flatten())
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


def dpo(e: Engine) -> None:
    """Direct preference optimisation: a policy and its frozen reference, two forwards of each."""
    policy = Decoder()
    reference = frozen_copy(policy)
    policy, reference = e.shard(policy, policy.blocks), e.shard(reference, reference.blocks)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for i in range(4):
        chosen, rejected = e.rows(tokens(2, 7, seed=i)), e.rows(tokens(2, 7, seed=100 + i))
        with torch.no_grad():
            base = sequence_logp(reference(chosen), chosen) - sequence_logp(reference(rejected), rejected)
        gain = sequence_logp(policy(chosen), chosen) - sequence_logp(policy(rejected), rejected)
        loss = -F.logsigmoid(0.5 * (gain - base)).mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(policy)
    e.record_model(reference, "reference ")


def gan(e: Engine) -> None:
    """A generator and a discriminator that learn in turns, as in the DCGAN tutorial."""
    g, d = Net(depth=2), Net(depth=2)
    g.last, d.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    g, d = e.shard(g, g.blocks), e.shard(d, d.blocks)
    of_g, of_d = (torch.optim.Adam(m.parameters(), lr=1e-2, betas=(0.5, 0.999)) for m in (g, d))
    for i in range(3):
        real, noise = e.rows(drawn(3, WIDTH, seed=i)), e.rows(drawn(3, WIDTH, seed=100 + i))
        made = g(noise)
        of_d.zero_grad()
        loss_d = F.softplus(-d(real)).mean() + F.softplus(d(made.detach())).mean()
        loss_d.backward()
        of_d.step()
        of_g.zero_grad()
        loss_g = F.softplus(-d(made)).mean()
        loss_g.backward()  # gradients of d too, which its next step clears
        of_g.step()
        e.record_loss(loss_d)
        e.record_loss(loss_g)
    e.record_model(g, "g ")
    e.record_model(d, "d ")


def gan_of_modules(e: Engine) -> None:
    """Both are cleared by themselves, the generator when its graph is there already."""
    g, d = Net(depth=2), Net(depth=2)
    g.last, d.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    g, d = e.shard(g, g.blocks), e.shard(d, d.blocks)
    of_g, of_d = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (g, d))
    for i in range(3):
        made = g(e.rows(drawn(3, WIDTH, seed=100 + i)))
        d.zero_grad()
        loss_d = F.softplus(-d(e.rows(drawn(3, WIDTH, seed=i)))).mean() + F.softplus(d(made.detach())).mean()
        loss_d.backward()
        of_d.step()
        loss_g = F.softplus(-d(made)).mean()
        g.zero_grad()
        d.zero_grad(set_to_none=False)
        loss_g.backward()
        of_g.step()
        e.record_loss(loss_d)
        e.record_loss(loss_g)
    e.record_model(g, "g ")
    e.record_model(d, "d ")


def gan_with_switches(e: Engine) -> None:
    """The same with `requires_grad` of the discriminator off while the generator learns."""
    g, d = Net(depth=1), Net(depth=1)
    g.last, d.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    g, d = e.shard(g, g.blocks), e.shard(d, d.blocks)
    of_g, of_d = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (g, d))
    for i in range(3):
        real, noise = e.rows(drawn(3, WIDTH, seed=i)), e.rows(drawn(3, WIDTH, seed=100 + i))
        d.requires_grad_(True)
        loss_d = F.softplus(-d(real)).mean() + F.softplus(d(g(noise).detach())).mean()
        step(of_d, loss_d)
        d.requires_grad_(False)
        loss_g = F.softplus(-d(g(noise))).mean()
        e.record("no gradient", all(p.grad is None for p in d.parameters()))
        step(of_g, loss_g)
        e.record_loss(loss_d)
        e.record_loss(loss_g)
    e.record_model(g, "g ")
    e.record_model(d, "d ")


def two_backwards(e: Engine) -> None:
    """Two losses of one forward, each with a backward of its own; the graph is kept for the second."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for i in range(3):
        out = model(e.rows(drawn(3, WIDTH, seed=i)))
        out.square().mean().backward(retain_graph=True)
        second = out.abs().mean()
        e.record_loss(second)
        step(optimizer, second)
    e.record_model(model)


def gradient_penalty(e: Engine) -> None:
    """A critic whose gradient by its input is kept small: a gradient of a gradient."""
    critic = Net(depth=2)
    critic = e.shard(critic, critic.blocks)
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-2)
    for i in range(3):
        x = e.rows(drawn(3, WIDTH, seed=i)).requires_grad_()
        out = critic(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + slope.square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(critic)


def penalty_on_real_data(e: Engine) -> None:
    """R1: the graph of an input's gradient is made, another batch goes through the model, and one backward is for all."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        real = e.rows(drawn(3, WIDTH, seed=i)).requires_grad_()
        scores = model(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        fake = model(e.rows(drawn(3, WIDTH, seed=100 + i)))
        loss = fake.square().mean() - scores.mean() + slope.square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


def input_gradients(e: Engine) -> None:
    """Between the steps, the gradient by the inputs alone, as for a saliency map; parameters are given none."""
    model = Net(depth=2)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        step(optimizer, model(e.rows(drawn(3, WIDTH, seed=i))).square().mean())
        x = drawn(2, WIDTH, seed=200).requires_grad_()
        (slope,) = torch.autograd.grad(e.inner(model)(x).square().mean(), x)
        e.record("slope", slope)
        e.record("no gradient", all(p.grad is None for p in model.parameters()))
    e.record_model(model)


def adaptive_weight(e: Engine) -> None:
    """The second of two losses weighs as much as the first, by their gradients at the last layer, as in VQGAN.

    `torch.autograd.grad` of a parameter gives a rank's own gradient, which the script averages, as it must under DDP.
    """
    model = Net(depth=2)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        out = model(e.rows(drawn(3, WIDTH, seed=i)))
        one, two, last = out.square().mean(), out.abs().mean(), e.inner(model).last.weight
        slopes = [e.mean(torch.autograd.grad(loss, last, retain_graph=True)[0]).norm() for loss in (one, two)]
        weight = (slopes[0] / (slopes[1] + 1e-4)).clamp(0, 10)
        e.record("weight", weight)
        step(optimizer, one + weight * two)
    e.record_model(model)


def penalty_by_loss(e: Engine) -> None:
    """A penalty on weights, times a number of this rank's data; and a second head with a whole weight of the model."""
    model = Net(depth=2)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        penalty = e.whole(sum(p.square().sum() for p in model.parameters()))  # type: ignore[arg-type]
        weight = e.whole(e.inner(model).first.weight)
        x = e.rows(drawn(3, WIDTH, seed=i))
        loss = model(x).square().mean() + F.linear(x, weight).abs().mean()
        loss = loss + 0.1 * penalty * loss.detach()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


# -- inner modules by themselves ---------------------------------------------------------------------------------------


def distillation(e: Engine) -> None:
    """A teacher's inner block and its output, under no_grad; the block is called by itself."""
    teacher, student = frozen_copy(Net(depth=3)), Net(depth=1)
    teacher, student = e.shard(teacher, teacher.blocks), e.shard(student, student.blocks)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for i in range(3):
        x = e.rows(drawn(3, WIDTH, seed=i))
        with torch.no_grad():
            wanted, hint = teacher(x), e.inner(teacher).blocks[1](x)
        loss = F.mse_loss(student(x), wanted) + 0.1 * hint.mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(student)


def inner_evaluation(e: Engine) -> None:
    """Features of a block of the model in training, by itself and under no_grad, between the steps."""
    model = Net(depth=2)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
        with torch.no_grad():
            e.record("feature", e.inner(model).blocks[0](drawn(2, WIDTH, seed=200)))
    e.record_model(model)


def inner_training(e: Engine) -> None:
    """A step through the whole model, and one through an inner block by itself, as for an auxiliary loss."""
    model = Net(depth=2)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for i in range(4):
        x = e.rows(drawn(3, WIDTH, seed=i))
        loss = model(x).square().mean() if i % 2 == 0 else e.inner(model).blocks[1](x).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


def generation(e: Engine) -> None:
    """Greedy decoding between the steps of a language model, in a loop and by a method of the model."""
    model = Decoder()
    model = e.shard(model, model.blocks)
    e.forward_method(e.inner(model), "generate")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prompt = tokens(1, 3, seed=300)
    for i in range(3):
        ids = e.rows(tokens(2, 7, seed=i))
        loss = next_token_loss(model(ids), ids)
        e.record_loss(loss)
        step(optimizer, loss)
        model.eval()
        with torch.no_grad():
            grown = prompt
            for _ in range(3):
                grown = torch.cat([grown, model(grown)[..., -1, :].argmax(-1, keepdim=True)], -1)
        model.train()
        e.record("by a loop", grown)
        e.record("by a method", e.inner(model).generate(prompt, 3))
    e.record_model(model)


def evaluation(e: Engine) -> None:
    """A validation loss in eval mode between the steps."""
    model = Net()
    model.blocks[1].down = nn.Sequential(model.blocks[1].down, nn.Dropout(0.0))
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        step(optimizer, model(e.rows(drawn(3, WIDTH, seed=i))).square().mean())
        model.eval()
        with torch.no_grad():
            e.record_loss(model(e.rows(drawn(4, WIDTH, seed=200))).square().mean())
        model.train()
    e.record_model(model)


def unshard_ahead(e: Engine) -> None:
    """The first block is gathered by hand while the batch is read."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        handle = e.unshard_async(e.inner(model).blocks[0])
        x = e.rows(drawn(3, WIDTH, seed=i))
        handle.wait()
        loss = model(x).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


# -- accumulation ------------------------------------------------------------------------------------------------------


def accumulation(e: Engine) -> None:
    """Three micro-batches a step; only the last one communicates."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        for k in range(3):
            x = e.rows(drawn(3, WIDTH, seed=10 * i + k))
            with e.no_sync(model) if k < 2 else torch.enable_grad():
                loss = model(x).square().mean() / 3
                loss.backward()
            e.record_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    e.record_model(model)


def every_second(e: Engine) -> None:
    """Five micro-batches a step; the second, the fourth and the last one communicate."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for i in range(2):
        for k in range(5):
            x = e.rows(drawn(2, WIDTH, seed=10 * i + k))
            with torch.enable_grad() if k % 2 == 1 or k == 4 else e.no_sync(model):
                loss = model(x).square().mean() / 5
                loss.backward()
            e.record_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    e.record_model(model)


def communicated_accumulation(e: Engine) -> None:
    """Two micro-batches a step, and gradients that are zeroed in place."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        for k in range(2):
            loss = model(e.rows(drawn(3, WIDTH, seed=10 * i + k))).square().mean() / 2
            e.record_loss(loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        e.record("zeros", all(bool((e.whole(p.grad) == 0).all()) for p in model.parameters() if p.grad is not None))
    e.record_model(model)


def valid_tokens(e: Engine) -> None:
    """The loss is a sum over tokens, divided by the number of valid ones on all ranks, which differs from rank to rank."""
    model = Decoder()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lengths = torch.tensor([2, 7, 4, 5]).view(PARTS, 1, 1)
    for i in range(3):
        ids, length = e.rows(tokens(2, 7, seed=i)), e.rows(lengths)
        targets = torch.where(torch.arange(7) < length, ids, -100)[..., 1:]
        logits = model(ids)[..., :-1, :]
        summed = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-100)
        valid = e.total((targets != -100).sum().to(summed.dtype))
        loss = summed * e.world_size / valid  # gradients are averaged over ranks
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


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
        out: Tensor = self.exits[depth](x)
        return out


def early_exit(e: Engine) -> None:
    """Unused parameters under AdamW with weight decay do not move, and keep their moments."""
    model = EarlyExit()
    model = e.shard(model, model.blocks, unused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    for i, depth in enumerate((0, 1, 0, 2)):
        loss = model(e.rows(drawn(3, WIDTH, seed=i)), depth).square().mean()
        e.record_loss(loss)
        loss.backward()
        unused = sorted(e.name(n) for n, p in model.named_parameters() if p.grad is None)
        e.record("unused " + " ".join(unused), len(unused))
        optimizer.step()
        optimizer.zero_grad()
    e.record_model(model)


class _Scaled(torch.autograd.Function):
    """w x by hand, with a gradient that is doubled for w."""

    @staticmethod
    def forward(ctx, x, w):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        return grad * w, 2 * (grad * x).flatten(0, -2).sum(0)


class ScaledBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Scaled.apply(super().forward(x), self.scale)
        return out


def autograd_function(e: Engine) -> None:
    """A function with a backward of its own holds a weight from forward to backward."""
    model = Net(block=ScaledBlock)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


def moving_average(e: Engine) -> None:
    """An average of the weights, kept beside the shards and swapped in for an evaluation."""
    model = Net(depth=2)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for i in range(4):
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.3)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(average[name])
        e.record_model(model, "average ")
        e.record_loss(model(e.rows(drawn(3, WIDTH, seed=200))).square().mean())
        e.end_evaluation(model)
        for name, p in model.named_parameters():
            p.copy_(kept[name])
    step(optimizer, model(e.rows(drawn(3, WIDTH, seed=201))).square().mean())
    e.record_model(model)


def anchored(e: Engine) -> None:
    """Weights are drawn to a deep copy of those that training began with, which is saved and read again (EWC, L2-SP)."""
    model = Net(depth=2)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    file = io.BytesIO()
    torch.save(copy.deepcopy(dict(model.named_parameters())), file)
    file.seek(0)
    anchor = torch.load(file, weights_only=False)
    for i in range(4):
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        loss.backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.grad.add_(p - anchor[name], alpha=0.5)
        optimizer.step()
        optimizer.zero_grad()
    e.record_model(model)


_ONE_BACKWARD = {Kind.DDP: "its reducer takes one backward for each forward"}
_FREED = {Kind.FSDP2: "torch raises in the second backward: a saved weight's storage was freed by the first"}
_SUMS_FIRST = {Kind.DDP: "it adds what was reduced before to each rank's gradient, and reduces the sum again"}
SCENARIOS = (
    Scenario(script=contrastive),
    Scenario(script=dpo),
    Scenario(script=gan),
    Scenario(
        script=gan_of_modules,
        not_under={Kind.FSDP2: "between forward and backward the root shows no gradients, so they are not cleared"},
    ),
    Scenario(
        script=gan_with_switches, not_under={Kind.DDP: "it waits for gradients of what was frozen after it was made"}
    ),
    Scenario(script=two_backwards, not_under=_ONE_BACKWARD),
    Scenario(script=gradient_penalty, not_under=_ONE_BACKWARD | _FREED),
    Scenario(script=penalty_on_real_data, not_under=_ONE_BACKWARD | _FREED),
    Scenario(script=input_gradients),
    Scenario(script=adaptive_weight),
    Scenario(
        script=penalty_by_loss,
        not_under={Kind.FSDP2: "each rank's shard gets that rank's own gradient of a whole tensor, not the mean"},
    ),
    Scenario(script=distillation),
    Scenario(script=inner_evaluation),
    Scenario(script=inner_training, not_under={Kind.DDP: "a part of the model called by itself is not reduced"}),
    Scenario(script=generation),
    Scenario(script=evaluation),
    Scenario(script=unshard_ahead),
    Scenario(script=accumulation, faults=("micro-batches lost",)),
    Scenario(script=every_second, faults=("micro-batches lost",), other_order=_SUMS_FIRST),
    Scenario(script=communicated_accumulation, other_order=_SUMS_FIRST),
    Scenario(script=valid_tokens),
    Scenario(script=early_exit, faults=("zero where there is no gradient",)),
    Scenario(script=autograd_function),
    Scenario(script=moving_average),
    Scenario(script=anchored),
)
