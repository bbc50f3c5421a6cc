"""Engines that are forked: each is a process of its own, that ends and is replaced as any other."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_lab.base.process import marked
from fsdp_lab.cluster import engine_server
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.engine_server import MODULE, forks, start_server
from tests.cluster.conftest import FAKE
from tests.waiting import until


def servers(cluster: Cluster) -> list[psutil.Process]:
    """The server itself: the engines that it forks have its command line."""
    return [p for p in marked(cluster.token) if MODULE in p.cmdline() and p.pid not in cluster.pids]


def facts() -> Any:
    import os
    import sys

    import numpy

    return os.getpid(), os.getcwd(), sys.path[0] in ("", os.getcwd()), os.environ.get("GIVEN"), numpy.random.rand()


@pytest.mark.slow
def test_each_engine_is_as_one_that_was_started_alone() -> None:
    stages = dict[str, None]()
    with Cluster(
        2, rank_module=FAKE, environment={"GIVEN": "yes"}, report=lambda p: stages.setdefault(p.stage)
    ) as cluster:
        assert list(stages) == ["starting engines", "importing torch", "joining ranks", "ready"]
        (server,) = servers(cluster)
        assert {psutil.Process(pid).ppid() for pid in cluster.pids} == {server.pid}
        assert {os.getsid(pid) for pid in cluster.pids} == {*cluster.pids}, "signals to one reach no other"
        told = cluster.client[cluster.engine_ids].apply_sync(facts)
        assert [one[:4] for one in told] == [(pid, os.getcwd(), True, "yes") for pid in cluster.pids]
        assert told[0][4] != told[1][4], "they do not draw the same numbers"
    assert not marked(cluster.token) and not server.is_running()


@pytest.mark.slow
def test_without_its_server_a_rank_is_replaced_all_the_same(cluster: Cluster) -> None:
    (server,) = servers(cluster)
    server.send_signal(signal.SIGKILL)
    server.wait(5)
    cluster.send_signal(1, signal.SIGKILL)
    until(lambda: cluster.lost)
    assert "rank 1 is gone" in str(cluster.lost[1])  # how it ended is known to the server alone
    cluster.resize(2)
    assert not cluster.lost and len(cluster.call("status")) == 2
    assert not servers(cluster)


@pytest.mark.slow
def test_where_no_socket_can_be_made_engines_are_started_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forks(0) and not forks(1), "a GPU's context cannot be forked"
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    assert start_server(deep, {}, FAKE) is None, "its path is too long for a socket"
    monkeypatch.setattr(engine_server, "SOCKET", "x" * 120)
    with Cluster(1, rank_module=FAKE) as cluster:
        assert not servers(cluster) and len(cluster.call("status")) == 1


def test_code_that_cannot_be_imported_is_said_by_the_rank() -> None:
    with pytest.raises(Exception, match="no_such_module"), Cluster(1, rank_module="tests.no_such_module"):
        pass
