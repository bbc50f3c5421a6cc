"""The validation: what is left out stays out, and what is published is met within its bounds."""

from __future__ import annotations

import json

import pytest

from fsdp_lab.planner.coverage import Coverage, SourceCoverage
from fsdp_lab.planner.devices import PUBLISHED
from fsdp_lab.planner.fitting import fit_rates, leave_out, predicted_s
from fsdp_lab.planner.published import PublishedCase, case
from fsdp_lab.planner.validate import (
    STRESS,
    Check,
    Errors,
    HeldOutError,
    Validation,
    by_constant,
    checks,
    fold,
    mape,
    published,
    usable,
)


@pytest.fixture(scope="module")
def cases() -> list[PublishedCase]:
    return usable(published())[0]


@pytest.fixture(scope="module")
def found() -> dict[str, Check]:
    return {check.name: check for check in checks(published())}


def test_calibrated_rows_are_met(cases: list[PublishedCase]) -> None:
    errors = Errors(held=tuple(HeldOutError(case=c, fold="", predicted_s=predicted_s(c, PUBLISHED)) for c in cases))
    assert errors.by_row_mape < 0.065 and errors.by_source_mape < 0.065
    assert mape([row for row in errors.held if row.case.id.startswith("mosaic")]) < 0.045


def test_one_mfu_a_gpu_is_far_worse(cases: list[PublishedCase]) -> None:
    constant = Errors(held=tuple(by_constant(cases)))
    assert constant.by_row_mape > 0.08 and constant.by_source_mape > 0.1


def test_throughput_scales_as_published(found: dict[str, Check]) -> None:
    scaling = [check for check in found.values() if check.kind == "scaling"]
    assert len(scaling) >= 6
    for check in scaling:
        assert abs(check.points) < 3, check


def test_switches_are_worth_what_is_published(found: dict[str, Check]) -> None:
    ablations = {name: check for name, check in found.items() if check.kind == "ablation"}
    assert all((check.predicted > 1) == (check.published > 1) for check in ablations.values())
    for name, check in ablations.items():
        near = 0.06 if "prefetch" in name else 0.05 if "hybrid" in name else 0.1
        assert check.predicted == pytest.approx(check.published, abs=near), name


def test_stress_tests_are_predicted_and_are_in_no_average(cases: list[PublishedCase]) -> None:
    rows = {row["id"]: row for row in published()}
    assert not {one.id for one in cases} & set(STRESS)
    for name in STRESS:
        one = case(rows[name])
        assert one.measured_s and predicted_s(one, PUBLISHED) == pytest.approx(one.measured_s, rel=0.3), name
        assert one.assumed["interconnect"].startswith("200 Gb/s")


def test_a_fold_is_of_a_source_or_of_a_part_of_the_largest(cases: list[PublishedCase]) -> None:
    folds = {one.id: fold(one) for one in cases}
    assert folds["mosaic-002"] == folds["mosaic-020"] != folds["mosaic-078"], "MPT 70B on H100s, and on A100s"
    assert folds["kempner-01"] == folds["kempner-02"] == next(c.source for c in cases if c.id == "kempner-01")


def test_what_is_left_out_was_not_calibrated_on(cases: list[PublishedCase]) -> None:
    """On few rows, since each fold takes as many simulations as it has rows."""
    some = [one for one in cases if one.id.startswith(("kempner", "tt165", "sm-", "tt-"))]
    left = leave_out(some, fold)
    assert set(left) == {fold(one) for one in some}
    for name, calibration in left.items():
        others = [one for one in some if fold(one) != name]
        assert calibration.rows == len(others) < len(some)
        alone = fit_rates(others).rates
        for one in some:
            if fold(one) == name:
                assert predicted_s(one, calibration.rates) == pytest.approx(predicted_s(one, alone), rel=0.02)


def test_it_says_itself_in_lines_and_in_json(cases: list[PublishedCase]) -> None:
    some = [one for one in cases if one.id.startswith(("kempner", "tt165"))]
    held = tuple(HeldOutError(case=c, fold=fold(c), predicted_s=1.1 * (c.measured_s or 0)) for c in some)
    slow = HeldOutError(case=some[0], fold="stress", predicted_s=2 * (some[0].measured_s or 0))
    check = Check(name="more over fewer", kind="scaling", published=0.5, predicted=0.48)
    inside = SourceCoverage(source="here", rows=10, inside_50=4, inside_80=9, width=0.3)
    told = Validation(errors=Errors(held=held), constant=Errors(held=held), stress=(slow,), checks=(check,),
                      coverage=Coverage(sources=(inside,), constant_width=0.2),
                      refused=(("x", "no such thing"),))  # fmt: skip
    text = "\n".join(told.lines())
    assert f"{len(held)} rows of 2 sources" in text and "10.0%" in text and "+100.0%" in text and "-2.0" in text
    assert "the 80 % band holds 90% of the rows, the 50 % band 40%" in text and "1.50 of the narrowest" in text
    kept = json.loads(json.dumps(told.to_dict()))
    assert kept["by_source_mape"] == pytest.approx(0.1) and kept["refused"] == {"x": "no such thing"}
    assert [row["id"] for row in kept["stress"]] == [some[0].id]
