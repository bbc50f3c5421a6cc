"""Hosts that share no folder: state is carried all the same, when ranks change and when a host dies, and a run outlives
what heals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState
from fsdp_lab.runs.recovery import REPLICA, RecoveryPolicy
from tests.hosts.machines import Site, SshServers, end, site
from tests.waiting import until

pytestmark = pytest.mark.nightly  # on one host tests/lab/test_recovery.py has it
WORK = {"model": "gpt2-1m", "seq_len": 32, "micro_batch": 2}
STEPS = 40


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Site, SshServers]]:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (tmp_path / "ssh").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with site(["alpha", "beta"], 10) as made:
        servers = SshServers(made, tmp_path / "ssh", pinned=True, temporary=temporary)
        yield made, servers
        servers.close()
    assert list(temporary.iterdir()) == []


def losses(run: Run) -> dict[int, float]:
    return {step.number: step.mean_loss for step in run.events.steps()}


def test_state_is_carried_to_other_ranks_past_what_heals_and_from_a_host_that_dies(
    apart: tuple[Site, SshServers],
) -> None:
    made, servers = apart
    beta = made.machines[1]
    with Lab.ssh("alpha,beta", ranks_per_host=1, ssh_args=["-F", str(servers.config)], history=False, progress=False,
                 cut_s=4.0) as lab:  # fmt: skip
        expected = losses(lab.run(**WORK, steps=STEPS, sharding="full_shard").wait(120))

        run = lab.run(**WORK, steps=STEPS, sharding="full_shard")
        until(lambda: run.step > 2, 60, "it trains")
        run.pause()
        grown = run.apply(world_size=4, micro_batch=1).wait(90)
        assert [s.host for s in lab.cluster.status()] == ["alpha"] * 2 + ["beta"] * 2
        shrunk = run.apply(world_size=1, micro_batch=4, sharding="no_shard").wait(90)
        assert grown.carried and shrunk.carried and [s.host for s in lab.cluster.status()] == ["alpha"]
        run.resume()
        run.wait(120)
        told = losses(run)
        assert told.keys() == expected.keys()
        assert all(told[step] == pytest.approx(loss, rel=1e-4) for step, loss in expected.items())

        lab.resize(2)
        policy = RecoveryPolicy(how="auto", ranks="fewer")
        run = lab.run(**WORK, steps=STEPS, sharding="no_shard", recover=policy)
        until(lambda: run.step > 2, 60, "it trains")
        servers.servers["beta"].kill()
        beta.cable("down")
        time.sleep(1.0)  # shorter than `cut_s`
        beta.cable("up")
        before = run.step
        until(lambda: run.step > before + 2, 60, "it goes on")
        assert not run.incidents and not run.done and lab.ranks == 2
        beta.cable("down")
        end(beta.pids)
        run.wait(120)
        assert run.state is RunState.FINISHED and run.incidents[0].source == REPLICA
        assert "beta" in run.incidents[0].sentence
        assert all(losses(run)[step] == pytest.approx(loss, rel=1e-4) for step, loss in expected.items())
        beta.cable("up")
