"""A lab for the duration of a command, with its progress on the terminal, and the wait for a run or a sweep."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live

from fsdp_lab.cli.console import Failed, Refused, unhurried
from fsdp_lab.core.errors import FieldError

if TYPE_CHECKING:
    from fsdp_lab.core.spec import Spec
    from fsdp_lab.lab import Lab
    from fsdp_lab.runs import Run, Sweep
    from fsdp_lab.runs.summary import Figures

TICK_S = 0.2


@contextlib.contextmanager
def lab(console: Console, ranks: int, devices: Sequence[str] | None, *, history: bool = True) -> Iterator[Lab]:
    """A lab that is closed in any case. `history`: whether its runs are stored.

    Raises:
        Refused, Failed: the ranks cannot start or join.
    """
    from fsdp_lab.cluster import ClusterError, StartError
    from fsdp_lab.lab import Lab

    warnings.filterwarnings("ignore", module="ipyparallel|jupyter_client|zmq")
    with console.status("starting") as status:
        try:
            opened = Lab(
                ranks,
                devices=devices,
                history=history,
                progress=lambda p: status.update(f"{p.stage} ({p.done} of {p.total}), {p.seconds:.0f} s"),
            )
        except StartError as e:
            raise Refused(str(e)) from e
        except ClusterError as e:
            raise Failed(str(e)) from e
    try:
        for note in opened.notes:
            console.print(f"note: {note}", style="dim", markup=False)
        yield opened
    finally:
        with unhurried():
            opened.close()


def tell_unread_weights(console: Console, specs: Sequence[Spec]) -> None:
    """Prints a note for each model whose folder has weights, because they are not loaded."""
    from fsdp_lab.models.check import unread_weights

    for note in dict.fromkeys(unread_weights(spec.workload) for spec in specs):
        if note:
            console.print(f"note: {note}", style="dim", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def live(console: Console, *, transient: bool = False) -> Iterator[Callable[[RenderableType], None]]:
    """A function that draws over what it drew before; without a terminal it draws nothing."""
    if not console.is_terminal:
        yield lambda shown: None
        return
    with Live(console=console, refresh_per_second=5, transient=transient) as drawn:
        yield drawn.update


def watch(run: Run | Sweep, look: Callable[[], None]) -> None:
    """Waits for the end, calling `look` about five times a second and once more at the end.

    Raises: the error that it failed with. Ctrl-C stops it and is raised again.
    """
    try:
        while True:
            look()
            with contextlib.suppress(TimeoutError):
                run.wait(TICK_S)
                return
    except KeyboardInterrupt:
        with unhurried():
            run.stop()
        raise
    finally:
        look()


def recent(run: Run, steps: int = 100) -> Figures:
    """Figures of the newest steps, at a cost that does not grow with the run."""
    from fsdp_lab.runs.steps import last_stretch
    from fsdp_lab.runs.summary import figures

    return figures(last_stretch(run.events.last_steps(steps), run.spec))


def reason_of(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, FieldError):
        return str(error)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
