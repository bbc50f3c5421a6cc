"""Runs in figures and in a table; and side by side: ratios, parity, what is refused, and what is written of it."""

import json
import math
from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import Memory, Role, StepEvent
from fsdp_lab.runs import Comparison, Refusal, RunState, recommend
from fsdp_lab.runs.comparison import finite
from fsdp_lab.runs.steps import assemble
from fsdp_lab.runs.summary import Pairing, figures, ratio, step_table, summarize
from fsdp_lab.spec.spec import Spec
from tests.lab.events import SPEC, event, steps
from tests.lab.kept import RecordedRun
from tests.lab.past import MIB, past

GRAD_OP = SPEC.replace(sharding="shard_grad_op")


@pytest.fixture
def three() -> list[RecordedRun | Refusal]:
    refused = Refusal({"strategy": {"backend": "fsdp2", "sharding": "zero1"}}, "FSDP2 always shards <gradients>")
    return [past("a"), past("b", GRAD_OP, step_s=0.08, peak_mib=150, begin_unix_s=1e9 + 50), refused]


def test_rows_are_lettered_and_named_by_what_differs(three):
    compared = Comparison.of(three)
    assert [(r.label, r.name) for r in compared.rows] == [
        ("A", "lab full_shard"), ("B", "lab shard_grad_op"), ("C", "fsdp2 zero1")]  # fmt: skip
    assert compared.differing == ("backend", "sharding") and compared.baseline == "A"
    assert Comparison.of([past("a"), past("b")]).rows[0].name == "lab full_shard fp32"
    assert Comparison.of([past(str(i)) for i in range(28)]).rows[-1].label == "AB"
    link = Comparison.of([past("a", SPEC.replace(link="0.25 GB/s, 50 us")), past("b")])
    assert [r.name for r in link.rows] == ["link 0.25 GB/s, 50 us", "real link"]


def test_figures_are_those_of_the_summary_with_a_spread():
    run = past("a")
    entry = summarize(SPEC, run.events.steps())
    f = Comparison.of([run]).rows[0].figures
    assert {"median": f.step_time_s.median, "p10": f.step_time_s.p10, "p90": f.step_time_s.p90} == entry["step_time_s"]
    assert f.tokens_per_s.median == entry["tokens_per_s"]
    assert f.step_time_s.n == f.counted == 29 and f.steps == 30, "the first step is six times as long and left out"
    assert f.exposed_comm_s.median == pytest.approx(entry["exposed_comm_s_per_step"]["all_gather"])
    assert f.peak_memory_bytes == max(entry["peak_memory_bytes"]) == 101 * MIB
    assert f.at_peak.total_bytes == f.peak_memory_bytes, "classes are those of the fullest rank"
    assert f.last_loss == entry["losses"][-1] and f.outside_bytes == 7 * MIB and f.mfu is not None


def test_what_was_not_measured_is_none_and_shown_as_a_dash():
    run = past("a", steps=0)
    both = Comparison.of([past("z"), run])
    row = both.rows[1]
    assert (row.figures.step_time_s, row.time_ratio, row.memory_ratio) == (None,) * 3 and "–" in repr(both)
    run.events.add(steps(0, 1))  # before any ledger step: no peak; exposed communication not known
    record = Comparison.of([run]).records()[0]
    assert record["mfu"] is None and record["peak_memory_bytes"] == 1001


def test_ratios_of_runs_in_rounds_are_paired_and_drift_falls_out_and_those_of_others_are_of_medians():
    """Each turn is 30 % slower than the one before; the ratio of the two is 1.25 throughout."""
    a = past("a", rounds=5, steps=50, drift=0.3)
    b = past("b", GRAD_OP, rounds=5, steps=50, drift=0.3, step_s=0.125, begin_unix_s=1e9 + 50)
    found = Comparison.of([a, b]).rows[1].time_ratio
    assert found is not None and found.pairing is Pairing.ROUNDS and found.n == 5
    assert 1.2 < found.p10 <= found.median <= found.p90 < 1.3 and found.clear
    found = Comparison.of([past("a"), past("b", step_s=0.11, begin_unix_s=2e9)]).rows[1].time_ratio
    assert found is not None and found.pairing is Pairing.MEDIANS
    assert found.median == pytest.approx(1.1, rel=0.03) and found.clear
    assert found.p10 is not None and found.p90 is not None and found.p10 < found.median < found.p90
    found = ratio([(1.0, 2.0)], [(2.0, 1.0)])
    assert found is not None and found.median == 2 and found.p10 is None and not found.clear, "too few steps"
    assert ratio([], [(1.0, 1.0)]) is None and ratio([(0.0, 0.0)], [(1.0, 1.0)]) is None


def test_a_baseline_is_chosen_by_place_label_or_id(three):
    assert Comparison.of(three, baseline=1).baseline == "B" == Comparison.of(three, baseline="b").baseline
    by_name = Comparison.of(three, names=["now", "then", "never"], baseline="then")
    assert by_name.baseline == "then" and by_name["now"].memory_ratio == pytest.approx(101 / 151)
    assert Comparison.of(three[::-1]).baseline == "B", "the first was refused: the next"
    none = Comparison.of(three, baseline=None)
    assert none.baseline is None and all(r.time_ratio is None and r.parity is None for r in none.rows)
    assert Comparison.of([]).rows == () and repr(Comparison.of([])) and Comparison.of([])._repr_html_()
    for wrong in ("Z", 3, -1, True, "C"):
        with pytest.raises(ArgumentError, match="baseline: .*; name one of A, B, C"):
            Comparison.of(three, baseline=wrong)
    for names in (["a"], ["a", "a", "b"], "abc", ["a", "", "b"]):
        with pytest.raises(ArgumentError, match="names: .*; give one name for each run"):
            Comparison.of(three, names=names)


def test_another_result_is_loud_and_what_was_refused_is_one_line_below_the_table_and_no_row(three):
    compared = Comparison.of([*three, past("w", GRAD_OP, loss_off=1.0)])
    assert compared["D"].differs and not compared["B"].differs
    text, html = repr(compared), compared._repr_html_()
    assert "NOT THE SAME COMPUTATION: D is different from step 0 on" in text and "✗ DIFFERENT from step 0" in text
    assert 'role="alert"' in html and "NOT THE SAME COMPUTATION" in html
    assert "equal bit for bit" in text and "NOT THE SAME" not in repr(Comparison.of(three))
    other = Refusal({"strategy": {"backend": "fsdp2", "sharding": "no_shard"}}, "FSDP2 always shards <gradients>")
    ddp = Refusal({"strategy": {"backend": "ddp"}}, "DDP shards nothing")
    failed = past("f", steps=0, state=RunState.FAILED, reason="CUDA out of memory on rank 1")
    assert "D failed: CUDA out of memory on rank 1" in repr(Comparison.of([*three, failed]))
    html = Comparison.of(three)._repr_html_()
    assert "&lt;gradients&gt;" in html and "<gradients>" not in html
    compared = Comparison.of([*three, other, ddp])
    assert [row[0] for row in compared.table().rows] == ["A", "B"]
    assert [r["label"] for r in compared.records()] == ["A", "B", "C", "D", "E"], "records keep them"
    (line,) = [note for note in compared.table().notes if "not in the table" in note]
    assert line == ("Refused, so not in the table: C fsdp2 zero1, D fsdp2 no_shard (FSDP2 always shards <gradients>); "
                    "E ddp full_shard (DDP shards nothing).")  # fmt: skip
    assert "not in the table" not in repr(Comparison.of(three[:2]))


def test_records_are_flat_and_have_one_set_of_keys(three):
    config = {"model_type": "gpt2", "n_layer": 1}
    records = Comparison.of([*three, past("d", SPEC.replace(model=config, precision="bf16"))]).records()
    assert all(list(r) == list(records[0]) for r in records)
    assert all(isinstance(v, str | int | float | None) for r in records for v in r.values())
    b = records[1]
    assert b["label"] == "B" and b["sharding"] == "shard_grad_op" and b["parity"] == "equal bit for bit"
    assert b["step_time_s_p10"] < b["step_time_s"] < b["step_time_s_p90"] and b["step_time_ratio"] < 0.85
    assert sum(b[f"{role.value}_bytes_at_peak"] for role in Role) == b["peak_memory_bytes"]
    assert records[2]["backend"] == "fsdp2" and records[2]["step_time_s"] is None and records[2]["model"] == "gpt2-10m"
    assert json.loads(records[3]["model"]) == config
    assert finite(Comparison.of([past("d", loss_off=math.nan)]).records())[0]["last_loss"] is None, "NaN is no JSON"


# -- what a run was, in figures and in a table ------------------------------------------------------------------------
KEYS = ["spec", "losses", "step_time_s", "tokens_per_s", "tflops_per_rank", "mfu", "mfu_per_rank", "hfu_per_rank",
        "peak_flops_source", "peak_memory_bytes", "memory_at_peak_bytes", "rss_bytes", "loading_bytes",
        "comm_s_per_step", "comm_bytes_per_step", "exposed_comm_s_per_step"]  # fmt: skip


def summary(spec: Spec, events: list[StepEvent]) -> dict[str, Any]:
    return summarize(spec, assemble(events))


def test_the_entry_has_the_keys_of_the_contract_and_is_json():
    entry = summary(SPEC, steps(0, 1, 2))
    assert list(entry) == KEYS and json.loads(json.dumps(entry)) == entry and entry["losses"] == [5.0, 4.0, 3.0]
    assert entry["tokens_per_s"] == 2000 and entry["tflops_per_rank"] == [0.01, 0.01]
    assert entry["peak_memory_bytes"] == [1000, 1001] and entry["rss_bytes"] == [5002, 5002]
    assert entry["comm_s_per_step"] == {"all_gather": 0.015}, "the mean over ranks"
    assert entry["comm_bytes_per_step"] == {"all_gather": 64}, "of one rank"


def test_medians_leave_out_first_steps_and_ledger_steps_and_losses_do_not():
    slow = steps(0, first_after_switch=True, step_time_s=9.0) + steps(3, ledger=True, step_time_s=5.0)
    entry = summary(SPEC, slow + steps(1, 2, 4))
    assert entry["step_time_s"] == {"median": 0.1, "p10": 0.1, "p90": 0.1} and len(entry["losses"]) == 5
    assert summary(SPEC, slow[:2])["step_time_s"]["median"] == 9.0, "a run of one step counts it"
    assert summary(SPEC, [])["step_time_s"]["median"] is None
    other = [*steps(2, 3, spec=GRAD_OP, step_time_s=0.5), *steps(4, 5, 6)]
    assert summary(SPEC, [*steps(0, 1), *other])["losses"] == [1.0, 0.0, -1.0], "of the Spec applied last"
    assert summary(GRAD_OP, other[:4])["step_time_s"]["median"] == 0.5
    entry = summary(SPEC, [event(0, 0, step_time_s=0.1), event(1, 0, step_time_s=0.4), event(0, 1)])
    assert entry["step_time_s"]["median"] == 0.4 and entry["tokens_per_s"] == 500, "of the slowest rank of whole steps"


def test_the_table_reads_as_text_and_as_html():
    told = assemble(steps(0, first_after_switch=True, memory=Memory()) + steps(1))
    table = step_table(told, {SPEC.id: SPEC}, caption="a <run>", notes=["shared"])
    text = repr(table)
    assert "0*" in text and "lab full_shard fp32" in text and "15.0 ms" in text and "note: shared" in text
    assert table.rows[0][table.columns.index("peak/rank")] == "–", "not measured yet"
    assert "10.0 GFLOPS" in text and "1001 B" in text
    html = table._repr_html_()
    assert "a &lt;run&gt;" in html and html.count("<tr>") == 3 and "tabular-nums" in html and len(table) == 2


def test_utilisation_is_relative_to_a_peak_with_its_source_and_recompute_makes_it_two():
    known = {"flops": 10**9, "peak_flops_per_s": 2e11, "peak_source": "a data sheet"}
    plain, again = steps(0, **known), steps(1, **known, recompute_flops=10**9 // 4)
    entry = summary(SPEC, again)
    assert entry["mfu"] == 0.05 and entry["mfu_per_rank"] == [0.05, 0.05] and entry["hfu_per_rank"] == [0.0625, 0.0625]
    assert entry["peak_flops_source"] == "a data sheet"
    table = step_table(assemble(plain), {})
    assert "HFU" not in table.columns and "note: MFU relative to 0.200 TFLOPS a rank (a data sheet)" in repr(table)
    table = step_table(assemble(plain + again), {})
    at = table.columns.index("HFU")
    assert [r[at - 1 : at + 1] for r in table.rows] == [("5.0%", "5.0%"), ("5.0%", "6.2%")]
    assert "MFU and HFU (HFU counts recompute) relative to" in repr(table)
    assert summary(SPEC, steps(0, peak_flops_per_s=None))["hfu_per_rank"] == [None, None]


def test_a_peak_that_was_raised_later_is_that_of_all_steps():
    low = {"flops": 10**9, "step_time_s": 0.01, "peak_flops_per_s": 1e11, "peak_source": "measured"}
    high = {**low, "step_time_s": 0.005, "peak_flops_per_s": 2e11, "peak_source": "reached, above measured"}
    events = [*steps(0, **low), *steps(1, 2, **high)]
    entry = summary(SPEC, events)
    assert entry["mfu_per_rank"] == [1.0, 1.0] and entry["peak_flops_source"] == "reached, above measured"
    found = figures(assemble(events)).mfu
    assert found is not None and (found.p10, found.median) == (0.6, 1.0)
    table = step_table(assemble(events), {})
    at = table.columns.index("MFU")
    assert [row[at] for row in table.rows] == ["50.0%", "100.0%", "100.0%"]
    assert "MFU relative to 0.200 TFLOPS a rank (reached, above measured)" in repr(table)
    old = {"flops": 10**9, "peak_flops_per_s": 1e11, "peak_source": "one slow product"}
    older = [*steps(0, step_time_s=0.004, **old), *steps(1, 2, step_time_s=0.005, **old)]
    assert summary(SPEC, older)["mfu_per_rank"] == [0.8, 0.8], "no more than 100 % is shown of an older file"
    assert "250.0%" not in repr(step_table(assemble(older), {}))


# -- which run to take, and what each toggle bought ---------------------------------------------------------------
KEEPS_GATHERED = {"sharding": "shard_grad_op"}
BF16 = {"precision": "bf16"}


def turned(run: str, place: int, step_s: float, peak_mib: int, changes: dict[str, Any], **more: Any) -> RecordedRun:
    """The `place`-th of a sweep of five rounds."""
    spec = SPEC.replace(**changes)
    return past(run, spec, steps=50, rounds=5, step_s=step_s, peak_mib=peak_mib, begin_unix_s=1e9 + 10 * place,
                **{"noise": 0.005, **more})  # fmt: skip


@pytest.fixture
def four() -> list[RecordedRun]:
    return [turned("a", 0, 0.100, 200, KEEPS_GATHERED), turned("b", 1, 0.112, 78, {}),
            turned("c", 2, 0.070, 120, {**KEEPS_GATHERED, **BF16}), turned("d", 3, 0.0756, 60, BF16)]  # fmt: skip


def test_the_fastest_and_the_smallest_near_it_and_what_does_not_fit_is_left_out(four):
    found = recommend(four)
    assert (found.fastest, found.smallest) == ("C", "D")
    assert found.sentences[0].startswith("The fastest that fits is C (shard_grad_op bf16): 2,8")
    assert "The smallest within 10% of its time is D (full_shard bf16)" in found.sentences[1]
    assert "61.0 MiB" in str(found)
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
    text = "full_shard instead of shard_grad_op: 55% less memory, 10% more time (median of 2 pairs)."
    assert sharding.sentence == text
    assert precision.sentence.startswith("bf16 instead of fp32: 31% less memory, 31% less time")
    one = recommend(four[:2]).toggles[0].sentence
    assert one == "full_shard instead of shard_grad_op: 61% less memory, 12% more time (B and A)."


def test_noise_is_called_noise():
    same = recommend([turned("a", 0, 0.1, 200, KEEPS_GATHERED), turned("b", 1, 0.1004, 100, {})]).toggles[0].sentence
    assert "50% less memory, time the same but for noise" in same
    nothing = [turned("a", 0, 0.1, 100, {}), turned("b", 1, 0.1, 100, {"forward_prefetch": 1})]
    assert "the same memory, time the same but for noise" in recommend(nothing).toggles[0].sentence
    faster = [turned("ab"[i], i, s, 100, {"forward_prefetch": i}) for i, s in enumerate((0.1, 0.08))]
    said = recommend(faster).toggles[0].sentence
    assert said.startswith("forward prefetch 1 instead of forward prefetch 0: the same memory, 20% less time")


@pytest.mark.parametrize(
    ("second_s", "said"), [(0.070, "7% less time in D and C"), (0.0757, "time in 1 pair the same but for noise")]
)
def test_pairs_that_contradict_each_other_are_told_one_by_one(four, second_s: float, said: str):
    runs = [*four[:2], turned("c", 2, 0.0756, 120, {**KEEPS_GATHERED, **BF16}), turned("d", 3, second_s, 60, BF16)]
    sentence = recommend(runs).toggles[0].sentence
    assert "55% less memory, 12% more time in B and A, " in sentence and f"{said} (median of 2 pairs)." in sentence


@pytest.mark.parametrize("peak_mib", [100, 60])
def test_of_what_is_not_told_apart_in_time_the_smallest_is_recommended(peak_mib: int):
    runs = [turned("a", 0, 0.1, 100, {}), turned("b", 1, 0.1003, peak_mib, KEEPS_GATHERED),
            turned("c", 2, 0.2, 50, BF16)]  # fmt: skip
    found = recommend(runs)
    taken = "A" if peak_mib == 100 else "B"
    assert found.fastest == found.smallest == taken
    assert found.fastest_run is found.smallest_run is runs["AB".index(taken)]
    assert f"is A or B, not told apart in time. The smallest of them is {taken} (" in found.sentences[0]
    compared = Comparison.of(runs)
    b, c = compared.table()._repr_html_().split("<tr>")[3:]
    assert "opacity" in b and "≈ 1.0" in b and "opacity" not in c and "≈" not in c.split("<p>")[0]
    assert "≈: not told apart in time from A." in compared.notes()


def test_what_is_another_work_or_result_or_was_not_measured_is_not_recommended_nor_judged_by(four):
    found = recommend([*four, turned("w", 4, 0.01, 10, {"backend": "fsdp2"}, loss_off=2.0)])
    assert found.fastest == "C" and "Not recommended, E: it does not compute the same" in str(found)
    assert all("E" not in pair for t in found.toggles for pair in t.pairs)
    other = turned("o", 4, 0.001, 10, {"model": "gpt2-1m"})
    linked = turned("l", 5, 0.001, 10, {"link": "10 GB/s"})
    unmeasured = turned("u", 6, 0.001, 0, {"wrap": "whole"})
    unmeasured.events = type(unmeasured.events)()
    refused = Refusal(SPEC.replace(backend="ddp", sharding="no_shard"), "no GPU is free")
    found = recommend([*four, other, linked, unmeasured, refused])
    assert found.fastest == "C"
    twice = recommend([*four, refused, refused])
    assert "no GPU is free" not in str(twice), "the comparison says it"
    assert found.excluded == {"E": "its model is not A's", "F": "its link is not A's",
                              "G": "finished before a step was measured",
                              "H": "refused"}  # fmt: skip


def test_it_says_what_the_figures_are_worth_and_escapes_what_it_shows():
    strange = past("a", SPEC.replace(data="/tmp/<b>"), notes=("a <shared> GPU",))
    found, html = recommend(Comparison.of([strange])), recommend([strange, past("b")])._repr_html_()
    assert "a <shared> GPU" in str(found) and "CPU and Gloo" in str(found)
    assert "&lt;shared&gt;" in html and "<b>The fastest" in html and "/tmp/<b>" not in html
    assert recommend([]).fastest is None
