"""A lab in a notebook: its progress bar, its table of ranks, and `%lab` and `%%ranks`."""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.formatting import Table, duration, size
from fsdp_lab.cluster import ClusterError
from fsdp_lab.cluster.assembly import StartProgress
from fsdp_lab.cluster.local_engines import OUTPUT_S, shown_execute
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


_RANKS_OPTION = re.compile(r"(?:--ranks?(?:\s+|=)(\d+(?:\s*,\s*\d+)*))?")


@dataclass(frozen=True, kw_only=True)
class LabMagics:
    """The magics of `%load_ext fsdp_lab`. `make` starts a lab, which registers itself by `key` in the notebook's names."""

    ipython: Any
    make: Callable[[int | None], Any]
    key: str

    def register(self) -> None:
        self.ipython.register_magic_function(self.show_lab, "line", "lab")
        self.ipython.register_magic_function(self.run_on_ranks, "cell", "ranks")

    @property
    def open_lab(self) -> Any:
        """The lab of this notebook; None where there is none, or it is closed."""
        lab = self.ipython.user_ns.get(self.key)
        return None if lab is None or lab.closed else lab

    def show_lab(self, line: str) -> None:
        """`%lab 2` starts a lab of two ranks, under the name `lab`, and shows its dashboard; `%lab` shows it again, or
        starts one of as many ranks as there are free GPUs. A lab of another number of ranks is closed."""
        from IPython.display import display

        words, lab = line.split(), self.open_lab
        if len(words) > 1 or not all(word.isdecimal() and int(word) for word in words):
            raise ArgumentError("%lab", f"{line!r} is refused", "give the number of ranks, as in %lab 2, or nothing")
        wanted = int(words[0]) if words else None
        if lab is None or wanted not in (None, lab.ranks):
            lab = self.make(wanted)
        self.ipython.user_ns["lab"] = lab
        display(lab.dashboard())  # type: ignore[no-untyped-call]

    def run_on_ranks(self, line: str, cell: str) -> None:
        """Runs the cell on the ranks of the lab, between two chunks of a run, and shows what each prints. `model`,
        `optimizer`, `session`, `rank` and `world_size` are theirs. `--rank 1` or `--rank 0,2`: on these alone, which must
        not communicate then."""
        given, lab = _RANKS_OPTION.fullmatch(line.strip()), self.open_lab
        if given is None:
            raise ArgumentError("%%ranks", f"{line!r} is refused", "give --rank 1, --rank 0,2, or nothing for all")
        if lab is None:
            raise ClusterError("there is no open lab in this notebook; start one with %lab 2, or Lab(ranks=2)")
        engines = lab.cluster.engine_ids
        ranks = [int(word) for word in given[1].split(",")] if given[1] else list(range(len(engines)))
        if unknown := [rank for rank in ranks if rank >= len(engines)]:
            raise ArgumentError("%%ranks --rank", f"there is no rank {unknown[0]}", f"give 0 to {len(engines) - 1}")
        if lost := [lab.lost[rank] for rank in ranks if rank in lab.lost]:
            raise lost[0]
        view = lab.client.direct_view([engines[rank] for rank in ranks])
        result, printed = shown_execute(view.execute, cell, silent=False, block=False), RankOutput(ranks)
        try:
            while not result.wait(0.1):
                printed.show(result.stdout, result.stderr)
        except KeyboardInterrupt:
            lab.cluster.interrupt(cells=True)
            result.wait(OUTPUT_S)
        printed.show(result.stdout, result.stderr, over=True)
        printed.show_rich(result.outputs, result.execute_result)
        if failed := [(rank, e) for rank, e in zip(ranks, result.error, strict=True) if e is not None]:
            where, error = " and ".join(str(rank) for rank, _ in failed), failed[0][1]
            print(error.traceback, file=sys.stderr)
            raise ClusterError(f"the cell failed on rank {where}: {error.ename}: {error.evalue}")
        if not (result.ready() and result.successful()):
            raise ClusterError("the cell did not end on all ranks; lab.status() shows what they do")


class RankOutput:
    """Shows what a cell writes on several ranks, line by line, with the rank before each line."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks, self._shown = ranks, dict[tuple[int, Any], int]()

    def show(self, stdout: Sequence[str], stderr: Sequence[str], *, over: bool = False) -> None:
        """Prints the lines that are new and complete; all of them where it is `over`."""
        for stream, texts in ((sys.stdout, stdout), (sys.stderr, stderr)):
            for rank, text in zip(self._ranks, texts, strict=True):
                begin = self._shown.get((rank, stream), 0)
                end = len(text) if over else text.rfind("\n") + 1
                for line in text[begin:end].splitlines():
                    print(f"[rank {rank}] {line}", file=stream)
                self._shown[rank, stream] = max(begin, end)

    def show_rich(self, outputs: Sequence[Any], values: Sequence[Any]) -> None:
        """Displays pictures and such, and the value of the last expression."""
        from IPython.display import display

        for rank, shown, value in zip(self._ranks, outputs, values, strict=True):
            for one in filter(None, [*shown, value]):
                is_plain = set(one["data"]) == {"text/plain"}
                print(f"[rank {rank}]", one["data"]["text/plain"] if is_plain else "", flush=True)
                if not is_plain:
                    display(one["data"], raw=True, metadata=one["metadata"])  # type: ignore[no-untyped-call]
