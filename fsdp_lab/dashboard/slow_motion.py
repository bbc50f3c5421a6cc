"""Slow motion in the dashboard: buttons that go through a real training step phase by phase, and the picture of each.

Threads: a press leaves a word; one worker, started with the first press, speaks to the lab and waits for ranks; the tick
thread draws what has come of it. So neither the kernel nor the tick ever waits. What a notebook's own `lab.slow_motion()`
goes through is drawn too, and Next goes on with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.core.describe import describe_value, field_title
from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.spec import Spec
from fsdp_lab.dashboard.live import LiveView, Scene
from fsdp_lab.dashboard.panels.holdings import HoldingsPanel
from fsdp_lab.dashboard.parts import put, sentence
from fsdp_lab.dashboard.ports import LabLike, SlowLike
from fsdp_lab.runs import StepMoment

SPEEDS_PER_S = (0.5, 1.0, 2.0, 5.0)
MOST_PRESSES = 20  # of Next that may wait for the ranks

EMPTY = """<p><b>A training step, phase by phase.</b> Between two steps every rank holds its shard of each parameter and
nothing else. In a step each unit is gathered, computed with and freed again, and its gradients are reduced. Here you see
which ranges of which parameters every rank holds at each of these phases. It is a real step: the ranks train it, and halt
before each phase until you let them go on.</p>
<p>Press <b>Next</b> for the first phase, or <b>Play</b>. A run that is going is stopped for it and keeps its parameters.
The backend must be <b>lab</b>, our own engine. In a cell: <code>for moment in lab.slow_motion(): ...</code></p>"""


class SlowMotionBox:
    """The buttons, what is said beside them, and the picture. `widget` is to be shown; `tick` to be called often.

    Args:
        wanted: the Spec that the next step is to be trained with; None: what the ranks hold.
        accept: takes field values over into that Spec: the way out of a refusal.
    """

    def __init__(
        self, lab: LabLike, *, wanted: Callable[[], Spec | None], accept: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._lab, self._wanted, self._accept = lab, wanted, accept
        self._changed = threading.Condition(threading.RLock())  # guards the words below
        self._asked = 0  # presses of Next
        self._playing = False
        self._due_s = 0.0  # when Play takes the next phase, on the monotonic clock
        self._busy = ""  # what the worker is waiting for, in words
        self._words = ""  # what came of the last press
        self._failed = False
        self._fix: dict[str, Any] = {}
        self._halt = False
        self._slow: SlowLike | None = None  # the one that our buttons move
        self._worker: threading.Thread | None = None
        self._panel: HoldingsPanel | None = None
        self._drawn: StepMoment | None = None
        self._live = LiveView()
        self._make_widgets()
        self._show()

    def _make_widgets(self) -> None:
        head = widgets.HTML("<h4>Slow motion</h4>")
        head.add_class("fsdp-slow-head")
        self._next = self._button("Next", "step-forward", "Advance all ranks to the next phase", self.next)
        self._play = self._button("Play", "play", "Advance at this speed", self.play)
        self._stop = self._button("Stop", "stop", "Finish the step", self.stop)
        self._next.button_style = "primary"
        self._speed = widgets.Dropdown(
            options=[(f"{s:g} phase{'s' * (s > 1)} a second", s) for s in SPEEDS_PER_S],
            value=1.0,
            tooltip="Speed of Play",
        )
        self._speed.add_class("fsdp-slow-speed")
        self._speed.observe(lambda _: self._hurry(), "value")
        self._say = widgets.HTML()
        self._say.add_class("fsdp-state-line")
        self._way_out = self._button("", "", "Apply and continue", self._take_way_out)
        self._way_out.add_class("fsdp-fix")
        bar = widgets.Box([head, self._next, self._play, self._speed, self._stop, self._say, self._way_out])
        bar.add_class("fsdp-bar")
        self._empty = widgets.HTML(EMPTY)
        self._empty.add_class("fsdp-slow-empty")
        self.widget = widgets.VBox([bar, self._empty])
        self.widget.add_class("fsdp-slow")

    def _button(self, word: str, icon: str, tooltip: str, press: Callable[[], None]) -> widgets.Button:
        button = widgets.Button(description=word, icon=icon, tooltip=tooltip)
        button.add_class("fsdp-slow-button")
        button.on_click(lambda _: press())
        return button

    @property
    def parts(self) -> list[widgets.Widget]:
        """Everything that is to be closed; not all of it is shown at once."""
        return [self.widget, self._empty, self._live]

    @property
    def answering(self) -> list[widgets.Widget]:
        """The widgets that must answer while a cell runs."""
        return [self._next, self._play, self._stop, self._speed, self._way_out, self._live]

    # -- what a person does ---------------------------------------------------------------------------------------

    def next(self) -> None:
        """One phase on; while it plays, one at once, and then no more by themselves."""
        with self._changed:
            self._playing = False
            self._asked = min(self._asked + 1, MOST_PRESSES)
            self._wake()

    def play(self) -> None:
        """One phase after the other until the step is over; or holds."""
        with self._changed:
            self._playing, self._due_s = not self._playing, 0.0
            self._wake()

    def stop(self) -> None:
        """Lets the step run to its end. Its own thread: a phase that lasts must not hold it up."""
        with self._changed:
            self._playing, self._asked = False, 0
            slow = self._present()
            if slow is not None and not slow.closed:
                self._busy = "The step runs to its end."
                threading.Thread(target=self._end, args=(slow,), name="fsdp-lab-slow-end", daemon=True).start()
            self._show()

    def _hurry(self) -> None:
        with self._changed:
            self._due_s = min(self._due_s, time.monotonic() + 1 / self._speed.value)
            self._changed.notify_all()

    def _take_way_out(self) -> None:
        with self._changed:
            fix, self._fix = self._fix, {}
        if fix:
            self._accept(fix)
            self.next()

    def _wake(self) -> None:
        """Called with the lock held."""
        if self._halt:
            return
        self._words, self._failed, self._fix = "", False, {}
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="fsdp-lab-slow-motion", daemon=True)
            self._worker.start()
        self._changed.notify_all()
        self._show()

    # -- the worker -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._await_word():
            try:
                self._advance()
            except Exception as e:  # a refusal, a lost rank: nobody above to raise to
                self._fail(e)
            finally:
                with self._changed:
                    self._busy = ""

    def _await_word(self) -> bool:
        """Until a phase is to be taken; False at the end."""
        with self._changed:
            while not self._halt:
                if self._asked:
                    self._asked -= 1
                    return True
                left = self._due_s - time.monotonic()
                if self._playing and left <= 0:
                    self._due_s = time.monotonic() + 1 / self._speed.value
                    return True
                self._changed.wait(left if self._playing else None)
        return False

    def _advance(self) -> None:
        slow, said = self._present(), ""
        if slow is None or slow.closed:
            slow, said = self._begin()
        with self._changed:
            self._slow = slow
        moment = next(slow, None)
        with self._changed:
            self._words = said
            if moment is None:
                self._playing, self._asked = False, 0

    def _begin(self) -> tuple[SlowLike, str]:
        """Another step, and what is to be said of it."""
        with self._changed:
            self._busy = "The ranks get ready."
        run = self._lab.current
        going = run is not None and not run.state.over
        slow = self._lab.slow_motion(self._wanted())
        said = (
            "The run was stopped for this and keeps its parameters: lab.run(lab.spec, fresh=False) continues with them."
        )
        return slow, said if going else ""

    def _end(self, slow: SlowLike) -> None:
        try:
            slow.close()
        except Exception as e:
            self._fail(e)
        finally:
            with self._changed:
                self._busy = ""

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._playing, self._asked, self._failed = False, 0, True
            self._words = sentence(error)
            self._fix = dict(error.fix) if isinstance(error, FieldError) else {}

    # -- what is shown --------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Draws what is new. On the tick thread; never waits for a rank."""
        slow = self._present()
        moment = slow.moment if slow is not None else None
        if moment is not None and moment is not self._drawn:
            self._draw(moment)
        self._live.flush()
        with self._changed:
            self._show()

    def _present(self) -> SlowLike | None:
        """The step that is gone through: ours, or one that a notebook has begun since."""
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
        m = self._drawn
        return "" if m is None else f"step {m.step:,} · phase {m.index:,}, about to happen · {len(m.frames)} ranks"

    def _show(self) -> None:
        """Called with the lock held, or before anybody else is there."""
        slow = self._present()
        over = slow is not None and slow.closed
        held = slow is not None and slow.moment is not None and not over
        ending = "refused" if self._fix else "failed" if self._failed else "ready"
        word = "working" if self._busy else "playing" if self._playing else "halted" if held else ending
        words = ended(slow) if slow is not None and over and not self._failed else self._words
        put(self._play, "description", "Pause" if self._playing else "Play")
        put(self._play, "icon", "pause" if self._playing else "play")
        put(self._stop, "disabled", not held)
        put(self._say, "value", f'<span class="fsdp-slow-state fsdp-slow-{word}" role="status">{word}</span> '
                                f"<span>{escape(self._busy or words)}</span>")  # fmt: skip
        label = (
            "Use " + ", ".join(f"{field_title(n)} {describe_value(n, v)}" for n, v in self._fix.items())
            if self._fix
            else ""
        )
        put(self._way_out, "description", label)
        put(self._way_out.layout, "display", "" if label else "none")

    # -- end ------------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """The lab is closed: nothing can be done any more."""
        self._rest()
        for control in (self._next, self._play, self._stop, self._speed, self._way_out):
            control.disabled = True

    def close(self) -> None:
        """Ends the worker; a step that our buttons have begun runs to its end. The widgets are closed by who shows them."""
        slow = self._rest()
        if slow is not None and not slow.closed:
            threading.Thread(target=self._end, args=(slow,), name="fsdp-lab-slow-end", daemon=True).start()
        if self._worker is not None:
            self._worker.join(1.0)  # it may wait for ranks; then it ends when they answer

    def _rest(self) -> SlowLike | None:
        with self._changed:
            self._halt, self._playing, self._asked = True, False, 0
            self._changed.notify_all()
            return self._slow


def ended(slow: SlowLike) -> str:
    """Why there are no more phases, in a sentence."""
    event = slow.event
    if event is not None and slow.reason in ("the step is over", "closed"):
        return f"Step {event.step:,} is over, its loss was {event.mean_loss:.4f}. Next begins another one."
    return f"Slow motion has ended: {slow.reason}."
