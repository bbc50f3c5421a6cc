"""The rates in the package are what the procedure finds."""

from __future__ import annotations

import dataclasses

import pytest

from fsdp_lab.planner.devices import PUBLISHED
from fsdp_lab.planner.fitting import fit_rates
from fsdp_lab.planner.published import PublishedCase
from fsdp_lab.planner.validate import published, usable


@pytest.fixture(scope="module")
def cases() -> list[PublishedCase]:
    return usable(published())[0]


@pytest.mark.slow
def test_the_rates_in_the_package_are_what_the_procedure_finds(cases: list[PublishedCase]) -> None:
    found = fit_rates(cases)
    assert found.rows == len(cases)
    for field in dataclasses.fields(PUBLISHED):
        kept, told = getattr(PUBLISHED, field.name), getattr(found.rates, field.name)
        assert told == pytest.approx(kept, rel=1e-3), field.name


def test_without_a_measured_step_there_is_nothing_to_fit(cases: list[PublishedCase]) -> None:
    with pytest.raises(ValueError, match="no case has a measured"):
        fit_rates([dataclasses.replace(cases[0], measured_s=None)])
