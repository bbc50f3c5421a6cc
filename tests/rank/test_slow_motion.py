"""A rank's step in slow motion: halted at its phases, told as frames, and the same step for all that."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_lab.base.events import PhaseSnapshot, StepEvent
from fsdp_lab.rank import Session
from tests.pool import Place, Pool, RankError
from tests.rank.test_session import DDP, session, spec


def _slowly(place: Place, given: dict[str, Any], plan: list[str]) -> list[Any]:
    """Do what the plan says, one after the other; the answers."""
    s = session(place, reduction="rank_ordered")
    try:
        return _answers(s, given, plan)
    finally:
        s.close()


def _answers(s: Session, given: dict[str, Any], plan: list[str]) -> list[Any]:
    s.apply("run", given)
    answers: list[Any] = []
    for what in plan:
        if what == "step":
            answers.append(s.train(1)["events"][0])
        elif what == "end":
            answers.append(s.slow_end())
        elif what == "next":
            answers.append(s.slow_next())
        elif what == "all":
            frames = []
            while (told := s.slow_next())["frame"] is not None:
                frames.append(told["frame"])
            answers.append({"frames": frames, "event": told["event"]})
        else:
            answers.append(s.apply("run", {**given, "strategy": {**given["strategy"], "sharding": what}}))
    return answers


def test_a_slow_step_is_the_same_step(pool: Pool) -> None:
    given = spec(backend="lab").to_dict()
    plain = pool.run(_slowly, 2, given, ["step"] * 4, reduction=None)
    slow = pool.run(_slowly, 2, given, ["step", "all", "all", "step"], reduction=None)
    for ours, theirs in zip(slow, plain, strict=True):
        events = [StepEvent.from_dict(a.get("event", a)) for a in ours]
        assert [e.mean_loss for e in events] == [a["mean_loss"] for a in theirs]
        assert [e.grad_norm for e in events] == [a["grad_norm"] for a in theirs]
        assert [e.slow for e in events] == [False, True, True, False] and not events[1].counts
        assert events[3].ledger and events[3].memory.peak_bytes > 0  # the ledger step was put off


def test_frames_say_what_is_held(pool: Pool) -> None:
    answers = pool.run(_slowly, 2, spec(backend="lab").to_dict(), ["all"], reduction=None)
    by_rank = [[PhaseSnapshot.from_dict(f) for f in a[0]["frames"]] for a in answers]
    for rank, frames in enumerate(by_rank):
        assert [f.index for f in frames] == list(range(len(frames)))
        assert all(f.rank == rank and f.world_size == 2 and f.step == 0 for f in frames)
        assert [(f.phase, f.unit, f.direction) for f in frames] == [(f.phase, f.unit, f.direction) for f in by_rank[0]]
        assert frames[0].phase == "unshard" and frames[0].unit == "root" and frames[-1].phase == "optim"
        assert {p.state for p in frames[0].parameters} == {"sharded"}
        for f in frames:
            held = {p.name: p for p in f.parameters}
            if f.phase == "compute":
                assert all(p.held == (0, p.numel) for p in held.values() if p.unit == f.unit)
    optim = [frames[-1] for frames in by_rank]
    for a, b in zip(optim[0].parameters, optim[1].parameters, strict=True):
        assert a.gradient == b.gradient == "sharded" and a.state == b.state == "sharded"
        ranges = sorted([(a.start, a.stop), (b.start, b.stop)])
        assert sum(stop - start for start, stop in ranges) == a.numel  # the ranks' shards are the whole, once


@pytest.mark.slow
def test_a_slow_step_ends_when_something_else_is_asked_for(pool: Pool) -> None:
    given = spec(backend="lab").to_dict()
    plain = pool.run(_slowly, 2, given, ["step"] * 5, reduction=None)[0]
    plan = ["next", "next", "step", "next", "end", "end", "next", "shard_grad_op", "step"]
    slow = pool.run(_slowly, 2, given, plan, reduction=None)[0]
    assert slow[2]["mean_loss"] == plain[1]["mean_loss"]
    assert slow[4]["event"]["mean_loss"] == plain[2]["mean_loss"]
    assert slow[5] == {"frame": None, "event": None}
    assert slow[7]["step"] == 4 and slow[8]["mean_loss"] == plain[4]["mean_loss"]


def test_other_backends_are_refused(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"strategy\.backend: slow motion .* use backend lab"):
        pool.run(_slowly, 2, spec(**DDP).to_dict(), ["next"], reduction=None)
