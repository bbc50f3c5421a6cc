"""`SlowStep`: a rank's training step, halted before each of its phases, and told as `Frame`s."""

from __future__ import annotations

from fsdp_lab import engine
from fsdp_lab.events import StepEvent
from fsdp_lab.frame import ROOT, Frame, Holding
from fsdp_lab.rank.rendezvous import Seat
from fsdp_lab.rank.trainer import Trainer
from fsdp_lab.schedule import Direction, Phase
from fsdp_lab.spec import SpecError


class SlowStep:
    """One step of a trainer whose backend is our engine.

    Raises:
        SpecError: the backend is another one: its phases are not to be held.
    """

    def __init__(self, trainer: Trainer, seat: Seat) -> None:
        backend = trainer.backend
        if (other := trainer.spec.strategy.backend) != "lab":
            raise SpecError("strategy.backend", f"slow motion halts the phases of our own engine, not those of {other}",
                            "use backend lab", {"backend": "lab"})  # fmt: skip
        self._trainer, self._seat, self._step = trainer, seat, trainer.progress.step
        self._motion = engine.SlowMotion(backend.module, lambda: trainer.step(slow=True))
        motion = self._motion
        self._handle = backend.optimizer.register_step_pre_hook(lambda *_: motion.at(Phase.OPTIM, "", Direction.UPDATE))

    def next(self) -> Frame | None:
        """On to the next phase; None when the step is over. Raises what the step raised."""
        stop = next(self._motion, None)
        return None if stop is None else self._frame(stop)

    def end(self) -> None:
        """Run the step to its end without stops. Raises what the step raised."""
        self._motion.close()

    @property
    def event(self) -> StepEvent:
        """Of the step, when it is over."""
        return self._motion.result

    def leave(self) -> None:
        """When the step is over: the optimizer is as it was."""
        self._handle.remove()

    def _frame(self, stop: engine.Stop) -> Frame:
        held = engine.holdings(self._trainer.backend.module)
        return Frame(
            rank=self._seat.rank,
            world_size=self._seat.world_size,
            step=self._step,
            index=stop.index,
            phase=stop.phase.value,
            unit=stop.unit or ROOT,
            direction=stop.direction.value,
            parameters=tuple(
                Holding(
                    name=h.shard.name,
                    unit=h.unit or ROOT,
                    numel=h.shard.shape.numel(),
                    start=h.shard.start,
                    stop=h.shard.stop,
                    state=h.state,
                    gradient=h.gradient,
                )
                for h in held
            ),
        )
