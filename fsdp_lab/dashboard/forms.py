"""What the controls are made of: widgets with a style, texts, and `InputForm`, whose inputs respond while a cell runs."""

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, TypeVar

import ipywidgets as widgets

from fsdp_lab.base.errors import FieldError

Styled = TypeVar("Styled", bound=widgets.Widget)
HIDDEN = "none"  # a value of Layout.display


class InputForm:
    """A form: a `widget` to display, its `inputs`, and a line for messages. A subclass makes that line, or overrides `say`.
    Handlers run on the thread on which the page's message arrives. A subclass's `tick` runs often, on the tick thread."""

    css = "fsdp-safety"  # what the classes of its buttons begin with
    message: widgets.HTML
    widget: widgets.Widget

    def __init__(self) -> None:
        self.inputs: list[widgets.Widget] = []
        self._asker: threading.Thread | None = None

    def button(self, text: str, icon: str, tooltip: str, press: Callable[[], Any]) -> widgets.Button:
        button = widgets.Button(description=text, icon=icon, tooltip=tooltip)
        button.on_click(lambda _: self.attempt(press))
        return self.add(styled(button, f"{self.css}-button"))

    def number(self, label: str, value: int, least: int, most: int, tooltip: str) -> widgets.BoundedIntText:
        return self.add(widgets.BoundedIntText(value=value, min=least, max=most, description=label, tooltip=tooltip))

    def dropdown(self, label: str, options: Sequence[Any], value: Any, tooltip: str) -> widgets.Dropdown:
        return self.add(widgets.Dropdown(options=options, value=value, description=label, tooltip=tooltip))

    def add(self, widget: Styled) -> Styled:
        self.inputs.append(widget)
        return widget

    def attempt(self, action: Callable[[], Any]) -> None:
        """Runs the action and shows its error: nobody can catch what a widget's handler raises."""
        try:
            action()
        except Exception as e:
            self.say(error_text(e), wrong=True)

    @property
    def is_asking(self) -> bool:
        return self._asker is not None and self._asker.is_alive()

    def ask_lab(self, ask: Callable[[], Any]) -> None:
        """Asks the lab, or its run, which answers between steps, in a thread of its own; an error is shown."""
        self._asker = threading.Thread(target=self.attempt, args=(ask,), name="fsdp-lab-ask", daemon=True)
        self._asker.start()

    def say(self, text: str, *, wrong: bool = False) -> None:
        put(self.message, "value", status(text, wrong=wrong))

    def retire(self) -> None:
        """Disables all inputs, because the lab is closed."""
        for widget in self.inputs:
            if widget.has_trait("disabled"):
                widget.disabled = True


def put(widget: Any, name: str, value: Any) -> None:
    """Sets a trait only if it changes, because each set is a message."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def unfold(body: widgets.Widget, button: widgets.Button, shown: bool) -> None:
    """Shows or hides what the button folds."""
    put(body.layout, "display", "" if shown else HIDDEN)
    put(button, "description", "Hide" if shown else "Show")
    put(button, "icon", "angle-up" if shown else "angle-down")


def styled(widget: Styled, *css: str) -> Styled:
    """The widget, with classes of the style sheet."""
    for name in css:
        widget.add_class(name)
    return widget


def section(title: str, parts: Sequence[widgets.Widget]) -> widgets.VBox:
    """A titled part of a card."""
    head = styled(widgets.HTML(f"<h4>{escape(title)}</h4>"), "fsdp-safety-head")
    return styled(widgets.VBox([head, *parts]), "fsdp-safety-part")


def display_widget(widget: widgets.Widget) -> None:
    """Displays it in a cell's output, as a message of its own and not as the cell's result. ipywidgets 7 knows no other
    way, and Colab names the manager that loads anywidget only in such messages."""
    from IPython.display import display

    display(widget)  # type: ignore[no-untyped-call]


def close_all(widget: widgets.Widget) -> None:
    """Closes a widget and all that it contains: each has a comm and an entry in a table of ipywidgets."""
    for child in getattr(widget, "children", ()):
        close_all(child)
    for name in ("layout", "style"):
        part = getattr(widget, name, None)
        if isinstance(part, widgets.Widget):
            part.close()
    widget.close()


def status(text: str, *, wrong: bool = False) -> str:
    """A sentence that a screen reader announces when it changes."""
    tone = "fsdp-refused" if wrong else "fsdp-soft"
    return f'<span class="{tone}" role="status">{prose(text)}</span>' if text else ""


def prose(text: str) -> str:
    """A sentence as HTML, with what is in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def error_text(error: BaseException) -> str:
    """An error for the person who pressed a button: a FieldError without its field's name, the first line of another."""
    if isinstance(error, FieldError):
        return f"{error.reason[0].upper()}{error.reason[1:]}: {error.hint}."
    return str(error).partition("\n")[0] or type(error).__name__


def answer_while_busy(answering: Iterable[widgets.Widget]) -> int:
    """Lets widgets respond while a cell runs; returns for how many that needed a change.

    JupyterLab sends widget messages on a subshell of the kernel, in whose thread handlers run. ipykernel 7.4 routes a comm's
    messages to the shell that used the comm last, such as that of a cell that displayed the widget, where they wait until
    the cell ends. This makes it keep the page's shell. It sets a private attribute of ipykernel, the only one that the
    package touches; without such routing it does nothing."""
    routed = [w.comm for w in answering if hasattr(getattr(w, "comm", None), "_reply_subshell_for")]
    for comm in routed:
        comm._reply_subshell_for = lambda _data, default: default  # the shell that the page chose
    return len(routed)
