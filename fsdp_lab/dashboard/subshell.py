"""Widgets that answer while a cell runs: the one place that touches a private name of ipykernel.

JupyterLab sends widget messages on a subshell of the kernel, a thread beside the one that runs cells. ipykernel 7.4
routes the answer to a comm by who used that comm last, and a cell that displays a widget uses it: from then on messages
wait until the cell ends. `answer_while_busy` takes that routing back for one widget, so that its messages stay on the
shell on which the page sent them. With an ipykernel that has no such routing it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ipywidgets import Widget


def _as_sent(_data: Any, default: Any) -> Any:
    """The shell that the page chose."""
    return default


def answer_while_busy(widgets: Iterable[Widget]) -> int:
    """Keeps the messages of `widgets` off the shell that runs cells; returns for how many that was needed.

    Handlers then run in the subshell's thread: they must not assume the main thread.
    """
    changed = 0
    for widget in widgets:
        comm = getattr(widget, "comm", None)
        if comm is not None and hasattr(comm, "_reply_subshell_for"):
            comm._reply_subshell_for = _as_sent
            changed += 1
    return changed
