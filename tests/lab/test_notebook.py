"""What only IPython brings: `%%px` on the ranks, and cells that are run again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from tests.cluster.conftest import FAKE

SESSION = f"""
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()

def cell(code):
    shell.run_cell(code).raise_error()

FIRST = "from fsdp_lab.lab import Lab\\nlab = Lab(2, rank_module={FAKE!r})\\nrun = lab.run(steps=3).wait()"
cell(FIRST)
cell("from fsdp_lab.cluster.detached import detached_clusters")
cell("%px square = rank ** 2")
cell("assert lab.client[lab.cluster.engine_ids]['square'] == [0, 1]")
cell("%%px\\nassert model is session.model and world_size == 2")
cell("former, pids = lab, lab.cluster.pids")
cell(FIRST)
cell("assert former.closed and not lab.closed and pids != lab.cluster.pids")
cell("%px cube = rank ** 3")
cell("assert lab.client[lab.cluster.engine_ids]['cube'] == [0, 1]")
PERSISTENT = FIRST.replace("rank_module", "persist=True, rank_module")
cell(PERSISTENT)
cell("former, pids = lab, lab.cluster.pids")
cell(PERSISTENT)
cell("assert former.closed and lab.attached and lab.cluster.pids == pids")
cell(PERSISTENT.replace("Lab(2", "Lab(1"))
cell("assert not lab.attached and [c.pids for c in detached_clusters()] == [tuple(lab.cluster.pids)]")
cell("lab.close()")
print("all well")
"""


@pytest.mark.slow
def test_cells_of_a_notebook(tmp_path: Path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=120, env=env)
    assert "all well" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_kernel_that_is_restarted_finds_its_ranks_by_the_same_cell(tmp_path: Path):
    env = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "JPY_SESSION_NAME": "mine.ipynb",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    manager, client = start_new_kernel(env=env, kernel_name="python3")

    def cell(code: str) -> str:
        said: list[str] = []
        reply = client.execute_interactive(
            code, timeout=60, output_hook=lambda m: said.append(m["content"].get("text", ""))
        )
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(said)

    def restart(now: bool) -> None:
        manager.restart_kernel(now=now)
        client.wait_for_ready(60)

    try:
        make = f"from fsdp_lab.lab import Lab\nlab = Lab(2, persist=True, rank_module={FAKE!r}, progress=False)"
        pids = cell(f"{make}\nrun = lab.run()\nwhile run.step < 3: pass\nprint(lab.attached, lab.cluster.pids)")
        for now in (False, True):
            restart(now)
            assert cell(f"{make}\nprint(lab.attached, lab.cluster.pids)") == pids.replace("False", "True")
        steps = cell(
            "run = lab.run(lab.spec, fresh=False, steps=1).wait()\nprint(run.switches[0].carried, run.step > 3)"
        )
        assert steps == "True True\n"
        cell("lab.close()")
        assert list(tmp_path.glob("fsdp_lab-*")) == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
