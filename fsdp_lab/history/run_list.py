"""`RunList`: a list of past runs to look at and to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from fsdp_lab.core.describe import describe_strategy, describe_value
from fsdp_lab.core.errors import ArgumentError, FieldError
from fsdp_lab.core.formatting import Table, count
from fsdp_lab.history.stored_run import StoredRun

COLUMNS = ("id", "name", "when", "model", "how", "ranks", "steps", "state", "tokens/s", "loss", "machine")


class RunList(Sequence[StoredRun]):
    """Newest first. `runs[0]` is the newest, `runs["ab12"]` the one whose id begins so, or that has this name."""

    def __init__(self, runs: Sequence[StoredRun], *, of: int, where: str, notes: tuple[str, ...] = ()) -> None:
        """`of` so many that are kept in `where`."""
        self._runs, self._of, self._where, self._notes = tuple(runs), of, where, notes

    @overload
    def __getitem__(self, which: int | str) -> StoredRun: ...
    @overload
    def __getitem__(self, which: slice) -> RunList: ...
    def __getitem__(self, which: int | str | slice) -> StoredRun | RunList:
        """Raises ArgumentError for an id or a name that is none's or several's, IndexError for a position."""
        if isinstance(which, slice):
            return RunList(self._runs[which], of=self._of, where=self._where, notes=self._notes)
        return self._called(which) if isinstance(which, str) else self._runs[which]

    def _called(self, which: str) -> StoredRun:
        found = [run for run in self._runs if which and which == run.name]
        found = found or [run for run in self._runs if which and run.id.startswith(which)]
        if len(found) == 1:
            return found[0]
        few = ", ".join(run.id for run in (found or self._runs)[:5])
        if found:
            raise ArgumentError(
                "run", f"{len(found)} runs are called {which!r} or begin with it", f"say more of the id: {few}"
            )
        raise ArgumentError("run", f"none of these runs is called {which!r} or begins with it",
                        f"the newest are {few}" if few else "there are none")  # fmt: skip

    def __len__(self) -> int:
        return len(self._runs)

    def table(self) -> Table:
        legend = ("tokens/s: the median of the newest 100 steps",) if self._runs else ()
        few = f"{len(self)} of " if len(self) != self._of else ""
        caption = f"{few}{self._of} run{'s' * (self._of != 1)} in {self._where}"
        figures = {"ranks", "steps", "tokens/s", "loss"}
        return Table(columns=COLUMNS, rows=tuple(map(_row, self._runs)), caption=caption,
                     notes=(*legend, *self._notes), left=frozenset(COLUMNS) - figures)  # fmt: skip

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _row(run: StoredRun) -> tuple[str, ...]:
    try:
        words = describe_strategy(run.spec)
    except FieldError:  # of another version
        words = str(run.spec_fields.get("strategy", {}).get("backend", ""))
    model = run.spec_fields.get("workload", {}).get("model", "")
    return (
        run.id,
        run.name + (" (pinned)" if run.pinned else ""),
        run.when,
        describe_value("model", model),
        words,
        str(run.spec_fields.get("world_size", "")),
        f"{run.step:,}",
        run.state.value,
        "–" if run.tokens_per_s is None else count(run.tokens_per_s),
        "–" if run.loss is None else f"{run.loss:.4f}",
        run.where,
    )
