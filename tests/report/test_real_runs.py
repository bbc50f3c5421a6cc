"""From a sweep on two real ranks to its comparison, its recommendation and its report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsdp_lab import Comparison, write_report
from fsdp_lab.lab import Lab
from fsdp_lab.runs import recommend
from fsdp_lab.runs.history import History
from fsdp_lab.runs.parity import Verdict
from fsdp_lab.runs.summary import Pairing


@pytest.mark.slow
def test_a_sweep_is_compared_recommended_and_reported(tmp_path: Path):
    with Lab(2, reduction="rank_ordered", progress=False) as lab:
        sweep = lab.compare(model="gpt2-1m", micro_batch=1, seq_len=64, sharding=["full_shard", "no_shard"],
                            backend=["lab", "fsdp2"], steps=18, rounds=3).wait(120)  # fmt: skip
    rows = [*sweep.in_order, *sweep.refused]
    compared = Comparison.of(rows)
    assert [(r.name, r.state) for r in compared.rows] == [
        ("lab full_shard", "finished"), ("fsdp2 full_shard", "finished"), ("lab no_shard", "finished"),
        ("fsdp2 no_shard", "refused")]  # fmt: skip
    assert [r.parity.verdict for r in compared.rows if r.parity] == [Verdict.EQUAL, Verdict.EQUAL]
    for row in compared.rows[1:3]:
        assert row.time_ratio is not None and row.time_ratio.pairing is Pairing.ROUNDS and row.time_ratio.n == 3
        assert row.memory_ratio is not None and 0.2 < row.memory_ratio < 5
    f = compared.rows[0].figures
    assert f.steps == 18 and f.counted <= 15 and f.peak_memory_bytes == f.at_peak.total_bytes and f.mfu is not None
    assert compared["C"].memory_ratio > 1, "a replica is larger than a shard"  # type: ignore[operator]
    found = recommend(compared)
    assert found.fastest is not None and "CPU" in " ".join(found.notes)
    assert any(re.match(r"full_shard instead of no_shard saved \d+% memory", t.sentence) for t in found.toggles)
    text = write_report(tmp_path / "sweep.html", rows).read_text(encoding="utf-8")
    kept = json.loads(text.split('id="fsdp-lab-records">')[1].split("</script>")[0])
    assert [r["step_time_s"] for r in kept["records"]] == [r["step_time_s"] for r in compared.records()]
    assert 'id="plot-timeline0"' in text and f"<dd>{sweep.runs[0].environment['torch']}</dd>" in text
    past = History().runs()  # from disk, when the ranks are gone
    again = Comparison.of([*(past[run.id] for run in sweep.in_order), *sweep.refused])
    assert again.records() == compared.records() and repr(again) == repr(compared)
    later = write_report(tmp_path / "later.html", [past[run.id] for run in sweep.in_order], title="later")
    assert 'id="plot-timeline0"' in later.read_text(encoding="utf-8")
