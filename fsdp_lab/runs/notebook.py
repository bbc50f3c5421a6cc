"""A lab in a notebook: its progress bar and table of ranks."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fsdp_lab.base.formatting import Table, duration, size
from fsdp_lab.cluster.assembly import StartProgress
from fsdp_lab.cluster.membership import RankStatus
from fsdp_lab.runs.sweep import Sweep


class ProgressBar:
    """A progress bar in a notebook cell; nothing elsewhere. Drawn with IPython's display, so that it needs no widget."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, p: StartProgress) -> None:
        """Draws how far ranks are that start."""
        self.show(f"{p.stage} ({p.done} of {p.total}), {duration(p.seconds)}", p.done, p.total, over=p.stage == "ready")

    def sweep(self, sweep: Sweep) -> None:
        """Draws how far a comparison is."""
        p = sweep.progress
        left = "" if sweep.done or p.left_s is None else f", about {duration(p.left_s)} left"
        text = f"{p.done_steps} of {p.all_steps} steps, {duration(p.seconds)}{left}"
        self.show(text, p.done_steps, p.all_steps, over=sweep.done)

    def show(self, text: str, done: int | None, total: int = 1, *, over: bool = False) -> None:
        """`done`: None where it is not known how far it is."""
        value = "" if done is None else f' max="{total}" value="{done}"'
        mark = "✓" if over else f"<progress{value}></progress>"
        with contextlib.suppress(Exception):  # the work goes on also where no bar can be drawn
            from IPython.core.getipython import get_ipython
            from IPython.display import HTML, display

            if getattr(get_ipython(), "kernel", None) is None:
                return
            html = HTML(f"<div>{mark} <span>{escape(text)}</span></div>")  # type: ignore[no-untyped-call]
            if self._handle is None:
                self._handle = display(html, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._handle.update(html)
            if over:
                self._handle = None  # what comes next shows a bar of its own


@contextlib.contextmanager
def progress_bar(text: str) -> Iterator[None]:
    """Shows a bar without an end while the block runs, and how long it took."""
    shown, begin_s = ProgressBar(), time.monotonic()
    shown.show(text, None)
    try:
        yield
    except BaseException:
        shown.show(f"{text}: not ended", 0)
        raise
    shown.show(f"{text}: {duration(time.monotonic() - begin_s)}", None, over=True)


def rank_table(ranks: Sequence[RankStatus], *, caption: str, notes: Sequence[str]) -> Table:
    """A row for each rank: process, device, memory, step, its state and since when."""
    now = time.time()
    rows = [
        (
            str(s.rank),
            "alive" if s.alive else "gone",
            _doing(s),
            f"{max(0.0, now - s.since_unix_s):.0f} s",
            "–" if s.step is None else str(s.step),
            s.device,
            size(s.rss_bytes),
            str(s.pid),
            s.host,
        )
        for s in ranks
    ]
    return Table(
        columns=("rank", "process", "doing", "since", "step", "device", "RSS", "pid", "host"),
        rows=tuple(rows),
        caption=caption,
        notes=tuple(notes),
        left=frozenset({"process", "doing", "device", "host"}),
    )


def _doing(s: RankStatus) -> str:
    """A rank's state, with the collective that it waits for; why it is gone."""
    if not s.alive:
        return s.reason or "gone"
    return f"{s.state}, in {s.waits_for} for {s.waits_s:.0f} s" if s.waits_for else s.state
