"""`LiveView`: Bokeh figures in a widget of our own, updated by one binary message a tick.

Other widgets would not do: jupyter_bokeh contains no BokehJS and stops working offline and on reload, `push_notebook` ends
with the page. Here the widget's state holds BokehJS and a first picture when it is displayed, so that it is drawn even
while the kernel is busy with the next cell. The page then mounts: it gets a snapshot of everything, and after that what is
new, with at most two messages unacknowledged. It acknowledges after painting, so a slow page gets fewer and larger
messages. After the first mount the state is empty: later views request BokehJS."""

import base64
import gzip
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import anywidget
import bokeh
import numpy as np
import traitlets
from bokeh.document import Document

from fsdp_lab.dashboard import theme
from fsdp_lab.dashboard.panels.base import BaseCard, Block, Columns, Numbers

HERE = Path(__file__).parent
SHARED_JS = "".join((HERE / name).read_text("utf-8") for name in ("saving.js", "finding.js"))  # also of reports
BOKEH_JS = Path(bokeh.__file__).parent / "server/static/js/bokeh.min.js"  # 1.3 MB

MOST_UNACKNOWLEDGED = 2
SILENCE_S = 2.0  # after which a view that owes an acknowledgement no longer delays the others
FORGET_S = 60.0  # after which it is removed, until it sends a message again


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Cards, what they share (sources and patches of a frame), and the ranks of the common legend."""

    cards: Sequence[BaseCard]
    shared_sources: Sequence[Columns] = ()
    shared_patches: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    tabs: Mapping[str, str] = field(default_factory=dict)  # name -> title; empty: all cards are shown below each other
    help: Mapping[str, str] = field(default_factory=dict)  # the label of a control beside the cards -> its tooltip
    headline: Callable[[], str] = str
    caution: Callable[[], str] = str  # how far to trust the times, once for all cards
    ranks: int = 0
    _converted: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict, init=False)

    @property
    def sources(self) -> list[Columns]:
        return [*self.shared_sources, *(s for card in self.cards for s in card.sources)]

    def patches(self) -> dict[str, dict[str, Any]]:
        merged = {name: dict(values) for name, values in self.shared_patches().items()}
        for card in self.cards:
            merged.update({name: dict(values) for name, values in card.patches().items()})
        return merged

    def captions(self) -> dict[str, dict[str, Any]]:
        """Card name -> its texts, converted again only when they change: at ten ticks a second a table is expensive. The
        lines above the cards have the name ""."""
        texts: dict[str, dict[str, Any]] = {"": {"reading": self.headline(), "note": self.caution()}}
        for card in self.cards:
            captions, known = card.captions(), self._converted.get(card.name)
            if known is None or known[0] is not captions:
                known = self._converted[card.name] = (captions, asdict(captions))
            texts[card.name] = known[1]
        return texts

    @cached_property
    def layout(self) -> dict[str, Any]:
        """All that the page needs before any data: the Bokeh document, the cards, the legend of ranks."""
        document = Document()
        drawn = {card.name: card.root for card in self.cards if card.root is not None}
        for card in self.cards if self.tabs else ():
            if card.root is not None and not card.tab:  # the page gives it its height
                for model in (card.root, *getattr(card.root, "children", ())):
                    model.sizing_mode = "stretch_both"
        for root in drawn.values():
            document.add_root(root)
        written = json.dumps(document.to_json(deferred=False))
        document.clear()  # another scene may have the same panels
        cards = [
            {"name": c.name, "title": c.title, "wide": c.wide, "tab": c.tab, "sources": [s.name for s in c.sources]}
            for c in self.cards
        ]
        named = range(self.ranks if self.ranks <= theme.MOST_LINES else 0)
        return {
            "document": written,
            "roots": {name: root.id for name, root in drawn.items()},
            "cards": cards,
            "help": dict(self.help),
            "tabs": [{"name": name, "title": title} for name, title in self.tabs.items()],
            "ranks": [{"label": f"rank {r}", "color": theme.rank_color(r)} for r in named],
            "rank_count": self.ranks,
        }


@dataclass(kw_only=True)
class _View:
    """One mounted page of the widget."""

    acked: int
    last_message_s: float
    text: bool = False  # its page passes on no buffers


@dataclass(kw_only=True)
class _Sent:
    """The data that every mounted view has."""

    rows: dict[str, tuple[int, int]] = field(default_factory=dict)  # source -> generation, next row
    patches: dict[str, dict[str, Any]] = field(default_factory=dict)
    captions: dict[str, dict[str, Any]] = field(default_factory=dict)


class LiveView(anywidget.AnyWidget):
    """Shows one `Scene`, live. `flush` from one thread at most 20 times a second; everything else from any thread."""

    _esm = SHARED_JS + (HERE / "live.js").read_text(encoding="utf-8")
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
        self._closed = False
        self._was_mounted = False
        super().__init__()
        self.on_msg(self._on_message)

    def show(self, scene: Scene) -> None:
        """Replaces the scene; mounted views then request a snapshot of it."""
        with self._lock:
            self._scene = scene
            self._scenes += 1
            self._sent = _Sent()
            if self.first:
                self.prepare()
            self.send({"kind": "remount"})

    def prepare(self) -> None:
        """Puts a first picture into the widget's state. Called when it is displayed, before the page requests one."""
        with self._lock:
            if not self._was_mounted:
                header, numbers = self._snapshot()
                self.first = {**header, "numbers": numbers, "bokehjs": bokeh_js()}

    def _repr_mimebundle_(self, **options: Any) -> Any:
        self.prepare()
        return super()._repr_mimebundle_(**options)

    def swap(self, scene: Scene) -> None:
        """Replaces the scene by one with the same cards, plots and tables: mounted views keep their pictures, and the next
        `flush` brings them the new data."""
        with self._lock:
            at = {source.name: source.generation for source in self._scene.sources}
            for source in scene.sources:
                source.generation = max(source.generation, at[source.name] + 1)
            self._scene = scene

    def flush(self) -> bool:
        """Sends what is new to all views in one message, unless a view has two to paint; returns whether it was sent."""
        with self._lock:
            if not self._may_send():
                return False
            header, numbers = self._news()
            if not header:
                return False
            self._seq += 1
            self._sent_s = time.monotonic()
            texts = [view.text for view in self._views.values()]
            tick = {"kind": "tick", "seq": self._seq, **header}
            self._say(tick, _bytes(numbers), as_text=any(texts), as_buffer=not all(texts))
            return True

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

    def _on_message(self, _widget: Any, content: Mapping[str, Any], _buffers: Any) -> None:
        kind, view = content.get("kind"), str(content.get("view", ""))
        with self._lock:
            if self._closed:
                return
            if view in self._views:
                self._views[view].last_message_s = time.monotonic()
            match kind:
                case "bokehjs":
                    text = bool(content.get("text"))
                    self._say({"kind": "bokehjs"}, bokeh_js(), as_text=text, as_buffer=not text)
                case "mount":
                    self._mount(view, text=bool(content.get("text")))
                case "ack":
                    seq = int(content["seq"])
                    forgotten = _View(acked=seq, last_message_s=time.monotonic(), text=bool(content.get("text")))
                    known = self._views.setdefault(view, forgotten)
                    known.acked = max(known.acked, seq)
                case "pin":
                    step = content.get("step")
                    if (card := self._card(content)) is not None:
                        card.pin(None if step is None else int(step), int(content.get("by", 0)))
                case "press":
                    if (card := self._card(content)) is not None:
                        card.press(str(content.get("word", "")), str(content.get("about", "")))
                case "ping":
                    self.send({"kind": "pong", "view": view})
                case "leave":
                    self._views.pop(view, None)

    def _card(self, content: Mapping[str, Any]) -> BaseCard | None:
        """The card that a message is about; None where another scene is shown by now."""
        return next((card for card in self._scene.cards if card.name == content.get("card")), None)

    def _say(self, message: dict[str, Any], numbers: bytes, *, as_text: bool, as_buffer: bool) -> None:
        """Sends a message with bytes: as a buffer, and as base64 for pages that drop buffers."""
        text = {"base64": base64.b64encode(numbers).decode()} if as_text else {}
        self.send({**message, **text}, buffers=[numbers] if as_buffer else [])

    def _mount(self, view: str, *, text: bool) -> None:
        """Sends one view everything up to now; it skips rows, by their number, that a later tick brings again."""
        header, numbers = self._snapshot()
        if not self._views:  # no other view needs older rows in the next tick
            self._sent = _Sent(
                rows={t["name"]: (t["generation"], t["first"] + t["rows"]) for t in header["tables"]},
                patches=self._scene.patches(),
                captions=self._scene.captions(),
            )
        self._views[view] = _View(acked=self._seq, last_message_s=time.monotonic(), text=text)
        self._say({**header, "view": view}, numbers, as_text=text, as_buffer=not text)
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

    def _may_send(self) -> bool:
        """Says whether there is a view, and no view that still responds owes two acknowledgements."""
        now = time.monotonic()
        for name in [n for n, v in self._views.items() if now - v.last_message_s > FORGET_S and v.acked < self._seq]:
            del self._views[name]
        if not self._views or self._closed:
            return False
        owes = any(self._seq - v.acked >= MOST_UNACKNOWLEDGED for v in self._views.values())
        return not owes or now - self._sent_s >= SILENCE_S

    def _news(self) -> tuple[dict[str, Any], list[Numbers]]:
        """The header and the numbers of the next tick; an empty header if nothing is new."""
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
    place = {"generation": block.generation, "first": block.first, "rows": block.rows, "limit": source.limit}
    return {"name": source.name, **place, "columns": list(source.numbers), "texts": dict(block.texts)}


def _bytes(numbers: Sequence[Numbers]) -> bytes:
    """Returns blocks one after another, each column by column, as little-endian float64."""
    return b"".join(np.ascontiguousarray(n, dtype="<f8").tobytes() for n in numbers)


def _changed(now: dict[str, dict[str, Any]], sent: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The properties that differ from `sent`, which is updated."""
    news: dict[str, dict[str, Any]] = {}
    for name, values in now.items():
        before = sent.get(name, {})
        if values != before:
            news[name] = {k: v for k, v in values.items() if k not in before or before[k] != v}
            sent[name] = values
    return news
