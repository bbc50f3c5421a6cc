"""No engine outlives its kernel, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_lab.cluster.processes import marked

OWNER = """
import os, signal, sys, time
from fsdp_lab.cluster import Cluster
from fsdp_lab.spec import Spec

if __name__ == "__main__":
    cluster = Cluster(2, rank_module="tests.cluster.fake_rank").start()
    cluster.call("apply", run="r", spec=Spec().replace(data="deaf").to_dict(), fresh=True)
    cluster.submit("train", steps=1000)
    time.sleep(0.5)
    print(cluster._token, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_kernel_takes_its_busy_engines_with_it(number: signal.Signals, tmp_path: Path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert owner.stdout is not None
        token = owner.stdout.readline().strip()
        assert len(marked(token)) >= 5, "a controller, two engines, their nannies"
    finally:
        owner.send_signal(number)
        owner.wait(10)
    deadline = time.monotonic() + 8
    while (left := marked(token)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    while list(tmp_path.glob("fsdp_lab-*")) and time.monotonic() < deadline + 3:
        time.sleep(0.1)
    assert list(tmp_path.glob("fsdp_lab-*")) == [], "its private files are gone too"
