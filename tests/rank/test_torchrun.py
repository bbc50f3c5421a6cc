"""A rank needs no notebook: `torchrun -m fsdp_lab.rank spec.json` trains the same Spec."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.base.events import StepEvent
from fsdp_lab.rank import __main__ as program
from tests.rank.test_session import spec


@pytest.mark.slow
def test_each_step_is_a_line_of_json_and_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    (file := tmp_path / "spec.json").write_text(spec().to_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
               "--standalone", "-m", "fsdp_lab.rank", str(file), "--steps", "100000"]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert all(lines), error
    events = [StepEvent.from_dict(json.loads(line)) for line in lines]
    assert [e.step for e in events] == [0, 1, 2] and {e.rank for e in events} == {0}
    assert events[0].comm["all_gather"].calls > 0 and process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_another_number_of_ranks_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "spec.json").write_text(spec().to_json())
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "argv", ["fsdp_lab.rank", str(file)])
    assert program.main() == 2
    wanted = "world_size: the Spec needs 2 ranks and torchrun started 1; give torchrun --nproc-per-node 2"
    assert wanted in capsys.readouterr().err
