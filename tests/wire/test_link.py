"""The emulated link: times follow the formula, bits stay, an abort frees at once."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_lab.wire import Alarm, Collective, Link, LinkDirection, RankAborted, WireContext, link_bytes
from tests.pool import Place, Pool

MIB = 1 << 20


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


def test_an_alarm_calls_in_order_and_forgets() -> None:
    alarm, called, done = Alarm(), list[tuple[str, float]](), threading.Event()
    start_s = time.perf_counter()

    def call(name: str) -> None:
        called.append((name, time.perf_counter() - start_s))
        if name == "late":
            done.set()

    for name, after_s in (("late", 0.2), ("early", 0.1), ("never", 60.0)):
        alarm.at(start_s + after_s, lambda name=name: call(name))  # type: ignore[misc]
    assert done.wait(5)
    alarm.clear()
    assert not alarm._due and [name for name, _ in called] == ["early", "late"]
    assert called[0][1] >= 0.1 and called[1][1] >= 0.2


def _issue(place: Place, kind: str, payload_bytes: int) -> Callable[[], Any]:
    """What issues a collective of so much payload, its tensors made beforehand."""
    whole = torch.ones(payload_bytes // 4)
    part = torch.ones(whole.numel() // place.world_size)
    world = place.world
    return {"all_gather": lambda: world.all_gather_single(whole, part),
            "reduce_scatter": lambda: world.reduce_scatter_single(part, whole),
            "all_reduce": lambda: world.allreduce([whole])}[kind]  # fmt: skip


def _start_together(place: Place) -> None:
    place.world.control(torch.zeros(1, dtype=torch.float64))


KINDS = ["all_gather", "reduce_scatter", "all_reduce"]
LINK = Link(bytes_per_s=20e6, latency_s=5e-3)


def _several(place: Place, by_future: bool) -> list[float]:
    """When each of several collectives that were issued together ended. With `by_future` nobody waits for the works, as
    with DDP: the end of each is its future's."""
    issues, ended = [_issue(place, kind, MIB) for kind in KINDS], dict[int, float]()
    place.context.link = LINK
    _start_together(place)
    start_s = time.perf_counter()

    def note(i: int) -> None:
        ended[i] = time.perf_counter() - start_s

    works = [issue() for issue in issues]
    for i, work in enumerate(works):
        if by_future:
            work.get_future().add_done_callback(lambda _, i=i: note(i))
        else:
            work.wait()
            note(i)
    while len(ended) < len(works):
        time.sleep(0.001)
    return [ended[i] for i in range(len(works))]


@pytest.mark.parametrize("shared_memory", [False, True])
@pytest.mark.parametrize("by_future", [False, True], ids=["waited for", "by futures"])
def test_several_in_flight_share_the_link(pool: Pool, by_future: bool, shared_memory: bool) -> None:
    """None ends earlier than the formula says. How much later is a matter of the machine."""
    each_s = [LINK.latency_s + link_bytes(kind, MIB, 2) / LINK.bytes_per_s for kind in KINDS]
    wanted_s = list(itertools.accumulate(each_s))
    for ends in pool.run(_several, 2, by_future, shared_memory=shared_memory):
        assert all(end >= 0.999 * wanted for end, wanted in zip(ends, wanted_s, strict=True)), (ends, wanted_s)


def _end_times(place: Place) -> tuple[float, float, bool]:
    """Of a transfer that was over before anybody waited: its end, its exposed time; and whether it was over too early."""
    issue = _issue(place, "all_gather", 2 * MIB)
    place.context.link = Link(bytes_per_s=10e6)  # 0.105 s
    _start_together(place)
    place.context.meter.take()
    begin_s, work = time.perf_counter(), issue()
    is_over, now_s = work.is_completed(), time.perf_counter()
    while not work.is_completed():
        time.sleep(0.01)
    work.wait()
    (told,) = place.context.meter.take()
    return told.end_s - told.issue_s, sum(b - a for a, b in told.waits), is_over and now_s < begin_s + MIB / 10e6


def test_what_the_meter_says_is_the_emulated_end(pool: Pool) -> None:
    for took_s, exposed_s, too_early in pool.run(_end_times, 2):
        assert took_s >= 0.999 * MIB / 10e6 and exposed_s < took_s and not too_early


def _aborted(place: Place, by_future: bool) -> tuple[float, str, bool]:
    """Seconds from the abort to the end of the wait for a transfer of a minute."""
    issue = _issue(place, "all_reduce", MIB)
    place.context.link = Link(bytes_per_s=MIB / 60)
    _start_together(place)
    at_s: list[float] = []
    threading.Timer(0.1, lambda: (at_s.append(time.perf_counter()), place.context.abort("enough"))).start()  # type: ignore[func-returns-value]
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


@pytest.mark.parametrize("by_future", [False, True], ids=["wait", "future"])
def test_an_abort_frees_at_once(pool: Pool, by_future: bool) -> None:
    for freed_s, said, still_due in pool.run(_aborted, 2, by_future):
        assert freed_s < 10 and said == "enough" and not still_due
