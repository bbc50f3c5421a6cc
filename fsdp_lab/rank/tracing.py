"""`StepTrace`: when a rank computed what in a step, by unit, on every backend. `compare_clocks`: offsets of ranks.

Note: marks. A thread does one thing at a time, so a mark says what it computes from now on. A unit's forward is marked by
hooks before and after its modules, its backward by hooks on their output tensors (it begins when gradients arrive) and input
tensors (it has ended). The hooks exist for the traced step only, and change no value. Recomputation is part of the unit's
backward. On a GPU the thread only launches work, so marks are CUDA events on the computing stream.

Note: clocks. A few all-gathers of the ranks' own times bound the offset of each clock to rank 0's from both sides: no rank
has the result before rank 0 gave its part, and rank 0 not before this rank gave its own. The offset is the middle of the two
closest bounds, as in Marzullo's intersection of intervals (1984), and half their distance is the error."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from fsdp_lab.base.events import ROOT, Span, Track
from fsdp_lab.base.streams import streams_of
from fsdp_lab.base.tensors import tensors_in
from fsdp_lab.wire import Collective, Wire, spans, waits

_SHORTEST_S = 5e-6  # shorter spans are left out of the event
_EXCHANGES = 8
Interval = tuple[float, float]


class StepTrace:
    """The context of one step; afterwards `spans` returns the spans of that step."""

    def __init__(self, units: Sequence[tuple[str, nn.Module]], device: torch.device) -> None:
        self._units, self._streams = units, streams_of(device)
        self._handles: list[Any] = []
        self._marks: list[tuple[Any, str, str]] = []  # when (seconds, or a CUDA event), what, of which unit
        self._open: list[str] = []  # units whose forward or backward is in progress, outermost first
        self.begin_s = 0.0

    def __enter__(self) -> Self:
        for name, module in self._units:
            self._install(name, module)
        self.begin_s = time.perf_counter()
        self.mark("forward")
        return self

    def __exit__(self, *error: object) -> None:
        self.mark("")
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def mark(self, name: str, unit: str = ROOT) -> None:
        """Record that the thread computes `name` of `unit` from now on; "": nothing."""
        self._marks.append((self._now(), name, unit))

    def begin(self, name: str) -> None:
        """Begin the next part of the step, in which no unit computes yet."""
        self._open = []
        self.mark(name)

    def _now(self) -> Any:
        return time.perf_counter() if self._streams is None else self._streams.mark()

    def _install(self, name: str, module: nn.Module) -> None:
        before = torch.compiler.disable(partial(self._before_forward, name))  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(partial(self._after_forward, name))  # type: ignore[no-untyped-call]
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _before_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _is_recomputing():
            return
        for t in tensors_in((args, kwargs)):
            if t.requires_grad and torch.is_grad_enabled():
                self._handles.append(_on_gradient(t, partial(self._end, "backward", name)))
        self._begin("forward", name)

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if _is_recomputing():
            return
        for t in tensors_in(output):
            if t.requires_grad:
                self._handles.append(_on_gradient(t, partial(self._begin, "backward", name)))
        self._end("forward", name)

    def _begin(self, what: str, unit: str, *_: Any) -> None:
        if unit not in self._open:
            self._open.append(unit)
            self.mark(what, unit)

    def _end(self, what: str, unit: str, *_: Any) -> None:
        if unit in self._open:  # if two units share a tensor, the next begins before this one ends
            was_innermost = self._open[-1] == unit
            self._open.remove(unit)
            if was_innermost:
                self.mark(what, self._open[-1] if self._open else ROOT)

    def spans(
        self, collectives: Sequence[Collective], copies: Sequence[tuple[str, float, float]], begin_s: float
    ) -> tuple[Span, ...]:
        """The spans of the step, when it is over on the device too. `begin_s`: when the first mark was reached."""
        stalls = [(start - begin_s, end - begin_s) for start, end, _ in waits(collectives)]
        copied = [(start - begin_s, end - begin_s) for _, start, end in copies]
        changes = [m for i, m in enumerate(self._marks) if not i or m[1:] != self._marks[i - 1][1:]]
        all_spans = list(spans(collectives, begin_s))
        others = [*stalls, *copied]
        for (start, name, unit), (stop, _, _) in pairwise(changes):
            parts = _without((self._seconds(start), self._seconds(stop)), others) if name else ()
            all_spans += [_span(Track.COMPUTE, name, unit, p) for p in parts if p[1] - p[0] >= _SHORTEST_S]
        for (unit, _, _), interval in zip(copies, copied, strict=True):
            all_spans += [_span(Track.HOST_COPY, "host_copy", unit, part) for part in _without(interval, stalls)]
        return tuple(sorted(all_spans, key=lambda s: (s.start_s, s.track)))

    def _seconds(self, stamp: Any) -> float:
        """Seconds since the begin of the step."""
        if self._streams is None:
            return float(stamp) - self.begin_s
        return float(self._marks[0][0].elapsed_time(stamp)) / 1e3


def _is_recomputing() -> bool:
    """A forward inside a backward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _on_gradient(t: Tensor, call: Callable[..., None]) -> Any:
    return t.register_hook(call)  # type: ignore[no-untyped-call]


def _span(track: Track, name: str, unit: str, interval: Interval) -> Span:
    return Span(track=track, name=name, unit=unit, start_s=interval[0], end_s=interval[1])


def _without(interval: Interval, others: Sequence[Interval]) -> list[Interval]:
    """The parts of an interval that no other interval covers."""
    left, (at, end) = list[Interval](), interval
    for start, stop in sorted(others):
        if stop <= at or start >= end:
            continue
        if start > at:
            left.append((at, start))
        at = max(at, stop)
    if at < end:
        left.append((at, end))
    return left


class ClockOffset(NamedTuple):
    """`time.perf_counter` of this rank plus `offset_s` is rank 0's, within `error_s`."""

    offset_s: float = 0.0
    error_s: float | None = None


def compare_clocks(world: Wire) -> ClockOffset:
    """The offset of this rank's clock to rank 0's. Collective; some tenths of a millisecond per exchange."""
    if world.size() == 1:
        return ClockOffset(0.0, 0.0)
    least, most = float("-inf"), float("inf")
    sent_s = received_s = float("nan")  # of the previous exchange, by this clock
    for _ in range(_EXCHANGES + 1):  # each also has the time at which rank 0 received the previous result
        before_s, now_s = sent_s, time.perf_counter()
        times = torch.empty(2 * world.size(), dtype=torch.float64)
        world.all_gather_single(times, torch.tensor([now_s, received_s], dtype=torch.float64)).wait()
        sent_s, received_s = now_s, time.perf_counter()
        sent_0_s, received_0_s = times[:2].tolist()
        least = max(least, sent_0_s - received_s)
        if not math.isnan(before_s):
            most = min(most, received_0_s - before_s)
    if world.rank() == 0:
        return ClockOffset(0.0, 0.0)
    return ClockOffset((least + most) / 2, max(0.0, most - least) / 2)
