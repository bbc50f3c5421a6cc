"""What is frozen can change in a running training and at a resume, alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Place, Pool, RankError
from tests.rank.test_session import DDP, session, spec

EARLY = ["transformer.w?e.*", "transformer.h.0.*"]


def _switched(place: Place, plan: list[dict[str, Any]], root: str) -> list[list[Any]]:
    """Of each Spec, two steps; saved, and taken out of memory and back, before each change."""
    s, told = session(place, reduction="rank_ordered"), []
    for i, given in enumerate(plan):
        s.apply("run", given, fresh=i == 0)
        told.append([(e["mean_loss"], e["checksum"]) for e in s.train(2, checks=[2 * i + 1])["events"]])
        s.save(root)
        assert not s.saves(30.0)["under_way"]
        s.suspend()
        s.resume("run")
    s.close()
    return told


def _resumed(place: Place, given: dict[str, Any], path: str) -> list[Any]:
    s = session(place, reduction="rank_ordered")
    s.restore("again", given, path)
    told = [(e["mean_loss"], e["checksum"]) for e in s.train(2, checks=[s.status()["step"] + 1])["events"]]
    s.close()
    return told


@pytest.mark.parametrize("backend", [{}, {"backend": "fsdp2"}, {"backend": "fsdp1"}, DDP], ids=str)
def test_a_resume_with_other_patterns_is_as_a_switch(pool: Pool, tmp_path: Path, backend: dict[str, Any]) -> None:
    plan = [spec(freeze=f, **backend).to_dict() for f in (EARLY, None, ["*.bias"])]
    by_rank = pool.run(_switched, 2, plan, str(tmp_path), reduction=None)
    saved = sorted(tmp_path.glob("*"))
    assert len(saved) == 3
    for i in (1, 2):
        again = pool.run(_resumed, 2, plan[i], str(saved[i - 1]), reduction=None)
        assert again == [told[i] for told in by_rank]


def _refused(place: Place, given: dict[str, Any], wrong: dict[str, Any]) -> str:
    s = session(place)
    s.apply("run", given, fresh=True)
    try:
        s.apply("run", wrong)
    except Exception as e:
        said = str(e)
    s.train(1)
    s.close()
    return said


def test_a_pattern_without_a_parameter_is_refused_on_every_rank_and_training_goes_on(pool: Pool) -> None:
    told = pool.run(_refused, 2, spec().to_dict(), spec(freeze=["nothing.*"]).to_dict(), reduction=None)
    assert set(told) == {told[0]} and told[0].startswith("workload.freeze: 'nothing.*' matches no parameter; give a")
    with pytest.raises(RankError, match="nothing is left to train"):
        pool.run(_refused, 1, spec(1, freeze=["*"]).to_dict(), spec(1).to_dict(), reduction=None)
