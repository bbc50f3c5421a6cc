"""Which run to take, and what each toggle bought."""

from __future__ import annotations

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.runs import Comparison, Refusal, recommend
from tests.lab.events import SPEC
from tests.lab.kept import RecordedRun
from tests.lab.past import MIB, past

GRAD_OP = {"sharding": "shard_grad_op"}
BF16 = {"precision": "bf16"}


def turned(
    run: str, place: int, step_s: float, peak_mib: int, changes: dict[str, object], **more: object
) -> RecordedRun:
    """The `place`-th of a sweep of five rounds."""
    spec = SPEC.replace(**changes)
    return past(run, spec, steps=50, rounds=5, step_s=step_s, peak_mib=peak_mib, begin_unix_s=1e9 + 10 * place,
                **{"noise": 0.005, **more})  # fmt: skip


@pytest.fixture
def four() -> list[RecordedRun]:
    return [
        turned("a", 0, 0.100, 200, GRAD_OP),
        turned("b", 1, 0.112, 78, {}),
        turned("c", 2, 0.070, 120, {**GRAD_OP, **BF16}),
        turned("d", 3, 0.0756, 60, BF16),
    ]


def test_the_fastest_and_the_smallest_near_it(four):
    found = recommend(four)
    assert (found.fastest, found.smallest) == ("C", "D")
    assert found.sentences[0].startswith("The fastest that fits is C (shard_grad_op bf16): 2,8")
    assert "The smallest within 10% of its time is D (full_shard bf16)" in found.sentences[1] and "61.0 MiB" in str(
        found
    )


def test_a_limit_leaves_out_what_does_not_fit(four):
    found = recommend(four, limit_bytes=100 * MIB)
    assert found.fastest == found.smallest == "D" and "also the smallest" in str(found)
    assert found.excluded["C"] == "it needs 121 MiB of 100 MiB a rank" and "Not recommended, C: it needs" in str(found)
    nothing = recommend(four, limit_bytes=MIB)
    assert nothing.fastest is None and "None of these runs can be recommended." in str(nothing)
    for limit in (0, 1.5, "80 GiB", True):
        with pytest.raises(ArgumentError, match="limit_bytes: .*; give a whole number of bytes, or nothing"):
            recommend(four, limit_bytes=limit)  # type: ignore[arg-type]


def test_what_a_toggle_bought_from_every_pair_that_differs_in_it_alone(four):
    sharding, precision = recommend(four).toggles
    assert (sharding.taken, sharding.instead, len(sharding.pairs)) == ("full_shard", "shard_grad_op", 2)
    assert sharding.sentence == ("full_shard instead of shard_grad_op saved 55% memory (50 to 61%) for 10% time (8 to 12%) "
                                 "(median and range of 2 pairs).")  # fmt: skip
    assert precision.sentence.startswith("bf16 instead of fp32 saved 31% memory (23 to 40%) and 31% time (30 to 32%)")
    one = recommend(four[:2]).toggles[0].sentence
    assert one.startswith("full_shard instead of shard_grad_op saved 61% memory for 12% time (B and A)")


def test_noise_is_called_noise():
    same = recommend([turned("a", 0, 0.1, 200, GRAD_OP), turned("b", 1, 0.1004, 100, {})]).toggles[0].sentence
    assert "saved 50% memory; within noise in time (" in same
    nothing = [turned("a", 0, 0.1, 100, {}), turned("b", 1, 0.1, 100, {"forward_prefetch": 1})]
    assert "bought nothing: within noise in time" in recommend(nothing).toggles[0].sentence
    faster = [
        turned(label, i, s, 100, {"forward_prefetch": i}) for i, (label, s) in enumerate((("a", 0.1), ("b", 0.08)))
    ]
    said = recommend(faster).toggles[0].sentence
    assert said.startswith("forward prefetch 1 instead of forward prefetch 0 saved 20% time, the same memory")


@pytest.mark.parametrize("peak_mib", [100, 60])
def test_of_what_is_not_told_apart_in_time_the_smallest_is_recommended(peak_mib: int):
    runs = [turned("a", 0, 0.1, 100, {}), turned("b", 1, 0.1003, peak_mib, GRAD_OP), turned("c", 2, 0.2, 50, BF16)]
    found = recommend(runs)
    taken, other = ("A", "B") if peak_mib == 100 else ("B", "A")
    assert found.fastest == found.smallest == taken
    assert found.fastest_run is found.smallest_run is runs["AB".index(taken)]
    assert f"Not told apart from it in time: {other}; it is the smallest of them." in found.sentences[0]
    compared = Comparison.of(runs)
    b, c = compared.table()._repr_html_().split("<tr>")[3:]
    assert "opacity" in b and "≈ 1.0" in b and "opacity" not in c and "≈" not in c.split("<p>")[0]
    assert "≈: not told apart in time from A." in compared.notes()


def test_what_is_another_work_or_result_or_was_not_measured_is_not_recommended_nor_judged_by(four):
    wrong = turned("w", 4, 0.01, 10, {"backend": "fsdp2"}, loss_off=2.0)
    found = recommend([*four, wrong])
    assert found.fastest == "C" and "Not recommended, E: it does not compute the same" in str(found)
    assert all("E" not in (p.taken, p.instead) for t in found.toggles for p in t.pairs)
    other = turned("o", 4, 0.001, 10, {"model": "gpt2-1m"})
    linked = turned("l", 5, 0.001, 10, {"link": "10 GB/s"})
    unmeasured = turned("u", 6, 0.001, 0, {"wrap": "whole"})
    unmeasured.events = type(unmeasured.events)()
    refused = Refusal(SPEC.replace(backend="ddp", sharding="no_shard"), "no GPU is free")
    found = recommend([*four, other, linked, unmeasured, refused])
    assert found.fastest == "C"
    twice = recommend([*four, refused, refused])
    assert "Not recommended, E, F: refused before a step was measured (no GPU is free)." in str(twice)
    assert found.excluded == {
        "E": "its model is not A's",
        "F": "its link is not A's",
        "G": "finished before a step was measured",
        "H": "refused before a step was measured (no GPU is free)",
    }


def test_it_says_what_the_figures_are_worth_and_escapes_what_it_shows():
    strange = past("a", SPEC.replace(data="/tmp/<b>"), notes=("a <shared> GPU",))
    found, html = recommend(Comparison.of([strange])), recommend([strange, past("b")])._repr_html_()
    assert "a <shared> GPU" in str(found) and "CPU and Gloo" in str(found)
    assert "&lt;shared&gt;" in html and "<b>The fastest" in html and "/tmp/<b>" not in html
    assert recommend([]).fastest is None
