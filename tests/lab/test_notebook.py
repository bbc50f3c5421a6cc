"""What only IPython brings: `%%px` on the ranks, and cells that are run again."""

from __future__ import annotations

import subprocess
import sys

from tests.cluster.conftest import FAKE

SESSION = f"""
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()

def cell(code):
    shell.run_cell(code).raise_error()

FIRST = "from fsdp_lab.lab import Lab\\nlab = Lab(2, rank_module={FAKE!r})\\nrun = lab.run(steps=3).wait()"
cell(FIRST)
cell("%px square = rank ** 2")
cell("assert lab.client[lab.cluster.engine_ids]['square'] == [0, 1]")
cell("%%px\\nassert model is session.model and world_size == 2")
cell("former, pids = lab, lab.cluster.pids")
cell(FIRST)
cell("assert former.closed and not lab.closed and pids != lab.cluster.pids")
cell("%px cube = rank ** 3")
cell("assert lab.client[lab.cluster.engine_ids]['cube'] == [0, 1]")
cell("lab.close()")
print("all well")
"""


def test_cells_of_a_notebook():
    done = subprocess.run([sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=90)
    assert "all well" in done.stdout, done.stdout + done.stderr
