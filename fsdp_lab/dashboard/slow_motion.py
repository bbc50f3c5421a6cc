"""Slow motion in the dashboard: buttons that go through a real training step phase by phase, and the picture of each.

Threads: a press sets a request; one worker, started with the first press, calls the lab and waits for ranks; the tick
thread draws the result. So neither the kernel nor the tick ever waits. A notebook's own `lab.slow_motion()` is drawn, too,
and Next continues it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.errors import FieldError
from fsdp_lab.dashboard.forms import InputForm, error_text, put, styled
from fsdp_lab.dashboard.lab_like import LabLike, active_run
from fsdp_lab.dashboard.live import LiveView, Scene
from fsdp_lab.dashboard.panels.holdings import HoldingsPanel
from fsdp_lab.runs import SlowMotion, StepMoment
from fsdp_lab.spec.describe import describe_value, field_title
from fsdp_lab.spec.spec import Spec

SPEEDS_PER_S = (0.5, 1.0, 2.0, 5.0)
MOST_PRESSES = 20  # of Next that may wait for the ranks

EMPTY = """<p><b>A training step, phase by phase.</b> Between two steps every rank holds its shard of each parameter and
nothing else. In a step each unit is gathered, computed with and freed again, and its gradients are reduced. Here you see
which ranges of which parameters every rank holds at each of these phases. It is a real step: the ranks train it, and halt
before each phase until you let them go on.</p>
<p>Press <b>Next</b> for the first phase, or <b>Play</b>. A run that is going is stopped for it and keeps its parameters.
The backend must be <b>lab</b>, our own engine. In a cell: <code>for moment in lab.slow_motion(): ...</code></p>"""
RUN_STOPPED = "The run was stopped for this and keeps its parameters: Continue, at the top, goes on with them."


class SlowMotionBox(InputForm):
    """The buttons, a message beside them, and the picture. `wanted` is the Spec that the next step trains, or None: what the
    ranks hold; `accept` changes field values of it, to fix a refusal."""

    css = "fsdp-slow"

    def __init__(
        self, lab: LabLike, *, wanted: Callable[[], Spec | None], accept: Callable[[Mapping[str, Any]], None]
    ) -> None:
        super().__init__()
        self._lab, self._wanted, self._accept = lab, wanted, accept
        self._changed = threading.Condition(threading.RLock())  # guards the requests and texts below
        self._presses = 0  # of Next, that are to be handled
        self._playing = False
        self._due_s = 0.0  # when Play takes the next phase, on the monotonic clock
        self._busy = ""  # what the worker is waiting for, as a sentence
        self._text = ""  # the result of the last press
        self._failed = False
        self._fix: dict[str, Any] = {}
        self._halt = False
        self._slow: SlowMotion | None = None  # the one that our buttons move
        self._worker: threading.Thread | None = None
        self._panel: HoldingsPanel | None = None
        self._drawn: StepMoment | None = None
        self._live = LiveView()
        head = styled(widgets.HTML("<h4>Slow motion</h4>"), "fsdp-slow-head")
        self._next = self.button("Next", "step-forward", "Advance all ranks to the next phase", self.next)
        self._play = self.button("Play", "play", "Advance at this speed", self.play)
        self._stop = self.button("Stop", "stop", "Finish the step", self.stop)
        self._next.button_style = "primary"
        speeds = [(f"{s:g} phase{'s' * (s > 1)} a second", s) for s in SPEEDS_PER_S]
        self._speed = widgets.Dropdown(options=speeds, value=1.0, tooltip="Speed of Play")
        self._speed.observe(lambda _: self._reschedule(), "value")
        self.message = styled(widgets.HTML(), "fsdp-state-line")
        self._apply_fix = styled(self.button("", "", "Apply and continue", self.apply_fix), "fsdp-fix")
        self.inputs += [styled(self._speed, "fsdp-slow-speed"), self._live]
        bar = [head, self._next, self._play, self._speed, self._stop, self.message, self._apply_fix]
        self._empty = styled(widgets.HTML(EMPTY), "fsdp-slow-empty")
        self.widget = styled(widgets.VBox([styled(widgets.Box(bar), "fsdp-bar"), self._empty]), "fsdp-slow")
        self._show()

    @property
    def parts(self) -> list[widgets.Widget]:
        """The widgets that are to be closed; they are not displayed at the same time."""
        return [self.widget, self._empty, self._live]

    def next(self) -> None:
        """Advances one phase, and ends playing."""
        with self._changed:
            self._playing = False
            self._presses = min(self._presses + 1, MOST_PRESSES)
            self._wake()

    def play(self) -> None:
        """Advances phase after phase until the step is over, or pauses that."""
        with self._changed:
            self._playing, self._due_s = not self._playing, 0.0
            self._wake()

    def stop(self) -> None:
        """Lets the step run to its end, on a thread of its own, because the worker may wait in a long phase."""
        with self._changed:
            self._playing, self._presses = False, 0
            slow = self._current()
            if slow is not None and not slow.closed:
                self._busy = "The step runs to its end."
                threading.Thread(target=self._end, args=(slow,), name="fsdp-lab-slow-end", daemon=True).start()
            self._show()

    def _reschedule(self) -> None:
        with self._changed:
            self._due_s = min(self._due_s, time.monotonic() + 1 / self._speed.value)
            self._changed.notify_all()

    def apply_fix(self) -> None:
        """Takes the field values that the last refusal proposes, and advances one phase."""
        with self._changed:
            fix, self._fix = self._fix, {}
        if fix:
            self._accept(fix)
            self.next()

    def _wake(self) -> None:
        """Called with the lock held."""
        if self._halt:
            return
        self._text, self._failed, self._fix = "", False, {}
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="fsdp-lab-slow-motion", daemon=True)
            self._worker.start()
        self._changed.notify_all()
        self._show()

    def _work(self) -> None:
        while self._wait_until_due():
            try:
                self._advance()
            except Exception as e:  # a refusal or a lost rank; a thread has nobody to raise to
                self._fail(e)
            finally:
                with self._changed:
                    self._busy = ""

    def _wait_until_due(self) -> bool:
        """Blocks until the next phase is due; False at the end."""
        with self._changed:
            while not self._halt:
                if self._presses:
                    self._presses -= 1
                    return True
                left = self._due_s - time.monotonic()
                if self._playing and left <= 0:
                    self._due_s = time.monotonic() + 1 / self._speed.value
                    return True
                self._changed.wait(left if self._playing else None)
        return False

    def _advance(self) -> None:
        slow, text = self._current(), ""
        if slow is None or slow.closed:
            with self._changed:
                self._busy = "The ranks get ready."
            text = RUN_STOPPED if active_run(self._lab) is not None else ""
            slow = self._lab.slow_motion(self._wanted())
        with self._changed:
            self._slow = slow
        moment = next(slow, None)
        with self._changed:
            self._text = text
            if moment is None:
                self._playing, self._presses = False, 0

    def _end(self, slow: SlowMotion) -> None:
        try:
            slow.close()
        except Exception as e:
            self._fail(e)
        finally:
            with self._changed:
                self._busy = ""

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._playing, self._presses = False, 0
            self._fix = dict(error.fix) if isinstance(error, FieldError) else {}
            self.say(error_text(error), wrong=True)

    def say(self, text: str, *, wrong: bool = False) -> None:
        with self._changed:
            self._text, self._failed = text, wrong

    def tick(self) -> None:
        """Draws what is new. Never waits for a rank."""
        slow = self._current()
        moment = slow.moment if slow is not None else None
        if moment is not None and moment is not self._drawn:
            self._draw(moment)
        self._live.flush()
        with self._changed:
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
        m = self._drawn
        return "" if m is None else f"step {m.step:,} · phase {m.index:,}, about to happen · {len(m.frames)} ranks"

    def _show(self) -> None:
        """Called with the lock held, or by the constructor."""
        slow = self._current()
        over = slow is not None and slow.closed
        halted = slow is not None and slow.moment is not None and not over
        idle = "refused" if self._fix else "failed" if self._failed else "ready"
        word = "working" if self._busy else "playing" if self._playing else "halted" if halted else idle
        text = ended(slow) if slow is not None and over and not self._failed else self._text
        put(self._play, "description", "Pause" if self._playing else "Play")
        put(self._play, "icon", "pause" if self._playing else "play")
        put(self._stop, "disabled", not halted)
        badge = f'<span class="fsdp-slow-state fsdp-slow-{word}" role="status">{word}</span>'
        put(self.message, "value", f"{badge} <span>{escape(self._busy or text)}</span>")
        changes = ", ".join(f"{field_title(n)} {describe_value(n, v)}" for n, v in self._fix.items())
        put(self._apply_fix, "description", f"Use {changes}" if changes else "")
        put(self._apply_fix.layout, "display", "" if changes else "none")

    def retire(self) -> None:
        self._rest()
        super().retire()

    def close(self) -> None:
        """Ends the worker; a step that our buttons have begun runs to its end. `parts` are left to be closed."""
        slow = self._rest()
        if slow is not None and not slow.closed:
            threading.Thread(target=self._end, args=(slow,), name="fsdp-lab-slow-end", daemon=True).start()
        if self._worker is not None:
            self._worker.join(1.0)  # it may wait for ranks; then it ends when they answer

    def _rest(self) -> SlowMotion | None:
        with self._changed:
            self._halt, self._playing, self._presses = True, False, 0
            self._changed.notify_all()
            return self._slow


def ended(slow: SlowMotion) -> str:
    """Says why there are no more phases."""
    event = slow.event
    if event is not None and slow.reason in ("the step is over", "closed"):
        return f"Step {event.step:,} is over, its loss was {event.mean_loss:.4f}. Next begins another one."
    return f"Slow motion has ended: {slow.reason}."
