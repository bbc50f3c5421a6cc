"""`UpdateAudit`: whether a watched loop updates what it should, by samples of parameters and gradients around its updates.

Note: what is looked at. Some of the parameters in each step, in turn: all of them within `PERIOD` steps, later less often;
of each some elements spread over it, a small one whole. Values before and after `optimizer.step()` are compared bit for bit,
beside the gradients that are there after it. What the loop moves by hand, as a mean of weights, is nobody's mistake. Not
looked at are the first step, in which zeros that adapters begin with make gradients zero, and ledger steps; and not judged
are updates that a loss scaler prevents.

Note: when an update counts as lost. Where an element has a gradient, and its bits stay. In bf16 and fp16 this is said of a
parameter of which half of such elements stay in several looks, unless the learning rate still rises, or elements move that
rounding to nearest would keep (stochastic rounding, compensated sums). In fp32 only an update that gradient and learning
rate make large enough to be seen counts: a gradient that is nothing but rounding, as of the bias of attention's keys, may
be lost.

Note: a GPU. Samples stay on it until the watch has waited for it, and calls `read`. Nothing here waits in a step."""

import zlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.base.audit import AuditKind, Finding
from fsdp_lab.rank.watch.found import HeldParameter, PlainModel

RUNS, RUN = 8, 16  # of neighbouring elements, in a look at a parameter: one line of a cache each
WHOLE = 512  # elements of one that is looked at whole
LOOKS = 3  # after which a finding is certain
PERIOD = 5  # steps in which all parameters have their turn
LATER, EVERY = 32, 4  # from this step on only a few are looked at, in each fourth step
LEAST = 8  # parameters in a step
SKIPPED_OF = (10, 16)  # so many updates were skipped, of so many
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(kw_only=True)
class _Kept:
    """What is known of one parameter."""

    held: HeldParameter
    owners: list[tuple[torch.optim.Optimizer, dict[str, Any]]] = field(default_factory=list)  # with its group
    lost: float = 0.0  # looks in sequence that found the update lost; of any optimizer's steps
    lr: float = 0.0  # at the last of them
    without: int = 0  # looks in sequence that found no gradient
    zero: int = 0  # or one that is zero
    frozen: int = 0  # looks that found it frozen, without a gradient, and moving
    idle: int = 0  # looks in which no optimizer had it, and it stayed though it has a gradient
    before: Tensor | None = None  # its sample at the last look, where no optimizer has it
    called: int = -1  # the last step in which its module was, as its hook tells
    hook: Any = None


@dataclass(kw_only=True)
class _Look:
    """Samples around an update of parameters that have one dtype."""

    step: int
    numbers: list[int]  # of the parameters
    sizes: list[int]  # of their samples
    before: Tensor
    after: Tensor | None = None
    gradients: Tensor | None = None  # zero where there is none
    absent: Sequence[bool] = ()  # those that have none
    trained: Sequence[bool] = ()
    called: Sequence[bool] = ()  # those whose modules were, as far as hooks tell
    optimizer: int = 0  # its id
    rates: Sequence[Any] = ()  # numbers, or tensors on the device
    momentum: float | None = None  # of plain SGD; None of others
    skipped: Tensor | None = None  # by a scaler, if not zero
    whole: dict[int, Tensor] = field(default_factory=dict)  # by number, for some: whether the whole gradient is zero


class UpdateAudit:
    """Of one rank's loop. A `Watch` calls `begin`; in each step `begin_step`, `before` and `after` each optimizer's step,
    and `end_step`; `read` when the device has reached the end of the steps before. `report` goes to the kernel."""

    def __init__(self, found: PlainModel, rank: int, world_size: int) -> None:
        self._found, self._optimizers, self._rank, self._world_size = found, found.optimizers, rank, world_size
        self._all: list[_Kept] = []
        self._told: set[tuple[AuditKind, str]] = set()
        self._news: dict[str, list[Any]] = {"findings": [], "everywhere": [], "checksums": []}
        self._looks: list[_Look] = []  # not read yet
        self._open: dict[int, list[_Look]] = {}  # by the optimizer that is stepping
        self._turn: list[int] = []  # parameters of this step
        self._step, self._next, self._active = 0, 0, False
        self._compensating: set[int] = set()  # ids of optimizers that keep what rounding would lose
        self._stepped: list[torch.optim.Optimizer] = []  # in this step
        self._ends: deque[bool] = deque(maxlen=SKIPPED_OF[1])  # of steps: whether the update was skipped
        self._endings: list[tuple[int, Tensor | bool]] = []  # steps, and whether the update was made, or will be

    def begin(self) -> None:
        """Before the first step; waits for the device."""
        self._all = [_Kept(held=held) for held in self._found.held()]
        self._enlist()
        copies = [(i, kept.held) for i, kept in enumerate(self._all) if len(kept.held.replicas) > 1]
        self._number = {i: str(number) for number, (i, _) in enumerate(copies)}
        self._news["replicated"] = [[held.name, held.replicas, held.synchronised] for _, held in copies]
        self._sum(-1, self._number, [_sample(held.values(), 0).cpu() for _, held in copies])

    # -- in a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, number: int, *, active: bool) -> None:
        self._step, self._active = number, active and number > 0 and bool(self._optimizers)
        self._open, self._stepped, self._turn = {}, [], []
        if not self._active or (number >= LATER and number % EVERY):
            return
        if number == LATER or self._membership != self._count():
            self._enlist()
        several = len(self._watched)
        count = min(several, LEAST if number >= LATER else max(LEAST, -(-several // PERIOD)))
        self._turn = [self._watched[(self._next + i) % several] for i in range(count)]
        self._next += count

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._turn:
            return
        if not self._stepped:
            self._look_at_strangers()
        own = [i for i in self._turn if any(one is optimizer for one, _ in self._all[i].owners)]
        self._open[id(optimizer)] = [
            _Look(step=self._step, numbers=numbers, sizes=[t.numel() for t in samples], before=torch.cat(samples))
            for numbers, samples in _by_dtype((i, _sample(self._all[i].held.values(), self._step)) for i in own)
        ]
        self._stepped.append(optimizer)
        for kept in self._shared:
            if sum(any(one is owner for one in self._stepped) for owner, _ in kept.owners) > 1:
                self._tell(AuditKind.TWICE, kept, self._step, "two optimizers update it in one step")

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        for look in self._open.pop(id(optimizer), ()):
            kept = [self._all[i] for i in look.numbers]
            groups = [next(group for one, group in k.owners if one is optimizer) for k in kept]
            by_line = isinstance(optimizer, torch.optim.LBFGS)  # which may stop
            look.rates = [0.0 if by_line else _constant(group.get("lr", 0.0)) for group in groups]
            look.optimizer = id(optimizer)
            if isinstance(optimizer, torch.optim.SGD):
                look.momentum = max(float(group["momentum"]) for group in groups)
            look.after = torch.cat([_sample(k.held.values(), self._step) for k in kept])
            whole = [k.held.gradient() for k in kept]
            samples = [
                look.after.new_zeros(size) if g is None else _sample(g, self._step)
                for g, size in zip(whole, look.sizes, strict=True)
            ]
            # A rank that has nothing of a parameter agrees with all others.
            look.absent = [g is None and size > 0 for g, size in zip(whole, look.sizes, strict=True)]
            look.gradients, look.trained = torch.cat(samples), [k.held.holder.requires_grad for k in kept]
            look.called = [k.called == self._step for k in kept]
            look.skipped = _constant(getattr(optimizer, "found_inf", None))
            for i, k, g in zip(look.numbers, kept, whole, strict=True):
                if k.zero >= LOOKS - 1 and g is not None:
                    look.whole[i] = (g == 0).all()
            self._looks.append(look)

    def end_step(self, *, updated: bool, backward: bool) -> None:
        """`backward`: there was one."""
        if not self._active or not (updated or backward):
            return
        if updated:
            last = self._looks[-1].skipped if self._looks and self._looks[-1].step == self._step else None
            self._endings.append((self._step, True if last is None else last == 0))
            return
        some = [k.held for k in map(self._all.__getitem__, self._watched[:LEAST]) if k.held.holder.requires_grad]
        left = [g for held in some if (g := held.gradient()) is not None]
        flat = torch.cat([_sample(g, self._step).float() for g in left]) if left else torch.zeros(1)
        # Gradients that stay are being accumulated.
        self._endings.append((self._step, torch.isfinite(flat).all() & (flat != 0).any()))

    def _look_at_strangers(self) -> None:
        """At the parameters that no optimizer has, before the first one steps."""
        for i in (i for i in self._turn if not self._all[i].owners):
            kept = self._all[i]
            now = _sample(kept.held.values(), i)  # always the same elements
            if kept.before is not None and kept.before.shape == now.shape:
                grad = kept.held.gradient()
                look = _Look(step=self._step, numbers=[i], sizes=[now.numel()], before=kept.before, after=now.clone())
                look.gradients = torch.zeros(1) if grad is None else _sample(grad, i).clone()
                self._looks.append(look)
            kept.before = now.clone()

    # -- which parameters ---------------------------------------------------------------------------------------------

    def _count(self) -> tuple[int, ...]:
        return tuple(n for one in self._optimizers for g in one.param_groups for n in (id(g), len(g["params"])))

    def _enlist(self) -> None:
        """Finds the owners of each parameter, and which ones are looked at: what is trained, what an optimizer has, and what
        is stored in integers, as quantised weights are; of other frozen ones nobody knows who may move them."""
        owners: dict[int, list[tuple[torch.optim.Optimizer, dict[str, Any]]]] = {}
        twice: set[int] = set()
        for one in self._optimizers:
            ids = [(id(p), group) for group in one.param_groups for p in group["params"]]
            for i, group in dict(ids).items():
                owners.setdefault(i, []).append((one, group))
            twice |= {i for i, several in Counter(i for i, _ in ids).items() if several > 1}
        for kept in self._all:
            kept.owners = [owner for i in kept.held.ids for owner in owners.get(i, ())]
            if not twice.isdisjoint(kept.held.ids):
                self._tell(AuditKind.TWICE, kept, self._step, "one optimizer has it twice")
        self._shared = [kept for kept in self._all if len(kept.owners) > 1]
        each = ((i, kept.owners, kept.held.holder) for i, kept in enumerate(self._all))
        self._watched = [i for i, own, p in each if own or p.requires_grad or not _is_float(p)]
        self._membership = self._count()
        self._check_adapters()

    def _check_adapters(self) -> None:
        """Beside adapters the norms and embeddings of the frozen model are not meant to train; a head may be."""
        trained = [k for k in self._all if k.held.holder.requires_grad and k.owners]
        frozen = any(not k.held.holder.requires_grad for k in self._all)
        if not (frozen and any("lora" in k.held.name.lower() for k in trained)):
            return
        for kept in trained:
            module, name = kept.held.module, kept.held.name
            is_base = isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower()
            if is_base and "lora" not in name.lower() and "modules_to_save" not in name:
                self._tell(AuditKind.BESIDE_ADAPTERS, kept, 0, "it is trained, in a model frozen around adapters")

    # -- what they show -----------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Judges the looks since the last time. Call it when the device has reached their end."""
        looks, self._looks = self._looks, []
        for look in looks:
            self._judge(look)
        endings, self._endings = self._endings, []
        for step, goes_on in endings:
            self._ends.append(not goes_on)
            if not goes_on and sum(self._ends) >= SKIPPED_OF[0]:
                what = f"{sum(self._ends)} of the last {len(self._ends)} steps had a backward and no update"
                self._tell(AuditKind.SKIPPED, None, step, what)

    def _judge(self, look: _Look) -> None:
        assert look.after is not None and look.gradients is not None
        before, after, gradients = look.before.cpu(), look.after.cpu(), look.gradients.cpu()
        bits = _BITS[before.element_size()]
        moved = before.view(bits) != after.view(bits)
        self._sum(look.step, look.numbers, torch.split(after, look.sizes))
        if not look.rates:
            self._judge_stranger(look, moved=bool(moved.any()), graded=bool(gradients.any()))
            return
        if look.skipped is not None and look.skipped.any():
            return
        present = gradients != 0
        if not (present & ~moved).any() and all(look.trained):  # as nearly always
            full = bool(present.all())
            for at, (i, part) in enumerate(zip(look.numbers, torch.split(present, look.sizes), strict=True)):
                self._all[i].lost = 0.0
                self._judge_gradient(self._all[i], look, at, zero=not (full or part.any()))
            return
        size, rates = gradients.float().abs(), [float(rate) for rate in look.rates]
        finite = torch.isfinite(size)
        rate = torch.tensor(rates).repeat_interleave(torch.tensor(look.sizes))
        unit = torch.finfo(before.dtype).eps * torch.exp2(torch.frexp(before.float())[1] - 1.0)
        unit[before == 0] = 0.0
        is_low, momentum = before.element_size() < 4, look.momentum or 0.0
        noise = 8 * torch.finfo(before.dtype).eps if is_low and look.momentum is not None else 1e-3
        graded = finite & (size > noise * size[finite].mean()) & (rate > 0)
        seen = graded & (rate * size.clamp(max=1.0) > 2 * unit)
        bound = rate if look.momentum is None else rate * size / (1 - min(momentum, 0.99))
        small = graded & (16 * bound < unit)  # rounding to nearest loses it
        masks = torch.stack([moved, present, graded, graded & ~moved, seen, seen & moved, small])
        counts = [part.sum(1).tolist() for part in torch.split(masks, look.sizes, dim=1)]
        if (small & moved).sum() * (20 if momentum else 500) > small.sum():
            self._compensating.add(look.optimizer)
        weight = 1.0 if moved.any() else 0.3  # an optimizer may step only now and then
        for at, (i, per) in enumerate(zip(look.numbers, counts, strict=True)):
            kept = self._all[i]
            if not look.trained[at]:
                kept.frozen += per[0] > 0 and per[1] == 0
                if kept.frozen >= LOOKS:
                    self._tell(AuditKind.FROZEN_MOVED, kept, look.step, "it is frozen, and the optimizer moves it")
                continue
            if look.optimizer not in self._compensating:
                self._judge_movement(kept, look.step, rates[at], per, weight, str(before.dtype)[6:] if is_low else "")
            self._judge_gradient(kept, look, at, zero=not per[1])

    def _judge_movement(self, kept: _Kept, step: int, lr: float, per: Sequence[int], weight: float, low: str) -> None:
        """`per`: the counts of `_judge`. `low`: the name of a dtype of low precision."""
        _, _, graded, lost, seen, seen_moved, small = per
        rises, kept.lr = lr > kept.lr > 0 and kept.lost > 0, lr
        judged, is_lost = (graded, 2 * lost >= graded) if low else (seen, not seen_moved)
        if not judged or rises:
            return
        if low and 2 * small >= graded:
            weight = 1.0  # which is explained
        kept.lost = kept.lost + weight if is_lost else 0.0
        if kept.lost >= LOOKS - 0.01:
            what = f"{lost / graded:.0%} of what has a gradient does not move"
            why = f": it is stored and updated in {low}, and an update is less than half a unit in the last place"
            kind = AuditKind.LOW_PRECISION if low else AuditKind.STUCK
            self._tell(kind, kept, step, what + (why if low else ""))

    def _judge_gradient(self, kept: _Kept, look: _Look, at: int, *, zero: bool) -> None:
        absent, whole = look.absent[at], look.whole.get(look.numbers[at])
        kept.without = kept.without + 1 if absent else 0
        kept.zero = kept.zero + 1 if zero and not absent else 0
        if kept.zero and "bias" in kept.held.name.rpartition(".")[2]:
            return  # symmetry may make it so
        if max(kept.without, kept.zero) >= LOOKS - 1 and kept.hook is None:
            kept.hook = kept.held.module.register_forward_pre_hook(self._note_call(kept))
        called = look.called[at] or not look.sizes[at]
        if kept.without >= LOOKS and called:
            self._tell(AuditKind.NO_GRADIENT, kept, look.step, "its module runs, and no gradient reaches it")
        elif kept.zero >= LOOKS and called and (not look.sizes[at] or (whole is not None and bool(whole))):
            everywhere = len(kept.held.replicas) < 2 and self._world_size > 1  # other ranks have other parts
            self._tell(AuditKind.ZERO_GRADIENT, kept, look.step, "its whole gradient is zero", everywhere=everywhere)

    def _note_call(self, kept: _Kept) -> Any:
        """A hook for its module: what is never called needs no gradient."""

        def note(*_: Any) -> None:
            if torch.is_grad_enabled():
                kept.called = self._step

        return torch.compiler.disable(note)  # type: ignore[no-untyped-call]

    def _judge_stranger(self, look: _Look, *, moved: bool, graded: bool) -> None:
        kept = self._all[look.numbers[0]]
        if moved and not _is_float(kept.held.holder):
            self._tell(AuditKind.FROZEN_MOVED, kept, look.step, "it is stored in integers, which changed")
        kept.idle = -LOOKS * LATER if moved else kept.idle + graded
        if kept.idle >= LOOKS:
            what = "it has a gradient, no optimizer, and does not move"
            self._tell(AuditKind.NOT_IN_OPTIMIZER, kept, look.step, what)

    # -- what is reported ---------------------------------------------------------------------------------------------

    def _sum(self, step: int, numbers: Iterable[int], samples: Iterable[Tensor]) -> None:
        if not self._number:
            return
        if not self._news["checksums"] or self._news["checksums"][-1][0] != step:
            self._news["checksums"].append([step, {}])
        for i, t in zip(numbers, samples, strict=True):
            if i in self._number:
                self._news["checksums"][-1][1][self._number[i]] = zlib.crc32(
                    t.contiguous().view(torch.uint8).numpy().data
                )

    def _tell(self, kind: AuditKind, kept: _Kept | None, step: int, what: str, *, everywhere: bool = False) -> None:
        name = kept.held.name if kept is not None else ""
        if (kind, name) in self._told:
            return
        self._told.add((kind, name))
        found = Finding(kind=kind, parameter=name, rank=self._rank, step=step, what=what)
        self._news["everywhere" if everywhere else "findings"].append(found.to_dict())

    def report(self) -> dict[str, Any]:
        """What is new, as an `AuditLog` takes it; empty if nothing is."""
        news, self._news = self._news, {"findings": [], "everywhere": [], "checksums": []}
        return {name: value for name, value in news.items() if value or name == "replicated"}  # that is told once

    def close(self) -> None:
        for kept in self._all:
            if kept.hook is not None:
                kept.hook.remove()


def _sample(t: Tensor, step: int) -> Tensor:
    """[n], some elements of a tensor, others in each step; all of a small one. It may be a view."""
    if not t.is_contiguous():
        is_last = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
        t = t.permute(0, 2, 3, 1) if is_last else t.contiguous()
    if (several := t.numel()) <= WHOLE:
        return t.view(-1)
    stride = several // RUNS
    return t.as_strided((RUNS, RUN), (stride, 1), t.storage_offset() + step * 7919 % (stride - RUN)).reshape(-1)


def _by_dtype(samples: Iterable[tuple[int, Tensor]]) -> Iterable[tuple[list[int], list[Tensor]]]:
    groups: dict[Any, tuple[list[int], list[Tensor]]] = {}
    for i, t in samples:
        numbers, tensors = groups.setdefault((t.dtype, t.device), ([], []))
        numbers.append(i)
        tensors.append(t)
    return groups.values()


def _constant(value: Any) -> Any:
    """A number as it is; a tensor as it is now."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_float(p: Tensor) -> bool:
    return p.dtype.is_floating_point and p.element_size() > 1
