"""`Scene`: the cards that a live view shows together, and all of it in the form in which the page gets it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

from bokeh.document import Document
from bokeh.models import Plot
from bokeh.models.ui import UIElement

from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import Captions


class Card(Protocol):
    """What a live view needs of a panel (see `panels.base.Panel`)."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def wide(self) -> bool: ...
    @property
    def sources(self) -> Sequence[Columns]: ...
    @property
    def root(self) -> UIElement | None: ...
    def patches(self) -> Mapping[str, Mapping[str, Any]]: ...
    def captions(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class StaticCard:
    """A card with a plot that does not change."""

    title: str
    root: Plot
    name: str = "picture"
    wide: bool = True

    @property
    def sources(self) -> Sequence[Columns]:
        return ()

    def patches(self) -> Mapping[str, Mapping[str, Any]]:
        return {}

    def captions(self) -> Captions:
        return Captions()


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Cards, what they share (sources and patches of a frame), and the ranks of the common legend."""

    cards: Sequence[Card]
    shared_sources: Sequence[Columns] = ()
    shared_patches: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    headline: Callable[[], str] = str
    caution: Callable[[], str] = str  # how far to trust the times, once for all cards
    ranks: int = 0

    @property
    def sources(self) -> list[Columns]:
        return [*self.shared_sources, *(s for card in self.cards for s in card.sources)]

    def patches(self) -> dict[str, dict[str, Any]]:
        merged = {name: dict(values) for name, values in self.shared_patches().items()}
        for card in self.cards:
            merged.update({name: dict(values) for name, values in card.patches().items()})
        return merged

    def captions(self) -> dict[str, dict[str, Any]]:
        """Card name -> its texts; the lines above the cards have the name ""."""
        return {
            "": {"reading": self.headline(), "note": self.caution()},
            **{card.name: self._texts(card) for card in self.cards},
        }

    def _texts(self, card: Card) -> dict[str, Any]:
        """A card's captions as a dict, converted again only when they change: at ten ticks a second a table is expensive."""
        captions = card.captions()
        known, texts = self._converted.get(card.name, (None, {}))
        if known is not captions:
            texts = asdict(captions)
            self._converted[card.name] = (captions, texts)
        return texts

    @cached_property
    def _converted(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        return {}

    @cached_property
    def layout(self) -> dict[str, Any]:
        """What the page needs before any data: the Bokeh document, the cards, the legend of ranks."""
        document = Document()
        drawn = [(card.name, card.root) for card in self.cards if card.root is not None]
        for _, root in drawn:
            document.add_root(root)
        lines = self.ranks <= theme.MOST_LINES
        written = json.dumps(document.to_json(deferred=False))
        document.clear()  # another scene may have the same panels
        return {
            "document": written,
            "roots": {name: root.id for name, root in drawn},
            "cards": [
                {"name": c.name, "title": c.title, "wide": c.wide, "sources": [s.name for s in c.sources]}
                for c in self.cards
            ],
            "ranks": [{"label": f"rank {r}", "color": theme.rank_color(r)} for r in range(self.ranks if lines else 0)],
            "rank_count": self.ranks,
        }
