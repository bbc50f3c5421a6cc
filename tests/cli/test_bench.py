"""`fsdp-lab bench live` on real ranks, small: what it prints is what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_lab.cli.main import main


@pytest.mark.slow
def test_live_measures_start_switches_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "live", "--model", "gpt2-1m", "--rounds", "1", "--json", str(file)]) == 0
    seconds = json.loads(file.read_text())["seconds"]
    assert {name: len(waits) for name, waits in seconds.items()} == {
        "start to ranks ready": 1, "start to first step": 1, "switch to first step": 7, "stop": 3}  # fmt: skip
    assert 0 < seconds["start to ranks ready"][0] < seconds["start to first step"][0] < 90
    assert all(0 < s < 60 for s in seconds["switch to first step"])
    assert all(0 <= s < 10 for s in seconds["stop"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in seconds)


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "live", "--json", "/nowhere/at/all.json"]) == 2
    assert "cannot be written" in capsys.readouterr().err
