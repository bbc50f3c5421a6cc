"""A read-only live page of a run, for a projector: an extension of the Jupyter server that `fsdp-lab lab` starts.

`/fsdp-lab/live` shows the newest run of this server's history, `?run=ID` another one, `?theme=dark` on a dark ground; in a
class `/fsdp-lab/live/learner-07` those of a learner. The page draws what the dashboard draws, from the history file, which
is written as the run happens: there is no kernel behind it, and nothing on it changes a run. It listens at no port of its
own, and the server's token protects it.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from fsdp_lab.cli.classroom import learner_variables
from fsdp_lab.cluster.room import VARIABLE as ROOM
from fsdp_lab.history.history import VARIABLE as HISTORY
from fsdp_lab.history.history import history_path

if TYPE_CHECKING:
    from fsdp_lab.dashboard.projection import Projection

EVERY_S = 0.5  # as often as the history is written
MOST_PAGES = 12  # at once; each reads and draws for itself
PAGE = Path(__file__).with_name("live_page.html")
FILES = {"live.js": "text/javascript", "live.css": "text/css"}
LEARNER = r"(?:/(?P<learner>\w[\w-]*))?"


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "fsdp_lab.cli.live_page"}]


def _load_jupyter_server_extension(app: Any) -> None:
    """Called by the Jupyter server."""
    base = app.web_app.settings["base_url"]
    shared = {"pages": Pages()}
    routes: list[tuple[str, type[JupyterHandler], dict[str, Any]]] = [
        (rf"/fsdp-lab/live{LEARNER}", LivePage, {}),
        (rf"/fsdp-lab/feed{LEARNER}", LiveSocket, shared),
        (rf"/fsdp-lab/static/(?P<name>{'|'.join(FILES)})", LiveFile, {}),
    ]
    app.web_app.add_handlers(".*$", [(url_path_join(base, path), handler, given) for path, handler, given in routes])


def chosen_history(root: Path, learner: str | None) -> Path:
    """The history that a page shows. Raises HTTPError 404: there is no such learner."""
    if not learner:
        return history_path(None)
    if not os.environ.get(ROOM) or not (root / learner).is_dir():
        raise web.HTTPError(404, f"there is no folder of a learner called {learner}")
    return Path(learner_variables(root, learner)[HISTORY])


class LivePage(JupyterHandler):
    """The page itself."""

    @web.authenticated
    def get(self, learner: str | None = None) -> None:
        chosen_history(Path(self.settings["server_root_dir"]).expanduser(), learner)
        given = {"feed": url_path_join(self.base_url, "fsdp-lab/feed", learner or ""), "who": learner or ""}
        text = PAGE.read_text(encoding="utf-8").replace("$STATIC", url_path_join(self.base_url, "fsdp-lab/static"))
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(text.replace("$GIVEN", json.dumps(given).replace("<", "\\u003c")))


class LiveFile(JupyterHandler):
    """The dashboard's script and style."""

    @web.authenticated
    def get(self, name: str) -> None:
        from fsdp_lab.dashboard.live import HERE

        self.set_header("Content-Type", FILES[name])
        self.finish((HERE / name).read_text(encoding="utf-8"))


class Pages:
    """The pages that are open, and the one thread that reads and draws for all of them, beside the server's own."""

    def __init__(self) -> None:
        self.open: set[LiveSocket] = set()
        self.thread = ThreadPoolExecutor(1, "fsdp-lab-live")


class LiveSocket(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """What a page and its projection say to each other: JSON from the page; to it a frame of a message and its bytes."""

    def initialize(self, pages: Pages) -> None:
        self._pages, self._state = pages, ""
        self._projection: Projection | None = None
        self._task: asyncio.Task[None] | None = None

    async def get(self, *args: Any, **kwargs: Any) -> None:
        """Raises HTTPError 403 without the token, and 503 for a page too many."""
        if self.current_user is None:
            raise web.HTTPError(403)
        if len(self._pages.open) >= MOST_PAGES:
            raise web.HTTPError(503, f"{MOST_PAGES} live pages are open; close one")
        self._history = chosen_history(Path(self.settings["server_root_dir"]).expanduser(), kwargs.get("learner"))
        await super().get(*args, **kwargs)

    def open(self, *args: Any, **kwargs: Any) -> None:
        super().open(*args, **kwargs)
        self._pages.open.add(self)
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._follow(self.get_argument("run", "")))

    async def _follow(self, wanted: str) -> None:
        """Until the page is closed. What cannot be read is said on the page, and tried again."""
        self._projection = projection = await self._work(self._begin, wanted)
        view = projection.view
        values = {"bokeh_version": view.bokeh_version, "tokens": view.tokens}
        self._deliver({"kind": "hello", "values": values}, ())
        while True:
            try:
                state = await self._work(projection.tick)
            except Exception as e:  # a file that is locked, damaged, or gone for a moment
                state = f"the run cannot be read: {e}"
            if state != self._state:
                self._state = state
                self._deliver({"kind": "state", "text": state}, ())
            await asyncio.sleep(EVERY_S)

    def _begin(self, wanted: str) -> Projection:
        from fsdp_lab.dashboard.projection import Projection  # imports Bokeh: not before a page is opened

        return Projection(self._history, wanted, self._deliver)

    async def _work(self, function: Any, *given: Any) -> Any:
        return await self._loop.run_in_executor(self._pages.thread, function, *given)

    def _deliver(self, message: Mapping[str, Any], buffers: Sequence[bytes]) -> None:
        """On any thread."""
        header = json.dumps(message).encode()
        frame = struct.pack("<I", len(header)) + header + b"".join(buffers)
        self._loop.call_soon_threadsafe(self._write, frame)

    def _write(self, frame: bytes) -> None:
        try:
            self.write_message(frame, binary=True)
        except WebSocketClosedError:
            self.on_close()

    async def on_message(self, message: str | bytes) -> None:
        if self._projection is not None:
            await self._work(self._projection.receive, json.loads(message))

    def on_close(self) -> None:
        self._pages.open.discard(self)
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._projection is not None:
            self._pages.thread.submit(self._projection.close)
            self._projection = None
