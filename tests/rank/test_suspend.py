"""A suspended training resumes bit for bit, and leaves nothing on the device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from fsdp_lab.rank import lifecycle
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, follow, session, spec

KINDS: list[dict[str, Any]] = [
    {},
    {"precision": "fp16", "offload": "all"},
    {"backend": "fsdp2", "precision": "bf16"},
    {"backend": "fsdp1", "sharding": "shard_grad_op"},
    DDP,
    {"optimizer": "sgd", "sharding": "zero1"},
    {"optimizer": "Adagrad", "backend": "fsdp2"},
    {"optimizer": "NAdam"},
    {"model": "resnet-1m", "data": "images"},
]


def _in_turns(place: Place, plan: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Each alone for six steps; then all of them in turns of two."""
    s = session(place)
    alone: list[Any] = []
    for given in plan:
        s.apply("alone", given, fresh=True)
        alone.append(s.train(6, checks=[5])["events"])
    turns: list[list[Any]] = [[] for _ in plan]
    for turn in range(3):
        for i, given in enumerate(plan):
            if turn == 0:
                s.apply(f"run {i}", given, fresh=True)
            else:
                assert s.resume(f"run {i}") == {"step": 2 * turn}
            turns[i] += s.train(2, checks=[5])["events"]
            if turn < 2:
                assert s.suspend()["suspended_bytes"] > 0
    assert s.resume("run 0") == {"step": None}  # it was not suspended again
    s.close()
    return alone, turns


@pytest.fixture(scope="module")
def told(pool: Pool) -> list[tuple[list[Any], list[Any]]]:
    return pool.run(_in_turns, 2, [spec(**changes).to_dict() for changes in KINDS], reduction=None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=[str(k) for k in KINDS])
def test_turns_change_no_bit(told: list[tuple[list[Any], list[Any]]], kind: int) -> None:
    for alone, turns in told:
        for a, b in zip(alone[kind], turns[kind], strict=True):
            assert (a["step"], a["loss"], a["grad_norm"]) == (b["step"], b["loss"], b["grad_norm"])
        assert alone[kind][-1]["checksum"] == turns[kind][-1]["checksum"] is not None
        assert alone[kind][-1]["samples"] == turns[kind][-1]["samples"]


@pytest.mark.slow
def test_the_first_step_of_a_turn_is_marked_and_memory_is_measured_once(
    told: list[tuple[list[Any], list[Any]]],
) -> None:
    for events in told[0][1]:
        assert [e["first_after_switch"] for e in events] == [True, False] * 3
        assert not any(e["ledger"] for e in events)  # no turn was long enough for one


def _dropped(place: Place, given: dict[str, Any]) -> list[Any]:
    s = session(place)
    s.apply("run", given)
    s.train(4)
    s.suspend()
    after = s.resume("run")
    events = s.train(4)["events"]
    s.suspend()
    found = [after, events, s.discard(["run", "another"]), s.resume("run")]
    s.close()
    return found


def test_what_a_ledger_step_found_is_kept_and_what_is_dropped_is_gone(pool: Pool) -> None:
    for after, events, dropped, gone in pool.run(_dropped, 2, spec().to_dict(), reduction=None):
        assert after == {"step": 4} and dropped == {"discarded": 1} and gone == {"step": None}
        assert not any(e["ledger"] for e in events)
        assert all(e["memory"]["peak_bytes"] > 0 for e in events)  # as before it was suspended


def _aborted(place: Place, given: dict[str, Any]) -> Any:
    """Rank 1 fails while the training is resumed; then it is resumed again."""
    s = session(place)
    s.apply("run", given)
    losses = [e["mean_loss"] for e in s.train(2)["events"]]
    s.suspend()
    failing = mock.patch.object(lifecycle, "build", side_effect=ZeroDivisionError) if place.rank == 1 else nullcontext()
    with failing, pytest.raises((ZeroDivisionError, RuntimeError)):
        s.resume("run")
    step = s.resume("run")["step"]
    losses += [e["mean_loss"] for e in s.train(2)["events"]]
    again = s.resume("run")["step"]
    s.close()
    return step, again, losses


def test_an_abort_while_it_is_resumed_does_not_lose_it(pool: Pool) -> None:
    (steady, _), _ = follow(pool, [(spec(), 4)])
    for step, again, losses in pool.run(_aborted, 2, spec().to_dict(), reduction=None):
        assert (step, again) == (2, None) and losses == [e.mean_loss for e in steady]
