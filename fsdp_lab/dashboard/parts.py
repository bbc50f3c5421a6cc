"""What the forms below the controls are made of, and how they change: no message is sent for what stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from fsdp_lab.core.errors import FieldError


def put(widget: Any, name: str, value: Any) -> None:
    """Sets a trait only where it changes: each set is a message."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def field(entry: widgets.Widget) -> widgets.VBox:
    """An input with its label above it, as those of the controls are."""
    entry.add_class("fsdp-input")
    box = widgets.VBox([entry])
    box.add_class("fsdp-field")
    return box


def button(word: str, icon: str, tooltip: str, press: Callable[[], None]) -> widgets.Button:
    made = widgets.Button(description=word, icon=icon, tooltip=tooltip)
    made.add_class("fsdp-safety-button")
    made.on_click(lambda _: press())
    return made


def row(parts: Sequence[widgets.Widget]) -> widgets.Box:
    """Side by side, in as many lines as they need."""
    box = widgets.Box(list(parts))
    box.add_class("fsdp-safety-row")
    return box


def line(name: str) -> widgets.HTML:
    """Words of a class of their own, so that the style sheet keeps room for them."""
    words = widgets.HTML()
    words.add_class("fsdp-safety-words")
    words.add_class(name)
    return words


def part(title: str, parts: Sequence[widgets.Widget]) -> widgets.VBox:
    """A section of a card."""
    head = widgets.HTML(f"<h4>{escape(title)}</h4>")
    head.add_class("fsdp-safety-head")
    box = widgets.VBox([head, *parts])
    box.add_class("fsdp-safety-part")
    return box


def status(text: str, *, wrong: bool = False) -> str:
    """A sentence that is read aloud when it changes."""
    tone = "fsdp-refused" if wrong else "fsdp-soft"
    return f'<span class="{tone}" role="status">{escape(text)}</span>' if text else ""


def sentence(error: BaseException) -> str:
    """What went wrong, for who pressed a button: a refusal without the name of its field, the first line of the others."""
    if isinstance(error, FieldError):
        return f"{error.reason[0].upper()}{error.reason[1:]}: {error.hint}."
    return str(error).partition("\n")[0] or type(error).__name__
