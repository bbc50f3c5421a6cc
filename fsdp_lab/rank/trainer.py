"""`Trainer`: one optimizer step of one rank, with the same code for every backend.

Note: the vote. After its last backward each rank contributes its loss and its part of the squared gradient norm to one
small sum over all ranks (`Wire.control`), and only then updates. So the mean loss, the gradient norm, clipping and the
fp16 overflow check cost one exchange of 16 bytes, the same for all backends; and a rank that has the result knows that
every rank has all its gradients. If a step is aborted before the vote, all ranks discard it. If a rank aborts while it
waits for the result, the others decide: a rank that has the result has committed, and passes it on (abort.py). No rank
applies a result that is not finite, unless fp16's loss scale can still be lowered.

Note: one synchronisation a step. Loss and norm are read from the device together, the only point of a step at which the host
waits for a GPU. The update is timed by marks on its stream that are read in the next step, so the event of a step is
complete one step later (`advance`), or when `finish` waits for the device.

Note: the vote of a GPU. Over NCCL, and on one rank, the device sums the votes, and the host reads the result before the
update; or, where nothing needs it earlier (`_reads_late`), when the next step begins, while the device updates. It does not
where the result is not finite or not all have voted: the third number of a vote is 1, or nan where loss or norm are not
finite or the rank was aborted. Until it is read the gradients stay and the step is not committed. So a rank whose device has
the result has committed, and others still can. Ranks that share a GPU, offload, and hybrid sharding vote on the host.

Note: bits of the norm. Squares are summed in float64, where a square of an fp32 number is exact, and the norm is rounded
to fp32's precision. So neither it nor clipped gradients depend on how backends cut gradients into tensors and shards.

Note: where a NaN began (`not_finite`). A loss belongs to one rank; a gradient shard is a sum over ranks, so that a NaN of
one rank is in all shards. So if the losses are finite, the step, which no rank has applied, is computed again, and each
rank checks its own summands."""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fsdp_lab.backends import Backend
from fsdp_lab.backends.base import scale_rates
from fsdp_lab.backends.state import ForwardState, gather_json
from fsdp_lab.base.events import Carrier, StepEvent
from fsdp_lab.base.tensors import map_tensors, move
from fsdp_lab.engine.schedule import Phase
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.flops import BestPeak
from fsdp_lab.models.own import Metrics, drawing, measured, seeded
from fsdp_lab.models.sources import Batch
from fsdp_lab.rank.ledger import LedgerResult
from fsdp_lab.rank.measure import StepMeter, StepReader
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.tracing import ClockOffset
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import RankAborted, Wire, WireContext

_NORM_ELEMENTS = 1 << 15  # whose float64 copy fits a cache
_NORM_BITS = 24  # of a norm: fp32's
_LARGEST_SQUARE = torch.finfo(torch.float32).max  # beyond it optimizers, which square gradients in fp32, do nothing
_GROWTH_INTERVAL = 2000  # steps without an overflow before a loss scale doubles
_LARGEST_SCALE = 2.0**24  # of a loss
_LEDGER_STEP = 2  # the third: the first creates optimizer state, in the second DDP rebuilds its buckets


class StepState(Enum):
    """How far the step in progress is."""

    IDLE = "no step in progress"
    COMPUTING = "forward and backward"
    VOTING = "the vote is cast, and its result is not known"
    UPDATING = "gradients are unscaled and clipped, and the optimizer steps"


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The cost of a step, for the fields of its `StepEvent`."""

    flops: int  # model FLOPs of this rank
    recompute_flops: int  # additional FLOPs of recompute
    tokens: int
    peak: BestPeak  # shared by all trainings of this dtype on this rank

    @property
    def peak_flops_per_s(self) -> float | None:
        """The peak that is known before any step, so that every run scales an emulated link alike."""
        return self.peak.given.flops_per_s


@dataclass(kw_only=True)
class TrainingProgress:
    """The progress of a training, which a switch of strategy keeps."""

    step: int = 0  # optimizer steps committed
    samples: int = 0  # the global sample counter
    vote: tuple[float, ...] = ()  # the result of the last committed step's vote


@dataclass(kw_only=True)
class Scaler:
    """Loss scaling for fp16: `scale` multiplies the loss; 1 and constant where `enabled` is not set.

    Small fp16 gradients would vanish, so gradients are divided by the scale before the optimizer (Micikevicius et al. 2018,
    section 3.2). One that is not finite means that it was too large: that step is skipped on all ranks, by the vote that
    ends it."""

    enabled: bool
    scale: float = 1.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        if self.enabled and self.scale == 1.0:
            self.scale = 2.0**16

    def update(self, *, overflowed: bool) -> None:
        """Called after each step, with the same answer on every rank."""
        if self.enabled and overflowed:
            self.scale, self.good_steps = max(1.0, self.scale / 2), 0
        elif self.enabled:
            self.good_steps += 1
            if self.good_steps >= _GROWTH_INTERVAL:
                self.scale, self.good_steps = min(_LARGEST_SCALE, self.scale * 2), 0


@dataclass(kw_only=True, eq=False, repr=False)
class Trainer:
    """Trains under one Spec. The trainer of the next Spec is given `progress` and `scaler`."""

    run: str
    spec: Spec
    info: RankInfo
    backend: Backend
    batches: Batches
    world: Wire
    cost: StepCost
    progress: TrainingProgress
    scaler: Scaler
    notes: tuple[str, ...]
    carriers: Callable[[], tuple[Carrier, ...]] = tuple  # of its backend; collective, takes some memory for a moment
    clock: ClockOffset
    loading_bytes: int = 0  # see `Memory`
    ledger: InitVar[LedgerResult | None] = None  # of this training before it was suspended; None: the third step is one

    def __post_init__(self, ledger: LedgerResult | None) -> None:
        options: dict[str, Any] = {"offload": self.spec.strategy.offload, "loading_bytes": self.loading_bytes}
        self.meter = StepMeter(self.backend, self.world.context, self.info, ledger=ledger, **options)
        self.state = StepState.IDLE
        self._forward_state = ForwardState(self.backend)
        # A committed step without its event, and what the host knows of it: the device may still be at its update.
        self._ended: tuple[StepReader, dict[str, Any]] | None = None
        self._complete_events: list[StepEvent] = []  # that were not returned
        self._unread: tuple[Tensor, Any] | None = None  # see `_update_guarded`
        self._fields: dict[str, Any] = {}  # known of the event of the newest step
        self._steps_here = 0
        self._ledger_due = ledger is None

    def step(self, *, slow: bool = False, ledger: bool = False, traced: bool = False) -> StepEvent:
        """One step, and its event, for which it waits for the device. Arguments and errors as of `advance`."""
        events = self.advance(slow=slow, ledger=ledger, traced=traced)
        return [*events, *self.finish()][-1]

    def advance(
        self, *, slow: bool = False, ledger: bool = False, traced: bool = False, late: bool = False
    ) -> list[StepEvent]:
        """Forward, backward, vote, update. `slow`: it is stopped between phases; `traced`: its event gets spans;
        `ledger`: it is a ledger step. The third step after a switch always is one; an earlier request is postponed until
        then. `late`: a step follows, which may read its vote. Returns the events that are complete now: on a CPU its own, on
        a GPU that of the step before, if it was not returned. Raises RankAborted or WireTimeout if it is aborted, NotFinite
        if it, or the step before, cannot be applied."""
        self.read_vote()
        self._ledger_due = self._ledger_due or ledger
        busy = slow or torch.autograd._profiler_enabled()  # only one profiler can be active
        ledger = self._ledger_due and self._steps_here >= _LEDGER_STEP and not busy
        inspected = self.backend.begin_step(self.progress.step)
        carriers = self.carriers() if self.is_first else ()  # here nothing else is held than between steps
        self._forward_state.copy()
        self._fields = {
            "step": self.progress.step,
            "samples": self.progress.samples + self.spec.global_batch,
            "lr": self.spec.workload.lr * self._rate_factor(),
            "loss_scale": self.scaler.scale if self.scaler.enabled else None,
            "first_after_switch": self.is_first,
            "carriers": carriers,
            "ledger": ledger,
            "inspected": inspected,
            "slow": slow,
        }
        late = late and not (slow or ledger or traced or inspected) and self._reads_late()
        with self.meter.step(ledger=ledger, traced=traced and not slow):
            self.state = StepState.COMPUTING
            self._vote_and_update(self._accumulate(), late=late)
        self._ended = self.meter.end(gradients=self._unread is not None), self._fields
        self._steps_here += 1
        self._ledger_due = self._ledger_due and not ledger
        if not self.meter.runs_behind:
            self._complete()
        return self._taken()

    @property
    def is_first(self) -> bool:
        """Whether no step was made with this backend."""
        return self._steps_here == 0

    def finish(self, *, wait: bool = True) -> list[StepEvent]:
        """The events that are not returned yet, for which it waits for the device; without `wait`, as after an abort, it
        takes the times that are known now."""
        if wait:
            self.read_vote()
        self.meter.pause(wait=wait)
        if self._unread is None:
            self._complete()
        return self._taken()

    def _taken(self) -> list[StepEvent]:
        taken, self._complete_events = self._complete_events, []
        return taken

    def _complete(self) -> None:
        """Make the event of the step that has ended, if that was not done."""
        ended, self._ended = self._ended, None
        if ended is not None:
            read_step, fields = ended
            fields |= {name: getattr(self.cost, name) for name in ("flops", "recompute_flops", "tokens")}
            fields |= {"run": self.run, "spec_id": self.spec.id, "notes": self.notes}
            self._complete_events.append(self.meter.event(read_step, self.clock, self.cost.peak, fields))

    def checked(self, event: StepEvent) -> StepEvent:
        """The event of the step that has just ended, with a checksum of the parameters."""
        replica = self.info.rank // self.spec.shard_factor  # the ranks of a shard group are consecutive
        return dataclasses.replace(event, checksum=checksum(self.backend), replica=replica)

    def evaluated(self, event: StepEvent, samples: int, metrics: Metrics) -> StepEvent:
        """The event of the step that has just ended, with mean loss and metrics of so many held-out samples, or of all;
        collective, not part of its time or traffic. Raises FieldError: none, or of a metric; RankAborted or WireTimeout."""
        total = torch.zeros((), dtype=torch.float64, device=self.info.device)
        sums, w = torch.zeros(len(metrics), dtype=torch.float64), self.spec.workload
        with self.backend.evaluating():
            for number, (batch, counted) in enumerate(self.batches.held_out(samples)):
                self.world.context.check()  # DDP has no collective here that checks
                first = (number * self.info.world_size + self.info.rank) * w.micro_batch
                own = seeded(w.seed, "evaluation", first, device=self.info.device)  # the same in each evaluation
                with own if w.is_own or metrics else nullcontext():
                    given = self.backend.loss, self.backend.module, move(batch, self.info.device)
                    loss, told = measured(metrics if counted else {}, self.batches.source, *given)
                    sums[: len(told)] += torch.tensor(told, dtype=torch.float64) * counted
                self.world.context.set_unit("")
                total += loss.double() * counted if counted else 0.0
        mean = torch.cat([total.cpu().reshape(1), sums]) / self.batches.check_held_out(samples)
        self.world.control(mean)
        loss_told, *told = mean.tolist()
        return dataclasses.replace(event, eval_loss=loss_told, eval_metrics=dict(zip(metrics, told, strict=True)))

    # -- phases ---------------------------------------------------------------------------------------------------

    def _accumulate(self) -> Tensor:
        """Forward and backward of every micro-batch. Returns the sum of this rank's losses, on its device, each by its
        weight (`Batches.weight`), so that the mean over micro-batches and ranks is that over all labels."""
        count, input_s = self.spec.workload.accumulate, 0.0
        total = torch.zeros((), dtype=torch.float32, device=self.info.device)
        for micro in range(count):
            self.meter.part("input")
            asked_s = time.perf_counter()
            batch = _pinned(self.batches.batch(self.progress.samples, micro), self.info.device)
            input_s += time.perf_counter() - asked_s
            self.meter.part("forward")
            with self._random(micro), self.backend.micro_batch(communicate=self.spec.communicates(micro)):
                loss = self.backend.loss(batch).float()
                if (weight := self.batches.weight(self.progress.samples, micro)) != 1.0:
                    loss = loss * weight
                self.meter.part("backward")
                torch.autograd.backward(loss * (self.scaler.scale / count))
            self.world.context.meter.end_backward()
            self.world.context.set_unit("")
            total += loss.detach()
        self._fields["input_s"] = input_s
        return total

    def _random(self, micro: int) -> AbstractContextManager[None]:
        """The random numbers of dropout, and of the user's own module."""
        w, device = self.spec.workload, self.info.device
        if w.dropout == "off" and not w.is_own:
            return nullcontext()
        first = int(self.batches.samples(self.progress.samples, micro)[0])
        return seeded(w.seed, first, device=device) if w.is_own else drawing(w.seed, first, device)

    def _vote_and_update(self, total: Tensor, *, late: bool) -> None:
        self.meter.part("optimizer")
        vote = self._loss_and_norm(total)
        self.world.context.check()
        self.state = StepState.VOTING
        self._cast(vote)
        if late and vote.numel() == 4:
            self._update_guarded(vote)
        else:
            told = vote.tolist()
            self.meter.synchronised()
            self.world.context.check()
            self._decide(told)
        self._complete()  # of the step before, which the device has long ended

    def _loss_and_norm(self, total: Tensor) -> Tensor:
        """This rank's mean loss, and its vote: that, and its squared gradient norm; [3] on the host, or [4] on a device."""
        squared = squared_norm(self.backend.gradients(), total.device)
        mean = total.double() / self.spec.workload.accumulate
        if not self.world.sums_on_device(squared):
            loss, norm = _read(mean, squared)
            return torch.tensor([loss, loss, norm if norm <= _LARGEST_SQUARE else math.inf], dtype=torch.float64)
        squared = squared.masked_fill(squared > _LARGEST_SQUARE, math.inf)
        alive = self.world.context.alive[0]  # copied as it is when the device comes here
        alive = torch.empty_like(squared).copy_(alive, non_blocking=True)
        return torch.stack([mean, mean, squared, alive + 0.0 * (mean + squared)])

    def _cast(self, vote: Tensor) -> None:
        """Sum all but the first number over the ranks; collective."""
        self.world.control(vote[1:])

    def _reads_late(self) -> bool:
        """Whether a vote may be read after its update: not to clip, for fp16's scale, or in the first steps; and only where
        the optimizer leaves an update out by a flag on the device, as torch's fused ones do (SGD not while it begins)."""
        optimizer = self.backend.optimizer
        is_guarded = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        if optimizer.defaults.get("momentum"):
            is_guarded &= all(p in optimizer.state for group in optimizer.param_groups for p in group["params"])
        needed = self.spec.workload.clip_norm is not None or self.scaler.enabled or self.backend.has_user_code
        return is_guarded and not needed and self._steps_here > _LEDGER_STEP

    def _update_guarded(self, vote: Tensor) -> None:
        """Update, if the device finds that the vote allows it; `read_vote` commits, when the vote, [4], is on the host."""
        streams: Any = self.world.context.streams
        optimizer: Any = self.backend.optimizer
        unread = streams.host_memory(4, torch.float64).copy_(vote, non_blocking=True), streams.mark()
        optimizer.found_inf = (vote[3] != self.info.world_size).float()
        try:
            self._update()
        finally:
            del optimizer.found_inf
        self._unread = unread

    def read_vote(self, *, aborted: bool = False) -> None:
        """Commit the step before, if its vote was not read, or raise as `advance`. `aborted`: only if the device had every
        rank's vote before the abort; else it has updated nothing, and this rank is as one that waits for the result."""
        if self._unread is None:
            return
        vote, mark = self._unread
        comes_now = not mark.query()
        mark.synchronize()
        if not aborted:
            self.world.context.check()
            if comes_now:
                self.meter.synchronised(mark)
        ended, self._ended, self._unread = self._ended, None, None
        if (told := vote.tolist())[3] == self.info.world_size or not aborted:
            self._decide(told, updated=True)
            self._ended = ended

    def _decide(self, told: Sequence[float], *, updated: bool = False) -> None:
        """Commit, or raise. told: as of `_loss_and_norm`, the vote summed. `updated`: by the device, if that allows it."""
        loss, *vote = told[:3]
        is_finite = all(map(math.isfinite, vote))
        if is_finite and told[3:] not in ([], [self.info.world_size]):  # another rank was aborted, and will say why
            self.world.barrier().wait()
            raise RankAborted("a rank gave its vote up")
        overflows = self.scaler.enabled and self.scaler.scale > 1.0  # fp16's scale may be the cause, and can be lowered
        if not (is_finite or overflows):
            step = self.progress.step
            raise not_finite(step=step, loss=loss, backend=self.backend, world=self.world, repeat=self._repeat)
        mean_loss, norm, skipped = self.commit(vote, updated=updated)
        self._fields |= {"loss": loss, "mean_loss": mean_loss, "grad_norm": norm, "skipped": skipped}

    def _repeat(self) -> None:
        self.discard()
        self.state = StepState.COMPUTING
        self._accumulate()

    def commit(self, vote: Sequence[float], *, updated: bool = False) -> tuple[float, float, bool]:
        """Update, unless the device has, or skip the update; every rank does the same with the same result. Not collective,
        so it cannot be aborted. If it raises, it can be called again (abort.py): gradients are not scaled twice."""
        mean_loss = vote[0] / self.info.world_size
        finite = math.isfinite(vote[1])
        norm = _rounded(math.sqrt(vote[1] / self.backend.replicas)) / self.scaler.scale if finite else math.inf
        skipped = not (math.isfinite(norm) and math.isfinite(mean_loss))  # fp16 overflow: see `_vote_and_update`
        self.meter.before_update()
        if not (skipped or updated):
            if self.state is StepState.VOTING:
                factor, clip = 1.0 / self.scaler.scale, self.spec.workload.clip_norm
                if clip is not None and norm > clip:
                    factor *= clip / (norm + 1e-6)
                if factor != 1.0:  # undoes the loss scale and clips, in one pass
                    torch._foreach_mul_(self.backend.gradients(), factor)
                self.state = StepState.UPDATING
            self._update()
        self.backend.optimizer.zero_grad(set_to_none=True)
        self.scaler.update(overflowed=skipped)
        self.progress.step += 1
        self.progress.samples += self.spec.global_batch
        self.progress.vote = tuple(vote)
        self.state = StepState.IDLE
        return mean_loss, norm, skipped

    def _update(self) -> None:
        scale_rates(self.backend.optimizer, self._rate_factor())
        with record_function(Phase.OPTIM.value):
            self.backend.optimizer.step()
        self.meter.after_update()

    def discard(self) -> None:
        """Drop the step in progress, if any, with what its forwards have changed."""
        begun = self.state is not StepState.IDLE
        self.backend.optimizer.zero_grad(set_to_none=True)
        self.state = StepState.IDLE
        if begun:
            self._forward_state.give_back()

    def _rate_factor(self) -> float:
        return self.spec.workload.rates.factor(self.progress.step)


def squared_norm(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Returns the squared norm of all tensors together, in float64; a scalar on their device, or on `device` if there are
    none. On a CPU it is taken in parts, of which torch makes float64 copies."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    parts = tensors
    if tensors[0].is_cpu:
        rows = [t.view(-1) if t.is_contiguous() else t for t in tensors]
        parts = [p for r in rows for p in torch.split(r, max(1, _NORM_ELEMENTS * r.shape[0] // r.numel()))]
    return torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float64)).square().sum()


def _rounded(norm: float) -> float:
    """To `_NORM_BITS` binary digits."""
    mantissa, exponent = math.frexp(norm)
    return math.ldexp(round(math.ldexp(mantissa, _NORM_BITS)), exponent - _NORM_BITS)


def _read(*scalars: Tensor) -> list[float]:
    """Read them together, with one synchronisation with the device of the first one."""
    device = scalars[0].device
    together = [s.to(device=device, dtype=torch.float64, non_blocking=True) for s in scalars]
    values: list[float] = torch.stack(together).tolist()
    return values


def _pinned(batch: Batch, device: torch.device) -> Batch:
    """A copy of pageable memory to a GPU may wait for the device. A dataset may have tensors on the GPU already."""

    def pinned(t: Tensor) -> Tensor:
        return t.pin_memory() if t.device.type == "cpu" and t.layout is torch.strided and not t.is_pinned() else t

    return map_tensors(pinned, batch) if device.type == "cuda" else batch


_SUMS = ("reduce_scatter", "all_reduce")
_HINT = "the step was applied on no rank; lower lr, set clip_norm, or use precision bf16 or fp32"
_CHUNK = 1 << 20  # elements at a time: the temporaries are several times their size
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that no two positions of a parameter have the same weight


class NotFinite(RuntimeError):
    """The loss or a gradient of this rank is not finite."""


def not_finite(*, step: int, loss: float, backend: Backend, world: Wire, repeat: Callable[[], object]) -> RuntimeError:
    """The exception for this rank after a vote that was not finite, while its gradients exist; collective.

    `NotFinite` on the rank that caused it, or on rank 0 if only the sum is not finite; `RankAborted` on the others.
    `repeat` repeats forward and backward of the step, starting without gradients."""
    rank = world.rank()
    losses = gather_json(not math.isfinite(loss))
    if any(losses):
        return _error(rank, losses, f"its loss in step {step} is {loss}", f"its loss in step {step} is not finite")
    shards = backend.param_shards()
    gradients = ((i, backend.gradient(shard)) for i, shard in enumerate(shards, 1))
    bad = max((i for i, g in gradients if g is not None and _bad(g)), default=0)
    last = max(gather_json(bad))  # in model order, which the backward reaches first; 0: none
    if not last:
        whole = f"the gradient norm of step {step} is not finite, though each gradient is"
        return _error(rank, [1.0], whole, whole)
    name = shards[last - 1].name
    mine = f"its gradient of {name} in step {step} is not finite"
    if world.size() == 1:
        return _error(rank, [1.0], mine, mine)
    sums = gather_json(_first_bad_summand(world.context, repeat))
    if any(sums):
        first = min(number for number in sums if number)
        return _error(rank, [number == first for number in sums], mine, mine)
    whole = f"the gradient of {name} in step {step} is not finite, though each rank's summand, computed again, is"
    return _error(rank, [1.0], whole, whole)


def _error(rank: int, guilty: Sequence[object], mine: str, others: str) -> RuntimeError:
    """`guilty`: by rank, whether it was the cause; may be shorter than the world size."""
    if any(guilty[rank : rank + 1]):
        return NotFinite(f"{mine}; {_HINT}")
    first = next(r for r, is_guilty in enumerate(guilty) if is_guilty)
    # announced here, it could reach the rank at fault before that one knows that it is
    return RankAborted(f"rank {first} failed: NotFinite: {others}", others_know=True)


def _first_bad_summand(context: WireContext, repeat: Callable[[], object]) -> int:
    """Returns the number, from 1, of the first sum to which this rank contributes a non-finite value; 0 if none."""
    count, first = 0, 0

    def look(tensors: Sequence[Tensor]) -> None:
        nonlocal count, first
        if context.last is not None and context.last.kind in _SUMS:
            count += 1
            first = first or (count if _bad(tensors[0]) else 0)  # the first tensor is its summand

    before, context.on_issue = context.on_issue, look
    try:
        repeat()
    finally:
        context.on_issue = before
    return first


def _bad(t: Tensor) -> bool:
    return not bool(torch.isfinite(t).all())


def checksum(backend: Backend) -> int:
    """This rank's part of a checksum of the parameters: the parts of a replica's ranks add up to it, modulo 2^64.

    Each element's 32 bits (fp32; -0 as 0) are weighted by its parameter's name and its position in it, so that the sum
    does not depend on the sharding, and a single different element changes it. Padding is in no shard."""
    total = 0
    for shard in backend.param_shards():
        seed = int.from_bytes(hashlib.blake2b(shard.name.encode(), digest_size=8).digest(), "little", signed=True)
        for first in range(0, shard.numel, _CHUNK):
            bits = (shard.local[first : first + _CHUNK].detach() + 0.0).view(torch.int32).long()
            weights = torch.arange(bits.numel(), device=bits.device).add_(shard.start + first).mul_(_STRIDE).add_(seed)
            total += int(bits.mul_(weights.bitwise_or_(1)).sum())
    return total % (1 << 64)
