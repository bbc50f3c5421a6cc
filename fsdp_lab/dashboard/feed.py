"""From a lab's current run to the cards of a live view: what one tick does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fsdp_lab.core.describe import describe_changes, describe_field, describe_strategy, describe_value
from fsdp_lab.core.events import StepEvent
from fsdp_lab.core.formatting import duration
from fsdp_lab.core.spec import Spec
from fsdp_lab.dashboard.board import Board, BoardView, Kind, running
from fsdp_lab.dashboard.comparison_card import ComparisonCard
from fsdp_lab.dashboard.foretelling import Predictor
from fsdp_lab.dashboard.live import LiveView, Scene
from fsdp_lab.dashboard.panels import PANELS, Panel, Pinnable, StepAxis
from fsdp_lab.dashboard.panels.axis import STEP_LIMIT, Overlay
from fsdp_lab.dashboard.panels.base import Prediction
from fsdp_lab.dashboard.ports import LabLike, RunLike
from fsdp_lab.models.check import is_language
from fsdp_lab.runs.steps import Assembler, Step
from fsdp_lab.runs.view import Switch, switches_in_force

MOST_WAITING = 16  # runs of a sweep whose panels are kept; of more, some are told again from their first step


class Stage:
    """The panels of one run, and how many of its events they have been given."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.cursor = 0
        self.attempt: int | None = None  # of what is shown (see `runs.steps`); None before that
        self.begin(world_size)

    def begin(self, world_size: int) -> None:
        """New panels, with nothing in them."""
        self.world_size = world_size
        self.assembler = Assembler()
        self.last: Step | None = None
        self.switches = 0  # of the run, when its markers were drawn
        self.frame = StepAxis()
        self.panels: list[Panel] = [make(self.frame, world_size) for make in PANELS]
        self.pinnable = [panel for panel in self.panels if isinstance(panel, Pinnable)]
        self.ghost: Prediction | None = None

    def show(self, steps: Sequence[Step]) -> None:
        if not steps:
            return
        self.last = steps[-1]
        self.frame.follow(steps)
        for panel in self.panels:
            panel.update(steps)

    def predict(self, ghost: Prediction | None) -> None:
        """What is predicted of what is chosen; the former prediction stays until there is another."""
        if ghost is not None and ghost != self.ghost:
            self.ghost = ghost
            for panel in self.panels:
                panel.predict(ghost)

    def overlay(self, overlays: Mapping[int, Overlay]) -> None:
        """The curves of other runs, in ranges that hold them."""
        if self.frame.overlays.show(overlays):
            for panel in self.panels:
                panel.cover()


class Feed:
    """Takes what is new of the run that is shown, gives it to the panels and sends one message.

    Another run, another world size, or ranks that begin again from an earlier step make new panels: a plot shows one thing,
    and only steps that count. In a sweep each run
    has panels of its own until it is over; those of the run whose turn it is take the place of the former one's, in the
    same pictures, so that the page builds nothing anew.
    """

    def __init__(self, lab: LabLike, live: LiveView, board: Board, card: ComparisonCard,
                 wanted: Callable[[], Spec] | None = None) -> None:  # fmt: skip
        """wanted: what is chosen, of which is predicted; None: what the run has, or is about to have."""
        self._lab, self._wanted = lab, wanted
        self._foretelling = Predictor(lab)
        self._live = live
        self._board = board
        self._card = card
        self._run: RunLike | None = None
        self._compared = (board.shown, False)
        self._stage = Stage(lab.spec.world_size)
        self._waiting: dict[str, Stage] = {}  # of a sweep's runs whose turn it is not
        self._put_up(calm=False)

    @property
    def run(self) -> RunLike | None:
        """The one that is shown."""
        return self._run

    def tick(self) -> Sequence[StepEvent]:
        """Returns the events that are new. Not from two threads at once."""
        run = self._turn()
        events: Sequence[StepEvent] = ()
        if run is not None:
            if self._run is None or run.id != self._run.id:
                self._turn_to(run)
            stage = self._stage
            # Events first: a switch is known to the run before the first event of its Spec is.
            events, stage.cursor = run.events.since(stage.cursor)
            self._follow(run, events)
            if run.state.over:
                stage.show(stage.assembler.flush())
        for panel in self._stage.pinnable:
            panel.update(())  # another step may have been asked for
        self._stage.predict(self._foretelling.of(self._chosen()))
        self._compare(self._board.tick())
        self._live.flush([e.end_unix_s for e in events])
        return events

    def _chosen(self) -> Spec:
        """What is chosen on the page; in a sweep it is the sweep's."""
        sweep = self._lab.sweep
        if self._wanted is not None and (sweep is None or sweep.done):
            return self._wanted()
        run = self._run
        return self._lab.spec if run is None else run.pending or run.spec

    def _turn(self) -> RunLike | None:
        """The run to show. Between two turns of a sweep it is still the former one."""
        sweep = self._lab.sweep
        if self._run is not None and sweep is not None and not sweep.done and sweep.current is None:
            return self._run
        return running(self._lab)

    def _turn_to(self, run: RunLike) -> None:
        sweep = self._lab.sweep
        sweeping = sweep is not None and not sweep.done
        if not sweeping:
            self._waiting.clear()
        elif self._run is not None and len(self._waiting) < MOST_WAITING:
            self._waiting[self._run.id] = self._stage
        shape, first = self._stage.world_size, self._run is None
        self._run = run
        if first and run.spec.world_size == shape:  # what was put up for it: the page builds nothing anew
            self._stage.frame.language = is_language(run.spec.workload)
            return
        self._stage = self._waiting.pop(run.id) if run.id in self._waiting else Stage(run.spec.world_size)
        of_sweep = sweep is not None and (sweeping or run in sweep.runs)  # its last turn may be shown when it is over
        self._put_up(calm=of_sweep and self._stage.world_size == shape)

    def _follow(self, run: RunLike, events: Sequence[StepEvent]) -> None:
        """Shows new events, and marks the switches. Where the ranks have begun again, or are another number, the panels are
        new and are given all the steps that still count."""
        stage, switches, attempt = self._stage, list(run.switches), run.events.attempt
        ranks = switches[-1].after.world_size if switches else stage.world_size
        held: list[int | None] = []
        if (attempt, ranks) != (stage.attempt, stage.world_size):
            calm = ranks == stage.world_size
            if stage.attempt is not None or not calm:
                held = [pin.step if (pin := panel.captions().pin) and pin.held else None for panel in stage.pinnable]
                stage.begin(ranks)
                self._put_up(calm=calm)
            stage.attempt = attempt
            events = [e for step in drawn_of(run.events.steps(), ranks) for e in step.events]
        if len(switches) != stage.switches:
            stage.switches = len(switches)
            stage.frame.language = is_language(switches[-1].after.workload)
            stage.frame.mark_all([(s.step, *describe(s)) for s in marked(switches)])
        stage.show(stage.assembler.add(events))
        for panel, step in zip(stage.pinnable, held, strict=False):
            if step is not None:
                panel.pin(step)

    def _compare(self, shown: BoardView) -> None:
        """The card and the curves of other runs follow the board."""
        sweep = self._lab.sweep
        over = sweep is not None and sweep.done and any(e.kind is Kind.SWEEP for e in shown.entries)
        if self._compared == (shown, over):
            return
        self._compared = (shown, over)
        self._card.show(shown, over=over)
        self._stage.overlay(self._board.overlays())

    def _put_up(self, *, calm: bool) -> None:
        """The stage is what is seen; calm, where the pictures are those of the former one."""
        stage = self._stage
        stage.frame.language = is_language((self._run or self._lab).spec.workload)
        stage.overlay(self._board.overlays())
        scene = Scene(
            cards=[self._card, *stage.panels],
            shared_sources=stage.frame.sources,
            shared_patches=stage.frame.patches,
            headline=self._headline,
            caution=self._caution,
            ranks=stage.world_size,
        )
        (self._live.swap if calm else self._live.show)(scene)

    def _caution(self) -> str:
        """What the run's times are worth."""
        return "" if self._run is None else " ".join(self._run.notes)

    def _headline(self) -> str:
        """What is trained or about to be, how, and how far it is."""
        spec = self._chosen() if self._run is None else self._run.spec
        model = describe_value("model", spec.workload.model)
        what = [model, describe_strategy(spec), f"{spec.world_size} rank{'s' * (spec.world_size != 1)}"]
        if (last := self._stage.last) is not None:
            what = [f"step {last.number:,}", f"{duration(last.step_time_s)} a step", *what]
        return " · ".join(what)


def drawn_of(steps: Sequence[Step], ranks: int) -> list[Step]:
    """Those of a past that new panels are given: the newest, and of older ones those that more than curves show."""
    same = [s for s in steps if s.world_size == ranks]
    older = [
        s for s in same[:-STEP_LIMIT] if any(e.spans or e.memory_curve or e.eval_loss is not None for e in s.events)
    ]
    return older + same[-STEP_LIMIT:]


def marked(switches: Sequence[Switch]) -> list[Switch]:
    """Those to mark in the plots: in force, and since the last change of world size."""
    found: list[Switch] = []
    for switch in switches_in_force(switches):
        found = [] if resized(switch) else [*found, switch]
    return [switch for switch in found if switch.before is not None]


def resized(switch: Switch) -> bool:
    """Whether it is trained by another number of ranks than before."""
    return switch.before is not None and switch.before.world_size != switch.after.world_size


def describe(switch: Switch) -> tuple[str, str]:
    """A change in a few words, to write along a line; and in a sentence."""
    assert switch.before is not None
    changes = switch.before.difference(switch.after)
    label = ", ".join(describe_field(name, new) for name, (_, new) in changes.items())
    how = "parameters and optimizer carried over" if switch.carried else "started afresh"
    what = describe_changes(changes) or "it went on after a failure"
    return label or "went on", f"step {switch.step:,}: {what} ({how}, {switch.seconds:.2f} s)"
