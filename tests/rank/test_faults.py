"""Injected faults, without a kernel: what each rank says, that none is left blocked, and that they go on.

Those that end or stop a process are in tests/lab/test_faults.py.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from fsdp_lab.base.events import StepEvent
from fsdp_lab.cluster.remote import memory_short
from tests.covering import tiered
from tests.pool import Place, Pool
from tests.rank.test_not_finite import said_by
from tests.rank.test_session import BACKENDS, DDP, apply, call, fails, follow, play, session, spec, train

LIMIT_S = 1.5


def faulted(pool: Pool, changes: dict[str, Any], fault: dict[str, Any]) -> list[tuple[str, dict[int, float]]]:
    """By rank: what is said of a fault that is armed for the third step, and all losses by step."""
    arm = call("arm", {"at_step": 2, **fault})
    calls = (apply(spec(**changes)), train(2), arm, fails(train(3)), train(3), call("disarm"))
    told = []
    by_rank = play(pool, 2, *calls, reduction="rank_ordered", hang_s=LIMIT_S)
    for rank, (_, before, armed, said, after, disarmed) in enumerate(by_rank):
        assert armed == {"armed": rank in fault["ranks"]}
        assert disarmed == {"disarmed": 0}, "it is armed no longer"
        told.append((said, {e["step"]: e["mean_loss"] for e in (*before["events"], *after["events"])}))
    return told


def goes_on(pool: Pool, changes: dict[str, Any], losses: list[dict[int, float]]) -> None:
    """From the last good step, bit for bit, on all ranks at the same one."""
    (steady, _), _ = follow(pool, [(spec(**changes), 6)])
    wanted = {e.step: e.mean_loss for e in steady}
    assert all(one == losses[0] for one in losses) and len(losses[0]) == 5
    assert losses[0] == {step: wanted[step] for step in losses[0]}


@pytest.mark.parametrize(
    ("backend", "phase"),
    tiered([("lab", "backward"), ("ddp", "update"), ("fsdp2", "forward")], lambda backend, phase: backend != "fsdp2"),
)
def test_what_raises_in_a_step_is_said(pool: Pool, backend: str, phase: str) -> None:
    changes = {**BACKENDS[backend], "clip_norm": 0.1, "optimizer": "sgd"}
    fault = {"kind": "raise", "ranks": [1], "phase": phase}
    (zero, mine), (one, theirs) = faulted(pool, changes, fault)
    assert one == f"InjectedFault: injected in the {phase} of step 2"
    assert zero == f"RankAborted: rank 1 failed: {one}"
    assert (2 in mine) == (phase != "update"), "where the others had applied it, it is applied on all"
    goes_on(pool, changes, [mine, theirs])


@pytest.mark.slow
def test_memory_that_cannot_be_had_is_said(pool: Pool) -> None:
    fault = {"kind": "oom", "ranks": [1], "phase": "backward"}
    (zero, mine), (one, theirs) = faulted(pool, {}, fault)
    assert "MiB more could not be allocated; give a smaller micro_batch" in memory_short(RuntimeError(one))
    assert zero.startswith("RankAborted: rank 1 failed: RuntimeError: ")
    goes_on(pool, {}, [mine, theirs])


@pytest.mark.slow
def test_a_stalled_rank_is_named_and_shown(pool: Pool) -> None:
    fault = {"kind": "stall", "ranks": [1], "for_s": LIMIT_S + 1.5}
    (zero, mine), (one, theirs) = faulted(pool, {}, fault)
    assert zero.startswith("RankAborted: rank 1 did not join all_gather ") and ", in _stall\n" in zero
    assert one == zero, "when the rank comes to itself"
    goes_on(pool, {}, [mine, theirs])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "what"), tiered([({}, "all_gather"), (DDP, "all_reduce")], lambda changes, what: not changes)
)
def test_a_cut_link_is_found_and_the_collective_is_named(pool: Pool, changes: dict[str, Any], what: str) -> None:
    fault = {"kind": "cut", "ranks": [1]}
    told = faulted(pool, changes, fault)
    for said, _ in told:
        assert said.startswith(f"RankAborted: all ranks joined {what} "), said
        assert "the connection between them is stalled" in said
    goes_on(pool, changes, [losses for _, losses in told])


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


@pytest.mark.slow
def test_a_slow_link_holds_all_ranks_up_and_changes_no_bit(pool: Pool) -> None:
    """From chunk to chunk, until it is taken back."""
    slow = call("arm", {"kind": "slow", "ranks": [1], "link": "1 MB/s"})
    calls = (apply(spec()), train(2), slow, train(1), train(2), call("disarm"), train(2))
    (steady, _), _ = follow(pool, [(spec(), 7)])
    for _, *answers in play(pool, 2, *calls, reduction="rank_ordered"):
        chunks = [[StepEvent.from_dict(e) for e in a["events"]] for a in answers if "events" in a]
        assert [e.mean_loss for chunk in chunks for e in chunk] == [e.mean_loss for e in steady]
        for e in chunks[2]:
            sent = sum(t.link_bytes for kind, t in e.comm.items() if kind != "control")
            assert e.step_time_s > 0.9 * sent / 1e6 > 0.1


def _slower_than_the_wire(place: Place) -> float | None:
    with closing(session(place)) as s:
        s.apply("run", spec().to_dict())
        s.arm({"kind": "slow", "ranks": [1], "factor": 50})
        s.train(1)
        return s._faults.link.bytes_per_s if s._faults.link else None


def test_where_no_link_is_emulated_the_real_one_is_measured(pool: Pool) -> None:
    zero, one = pool.run(_slower_than_the_wire, 2, reduction=None)
    assert zero is None and one is not None and one > 0


def test_what_cannot_be_is_refused_on_all_ranks_and_what_is_armed_can_be_taken_back(pool: Pool) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"ranks": [2]}, {"ranks": [1], "at_step": 1}, {"ranks": [1], "kind": "bang"})
    refused = [fails(call("arm", {"kind": "raise", **fault})) for fault in wrong]
    armed = [call("arm", {"kind": "raise", "ranks": [1], "at_step": step}) for step in (3, 4)]
    by_rank = play(pool, 2, apply(spec()), train(2), *refused, *armed, call("disarm"), train(3))
    for rank, (_, _, *said, _, _, taken_back, after) in enumerate(by_rank):
        assert [text.split(":")[1] for text in said] == [" fault.ranks", " fault.at_step", " fault.kind"]
        assert taken_back == {"disarmed": 2 * rank} and [e["step"] for e in after["events"]] == [2, 3, 4]
