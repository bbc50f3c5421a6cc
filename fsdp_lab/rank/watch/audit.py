"""`UpdateAudit`: whether a watched loop updates what it should, by samples of parameters and gradients around its updates.

Note: what is looked at. Some of the parameters in each step, in turn: all of them within `PERIOD` steps, later less often;
of each some elements spread over it, a small one whole. Values before and after `optimizer.step()` are compared bit for bit,
beside the gradients that are there after it. What the loop moves by hand, as a mean of weights, is nobody's mistake. Not
looked at are the first step, in which zeros that adapters begin with make gradients zero, and ledger steps; and not judged
are updates that a loss scaler prevents.

Note: what is looked at besides, before step `LATER`. Whether ranks get batches of their own. Whether replicas are reduced
once for an update: under DDP, and between replicas of FSDP2, more often only costs time; of shards it saves memory, and
cannot be told from what is meant. Not looked at: whether clipping, noise and divisors are right.

Note: when an update counts as lost. Where an element has a gradient, and its bits stay. In bf16 and fp16 this is said of a
parameter of which half of such elements stay in several looks, unless the learning rate still rises, or elements move that
rounding to nearest would keep (stochastic rounding, compensated sums). In fp32 only an update that gradient and learning
rate make large enough to be seen counts: a gradient that is nothing but rounding, as of the bias of attention's keys, may
be lost.

Note: a GPU. Samples stay on it until the watch has waited for it, and calls `read`. Nothing here waits in a step."""

import math
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.base.events import AuditFinding, AuditKind
from fsdp_lab.base.tensors import tensors_in
from fsdp_lab.rank.watch.found import HeldParameter, PlainModel

RUNS, RUN = 8, 16  # of neighbouring elements, in a look at a parameter: one line of a cache each
WHOLE = 512  # elements of one that is looked at whole
LOOKS = 3  # after which a finding is certain
PERIOD = 5  # steps in which all parameters have their turn
LATER, EVERY = 20, 16  # from this step on only some are looked at, in each sixteenth step
LEAST = 8  # parameters in a step; later twice as many
SKIPPED_OF = (10, 16)  # so many updates were skipped, of so many
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(kw_only=True, eq=False)
class _Kept:
    """What is known of one parameter. `lost` to `idle` count looks in sequence."""

    held: HeldParameter
    number: str = ""  # among the replicated ones
    owners: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = field(default_factory=list)  # with its group
    lost: float = 0.0  # found its update lost
    lr: float = 0.0  # at the last of them
    without: int = 0  # found no gradient
    zero: int = 0  # found one that is zero
    frozen: int = 0  # found it frozen, without a gradient, and moving
    idle: int = 0  # found that it stays though it has a gradient, and no optimizer
    before: Tensor | None = None  # its sample at the last look, where no optimizer has it
    called: int = -1  # the last step in which its module was, as its hook tells
    hook: Any = None

    @property
    def trained(self) -> bool:
        return bool(self.held.holder.requires_grad)

    @property
    def is_float(self) -> bool:
        """Not so of quantised weights."""
        return bool(self.held.holder.dtype.is_floating_point and self.held.holder.element_size() > 1)


@dataclass(kw_only=True)
class _Look:
    """Samples around an update of parameters that have one dtype."""

    step: int
    kept: list[_Kept]
    before: Tensor
    sizes: list[int]  # of their samples
    after: Tensor = field(default_factory=lambda: torch.zeros(0))
    gradients: Tensor = field(default_factory=lambda: torch.zeros(0))  # zero where there is none
    absent: Sequence[bool] = ()  # those that have none
    trained: Sequence[bool] = ()
    called: Sequence[bool] = ()  # those whose modules were, as far as hooks tell
    whole: Sequence[Any] = ()  # whether the whole gradient is zero, of those of which it was asked
    optimizer: int = 0  # its id; 0: none has them
    rates: Sequence[Any] = ()  # numbers, or tensors on the device
    momentum: float | None = None  # of plain SGD; None of others
    skipped: Tensor | None = None  # by a scaler, if not zero


class UpdateAudit:
    """Of one rank's loop. A `Watch` calls `begin`; in each step `begin_step`, `before` and `after` each optimizer's step,
    and `end_step`; `read` when the device has reached the end of the steps before. `report` goes to the kernel."""

    def __init__(self, found: PlainModel, rank: int, world_size: int) -> None:
        self._found, self._optimizers, self._rank, self._world_size = found, found.optimizers, rank, world_size
        self._all: list[_Kept] = []
        self._watched: list[_Kept] = []
        self._turn: list[_Kept] = []  # those of this step
        self._step, self._next, self._active = 0, 0, False
        self._groups: tuple[int, ...] = ()
        self._stepped: list[torch.optim.Optimizer] = []  # in this step
        self._open: dict[int, list[_Look]] = {}  # by the optimizer that is stepping
        self._looks: list[_Look] = []  # not read yet
        self._endings: list[tuple[int, Any]] = []  # steps, and whether their update was made, or is yet to come
        self._ends: deque[bool] = deque(maxlen=SKIPPED_OF[1])  # of steps that were read: whether it was skipped
        self._compensating: set[int] = set()  # ids of optimizers that keep what rounding would lose
        self._told: set[tuple[AuditKind, str]] = set()
        self._reducing: list[set[int]] = []  # ids of what each backward of this step reduces
        self._often = 0  # steps in sequence in which something was reduced in each
        self._inputs: dict[int, Tensor] = {}  # by step, of those that were not read yet
        self._news: dict[str, list[Any]] = {"findings": [], "everywhere": [], "checksums": [], "inputs": []}

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first step; waits for the device."""
        self._all = [_Kept(held=held) for held in self._found.held()]
        self._enlist()
        copies = [kept for kept in self._all if len(kept.held.replicas) > 1]
        for number, kept in enumerate(copies):
            kept.number = str(number)
        self._news["replicated"] = [[k.held.name, k.held.replicas, k.held.synchronised] for k in copies]
        self._sum(-1, copies, [_sample(kept.held.values(), 0).cpu() for kept in copies])
        for kept in (kept for kept in self._all if kept.held.is_gathered_in_full):
            self._tell(AuditKind.FORM_IGNORED, kept, 0, "its type asks for a form of its own, and is not asked for it")
        groups = self._found.setup().groups  # if gradients are summed over all ranks, each is to have its own data
        self._splits_data = math.prod(group.size() for group in groups) == self._world_size > 1

    # -- in a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, number: int, *, active: bool) -> None:
        self._step, self._active = number, active and number > 0 and bool(self._optimizers)
        self._open, self._stepped, self._turn, self._reducing = {}, [], [], []
        if not self._active or (number >= LATER and number % EVERY):
            return
        if number == LATER or self._groups != self._sizes():
            self._enlist()
        several = len(self._watched)
        count = min(several, 2 * LEAST if number >= LATER else max(LEAST, -(-several // PERIOD)))
        self._turn = [self._watched[(self._next + i) % several] for i in range(count)]
        self._next += count

    @torch.no_grad()
    def forward(self, inputs: Any) -> None:
        """A forward of the model begins; of those of a step the first counts."""
        if self._splits_data and self._active and self._step < LATER and self._step not in self._inputs:
            plain = (t.detach() for t in tensors_in(inputs) if type(t) is Tensor and t.layout is torch.strided)
            if (largest := max(plain, key=Tensor.numel, default=None)) is not None:
                self._inputs[self._step] = _sample(largest, 0).clone()

    def backward(self) -> None:
        """A backward begins; a step may have several."""
        if self._active and self._step < LATER:
            self._reducing.append(self._found.reducing())

    @property
    def looks(self) -> bool:
        """Whether it looks at the updates of this step: else `before` and `after` need not be called."""
        return bool(self._turn)

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._stepped:
            self._look_at_strangers()
        self._stepped.append(optimizer)
        by_dtype: dict[Any, tuple[list[_Kept], list[Tensor]]] = {}
        for kept in self._turn:
            if any(one is optimizer for one, _ in kept.owners):
                t = _sample(kept.held.values(), self._step)
                some, samples = by_dtype.setdefault((t.dtype, t.device), ([], []))
                some.append(kept)
                samples.append(t)
            if sum(any(one is owner for one in self._stepped) for owner, _ in kept.owners) > 1:
                self._tell(AuditKind.TWICE, kept, self._step, "two optimizers update it in one step")
        self._open[id(optimizer)] = [
            _Look(step=self._step, kept=some, sizes=[t.numel() for t in samples], before=torch.cat(samples))
            for some, samples in by_dtype.values()
        ]

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        for look in self._open.pop(id(optimizer), ()):
            groups = [next(group for one, group in kept.owners if one is optimizer) for kept in look.kept]
            by_line = isinstance(optimizer, torch.optim.LBFGS)  # which may stop
            look.rates = [0.0 if by_line else _constant(group.get("lr", 0.0)) for group in groups]
            if isinstance(optimizer, torch.optim.SGD):
                look.momentum = max(float(group["momentum"]) for group in groups)
            look.optimizer, look.skipped = id(optimizer), _constant(getattr(optimizer, "found_inf", None))
            look.after = torch.cat([_sample(kept.held.values(), self._step) for kept in look.kept])
            whole = list(zip((kept.held.gradient() for kept in look.kept), look.sizes, strict=True))
            zeros = look.after.new_zeros(max(look.sizes))
            look.gradients = torch.cat([zeros[:n] if g is None else _sample(g, self._step) for g, n in whole])
            look.absent = [g is None and n > 0 for g, n in whole]  # a rank that has no part of it agrees with all
            look.trained = [kept.trained for kept in look.kept]
            look.called = [kept.called == self._step or not n for kept, n in zip(look.kept, look.sizes, strict=True)]
            asked = (g if kept.zero >= LOOKS - 1 else None for kept, (g, _) in zip(look.kept, whole, strict=True))
            look.whole = [not n if g is None else (g == 0).all() for g, n in zip(asked, look.sizes, strict=True)]
            self._looks.append(look)

    def end_step(self, *, updated: bool, backward: bool) -> None:
        """`backward`: there was one."""
        if not self._active or not (updated or backward):
            return
        if updated:
            self._judge_reducing()
            skipped = [look.skipped for look in self._looks if look.step == self._step and look.skipped is not None]
            self._endings.append((self._step, skipped[-1] == 0 if skipped else True))
            return
        some = [g for kept in self._watched[:LEAST] if kept.trained and (g := kept.held.gradient()) is not None]
        left = torch.cat([_sample(g, self._step).float() for g in some]) if some else torch.zeros(1)
        # Gradients that stay are being accumulated.
        self._endings.append((self._step, torch.isfinite(left).all() & (left != 0).any()))

    def _judge_reducing(self) -> None:
        often = set.intersection(*self._reducing) if len(self._reducing) > 1 else set()
        self._often = self._often + 1 if often else 0
        for kept in self._all if self._often == LOOKS else ():
            if often.intersection(kept.held.ids) and kept.trained:
                what = f"its gradient is reduced over the replicas {len(self._reducing)} times for one update"
                self._tell(AuditKind.REDUCED_OFTEN, kept, self._step, what)

    def _look_at_strangers(self) -> None:
        """At the parameters that no optimizer has, before the first one steps; always at the same elements."""
        for kept in (kept for kept in self._turn if not kept.owners):
            now, g = _sample(kept.held.values(), 0).clone(), kept.held.gradient()
            if kept.before is not None and kept.before.shape == now.shape:
                look = _Look(step=self._step, kept=[kept], sizes=[now.numel()], before=kept.before, after=now)
                look.gradients = now.new_zeros(1) if g is None else _sample(g, self._step).clone()
                self._looks.append(look)
            kept.before = now

    # -- which parameters ---------------------------------------------------------------------------------------------

    def _sizes(self) -> tuple[int, ...]:
        return tuple(n for one in self._optimizers for g in one.param_groups for n in (id(g), len(g["params"])))

    def _enlist(self) -> None:
        """Finds the owners of each parameter, and which ones are looked at: what is trained, what an optimizer has, and what
        is quantised; of other frozen ones nobody knows who may move them."""
        owners: dict[int, list[tuple[torch.optim.Optimizer, dict[str, Any]]]] = {}
        for one in self._optimizers:
            for group in one.param_groups:
                for p in group["params"]:
                    owners.setdefault(id(p), []).append((one, group))
        for kept in self._all:
            kept.owners = [owner for i in kept.held.ids for owner in owners.get(i, ())]
            if len({id(one) for one, _ in kept.owners}) < len(kept.owners):
                self._tell(AuditKind.TWICE, kept, self._step, "one optimizer has it twice")
        self._watched = [kept for kept in self._all if kept.owners or kept.trained or not kept.is_float]
        self._groups = self._sizes()
        # Beside adapters the norms and embeddings of the frozen model are not meant to train; a head may be.
        trained = [kept for kept in self._all if kept.trained and kept.owners]
        adapters = [kept for kept in trained if "lora" in kept.held.name.lower() or "modules_to_save" in kept.held.name]
        for kept in trained if adapters and not all(kept.trained for kept in self._all) else ():
            module = kept.held.module
            is_base = isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower()
            if is_base and kept not in adapters:
                self._tell(AuditKind.BESIDE_ADAPTERS, kept, 0, "it is trained, in a model frozen around adapters")

    # -- what they show -----------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Judges the looks since the last time. Call it when the device has reached their end."""
        looks, self._looks = self._looks, []
        for look in looks:
            self._judge(look)
        inputs, self._inputs = self._inputs, {}
        self._news["inputs"] += [[step, _checksum(t.cpu())] for step, t in inputs.items()]
        endings, self._endings = self._endings, []
        for step, goes_on in endings:
            self._ends.append(not goes_on)
            if not goes_on and sum(self._ends) >= SKIPPED_OF[0]:
                what = f"{sum(self._ends)} of the last {len(self._ends)} steps had a backward and no update"
                self._tell(AuditKind.SKIPPED, None, step, what)

    @torch.no_grad()
    def _judge(self, look: _Look) -> None:
        before, after, gradients = look.before.cpu(), look.after.cpu(), look.gradients.cpu()
        bits = _BITS[before.element_size()]
        moved, present = before.view(bits) != after.view(bits), gradients != 0
        self._sum(look.step, look.kept, torch.split(after, look.sizes))
        if not look.optimizer:
            self._judge_stranger(look.kept[0], look.step, moved=bool(moved.any()), graded=bool(present.any()))
            return
        if look.skipped is not None and look.skipped.any():
            return
        if not (present & ~moved).any() and all(look.trained):  # as nearly always
            full = bool(present.all())
            for at, part in enumerate(torch.split(present, look.sizes)):
                look.kept[at].lost = 0.0
                self._judge_gradient(look, at, zero=not (full or part.any()))
            return
        size, rates = gradients.float().abs(), [float(rate) for rate in look.rates]
        finite, eps = torch.isfinite(size), torch.finfo(before.dtype).eps
        rate = torch.tensor(rates).repeat_interleave(torch.tensor(look.sizes))
        # in the last place
        unit = torch.where(before == 0, 0.0, eps * torch.exp2(torch.frexp(before.float())[1] - 1.0))
        low = str(before.dtype).removeprefix("torch.") if before.element_size() < 4 else ""
        noise = 8 * eps if low and look.momentum is not None else 1e-3
        graded = finite & (size > noise * size[finite].mean()) & (rate > 0)
        seen = graded & (rate * size.clamp(max=1.0) > 2 * unit)
        bound = rate if look.momentum is None else rate * size / (1 - min(look.momentum, 0.99))
        small = graded & (16 * bound < unit)  # rounding to nearest loses it
        if (small & moved).sum() * (20 if look.momentum else 500) > small.sum():
            self._compensating.add(look.optimizer)
        weight = 1.0 if moved.any() else 0.3  # an optimizer may step only now and then
        masks = torch.stack([moved, present, graded, graded & ~moved, seen, seen & moved, small])
        for at, part in enumerate(torch.split(masks, look.sizes, dim=1)):
            counts, kept = part.sum(1).tolist(), look.kept[at]
            if look.trained[at]:
                if look.optimizer not in self._compensating:
                    self._judge_movement(kept, look.step, rates[at], counts[2:], weight, low)
                self._judge_gradient(look, at, zero=not counts[1])
                continue
            kept.frozen += counts[0] > 0 and not counts[1]
            if kept.frozen >= LOOKS:
                self._tell(AuditKind.FROZEN_MOVED, kept, look.step, "it is frozen, and the optimizer moves it")

    def _judge_movement(self, kept: _Kept, step: int, lr: float, counts: list[int], weight: float, low: str) -> None:
        """`low`: the name of a dtype of low precision."""
        graded, lost, seen, seen_moved, small = counts
        rises, kept.lr = lr > kept.lr > 0 and kept.lost > 0, lr
        judged, is_lost = (graded, 2 * lost >= graded) if low else (seen, not seen_moved)
        if not judged or rises:
            return
        explained = low and 2 * small >= graded
        kept.lost = kept.lost + (1.0 if explained else weight) if is_lost else 0.0
        if kept.lost >= LOOKS - 0.01:
            why = f": stored and updated in {low}, an update is less than half a unit in the last place" if low else ""
            what = f"{lost / graded:.0%} of what has a gradient does not move{why}"
            self._tell(AuditKind.LOW_PRECISION if low else AuditKind.STUCK, kept, step, what)

    def _judge_gradient(self, look: _Look, at: int, *, zero: bool) -> None:
        kept, absent = look.kept[at], look.absent[at]
        kept.without = kept.without + 1 if absent else 0
        kept.zero = kept.zero + 1 if zero and not absent else 0
        if kept.zero and "bias" in kept.held.name.rpartition(".")[2]:
            return  # symmetry may make it so
        if max(kept.without, kept.zero) >= LOOKS - 1 and kept.hook is None:

            def note(*_: Any) -> None:
                kept.called = self._step if torch.is_grad_enabled() else kept.called

            hook: Any = torch.compiler.disable(note)  # type: ignore[no-untyped-call]
            kept.hook = kept.held.module.register_forward_pre_hook(hook)
        if not look.called[at]:
            return  # what is never called needs no gradient
        if kept.without >= LOOKS:
            self._tell(AuditKind.NO_GRADIENT, kept, look.step, "its module runs, and no gradient reaches it")
        elif kept.zero >= LOOKS and look.whole[at]:
            everywhere = len(kept.held.replicas) < 2 and self._world_size > 1  # other ranks have other parts
            self._tell(AuditKind.ZERO_GRADIENT, kept, look.step, "its whole gradient is zero", everywhere=everywhere)

    def _judge_stranger(self, kept: _Kept, step: int, *, moved: bool, graded: bool) -> None:
        if moved and not kept.is_float:
            self._tell(AuditKind.FROZEN_MOVED, kept, step, "it is quantised, and what is stored changed")
        kept.idle = -LOOKS * LATER if moved else kept.idle + graded
        if kept.idle >= LOOKS:
            self._tell(AuditKind.NOT_IN_OPTIMIZER, kept, step, "it has a gradient, no optimizer, and does not move")

    # -- what is reported ---------------------------------------------------------------------------------------------

    def _sum(self, step: int, some: Iterable[_Kept], samples: Iterable[Tensor]) -> None:
        pairs = ((kept.number, t) for kept, t in zip(some, samples, strict=True) if kept.number)
        sums = {number: _checksum(t) for number, t in pairs}
        checksums = self._news["checksums"]
        if checksums and checksums[-1][0] == step:
            checksums[-1][1].update(sums)
        elif sums:
            checksums.append([step, sums])

    def _tell(self, kind: AuditKind, kept: _Kept | None, step: int, what: str, *, everywhere: bool = False) -> None:
        name = kept.held.name if kept is not None else ""
        if (kind, name) not in self._told:
            self._told.add((kind, name))
            found = AuditFinding(kind=kind, parameter=name, rank=self._rank, step=step, what=what)
            self._news["everywhere" if everywhere else "findings"].append(found.to_dict())

    def report(self) -> dict[str, Any]:
        """What is new, as an `AuditLog` takes it; empty if nothing is."""
        news, self._news = self._news, {"findings": [], "everywhere": [], "checksums": [], "inputs": []}
        return {name: value for name, value in news.items() if value or name == "replicated"}  # that is told once

    def close(self) -> None:
        for kept in self._all:
            if kept.hook is not None:
                kept.hook.remove()


def _checksum(t: Tensor) -> int:
    """Of a vector; one of a tensor's subclass is joined with nothing to make a plain one of it."""
    return zlib.crc32(torch.cat([t]).view(torch.uint8).numpy().data)


def _sample(t: Tensor, step: int) -> Tensor:
    """[n], some elements of a tensor, others in each step; all of a small one. It may be a view."""
    if not t.is_contiguous():
        is_last = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
        t = t.permute(0, 2, 3, 1) if is_last else t.contiguous()
    if (several := t.numel()) <= WHOLE:
        return t.view(-1)
    stride = several // RUNS
    return t.as_strided((RUNS, RUN), (stride, 1), t.storage_offset() + step * 7919 % (stride - RUN)).reshape(-1)


def _constant(value: Any) -> Any:
    """A number as it is; a tensor as it is now."""
    return value.detach().clone() if isinstance(value, Tensor) else value
