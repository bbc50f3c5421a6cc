"""Slow motion in the dashboard: buttons that go through a real training step phase by phase, and the picture of each.

Threads: a press is a job of one worker, which calls the lab and waits for ranks; the tick thread draws the result. So
neither the kernel nor the tick ever waits. A notebook's own `lab.slow_motion()` is drawn, too, and Next continues it.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from fsdp_lab.dashboard.forms import InputForm, prose, put, styled
from fsdp_lab.dashboard.lab_like import LabLike, active_run
from fsdp_lab.dashboard.live import LiveView, Scene
from fsdp_lab.dashboard.panels.holdings import HoldingsPanel
from fsdp_lab.runs import SlowMotion, StepMoment
from fsdp_lab.spec.spec import Spec

SPEEDS_PER_S = (0.5, 1.0, 2.0, 5.0)

EMPTY = """<p><b>A training step, phase by phase.</b> Between two steps every rank holds its shard of each parameter and
nothing else. In a step each unit is gathered, computed with and freed again, and its gradients are reduced. Here you see
which ranges of which parameters every rank holds at each of these phases. It is a real step: the ranks train it, and halt
before each phase until you let them go on.</p>
<p>Press <b>Next</b> for the first phase, or <b>Play</b>. A run that is going is stopped for it and keeps its parameters.
The backend must be <b>lab</b>, our own engine. In a cell: <code>for moment in lab.slow_motion(): ...</code></p>"""
ADVANCES, STOPS_RUN = "Advance all ranks to the next phase. Key: n", "Stop the run, and begin a step from there"
LOOKING_BACK = "The ranks do not move backwards: they are still at phase {newest}, and Next goes on from there."
RUN_STOPPED = "The run was stopped for this and keeps its parameters: Continue, in the bar, goes on with them."


class SlowMotionBox(InputForm):
    """The buttons, a message beside them, and the picture. `wanted` is the Spec that the next step trains, or None: what the
    ranks hold."""

    css = "fsdp-slow"

    def __init__(self, lab: LabLike, *, wanted: Callable[[], Spec | None]) -> None:
        super().__init__()
        self._lab = lab
        self._wanted = wanted
        self._jobs: queue.SimpleQueue[tuple[int, Callable[[], Any]] | None] = queue.SimpleQueue()  # None: the last
        self._turn = 0  # jobs of an earlier one are dropped
        self._paused = threading.Event()  # Play sets it free
        self._paused.set()
        self._busy = ""  # what is waited for, as a sentence
        self._text, self._failed = "", False  # the result of the last press
        self._slow: SlowMotion | None = None  # the one that our buttons move
        self._panel: HoldingsPanel | None = None
        self._drawn: StepMoment | None = None
        self._looked: StepMoment | None = None  # the earlier one that is looked at; None: the newest
        self._phases: dict[str, int] = {}  # of a step, by the id of a Spec that has been gone through
        self._live = LiveView()
        head = styled(widgets.HTML("<h4>Slow motion</h4>"), "fsdp-slow-head")
        self._next = self.button("Next", "step-forward", ADVANCES, self.next)
        self._play = self.button("Play", "play", "Advance at this speed", self.play)
        self._stop = self.button("Stop", "stop", "Finish the step", self.stop)
        self._back = self.button("Back", "chevron-left", "Look one phase back: no rank moves", lambda: self._look(-1))
        self._forward = self.button("Forward", "chevron-right", "Look one phase further", lambda: self._look(1))
        self._next.button_style = "primary"
        speeds = [(f"{s:g} phase{'s' * (s > 1)} a second", s) for s in SPEEDS_PER_S]
        self._speed = widgets.Dropdown(options=speeds, value=1.0, tooltip="Speed of Play")
        self.message = styled(widgets.HTML(), "fsdp-state-line")
        self.inputs += [styled(self._speed, "fsdp-slow-speed"), self._live]
        bar = [head, self._next, self._play, self._speed, self._stop, self._back, self._forward, self.message]
        self._empty = styled(widgets.HTML(EMPTY), "fsdp-slow-empty")
        self.widget = styled(widgets.VBox([styled(widgets.Box(bar), "fsdp-bar"), self._empty]), "fsdp-slow")
        self._show()
        threading.Thread(target=self._work, name="fsdp-lab-slow-motion", daemon=True).start()

    @property
    def parts(self) -> list[widgets.Widget]:
        """The widgets that are to be closed; they are not displayed at the same time."""
        return [self.widget, self._empty, self._live]

    def next(self) -> None:
        """Advances one phase, and ends playing and looking back."""
        self._looked = None
        self._paused.set()
        self._jobs.put((self._turn, self._advance))

    def play(self) -> None:
        """Advances phase after phase until the step is over, or pauses that."""
        if self._paused.is_set():
            self._looked = None
            self._paused.clear()
            self._jobs.put((self._turn, self._go_on))
        else:
            self._paused.set()
            self._turn += 1

    def stop(self) -> None:
        """Lets the step run to its end, on a thread of its own, because the worker may wait in a long phase."""
        self._paused.set()
        self._turn += 1
        if (slow := self._current()) is not None and not slow.closed:
            self._busy = "The step runs to its end."
            self.ask_lab(lambda: self._do(slow.close))

    def _look(self, by: int) -> None:
        """Looks at an earlier phase of this step, or at a later one up to the newest; pauses playing."""
        if not self._paused.is_set():
            self.play()
        past = self._past()
        at = past.index(self._looked or past[-1]) + by
        self._looked = past[max(0, at)] if at < len(past) - 1 else None

    def _past(self) -> tuple[StepMoment, ...]:
        """The phases of this step so far; what is looked at is one of them."""
        past = tuple(slow.past) if (slow := self._current()) is not None else ()
        if self._looked not in past:
            self._looked = None
        return past

    def _work(self) -> None:
        for turn, job in iter(self._jobs.get, None):
            if turn == self._turn:
                self.say("")
                self._do(job)

    def _do(self, job: Callable[[], Any]) -> None:
        self.attempt(job)  # a refusal or a lost rank is said
        self._busy = ""

    def _go_on(self) -> None:
        try:
            while self._advance() and not self._paused.wait(1 / self._speed.value):
                pass
        finally:
            self._paused.set()

    def _advance(self) -> bool:
        """Goes to the next phase, of another step where there is none; returns whether there was one."""
        slow = self._current()
        if slow is None or slow.closed:
            self._busy = "The ranks get ready."
            text = RUN_STOPPED if active_run(self._lab) is not None else ""
            slow = self._lab.slow_motion(self._wanted())
            self.say(text)
        self._slow = slow
        goes_on = next(slow, None) is not None
        self._turn += not goes_on
        return goes_on

    def say(self, text: str, *, wrong: bool = False) -> None:
        self._text, self._failed = text, wrong
        self._turn += wrong

    def tick(self) -> None:
        """Draws what is new. Never waits for a rank."""
        slow, past = self._current(), self._past()
        if past and (moment := self._looked or past[-1]) is not self._drawn:
            self._draw(moment)
        if slow is not None and past and slow.reason == "the step is over":
            self._phases[slow.spec.id] = past[-1].index + 1
        self._live.flush()
        self._show()

    def _current(self) -> SlowMotion | None:
        """The step in slow motion: ours, or one that a notebook has begun since."""
        ours, newest = self._slow, self._lab.slow
        return newest if newest is not None and (ours is None or ours.closed) else ours

    def _draw(self, moment: StepMoment) -> None:
        self._drawn = moment
        if self._panel is not None and self._panel.fits(moment):
            self._panel.update(moment)
            return
        self._panel = HoldingsPanel(moment)
        self._live.show(Scene(cards=(self._panel,), headline=self._headline))
        if self._live not in self.widget.children:
            self.widget.children = [self.widget.children[0], self._live]

    def _headline(self) -> str:
        m, slow, past = self._drawn, self._current(), self._past()
        if m is None:
            return ""
        of = f", the last is {last - 1:,}" if (last := self._phases.get(m.spec.id)) else ""
        when = "the step has ended since" if slow is not None and slow.closed else "about to happen"
        when = f"looking back from phase {past[-1].index:,}" if m is self._looked else when
        return f"step {m.step:,} · phase {m.index:,}{of} · {when} · {len(m.frames)} ranks"

    def _show(self) -> None:
        slow, past, playing = self._current(), self._past(), not self._paused.is_set()
        over = slow is not None and slow.closed
        halted = slow is not None and slow.moment is not None and not over
        word = "halted" if halted else "failed" if self._failed else "ready"
        word = "working" if self._busy else "playing" if playing else word
        text = ended(slow) if slow is not None and over and not self._failed else self._text
        text = LOOKING_BACK.format(newest=past[-1].index) if self._looked is not None and halted else text
        put(self._next, "tooltip", ADVANCES if active_run(self._lab) is None else STOPS_RUN)
        put(self._play, "description", "Pause" if playing else "Play")
        put(self._play, "icon", "pause" if playing else "play")
        put(self._stop, "disabled", not halted)
        put(self._back, "disabled", not past or (self._looked or past[-1]) is past[0])
        put(self._forward, "disabled", self._looked is None)
        badge = f'<span class="fsdp-slow-state fsdp-slow-{word}" role="status">{word}</span>'
        put(self.message, "value", f"{badge} <span>{prose(self._busy or text)}</span>")

    def retire(self) -> None:
        self._rest()
        super().retire()

    def close(self) -> None:
        """Ends the worker; a step that our buttons have begun runs to its end. `parts` are left to be closed."""
        self._rest()
        if self._slow is not None and not self._slow.closed:
            self.ask_lab(self._slow.close)

    def _rest(self) -> None:
        self._paused.set()
        self._jobs.put(None)


def ended(slow: SlowMotion) -> str:
    """Says why there are no more phases."""
    event = slow.event
    if event is not None and slow.reason in ("the step is over", "closed"):
        return f"Step {event.step:,} is over, its loss was {event.mean_loss:.4f}. Next begins another one."
    return f"Slow motion has ended: {slow.reason}."
