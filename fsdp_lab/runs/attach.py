"""`Attachment`: watches what a script trains that knows nothing of it. `fsdp-lab watch` has it made in each of its processes
(site/sitecustomize.py), and reads what it wrote there (`Attached`).

Note: what is a step. A step ends with the update after which a forward follows, so it has the input, the logging and all
else between two updates. Which of several optimizers is the last before a forward is learnt in the first steps.

Note: what is exchanged. Ranks of a script may do different things at any time, so nothing is sent from one to another here:
the run's name is what the first of them wrote into the store of their process group. An error of ours never reaches the
script: it becomes a note, and the watch is over."""

import atexit
import contextlib
import dataclasses
import functools
import json
import multiprocessing.util
import os
import secrets
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import checkpoint as dcp, distributed_c10d as c10d
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, optimizer as hooks
from torch.utils.data import dataloader

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.tensors import tensors_in
from fsdp_lab.rank.session import resident_session
from fsdp_lab.rank.torchrun import TIMEOUT_S, init_process_group, is_own, why_not
from fsdp_lab.rank.tracing import ClockOffset
from fsdp_lab.rank.watch.found import find
from fsdp_lab.rank.watch.loop import Watch, is_of_ranks, plain_host
from fsdp_lab.rank.watch.recording import Recording, RecordOptions
from fsdp_lab.runs.history.loops import LoopRecorder
from fsdp_lab.runs.trackers import Reporter

OPTIONS = "FSDP_LAB_WATCH"  # the variable that has the `AttachOptions` of one command, as JSON
SAY_EVERY_S = 1.0
_STORED = "fsdp_lab/attached"  # a key of the process group's store


@dataclass(frozen=True, kw_only=True)
class AttachOptions:
    """How it is wanted. `folder`: where each process says what it found (`Attached`); "": it does not. `listen`: the script
    keeps its own process group. `history`: a path; "": the default. `report_to`: as of `Lab.run`. `record`: the fields of a
    `RecordOptions`, or nothing."""

    folder: str = ""
    listen: bool = False
    ledger: bool = True
    audit: bool = True
    title: str = ""
    history: str = ""
    report_to: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Attached:
    """What one process of the command says of itself, as JSON in a file that is named by its process id."""

    pid: int
    state: str = "looking"  # an `AttachState`
    rank: int = 0
    world_size: int = 1
    run: str = ""
    model: str = ""
    backend: str = ""
    steps: int = 0
    optimizers: int = 0  # that were made
    notes: Sequence[str] = ()

    def write(self, folder: str) -> None:
        if not folder:
            return
        path = Path(folder) / f"process-{self.pid}.json"
        whole = path.with_suffix(".new")
        whole.write_text(json.dumps(dataclasses.asdict(self)))
        whole.replace(path)


class AttachState(Enum):
    LOOKING = "looking"  # for a model and its optimizers
    WATCHING = "watching"
    OVER = "over"


class Attachment:
    """See the module. The methods up to `get_backend` stand for torch's, which is their first argument."""

    def __init__(self, options: AttachOptions) -> None:
        self._options = options
        self._state = AttachState.LOOKING
        self._said, self._said_s = Attached(pid=os.getpid()), 0.0
        self._thread = threading.get_ident()  # whose training is watched
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._roots: list[weakref.ref[nn.Module]] = []  # outermost modules that were called with gradients
        self._depth = 0  # of modules that are called
        self._handles: list[Any] = []
        self._looking: list[Any] = []  # handles that are removed when it is found
        self._backend = ""  # of the process group that the script asked for
        self._watch: Watch | None = None
        self._recording: Recording | None = None
        self._step: AbstractContextManager[None] | None = None
        self._watched: Sequence[Optimizer] = ()
        self._updated: Optimizer | None = None  # the last one, if no forward came since
        self._followed: set[int] = set()  # ids of those that others followed, before the next forward
        self._losses: list[tuple[Tensor | float, float, bool]] = []  # of micro-batches, and `_divisor` of each
        self._own: set[int] = set()  # counts of a micro-batch by which its own loss may be divided
        self._are_parts: bool | None = None  # of a sum, those of micro-batches; None: no step had several yet
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None  # a loss with a GradScaler's scale, and without
        self._evaluates_since: float | None = None
        self._is_aside = False  # what is inside is not counted again

    def init(self, original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self.add(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """What it steps is watched, from the next forward on."""
        if any(ref() is optimizer for ref in self._optimizers):
            return
        self._optimizers.append(weakref.ref(optimizer))
        self._said = dataclasses.replace(self._said, optimizers=self._said.optimizers + 1)
        if self._said.optimizers == 1:
            self._thread = threading.get_ident()
            self._look()

    def init_process_group(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        given = dict(zip(("backend", "init_method", "timeout", "world_size", "rank"), args, strict=False)) | kwargs
        if is_own(given.get("backend")):  # of the lab itself
            original(*args, **kwargs)
            return
        why = "it was asked to listen only" if self._options.listen else why_not(given)
        if why:
            original(*args, **kwargs)
            if not self._options.listen:
                self.note(f"Communication is not measured: {why}.")
            return
        timeout = given.get("timeout")
        init_process_group(timeout_s=TIMEOUT_S if timeout is None else timeout.total_seconds())
        self._backend = str(given.get("backend") or ("nccl" if torch.cuda.is_available() else "gloo"))

    def destroy_process_group(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if next(iter((*args, *kwargs.values())), None) in (None, dist.group.WORLD):
            self.end()
        original(*args, **kwargs)

    def get_backend(self, original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        backend = original(*args, **kwargs)
        return self._backend if self._backend and is_own(backend) else backend

    # -- finding what is trained --------------------------------------------------------------------------------------

    def _look(self) -> None:
        before: Any = torch.compiler.disable(self._safely(self._before_any_forward))  # type: ignore[no-untyped-call]
        after: Any = torch.compiler.disable(self._safely(self._after_any_forward))  # type: ignore[no-untyped-call]
        before_update, after_update = self._safely(self._before_update), self._safely(self._after_update)
        self._looking = [
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        ]
        self._handles = [
            hooks.register_optimizer_step_pre_hook(lambda optimizer, *_: before_update(optimizer)),
            hooks.register_optimizer_step_post_hook(lambda optimizer, *_: after_update(optimizer)),
        ]
        replace(torch.autograd, "backward", self._backward)
        replace(torch.amp.GradScaler, "scale", self._scale)
        replace(dataloader._BaseDataLoaderIter, "__next__", functools.partial(self._timed, "input"))
        for module, name in ((torch, "save"), (dcp, "save"), (sys.modules.get("safetensors.torch"), "save_file")):
            if module is not None:
                replace(module, name, functools.partial(self._timed, "checkpoint"))
        os.register_at_fork(after_in_child=self._after_fork)
        atexit.register(self.end)
        multiprocessing.util.Finalize(None, self.end, exitpriority=0)  # where a forked process ends without atexit
        replace(sys, "excepthook", self._raised)
        replace(os, "_exit", self._exited)
        self._said.write(self._options.folder)

    def _before_any_forward(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and self._state is AttachState.LOOKING:
            self._roots = [*(ref for ref in self._roots if ref() not in (None, module)), weakref.ref(module)]
            alive = [o for ref in self._optimizers if (o := ref()) is not None]
            found = next((m for m in _watchable(module) if all(_holds(m, o) for o in alive)), None)
            if found is not None and alive:
                self._begin(found, alive)
                self._handles.pop(0).remove()  # no update is waited for
                self._begin_step()

    def _after_any_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._depth = max(0, self._depth - 1)

    def _before_update(self, optimizer: Optimizer) -> None:
        """The first update where no single module has all: of those that were called the largest is watched."""
        if self._state is not AttachState.LOOKING or threading.get_ident() != self._thread:
            return
        alive = [o for ref in self._optimizers if (o := ref()) is not None]
        roots = [m for ref in self._roots if (root := ref()) is not None for m in _watchable(root)]
        own = {root: [o for o in alive if _holds(root, o)] for root in roots}
        what = "Of several models the largest is watched"
        if not any(own.values()):
            own = {root: [optimizer] for root in roots if _resembles(root, optimizer)}
            what = "The optimizer steps tensors that are none of the model's; the model is watched"
        largest = max((m for m in own if own[m]), key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
        if largest is not None and any(optimizer is o for o in own[largest]):
            others = len(alive) - len(own[largest])
            self.note(f"{what}, from its second step; {others} optimizers step others.")
            self._begin(largest, own[largest])

    def _begin(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for handle in self._looking:
            handle.remove()
        try:
            self._watch = self._made(module, optimizers)
            self._watch.__enter__()
            if not self._options.ledger:
                self._watch.leave_ledger_out()
            if self._options.record:
                options, found = RecordOptions(**self._options.record), find(module, optimizers)
                self._recording = Recording(found, options, self._said.rank, self._said.world_size)
        except Exception as e:
            self._give_up(e)
            return
        self._state, self._watched = AttachState.WATCHING, optimizers
        before: Any = torch.compiler.disable(self._safely(self._before_forward))  # type: ignore[no-untyped-call]
        after: Any = torch.compiler.disable(self._safely(self._after_forward))  # type: ignore[no-untyped-call]
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        self._say(run=self._watch.run, **self._watch.names)

    def _made(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> Watch:
        history, reporter = self._options.history or True, None
        if self._options.report_to:
            reporter = Reporter(self._options.report_to, history).checked()
        recorder = LoopRecorder(history, reporter)
        session = resident_session()
        host = plain_host(module, recorder.publish) if session is None else session.loop_host(recorder.publish)
        info = host.info
        self._say(rank=info.rank, world_size=info.world_size)
        run = secrets.token_hex(4)
        if info.world_size > 1:
            run = bytes(c10d._get_default_store().compare_set(_STORED, "", run)).decode()
        one_host = info.world_size == int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        clock = ClockOffset(0.0, 0.0) if one_host else ClockOffset()  # processes of a host have one clock
        host = dataclasses.replace(host, run=run, clock=clock)
        recorder.serve(host)
        own, flops = self._options, not self._options.record
        return Watch(module, optimizers, host, title=own.title, audit=own.audit, copies=True, flops=flops, is_told=True)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._watch is not None and self._state is AttachState.WATCHING:
            self._step = self._watch.step()
            self._step.__enter__()

    def _end_step(self) -> None:
        if self._watch is None or self._step is None:
            return
        losses, self._losses, step, self._step = self._losses, [], self._step, None
        if len(losses) > 1 and self._are_parts is None:
            count, (divisor, of_sum) = len(losses), losses[0][1:]
            equal = all(one == divisor for _, one, _ in losses)
            self._are_parts = round(divisor) == count or (of_sum and equal and round(divisor) not in self._own)
        told = [loss * len(losses) if self._are_parts else loss for loss, *_ in losses]
        for loss in told:
            self._watch.loss(loss)
        if self._recording is not None:
            self._recording.end_step([float(loss) for loss in told])
        step.__exit__(None, None, None)
        if time.monotonic() - self._said_s > SAY_EVERY_S:
            self._say(steps=self._watch.steps)

    def _next_step(self) -> None:
        self._end_step()
        self._begin_step()
        if self._watch is not None:
            self._watch.rest()

    def _before_forward(self, module: nn.Module, *inputs: Any) -> None:
        if not self._is_here or torch._C._current_graph_task_id() != -1:
            return
        assert self._watch is not None
        if torch.is_grad_enabled():
            if self._updated is not None and self._goes_on(self._updated):
                self._next_step()
            self._updated = None
        else:
            self._evaluates_since = time.perf_counter()
            self._watch.rest("evaluation")
        self._watch.before_forward(module, *inputs)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._is_here:
            return
        assert self._watch is not None
        self._watch.after_forward(module, args, output)
        if torch._C._current_graph_task_id() != -1:
            return
        if self._evaluates_since is not None:
            self._watch.add(evaluation_s=time.perf_counter() - self._evaluates_since)
            self._watch.rest()
            self._evaluates_since = None
            return
        given = [t for t in tensors_in((*kwargs.values(), *args)) if t.dim()]
        if self._are_parts is None:
            self._own = {n for t in given[:1] for n in (1, len(t), t.numel() - len(t), t.numel())}
        ids = next((t for t in given if t.dim() > 1 and not t.is_floating_point()), None)
        if ids is not None:
            self._watch.add(tokens=ids.numel())

    def _after_update(self, optimizer: Optimizer) -> None:
        if not self._is_here:
            return
        if optimizer not in self._watched:
            if self._watch is None or not _holds(self._watch.module, optimizer):
                self._losses = []  # of another model
                return
            own = _ids(optimizer)
            self._watched = [*(one for one in self._watched if not own & _ids(one)), optimizer]
            self._watch.replace(self._watched)
        if torch._C._current_graph_task_id() != -1 and self._watch is not None:  # it is stepped by a gradient's hook
            self._watch.leave_ledger_out()
        if self._updated is not None:
            self._followed.add(id(self._updated))
        self._updated = optimizer
        if not self._goes_on(optimizer):
            self._next_step()

    def _goes_on(self, optimizer: Optimizer) -> bool:
        """Whether its update does not end the step."""
        assert self._watch is not None
        is_unknown = len(self._watched) > 1 and not self._watch.steps
        return optimizer in self._watched if is_unknown else id(optimizer) in self._followed

    def _backward(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        self._safely(self._note_loss)(tensors)
        original(tensors, *args, **kwargs)
        if self._is_here and self._watch is not None and torch._C._current_graph_task_id() == -1:
            self._safely(self._watch.rest)()

    def _note_loss(self, tensors: Any) -> None:
        if self._is_here and isinstance(tensors, Tensor) and tensors.numel() == 1:
            scaled, loss = (None, None) if self._scaled is None else (self._scaled[0](), self._scaled[1])
            loss = loss if loss is not None and scaled is tensors else tensors
            is_asked = self._are_parts is None and self._watch is not None and (loss.is_cpu or self._watch.steps < 4)
            value = loss.item() if type(loss) is Tensor and loss.is_cpu else loss.detach()
            self._losses.append((value, *(_divisor(loss) if is_asked else (1.0, False))))

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if isinstance(outputs, Tensor):
            self._scaled = weakref.ref(scaled), outputs
        return scaled

    def _timed(self, part: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call whose time is not the model's."""
        if not self._is_here or self._is_aside or self._watch is None:
            return original(*args, **kwargs)
        self._is_aside = True
        try:
            with self._watch.aside(part):
                return original(*args, **kwargs)
        finally:
            self._is_aside = False

    @property
    def _is_here(self) -> bool:
        return self._state is AttachState.WATCHING and threading.get_ident() == self._thread

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException | None = None) -> None:
        """The training is over. What came after its last update is left out."""
        if self._said.pid != os.getpid() or self._state is AttachState.OVER:
            return
        try:
            if self._state is AttachState.WATCHING:
                self._leave(error)
        except Exception as e:
            self._give_up(e)
        self._state = AttachState.OVER
        self._say(steps=0 if self._watch is None else self._watch.steps)

    def _leave(self, error: BaseException | None, *, ends_step: bool = True) -> None:
        if self._watch is None:
            return
        if error is None and ends_step and self._updated is not None and self._goes_on(self._updated):
            self._end_step()
        elif self._step is not None:
            step, self._step = self._step, None
            step.__exit__(GeneratorExit, GeneratorExit(), None)
        self._watch.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))

    def _safely(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Of ours, where the script is: an error ends the watch alone. One that tells of another rank's is the script's."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._state is AttachState.OVER:
                return None
            try:
                return call(*args, **kwargs)
            except Exception as e:
                if is_of_ranks(e):
                    raise
                self._give_up(e)

        return called

    def _raised(self, original: Callable[..., Any], kind: Any, error: BaseException, trace: Any) -> None:
        self.end(error)
        original(kind, error, trace)

    def _exited(self, original: Callable[[int], None], code: int) -> None:
        self.end()
        original(code)

    def _give_up(self, why: Exception) -> None:
        was, self._state = self._state, AttachState.OVER
        sentence = str(why) if isinstance(why, ArgumentError) else f"{type(why).__name__}: {why}"
        self.note(f"It was not watched further: {sentence}")
        if was is AttachState.WATCHING:
            with contextlib.suppress(Exception):
                self._leave(None, ends_step=False)  # not as a failure, of which the other ranks would be told

    def _after_fork(self) -> None:
        if self._state is AttachState.WATCHING:  # the parent's
            self._state = AttachState.OVER
        self._said = Attached(pid=os.getpid(), optimizers=self._said.optimizers)
        self._thread = threading.get_ident()

    def note(self, sentence: str) -> None:
        self._say(notes=[*self._said.notes, sentence])

    def _say(self, **fields: Any) -> None:
        self._said, self._said_s = dataclasses.replace(self._said, state=self._state.value, **fields), time.monotonic()
        self._said.write(self._options.folder)


@functools.cache
def attachment() -> Attachment:
    """This process's."""
    return Attachment(AttachOptions(**json.loads(os.environ.get(OPTIONS, "{}"))))


def trainer_callback() -> Any:
    """For transformers' Trainer, one line in place of `fsdp-lab watch`: `Trainer(..., callbacks=[trainer_callback()])`. The
    process group is the Trainer's own, so communication is not measured."""
    from transformers import TrainerCallback

    class WatchCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            attachment().add(getattr(optimizer, "optimizer", optimizer))  # Accelerate wraps it

        def on_train_end(self, *_: Any, **__: Any) -> None:
            attachment().end()

    return WatchCallback()


def lightning_callback(base: type) -> Any:
    """The same for Lightning, whose packages have two names: `callbacks=[lightning_callback(lightning.Callback)]`."""

    def start(_: Any, trainer: Any, module: Any) -> None:
        for optimizer in trainer.optimizers:
            attachment().add(optimizer)

    hooks = {"on_train_start": start, "on_train_end": lambda *_: attachment().end()}
    return type("WatchCallback", (base,), hooks)()


def replace(holder: Any, name: str, call: Callable[..., Any]) -> None:
    """Lets `call` stand for a function of torch's, which is given to it first."""
    original = getattr(holder, name)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(holder, name, called)


def _watchable(module: nn.Module) -> list[nn.Module]:
    """What may be watched of a module that was called: itself, or DDP inside it."""
    return [module, *(m for m in module.modules() if isinstance(m, DistributedDataParallel) and m is not module)]


def _holds(module: nn.Module, optimizer: Optimizer) -> bool:
    """Whether it may be watched, and has all that an optimizer steps."""
    try:
        known = find(module, []).parameter_ids()
    except ArgumentError:
        return False
    return _ids(optimizer) <= known


def _resembles(module: nn.Module, optimizer: Optimizer) -> bool:
    """Whether an optimizer steps some trained parameters, or only what may be copies of some, by their shapes."""
    own = {id(p): p.shape for p in module.parameters() if p.requires_grad}
    stepped = Counter(p.shape for group in optimizer.param_groups for p in group["params"])
    return not _ids(optimizer).isdisjoint(own) or stepped <= Counter(own.values())


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _divisor(loss: Tensor) -> tuple[float, bool]:
    """The number by which a loss was divided in the end, as by that of micro-batches or of all tokens of a step, 1.0 if by
    none; and whether what was divided is a sum."""
    divisor, function, at = 1.0, cast(Any, loss.grad_fn), loss.output_nr
    while (name := type(function).__name__) in ("DivBackward0", "MulBackward0", "ToCopyBackward0", "_DDPSinkBackward"):
        other: Any = getattr(function, "_saved_other", 1.0)
        if isinstance(other, Tensor):
            other = None if other.dim() or other.requires_grad else other.tolist()
        if not other:
            break
        divisor *= 1 / other if name == "MulBackward0" else other
        function, at = function.next_functions[at]
    return divisor, type(function).__name__ == "SumBackward0" or getattr(function, "_saved_reduction", 1) == 2
