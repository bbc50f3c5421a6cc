"""The engine's example in the README runs as it stands, under torchrun, with torch alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ENDING = """
import time
assert len(whole) == 8 and all(t.isfinite().all() for t in whole.values())
torch.distributed.destroy_process_group()
time.sleep(0.3)  # a thread of Gloo that still holds a tensor when Python ends would abort the process
"""


def test_the_example_in_the_readme_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(encoding="utf-8"), re.S)
    (example,) = [b for b in blocks if "fsdp_lab.engine" in b]
    script = tmp_path / "example.py"
    script.write_text(example + ENDING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=REPO)
    assert done.returncode == 0, done.stderr[-2000:]
    norms = {line for line in done.stdout.splitlines() if "tensor" in line}
    assert len(norms) == 1, done.stdout  # both ranks see the same whole parameter
