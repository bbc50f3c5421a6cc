"""A kernel is killed, and the next one goes on with its ranks as if nothing had happened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fsdp_lab.base.process import marked
from fsdp_lab.cluster import ClusterError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState
from tests.lab.test_lab import until

KERNEL = """
import sys, time
from fsdp_lab.lab import Lab

if __name__ == "__main__":
    lab = Lab(2, reduction="rank_ordered", persist=True, progress=False)
    run = lab.run(model="gpt2-1m", micro_batch=1, seq_len=64, sharding="shard_grad_op", seed=3)
    while run.step < 5:
        time.sleep(0.01)
    lab.history.flush()
    print(run.id, lab.cluster.token, *lab.cluster.pids, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def told(run: Run) -> dict[int, tuple[float, int | None]]:
    """Loss and checksum of the parameters by step."""
    return {e.step: (e.mean_loss, e.checksum) for e in run.events.since()[0] if e.rank == 0}


@pytest.mark.slow
def test_a_new_kernel_goes_on_with_the_ranks_of_one_that_was_killed(temporary: Path):
    former = subprocess.Popen([sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, text=True)
    assert former.stdout is not None
    run_id, token, *pids = former.stdout.readline().split()
    former.kill()  # while it trains
    former.wait()

    with Lab(2, reduction="rank_ordered", persist=True, progress=False) as lab:
        assert lab.attached and lab.persistent and lab.cluster.pids == [int(pid) for pid in pids]
        spec, step = lab.spec, lab.rank_status()[0].step
        assert (spec.workload.seed, spec.strategy.sharding) == (3, "shard_grad_op") and step is not None and step >= 5
        assert lab.runs()[0].id == run_id and lab.runs()[0].state is RunState.LOST

        going_on = lab.run(lab.spec, fresh=False, steps=9).wait(60)
        assert going_on.switches[0].carried and sorted(told(going_on)) == [*range(step, step + 9)]
        until(lambda: all(s.heartbeat is not None for s in lab.rank_status()), 15)
        ports = [c for p in marked(token) for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert len(ports) > 4 and {c.laddr.ip for c in ports} == {"127.0.0.1"}, "torch's ports too"
        again = lab.run(spec, steps=step + 9).wait(60)
        undisturbed = told(again)
        assert {n: undisturbed[n] for n in told(going_on)} == told(going_on), "losses and parameters, bit for bit"
        left = lab.run(spec, fresh=False)
        until(lambda: left.step > again.step)
        lab.detach()
        assert lab.closed and left.state is RunState.STOPPED and "left the ranks" in left.reason
    with Lab(2, reduction="rank_ordered", persist=True, progress=False) as lab:
        assert lab.attached and lab.cluster.pids == [int(pid) for pid in pids]
        assert lab.rank_status()[0].step == left.step
    assert marked(token) == [] and list(temporary.glob("fsdp_lab-*")) == []


def test_ranks_that_are_not_persistent_cannot_be_detached(lab: Lab):
    with pytest.raises(ClusterError, match="make it with Lab\\(persist=True\\)"):
        lab.detach()
    assert not lab.closed and not lab.persistent and not lab.attached
