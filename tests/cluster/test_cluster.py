"""Real ipyparallel engines: started, called, interrupted, lost, replaced, ended. The ranks need no torch."""

import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.process import marked
from fsdp_lab.cluster import ClusterError, RankError, RankLost, StartError, assembly, engine_server
from fsdp_lab.cluster.cluster import Cluster
from fsdp_lab.cluster.engine_server import MODULE, forks, used_gpu
from fsdp_lab.cluster.nvml import GpuStatus
from fsdp_lab.cluster.placement import Host
from tests.cluster.conftest import FAKE, order
from tests.waiting import until


def test_ranks_know_their_place(cluster: Cluster):
    told = cluster.call("status")
    assert [t["rank"] for t in told] == [0, 1] and [t["pid"] for t in told] == cluster.pids
    for s in cluster.status():
        assert s.alive and s.state == "idle" and s.device == "cpu" and s.host == socket.gethostname()
        assert s.rss_bytes > 10**7


def test_nothing_listens_beyond_this_machine_and_only_its_user_reads_its_keys(cluster: Cluster):
    ours = {p.pid for p in marked(cluster.token)}
    ports = [c for c in psutil.net_connections("tcp") if c.pid in ours and c.status == psutil.CONN_LISTEN]
    assert ports and {c.laddr.ip for c in ports} == {"127.0.0.1"}
    assert cluster.client.curve_serverkey and cluster.client.session.auth is not None, "encrypted and signed"
    (folder,) = {Path(name) for p in marked(cluster.token) if (name := p.environ().get("IPP_PROFILE_DIR"))}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    key = cluster.client.session.key.decode()
    assert key and key not in " ".join(word for p in marked(cluster.token) for word in p.cmdline())
    secret = [f for f in folder.rglob("*") if f.is_file() and key in f.read_text(errors="replace")]
    assert len(secret) == 3, "controller's, client's and engines'"
    assert {stat.S_IMODE(f.stat().st_mode) for f in secret} == {0o600}


def test_cells_on_the_ranks_reach_them_by_name_and_a_dropped_model_leaves_none(cluster: Cluster):
    for _ in range(12):  # a client that is just made hears all that the ranks print
        told = cluster.client[cluster.engine_ids].execute("print(rank)", silent=False)
        assert told.wait(10) and told.wait_for_output(5) and told.stdout == ["0\n", "1\n"]
        cluster.client.close(linger=0)
        cluster.membership.engines._user_client = None
    view = cluster.client[cluster.engine_ids]
    view.execute("got = (rank, world_size, device, model.name, session.rank); model").get(10)
    assert view.pull("got", block=True) == [(0, 2, "cpu", "gpt2-10m", 0), (1, 2, "cpu", "gpt2-10m", 1)]
    cluster.call("unload")
    view.execute("left = [model, Out, [n for n in list(globals()) if n.startswith('_') and n[1:].isdigit()]]").get(10)
    assert view.pull("left", block=True) == [[None, {}, []]] * 2
    assert view.pull("got", block=True)[1][0] == 1, "the user's own names stay"


def test_every_event_arrives_while_it_runs(cluster: Cluster):
    heard = []
    call = cluster.submit("train", take=lambda data: heard.extend(data["events"]), steps=40)
    until(lambda: heard)
    assert call.pending, "they come while the chunk runs"
    results = call.results(20)
    until(lambda: len(heard) == 80)
    told = sorted((e["rank"], e["step"]) for e in heard)
    assert told == [(rank, step) for rank in (0, 1) for step in range(40)]
    assert [[e["step"] for e in r["events"]] for r in results] == [list(range(40))] * 2
    assert [s.step for s in cluster.status()] == [40, 40]


def test_an_interrupt_ends_the_chunk_on_all_ranks_alike_and_a_call_that_waits_behind_it_is_done(cluster: Cluster):
    heard = []
    call = cluster.submit("train", take=lambda data: heard.extend(data["events"]), steps=10_000)
    asked = cluster.submit("status")
    while not heard:
        time.sleep(0.01)
    assert [s.state for s in cluster.status()] == ["train", "train"] and asked.pending == [0, 1]
    cluster.interrupt()
    results = call.results(5)
    assert all(r["stopped"] for r in results) and len({r["step"] for r in results}) == 1
    assert len(asked.results(5)) == 2 and [s.state for s in cluster.status()] == ["idle", "idle"]
    step = results[0]["step"]
    assert [r["step"] for r in cluster.call("train", steps=3)] == [step + 3] * 2, "they go on from there"


def test_only_listed_methods_can_be_called_and_a_failed_step_holds_nothing_on_the_rank(cluster: Cluster):
    for method in ("close", "namespace", "_renew", "__init__"):
        with pytest.raises(RankError, match=f"{method} is no method of Session"):
            cluster.call(method)
    order(cluster, "raise-all")
    with pytest.raises(SpecError):
        cluster.call("train", steps=10)
    view = cluster.client[cluster.engine_ids]
    view.execute("import sys; held = [hasattr(sys, 'last_value'), hasattr(sys, 'last_traceback')]").get(10)
    assert view.pull("held", block=True) == [[False, False]] * 2


def test_a_killed_rank_is_noticed_said_and_replaced(cluster: Cluster):
    said = []
    cluster.on_lost(said.append)
    keeper = cluster.pids[0]
    call = cluster.submit("train", steps=10_000)
    until(lambda: cluster.status()[1].state == "train")
    os.kill(cluster.pids[1], signal.SIGKILL)
    with pytest.raises(RankLost, match=r"rank 1 is gone: its process \d+ on .* was ended by SIGKILL .* during train"):
        call.results()
    assert [(lost.rank, lost.doing) for lost in said] == [(1, "train")]
    dead = cluster.status()[1]
    assert not dead.alive and dead.state == "gone" and "SIGKILL" in dead.reason
    with pytest.raises(RankLost):
        cluster.call("status")

    cluster.resize(2)
    assert cluster.lost == {} and cluster.pids[0] == keeper and psutil.pid_exists(cluster.pids[1])
    assert [t["rank"] for t in cluster.call("status")] == [0, 1]


def test_a_rank_whose_gpu_failed_is_lost_and_replaced(cluster: Cluster):
    """Every later call to the GPU would raise the same error."""
    keeper, failed = cluster.pids
    order(cluster, "cuda:1")
    with pytest.raises(RankLost, match=r"rank 1 is gone: .* had an error of its GPU \(CUDA error: device-side assert"):
        cluster.call("train", steps=10)
    cluster.resize(2)
    assert cluster.pids[0] == keeper and cluster.pids[1] != failed and not psutil.pid_exists(failed)
    assert [t["rank"] for t in cluster.call("status")] == [0, 1]


def test_another_number_of_ranks_and_an_idle_one_that_dies_is_noticed_too(cluster: Cluster):
    kept = cluster.pids
    cluster.resize(3)
    assert cluster.pids[:2] == kept and [t["rank"] for t in cluster.call("status")] == [0, 1, 2]
    cluster.resize(1)
    assert cluster.pids == kept[:1]
    until(lambda: not psutil.pid_exists(kept[1]))
    assert cluster.lost == {}, "an end that is meant is no loss"
    os.kill(cluster.pids[0], signal.SIGTERM)
    until(lambda: cluster.lost)
    assert cluster.lost[0].doing == "nothing" and not cluster.status()[0].alive


@pytest.mark.slow
def test_a_lost_controller_is_noticed_said_and_replaced(cluster: Cluster):
    call = cluster.submit("train", steps=10_000)
    os.kill(cluster.membership.engines.controller_pid, signal.SIGKILL)
    with pytest.raises(RankLost, match="out of reach, because ipyparallel's controller was ended by SIGKILL"):
        call.results()
    former = cluster.token
    cluster.resize(2)
    assert [t["rank"] for t in cluster.call("status")] == [0, 1] and marked(former) == []


# -- clusters of their own -----------------------------------------------------------------------------------------
@pytest.mark.slow
def test_close_ends_a_deaf_rank_and_leaves_nothing(temporary: Path):
    before = set(psutil.Process().children(recursive=True))
    cluster = Cluster(2, rank_module=FAKE).start()
    order(cluster, "deaf")
    cluster.submit("train", steps=10)
    state = Path(f"/proc/{cluster.pids[1]}/status")
    until(lambda: int(state.read_text().partition("SigIgn:")[2].split()[0], 16) & 1 << signal.SIGINT - 1)
    cluster.close()
    cluster.close()
    assert marked(cluster.token) == [] and set(psutil.Process().children(recursive=True)) <= before
    assert list(temporary.glob("fsdp_lab-*")) == []
    with pytest.raises(ClusterError, match="closed"):
        cluster.call("status")


def test_ctrl_c_while_it_starts_leaves_nothing():
    before = set(psutil.Process().children(recursive=True))
    cluster = Cluster(2, rank_module=FAKE)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        cluster.start()
        time.sleep(5)  # a fast machine was ready before
    cluster.close()
    assert marked(cluster.token) == [] and set(psutil.Process().children(recursive=True)) <= before


def test_what_cannot_start_is_one_sentence_with_its_log(tmp_path, monkeypatch):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(StartError, match="ipyparallel's controller did not start") as e:
        Cluster(1, rank_module=FAKE, environment={"PYTHONHOME": "/nonexistent"}).start()
    assert "encodings" in e.value.log
    (tmp_path / "ipykernel").mkdir()
    (tmp_path / "ipykernel" / "__init__.py").write_text("raise RuntimeError('this engine is broken')\n")
    with pytest.raises(StartError, match=r"engine ended while it was starting|controller did not start") as e:
        Cluster(1, rank_module=FAKE, environment={"PYTHONPATH": str(tmp_path)}).start()
    assert "this engine is broken" in e.value.log and set(psutil.Process().children(recursive=True)) <= before
    monkeypatch.setattr("tempfile.mkdtemp", mock.Mock(side_effect=PermissionError(13, "Permission denied", "/tmp/x")))
    with pytest.raises(StartError, match="private folder .*Permission denied.*set TMPDIR"):
        Cluster(1, rank_module=FAKE).start()


def test_without_a_number_there_is_a_rank_on_each_free_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"name": "H100", "total_bytes": 80 << 30}
    gpus = tuple(GpuStatus(device=f"cuda:{i}", uuid=f"GPU-{i}", used_bytes=i // 3 * (40 << 30), **sizes)
                 for i in range(4))  # fmt: skip
    monkeypatch.setattr(assembly, "probe", lambda **_: Host(name="here", cores=8, gpus=gpus, torch_cuda="13.0"))
    monkeypatch.setattr(assembly.Assembly, "_connect", mock.Mock(side_effect=StartError("enough")))
    cluster = Cluster(None)
    with pytest.raises(StartError, match="enough"):
        cluster.start()
    assert cluster.assembly._default_ranks == 3
    assert cluster.assembly.notes == ("3 ranks, one on each GPU that is free; Lab(2) takes two of them.",)


# -- engines that are forked: each is a process of its own, that ends and is replaced as any other --------------------
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
    stages, given = dict[str, None](), {"GIVEN": "yes"}
    with Cluster(2, rank_module=FAKE, environment=given, report=lambda p: stages.setdefault(p.stage)) as cluster:
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
    assert not cluster.lost and len(cluster.call("status")) == 2 and not servers(cluster)


@pytest.mark.slow
def test_where_none_can_be_forked_engines_are_started_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "3").symlink_to("/dev/nvidiactl")  # as NVML opens it
    assert forks() and not used_gpu() and not used_gpu(tmp_path)
    (tmp_path / "4").symlink_to("/dev/nvidia-uvm")
    assert used_gpu(tmp_path), "CUDA cannot be used in a fork"
    with Cluster(1, rank_module=FAKE, environment={"IMPORT_USES_GPU": "yes"}) as cluster:
        (server,), (pid,) = servers(cluster), cluster.pids
        assert psutil.Process(pid).ppid() != server.pid and len(cluster.call("status")) == 1
    monkeypatch.setattr(engine_server, "SOCKET", "x" * 120)  # too long for a socket
    with Cluster(1, rank_module=FAKE) as cluster:
        assert not servers(cluster) and len(cluster.call("status")) == 1


def test_code_that_cannot_be_imported_is_said_by_the_rank() -> None:
    with pytest.raises(Exception, match="no_such_module"), Cluster(1, rank_module="tests.no_such_module"):
        pass
