"""A suspended training resumes bit for bit, and leaves nothing on the device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from fsdp_lab.rank import lifecycle
from tests.pool import Place, Pool
from tests.rank.test_evaluation import RESNET
from tests.rank.test_session import DDP, apply, call, play, running, spec, train

KINDS: list[dict[str, Any]] = [
    {"precision": "fp16", "offload": "all"},
    {"backend": "fsdp2", "optimizer": "Adagrad"},
    {"backend": "fsdp1", "sharding": "shard_grad_op"},
    {**DDP, "optimizer": "NAdam", "model": RESNET, "data": "images"},
]


@pytest.mark.slow
def test_turns_change_no_bit(pool: Pool) -> None:
    """Each alone for four steps; then all of them in turns of two."""
    kinds = [spec(**changes) for changes in KINDS]
    alone = [c for given in kinds for c in (apply(given, fresh=True), train(4, checks=[3]))]
    first = [c for i, given in enumerate(kinds)
             for c in (apply(given, f"run {i}", fresh=True), train(2), call("suspend"))]  # fmt: skip
    later = [c for i in range(len(kinds)) for c in (call("resume", f"run {i}"), train(2, checks=[3]), call("suspend"))]
    for told in play(pool, 2, *alone, *first, *later):
        steady, turns = told[: len(alone)], told[len(alone) :]
        assert all(answer["suspended_bytes"] > 0 for answer in turns[2::3])
        for i in range(len(kinds)):
            (_, one, _), (begun, other, _) = turns[3 * i : 3 * i + 3], turns[3 * (i + len(kinds)) :][:3]
            events = [*one["events"], *other["events"]]
            names = ("step", "loss", "grad_norm", "checksum", "samples")
            alike = [[e[n] for n in names] for e in steady[2 * i + 1]["events"]]
            assert begun == {"step": 2} and [[e[n] for n in names] for e in events] == alike
            assert events[-1]["checksum"] is not None
            assert [e["first_after_switch"] for e in events] == [True, False] * 2
            assert not any(e["ledger"] for e in events)  # no turn was long enough for one


def test_what_a_ledger_step_found_is_kept_and_what_is_dropped_is_gone(pool: Pool) -> None:
    resume, suspend = call("resume", "run"), call("suspend")
    calls = (apply(spec()), train(4), suspend, resume, train(4), suspend, call("discard", ["run", "another"]), resume)
    for *_, after, trained, _, dropped, gone in play(pool, 2, *calls):
        assert after == {"step": 4} and dropped == {"discarded": 1} and gone == {"step": None}
        assert not any(e["ledger"] for e in trained["events"])
        assert all(e["memory"]["peak_bytes"] > 0 for e in trained["events"])  # as before it was suspended


def _aborted(place: Place, given: dict[str, Any]) -> Any:
    """Rank 1 fails while the training is resumed; then it is resumed again."""
    with running(place, given, reduction="rank_ordered") as s:
        losses = [e["mean_loss"] for e in s.train(2)["events"]]
        s.suspend()
        failing = (
            mock.patch.object(lifecycle, "build", side_effect=ZeroDivisionError) if place.rank == 1 else nullcontext()
        )
        with failing, pytest.raises((ZeroDivisionError, RuntimeError)):
            s.resume("run")
        step = s.resume("run")["step"]
        losses += [e["mean_loss"] for e in s.train(2)["events"]]
        again = s.resume("run")["step"]
    return step, again, losses


@pytest.mark.slow
def test_an_abort_while_it_is_resumed_does_not_lose_it(pool: Pool, steady: list[float]) -> None:
    for step, again, losses in pool.run(_aborted, 2, spec().to_dict(), reduction=None):
        assert (step, again) == (2, None) and losses == steady[:4]
