"""`Sweep`: several Specs trained side by side on the same ranks, in turns.

Note: rounds. Each Spec is a run of its own, from the same initial values on the same batches. They take turns of equal
numbers of steps, round after round, so that drift (clock rates, other processes, temperature) affects all of them alike.
Between its turns a run's state is on the host, bit for bit, so that the memory measured on the device is the current run's
alone. The first step of each turn is left out of medians, as after any switch. With one round the runs are trained one
after the other, and none is suspended."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product
from statistics import fmean
from typing import Any, Self

from fsdp_lab.base.errors import FieldError, SpecError
from fsdp_lab.runs.comparison import Comparison, Refusal
from fsdp_lab.runs.pictures import Picture
from fsdp_lab.runs.recommendation import Recommendation, recommend
from fsdp_lab.runs.run import STOP_S, Run
from fsdp_lab.runs.steps import assemble_all
from fsdp_lab.runs.view import Awaited, RunState
from fsdp_lab.spec.fields import own_names
from fsdp_lab.spec.spec import Spec, changed_dict, part_of

ROUNDS = 3
LEAST_TURN = 3  # steps; memory is measured in the third


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """Progress of a sweep. `left_s`: estimated time left; None before the first measured step."""

    done_steps: int
    all_steps: int
    seconds: float
    left_s: float | None


class Sweep(Awaited["Sweep"]):
    """Made by `Lab.compare`; starts at once. `await` it or `wait()` for it; `comparison()` has the results so far.

    When a run fails, the others continue. What was measured before a `stop` stays available.

    Attributes:
        runs: in order of their first turns. refused: combinations that are impossible.
        steps: of each run. rounds: turns of each run. reason: why it was stopped; empty where it was not.
        suspended: the run found in progress, which goes on afterwards; None: there was none, or it was stopped."""

    def __init__(
        self,
        specs: Sequence[Spec],
        refused: Sequence[Refusal],
        *,
        steps: int,
        rounds: int,
        make: Callable[[Spec, int, int], Run],
        clear: Callable[[Spec], None],
        drop: Callable[[list[str]], None],
        suspended: Run | None = None,
    ) -> None:
        """`make(spec, steps, share)` starts a run; `clear(spec)` frees the ranks, once; `drop(ids)` deletes runs' states."""
        super().__init__()
        self.specs, self.refused = tuple({spec.id: spec for spec in specs}.values()), tuple(refused)
        self.steps, self.rounds, self.reason = steps, rounds, ""
        self.runs: list[Run] = []
        self._runs: dict[str, Run] = {}  # by the id of their Specs
        self.error: BaseException | None = None
        self._make, self._clear, self._drop, self.suspended = make, clear, drop, suspended
        self._stopped = threading.Event()
        self._began_s, self._ended_s = time.monotonic(), 0.0
        self._driver = threading.Thread(target=self._drive, name="fsdp_lab-sweep", daemon=True)
        self._driver.start()

    @property
    def current(self) -> Run | None:
        """The run whose turn it is; None before the first and after the last."""
        return next((run for run in self.runs if not run.done and run.state is not RunState.PAUSED), None)

    @property
    def in_order(self) -> list[Run]:
        """The runs that have begun, in order of the Specs."""
        return [self._runs[spec.id] for spec in self.specs if spec.id in self._runs]

    def comparison(self, baseline: str | int | None = 0) -> Comparison:
        """The results so far, side by side, in order of the Specs; see `Comparison.of`."""
        return Comparison.of([*self.in_order, *self.refused], baseline=baseline)

    def recommend(self, limit_bytes: int | None = None) -> Recommendation:
        """Recommends one of the runs, and says what each toggle saved or cost; see `fsdp_lab.runs.recommendation`."""
        return recommend(self.comparison(), limit_bytes)

    def plot(self) -> Picture:
        """A picture of step time against peak memory, with a ring around the recommended run; see `Comparison.plot`."""
        return self.comparison().plot(self.recommend().fastest)

    def _repr_html_(self) -> str:
        return self.comparison()._repr_html_() if self.runs else escape(repr(self))

    @property
    def outside_share(self) -> float | None:
        """Time outside of steps (switches, builds, waits for a chunk's end) over time in steps; None before any."""
        in_steps = sum(s.step_time_s for run in list(self.runs) for s in assemble_all(run.events.since()[0]))
        return self.progress.seconds / in_steps - 1 if in_steps else None

    @property
    def progress(self) -> SweepProgress:
        runs = list(self.runs)
        done = sum(self.steps if r.done else min(r.step, self.steps) for r in runs)
        seconds = (self._ended_s or time.monotonic()) - self._began_s
        left = 0.0 if self.done else self._left_s(runs)
        return SweepProgress(done_steps=done, all_steps=self.steps * len(self.specs), seconds=seconds, left_s=left)

    def _left_s(self, runs: Sequence[Run]) -> float | None:
        """An estimate from the step times of each run; for runs without steps, from the mean of the others."""
        means = {r.id: fmean(s.step_time_s for s in steps) for r in runs if (steps := r.events.last_steps(20))}
        if not means:
            return None
        mean = fmean(means.values())
        left = sum((self.steps - min(r.step, self.steps)) * means.get(r.id, mean) for r in runs if not r.done)
        return left + (len(self.specs) - len(runs)) * self.steps * mean

    def __repr__(self) -> str:
        p = self.progress
        state = "running" if not self.done else f"stopped ({self.reason})" if self.reason else "done"
        refused = f", {len(self.refused)} refused" if self.refused else ""
        return f"<Sweep of {len(self.specs)} runs{refused}: {state}, {p.done_steps} of {p.all_steps} steps>"

    def stop(self, timeout_s: float = 5.0, reason: str = "stopped") -> bool:
        """Ends the current turn and lets no other begin; what was measured stays available. Returns whether it is over
        within `timeout_s`; with 0 it only leaves the request."""
        if not self._stopped.is_set() and not self.done:
            self.reason = reason
            self._stopped.set()
            for run in list(self.runs):
                run.stop(0, reason)
        return self._wait_over(timeout_s) if timeout_s > 0 else self.done

    def _given_up(self, blocking: bool) -> None:
        self.stop(5.0 if blocking else 0, "interrupted")

    def _outcome(self) -> Self:
        if self.error is not None:
            raise self.error
        return self

    def _drive(self) -> None:
        try:
            if self.specs:
                self._clear(self.specs[0])
            if self.suspended is not None:
                self.suspended.suspend()
                while not self.suspended.wait_suspended(0.1) and not self._stopped.is_set():
                    pass
            by_ranks: dict[object, list[Spec]] = {}  # one group after the other: suspended states end with their ranks
            for spec in self.specs:
                by_ranks.setdefault((spec.world_size, spec.devices), []).append(spec)
            for specs in by_ranks.values():
                self._in_turns(specs)
        except BaseException as e:
            self.error = e
        finally:
            for run in self.runs:
                run.stop(STOP_S, self.reason)
            with contextlib.suppress(Exception):  # lost ranks have nothing suspended
                if self.runs:
                    self._drop([run.id for run in self.runs])
            if self.suspended is not None:
                self.suspended.take_turn()
            self._ended_s = time.monotonic()
            self._end()

    def _in_turns(self, specs: Sequence[Spec]) -> None:
        share = max(LEAST_TURN, -(-self.steps // self.rounds))
        started: list[Run] = []
        for spec in specs:
            if self._stopped.is_set():
                return
            run = self._make(spec, self.steps, share)
            started.append(run)
            self._runs[spec.id] = run
            self.runs.append(run)
            self._await(run)
        while unfinished := [run for run in started if not run.done]:
            for run in unfinished:
                if self._stopped.is_set():
                    return
                run.take_turn()
                self._await(run)

    def _await(self, run: Run) -> None:
        """Blocks until the run's turn is over."""
        if self._stopped.is_set():
            run.stop(0, self.reason)  # it was started just after `stop`
        run.wait_suspended()


def value_lists(given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Flat field name -> its values; a value alone becomes a list of one. Raises SpecError."""
    lists: dict[str, list[Any]] = {}
    for name, values in own_names(given).items():
        part_of(name)
        one = not isinstance(values, (list, tuple)) or (name == "devices" and all(isinstance(v, str) for v in values))
        lists[name] = [values] if one else list(values)
        if not lists[name]:
            raise SpecError(name, "no value is given", "give a list of values, or leave it out")
    return lists


def combine(
    base: Spec, lists: Mapping[str, Sequence[Any]], replace: Callable[[Spec, Mapping[str, Any]], Spec]
) -> Iterator[Spec | Refusal]:
    """Every combination of the lists with the base, in order, without repeats; impossible ones as a Refusal. `lists`: flat
    field name, as in `Spec.replace` -> values. `replace`: makes the Spec with some fields changed. May raise SpecError."""
    seen: list[Any] = []
    for values in product(*lists.values()):
        changes = dict(zip(lists, values, strict=True))
        if changes in seen:
            continue
        seen.append(changes)
        try:
            yield replace(base, changes)
        except FieldError as e:
            yield Refusal(spec=changed_dict(base, changes), reason=e.words)
