"""The user's own ipyparallel cluster: used as it is, never ended."""

from __future__ import annotations

import ipyparallel as ipp
import psutil
import pytest

from fsdp_lab.cluster import RankError, StartError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState
from tests.cluster.conftest import FAKE
from tests.waiting import until


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Two engines that somebody started in a profile of theirs, and IPython's folder with it."""
    home = tmp_path_factory.mktemp("ipython")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(home))
        cluster = ipp.Cluster(
            n=2, profile_dir=str(home / "profile_theirs"), cluster_id="mine", log_level=40, delay=0, load_profile=False,
            controller_args=["--HeartMonitor.period=200"],
        )  # fmt: skip
        client = cluster.start_and_connect_sync(activate=False)
        yield cluster, client
        client.close()
        cluster.stop_cluster_sync()


@pytest.mark.parametrize("by", ["cluster", "client", "profile"])
def test_a_given_cluster_is_used_and_left_running(theirs, by: str):
    cluster, client = theirs
    given = {"cluster": cluster, "client": client, "profile": "theirs"}[by]
    with Lab(cluster=given, rank_module=FAKE, progress=False) as lab:
        assert lab.ranks == 2 and not lab.cluster.owned
        assert lab.run(steps=3).wait(20).step == 3
        pids = lab.cluster.pids
        if by == "cluster":
            with pytest.raises(StartError, match="3 ranks were asked for|more engine"):
                lab.run(world_size=3).wait(20)
        left = lab.run()
        until(lambda: left.step > 1)
    assert left.state is RunState.STOPPED and left.reason == "the lab was closed"
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert client[:].apply_sync(int) == [0, 0], "they answer their owner"


def test_a_second_lab_takes_over_and_the_first_is_told(theirs):
    first = Lab(cluster=theirs[0], rank_module=FAKE)
    with Lab(cluster=theirs[0], rank_module=FAKE) as second:
        with pytest.raises(RankError, match="another lab has taken these ranks over"):
            first.run(steps=1).wait(10)
        first.close()
        assert second.run(steps=2).wait(10).step == 2


def test_fewer_ranks_than_engines_are_taken_and_more_are_refused(theirs):
    with Lab(1, cluster="mine", rank_module=FAKE) as lab:
        assert (lab.ranks, lab.most_ranks) == (1, 2) and lab.run(steps=2).wait(20).events.ranks == (0,)
    with pytest.raises(StartError, match="3 ranks were asked for and the given cluster has 2 engines"):
        Lab(3, cluster=theirs[0], rank_module=FAKE)
    with pytest.raises(StartError, match="neither a running profile nor a cluster id 'nowhere'"):
        Lab(cluster="nowhere")
    with pytest.raises(StartError, match="not running"):
        Lab(cluster=ipp.Cluster(n=1, log_level=40))
