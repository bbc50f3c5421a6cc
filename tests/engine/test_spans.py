"""A profiler's trace of a step names its phases as the schedule does: one span for each, with its unit."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fsdp_lab.engine import runtime_of, sharded_parameters
from fsdp_lab.engine.schedule import Phase
from fsdp_lab.spec.spec import Strategy
from tests.engine.test_slow_motion import scheduled
from tests.engine.toys import batch, by_block, make, mean_square
from tests.pool import Place, Pool

PHASES = {p.value for p in Phase}
UNITS = ("root", "blocks.0", "blocks.1", "blocks.2", "blocks.3")

Span = tuple[str, float, float]  # its name, and when it began and ended, in microseconds


def spans(of: Any) -> list[Span]:
    """In the order of their beginnings."""
    found = [(e.name, e.time_range.start, e.time_range.end) for e in of.events() if e.name.split(" ")[0] in PHASES]
    return sorted(found, key=lambda span: span[1])


def traced(place: Place, strategy: Strategy) -> list[Span]:
    model = by_block(make(depth=4), strategy=strategy)
    optimizer = torch.optim.SGD(sharded_parameters(model), lr=0.1)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            loss = mean_square(model, batch(0, place.rank))
            last = runtime_of(model).last
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert last is not None and not last.spans  # each was closed
    loss = mean_square(model, batch(0, place.rank))
    assert runtime_of(model).last.spans == {}  # type: ignore[union-attr]  # none is made when nobody looks
    loss.backward()
    return spans(seen)


def test_a_trace_holds_the_phases_of_every_unit(pool: Pool) -> None:
    """A computation has one span, though inner ones lie in it."""
    for strategy in (Strategy(forward_prefetch=1, backward_prefetch=2), Strategy(sharding="shard_grad_op")):
        wanted = Counter(f"{phase.value} {unit or 'root'}" for phase, unit, _ in scheduled(strategy))
        for found in pool.run(traced, 2, strategy):
            assert Counter(name for name, _, _ in found) == wanted
            _lies_in_its_root(found)


def _lies_in_its_root(found: list[Span]) -> None:
    """Computations of blocks lie inside the root's, forward and backward, one after the other."""
    roots = [s for s in found if s[0] == "compute root"]
    assert len(roots) == 2 and roots[0][2] <= roots[1][1]
    for root, units in zip(roots, (UNITS[1:], UNITS[:0:-1]), strict=True):
        inner = [s for s in found if s[0].startswith("compute ") and s != root and root[1] <= s[1] <= root[2]]
        assert [name for name, _, _ in inner] == [f"compute {unit}" for unit in units]
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(inner))
        assert inner[-1][2] <= root[2]


def after_an_exception(place: Place) -> list[str]:
    """Spans that an exception left open end with their pass, and do not reach into the next one."""
    model = by_block(make(depth=4))

    def fail(*_: Any) -> None:
        raise ValueError("trouble")

    handle = model.blocks[1].register_forward_hook(fail)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        with contextlib.suppress(ValueError):
            mean_square(model, batch(0, place.rank))
        handle.remove()
        mean_square(model, batch(0, place.rank)).backward()
    found = spans(seen)
    broken, whole = [s for s in found if s[0] == "compute blocks.1"][:2]
    assert broken[2] <= whole[1]
    return [name for name, _, _ in found]


def test_spans_end_with_a_pass_that_failed(pool: Pool) -> None:
    for found in pool.run(after_an_exception, 2):
        assert found.count("compute root") == 3 and found.count("compute blocks.3") == 2
