"""From a lab's run to the cards of a live view: `Feed.tick` gives the panels what is new, and sends one message.

`Predictor` adds what the planner predicts of the chosen Spec; a thread of its own computes it, so that nobody waits."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.base.formatting import duration
from fsdp_lab.dashboard.board import Board, BoardView, ComparisonCard
from fsdp_lab.dashboard.fields import short_value
from fsdp_lab.dashboard.lab_like import LabLike, active_sweep, shown_run
from fsdp_lab.dashboard.live import LiveView, Scene
from fsdp_lab.dashboard.panels import PANELS, Panel, StepAxis, TimelinePanel
from fsdp_lab.dashboard.panels.axis import STEP_LIMIT, Overlay
from fsdp_lab.dashboard.panels.base import Prediction
from fsdp_lab.models.check import is_language
from fsdp_lab.planner.questions import planned_memory
from fsdp_lab.runs import Run, WatchedRun
from fsdp_lab.runs.steps import Assembler, Step
from fsdp_lab.runs.view import Switch, switches_in_force
from fsdp_lab.spec.describe import Trained, WatchedLoop, describe_changes, describe_field, describe_strategy
from fsdp_lab.spec.spec import Spec

TABS = {
    "loss": "Loss",
    "timeline": "Timeline",
    "ranks": "Ranks",
    "ledger": "Memory within a step",
    "compare": "Compare",
    "runs": "Runs",
    "settings": "Settings",
    "safety": "Safety",
    "slow": "Slow motion",
    "generate": "Generate",
}
RETRY_S = 3.0  # after which a missing time is predicted again, because the lab may have been calibrated

log = logging.getLogger(__name__)


class Predictor:
    """`of` may be called twenty times a second: it looks up a prediction, or lets a thread make it."""

    def __init__(self, lab: LabLike) -> None:
        self._lab = lab
        self._lock = threading.Lock()
        self._made: dict[str, tuple[Prediction | None, float]] = {}  # Spec id -> prediction, retry time
        self._busy = False

    def of(self, spec: Spec) -> tuple[Prediction | None, bool]:
        """The prediction for a Spec, and whether it was made; None and True: nothing can be predicted."""
        with self._lock:
            prediction, retry_s = self._made.get(spec.id, (None, 0.0))
            if time.monotonic() >= retry_s and not self._busy:
                self._busy = True
                threading.Thread(target=self._make, args=(spec,), name="fsdp-lab-predictor", daemon=True).start()
            return prediction, spec.id in self._made

    def _make(self, spec: Spec) -> None:
        prediction, retry_s = None, float("inf")
        try:
            prediction = self._predict(spec)
            if prediction.step_time_s is None:
                retry_s = time.monotonic() + RETRY_S
        except FieldError:
            pass  # the planner knows nothing of such a model
        except Exception:
            log.exception("nothing could be predicted of %s", spec.workload.model)
        with self._lock:
            self._made[spec.id] = (prediction, retry_s)
            self._busy = False

    def _predict(self, spec: Spec) -> Prediction:
        memory = planned_memory(spec, device="cpu" if "cpu" in (spec.devices or self._lab.devices) else "cuda")
        try:
            step_time_s = self._lab.plan(spec).step_time_s
        except FieldError:  # the machine is not calibrated, or not for as many ranks
            step_time_s = None
        samples = spec.global_batch
        return Prediction(
            spec_id=spec.id,
            peak_bytes=memory.at_peak.total_bytes,
            step_time_s=step_time_s,
            tokens=samples * spec.workload.seq_len if is_language(spec.workload) else samples,
        )


class Stage:
    """The panels of one run, and how many of its events they have."""

    def __init__(self, world_size: int) -> None:
        self.cursor = 0
        self.attempt: int | None = None  # that is drawn (see `runs.steps`); None: no step is
        self.world_size = world_size
        self.assembler = Assembler()
        self.last: Step | None = None
        self.switches = 0  # of the run, when its markers were drawn
        self.frame = StepAxis()
        self.panels: list[Panel] = [make(self.frame, world_size) for make in PANELS]
        self.timelines = [panel for panel in self.panels if isinstance(panel, TimelinePanel)]
        self.prediction: Prediction | None = None

    def show(self, steps: Sequence[Step]) -> None:
        if not steps:
            return
        self.last = steps[-1]
        self.frame.follow(steps)
        for panel in self.panels:
            panel.update(steps)

    def predict(self, prediction: Prediction | None) -> None:
        """Draws a prediction, which stays until there is another; None: there can be none."""
        if prediction != self.prediction:
            self.prediction = prediction
            for panel in self.panels:
                panel.predict(prediction)

    def overlay(self, overlays: Mapping[int, Overlay]) -> None:
        """Draws the curves of other runs, and widens ranges to hold them."""
        if self.frame.overlays.show(overlays):
            for panel in self.panels:
                panel.cover()


class Feed:
    """Gives the panels what is new of the run that is shown, and sends one message.

    Another run, another world size, or ranks that restart from an earlier step get new panels: a plot shows one thing, and
    only steps that count. In a sweep the panels of the run whose turn it is replace the former one's in the same pictures,
    so that the page rebuilds nothing."""

    def __init__(
        self,
        lab: LabLike,
        live: LiveView,
        board: Board,
        card: ComparisonCard,
        wanted: Callable[[], Spec] | None = None,
        help: Mapping[str, str] = {},
    ) -> None:
        """wanted: what is chosen, and to be predicted; None: what the run trains, or is about to train. help: of `Scene`."""
        self._help = help
        self._lab, self._wanted, self._predictor = lab, wanted, Predictor(lab)
        self._live, self._board, self._card = live, board, card
        self.run: Run | WatchedRun | None = None
        self._compared = (board.shown, False)
        self._stage = Stage(lab.spec.world_size)
        self._display(swap=False)

    def tick(self) -> Sequence[StepEvent]:
        """Returns the events that are new. Not from two threads at once."""
        run, sweep = shown_run(self._lab), active_sweep(self._lab)
        if self.run is not None and sweep is not None and sweep.current is None:
            run = self.run  # between two turns of a sweep it is still the former one
        events: Sequence[StepEvent] = ()
        if run is not None:
            if self.run is None or run.id != self.run.id:
                self._turn_to(run)
            stage = self._stage
            # Events before switches: a run records a switch before the first event of its Spec.
            events, stage.cursor = run.events.since(stage.cursor)
            self._follow(run, events)
            if run.state.over:
                stage.show(stage.assembler.flush())
        for panel in self._stage.timelines:
            panel.update(())  # a person may have chosen another step
        if not isinstance(self.run, WatchedRun) and isinstance(chosen := self._chosen(), Spec):
            prediction, is_made = self._predictor.of(chosen)
            if is_made:
                self._stage.predict(prediction)
        self._compare(self._board.tick())
        self._live.flush()
        return events

    @property
    def ranks(self) -> int:
        return self._stage.world_size

    def wait(self, timeout_s: float) -> None:
        """Waits until every rank has reported another step, or for the time."""
        if self.run is None:
            time.sleep(timeout_s)
        else:  # each rank's steps are there once, so that whole steps end at multiples of the ranks
            self.run.events.wait(self._stage.cursor // self.ranks * self.ranks + self.ranks, timeout_s)

    def _chosen(self) -> Spec:
        """Returns what is chosen on the page; in a sweep it is the sweep's."""
        if self._wanted is not None and active_sweep(self._lab) is None:
            return self._wanted()
        run = self.run
        return self._lab.spec if run is None or isinstance(run, WatchedRun) else run.pending or run.spec

    def _turn_to(self, run: Run | WatchedRun) -> None:
        sweep = self._lab.sweep
        shape, first = self._stage.world_size, self.run is None
        self.run = run
        # The empty panels are for it, so that the page rebuilds nothing. A watched loop was not predicted.
        if first and run.spec.world_size == shape and not isinstance(run, WatchedRun):
            follow_spec(self._stage.frame, run.spec)
            return
        self._stage = Stage(run.spec.world_size)
        in_sweep = sweep is not None and (not sweep.done or run in sweep.runs)  # or it was the last turn
        self._display(swap=in_sweep and self._stage.world_size == shape)

    def _follow(self, run: Run | WatchedRun, events: Sequence[StepEvent]) -> None:
        """Shows new events, and marks the switches. If the ranks have restarted, or their number has changed, new panels
        are given all the steps that still count."""
        stage, switches, attempt = self._stage, list(run.switches), run.events.attempt
        ranks = switches[-1].after.world_size if switches else stage.world_size
        if (attempt, ranks) != (stage.attempt, stage.world_size):
            same_ranks = ranks == stage.world_size
            if stage.attempt is not None or not same_ranks:
                stage, cursor = Stage(ranks), stage.cursor
                self._stage, stage.cursor = stage, cursor
                self._display(swap=same_ranks)
            stage.attempt = attempt
            events = [e for step in drawn_of(run.events.steps(), ranks) for e in step.events]
        if len(switches) != stage.switches:
            stage.switches = len(switches)
            follow_spec(stage.frame, switches[-1].after)
            stage.frame.mark_all([(s.step, *describe(s)) for s in marked(switches)])
        stage.show(stage.assembler.add(events))

    def _compare(self, shown: BoardView) -> None:
        """Shows the board's comparison and curves, if they have changed."""
        sweep = self._lab.sweep
        over = sweep is not None and sweep.done and any(e.swept for e in shown.entries)
        if self._compared == (shown, over):
            return
        self._compared = (shown, over)
        self._card.show(shown, over=over)
        self._stage.overlay(self._board.overlays())

    def _display(self, *, swap: bool) -> None:
        """Displays the stage; `swap` if its pictures are like the former one's, so that the page can keep them."""
        stage = self._stage
        follow_spec(stage.frame, (self.run or self._lab).spec)
        stage.overlay(self._board.overlays())
        shared: dict[str, Any] = {"shared_sources": stage.frame.sources, "shared_patches": stage.frame.patches}
        texts: dict[str, Any] = {"headline": self._headline, "caution": self._caution, "help": self._help}
        scene = Scene(cards=[*stage.panels, self._card], tabs=TABS, ranks=stage.world_size, **shared, **texts)
        (self._live.swap if swap else self._live.show)(scene)

    def _caution(self) -> str:
        """Says how far to trust the run's times."""
        notes = () if self.run is None else self.run.notes
        return " ".join(f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in notes)

    def _headline(self) -> str:
        """Says what is trained, or is about to be, how, and the last step."""
        spec = self._chosen() if self.run is None else self.run.spec
        model = spec.name if isinstance(spec, WatchedLoop) else short_value("model", spec.workload.model)
        ranks = f"{spec.world_size} rank{'s' * (spec.world_size != 1)}"
        last = self._stage.last
        if last is not None and (hosts := len({e.host for e in last.events})) > 1:
            ranks += f" on {hosts} hosts"
        what = [model, describe_strategy(spec), ranks]
        if last is not None:
            what = [f"step {last.number:,}", f"last {duration(last.step_time_s)}", *what]
        return " · ".join(what)


def follow_spec(frame: StepAxis, trained: Trained) -> None:
    """Tells panels how many ranks shard together, what the loss is measured in, and what is counted: a watched loop counts
    tokens, and its loss may be anything."""
    frame.shard_factor = 1 if isinstance(trained, WatchedLoop) else trained.shard_factor
    frame.language = not isinstance(trained, WatchedLoop) and is_language(trained.workload)
    frame.counted = "tokens" if frame.language or isinstance(trained, WatchedLoop) else "samples"


def drawn_of(steps: Sequence[Step], ranks: int) -> list[Step]:
    """The past steps that new panels draw: the newest, and of older ones those with more than a point on a curve."""
    same = [s for s in steps if s.world_size == ranks]
    more = [any(e.spans or e.memory_curve or e.eval_loss is not None for e in s.events) for s in same[:-STEP_LIMIT]]
    return [*compress(same, more), *same[-STEP_LIMIT:]]


def marked(switches: Sequence[Switch]) -> list[Switch]:
    """The switches to mark in the plots: in force, and since the last change of world size."""
    since: list[Switch] = []
    for switch in switches_in_force(switches):
        resized = switch.before is not None and switch.before.world_size != switch.after.world_size
        since = [] if resized else [*since, switch]
    return [switch for switch in since if switch.before is not None]


def describe(switch: Switch) -> tuple[str, str]:
    """A change in a few words, to write along a line; and in a sentence."""
    assert switch.before is not None
    changes = switch.before.difference(switch.after)
    label = ", ".join(describe_field(name, new) for name, (_, new) in changes.items())
    how = "parameters and optimizer carried over" if switch.carried else "started afresh"
    what = describe_changes(changes) or "training resumed after a failure"
    return label or "resumed", f"step {switch.step:,}: {what} ({how}, {switch.seconds:.2f} s)"
