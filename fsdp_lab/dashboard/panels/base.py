"""A panel is a picture of a run with its captions, which knows events and nothing of clusters or widgets.

`Panel.update` writes rows into its `sources`, whose Bokeh twins its `root` draws; the live view sends them to a browser.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from bokeh.models.ui import UIElement

from fsdp_lab.base.events import RoleBytes
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.runs.steps import Step

HOLLOW = "hollow"  # the hatch of a legend entry that is an outline alone

Patches = Mapping[str, Mapping[str, Any]]  # Bokeh model name -> property -> value


@dataclass(frozen=True, kw_only=True)
class Key:
    """One entry of a card's legend: a label, and the token of its colour (see `theme.tokens`) or the colour itself."""

    label: str
    token: str = ""
    color: str = ""
    hatch: str = " "  # a Bokeh pattern; "line", "dashes", "ring" or "triangle" for what is drawn as one


@dataclass(frozen=True, kw_only=True)
class Pin:
    """The step that a card shows, the range of steps that it could show, and whether it holds its step while others come."""

    step: int
    held: bool
    oldest: int
    newest: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a bar: its length as a share of the longest bar, and how it is filled."""

    share: float
    token: str
    hatch: str = " "


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a table that is more than text.

    `parts` is a stacked bar below the text, and `whisker` the ends of its spread, as shares of the longest bar. `press`
    makes the cell a button: the card's `press` is called with this word and the cell's `about`.
    """

    text: str
    title: str = ""  # the tooltip
    tone: str = ""  # "good", "fair", "bad" or "soft"
    key: Key | None = None  # a swatch before the text
    parts: tuple[Part, ...] = ()
    whisker: tuple[float, float] | None = None
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
    hidden: bool = False  # the card has nothing to show
    pin: Pin | None = None  # of a `Pinnable` card


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A prediction for one rank under a Spec. The step time is None where this machine is not calibrated."""

    spec_id: str
    at_peak: RoleBytes
    host_bytes: int
    step_time_s: float | None = None
    tokens: int = 0  # of all ranks in a step, counted as events count them

    @property
    def peak_bytes(self) -> int:
        return self.at_peak.total_bytes


def with_prediction(reading: str, predicted: str, measured: str | None) -> str:
    """The reading, a prediction, and the measurement of the same Spec if there is one."""
    measurement = f", measured {measured}" if measured is not None else " with the chosen settings"
    outcome = f"predicted {predicted}{measurement}"
    return f"{reading}; {outcome}" if reading else outcome


class BaseCard:
    """A card with captions alone; a subclass with a picture sets `sources` and `root`, and overrides `patches`."""

    name: str  # unique among the cards shown together; the names of its sources and models begin with it
    title: str
    wide = False  # whether it takes the whole width of a narrow notebook
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


class Panel(BaseCard, ABC):
    """A card that shows a run."""

    @abstractmethod
    def update(self, steps: Sequence[Step]) -> int:
        """Writes new steps to the sources; returns the number of rows written."""

    def predict(self, prediction: Prediction | None) -> None:
        """Draws what is predicted for the chosen Spec, applied or not, until there is another prediction. None: of that Spec
        nothing can be predicted."""

    def cover(self) -> None:
        """Fits the ranges again, after the curves of other runs have changed."""


@runtime_checkable
class Pinnable(Protocol):
    """A panel of one step, which a reader may choose and hold."""

    def pin(self, step: int | None, by: int = 0) -> None:
        """Holds the kept step nearest to `step`, or the one `by` places after the one shown; without either, releases it.
        May be called from any thread: it only records the request for the next `update`, with steps or without."""

    def update(self, steps: Sequence[Step]) -> int: ...
