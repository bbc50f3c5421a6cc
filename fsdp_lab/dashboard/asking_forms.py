"""The forms of what is asked of the ranks' model: `SavingForm`, its checkpoints, and `WritingForm`, a text.

Where no run is active the answer waits for ranks, so it has a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.formatting import duration, size
from fsdp_lab.base.generation import Sampling
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, field, put, row, section, status, styled, text_line
from fsdp_lab.dashboard.lab_like import LabLike, active_loop, active_run, active_sweep
from fsdp_lab.runs import Run, RunState
from fsdp_lab.runs.control import Request
from fsdp_lab.runs.saving import LAST, CheckpointConfig, SavedCheckpoint
from fsdp_lab.spec.checkpoint_format import Checkpoint

FOLDER = "checkpoints"
EVERY_STEPS = 100
OFF, ASKED, EVERY = "off", "on demand and at the end", "every n steps"
SHOWN = 3  # saves in the table
HEADS = ("step", "size", "training paused", "write time", "")
NOTHING = "No checkpoint yet. These settings take effect at Start, which creates the folder."
MOST_TOKENS = 1000


class AskingForm(InputForm):
    """Asks the active run, which answers between steps, or else what the ranks hold."""

    def __init__(self, lab: LabLike) -> None:
        super().__init__()
        self._lab = lab
        self._request: Request[Any] | None = None  # of the run
        self._asker: threading.Thread | None = None  # asks what the ranks hold

    @property
    def is_asking(self) -> bool:
        return self._request is not None or (self._asker is not None and self._asker.is_alive())

    def ask_held(self, ask: Callable[[], Any]) -> None:
        """Asks in a thread of its own; an error is shown."""
        self._asker = threading.Thread(target=self.attempt, args=(ask,), name="fsdp-lab-ask", daemon=True)
        self._asker.start()

    def take_answer(self, show: Callable[[Any], None]) -> None:
        """Shows what the run answered, or its error, once."""
        if (request := self._request) is not None and request.done:
            self._request = None
            self.attempt(lambda: show(request.wait(0)))


class SavingForm(AskingForm):
    """`config` is what is chosen; `resume` starts a run from the newest checkpoint in a folder."""

    def __init__(self, lab: LabLike, resume: Callable[[str], None]) -> None:
        super().__init__(lab)
        self._start = resume
        self._folder = self.add(
            widgets.Text(value=FOLDER, description="folder", tooltip="Where checkpoints go", continuous_update=False)
        )
        self._when = self.dropdown("save", (OFF, ASKED, EVERY), OFF, "Takes effect at the next start")
        self._every = self.number("n steps", EVERY_STEPS, 1, 1_000_000, "Steps from one checkpoint to the next")
        self._last = self.number("keep last", LAST, 1, 1000, "How many of a run are kept; older ones are removed")
        self._save = self.button("Save now", "save", "Write a checkpoint now; training continues", self.save)
        newest = "Start a run from the newest checkpoint in the folder, with the choices that wait for a start"
        self._resume = self.button("Resume", "history", newest, self.resume)
        self.message, self._list = text_line("fsdp-safety-said"), text_line("fsdp-safety-list")
        entries = [field(entry) for entry in (self._folder, self._when, self._every, self._last)]
        self.widget = section("Checkpoints", [row(entries), row([self._save, self._resume, self.message]), self._list])
        self.tick(None)

    @property
    def summary(self) -> str:
        when = {OFF: "is off", ASKED: "when asked", EVERY: f"every {self._every.value} steps"}[self._when.value]
        return f"saving {when}"

    def config(self) -> CheckpointConfig | None:
        """Returns how the next run is saved; makes its folder. Raises FieldError, which is shown beside the field, too."""
        self.say("")
        if self._when.value == OFF:
            return None
        try:
            every = self._every.value if self._when.value == EVERY else None
            return CheckpointConfig(folder=self._folder.value, every=every, last=self._last.value)
        except FieldError as e:
            self.say(f"The folder {e.reason}: {e.hint}.", wrong=True)
            raise

    def save(self) -> None:
        """Requests a checkpoint of the active run; without one, saves what the ranks hold."""
        if (run := active_run(self._lab)) is not None:
            self._request = run.save(self._folder.value)
            self.say("A checkpoint is written after the steps in progress, and one of the last step at the run's end.")
        elif not self.is_asking:
            self.say("Saving what the ranks hold.")
            folder = self._folder.value
            self.ask_held(lambda: self._say_saved(self._lab.save(folder)))

    def _say_saved(self, checkpoint: Checkpoint) -> None:
        self.say(f"Step {checkpoint.step:,} is saved in {checkpoint.path.parent.name}.")

    def resume(self) -> None:
        self.say("")
        self._start(self._folder.value)

    def tick(self, run: Run | None) -> None:
        """Shows the saves of `run`, the one that is shown."""
        self.take_answer(self._say_saved)
        active = active_run(self._lab)
        busy = active is not None and active.state in (RunState.BROKEN, RunState.RECOVERING, RunState.STOPPING)
        put(self._every, "disabled", self._when.value != EVERY)
        put(self._last, "disabled", self._when.value == OFF)
        put(self._save, "disabled", busy or self._lab.current is None)
        put(self._resume, "disabled", active is not None)
        put(self._list, "value", saves_table(run.saves if run is not None else ()))


def saves_table(saves: Sequence[SavedCheckpoint]) -> str:
    """The newest saves as a table, newest first."""
    if not saves:
        return status(NOTHING)
    heads = "".join(f"<th>{head}</th>" for head in HEADS)
    rows = "".join(_row(saved) for saved in list(saves)[: -SHOWN - 1 : -1])
    more = len(saves) - SHOWN
    under = f'<div class="fsdp-soft">and {more:,} before</div>' if more > 0 else ""
    return f'<table class="fsdp-saves"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>{under}'


def _row(saved: SavedCheckpoint) -> str:
    paused = duration(saved.stall_s)
    if saved.pending:
        cells = (f"{saved.step:,}", "", paused, "…", "is being written")
    elif saved.path is None:
        words = f'<span class="fsdp-refused">{escape(saved.words[0].upper() + saved.words[1:])}</span>'
        return f'<tr><td>{saved.step:,}</td><td colspan="4">{words}</td></tr>'
    else:
        kind = "" if saved.kind == "step" else saved.kind
        cells = (f"{saved.step:,}", size(saved.nbytes), paused, duration(saved.seconds or 0.0), kind)
    tip = escape(str(saved.path or ""))
    return f'<tr title="{tip}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


class WritingForm(AskingForm):
    """`toggle` opens and closes it."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike) -> None:
        super().__init__(lab)
        self._asked = ""  # the prompt of the request
        self._prompt = self.add(widgets.Text(placeholder="Once upon a time", description="prompt"))
        self._tokens = self.number("new tokens", Sampling.new_tokens, 1, MOST_TOKENS, "Length of the text")
        styled(self._tokens, "fsdp-number")
        self._write = self.button("Write", "pencil", "Continue the prompt, after the steps in progress", self.write)
        self._write.button_style = "primary"
        close = self.button("Close", "", "Close this form", self.toggle)
        entries = [styled(self._prompt, "fsdp-prompt"), self._tokens, self._write, close]
        self.message = styled(widgets.HTML(), "fsdp-sweep-said", "fsdp-written")
        row = styled(widgets.Box(entries), "fsdp-sweep-row")
        self.widget = styled(widgets.VBox([row, self.message], layout=widgets.Layout(display=HIDDEN)), "fsdp-sweep")
        self.tick()

    def write(self) -> None:
        """Requests a text. Raises FieldError and ClusterError of what cannot write one."""
        prompt, tokens = self._prompt.value, self._tokens.value
        if not prompt.strip():
            raise ValueError("Type a prompt first: the text that the model is to continue.")
        self.say("The model writes after the steps in progress.")
        if (run := active_run(self._lab)) is not None:
            self._asked, self._request = prompt, run.generate(prompt, new_tokens=tokens)
        else:
            self.ask_held(lambda: self._show(prompt, self._lab.generate(prompt, new_tokens=tokens)))

    def _show(self, prompt: str, texts: Sequence[str]) -> None:
        put(self.message, "value", f'<span role="status"><b>{escape(prompt)}</b>{escape(texts[0])}</span>')

    def tick(self) -> None:
        """Shows the text when it is there; a text can be asked for where the ranks hold a model and are not compared."""
        self.take_answer(lambda texts: self._show(self._asked, texts))
        held = self._lab.current is not None and active_sweep(self._lab) is None and active_loop(self._lab) is None
        put(self._write, "disabled", self.is_asking or not held)
