"""The completions panel: how the model continues the prompts of its evaluations, the newest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fsdp_lab.base.generation import Completion
from fsdp_lab.dashboard.panels.axis import StepAxis
from fsdp_lab.dashboard.panels.base import Captions, Cell, Panel
from fsdp_lab.runs.evaluation import in_words
from fsdp_lab.runs.steps import Step

MOST_SHOWN = 5  # evaluations
MOST_PROMPTS = 4
LONGEST = 400  # characters of a text in a cell; the rest is in its tooltip


class CompletionsPanel(Panel):
    """A table: a row for each of the newest evaluations, a column for each prompt. Hidden if no evaluation has prompts."""

    name = "completions"
    title = "What it writes"
    wide = True

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        super().__init__(Captions(hidden=True))
        self._frame = frame
        self._shown: deque[Step] = deque(maxlen=MOST_SHOWN)

    def update(self, steps: Sequence[Step]) -> int:
        found = [s for s in steps if s.completions]
        self._shown.extend(found)
        if found:
            self._captions = self._describe()
        return len(found)

    def _describe(self) -> Captions:
        newest = self._shown[-1]
        prompts = [c.prompt for c in newest.completions[:MOST_PROMPTS]]
        left = len(newest.completions) - len(prompts)
        rows: list[tuple[str | Cell, ...]] = [
            ("step", "held-out loss", *(Cell(text=_cut(p, 60), title=p) for p in prompts))
        ]
        rows += [self._row(s, prompts) for s in reversed(self._shown)]
        return Captions(
            reading=f"after step {newest.number:,}",
            note=f"{left} more in run.completions." if left else "",
            table=tuple(rows),
        )

    def _row(self, step: Step, prompts: Sequence[str]) -> tuple[str | Cell, ...]:
        texts = {c.prompt: c for c in step.completions}
        loss = "" if step.eval_loss is None else in_words(step.eval_loss, language=self._frame.language)
        return (f"{step.number:,}", loss, *(_cell(texts.get(p)) for p in prompts))


def _cell(completion: Completion | None) -> Cell:
    return Cell(text="–") if completion is None else Cell(text=_cut(completion.text, LONGEST), title=completion.text)


def _cut(text: str, most: int) -> str:
    words = " ".join(text.split())
    return words if len(words) <= most else words[: most - 1] + "…"
