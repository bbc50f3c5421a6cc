"""`SlowMotionStep`: a rank's training step, stopped before each of its phases, as `PhaseSnapshot`s."""

from __future__ import annotations

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.phase_snapshot import ROOT, ParameterHolding, PhaseSnapshot
from fsdp_lab.core.schedule import Direction, Phase
from fsdp_lab.rank.phase_stepper import PhaseStepper, Stop, holdings
from fsdp_lab.rank.rendezvous import RankInfo
from fsdp_lab.rank.trainer import Trainer


class SlowMotionStep:
    """One step of a trainer with our own engine.

    Raises:
        SpecError: the backend is another one, whose phases cannot be stopped.
    """

    def __init__(self, trainer: Trainer, info: RankInfo) -> None:
        backend = trainer.backend
        if (other := trainer.spec.strategy.backend) != "lab":
            raise SpecError("strategy.backend", f"slow motion stops the phases of our own engine, not those of {other}",
                            "use backend lab", {"backend": "lab"})  # fmt: skip
        self._trainer, self._info, self._step = trainer, info, trainer.progress.step
        self._stepper = PhaseStepper(backend.module, lambda: trainer.step(slow=True))
        stepper = self._stepper
        self._handle = backend.optimizer.register_step_pre_hook(
            lambda *_: stepper.at(Phase.OPTIM, "", Direction.UPDATE)
        )

    def next(self) -> PhaseSnapshot | None:
        """Run to the next phase; None when the step is over. Raises what the step raised."""
        stop = next(self._stepper, None)
        return None if stop is None else self._frame(stop)

    def end(self) -> None:
        """Run the step to its end without stops. Raises what the step raised."""
        self._stepper.close()

    @property
    def event(self) -> StepEvent:
        """The event of the step, when it is over."""
        return self._stepper.result

    def remove_hooks(self) -> None:
        """When the step is over."""
        self._handle.remove()

    def _frame(self, stop: Stop) -> PhaseSnapshot:
        held = holdings(self._trainer.backend.module)
        return PhaseSnapshot(
            rank=self._info.rank,
            world_size=self._info.world_size,
            step=self._step,
            index=stop.index,
            phase=stop.phase.value,
            unit=stop.unit or ROOT,
            direction=stop.direction.value,
            parameters=tuple(
                ParameterHolding(
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
