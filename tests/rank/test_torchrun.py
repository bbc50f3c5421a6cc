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
from fsdp_lab.spec.spec import Spec

SMALL = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 384, "n_positions": 32}


def start(tmp_path: Path, spec: Spec, *options: str, ranks: int = 2) -> subprocess.Popen[str]:
    file = tmp_path / "spec.json"
    file.write_text(spec.to_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", "0",
               "--standalone", "-m", "fsdp_lab.rank", str(file), *options]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def tiny(**changes: object) -> Spec:
    return Spec().replace(model=SMALL, seq_len=32, micro_batch=2, **changes)


@pytest.mark.slow
def test_each_step_is_a_line_of_json(tmp_path: Path) -> None:
    process = start(tmp_path, tiny(), "--steps", "3")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    events = [StepEvent.from_dict(json.loads(line)) for line in out.splitlines()]
    assert [e.step for e in events] == [0, 1, 2] and {e.rank for e in events} == {0}
    assert events[0].comm["all_gather"].calls > 0


@pytest.mark.slow
def test_another_number_of_ranks_is_refused_in_a_sentence(tmp_path: Path) -> None:
    process = start(tmp_path, tiny(), ranks=1)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "world_size: the Spec needs 2 ranks and torchrun started 1; give torchrun --nproc-per-node 2" in err


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, tiny(), "--steps", "100000")
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
