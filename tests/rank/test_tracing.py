"""A traced step: its spans cover it without overlap, name every unit, agree across ranks, and change nothing."""

import math
import time
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest
from torch.profiler import DeviceType

from fsdp_lab.base.events import Span, StepEvent, Track, exposed_by_unit
from fsdp_lab.rank import tracing
from fsdp_lab.rank.ledger import KernelTimes
from fsdp_lab.rank.measure import StepMeter
from fsdp_lab.runs.timeline import MEETINGS, Timeline, _meetings
from fsdp_lab.wire import Collective
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, apply, play, spec, train

UNITS = ["transformer.h.0", "transformer.h.1"]
THREAD = (Track.COMPUTE, Track.WAIT, Track.HOST_COPY)  # what the rank's own thread does, one at a time


def moved(spans: tuple[Span, ...], track: Track) -> Counter[str]:
    return Counter(s.unit for s in spans if s.track is track)


CHUNKS = [2, 2]


@pytest.fixture(scope="module")
def by_rank(pool: Pool) -> list[list[list[StepEvent]]]:
    """By rank and backend: four steps in two chunks, and again with each step in a chunk of its own."""
    calls = [c for changes in BACKENDS.values() for chunks in (CHUNKS, [1] * sum(CHUNKS))
             for c in (apply(spec(**changes), fresh=True), *(train(steps) for steps in chunks))]  # fmt: skip
    found = play(pool, 2, *calls, reduction="rank_ordered")
    events = [[StepEvent.from_dict(e) for a in told if "events" in a for e in a["events"]] for told in found]
    return [[of_rank[i : i + 4] for i in range(0, len(of_rank), 4)] for of_rank in events]


@pytest.mark.slow
def test_the_last_step_of_a_chunk_is_told_span_by_span(by_rank: list[list[list[StepEvent]]]) -> None:
    for backend, events in ((b, e) for of_rank in by_rank for b, e in zip(BACKENDS, of_rank[::2], strict=True)):
        assert [bool(e.spans) for e in events] == [False, True, False, True]
        last = events[-1]
        thread = sorted((s for s in last.spans if s.track in THREAD), key=lambda s: s.start_s)
        assert 0.5 * last.step_time_s < sum(s.seconds for s in thread) < 1.02 * last.step_time_s, backend
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(thread)), "one thing at a time"
        assert sum(exposed_by_unit(last.spans).values()) == pytest.approx(last.exposed_comm_s, rel=1e-6)
        computed = {(s.name, s.unit) for s in last.spans if s.track is Track.COMPUTE}
        assert computed >= {(way, unit) for way in ("forward", "backward") for unit in [*UNITS, "root"]}
        assert ("optimizer", "root") in computed
        gathers, reductions, all_reduced = (
            moved(last.spans, t) for t in (Track.ALL_GATHER, Track.REDUCE_SCATTER, Track.ALL_REDUCE)
        )
        if backend == "ddp":
            assert set(all_reduced) == {"bucket 0"}
        else:
            assert set(gathers) == {*UNITS, "root"} and reductions == Counter([*UNITS, "root"])


@pytest.mark.slow
def test_hybrid_sharding_names_the_all_reduce_too(pool: Pool) -> None:
    hybrid = [spec(4, backend=b, sharding="hybrid_shard", shard_size=2) for b in ("lab", "fsdp2", "fsdp1")]
    for told in play(pool, 4, *(c for given in hybrid for c in (apply(given, fresh=True), train(2)))):
        for last in (StepEvent.from_dict(answer["events"][-1]) for answer in told[1::2]):
            of_gradients = tuple(span for span in last.spans if span.dtype == "float32")
            assert moved(of_gradients, Track.ALL_REDUCE) == Counter([*UNITS, "root"])


def test_host_copies_are_spans(pool: Pool) -> None:
    for _, told in play(pool, 2, apply(spec(offload="all")), train(3)):
        assert set(moved(StepEvent.from_dict(told["events"][-1]).spans, Track.HOST_COPY)) == {*UNITS, "root"}


@pytest.mark.slow
def test_tracing_changes_no_bit_and_the_ranks_clocks_agree(by_rank: list[list[list[StepEvent]]]) -> None:
    """No collective ends before its last rank has issued it, and each is found on all its ranks by its number."""
    for plain, traced in zip(by_rank[0][::2], by_rank[0][1::2], strict=True):
        assert [(e.loss, e.grad_norm) for e in traced] == [(e.loss, e.grad_norm) for e in plain]
    for run in range(1, 2 * len(BACKENDS), 2):
        for events in zip(*(of_rank[run] for of_rank in by_rank), strict=True):
            timeline = Timeline.of(events)
            assert timeline.contradicted == () and all(lane.aligned for lane in timeline.lanes)
            met = _meetings({e.rank: e for e in events}, {e.rank: e.spans for e in events})
            assert {track for _, _, track in met} <= set(MEETINGS) and len(met) > 1
            assert all(len(issued) == 2 for issued, _ in met.values())
            assert len(met) == sum(s.track in MEETINGS for s in events[0].spans)


# -- clocks ----------------------------------------------------------------------------------------------------------
AHEAD_S = 1234.5


def _clocks_apart(place: Place) -> tuple[tracing.ClockOffset, tracing.ClockOffset]:
    """The real clocks, which on one machine are one; then with rank 1's ahead."""
    true = tracing.compare_clocks(place.world)
    ahead_s = AHEAD_S if place.rank == 1 else 0.0
    tracing.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead_s)
    try:
        return true, tracing.compare_clocks(place.world)
    finally:
        tracing.time = time


def test_clocks_are_compared_over_the_wire(pool: Pool) -> None:
    zero, one, two = pool.run(_clocks_apart, 3)
    assert zero == ((0.0, 0.0), (0.0, 0.0))
    for rank, (true, apart) in enumerate((one, two), start=1):
        for clock, wanted in ((true, 0.0), (apart, -AHEAD_S if rank == 1 else 0.0)):
            assert clock.error_s is not None and clock.error_s < 1.0
            assert abs(clock.offset_s - wanted) <= clock.error_s + 1e-6


# -- a GPU's kernels -------------------------------------------------------------------------------------------------
GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL(...)", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(...)"


def event(name: str, start: int, end: int, *, on_gpu: bool = True, annotation: bool = False) -> SimpleNamespace:
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return SimpleNamespace(name=lambda: name, device_type=lambda: kind, is_user_annotation=lambda: annotation,
                           start_ns=lambda: start * 10**9, end_ns=lambda: end * 10**9)  # fmt: skip


def test_what_a_gpu_waits_for_is_read_from_its_kernels() -> None:
    kernels = [
        *(event("gemm", *span) for span in ((0, 4), (7, 12), (8, 10))),
        event(GATHER, 2, 7),  # 4 to 7 by itself
        event(SCATTER, 9, 16),  # 12 to 16 by itself
        event(GATHER, 14, 19),  # 16 to 19; before that the other one counts
        event("Memcpy DtoH (Device -> Pinned)", 12, 16),
        event("aten::mm", 4, 19, on_gpu=False),
        event("ncclDevKernel_SendRecv(...)", 30, 31),
        event("ncclDevKernel_AllReduce_Sum_f64_RING_LL(...)", 32, 34),
    ]
    found = KernelTimes.of(kernels)
    assert found.exposed_s == {"all_gather": 6.0, "reduce_scatter": 4.0, "other": 1.0, "control": 2.0}
    assert (found.count, found.busy_s) == (8, 22.0) and KernelTimes.of(kernels[::-1]) == found
    # what the profiler draws over kernels is no computing: `record_function`, and what torch opens around a collective
    kernels = [event("gemm", 0, 1), event(GATHER, 1, 5), event("gemm", 5, 6)]
    spans = [event("compute root", 0, 6, annotation=True), event("nccl:all_gather", 1, 5, annotation=True)]
    assert KernelTimes.of([*spans, *kernels]) == KernelTimes.of(kernels)
    assert KernelTimes.of(kernels).exposed_s == {"all_gather": 4.0}
    assert KernelTimes.of(kernels[:1]).exposed_s is None, "unknown without a kernel of NCCL"


@pytest.mark.parametrize("seen", [None, {"other": 3.0}, {"all_gather": 3.0}])
def test_exposed_communication_of_a_gpu_is_measured_or_unknown_and_never_0(seen: dict[str, float] | None) -> None:
    """`other`: a reduction in rank order, which NCCL sends as an all-to-all."""
    sent = [Collective(sequence=i, kind=kind, group="0", size=2, link_bytes=8, issue_s=0.0, start_s=0.0)
            for i, kind in enumerate(("all_gather", "reduce_scatter", "control"))]  # fmt: skip
    of_gpu = SimpleNamespace(_on_gpu=True, _info=SimpleNamespace(shares_gpu=False),
                             ledger=SimpleNamespace(kernels=SimpleNamespace(exposed_s=seen)))  # fmt: skip
    comm = StepMeter._traffic(cast(StepMeter, of_gpu), sent)
    calls = {kind: t.calls for kind, t in comm.items() if t.calls}
    assert calls == {"all_gather": 1, "reduce_scatter": 1, "control": 1}
    total_s = sum(t.exposed_seconds for t in comm.values())
    assert total_s == 3.0 if seen and "other" in seen else math.isnan(total_s), "no kernel of the reduction was seen"
    assert StepMeter._traffic(cast(StepMeter, of_gpu), []) == {}  # one rank sends nothing, and waits for nothing
