"""`AnswerCard`: the figures of a prediction, in a table."""

from __future__ import annotations

from fsdp_lab.dashboard.panels.base import Captions, Cell
from fsdp_lab.dashboard.what_if import words
from fsdp_lab.dashboard.what_if.card import WhatIfCard
from fsdp_lab.dashboard.what_if.question import Answer


class AnswerCard(WhatIfCard):
    """The figures that a reader wants first, and what was assumed."""

    name = "answer"
    title = "Prediction"
    wide = True

    def __init__(self) -> None:
        super().__init__(Captions(reading="is being worked out"))

    def show(self, answer: Answer) -> None:
        p = answer.plan
        heads, figures = zip(*words.cells(p), strict=True)
        fits = Cell(text="fits" if p.fits else "does not fit", tone="good" if p.fits else "bad")
        self._captions = Captions(
            reading=f"It {words.verdict(p)}. {words.binding(answer)}",
            table=(("", *heads), (fits, *figures)),
            note=words.assumed(answer),
        )
