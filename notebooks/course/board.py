"""Who has passed what: the checks of `exercises` note each answer in a folder that a class shares, and `Board` shows them to
the teacher. Without the environment variable FSDP_LAB_CLASS nothing is noted."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from fsdp_lab.base.formatting import Table

FOLDER = "FSDP_LAB_CLASS"
REFRESH_S = 2.0


def note(exercise: str, *, passed: bool) -> None:
    """Adds an answer to this learner's file, where there is a class. A full or missing folder harms no check."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    try:
        with (Path(folder) / f"{getpass.getuser()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"exercise": exercise, "passed": passed, "unix_s": time.time()}) + "\n")
    except OSError as e:
        print(f"The board of the class was not told: {e}.")


@dataclass(kw_only=True)
class Answers:
    """What a learner has answered to one exercise."""

    tries: int = 0
    passed: bool = False

    @property
    def mark(self) -> str:
        return f"✔ {self.tries}" if self.passed else f"✘ {self.tries}" if self.tries else ""


@dataclass(kw_only=True)
class Learner:
    name: str
    seen_unix_s: float = 0.0
    answers: dict[str, Answers] = field(default_factory=dict)  # by exercise

    @classmethod
    def of(cls, file: Path) -> Learner:
        """Reads a learner's file; a line that is just being written counts the next time."""
        learner = cls(name=file.stem)
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                said: Mapping[str, Any] = json.loads(line)
                exercise, passed, learner.seen_unix_s = said["exercise"], bool(said["passed"]), float(said["unix_s"])
            except (ValueError, KeyError, TypeError):
                continue
            told = learner.answers.setdefault(str(exercise), Answers())
            told.tries += not told.passed  # until it was right
            told.passed = told.passed or passed
        return learner


class Board(widgets.HTML):
    """A table of learners and exercises that follows the folder until it is closed: ✔ passed, ✘ not yet, with the number of
    tries. `folder`: of the class; None: that of FSDP_LAB_CLASS. Raises ValueError: there is none."""

    def __init__(self, folder: str | Path | None = None) -> None:
        where = folder or os.environ.get(FOLDER)
        self._closed = threading.Event()
        if where is None or not Path(where).is_dir():
            raise ValueError(f"no folder of a class: give Board(folder), or set {FOLDER}; it is {where!r}")
        super().__init__()
        self.folder = Path(where)
        self.value = self.table()
        threading.Thread(target=self._follow, name="fsdp-lab-board", daemon=True).start()

    def learners(self) -> list[Learner]:
        return [Learner.of(file) for file in sorted(self.folder.glob("*.jsonl"))]

    def table(self) -> str:
        learners = self.learners()
        if not learners:
            return f"<p>Nobody has answered yet; answers will come to {escape(str(self.folder))}.</p>"
        exercises = sorted({exercise for learner in learners for exercise in learner.answers})
        passed = [sum(e in one.answers and one.answers[e].passed for one in learners) for e in exercises]
        rows = [
            *((one.name, *(one.answers.get(e, Answers()).mark for e in exercises),
               time.strftime("%H:%M", time.localtime(one.seen_unix_s))) for one in learners),
            (f"of {len(learners)}", *map(str, passed), ""),
        ]  # fmt: skip
        columns = ("learner", *exercises, "last answer")
        return Table(columns=columns, rows=tuple(rows), left=frozenset({"learner"}))._repr_html_()

    def close(self) -> None:
        self._closed.set()
        super().close()

    def _follow(self) -> None:
        while not self._closed.wait(REFRESH_S):
            with contextlib.suppress(OSError):  # a file that has just been removed
                self.value = self.table()
