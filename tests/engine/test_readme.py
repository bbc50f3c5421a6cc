"""The engine's example in the reference runs as it stands, under torchrun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ENDING = """
import glob  # a thread of Gloo's that is left may need the interpreter when it ends, and torch would abort
threads = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
assert not any("gloo" in name for name in threads), threads
assert len(whole) == 8 and all(t.isfinite().all() for t in whole.values())
torch.manual_seed(0)  # the same numbers again, without shards: all ranks had one batch
plain = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
optimizer = torch.optim.AdamW(plain.parameters())
for _ in range(3):
    optimizer.zero_grad()
    plain(torch.randn(8, 32)).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    optimizer.step()
assert expected > 0.05, expected  # something was clipped
torch.testing.assert_close(norm.to_local(), expected)
torch.testing.assert_close(whole, {name: p.detach() for name, p in plain.named_parameters()})
"""


@pytest.mark.slow
def test_the_example_in_the_reference_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPO / "notebooks" / "reference.md").read_text(encoding="utf-8"), re.S)
    (example,) = [b for b in blocks if "fsdp_lab.engine" in b]
    script = tmp_path / "example.py"
    script.write_text(example + ENDING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=REPO)
    assert done.returncode == 0, done.stderr[-2000:]
    norms = {line for line in done.stdout.splitlines() if "tensor" in line}
    assert len(norms) == 1, done.stdout  # both ranks see the same whole parameter
