"""What a run was, in figures and in a table."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st

from fsdp_lab.base.events import StepEvent
from fsdp_lab.base.formatting import duration, size
from fsdp_lab.runs.steps import assemble
from fsdp_lab.runs.summary import figures, quantile, step_table, summarize
from fsdp_lab.spec.spec import Spec
from tests.lab.events import SPEC, event, steps

KEYS = ["spec", "losses", "step_time_s", "tokens_per_s", "tflops_per_rank", "mfu", "mfu_per_rank", "hfu_per_rank",
        "peak_flops_source", "peak_memory_bytes", "memory_at_peak_bytes", "rss_bytes", "loading_bytes",
        "comm_s_per_step", "comm_bytes_per_step", "exposed_comm_s_per_step"]  # fmt: skip


def summary(spec: Spec, events: list[StepEvent]) -> dict[str, Any]:
    return summarize(spec, assemble(events))


def test_the_entry_has_the_keys_of_the_contract_and_is_json():
    entry = summary(SPEC, steps(0, 1, 2))
    assert list(entry) == KEYS and json.loads(json.dumps(entry)) == entry
    assert entry["losses"] == [5.0, 4.0, 3.0]
    assert entry["tokens_per_s"] == 2000 and entry["tflops_per_rank"] == [0.01, 0.01]
    assert entry["peak_memory_bytes"] == [1000, 1001] and entry["rss_bytes"] == [5002, 5002]
    assert entry["comm_s_per_step"] == {"all_gather": 0.015}, "the mean over ranks"
    assert entry["comm_bytes_per_step"] == {"all_gather": 64}, "of one rank"


def test_medians_leave_out_first_steps_and_ledger_steps_and_losses_do_not():
    slow = steps(0, first_after_switch=True, step_time_s=9.0) + steps(3, ledger=True, step_time_s=5.0)
    entry = summary(SPEC, slow + steps(1, 2, 4))
    assert entry["step_time_s"] == {"median": 0.1, "p10": 0.1, "p90": 0.1}
    assert len(entry["losses"]) == 5
    assert summary(SPEC, slow[:2])["step_time_s"]["median"] == 9.0, "a run of one step counts it"
    assert summary(SPEC, [])["step_time_s"]["median"] is None
    entry = summary(SPEC, [event(0, 0, step_time_s=0.1), event(1, 0, step_time_s=0.4), event(0, 1)])
    assert entry["step_time_s"]["median"] == 0.4 and entry["tokens_per_s"] == 500, "of the slowest rank of whole steps"


def test_figures_are_of_the_spec_applied_last():
    other = SPEC.replace(sharding="shard_grad_op")
    events = steps(0, 1) + steps(2, 3, spec=other, step_time_s=0.5) + steps(4, 5, 6)
    assert summary(SPEC, events)["losses"] == [1.0, 0.0, -1.0]
    assert summary(other, events[:8])["step_time_s"]["median"] == 0.5


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_quantiles_lie_between_the_extremes_and_do_not_cross(values: list[float], q: float):
    got = quantile(values, q)
    assert got is not None and min(values) <= got <= max(values) + 1e-6
    assert quantile(values, 0.0) == min(values) and quantile(values, 1.0) == max(values)


def test_the_table_reads_as_text_and_as_html():
    told = assemble(steps(0, first_after_switch=True) + steps(1))
    table = step_table(told, {SPEC.id: SPEC}, caption="a <run>", notes=["shared"])
    text = repr(table)
    assert "0*" in text and "lab full_shard fp32" in text and "15.0 ms" in text and "note: shared" in text
    html = table._repr_html_()
    assert "a &lt;run&gt;" in html and html.count("<tr>") == 3 and "tabular-nums" in html
    assert len(table) == 2


def test_utilisation_is_relative_to_a_peak_with_its_source_and_recompute_makes_it_two():
    known = {"flops": 10**9, "peak_flops_per_s": 2e11, "peak_source": "a data sheet"}
    plain, again = steps(0, **known), steps(1, **known, recompute_flops=10**9 // 4)
    entry = summary(SPEC, again)
    assert entry["mfu"] == 0.05 and entry["mfu_per_rank"] == [0.05, 0.05] and entry["hfu_per_rank"] == [0.0625, 0.0625]
    assert entry["peak_flops_source"] == "a data sheet"
    table = step_table(assemble(plain), {})
    assert "HFU" not in table.columns and "note: MFU relative to 0.2 TFLOPS a rank (a data sheet)" in repr(table)
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
    assert "MFU relative to 0.2 TFLOPS a rank (reached, above measured)" in repr(table)


def test_no_utilisation_above_100_percent_is_shown_of_an_older_file():
    old = {"flops": 10**9, "peak_flops_per_s": 1e11, "peak_source": "one slow product"}
    events = [*steps(0, step_time_s=0.004, **old), *steps(1, 2, step_time_s=0.005, **old)]
    assert summary(SPEC, events)["mfu_per_rank"] == [0.8, 0.8]
    assert "250" not in repr(step_table(assemble(events), {}))


def test_figures_for_people():
    assert [size(x) for x in (None, 12, 2048, 3.5 * 2**20, 2**33)] == ["–", "12 B", "2.00 KiB", "3.50 MiB", "8.00 GiB"]
    assert [duration(x) for x in (0.0032, 0.25, 1.5)] == ["3.20 ms", "250 ms", "1.50 s"]
