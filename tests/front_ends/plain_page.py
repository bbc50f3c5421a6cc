"""A page without Jupyter that hosts a live view, in a sandboxed frame as Colab and VS Code put one around an output.

It is served from nowhere, and its policy allows no address but scripts that the widget brings itself. The model that the
widget sees is a few lines: traits, messages in, messages out. How buffers reach it is chosen, since front ends differ."""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from playwright.sync_api import Browser, Frame

from fsdp_lab.dashboard import live
from tests.browser.jupyter import LIMIT_S
from tests.dashboard.test_live import Stage

ADDRESS = "http://plain.invalid/"
POLICY = "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src data: blob:"

HOST = """<!doctype html><meta charset="utf-8"><style>html, body { margin: 0; STYLE } #out { padding: 8px }</style>
<div id="out"></div><script>
const listeners = {};
window.sent = [];
const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
window.wrap = (text, how) => {
  const whole = bytes(text);
  return { view: new DataView(whole.buffer), bytes: whole, memory: whole.buffer }[how];
};
window.begin = async ({ esm, css, traits, first, how }) => {
  document.head.append(Object.assign(document.createElement('style'), { textContent: css }));
  if (first && how !== 'none') for (const key of Object.keys(first)) traits.first[key] = wrap(first[key], how);
  const model = {
    get: (name) => traits[name],
    on: (event, call) => (listeners[event] ??= []).push(call),
    off: (event, call) => { listeners[event] = (listeners[event] ?? []).filter((c) => c !== call) },
    send: (content) => window.sent.push(content),
  };
  const module = await import(URL.createObjectURL(new Blob([esm], { type: 'text/javascript' })));
  window.leave = await module.default().render({ model, el: document.getElementById('out') });
};
window.deliver = (content, buffers, how) => {
  const given = how === 'none' ? [] : buffers.map((b) => wrap(b, how));
  for (const call of listeners['msg:custom'] ?? []) call(content, given);
};
window.told = () => window.sent.splice(0);
</script>"""


class PlainPage:
    """Frames of one page, each with a view of a widget of this process. Messages are passed on one by one.

    Args:
        first: JavaScript that the first frame runs before it has the widget.
        busy: whether the kernel runs a cell meanwhile, until `free`.
        how: buffers arrive as a "view" (JupyterLab), "bytes" (Colab's widget manager), "memory", or not: "none"."""

    def __init__(self, browser: Browser, stage: Stage, first: str = "", *, busy: bool = False, frames: int = 1,
                 style: str = "", how: str = "view") -> None:  # fmt: skip
        self.wrong: list[str] = []
        self.stage, self.how = stage, how
        self._passed = len(stage.sent)
        self._busy: list[dict[str, Any]] | None = [] if busy else None  # what a kernel was told that runs a cell
        self.context = browser.new_context(viewport={"width": 1000, "height": 1700})
        self.context.set_default_timeout(LIMIT_S * 1e3)
        self.page = self.context.new_page()
        self.page.on("console", lambda m: m.type == "error" and self.wrong.append(f"console: {m.text[:300]}"))
        self.page.on("pageerror", lambda e: self.wrong.append(f"page error: {e}"))
        self.page.on("request", lambda r: r.url == ADDRESS or r.url.startswith(("blob:", "data:", "about:"))
                     or self.wrong.append(f"request: {r.url[:200]}"))  # fmt: skip
        document = HOST.replace("STYLE", style).replace("&", "&amp;").replace('"', "&quot;")
        box = f"width: {100 // frames}%; height: 1700px; border: 0"  # beside each other: what is not seen is not drawn
        frame = f'<iframe sandbox="allow-scripts" style="{box}" srcdoc="{document}"></iframe>'
        policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        html = f'<!doctype html>{policy}<body style="margin: 0; display: flex">{frame * frames}'
        self.context.route(ADDRESS, lambda route: route.fulfill(body=html, content_type="text/html"))
        self.page.goto(ADDRESS)
        self.frames: Sequence[Frame] = self.page.main_frame.child_frames
        if first:
            self.frames[0].evaluate(first)
        self._begin(stage.view.get_state())

    def _begin(self, state: Mapping[str, Any]) -> None:
        """Renders the widget in every frame, as it is when a front end gets its state."""
        first = dict(state["first"])
        binary = {k: base64.b64encode(first.pop(k)).decode() for k in ("numbers", "bokehjs") if k in first}
        traits = {"bokeh_version": state["bokeh_version"], "tokens": state["tokens"], "first": first}
        css = (live.HERE / "live.css").read_text(encoding="utf-8")
        given = {"esm": live.LiveView._esm, "css": css, "traits": traits, "first": binary, "how": self.how}
        for frame in self.frames:
            frame.evaluate("(given) => window.begin(given)", given)

    def free(self) -> None:
        """The kernel's cell ends."""
        told, self._busy = self._busy or [], None
        for content in told:
            self._told(content)

    def _told(self, content: dict[str, Any]) -> None:
        if self._busy is not None:
            self._busy.append(content)
            return
        self.stage.view._on_message(self.stage.view, content, [])
        self.pass_on()

    def pass_on(self) -> None:
        """Delivers what the widget has sent since."""
        while self._passed < len(self.stage.sent):
            content, buffers = self.stage.sent[self._passed]
            self._passed += 1
            text = [base64.b64encode(b).decode() for b in buffers]
            for frame in self.frames:
                frame.evaluate("([content, buffers, how]) => window.deliver(content, buffers, how)",
                               [content, text, self.how])  # fmt: skip

    def wait(self, until: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Passes messages on until this is true in all frames."""
        deadline = time.monotonic() + LIMIT_S
        while not all(frame.evaluate(until) for frame in self.frames):
            assert time.monotonic() < deadline, f"not within {LIMIT_S:.0f} s: {until}\n{self.wrong}"
            for frame in self.frames:
                for content in frame.evaluate("() => window.told()"):
                    self._told(content)
            meanwhile()
            self.page.wait_for_timeout(20)  # the page paints meanwhile

    def train(self, steps: int) -> None:
        """Until they are drawn."""
        self.stage.train(steps)
        drawn = f"""() => window.Bokeh.documents.flatMap((d) => [...d.all_models])
            .findLast((m) => m.name === 'loss.steps')?.get_length() === {self.stage.step}"""
        self.wait(drawn, lambda: (self.stage.view.flush(), self.pass_on()))
