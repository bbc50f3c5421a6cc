"""The emulated link: times follow the formula, bits stay, an abort frees at once."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from fsdp_lab.wire import Alarm, Collective, Link, LinkDirection, RankAborted, WireContext, link_bytes
from fsdp_lab.wire.shared_memory import SharedWork
from tests.pool import Place, Pool

MIB = 1 << 20
WAKING_S = 2e-4  # by how much a thread of a busy machine wakes late, at best

# -- the formula -----------------------------------------------------------------------------------------------------


def test_a_link_is_one_queue_a_direction() -> None:
    link = Link(bytes_per_s=100.0, latency_s=0.5)
    assert link.reserve(10.0, 100) == 11.5  # latency, then the bytes
    assert link.reserve(10.0, 200) == 14.0  # behind the first
    assert link.reserve(20.0, 0) == 20.5  # the link has been free since
    assert link.reserve(20.0, 100, LinkDirection.OUT) == 22.0
    assert link.reserve(20.0, 100, LinkDirection.IN) == 22.0  # the other direction is free
    assert link.reserve(20.0, 100) == 23.5
    link.reset()
    assert link.reserve(1.0, 100) == 2.5


@pytest.mark.parametrize("bad", [{"bytes_per_s": 0.0}, {"bytes_per_s": -1.0}, {"bytes_per_s": 1.0, "latency_s": -1.0}])
def test_an_impossible_link_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        Link(**bad)


def test_what_takes_the_link() -> None:
    context = WireContext()

    def booked(kind: str, size: int = 2, bytes_: int = 100) -> float | None:
        issued = Collective(sequence=0, kind=kind, group="g", size=size, link_bytes=bytes_, issue_s=1.0)
        context.reserve_link(issued)
        return issued.link_end_s

    assert booked("all_gather") is None
    with context.emulating(Link(bytes_per_s=100.0, latency_s=0.5)):
        assert booked("all_gather") == 2.5
        assert booked("control") is None  # the lab's own
        assert booked("all_gather", size=1, bytes_=0) is None  # stays in the rank
        assert booked("barrier", bytes_=0) == 3.0  # its latency alone
    assert booked("all_gather") is None


@pytest.mark.alone
def test_an_alarm_calls_in_order_and_forgets() -> None:
    alarm, called, done = Alarm(), list[tuple[str, float]](), threading.Event()
    start_s = time.perf_counter()
    alarm.at(start_s + 0.4, lambda: (called.append(("late", time.perf_counter() - start_s)), done.set()))  # type: ignore[func-returns-value]
    alarm.at(start_s + 0.1, lambda: called.append(("early", time.perf_counter() - start_s)))
    assert done.wait(5)
    assert [name for name, _ in called] == ["early", "late"]
    assert called[0][1] >= 0.1 and called[1][1] >= 0.4
    alarm.at(time.perf_counter() + 0.05, lambda: called.append(("never", 0.0)))
    alarm.clear()
    done.clear()
    alarm.at(time.perf_counter() + 0.1, done.set)
    assert done.wait(5) and len(called) == 2


# -- real collectives ------------------------------------------------------------------------------------------------

LINKS = [(0.5e9, 0.0), (0.25e9, 1e-3), (0.05e9, 0.0)]  # bytes/s, s
SLOW = 0.1e9  # bytes/s: the wire of any machine keeps up with that
REPEATS = 7


def _issue(place: Place, kind: str, payload_bytes: int) -> Callable[[], Any]:
    """What issues a collective of so much payload, its tensors made beforehand."""
    whole = torch.ones(payload_bytes // 4)
    part = torch.ones(whole.numel() // place.world_size)
    world = place.world
    return {
        "all_gather": lambda: world.all_gather_single(whole, part),
        "reduce_scatter": lambda: world.reduce_scatter_single(part, whole),
        "all_reduce": lambda: world.allreduce([whole]),
    }[kind]


def _start_together(place: Place) -> None:
    place.world.control(torch.zeros(1, dtype=torch.float64))


def _when_landed(inner: Any, do: Callable[[Any], None]) -> None:
    if not isinstance(inner, SharedWork):
        inner.get_future().add_done_callback(do)
        return
    stamp = inner.on_read
    inner.on_read = lambda: (stamp(), do(None))


Ends = list[tuple[float, float]]  # of collectives issued together, from their issue: completed, and really landed


def _several(
    place: Place, link: tuple[float, float], kinds: list[str], payload_bytes: int, by_future: bool
) -> list[Ends]:
    """With `by_future` nobody waits for the works, as with DDP: the end of each is its future's."""
    issues, took = [_issue(place, kind, payload_bytes) for kind in kinds], []
    place.context.link = Link(bytes_per_s=link[0], latency_s=link[1])
    for _ in range(REPEATS):
        landed: dict[int, float] = {}
        ended: dict[int, float] = {}
        _start_together(place)
        start_s = time.perf_counter()

        def note(into: dict[int, float], i: int, start_s: float = start_s) -> Callable[[Any], None]:
            return lambda _: into.update({i: time.perf_counter() - start_s})

        works = [issue() for issue in issues]
        for i, work in enumerate(works):
            _when_landed(work._inner, note(landed, i))
            if by_future:
                work.get_future().add_done_callback(note(ended, i))
        for i, work in enumerate(works):
            if not by_future:
                work.wait()
                note(ended, i)(None)
        while len(ended) < len(works) or len(landed) < len(works):
            time.sleep(0.001)
        took.append([(ended[i], landed[i]) for i in range(len(works))])
    return took


def _off(measured: list[float], wanted: float) -> float:
    """Relative error of the lower tenth, which other work on the machine disturbs least; no end is early. A thread that
    is woken may be `WAKING_S` late."""
    assert min(measured) > wanted * 0.999, f"{min(measured)} s is earlier than the {wanted} s of the formula"
    return max(0.0, sorted(measured)[len(measured) // 10] - WAKING_S) / wanted - 1


def _in_time(found: list[list[float]], by_rank: list[list[Ends]], wanted_s: list[float], good: float) -> None:
    """Collect the ends, by collective, where its bytes and those of all before it came over the wire in good time: when so
    much of the time was over. Through shared memory they are read when those before it have ended."""
    for ends in (e for repeats in by_rank for e in repeats):
        for i, (ended, landed) in enumerate(ends):
            if landed > good * wanted_s[i]:
                break
            found[i].append(ended)


def _wakes_late(place: Place) -> float:
    """By how many seconds a thread wakes late that an alarm wakes, all ranks at once: as `_off` takes it."""
    late: list[float] = []
    _start_together(place)
    for _ in range(20):
        over, at_s = threading.Event(), time.perf_counter() + 0.002
        place.context.alarm.at(at_s, over.set)
        over.wait()
        late.append(time.perf_counter() - at_s)
    return sorted(late)[2]


def _follow(
    pool: Pool, link: tuple[float, float], kinds: list[str], payload_bytes: int, by_future: bool = False,
    shared: bool = False,
) -> None:  # fmt: skip
    """That collectives issued together end as the formula says; where the wire itself keeps up, else its end counts."""
    each_s = [link[1] + link_bytes(kind, payload_bytes, 2) / link[0] for kind in kinds]
    wanted_s = [sum(each_s[: i + 1]) for i in range(len(kinds))]
    found: list[list[float]] = [[] for _ in kinds]
    off = [1.0]
    for _ in range(6):
        told = pool.run(_several, 2, link, kinds, payload_bytes, by_future, shared_memory=shared)
        _in_time(found, told, wanted_s, good=0.95 if shared else 0.8)
        off = [_off(ends, w) for ends, w in zip(found, wanted_s, strict=True) if len(ends) >= 5]
        if len(off) == len(kinds) and max(off) <= 0.05:
            break
    medians = [f"{statistics.median(ends) / w - 1:+.4f}" for ends, w in zip(found, wanted_s, strict=True) if ends]
    print(f"{by_future=} {link[0] / 1e9} GB/s", [f"{o:+.4f}" for o in off], "medians", medians, [len(f) for f in found])
    if len(off) < len(kinds) and link[0] > SLOW:
        pytest.skip("the wire is slower than this link here")
    if off and max(off) > 0.05 and max(pool.run(_wakes_late, 2)) > 0.03 * wanted_s[0]:
        pytest.skip("threads wake later here than such a transfer may end")
    assert len(off) == len(kinds) and max(off) <= 0.05


@pytest.mark.alone
@pytest.mark.parametrize("link", LINKS, ids=lambda link: f"{link[0] / 1e9}GB/s")
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_times_follow_the_formula(pool: Pool, kind: str, link: tuple[float, float]) -> None:
    for payload_bytes in (2 * MIB, max(2 * MIB, round(0.04 * link[0]) // MIB * MIB)):  # half crosses the link
        _follow(pool, link, [kind], payload_bytes)


KINDS = ["all_gather", "reduce_scatter", "all_gather", "all_reduce", "reduce_scatter"]


@pytest.mark.alone
@pytest.mark.parametrize("by_future", [False, True], ids=["waited for", "by futures"])
@pytest.mark.parametrize("link", [(0.5e9, 0.0), (0.25e9, 1e-3), (0.1e9, 0.0)], ids=lambda link: f"{link[0] / 1e9}GB/s")
def test_several_in_flight_share_the_link(pool: Pool, link: tuple[float, float], by_future: bool) -> None:
    _follow(pool, link, KINDS, (8 if link[0] > 0.3e9 else 4) * MIB, by_future)


@pytest.mark.alone
@pytest.mark.parametrize("by_future", [False, True], ids=["waited for", "by futures"])
@pytest.mark.parametrize("link", [(1e9, 0.0), (0.25e9, 1e-3)], ids=lambda link: f"{link[0] / 1e9}GB/s")
def test_shared_memory_carries_faster_links(pool: Pool, link: tuple[float, float], by_future: bool) -> None:
    _follow(pool, link, KINDS, (16 if link[0] > 0.5e9 else 4) * MIB, by_future, shared=True)


def _end_times(place: Place) -> tuple[float, float, bool]:
    """What the meter says of a transfer that was over before anybody waited: its end, its exposed time; and whether it
    was completed half way."""
    issue = _issue(place, "all_gather", 2 * MIB)
    place.context.link = Link(bytes_per_s=10e6)  # 0.105 s
    _start_together(place)
    place.context.meter.take()
    work = issue()
    time.sleep(0.05)
    half_way = work.is_completed()
    time.sleep(0.1)
    assert work.is_completed()
    work.wait()
    (told,) = place.context.meter.take()
    return told.end_s - told.issue_s, sum(b - a for a, b in told.waits), half_way


@pytest.mark.alone
def test_what_the_meter_says_is_the_emulated_end(pool: Pool) -> None:
    for took_s, exposed_s, half_way in pool.run(_end_times, 2):
        assert took_s == pytest.approx(MIB / 10e6, rel=0.02) or took_s < 0.12
        assert exposed_s < 0.05 and not half_way


# -- abort -----------------------------------------------------------------------------------------------------------


def _aborted(place: Place, by_future: bool) -> tuple[float, str, bool]:
    """Seconds from the abort to the end of the wait for a transfer of a minute."""
    issue = _issue(place, "all_reduce", MIB)
    place.context.link = Link(bytes_per_s=MIB / 60)
    _start_together(place)
    at_s: list[float] = []
    threading.Timer(0.3, lambda: (at_s.append(time.perf_counter()), place.context.abort("enough"))).start()  # type: ignore[func-returns-value]
    work, said = issue(), ""
    try:
        if by_future:
            work.get_future().wait()
            place.context.check()
        else:
            work.wait()
    except RankAborted as e:
        said = str(e)
    freed_s = time.perf_counter() - at_s[0]
    return freed_s, said, any(t.name == "fsdp-lab-link" and place.context.alarm._due for t in threading.enumerate())


@pytest.mark.alone
@pytest.mark.parametrize("by_future", [False, True], ids=["wait", "future"])
def test_an_abort_frees_at_once(pool: Pool, by_future: bool) -> None:
    for freed_s, said, still_due in pool.run(_aborted, 2, by_future):
        assert freed_s < 0.5 and said == "enough" and not still_due


def _point_to_point(place: Place) -> tuple[float, int]:
    """Both send at once, and receive: each direction is a queue of its own."""
    place.context.link = Link(bytes_per_s=20e6)
    out, into = torch.full((MIB // 4,), float(place.rank)), torch.empty(MIB // 4)
    _start_together(place)
    start_s = time.perf_counter()
    for work in (dist.isend(out, 1 - place.rank), dist.irecv(into, 1 - place.rank)):
        work.wait()  # type: ignore[union-attr]
    return time.perf_counter() - start_s, int(into[0])


@pytest.mark.alone
def test_both_directions_at_once(pool: Pool) -> None:
    for rank, (took_s, got) in enumerate(pool.run(_point_to_point, 2)):
        assert got == 1 - rank and MIB / 20e6 <= took_s < 1.6 * MIB / 20e6
