"""The live view: Bokeh figures in a widget of our own, fed with one binary message a tick.

Why not what exists: jupyter_bokeh carries no BokehJS and goes dead offline and on reload, `push_notebook` dies with the
page. Here the widget's own state carries BokehJS and a first picture when it is displayed, so that it is drawn even while
the kernel is busy with the next cell. The page then mounts: it gets a snapshot of everything, and after that what is new,
with at most two messages unacknowledged. It acknowledges after painting, so a slow page gets fewer and larger messages, and
the time from a step's end to its pixels is measured. After the first mount the state is empty: later views ask for BokehJS.
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import anywidget
import bokeh
import numpy as np
import traitlets
from bokeh.document import Document
from bokeh.models.ui import UIElement

from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.columns import Block, Columns, Numbers
from fsdp_lab.dashboard.latency import Latency, Stamps
from fsdp_lab.dashboard.panels.base import Pinnable, Pressable

HERE = Path(__file__).parent
BOKEH_JS = Path(bokeh.__file__).parent / "server/static/js/bokeh.min.js"

MOST_UNACKNOWLEDGED = 2
SILENCE_S = 2.0  # a view that owes an acknowledgement for so long no longer holds the others back
FORGET_S = 60.0  # and after this it is taken for gone, until it speaks again


class Card(Protocol):
    """What the view asks of a picture (see `panels.base.Panel`)."""

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
class Scene:
    """What is shown: cards, what they share (sources and patches of a frame), and the ranks of the common legend."""

    cards: Sequence[Card]
    shared_sources: Sequence[Columns] = ()
    shared_patches: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    headline: Callable[[], str] = str
    caution: Callable[[], str] = str  # what the times are worth, once for all cards
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
        """Card -> what is written in it; the lines above the cards go by the name ""."""
        return {
            "": {"reading": self.headline(), "note": self.caution()},
            **{card.name: self._said(card) for card in self.cards},
        }

    def _said(self, card: Card) -> dict[str, Any]:
        """A card's captions as a dict, converted again only when they change: at ten ticks a second a table is expensive."""
        words = card.captions()
        known, said = self._made.get(card.name, (None, {}))
        if known is not words:
            said = asdict(words)
            self._made[card.name] = (words, said)
        return said

    @cached_property
    def _made(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        return {}

    @cached_property
    def layout(self) -> dict[str, Any]:
        """What the page needs to draw the scene before any data: the Bokeh document, the cards, the rank legend."""
        document = Document()
        drawn = [(card.name, card.root) for card in self.cards if card.root is not None]
        for _, root in drawn:
            document.add_root(root)
        lines = self.ranks <= theme.MOST_LINES
        written = json.dumps(document.to_json(deferred=False))
        document.clear()  # another scene may show the same panels
        return {
            "document": written,
            "roots": {name: root.id for name, root in drawn},
            "cards": [
                {"name": c.name, "title": c.title, "wide": c.wide, "sources": [s.name for s in c.sources]}
                for c in self.cards
            ],
            "ranks": [{"label": f"rank {r}", "color": theme.rank_color(r)}
                      for r in range(self.ranks if lines else 0)],
            "rank_count": self.ranks,
        }  # fmt: skip


@dataclass(kw_only=True)
class _View:
    """One mounted page of the widget."""

    acked: int
    heard_s: float


@dataclass(kw_only=True)
class _Sent:
    """What every mounted view has been given."""

    rows: dict[str, tuple[int, int]] = field(default_factory=dict)  # source -> generation, next row
    patches: dict[str, dict[str, Any]] = field(default_factory=dict)
    captions: dict[str, dict[str, Any]] = field(default_factory=dict)


class LiveView(anywidget.AnyWidget):
    """Shows one `Scene`, live. `flush` from one thread at most 10 times a second; everything else from any thread."""

    _esm = HERE / "live.js"
    _css = HERE / "live.css"
    bokeh_version = traitlets.Unicode(bokeh.__version__).tag(sync=True)
    tokens = traitlets.Dict(theme.tokens()).tag(sync=True)
    first = traitlets.Dict().tag(sync=True)  # a snapshot, its numbers and BokehJS, until a page has mounted

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._scene = Scene(cards=())
        self._scenes = 0
        self._views: dict[str, _View] = {}
        self._sent = _Sent()
        self._seq = 0
        self._sent_s = 0.0
        self._stamps = Stamps()
        self._closed = False
        self._was_mounted = False
        self.ticks_held = 0  # because the page had not painted yet
        super().__init__()
        self.on_msg(self._on_message)

    # -- from the kernel -----------------------------------------------------------------------------------------

    def show(self, scene: Scene) -> None:
        """Replaces what is shown; mounted views ask for it."""
        with self._lock:
            self._scene = scene
            self._scenes += 1
            self._sent = _Sent()
            if self.first:
                self.prepare()
            self.send({"kind": "remount"})

    def prepare(self) -> None:
        """Puts a first picture into the widget's state; to be called when it is displayed, before the page asks."""
        with self._lock:
            if not self._was_mounted:
                header, numbers = self._snapshot()
                self.first = {**header, "numbers": numbers, "bokehjs": bokeh_js()}

    def _repr_mimebundle_(self, **options: Any) -> Any:
        self.prepare()
        return super()._repr_mimebundle_(**options)

    def swap(self, scene: Scene) -> None:
        """Replaces what is shown by a scene with the same cards, plots and tables: mounted views keep their pictures, and
        the next `flush` brings them what is in the new one."""
        with self._lock:
            at = {source.name: source.generation for source in self._scene.sources}
            for source in scene.sources:
                source.generation = max(source.generation, at[source.name] + 1)
            self._scene = scene

    def flush(self, ends_unix_s: Sequence[float] = ()) -> bool:
        """Sends what is new to all views in one message, unless a view still has two to paint; says whether it did.

        `ends_unix_s` are the times at which what is new happened, for `latency`.
        """
        with self._lock:
            if self._views:
                self._stamps.wait(ends_unix_s)
            if not self._may_send():
                return False
            header, numbers = self._news()
            if not header:
                return False
            self._seq += 1
            self._sent_s = time.monotonic()
            self._stamps.sent(self._seq)
            self.send({"kind": "tick", "seq": self._seq, **header}, buffers=[_bytes(numbers)])
            return True

    def latency(self) -> Latency:
        """From the end of a step in its rank to its pixels, over the last few thousand events."""
        with self._lock:
            return self._stamps.latency()

    def forget_latency(self) -> None:
        with self._lock:
            self._stamps.forget()

    @property
    def views(self) -> int:
        """Pages that show this now."""
        with self._lock:
            return len(self._views)

    def close(self) -> None:
        """Frees the comm; the pages drop their views with it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._views.clear()
        super().close()

    # -- from the page -------------------------------------------------------------------------------------------

    def _on_message(self, _widget: Any, content: Mapping[str, Any], _buffers: Any) -> None:
        kind, view = content.get("kind"), str(content.get("view", ""))
        with self._lock:
            if self._closed:
                return
            if view in self._views:
                self._views[view].heard_s = time.monotonic()
            match kind:
                case "bokehjs":
                    self.send({"kind": "bokehjs"}, buffers=[bokeh_js()])
                case "mount":
                    self._mount(view)
                case "ack":
                    self._acknowledge(view, int(content["seq"]), float(content["painted_unix_s"]))
                case "pin":
                    self._pin(content)
                case "press":
                    self._press(content)
                case "ping":
                    self.send({"kind": "pong", "view": view})
                case "leave":
                    self._views.pop(view, None)

    def _mount(self, view: str) -> None:
        """Gives one view everything up to now; rows that a later tick brings again are passed over by number."""
        header, numbers = self._snapshot()
        if not self._views:  # nobody else has to be brought up to date by the next tick
            self._sent = _Sent(
                rows={t["name"]: (t["generation"], t["first"] + t["rows"]) for t in header["tables"]},
                patches=self._scene.patches(),
                captions=self._scene.captions(),
            )
        self._views[view] = _View(acked=self._seq, heard_s=time.monotonic())
        self.send({**header, "view": view}, buffers=[numbers])
        if not self._was_mounted:
            self._was_mounted, self.first = True, {}

    def _snapshot(self) -> tuple[dict[str, Any], bytes]:
        """Everything up to now: the header of a message, and its numbers."""
        scene = self._scene
        blocks = [(s, s.all()) for s in scene.sources]
        header = {
            "kind": "snapshot",
            "seq": self._seq,
            "scene": self._scenes,
            "layout": scene.layout,
            "tables": [_describe(s, b) for s, b in blocks],
            "patches": scene.patches(),
            "captions": scene.captions(),
        }
        return header, _bytes([b.numbers for _, b in blocks])

    def _acknowledge(self, view: str, seq: int, painted_unix_s: float) -> None:
        known = self._views.setdefault(view, _View(acked=seq, heard_s=time.monotonic()))
        known.acked = max(known.acked, seq)
        self._stamps.painted(seq, painted_unix_s)

    def _pin(self, content: Mapping[str, Any]) -> None:
        step = content.get("step")
        for card in self._scene.cards:
            if card.name == content.get("card") and isinstance(card, Pinnable):
                card.pin(None if step is None else int(step), int(content.get("by", 0)))

    def _press(self, content: Mapping[str, Any]) -> None:
        for card in self._scene.cards:
            if card.name == content.get("card") and isinstance(card, Pressable):
                card.press(str(content.get("word", "")), str(content.get("about", "")))

    # -- what is new ----------------------------------------------------------------------------------------------

    def _may_send(self) -> bool:
        """Whether somebody looks, and no view that still answers owes two acknowledgements."""
        now = time.monotonic()
        for name in [n for n, v in self._views.items() if now - v.heard_s > FORGET_S and v.acked < self._seq]:
            del self._views[name]
        if not self._views or self._closed:
            return False
        owes = any(self._seq - v.acked >= MOST_UNACKNOWLEDGED for v in self._views.values())
        if owes and now - self._sent_s < SILENCE_S:
            self.ticks_held += 1
            return False
        return True

    def _news(self) -> tuple[dict[str, Any], list[Numbers]]:
        """The header and the numbers of the next tick; an empty header where nothing is new."""
        scene, sent = self._scene, self._sent
        tables, numbers = [], []
        for source in scene.sources:
            block = source.since(*sent.rows.get(source.name, (-1, 0)))
            if block.rows or sent.rows.get(source.name, (0, 0))[0] != block.generation:
                sent.rows[source.name] = (block.generation, block.next)
                tables.append(_describe(source, block))
                numbers.append(block.numbers)
        patches = _changed(scene.patches(), sent.patches)
        captions = _changed(scene.captions(), sent.captions)
        if not (tables or patches or captions):
            return {}, []
        return {"tables": tables, "patches": patches, "captions": captions}, numbers


def bokeh_js() -> bytes:
    """The installed BokehJS, compressed: 0.4 MB of 1.3."""
    return gzip.compress(BOKEH_JS.read_bytes(), compresslevel=1, mtime=0)


def _describe(source: Columns, block: Block) -> dict[str, Any]:
    return {
        "name": source.name,
        "generation": block.generation,
        "first": block.first,
        "rows": block.rows,
        "limit": source.limit,
        "columns": list(source.numbers),
        "texts": dict(block.texts),
    }


def _bytes(numbers: Sequence[Numbers]) -> bytes:
    """Blocks one after another, each column by column, as little-endian float64."""
    return b"".join(np.ascontiguousarray(n, dtype="<f8").tobytes() for n in numbers)


def _changed(now: dict[str, dict[str, Any]], sent: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The properties whose values differ from what was sent, which is brought up to date."""
    news: dict[str, dict[str, Any]] = {}
    for name, values in now.items():
        before = sent.get(name, {})
        if values != before:
            news[name] = {k: v for k, v in values.items() if k not in before or before[k] != v}
            sent[name] = values
    return news
