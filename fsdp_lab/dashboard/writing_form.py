"""The form of a text: a prompt, which the model that the ranks hold continues.

Handlers run on the thread that the page's message arrives on, `tick` on the tick thread. Where no run is active the answer
waits for ranks, so it has a thread of its own.
"""

from __future__ import annotations

import threading
from html import escape

import ipywidgets as widgets

from fsdp_lab.core.generation import Sampling
from fsdp_lab.dashboard.forms import HIDDEN, InputForm, put, styled
from fsdp_lab.dashboard.lab_like import LabLike, active_loop, active_run, active_sweep
from fsdp_lab.runs.control import GenerateRequest

MOST_TOKENS = 1000


class WritingForm(InputForm):
    """`toggle` opens and closes it; `widget` is displayed, `tick` called often."""

    css = "fsdp-sweep"

    def __init__(self, lab: LabLike) -> None:
        super().__init__()
        self._lab = lab
        self._request: GenerateRequest | None = None  # of the run
        self._writer: threading.Thread | None = None  # has what the ranks hold write
        self._prompt = self.add(widgets.Text(placeholder="Once upon a time", description="prompt"))
        self._tokens = self.number("new tokens", Sampling.new_tokens, 1, MOST_TOKENS, "Length of the text")
        styled(self._tokens, "fsdp-number")
        self._write = self.button("Write", "pencil", "Continue the prompt, after the steps in progress", self.write)
        self._write.button_style = "primary"
        close = self.button("Close", "", "Close this form", self.toggle)
        entries = [styled(self._prompt, "fsdp-prompt"), self._tokens, self._write, close]
        self.message = styled(widgets.HTML(), "fsdp-sweep-said", "fsdp-written")
        row = styled(widgets.Box(entries), "fsdp-sweep-row")
        self.widget = styled(widgets.VBox([row, self.message], layout=widgets.Layout(display=HIDDEN)), "fsdp-sweep")
        self.tick()

    def write(self) -> None:
        """Requests a text. Raises FieldError and ClusterError of what cannot write one."""
        prompt, tokens = self._prompt.value, self._tokens.value
        if not prompt.strip():
            raise ValueError("Type a prompt first: the text that the model is to continue.")
        self.say("The model writes after the steps in progress.")
        if (run := active_run(self._lab)) is not None:
            self._request = run.generate(prompt, new_tokens=tokens)
            return

        def ask() -> None:
            self.attempt(lambda: self._show(prompt, self._lab.generate(prompt, new_tokens=tokens)[0]))

        self._writer = threading.Thread(target=ask, name="fsdp-lab-write", daemon=True)
        self._writer.start()

    def _show(self, prompt: str, text: str) -> None:
        put(self.message, "value", f'<span role="status"><b>{escape(prompt)}</b>{escape(text)}</span>')

    def tick(self) -> None:
        """Shows the text when it is there; a text can be asked for where the ranks hold a model and are not compared."""
        request = self._request
        if request is not None and request.done:
            self._request = None
            self.attempt(lambda: self._show(request.prompts[0], request.wait(0)[0]))
        writing = self._request is not None or (self._writer is not None and self._writer.is_alive())
        held = self._lab.current is not None and active_sweep(self._lab) is None and active_loop(self._lab) is None
        put(self._write, "disabled", writing or not held)
