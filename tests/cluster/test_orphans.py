"""No engine outlives its kernel, however and whenever that ends, unless it was asked to (test_detached.py)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_lab.base.process import marked
from fsdp_lab.cluster.engine_server import MODULE
from tests.waiting import until

OWNER = """
import os, signal, sys, time
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.spec.spec import Spec

if __name__ == "__main__":
    when = sys.argv[1]
    slow = when == "importing"  # for a minute
    cluster = Cluster(2, rank_module="tests.cluster.slow_import" if slow else "tests.cluster.fake_rank")
    print(cluster.token, flush=True)
    cluster.start()
    if when == "busy":
        cluster.call("apply", run="r", spec=Spec().replace(data="deaf").to_dict(), fresh=True)
        cluster.submit("train", steps=1000)
        time.sleep(0.5)
    if when == "resizing":
        print("ready", flush=True)
        cluster.resize(4)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("when", "number"), [
    ("busy", signal.SIGTERM), pytest.param("starting", signal.SIGKILL, marks=pytest.mark.slow),
    pytest.param("importing", signal.SIGKILL, marks=pytest.mark.slow),
    pytest.param("resizing", signal.SIGKILL, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_kernel_that_ends_takes_its_engines_with_it(when: str, number: signal.Signals, tmp_path: Path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, when], stdout=subprocess.PIPE, text=True, env=env)
    try:
        token = owner.stdout.readline().strip()
        if when == "importing":
            until(lambda: any(MODULE in p.cmdline() for p in marked(token)))
        elif when == "starting":
            until(lambda: marked(token))
        else:
            assert owner.stdout.readline() == "ready\n"
            assert len(marked(token)) >= 5, "a controller, two engines, their nannies"
    finally:
        owner.send_signal(number)
        owner.wait(10)
    until(lambda: not [*marked(token), *tmp_path.glob("fsdp_lab-*")], 15)  # neither a process nor a file
