"""`FaultInjector`: injects faults (`fsdp_lab.spec.faults`) into this rank, by hooks that exist for one step only: on a leaf
module in the middle of the model (so that the backends' own hooks have run), on the gradient of its output, or on the
optimizer. Faults of the link belong to the wire (`WireContext.cut_link`, `WireContext.link`)."""

import ctypes
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.trainer import Trainer
from fsdp_lab.spec.faults import Fault, FaultKind, FaultPhase
from fsdp_lab.spec.link import LinkSpec
from fsdp_lab.wire import Link, WireContext

_TOO_MANY_BYTES = 1 << 50  # for a process with 47 address bits
_POLL_S = 60.0  # per call of poll, which counts milliseconds in an int


class InjectedFault(RuntimeError):
    """Raised by a fault of kind "raise"."""


class FaultInjector:
    """The armed faults of one rank: from `arm` until they have happened, or `disarm`."""

    def __init__(self, info: RankInfo, context: WireContext) -> None:
        self._info, self._context = info, context
        self.armed: list[ArmedFault] = []
        self.link: Link | None = None  # the slower link that a fault has set

    def arm(self, fault: Fault, link: Link | None = None) -> bool:
        """Arm a fault if it is for this rank, and return whether it is. `link`: the link of a fault of kind "slow"."""
        mine = self._info.rank in fault.ranks
        if mine:
            self.armed.append(ArmedFault(fault, lambda: self._happen(fault, link)))
        return mine

    def disarm(self) -> int:
        """Remove all faults, and restore the link. Returns how many faults had not happened yet."""
        count, self.armed, self.link = len(self.armed), [], None
        self._context.restore_link()
        return count

    @contextmanager
    def during(self, trainer: Trainer) -> Iterator[None]:
        """The context of one step. Faults that happen in it are not armed any more."""
        due = [armed for armed in self.armed if armed.due(trainer.progress.step)]
        if not due:
            yield
            return
        handles = [handle for armed in due for handle in armed.hooks(trainer)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.armed = [armed for armed in self.armed if not armed.happened]

    def _happen(self, fault: Fault, link: Link | None) -> None:
        match fault.kind:
            case FaultKind.RAISE:
                raise InjectedFault(f"injected {fault.where}")
            case FaultKind.OOM:
                on_gpu = self._info.device.type == "cuda"
                nbytes = 2 * torch.cuda.mem_get_info(self._info.device)[1] if on_gpu else _TOO_MANY_BYTES
                torch.empty(nbytes, dtype=torch.uint8, device=self._info.device)
            case FaultKind.STALL:
                _stall(math.inf if fault.for_s is None else fault.for_s)
            case FaultKind.CUT:
                self._context.cut_link(until_reset=fault.heals is not False)
            case FaultKind.SLOW:
                self.link = self._context.link = link
            case FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)


class ArmedFault:
    """A fault that waits for its step. `happen` executes it, except for a NaN, which is inserted here."""

    def __init__(self, fault: Fault, happen: Callable[[], None]) -> None:
        self._fault, self._happen = fault, happen
        self._where: nn.Module | None = None
        self.happened = False

    def due(self, step: int) -> bool:
        return self._fault.at_step is None or self._fault.at_step <= step

    def hooks(self, trainer: Trainer) -> list[Any]:
        """Install hooks for the step that begins. Returns their handles."""
        backend = trainer.backend
        if self._fault.phase is FaultPhase.UPDATE:
            return [backend.optimizer.register_step_pre_hook(lambda *_: self._trigger())]
        self._where = None
        return [m.register_forward_hook(self._after_forward) for m in _candidates(backend.module)]

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        """The first candidate that is called becomes the place of the fault, each time that it is called."""
        if not isinstance(output, Tensor) or not output.requires_grad or self._where not in (None, module):
            return None
        self._where = module
        if self._fault.phase is FaultPhase.FORWARD:
            return self._touch(output)
        output.register_hook(self._touch)  # type: ignore[no-untyped-call]
        return None

    def _touch(self, t: Tensor) -> Tensor | None:
        if self._fault.kind is FaultKind.NAN:
            self.happened = True
            return t * math.nan
        self._trigger()
        return None

    def _trigger(self) -> None:
        if not self.happened:
            self.happened = True
            self._happen()


def slower(fault: Fault, now: Link | None, real_bytes_per_s: Callable[[], float]) -> Link:
    """The link of a fault of kind "slow", from the emulated link `now`, or from the real one."""
    if fault.link is not None:
        requested = LinkSpec.parse(fault.link)
        return Link(bytes_per_s=requested.bytes_per_s, latency_s=requested.latency_s)
    assert fault.factor is not None
    bytes_per_s, latency_s = (now.bytes_per_s, now.latency_s) if now is not None else (real_bytes_per_s(), 0.0)
    return Link(bytes_per_s=bytes_per_s / fault.factor, latency_s=latency_s * fault.factor)


def _candidates(model: nn.Module) -> list[nn.Module]:
    """Of the second half of the leaf modules those that are not compiled, where later hooks are not called."""
    compiled = {id(inner) for m in model.modules() if m._compiled_call_impl is not None for inner in m.modules()}
    leaves = [m for m in model.modules() if id(m) not in compiled and not any(m.children())]
    return leaves[len(leaves) // 2 :]


def _stall(seconds: float) -> None:
    """Block in native code without the GIL, so that other threads continue; a signal does not end it."""
    end_s, libc = time.monotonic() + seconds, ctypes.CDLL(None)
    while (left_s := end_s - time.monotonic()) > 0:
        libc.poll(None, 0, int(1e3 * min(left_s, _POLL_S)) + 1)
