"""The rates in the package are what the procedure finds, and one source is predicted by the others."""

from __future__ import annotations

import dataclasses

import pytest

from fsdp_lab.planner.calibrate import calibrate
from fsdp_lab.planner.rates import PUBLISHED
from fsdp_lab.planner.rows import Case
from fsdp_lab.planner.validate import fold, left_out, mape, published, usable


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return usable(published())[0]


@pytest.mark.slow
def test_the_rates_in_the_package_are_what_the_procedure_finds(cases: list[Case]) -> None:
    found = calibrate(cases)
    assert found.rows == len(cases)
    for field in dataclasses.fields(PUBLISHED):
        kept, told = getattr(PUBLISHED, field.name), getattr(found.rates, field.name)
        assert told == pytest.approx(kept, rel=1e-3), field.name


@pytest.mark.slow
def test_a_source_is_predicted_by_what_others_measured(cases: list[Case]) -> None:
    name = next(fold(one) for one in cases if one.id.startswith("tt165"))
    held = left_out(cases, name)
    assert [one.case.id for one in held] == [one.id for one in cases if fold(one) == name]
    assert mape(held) < 0.08


def test_without_a_measured_step_there_is_nothing_to_calibrate_on(cases: list[Case]) -> None:
    with pytest.raises(ValueError, match="no case tells"):
        calibrate([dataclasses.replace(cases[0], measured_s=None)])
