"""A panel is a picture of a run with its captions, which knows events and nothing of clusters or widgets.

`Panel.update` writes rows into its `sources`, whose Bokeh twins its `root` draws; the live view sends them to a browser.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from bokeh.models.ui import UIElement

from fsdp_lab.runs.steps import Step

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows of a table. `first` is the number of the first row, counted from the table's last `clear`;
    `generation` counts the clears. `numbers` has one row for each column, so that a column is contiguous."""

    generation: int
    first: int
    numbers: Numbers
    texts: Mapping[str, list[str]]

    @property
    def rows(self) -> int:
        return int(self.numbers.shape[1])

    @property
    def next(self) -> int:
        return self.first + self.rows


class Columns:
    """A table with columns of float64 and, optionally, of text; only its last `limit` rows are kept. Rows are numbered
    from the last `clear`, so that a reader who remembers (generation, next row) can request what is new, and recognise
    a block received twice. Not synchronised: one thread writes and reads."""

    def __init__(self, name: str, numbers: Sequence[str], *, texts: Sequence[str] = (), limit: int = 1000) -> None:
        self.name = name
        self.numbers = tuple(numbers)
        self.texts = tuple(texts)
        self.limit = limit
        self.generation = 0
        self.next = 0
        self._kept: Numbers = np.empty((len(self.numbers), 0))
        self._texts: dict[str, deque[str]] = {name: deque(maxlen=limit) for name in self.texts}

    @property
    def first(self) -> int:
        return max(0, self.next - self.limit)

    def __len__(self) -> int:
        return self.next - self.first

    def append(self, rows: Sequence[Sequence[float]], texts: Mapping[str, Sequence[str]] | None = None) -> None:
        """Adds rows, each in the order of `numbers`."""
        if not rows:
            return
        self._kept = np.concatenate([self._kept, np.asarray(rows, dtype=np.float64).T], axis=1)[:, -self.limit :]
        self.next += len(rows)
        for name in self.texts:
            self._texts[name].extend((texts or {})[name])

    def clear(self) -> None:
        """Removes all rows; readers start again."""
        self.generation += 1
        self.next, self._kept = 0, self._kept[:, :0]
        for text in self._texts.values():
            text.clear()

    def replace(self, rows: Sequence[Sequence[float]], texts: Mapping[str, Sequence[str]] | None = None) -> None:
        self.clear()
        self.append(rows, texts)

    def column(self, name: str) -> Numbers:
        """The kept rows of one column, oldest first."""
        column: Numbers = self._kept[self.numbers.index(name)]
        return column

    def since(self, generation: int, row: int) -> Block:
        """Rows from `row` on; all kept rows if that generation is over, or `row` is no longer kept."""
        first = max(row, self.first) if generation == self.generation else self.first
        count = self.next - first
        return Block(
            generation=self.generation,
            first=first,
            numbers=self._kept[:, len(self) - count :],
            texts={name: list(text)[len(text) - count :] for name, text in self._texts.items()},
        )

    def all(self) -> Block:
        return self.since(self.generation, 0)


HOLLOW = "hollow"  # the hatch of a legend entry that is an outline alone

Patches = Mapping[str, Mapping[str, Any]]  # Bokeh model name -> property -> value


@dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of a card's legend: a label, and the token of its colour (see `theme.tokens`) or the colour itself."""

    label: str
    token: str = ""
    color: str = ""
    hatch: str = " "  # a Bokeh pattern; "line", "dashes" or "ring" for what is drawn as one


APART = Key(label="slowed by measuring", token="ink.faint", hatch="ring")


@dataclass(frozen=True, kw_only=True)
class Pin:
    """The step that a card shows, the range of steps that it could show, and whether it holds its step while others come."""

    step: int
    held: bool
    oldest: int
    newest: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table that is more than text. `press` makes it a button: the card's `press` gets it, and `about`."""

    text: str
    title: str = ""  # the tooltip
    tone: str = ""  # "good", "fair", "bad" or "soft"
    key: Key | None = None  # a swatch before the text
    press: str = ""
    about: str = ""
    pressed: bool | None = None  # of a button that is on or off


@dataclass(frozen=True, kw_only=True)
class Captions:
    """The texts of a card: the present reading, the legend, and a note on what the numbers are worth."""

    reading: str = ""
    legend: tuple[Key, ...] = ()
    note: str = ""
    table: tuple[tuple[str | Cell, ...], ...] = ()  # heads, then rows
    sortable: bool = False  # by the table's heads: by `about` of its cells, a number or ""
    hidden: bool = False  # the card has nothing to show
    pin: Pin | None = None  # of a card that shows one step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A prediction for one rank under a Spec. The step time is None where this machine is not calibrated."""

    spec_id: str
    peak_bytes: int
    step_time_s: float | None = None
    tokens: int = 0  # of all ranks in a step, counted as events count them


def with_prediction(own: Captions, predicted: str, measured: str | None, hatch: str) -> Captions:
    """Adds a prediction to the reading, the measurement of the same Spec if there is one, and the legend's entry."""
    measurement = f", measured {measured}" if measured is not None else " with the chosen settings"
    reading = "; ".join(filter(None, [own.reading, f"predicted {predicted}{measurement}"]))
    return replace(own, reading=reading, legend=(*own.legend, Key(label="predicted", token="ink.marker", hatch=hatch)))


class BaseCard:
    """A card with captions alone; a subclass with a picture sets `sources` and `root`, and overrides `patches`."""

    name: str  # unique among the cards shown together; the names of its sources and models begin with it
    title: str
    wide = False  # whether it takes the whole width of a narrow notebook
    tab = ""  # of the dashboard, in which it is shown; "": it is always in sight
    sources: Sequence[Columns] = ()
    root: UIElement | None = None  # its Bokeh data sources carry the names of `sources`

    def __init__(self, captions: Captions | None = None) -> None:
        self._captions = captions or Captions()

    def patches(self) -> Patches:
        """The present values of properties that change: ranges, axes that come and go."""
        return {}

    def captions(self) -> Captions:
        return self._captions

    def press(self, word: str, about: str) -> None:
        """Tells that a cell was pressed. May be called from any thread; it only records the request."""

    def pin(self, step: int | None, by: int = 0) -> None:
        """For a card of one step: holds the kept step nearest to `step`, or the one `by` places after the one shown; without
        either, releases it. May be called from any thread: it only records the request for the next `update`."""


class Panel(BaseCard, ABC):
    """A card that shows a run."""

    @abstractmethod
    def update(self, steps: Sequence[Step]) -> None:
        """Writes new steps to the sources."""

    def predict(self, prediction: Prediction | None) -> None:
        """Draws what is predicted for the chosen Spec, applied or not, until the next call. None: there is none."""

    def cover(self) -> None:
        """Fits the ranges again, after the curves of other runs have changed."""
