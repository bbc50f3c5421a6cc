"""`Trainer`: one optimizer step of one rank, the same lines for every backend.

Note: the vote. After its last backward each rank gives its loss and its part of the squared gradient norm to one small
sum over all ranks (`Wire.control`), and only then updates. So the mean loss, the gradient norm, clipping and the fp16
overflow check cost one exchange of 16 bytes and are alike for all backends; and a rank that has the result knows that
every rank has all its gradients. A step that is given up before that is discarded by all. One that is given up by a rank
which waits for the result is decided by the others: who has the result has updated, and passes it on (session.py). A result
that is not finite is applied by none (finite.py), but where fp16's scale can still be lowered.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fsdp_lab.backends import Backend
from fsdp_lab.engine.scaler import Scaler
from fsdp_lab.events import StepEvent
from fsdp_lab.models import Batches
from fsdp_lab.rank.checksum import checksum
from fsdp_lab.rank.clocks import Clock
from fsdp_lab.rank.finite import not_finite
from fsdp_lab.rank.ledger import Found
from fsdp_lab.rank.measure import Measure
from fsdp_lab.rank.rendezvous import Seat
from fsdp_lab.schedule import Phase
from fsdp_lab.spec import Spec
from fsdp_lab.wire import Wire

_NORM_ELEMENTS = 1 << 15
_LEDGER_STEP = 2  # the third: the first makes optimizer state, in the second DDP lays its buckets anew


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step amounts to, for the event."""

    flops: int  # model FLOPs of this rank
    recompute_flops: int  # beside them, what recompute makes it do again
    tokens: int
    peak_flops_per_s: float | None
    peak_source: str


@dataclass(kw_only=True)
class Progress:
    """What outlives a switch of strategy."""

    step: int = 0  # optimizer steps committed
    samples: int = 0  # the global sample counter
    vote: tuple[float, ...] = ()  # the result of the last committed step's vote


class Trainer:
    """Made anew for each applied Spec; `progress` and `scaler` are handed on."""

    def __init__(
        self,
        *,
        run: str,
        spec: Spec,
        seat: Seat,
        backend: Backend,
        batches: Batches,
        world: Wire,
        cost: Cost,
        progress: Progress,
        scaler: Scaler,
        notes: tuple[str, ...],
        clock: Clock,
        found: Found | None = None,
    ) -> None:
        """`found`: by a ledger step of this very training before it was parked; it needs no other at once."""
        self.run, self.spec, self.seat, self.backend, self.batches = run, spec, seat, backend, batches
        self.world, self.cost, self.progress, self.scaler, self.notes = world, cost, progress, scaler, notes
        self.clock = clock
        self.measure = Measure(backend, world.hub, seat, offload=spec.strategy.offload, found=found)
        self.voting = False  # between giving the vote and having its result
        self._scaled = False  # the gradients, by a commit that was cut off and will be made again
        self._steps_here = 0
        self._ledger_due = found is None

    def step(self, *, slow: bool = False, ledger: bool = False, traced: bool = False) -> StepEvent:
        """Forward, backward, vote, update; `slow`: somebody halts it on its way; `ledger`: make it a ledger step; `traced`:
        its event carries spans.

        The third step after a switch is a ledger step anyway; one that is asked for earlier is put off until then.

        Raises RankAborted or WireTimeout when it is given up, NotFinite when it cannot be applied.
        """
        self._ledger_due = self._ledger_due or ledger
        busy = slow or torch.autograd._profiler_enabled()  # there can be one profiler
        ledger = self._ledger_due and self._steps_here >= _LEDGER_STEP and not busy
        with self.measure.step(ledger=ledger, traced=traced and not slow):
            loss = self._accumulate()
            mean_loss, norm, skipped = self._vote_and_update(loss)
        measured = self.measure.read()
        first = self._steps_here == 0
        self._steps_here += 1
        self._ledger_due = self._ledger_due and not ledger
        return StepEvent(
            run=self.run,
            spec_id=self.spec.id,
            rank=self.seat.rank,
            world_size=self.seat.world_size,
            step=self.progress.step - 1,
            samples=self.progress.samples,
            end_unix_s=measured.end_unix_s,
            step_time_s=measured.step_time_s,
            tokens=self.cost.tokens,
            loss=loss,
            mean_loss=mean_loss,
            grad_norm=norm,
            flops=self.cost.flops,
            recompute_flops=self.cost.recompute_flops,
            peak_flops_per_s=self.cost.peak_flops_per_s,
            peak_source=self.cost.peak_source,
            memory=measured.memory,
            memory_curve=measured.memory_curve,
            comm=measured.comm,
            first_after_switch=first,
            ledger=ledger,
            slow=slow,
            skipped=skipped,
            begin_s=measured.begin_s + self.clock.offset_s,
            clock_error_s=self.clock.error_s,
            spans=measured.spans,
            notes=self.notes,
        )

    def checked(self, event: StepEvent) -> StepEvent:
        """The event of the step that has just ended, with a checksum of what it left."""
        replica = self.seat.rank // self.spec.shard_factor  # a shard group is so many ranks that follow each other
        return dataclasses.replace(event, checksum=checksum(self.backend), replica=replica)

    def evaluated(self, event: StepEvent, samples: int) -> StepEvent:
        """The event of the step that has just ended, with the mean loss of so many held-out samples; collective, and none of
        the step's time or traffic.

        Raises:
            SpecError: fewer are held out. RankAborted or WireTimeout: it was given up.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.seat.device)
        with self.backend.evaluating():
            for batch, counted in self.batches.held_out(samples):
                self.world.hub.check()  # DDP has no collective here that would
                loss = self.backend.loss(batch).double()
                self.world.hub.name("")
                total += loss * counted if counted else 0.0
        mean = total.cpu().reshape(1) / samples
        self.world.control(mean)
        return dataclasses.replace(event, eval_loss=float(mean))

    # -- phases ---------------------------------------------------------------------------------------------------

    def _accumulate(self) -> float:
        """Forward and backward of every micro-batch. Returns this rank's mean loss."""
        count = self.spec.workload.accumulate
        every = self.spec.strategy.sync == "every"
        total = torch.zeros((), dtype=torch.float32, device=self.seat.device)
        for micro in range(count):
            self.measure.part("forward")
            batch = self.batches.batch(self.progress.samples, micro)
            with self.backend.micro_batch(communicate=every or micro == count - 1):
                loss = self.backend.loss(batch).float()
                self.measure.part("backward")
                torch.autograd.backward(loss * (self.scaler.scale / count))
            self.world.hub.meter.end_backward()
            self.world.hub.name("")
            total += loss.detach()
        return float(total) / count

    def _vote_and_update(self, loss: float) -> tuple[float, float, bool]:
        """Returns the mean loss over ranks, the gradient norm, and whether fp16 overflow skipped the update."""
        self.measure.part("optimizer")
        gradients = self._gradients()
        vote = torch.tensor([loss, squared_norm(gradients)], dtype=torch.float64)
        self.world.hub.check()
        self.voting = True
        self.world.control(vote)
        if not self._usable(vote.tolist()):
            raise not_finite(
                step=self.progress.step, loss=loss, backend=self.backend, world=self.world, again=self._again
            )
        return self.commit(vote.tolist())

    def _usable(self, vote: Sequence[float]) -> bool:
        """Whether all is finite, or fp16's scale may be to blame, and can be lowered."""
        return all(map(math.isfinite, vote)) or (self.scaler.enabled and self.scaler.scale > 1.0)

    def _again(self) -> None:
        self.discard()
        self._accumulate()

    def commit(self, vote: Sequence[float]) -> tuple[float, float, bool]:
        """What every rank does with the same result: update, or skip. Not collective, so it cannot be aborted."""
        mean_loss = vote[0] / self.seat.world_size
        norm = (
            math.sqrt(max(0.0, vote[1] / self.backend.replicas)) / self.scaler.scale
            if math.isfinite(vote[1])
            else math.inf
        )
        skipped = not (math.isfinite(norm) and math.isfinite(mean_loss))  # fp16 overflow: see `_usable`
        self.measure.before_update()
        if not skipped:
            if not self._scaled:
                self._scale_gradients(norm)
            self._scaled = True
            with record_function(Phase.OPTIM.value):
                self.backend.optimizer.step()
            self.measure.after_update()
        self.backend.optimizer.zero_grad(set_to_none=True)
        self.scaler.update(overflowed=skipped)
        self.progress.step += 1
        self.progress.samples += self.spec.global_batch
        self.progress.vote = tuple(vote)
        self.voting = self._scaled = False
        return mean_loss, norm, skipped

    def discard(self) -> None:
        """Forget the step in progress."""
        self.backend.optimizer.zero_grad(set_to_none=True)
        self.voting = self._scaled = False

    def _scale_gradients(self, norm: float) -> None:
        """Undo the loss scale and clip, in one pass, or none where neither is asked for."""
        factor = 1.0 / self.scaler.scale
        clip = self.spec.workload.clip_norm
        if clip is not None and norm > clip:
            factor *= clip / (norm + 1e-6)
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)

    def _gradients(self) -> list[Tensor]:
        shards = (self.backend.gradient(p) for p in self.backend.pieces())
        return [g for g in shards if g is not None and g.numel()]


def squared_norm(tensors: list[Tensor]) -> float:
    """Of all of them together. Norms are taken in a tensor's dtype, their squares summed in float64; on a CPU, where a norm
    is a running sum in fp32 whose error grows with the tensor, of a part at a time (tests/rank/test_norm.py)."""
    if not tensors:
        return 0.0
    parts = [part for t in tensors for part in _slices(t)] if tensors[0].is_cpu else tensors
    return float(torch.stack(torch._foreach_norm(parts, 2)).double().square().sum())


def _slices(t: Tensor) -> Sequence[Tensor]:
    """Parts of a tensor; rows of one that is not contiguous."""
    rows = t.view(-1) if t.is_contiguous() else t
    return torch.split(rows, max(1, _NORM_ELEMENTS * rows.shape[0] // rows.numel()))
