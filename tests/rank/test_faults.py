"""Injected faults, without a kernel: what each rank says, that none is left blocked, and that they go on.

Those that end or stop a process are in tests/lab/test_faults.py.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import StepEvent
from fsdp_lab.cluster.remote import memory_short
from fsdp_lab.rank import Session
from tests.covering import tiered
from tests.pool import Place, Pool
from tests.rank.test_not_finite import said_by
from tests.rank.test_session import DDP, follow, session, spec

LIMIT_S = 1.5


def _fault(place: Place, given: dict[str, Any], fault: dict[str, Any]) -> Any:
    """Armed for the third step: what is said, after how long, and all losses by step."""
    s = session(place, reduction="rank_ordered", hang_s=LIMIT_S)
    s.apply("run", given)
    events = s.train(2)["events"]
    assert s.arm({"at_step": 2, **fault}) == {"armed": place.rank in fault["ranks"]}
    start_s = time.perf_counter()
    said = said_by(s)
    seconds = time.perf_counter() - start_s
    events += s.train(3)["events"]
    assert s.disarm() == {"disarmed": 0}, "it is armed no longer"
    s.close()
    return said, seconds, {e["step"]: e["mean_loss"] for e in events}


def goes_on(pool: Pool, changes: dict[str, Any], losses: list[dict[int, float]]) -> None:
    """From the last good step, bit for bit, on all ranks at the same one."""
    (steady, _), _ = follow(pool, [(spec(**changes), 6)])
    wanted = {e.step: e.mean_loss for e in steady}
    assert all(one == losses[0] for one in losses) and len(losses[0]) == 5
    assert losses[0] == {step: wanted[step] for step in losses[0]}


@pytest.mark.parametrize(
    ("backend", "phase"),
    tiered(
        [
            *((backend, phase) for backend in ("lab", "ddp") for phase in ("forward", "backward", "update")),
            ("fsdp2", "backward"),
        ],
        lambda backend, phase: (backend, phase) in {("lab", "backward"), ("ddp", "update")},
    ),
)
def test_what_raises_in_a_step_is_said(pool: Pool, backend: str, phase: str) -> None:
    changes = {
        "backend": backend,
        "sharding": "no_shard" if backend == "ddp" else "full_shard",
        "clip_norm": 0.1,
        "optimizer": "sgd",
    }
    fault = {"kind": "raise", "ranks": [1], "phase": phase}
    (zero, _, mine), (one, _, theirs) = pool.run(_fault, 2, spec(**changes).to_dict(), fault, reduction=None)
    assert one == f"InjectedFault: injected in the {phase} of step 2"
    assert zero == f"RankAborted: rank 1 failed: {one}"
    assert (2 in mine) == (phase != "update"), "where the others had applied it, it is applied on all"
    goes_on(pool, changes, [mine, theirs])


def test_memory_that_cannot_be_had_is_said(pool: Pool) -> None:
    fault = {"kind": "oom", "ranks": [1], "phase": "backward"}
    (zero, _, mine), (one, _, theirs) = pool.run(_fault, 2, spec().to_dict(), fault, reduction=None)
    assert "MiB more could not be allocated; give a smaller micro_batch" in memory_short(RuntimeError(one))
    assert zero.startswith("RankAborted: rank 1 failed: RuntimeError: ")
    goes_on(pool, {}, [mine, theirs])


def test_a_stalled_rank_is_named_and_shown(pool: Pool) -> None:
    fault = {"kind": "stall", "ranks": [1], "for_s": LIMIT_S + 1.5}
    (zero, seconds, mine), (one, _, theirs) = pool.run(_fault, 2, spec().to_dict(), fault, reduction=None)
    assert zero.startswith("RankAborted: rank 1 did not join all_gather ") and ", in _stall\n" in zero
    assert one == zero and LIMIT_S < seconds < LIMIT_S + 3.5, "when the rank comes to itself"
    goes_on(pool, {}, [mine, theirs])


@pytest.mark.parametrize(("changes", "what"), [({}, "all_gather"), (DDP, "all_reduce")], ids=["lab", "ddp"])
def test_a_cut_link_is_found_and_the_collective_is_named(pool: Pool, changes: dict[str, Any], what: str) -> None:
    fault = {"kind": "cut", "ranks": [1]}
    told = pool.run(_fault, 2, spec(**changes).to_dict(), fault, reduction=None)
    for said, seconds, _ in told:
        assert said.startswith(f"RankAborted: all ranks joined {what} "), said
        assert "the connection between them is stalled" in said and LIMIT_S < seconds < LIMIT_S + 2.5
    goes_on(pool, changes, [losses for *_, losses in told])


def _cut_for_good(place: Place) -> Any:
    s = session(place, hang_s=LIMIT_S, timeout_s=5)  # which new groups take that cannot be opened
    s.apply("run", spec().to_dict())
    s.train(1)  # a rank may take a minute for the first step
    s.arm({"kind": "cut", "ranks": [0], "heals": False, "phase": "backward"})
    said = [said_by(s), said_by(s)]
    s.disarm()
    steps = [e["step"] for e in s.train(2)["events"]]
    assert not s.context.busy_addresses(), "nothing is kept for operations that never were"
    s.close()
    return said, steps


@pytest.mark.slow
def test_a_link_can_be_cut_for_good(pool: Pool) -> None:
    """New groups are of no use then."""
    for said, steps in pool.run(_cut_for_good, 2, reduction=None):
        assert "stalled" in said[0] and said[1].startswith("RankAborted: ") and steps == [1, 2], said


def _slow(place: Place, fault: dict[str, Any], link: str | None) -> list[list[dict[str, Any]]]:
    s = session(place, reduction="rank_ordered")
    s.apply("run", spec(link=link).to_dict())
    told = [s.train(2)["events"]]
    s.arm({"kind": "slow", "ranks": [1], **fault})
    told += [s.train(1)["events"], s.train(2)["events"]]  # it stays from chunk to chunk
    s.disarm()
    told += [s.train(2)["events"]]
    s.close()
    return told


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("fault", "link"), [({"link": "1 MB/s"}, None), ({"factor": 20}, "20 MB/s")], ids=["bandwidth", "factor"]
)
def test_a_slow_link_holds_all_ranks_up_and_changes_no_bit(pool: Pool, fault: dict[str, Any], link: str | None) -> None:
    (steady, _), _ = follow(pool, [(spec(), 7)])
    for told in pool.run(_slow, 2, fault, link, reduction=None):
        before, _, slow, after = ([StepEvent.from_dict(e) for e in events] for events in told)
        events = [StepEvent.from_dict(e) for chunk in told for e in chunk]
        assert [e.mean_loss for e in events] == [e.mean_loss for e in steady]
        for e in slow:
            sent = sum(t.link_bytes for kind, t in e.comm.items() if kind != "control")
            assert e.step_time_s > 0.9 * sent / 1e6 > 0.1
        assert min(e.step_time_s for e in (*before[1:], *after)) < min(e.step_time_s for e in slow) / 2


def _slower_than_the_wire(place: Place) -> float | None:
    s = session(place)
    s.apply("run", spec().to_dict())
    s.arm({"kind": "slow", "ranks": [1], "factor": 50})
    s.train(1)
    rate = s._faults.link.bytes_per_s if s._faults.link else None
    s.close()
    return rate


@pytest.mark.alone
def test_where_no_link_is_emulated_the_real_one_is_measured(pool: Pool) -> None:
    zero, one = pool.run(_slower_than_the_wire, 2, reduction=None)
    assert zero is None and one is not None and 1e4 < one < 1e9


def _refused(place: Place) -> Any:
    s = session(place)
    s.apply("run", spec().to_dict())
    s.train(2)
    said = []
    for bad in ({"ranks": [2]}, {"ranks": [1], "at_step": 1}, {"ranks": [1], "kind": "bang"}):
        with pytest.raises(ArgumentError) as e:
            s.arm({"kind": "raise", **bad})
        said.append(e.value.field)
    for at_step in (3, 4):
        s.arm({"kind": "raise", "ranks": [1], "at_step": at_step})
    taken_back = _taken_back(s)
    steps = [e["step"] for e in s.train(3)["events"]]
    s.close()
    return said, taken_back, steps


def _taken_back(s: Session) -> int:
    count: int = s.disarm()["disarmed"]
    return count


def test_what_cannot_be_is_refused_on_all_ranks_and_what_is_armed_can_be_taken_back(pool: Pool) -> None:
    zero, one = pool.run(_refused, 2, reduction=None)
    assert zero == (["fault.ranks", "fault.at_step", "fault.kind"], 0, [2, 3, 4])
    assert one == (["fault.ranks", "fault.at_step", "fault.kind"], 2, [2, 3, 4])
