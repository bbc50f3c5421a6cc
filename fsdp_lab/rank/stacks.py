"""What a thread of this process is doing, read by another one: it needs the interpreter, and nothing of the thread."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import PurePath

_DEEPEST = 40  # frames shown, from the innermost
# Between the process's start and what it was asked to do: of no interest to who looks for a hang.
_HOSTS = frozenset({"ipykernel", "ipyparallel", "IPython", "asyncio", "tornado", "traitlets", "multiprocessing"})
_BETWEEN = ("torch/nn/modules/module.py",)  # three frames between each two modules, always the same


def main_stack() -> str:
    """The stack of the main thread as Python prints it, newest call last; and of threads of C++ that run Python just now,
    such as autograd's for a GPU."""
    frames = sys._current_frames()
    known = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    main = threading.main_thread().ident
    chosen = [main, *(ident for ident in frames if ident not in known)]
    stacks = [_read(frames[ident]) for ident in chosen if ident in frames]
    del frames
    return "another thread, of native code:\n".join("".join(stack.format()) for stack in stacks)


def _read(frame: object) -> traceback.StackSummary:
    """Source lines are looked up later, when the frames, and all that they hold, have been let go."""
    walked = traceback.walk_stack(frame)  # type: ignore[arg-type]
    summary = traceback.StackSummary.extract(walked, lookup_lines=False)
    summary.reverse()
    begins = max((i + 1 for i, f in enumerate(summary) if _HOSTS & set(PurePath(f.filename).parts)), default=0)
    shown = summary[begins:] or summary[-3:]  # it is idle: its host waits for a request
    return traceback.StackSummary.from_list([f for f in shown if not f.filename.endswith(_BETWEEN)][-_DEEPEST:])
