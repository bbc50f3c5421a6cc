"""`PhaseStepper`: a training step of our engine, on a separate thread, that stops before each phase until `next` is called.
Between two phases nothing computes on this rank, so its shards and buffers can be inspected (`holdings`). Phases contain
collectives, so all ranks must be stepped alike. `SlowMotionStep`: such a step of a `Trainer`, as `PhaseSnapshot`s."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import ROOT, ParameterHolding, PhaseSnapshot, StepEvent
from fsdp_lab.engine import FlatBuffer, UnitState, original_parameters, runtime_of, shards_of, units_of
from fsdp_lab.engine.schedule import Direction, Phase
from fsdp_lab.rank.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A phase that is about to begin."""

    index: int
    phase: Phase
    unit: str  # "" is the root
    direction: Direction


class PhaseStepper(Generic[T]):
    """An iterator over the phases of `step()`, a whole training step of `module`.

    When it is exhausted, `result` is what `step` returned. What `step` raised is raised by the next `next`."""

    def __init__(self, module: nn.Module, step: Callable[[], T]) -> None:
        self._runtime, self._step = runtime_of(module), step
        self._stop: Stop | None = None
        self._count = 0
        self._resume, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._closing = False  # no more stops
        self._error: BaseException | None = None
        self._result: list[T] = []
        threads = torch.get_num_threads()
        device = torch.cuda.current_device() if self._runtime.root.mesh.device.type == "cuda" else None
        self._thread = threading.Thread(target=self._run, args=(threads, device), name="phase stepper", daemon=True)

    def __iter__(self) -> Iterator[Stop]:
        return self

    def __next__(self) -> Stop:
        if self._thread.ident is None:
            self._thread.start()
        elif not self.is_over:
            self._resume.release()
        if not self.is_over:
            self._stopped.acquire()
        if self._stop is None:
            self._end()
            raise StopIteration
        return self._stop

    def close(self) -> None:
        """Let the step run to its end, and wait for it. What it raised is raised."""
        self._closing = True
        if self._thread.ident is not None:
            self._resume.release()
            self._end()

    def _end(self) -> None:
        self._thread.join()
        self._stop, error, self._error = None, self._error, None
        if error is not None:
            raise error

    @property
    def is_over(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    @property
    def result(self) -> T:
        """Raises RuntimeError while the step is not over."""
        if not self._result:
            raise RuntimeError("the step is not over; call next() until it is")
        return self._result[0]

    def at(self, phase: Phase, unit: str, direction: Direction) -> None:
        """Called on the step's thread: waits until the next `next`."""
        if self._closing:
            return
        self._stop = Stop(index=self._count, phase=phase, unit=unit, direction=direction)
        self._count += 1
        self._stopped.release()
        self._resume.acquire()

    def _run(self, threads: int, device: Any) -> None:
        torch.set_num_threads(threads)  # OpenMP's count belongs to a thread
        if device is not None:
            torch.cuda.set_device(device)
        self._runtime.watch = self.at
        try:
            self._result.append(self._step())
        except BaseException as e:
            self._error = e
        finally:
            self._runtime.watch = None
            self._stop = None
            self._stopped.release()


def holdings(module: nn.Module) -> list[ParameterHolding]:
    """What this rank holds of every parameter now."""
    unit_of = {id(flat): unit for unit in units_of(module) for flat in unit.flats}
    reducing = {id(reduction.target) for _, some in runtime_of(module).reducing for reduction in some}
    states = {UnitState.UNSHARDED: "unsharded", UnitState.GATHERING: "gathering"}
    return [
        ParameterHolding(
            name=shard.name,
            unit=unit_of[id(p.flat)].name or ROOT,
            numel=shard.shape.numel(),
            start=shard.start,
            stop=shard.stop,
            state="unsharded" if p.flat.is_view_of_master else states.get(unit_of[id(p.flat)].state, "sharded"),
            gradient=_gradient(p.flat, p.number, reducing),
        )
        for shard, p in zip(shards_of(module), original_parameters(module), strict=True)
    ]


def _gradient(flat: FlatBuffer, number: int, reducing: set[int]) -> str:
    if flat.gradients.is_waiting:
        return "unsharded"
    if id(flat.gradients) in reducing:
        return "reducing"
    return "sharded" if flat.gradients.has_gradient(number) else "none"


class SlowMotionStep(PhaseStepper[StepEvent]):
    """One step of a trainer with our own engine. Raises SpecError for another backend, whose phases cannot be stopped."""

    def __init__(self, trainer: Trainer) -> None:
        if not (strategy := trainer.spec.strategy).is_lab:
            reason = f"slow motion stops the phases of our own engine, not those of {strategy.backend}"
            raise SpecError("strategy.backend", reason, "use backend lab", {"backend": "lab"})
        super().__init__(trainer.backend.module, lambda: trainer.step(slow=True))
        self._trainer, self._number = trainer, trainer.progress.step
        update = (Phase.OPTIM, "", Direction.UPDATE)
        self.hook = trainer.backend.optimizer.register_step_pre_hook(lambda *_: self.at(*update))

    def snapshot(self) -> PhaseSnapshot | None:
        """Runs to the next phase; None when the step is over. Raises what the step raised."""
        if (stop := next(self, None)) is None:
            return None
        return PhaseSnapshot(
            rank=self._trainer.info.rank,
            world_size=self._trainer.info.world_size,
            step=self._number,
            index=stop.index,
            phase=stop.phase.value,
            unit=stop.unit or ROOT,
            direction=stop.direction.value,
            parameters=tuple(holdings(self._trainer.backend.module)),
        )
