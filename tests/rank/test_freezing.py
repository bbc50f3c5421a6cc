"""What is frozen can change in a running training and at a resume, alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool import Pool, RankError
from tests.rank.test_session import apply, call, fails, play, spec, train

EARLY = ["transformer.w?e.*", "transformer.h.0.*"]


@pytest.mark.slow
def test_a_resume_with_other_patterns_is_as_a_switch(pool: Pool, tmp_path: Path) -> None:
    """Of each Spec, two steps; saved, and taken out of memory and back, before the change."""
    early, all_but_biases = (spec(freeze=patterns, backend="fsdp1") for patterns in (EARLY, ["*.bias"]))
    calls = (apply(early), train(2), call("save", str(tmp_path)), call("saves", 30.0), call("suspend"),
             call("resume", "run"), apply(all_but_biases), train(2, checks=[3]))  # fmt: skip
    switched = play(pool, 2, *calls, reduction="rank_ordered")
    again = call("restore", "again", all_but_biases.to_dict(), str(tmp_path))
    resumed = play(pool, 2, again, train(2, checks=[3]), reduction="rank_ordered")
    for one, other in zip(switched, resumed, strict=True):
        assert [(e["mean_loss"], e["checksum"]) for e in one[-1]["events"]] == [
            (e["mean_loss"], e["checksum"]) for e in other[-1]["events"]
        ]


def test_a_pattern_without_a_parameter_is_refused_on_every_rank_and_training_goes_on(pool: Pool) -> None:
    for _, said, after in play(pool, 2, apply(spec()), fails(apply(spec(freeze=["nothing.*"]))), train(1)):
        assert said.startswith("SpecError: workload.freeze: 'nothing.*' matches no parameter; give a")
        assert len(after["events"]) == 1
    with pytest.raises(RankError, match="nothing is left to train"):
        play(pool, 1, apply(spec(1, freeze=["*"])))
