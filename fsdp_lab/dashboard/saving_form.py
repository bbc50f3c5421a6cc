"""The form of checkpoints: where and how often a run is saved, *Save now*, *Resume*, and what came of each save.

Handlers run on whatever thread the page's message arrives on, `tick` on the tick thread. What waits for ranks, the saving
of what they hold when no run goes on, has a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.core.checkpoint_format import Checkpoint
from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.formatting import duration, size
from fsdp_lab.dashboard.parts import button, field, line, part, put, row, sentence, status
from fsdp_lab.dashboard.ports import LabLike, RunLike, SaveRequestLike
from fsdp_lab.runs.saving import LAST, CheckpointConfig, SavedCheckpoint

FOLDER = "checkpoints"
EVERY_STEPS = 100
OFF, ASKED, EVERY = "off", "on demand and at the end", "every n steps"
SHOWN = 3  # saves in the list
HEADS = ("step", "size", "training paused", "write time", "")
NOTHING = "No checkpoint yet. These settings take effect at Start, which creates the folder."


class SavingForm:
    """`widget` is to be shown, `tick` to be called often. `saving` is what is chosen.

    Args:
        resume: begins a run from the newest checkpoint in a folder.
    """

    def __init__(self, lab: LabLike, resume: Callable[[str], None]) -> None:
        self._lab, self._begin = lab, resume
        self._words, self._wrong = "", False
        self._ticket: SaveRequestLike | None = None  # of the run
        self._aside: threading.Thread | None = None  # saves what the ranks hold
        self._make_widgets()
        self.tick(None)

    def _make_widgets(self) -> None:
        self._folder = widgets.Text(value=FOLDER, description="folder", tooltip="Where checkpoints go",
                                    continuous_update=False)  # fmt: skip
        self._when = widgets.Dropdown(options=(OFF, ASKED, EVERY), value=OFF, description="save",
                                      tooltip="Takes effect at the next start")  # fmt: skip
        self._every = self._number("n steps", EVERY_STEPS, "Steps from one checkpoint to the next", 1_000_000)
        self._last = self._number("keep last", LAST, "How many of a run are kept; older ones are removed", 1000)
        self._save = button("Save now", "save", "Write a checkpoint now; training continues", self.save)
        self._resume = button("Resume", "history", "Start a run from the newest checkpoint in the folder, with the "
                              "choices that wait for a start", self.resume)  # fmt: skip
        self._said, self._list = line("fsdp-safety-said"), line("fsdp-safety-list")
        entries = [field(entry) for entry in (self._folder, self._when, self._every, self._last)]
        beside = row([self._save, self._resume, self._said])
        self.widget = part("Checkpoints", [row(entries), beside, self._list])

    def _number(self, label: str, value: int, tooltip: str, most: int) -> widgets.BoundedIntText:
        return widgets.BoundedIntText(value=value, min=1, max=most, description=label, tooltip=tooltip)

    @property
    def answering(self) -> list[widgets.Widget]:
        """The widgets that must answer while a cell runs."""
        return [self._folder, self._when, self._every, self._last, self._save, self._resume]

    @property
    def words(self) -> str:
        """What is chosen, shortly."""
        when = {OFF: "is off", ASKED: "when asked", EVERY: f"every {self._every.value} steps"}[self._when.value]
        return f"saving {when}"

    def saving(self) -> CheckpointConfig | None:
        """What the next run is to be saved by. Its folder is made. Raises ArgumentError, which is shown beside the field."""
        self._say("")
        if self._when.value == OFF:
            return None
        try:
            every = self._every.value if self._when.value == EVERY else None
            return CheckpointConfig(folder=self._folder.value, every=every, last=self._last.value)
        except FieldError as e:
            self._say(f"The folder {e.reason}: {e.hint}.", wrong=True)
            raise

    # -- what a person does -----------------------------------------------------------------------------------------

    def save(self) -> None:
        """Requests a checkpoint of the current run; without one, saves what the ranks hold."""
        run = self._lab.current
        if run is not None and not run.state.over:
            self._guarded(lambda: self._save_run(run))
        elif self._aside is None or not self._aside.is_alive():
            self._say("Saving what the ranks hold.")
            folder = self._folder.value
            self._aside = threading.Thread(target=self._save_held, args=(folder,), name="fsdp-lab-save", daemon=True)
            self._aside.start()

    def _save_run(self, run: RunLike) -> None:
        self._ticket = run.save()
        self._say("A checkpoint is written after the steps in progress.")

    def _save_held(self, folder: str) -> None:
        self._guarded(lambda: self._say(saved_words(self._lab.save(folder))))

    def resume(self) -> None:
        """Begins a run from the newest checkpoint in the folder."""
        self._say("")
        self._guarded(lambda: self._begin(self._folder.value))

    def _guarded(self, act: Callable[[], Any]) -> None:
        """Runs the action and shows its error: nobody can catch what a widget handler raises."""
        try:
            act()
        except Exception as e:
            self._say(sentence(e), wrong=True)

    def _say(self, words: str, *, wrong: bool = False) -> None:
        self._words, self._wrong = words, wrong
        put(self._said, "value", status(words, wrong=wrong))

    # -- what is shown ----------------------------------------------------------------------------------------------

    def tick(self, run: RunLike | None) -> None:
        """Shows what came of the saves of the run that is shown."""
        ticket = self._ticket
        if ticket is not None and ticket.done:
            self._ticket = None
            self._guarded(lambda: self._say(saved_words(ticket.wait(0))))
        state = self._lab.current.state if self._lab.current is not None else None
        going = state is not None and not state.over
        held = going and state is not None and state.name in ("BROKEN", "RECOVERING", "STOPPING")
        put(self._every, "disabled", self._when.value != EVERY)
        put(self._last, "disabled", self._when.value == OFF)
        put(self._save, "disabled", held or self._lab.current is None)
        put(self._resume, "disabled", going)
        put(self._list, "value", saves_table(run.saves if run is not None else ()))

    def retire(self) -> None:
        """The lab is closed: nothing can be done any more."""
        for control in self.answering:
            control.disabled = True


def saved_words(made: Checkpoint) -> str:
    """That it is there, without the whole of its path."""
    return f"Step {made.step:,} is saved in {made.path.parent.name}."


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
    stood = duration(saved.stall_s)
    if saved.pending:
        cells = (f"{saved.step:,}", "", stood, "…", "is being written")
    elif saved.path is None:
        words = f'<span class="fsdp-refused">{escape(saved.words[0].upper() + saved.words[1:])}</span>'
        return f'<tr><td>{saved.step:,}</td><td colspan="4">{words}</td></tr>'
    else:
        of = "" if saved.kind == "step" else saved.kind
        cells = (f"{saved.step:,}", size(saved.nbytes), stood, duration(saved.seconds or 0.0), of)
    tip = escape(str(saved.path or ""))
    return f'<tr title="{tip}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
