"""Frame: both ways through JSON, and what is held."""

from __future__ import annotations

import json

import pytest

from fsdp_lab.base.events import ROOT, ParameterHolding, PhaseSnapshot


def holding(**changes: object) -> ParameterHolding:
    fields: dict[str, object] = {
        "name": "h.0.weight", "unit": "h.0", "numel": 10, "start": 5, "stop": 10, "state": "sharded", "gradient": "none",
    }  # fmt: skip
    return ParameterHolding(**{**fields, **changes})  # type: ignore[arg-type]


def frame(*parameters: ParameterHolding) -> PhaseSnapshot:
    return PhaseSnapshot(rank=1, world_size=2, step=7, index=3, phase="unshard", unit=ROOT, direction="forward",
                 parameters=parameters)  # fmt: skip


def test_json_both_ways() -> None:
    f = frame(holding(), holding(name="wte.weight", unit=ROOT, start=0, stop=0, gradient="sharded"))
    assert PhaseSnapshot.from_dict(json.loads(json.dumps(f.to_dict()))) == f
    assert PhaseSnapshot.from_dict(frame().to_dict()) == frame()


@pytest.mark.parametrize(("state", "held"), [("sharded", (5, 10)), ("gathering", (5, 10)), ("unsharded", (0, 10))])
def test_all_of_a_parameter_is_held_when_it_is_unsharded(state: str, held: tuple[int, int]) -> None:
    assert holding(state=state).held == held
