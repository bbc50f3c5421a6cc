"""`Faults`: what goes wrong in this rank on purpose (`fsdp_lab.fault`).

A fault hangs on hooks that are there for one step alone: on a module in the middle of the model that computes by itself
(below it the backends' own hooks have done their part), on the gradient of what that returns, or on the optimizer. Where
nothing is armed, a step costs nothing. What concerns communication is the wire's (`Hub.sever`, `Hub.link`).
"""

from __future__ import annotations

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

from fsdp_lab.fault import Fault, FaultKind, FaultPhase
from fsdp_lab.link_spec import LinkSpec
from fsdp_lab.rank.rendezvous import Seat
from fsdp_lab.rank.trainer import Trainer
from fsdp_lab.wire import Hub, Link

_MORE_BYTES = 1 << 50  # than a process of 47 address bits can have
_SIT_S = 60.0  # in native code at a time; poll counts milliseconds in an int


class FaultMade(RuntimeError):
    """What a fault of kind "raise" raises."""


class Faults:
    """Those of one rank, from `arm` until they have happened, or `disarm`."""

    def __init__(self, seat: Seat, hub: Hub) -> None:
        self._seat, self._hub = seat, hub
        self._armed: list[Charge] = []
        self.link: Link | None = None  # that a fault has put in the place of the one which was there

    def arm(self, fault: Fault, link: Link | None = None) -> bool:
        """Returns whether it is for this rank. `link`: what a fault of kind "slow" makes of it."""
        mine = self._seat.rank in fault.ranks
        if mine:
            self._armed.append(Charge(fault, lambda: self._happen(fault, link)))
        return mine

    def disarm(self) -> int:
        """Nothing is armed any more, and what has happened to the link is undone. Returns how many had not happened."""
        count, self._armed, self.link = len(self._armed), [], None
        self._hub.mend()
        return count

    @contextmanager
    def during(self, trainer: Trainer) -> Iterator[None]:
        """Around one step. What happens in it is armed no longer."""
        due = [charge for charge in self._armed if charge.due(trainer.progress.step)]
        if not due:
            yield
            return
        handles = [handle for charge in due for handle in charge.hooks(trainer)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._armed = [charge for charge in self._armed if not charge.happened]

    def _happen(self, fault: Fault, link: Link | None) -> None:
        match fault.kind:
            case FaultKind.RAISE:
                raise FaultMade(f"made on purpose {fault.where}")
            case FaultKind.OOM:
                on_gpu = self._seat.device.type == "cuda"
                more = 2 * torch.cuda.mem_get_info(self._seat.device)[1] if on_gpu else _MORE_BYTES
                torch.empty(more, dtype=torch.uint8, device=self._seat.device)
            case FaultKind.STALL:
                _sit(math.inf if fault.for_s is None else fault.for_s)
            case FaultKind.CUT:
                self._hub.sever(heals=fault.heals is not False)
            case FaultKind.SLOW:
                self.link = self._hub.link = link
            case FaultKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case FaultKind.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)


class Charge:
    """One fault that is armed. `happen` does what its kind is; NaN, which is a value, is made here."""

    def __init__(self, fault: Fault, happen: Callable[[], None]) -> None:
        self._fault, self._happen = fault, happen
        self._where: nn.Module | None = None
        self.happened = False

    def due(self, step: int) -> bool:
        return self._fault.at_step is None or self._fault.at_step <= step

    def hooks(self, trainer: Trainer) -> list[Any]:
        """Handles of what it hangs on, in the step that begins."""
        backend = trainer.backend
        if self._fault.phase is FaultPhase.UPDATE:
            return [backend.optimizer.register_step_pre_hook(lambda *_: self._strike())]
        self._where = None
        return [m.register_forward_hook(self._leave) for m in _places(backend.module)]

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        """A module has computed. The first of those asked is the place, each time that it is called."""
        known = self._where is None or self._where is module
        if not known or not isinstance(output, Tensor) or not output.requires_grad:
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
        self._strike()
        return None

    def _strike(self) -> None:
        if not self.happened:
            self.happened = True
            self._happen()


def slower(fault: Fault, now: Link | None, real_bytes_per_s: Callable[[], float]) -> Link:
    """The link that a fault of kind "slow" makes of the one which is emulated now, or of the real one."""
    if fault.link is not None:
        asked = LinkSpec.parse(fault.link)
        return Link(bytes_per_s=asked.bytes_per_s, latency_s=asked.latency_s)
    assert fault.factor is not None
    bytes_per_s, latency_s = (now.bytes_per_s, now.latency_s) if now is not None else (real_bytes_per_s(), 0.0)
    return Link(bytes_per_s=bytes_per_s / fault.factor, latency_s=latency_s * fault.factor)


def _places(model: nn.Module) -> list[nn.Module]:
    """The second half of the modules that have none inside, and that are not part of what is compiled, where a hook that
    comes later is not called. Several, since a model need not call each of its modules."""
    compiled = {id(inner) for m in model.modules() if m._compiled_call_impl is not None for inner in m.modules()}
    alone = [m for m in model.modules() if id(m) not in compiled and not any(m.children())]
    return alone[len(alone) // 2 :]


def _sit(seconds: float) -> None:
    """In native code, without the interpreter: other threads go on. A signal wakes it, and it sits down again."""
    end_s, libc = time.monotonic() + seconds, ctypes.CDLL(None)
    while (left_s := end_s - time.monotonic()) > 0:
        libc.poll(None, 0, int(1e3 * min(left_s, _SIT_S)) + 1)
