"""`fsdp-lab drill`: failures in small runs on real ranks, and what is said of them."""

import pytest

from fsdp_lab.cli import drill
from fsdp_lab.cli.drill import plans
from fsdp_lab.cli.main import main
from fsdp_lab.spec.faults import DRILLS


@pytest.mark.nightly
def test_drills_are_survived_and_counted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drill, "STEPS", 10)
    monkeypatch.setattr(drill, "EVERY", 3)
    assert main(["drill", "--count", "2", "--seed", "6", "--kinds", "kill,slow"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(": survived, ") == 2 and "kill: to the next step " in printed and "slow: " not in printed
    assert printed.splitlines()[-1] == "2 of 2 survived (seed 6, 2 ranks)"


def test_the_same_seed_makes_the_same_drills_and_all_kinds_come() -> None:
    some = list(plans(3, 200, 4, list(DRILLS)))
    assert some == list(plans(3, 200, 4, list(DRILLS))) != list(plans(4, 200, 4, list(DRILLS)))
    assert {p.kind for p in some} == set(DRILLS) and {p.rank for p in some} == {0, 1, 2, 3}
    assert len({p.form["backend"] for p in some}) == 3 and len({p.step for p in some}) > 10
