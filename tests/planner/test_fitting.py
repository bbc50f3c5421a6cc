"""The rates in the package are what the procedure finds."""

from __future__ import annotations

import dataclasses

import pytest

from fsdp_lab.planner import fitting
from fsdp_lab.planner.devices import PUBLISHED
from fsdp_lab.planner.fitting import fit_rates
from fsdp_lab.planner.published import PublishedCase
from fsdp_lab.planner.validate import published, usable


@pytest.fixture(scope="module")
def cases() -> list[PublishedCase]:
    return usable(published())[0]


@pytest.mark.slow
def test_one_more_step_of_the_procedure_leaves_the_rates_in_the_package_as_they_are(cases: list[PublishedCase]) -> None:
    kept = fitting._logarithms(PUBLISHED)
    residuals = fitting._residuals(cases, fitting._rates(kept))
    jacobian = fitting._jacobian(cases, kept, residuals)
    assert fitting._gauss_newton(kept, residuals, jacobian, fitting._weights(cases)) == pytest.approx(kept, abs=3e-3)


@pytest.mark.nightly
def test_the_rates_in_the_package_are_what_the_procedure_finds(cases: list[PublishedCase]) -> None:
    found = fit_rates(cases)
    assert found.rows == len(cases)
    for field in dataclasses.fields(PUBLISHED):
        kept, told = getattr(PUBLISHED, field.name), getattr(found.rates, field.name)
        assert told == pytest.approx(kept, rel=1e-3), field.name


def test_without_a_measured_step_there_is_nothing_to_fit(cases: list[PublishedCase]) -> None:
    with pytest.raises(ValueError, match="no case has a measured"):
        fit_rates([dataclasses.replace(cases[0], measured_s=None)])
