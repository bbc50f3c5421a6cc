"""What a lab does with a calibration. What ranks measure is in tests/rank/test_calibration.py, and made up here."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.cluster import ClusterError
from fsdp_lab.lab import Lab
from fsdp_lab.spec.spec import Spec
from tests.lab.test_lab import going
from tests.planner.test_calibration import made_up


def test_plans_are_made_of_what_the_ranks_measured(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = made_up()[0]
    asked: list[dict[str, Any]] = []

    def call(method: str, **arguments: Any) -> list[Any]:
        asked.append(arguments)
        return [expected.probes if method == "calibrate" else {"device_name": "CPU"}] * 2

    with pytest.raises(ArgumentError, match="this machine is not calibrated; call lab.calibrate"):
        lab.plan()
    monkeypatch.setattr(lab.cluster, "call", call)
    spec = Spec(world_size=2).replace(model="gpt2-1m", seq_len=64)
    here = lab.calibrate([spec], passes=1)
    assert asked[0]["specs"][-1] == spec.to_dict() and asked[0]["passes"] == 1, "timed in turns with the calibration's"
    assert (here.ranks, here.machine, here.rates) == (2, expected.machine, expected.rates)
    assert lab.plan(spec).machine == here.machine and lab.plan(spec).step_time_s > 0
    with pytest.raises(SpecError, match="2 ranks were calibrated, and the Spec has 4"):
        lab.plan(Spec(world_size=4))
    there = lab.plan(Spec(world_size=16).replace(model="llama-7b", precision="bf16"), "h100", hosts=2)
    assert there.machine.hosts == 2 and there.fits and "16 x h100 in 2 hosts" in repr(there)


def test_what_cannot_be_calibrated_is_refused(lab: Lab) -> None:
    run = going(lab)
    with pytest.raises(ClusterError, match="in progress"):
        lab.calibrate()
    run.stop(10)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"passes": 0}, "passes"),
        ({"anchors": [Spec()]}, "anchors: they are timed in a crowd of ranks; give ranks as well"),
        ({"ranks": (1,)}, "ranks: 1 is refused"),
        ({"ranks": (2,)}, "ranks: this lab has 2 itself"),
    ]
    for arguments, said in refused:
        with pytest.raises(ArgumentError, match=said):
            lab.calibrate(**arguments)
