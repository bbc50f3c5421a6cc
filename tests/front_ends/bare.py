"""A front end without JupyterLab: a kernel, its sockets, and the widgets' messages as the Jupyter protocol has them.

It runs the cells of a notebook, keeps the state of every widget, sends what a person would change, and, where `looks` is
true, holds a page for the live view that mounts and acknowledges. It uses no subshell and no server."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from tests.dashboard.test_live import Page

WIDGET = "application/vnd.jupyter.widget-view+json"


class RemotePage(Page):
    """A page of the live view that speaks with it through a front end."""

    def __init__(self, front_end: "BareFrontEnd", comm: str) -> None:
        super().__init__(None, "bare")  # type: ignore[arg-type]  # the view is in another process
        self._front_end, self._comm = front_end, comm
        self.buffer_bytes: list[int] = []
        self.acknowledges = True

    def say(self, kind: str, **more: Any) -> None:
        self._front_end.tell(self._comm, {"method": "custom", "content": {"kind": kind, "view": self.name, **more}})

    def receive(self, message: Mapping[str, Any], buffers: list[bytes]) -> None:
        self.buffer_bytes.append(sum(map(len, buffers)))
        if message["kind"] == "remount":
            self.say("mount")
        super().receive(message, buffers)
        if message["kind"] == "tick" and self.acknowledges:
            self.acknowledge()


class BareFrontEnd:
    """One kernel and what it has told of its widgets. `close` ends the kernel."""

    def __init__(self, cwd: Path, env: Mapping[str, str]) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(cwd), env=dict(env))
        self.client: BlockingKernelClient = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.states: dict[str, dict[str, Any]] = {}
        self.shown: list[str] = []  # models whose view was displayed
        self.printed: list[str] = []
        self.pages: dict[str, RemotePage] = {}
        self._idle: set[str] = set()

    @property
    def pid(self) -> int:
        """Of the kernel."""
        return int(self.run("import os; print(os.getpid())"))

    # -- what a person does ---------------------------------------------------------------------------------------

    def run(self, code: str, timeout_s: float = 120) -> str:
        """Runs a cell; returns what it printed. An error of the cell fails the test."""
        self.printed = []
        asked = self.client.execute(code)
        self.wait(lambda: asked in self._idle, timeout_s, f"the end of {code!r}")
        return "".join(self.printed)

    def look(self) -> RemotePage:
        """Opens a page for the live view, as a front end that displays the widget would."""
        parts = [name.removeprefix("IPY_MODEL_") for name in self.states[self.shown[-1]]["children"]]
        (comm,) = [part for part in parts if "bokeh_version" in self.states[part]]
        page = self.pages[comm] = RemotePage(self, comm)
        page.say("mount")
        return page

    def choose(self, label: str, value: object) -> None:
        """Sets the control with this description."""
        (comm,) = [c for c, s in self.states.items() if s.get("description") == label and "index" in s]
        options = self.states[comm].get("_options_labels")
        self.tell(comm, {"method": "update", "buffer_paths": [], "state": (
            {"value": value} if options is None else {"index": options.index(value)})})  # fmt: skip

    def press(self, word: str) -> None:
        """Presses the first button that says this."""
        buttons = (c for c, s in self.states.items() if s.get("_model_name") == "ButtonModel")
        self.tell(next(c for c in buttons if self.states[c]["description"] == word),
                  {"method": "custom", "content": {"event": "click"}})  # fmt: skip

    # -- messages -------------------------------------------------------------------------------------------------

    def tell(self, comm: str, data: dict[str, Any]) -> None:
        self.client.shell_channel.send(self.client.session.msg("comm_msg", {"comm_id": comm, "data": data}))

    def wait(self, until: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Takes messages until this is so."""
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
            try:
                self._take(self.client.get_iopub_msg(timeout=0.2))
            except Empty:
                assert self.manager.is_alive(), "the kernel is gone"

    def _take(self, message: Mapping[str, Any]) -> None:
        content, buffers = message["content"], [bytes(b) for b in message.get("buffers", ())]
        match message["msg_type"]:
            case "status" if content["execution_state"] == "idle":
                self._idle.add(message["parent_header"].get("msg_id", ""))
            case "stream":
                self.printed.append(content["text"])
            case "error":
                raise AssertionError("\n".join(content["traceback"]))
            case "display_data" | "execute_result" if WIDGET in content["data"]:
                self.shown.append(content["data"][WIDGET]["model_id"])
            case "comm_open":
                self._update(content["comm_id"], content["data"], buffers)
            case "comm_msg" if content["data"]["method"] == "update":
                self._update(content["comm_id"], content["data"], buffers)
            case "comm_msg" if content["data"]["method"] == "custom":
                json.dumps(content)
                if (page := self.pages.get(content["comm_id"])) is not None:
                    page.receive(content["data"]["content"], buffers)
            case "comm_close":
                self.states.pop(content["comm_id"], None)

    def _update(self, comm: str, data: Mapping[str, Any], buffers: list[bytes]) -> None:
        state = self.states.setdefault(comm, {})
        state.update(data["state"])
        for path, buffer in zip(data["buffer_paths"], buffers, strict=True):
            at = state
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = buffer

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
