"""What is frozen can change in a running training and at a resume, alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.covering import tiered
from tests.pool import Pool, RankError
from tests.rank.test_session import apply, call, fails, play, spec, train

EARLY = ["transformer.w?e.*", "transformer.h.0.*"]


def told(answer: dict[str, Any]) -> list[Any]:
    return [(e["mean_loss"], e["checksum"]) for e in answer["events"]]


@pytest.mark.slow
@pytest.mark.parametrize("backend", tiered(["lab", "fsdp1"], lambda backend: backend == "fsdp1"))
def test_a_resume_with_other_patterns_is_as_a_switch(pool: Pool, tmp_path: Path, backend: str) -> None:
    """Of each Spec, two steps; saved, and taken out of memory and back, before each change."""
    plan = [spec(freeze=patterns, backend=backend) for patterns in (EARLY, None, ["*.bias"])]
    calls = [(apply(given), train(2, checks=[2 * i + 1]), call("save", str(tmp_path)), call("saves", 30.0), call("suspend"),
              call("resume", "run")) for i, given in enumerate(plan)]  # fmt: skip
    switched = play(pool, 2, *(c for part in calls for c in part), reduction="rank_ordered")
    saved = sorted(tmp_path.glob("*"))
    assert len(saved) == 3
    calls = [
        (call("restore", "again", plan[i].to_dict(), str(saved[i - 1])), train(2, checks=[2 * i + 1])) for i in (1, 2)
    ]
    resumed = play(pool, 2, *(c for part in calls for c in part), reduction="rank_ordered")
    for one, other in zip(switched, resumed, strict=True):
        assert [told(one[i]) for i in (7, 13)] == [told(other[i]) for i in (1, 3)]


def test_a_pattern_without_a_parameter_is_refused_on_every_rank_and_training_goes_on(pool: Pool) -> None:
    for _, said, after in play(pool, 2, apply(spec()), fails(apply(spec(freeze=["nothing.*"]))), train(1)):
        assert said.startswith("SpecError: workload.freeze: 'nothing.*' matches no parameter; give a")
        assert len(after["events"]) == 1
    with pytest.raises(RankError, match="nothing is left to train"):
        play(pool, 1, apply(spec(1, freeze=["*"])))
