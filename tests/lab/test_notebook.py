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


@pytest.mark.slow
def test_a_comparison_that_is_awaited_shows_how_far_it_is(tmp_path: Path):
    manager, client = start_new_kernel(env={**os.environ, "TMPDIR": str(tmp_path)}, kernel_name="python3")

    def bars(code: str) -> list[str]:
        """What the cell displayed, as HTML, each state of it."""
        told: list[str] = []
        client.execute_interactive(
            code, timeout=60, output_hook=lambda m: told.append(m["content"].get("data", {}).get("text/html", ""))
        )
        return [html for html in told if "<span>" in html]

    try:
        make = f"from fsdp_lab.lab import Lab\nlab = Lab(2, history=False, rank_module={FAKE!r}, progress="
        compare = 'sweep = await lab.compare(sharding=["full_shard", "no_shard"], steps=60)'
        started = bars(f"{make}True)")
        assert "<progress" in started[0] and "✓" in started[-1] and "ready (2 of 2)" in started[-1]
        *on_the_way, end = bars(compare)
        assert on_the_way and all('<progress max="120" value=' in html for html in on_the_way)
        assert "✓" in end and "120 of 120 steps" in end and "left" not in end
        begun, failed = bars("from fsdp_lab.runs.notebook import progress_bar\nwith progress_bar('measuring'): 1 / 0")
        assert "<progress>" in begun and "measuring: not ended" in failed
        assert bars("lab.close()") == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
