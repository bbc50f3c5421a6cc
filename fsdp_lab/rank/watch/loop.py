"""`Watch`: measures a loop that is not the lab's, by the lab's own probes. `fsdp_lab.watch` makes and explains one.

Note: where a step's parts begin. The forward begins with the step; the backward where a gradient first reaches an output
of the model, so the loss's own backward, outside of the model, still counts as forward; the optimizer's part at its
pre-step hook. These hooks do nothing but note the time.

Note: what is exchanged. On entry the ranks agree on the run's name and compare their clocks. After that a watched loop
sends nothing: which steps are traced follows from their numbers, and the mean loss is taken over the events of all ranks
(`Step.mean_loss`). A GPU is read as the trainer does at its vote, but at most every half second."""

import contextlib
import dataclasses
import math
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import distributed_c10d as c10d

from fsdp_lab.base.errors import ArgumentError, check_whole, is_number, is_whole
from fsdp_lab.base.events import UNKNOWN_TRAFFIC, StepEvent
from fsdp_lab.base.hang import LoopPlace
from fsdp_lab.base.tensors import tensors_in
from fsdp_lab.engine.extras.refusals import gather_texts
from fsdp_lab.models.flops import BestPeak, device_peak
from fsdp_lab.rank.abort import INTERRUPTED, first_line
from fsdp_lab.rank.measure import StepMeter, StepReader, device_name, fidelity_notes, software
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.tracing import ClockOffset, compare_clocks
from fsdp_lab.rank.watch.audit import UpdateAudit
from fsdp_lab.rank.watch.found import FlopCount, can_count, find
from fsdp_lab.wire import SHARED_MEMORY, RankAborted, Wire, WireContext

PUBLISH_EVERY_S = 0.2
READ_EVERY_S = 0.5  # on a GPU
LEDGER_STEP = 2  # the third, as of the lab's own runs
TRACE_EVERY = 16
OFTEN, SELDOM = 8, 4  # of a script, after so many traced steps only each fourth of them is traced

_NO_WIRE = (
    "Communication is not measured: the process group is not the lab's. Call fsdp_lab.init_process_group() in place of "
    "torch.distributed.init_process_group()."
)
_COMPILED = "FLOPs are not counted, since the model is compiled; give them as fsdp_lab.watch(..., flops=...)."
_OTHER_GROUP = "Collectives in a process group that is not the lab's are not measured."

Publish = Callable[[dict[str, Any]], None]


@dataclass(kw_only=True)
class LoopProgress:
    """Where a rank is in its newest watched loop; read by the thread of the heartbeats. `hang_s`: how long a collective may
    wait for it; None: the lab's own limit."""

    place: LoopPlace = LoopPlace.NONE
    steps: int = 0  # begun
    hang_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LoopHost:
    """What a loop is watched from: a rank of the lab's, or a process of its own. `world`: the default group; None where it
    is none of the lab's, or there is none. `publish`: takes messages for the lab's kernel or for the history, with
    `StepEvent`s. `guard`: the context of the whole loop, in which a failure of one rank frees the others. `progress`: is
    told where this rank is.
    `run`: a name that all ranks know already: then nothing is exchanged on entry, and `clock` is what is known of clocks."""

    info: RankInfo
    context: WireContext
    world: Wire | None
    publish: Publish
    notes: tuple[str, ...] = ()
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    progress: LoopProgress = field(default_factory=LoopProgress)
    run: str = ""
    clock: ClockOffset = field(default_factory=ClockOffset)


def plainly(publish: Publish) -> Publish:
    """For messages that cross processes."""
    return lambda message: publish({**message, "events": [event.to_dict() for event in message["events"]]})


def plain_host(model: nn.Module, publish: Publish) -> LoopHost:
    """That of a process whose default group, if any, is torch's own."""
    joined = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    device = next((p.device for p in model.parameters()), torch.device("cpu")) if isinstance(model, nn.Module) else None
    info = RankInfo(rank=rank, world_size=world_size, device=device or torch.device("cpu"))
    notes = (*fidelity_notes(info, 1), *((_NO_WIRE,) if world_size > 1 else ()))
    return LoopHost(info=info, context=WireContext(), world=None, publish=publish, notes=notes)


@dataclass(kw_only=True)
class _Given:
    """What the loop said in one step."""

    tokens: int
    losses: list[float | Tensor] = field(default_factory=list)
    grad_norm: float | Tensor = math.nan
    part: str = "forward"  # in progress; "" between parts
    backward: bool = False  # whether there was one
    updated: bool = False
    fields: dict[str, Any] = field(default_factory=dict)  # of its event


class Watch:
    """See the module. Made by `fsdp_lab.watch`. `run`: the run's id. `steps`: how many were recorded."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        host: LoopHost,
        *,
        tokens: int | None = None,
        flops: int | bool = True,
        title: str = "",
        ledger_every: int | None = None,
        trace_every: int = TRACE_EVERY,
        hang_s: float | None = None,
        report_to: str | Sequence[str] | None = None,
        audit: bool = True,
        copies: bool = False,
        is_told: bool = False,
    ) -> None:
        """`report_to`: trackers to which whoever receives its messages is to report. `copies`: the optimizers may step what
        is none of the model's, as fp32 copies, or what its parameters once were. `is_told`: `before_forward` and
        `after_forward` are called, in place of hooks."""
        for name, value in (("tokens", tokens), ("ledger_every", ledger_every), ("trace_every", trace_every)):
            if value is not None:
                check_whole(name, value)
        if hang_s is not None and not (is_number(hang_s) and hang_s > 0):
            raise ArgumentError("hang_s", f"{hang_s!r} is refused", "give seconds, more than 0, or None for the lab's")
        self._hang_s = hang_s
        self._found = find(model, _optimizers(optimizer))
        self._host, self._context, self._world = host, host.context, host.world
        self._tokens, self._title, self._report_to = tokens, title, report_to
        self._count = FlopCount()
        self._counts = flops is True and can_count(model)
        self._compiled = flops is True and not self._counts
        if not isinstance(flops, bool):
            check_whole("flops", flops, wanted="the FLOPs of one rank's step, True to count them, or False")
            self._count.model = flops
        self._counted_tokens: int | None = None  # of the step whose FLOPs were counted
        self._peak: BestPeak | None = None
        self._ledger_every, self._trace_every = ledger_every, trace_every
        self.run, self.steps = "", 0
        self._open = self._used = False
        self._given: _Given | None = None  # of the step in progress
        self._ended: list[tuple[StepReader, _Given, dict[str, Any]]] = []  # whose events are not made yet
        self._waiting: list[StepEvent] = []
        self._published_s = self._read_s = 0.0
        self._handles: list[Any] = []
        self._is_told = is_told
        self._clock = host.clock
        self._guard = contextlib.ExitStack()
        self._ledger_due, self._skipped = True, 0
        self._audits, self._audit_ended = audit, ""
        self._audit: UpdateAudit | None = None
        for one in () if copies else self._found.optimizers:
            self._check(one)

    # -- begin and end ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._used:
            raise ArgumentError("watch", "this one is over", "call fsdp_lab.watch again for another loop")
        if self._context.watched:
            raise ArgumentError("watch", "this rank is watching a loop already", "end that one first")
        if self._context.aborted is not None:
            hint = "call fsdp_lab.init_process_group() on all ranks, and build the model again"
            raise ArgumentError("model", f"its process groups were given up ({self._context.aborted})", hint)
        self._used = self._open = self._context.watched = True
        progress = self._host.progress
        progress.place, progress.steps, progress.hang_s = LoopPlace.BETWEEN, 0, self._hang_s
        try:
            self._guard.enter_context(self._host.guard())
            self._begin()
        except BaseException as e:
            self._close()
            self._guard.__exit__(type(e), e, e.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._read_all(wait=error is None)
        except BaseException as e:
            error = e
            raise
        finally:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Frees the other ranks first, if it failed: rank 0's history waits for their last messages."""
        place = LoopPlace.OVER if error is None else self._host.progress.place
        self._close()
        try:
            if error is None:
                self._guard.close()
            else:
                self._guard.__exit__(type(error), error, error.__traceback__)
        finally:
            state, reason = _outcome(error)
            frames = [] if error is None else traceback.extract_tb(error.__traceback__)
            notes = []
            if self._skipped:
                steps = f"{self._skipped} step{'s' * (self._skipped != 1)}"
                where = f"on rank {self._host.info.rank}"
                notes.append(f"{steps} without a backward and without optimizer.step() {where}: not recorded.")
            notes += [self._audit_ended] if self._audit_ended else []
            end = {"state": state, "reason": reason, "notes": notes, "place": place, "steps": self._host.progress.steps}
            end["own"] = error is not None and not isinstance(error, RankAborted)
            end["generates"] = any(frame.name == "generate" for frame in frames)
            self._publish({"end": end})

    def _begin(self) -> None:
        host, device = self._host, self._found.device
        offload = self._found.setup().offload
        on_host = offload != "none" or device.type == "meta"
        self._info = host.info if on_host else dataclasses.replace(host.info, device=device)
        self.run = host.run or self._agree()
        if self._world is not None:
            self._clock = host.clock if host.run else compare_clocks(self._world)
            self._found.name_units(self._context)
        self._meter = StepMeter(self._found, self._context, self._info, offload=offload)
        self._loop = self._found.describe(host.info.world_size, self._title)
        if self._audits and device.type != "meta":
            self._audit = UpdateAudit(self._found, host.info.rank, host.info.world_size)
            self._audited(UpdateAudit.begin)
        self._install()
        device = self._info.device
        begin = {"loop": self._loop.to_dict(), "notes": list(self._notes()), "started_unix_s": time.time()}
        begin |= {"report_to": self._report_to, "device_name": device_name(device), "software": software(device)}
        self._publish({"begin": begin})

    def _close(self) -> None:
        self._open = self._context.watched = False
        self._host.progress.place = LoopPlace.OVER
        self._given = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._context.set_unit("")
        if self._audit is not None:
            self._audit.close()

    def _agree(self) -> str:
        """Rank 0's choice of a name for the run, eight hex digits; collective."""
        mine, group = secrets.token_hex(4), dist.group.WORLD
        if group is None or group.size() == 1:
            return mine
        device = torch.device("cpu") if self._world is not None else c10d._get_object_coll_device()
        return gather_texts(mine, group, torch.device(device))[0]

    def _notes(self) -> Iterator[str]:
        """What cannot be known, and how far to trust the times."""
        yield from self._host.notes
        if self._world is not None and not all(isinstance(group, Wire) for group in self._found.setup().groups):
            yield _OTHER_GROUP
        if self._compiled:
            yield _COMPILED

    # -- hooks --------------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        if not self._is_told:
            root = self._found.module
            before: Any = torch.compiler.disable(self.before_forward)  # type: ignore[no-untyped-call]
            after: Any = torch.compiler.disable(self.after_forward)  # type: ignore[no-untyped-call]
            self._handles += [root.register_forward_pre_hook(before, with_kwargs=True)]
            self._handles += [root.register_forward_hook(after)]
        for optimizer in self._found.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda one, *_: self._before_update(one)))
            self._handles.append(optimizer.register_step_post_hook(lambda one, *_: self._after_update(one)))

    def replace(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The loop goes on with these, of which one has stepped just now."""
        added = [one for one in optimizers if one not in self._found.optimizers]
        self._found.optimizers[:] = optimizers  # the audit has the same list
        for one in added:
            self._handles.append(one.register_step_pre_hook(lambda one, *_: self._before_update(one)))
            self._handles.append(one.register_step_post_hook(lambda one, *_: self._after_update(one)))
            self._before_update(one)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ArgumentError for an optimizer of another model."""
        known = self._found.parameter_ids()
        strange = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if strange:
            watched = "watch the module that contains all that it trains"
            hint = f"make it from model.parameters() after the model was sharded, or {watched}"
            raise ArgumentError("optimizer", f"{strange} of its tensors are no parameters of this model", hint)

    def before_forward(self, _: nn.Module, *inputs: Any) -> None:
        if self._given is None:
            self._host.progress.place = LoopPlace.FORWARD
        elif torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # no evaluation, no recomputation
            self._enter(self._given, "forward")
            self._audited(lambda audit: audit.forward(inputs))

    def after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._given is None:
            self._host.progress.place = LoopPlace.BETWEEN
        elif torch.is_grad_enabled():
            for t in tensors_in(output):
                if t.grad_fn is not None:
                    t.grad_fn.register_prehook(self._begin_backward)
                elif t.requires_grad:
                    t.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]

    def _begin_backward(self, _: Any) -> None:
        if self._given is not None:
            if self._given.part != "backward":
                self._audited(UpdateAudit.backward)
            self._given.backward = True
            self._enter(self._given, "backward")

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._given is None:
            return
        self._enter(self._given, "optimizer")
        if not self._given.updated:
            self._given.updated = True
            self._meter.before_update()
        if not optimizer.state:  # it is about to be made
            self._meter.forget_optimizer()
        if self._audit is not None and self._audit.looks:
            self._audited(lambda audit: audit.before(optimizer))

    def _after_update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._given is not None and self._audit is not None and self._audit.looks:
            self._audited(lambda audit: audit.after(optimizer))

    def _audited(self, call: Callable[[UpdateAudit], None]) -> None:
        """An error of the audit ends the audit, and not the loop."""
        if self._audit is None:
            return
        try:
            call(self._audit)
        except Exception as e:
            self._audit.close()
            self._audit, self._audit_ended = None, f"The audit ended by an error of its own: {first_line(e)}"

    def _enter(self, given: _Given, part: str) -> None:
        """A step may have a part several times."""
        if part == given.part:
            return
        if part != "backward":
            self._end_backward()
        given.part = part
        self._meter.part(part)

    def _end_backward(self) -> None:
        self._context.meter.end_backward()
        self._context.set_unit("")

    # -- a step -------------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, *, tokens: int | None = None) -> Iterator[None]:
        """The context of one optimizer step, with as many forwards and backwards as it has. `tokens`: of this rank in it;
        None: as given to `watch`. A step in which nothing is updated is recorded as skipped if it had a backward, as with a
        loss scaler after an overflow, else not at all. One that raises is not recorded."""
        if not self._open:
            raise ArgumentError("step", "the watch is not open", "call it inside `with fsdp_lab.watch(...) as watch:`")
        if self._given is not None:
            raise ArgumentError("step", "a step is in progress", "end it before the next one begins")
        if tokens is not None and not is_whole(tokens, 0):
            raise ArgumentError("tokens", f"{tokens!r} is refused", "give how many this rank has in this step")
        self._context.check()
        every, number = self._ledger_every, self.steps + 1
        self._ledger_due |= every is not None and number % every == 0
        # A ledger step is postponed while the user's own profiler is active: only one can be.
        ledger = self._ledger_due and self.steps >= LEDGER_STEP and not torch.autograd._profiler_enabled()
        waits_are_known = self._world is not None and self._world.carrier == SHARED_MEMORY  # without traces
        may_be_seldom = self._is_told and waits_are_known and number > OFTEN * self._trace_every
        often = self._trace_every * (SELDOM if may_be_seldom else 1)
        traced = self.steps == LEDGER_STEP + 1 or (self.steps > LEDGER_STEP and number % often == 0)
        given = self._given = _Given(tokens=tokens if tokens is not None else self._tokens or 0)
        self._host.progress.steps += 1
        self._host.progress.place = LoopPlace.STEP
        self._audited(lambda audit: audit.begin_step(self.steps, active=not ledger))
        try:
            if traced and self._meter.runs_behind:
                self._read_all(wait=True)
            counts = self._counts and self.steps == 0
            counting = self._count.counting(self._info.device) if counts else nullcontext()
            with self._meter.step(ledger=ledger, traced=traced), counting:
                yield
                if given.updated:
                    self._meter.after_update()
                elif not self._found.optimizers:
                    self._meter.before_update()
                self._audited(lambda audit: audit.end_step(updated=given.updated, backward=given.backward))
            self._context.check()
            self._end(given, ledger=ledger)
            self._host.progress.place = LoopPlace.BETWEEN  # after a failure it stays where that was
        finally:
            self._given = None

    def loss(self, loss: Tensor | float, *, grad_norm: Tensor | float | None = None) -> None:
        """The step's loss on this rank, or of each of its micro-batches, of which the mean counts; `grad_norm`: the global
        norm of its gradients. Both are optional; the mean over the ranks is known if every rank calls it. On a GPU it does
        not wait for the device."""
        if self._given is None:
            raise ArgumentError("loss", "no step is in progress", "call it inside `with watch.step():`")
        self._given.losses.append(_scalar("loss", loss))
        if grad_norm is not None:
            self._given.grad_norm = _scalar("grad_norm", grad_norm)

    def add(self, **amounts: float) -> None:
        """Adds to fields of the step's event that only the loop knows, as `tokens` and `input_s`."""
        if self._given is not None:
            self._given.tokens += int(amounts.pop("tokens", 0))
            for name, amount in amounts.items():
                self._given.fields[name] = self._given.fields.get(name, 0.0) + amount

    def leave_ledger_out(self) -> None:
        """Memory is not measured by class: the script may use torch's profiler itself."""
        self._ledger_due = False

    @property
    def module(self) -> nn.Module:
        return self._found.module

    @property
    def names(self) -> dict[str, str]:
        """What is watched."""
        return {"model": self._loop.model, "backend": self._loop.backend}

    def rest(self, part: str = "") -> None:
        """No part of the model's step is in progress until its next forward. `part`: but this one, of the script."""
        if self._given is not None:
            self._enter(self._given, part)

    @contextmanager
    def aside(self, part: str) -> Iterator[None]:
        """The context of a part that is the script's own, as "input", whose seconds are also a field of the event."""
        given, begin_s = self._given, time.perf_counter()
        before = "" if given is None else given.part
        self.rest(part)
        try:
            yield
        finally:
            self.add(**{f"{part}_s": time.perf_counter() - begin_s})
            if given is not None and given is self._given:
                self._enter(given, before)

    def _end(self, given: _Given, *, ledger: bool) -> None:
        read_step = self._meter.end()
        self._end_backward()
        if not (given.updated or given.backward) and self._found.optimizers:
            self._skipped += 1
            return
        fields = {
            "step": self.steps,
            "first_after_switch": self.steps == 0,
            "ledger": ledger,
            "skipped": bool(self._found.optimizers) and not given.updated,
            **given.fields,
        }
        if self.steps == 0:
            self._counted_tokens = given.tokens
            if self._count.model:  # the device's peak in the dtype of the products: 0.3 s where it is measured
                own = next((p.dtype for p in self._found.module.parameters() if p.is_floating_point()), torch.float32)
                dtype = self._count.dtype or self._found.setup().compute or own
                self._peak = BestPeak(device_peak(self._info.device, dtype))
        if given.tokens == self._counted_tokens:  # as many in the step that was counted: else they are not known
            fields |= {"flops": self._count.model or 0, "recompute_flops": self._count.recompute}
        self._ended.append((read_step, given, fields))
        self.steps += 1
        self._ledger_due = self._ledger_due and not ledger
        if not self._meter.runs_behind:
            self._audited(UpdateAudit.read)
            if time.perf_counter() - self._published_s >= PUBLISH_EVERY_S:  # of several steps at once, which is faster
                self._make_events()
        elif time.perf_counter() - self._read_s > READ_EVERY_S:
            self._read_all(wait=True)

    # -- events -------------------------------------------------------------------------------------------------------

    def _read_all(self, *, wait: bool) -> None:
        if self._ended:
            self._meter.pause(wait=wait)
            if wait:
                self._audited(UpdateAudit.read)
            self._make_events()
        self._read_s = time.perf_counter()

    def _make_events(self) -> None:
        ended, self._ended = self._ended, []
        for one in ended:  # if one cannot be read, those before it still go out
            self._waiting.append(self._event(*one))
        if time.perf_counter() - self._published_s >= PUBLISH_EVERY_S:
            self._publish({})

    def _event(self, read_step: StepReader, given: _Given, fields: dict[str, Any]) -> StepEvent:
        losses = [float(loss) for loss in given.losses]
        fields = {
            "run": self.run,
            "spec_id": self._loop.id,
            "samples": 0,
            "tokens": given.tokens,
            "loss": math.fsum(losses) / len(losses) if losses else math.nan,
            "mean_loss": math.nan,
            "grad_norm": float(given.grad_norm),
            **{"flops": 0, "recompute_flops": 0, **fields},
        }
        if self._world is None and self._info.world_size > 1:
            fields["comm"] = UNKNOWN_TRAFFIC
        return self._meter.event(read_step, self._clock, self._peak, fields)

    def _publish(self, what: dict[str, Any]) -> None:
        events, self._waiting = self._waiting, []
        self._published_s = time.perf_counter()
        if self._audit is not None and (report := self._audit.report()):
            what = {**what, "audit": report}
        self._host.publish({"run": self.run, "rank": self._host.info.rank, "events": events, **what})


def is_of_ranks(error: Exception) -> bool:
    """Whether it tells that a step was given up, on all ranks."""
    return isinstance(error, RankAborted)


def _optimizers(given: Any) -> Sequence[torch.optim.Optimizer]:
    several = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            hint = "give the torch.optim.Optimizer, several in a list, or None"
            raise ArgumentError("optimizer", f"a {type(one).__name__} is no torch optimizer", hint)
    return several


def _scalar(name: str, value: Tensor | float) -> float | Tensor:
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise ArgumentError(name, f"a tensor of shape {tuple(value.shape)} is no scalar", "give its mean")
    whole: Tensor = value.detach().float()
    if hasattr(whole, "full_tensor"):  # a DTensor, as of a gradient norm
        whole = whole.full_tensor()
    return float(whole) if whole.is_cpu else whole.clone()


def _outcome(error: BaseException | None) -> tuple[str, str]:
    """The state of a run (`fsdp_lab.runs.view.RunState`) after a loop that ended so, and why."""
    if error is None:
        return "finished", ""
    if isinstance(error, (KeyboardInterrupt, SystemExit)) or str(error).endswith(INTERRUPTED):
        return "stopped", "interrupted"
    kind = "" if isinstance(error, RankAborted) else f"{type(error).__name__}: "
    return "failed", kind + first_line(error)
