"""Where ranks are put, for machines that this one is not."""

import io
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.process import MARK, usable_cores
from fsdp_lab.cluster import StartError, host_script
from fsdp_lab.cluster.addresses import Endpoint, reached_by_all, unique_names
from fsdp_lab.cluster.assembly import rank_order
from fsdp_lab.cluster.batch_engines import SlurmShell
from fsdp_lab.cluster.detached import PREFIX
from fsdp_lab.cluster.host_engines import Command, HostAnswer, HostEngines, RankHost
from fsdp_lab.cluster.hosts import SlurmHosts, SshHosts
from fsdp_lab.cluster.nvml import GpuProcess, GpuReport, GpuStatus
from fsdp_lab.cluster.placement import Host, _visible, free_gpus, place, probe, without_ours

GIB = 2**30
H200: dict[str, Any] = {"name": "H200", "total_bytes": 140 * GIB}


def gpu(i: int, users: tuple[GpuProcess, ...] = (), used: int = 0) -> GpuStatus:
    return GpuStatus(device=f"cuda:{i}", uuid=f"GPU-{i}", used_bytes=used, processes=users, **H200)


def host(*gpus: GpuStatus, cores: int = 8, name: str = "here", cuda: str | None = "13.0") -> Host:
    return Host(name=name, cores=cores, gpus=gpus, torch_cuda=cuda)


SOMEBODY = GpuProcess(pid=77, name="python", owner="bob", used_bytes=40 * GIB)


def two_gpus(*processes: GpuProcess) -> GpuReport:
    """The second is used by the processes."""
    used = sum(process.used_bytes for process in processes)
    idle = GpuStatus(uuid="a", used_bytes=0, **H200)
    return GpuReport(gpus=(idle, GpuStatus(uuid="b", used_bytes=used, processes=processes, **H200)))


IN_USE = host(gpu(0, (SOMEBODY,)), gpu(1))
TWO = [host(gpu(0), gpu(1), name="a")] * 2 + [host(gpu(0), gpu(1), name="b")] * 2
ONE_WITHOUT = [host(gpu(0), name="a"), host(name="b")]

# Hosts of the ranks, devices asked for -> devices of the ranks, and what the note says; "": none.
PLACED: dict[str, tuple[list[Host], list[str] | None, str, list[str]]] = {
    "cores are shared": ([host(cores=2)] * 2, None, "cpu cpu", []),
    "more ranks than cores": ([host(cores=2)] * 3, None, "cpu cpu cpu", ["3 ranks on 2 cores", "not affected"]),
    "a GPU each": ([host(gpu(0), gpu(1), gpu(2))] * 2, None, "cuda:0 cuda:1", []),
    "GPUs are shared": ([host(gpu(0))] * 2, None, "cuda:0 cuda:0", ["2 ranks on cuda:0", "take turns"]),
    "a GPU in use is left alone": ([IN_USE], None, "cuda:1", ["cuda:0", "process 77 (python, of bob, 40.0 GiB)"]),
    "a GPU in use that is named": ([IN_USE], ["cuda:0"], "cuda:0", ["process 77", "not this run's alone"]),
    "all in use": ([host(gpu(0, used=30 * GIB))], None, "cpu", ["cannot be seen from here", "it is not used"]),
    "the CPU beside GPUs": ([host(gpu(0))], ["cpu"], "cpu", []),
    "torch of a CPU": ([host(gpu(0), cuda=None)], None, "cpu", ["built for CPUs"]),
    "two machines": (TWO, None, "cuda:0 cuda:1 cuda:0 cuda:1", []),
    "a machine without GPUs": (ONE_WITHOUT, None, "cpu cpu", ["because b has no free GPU"]),
}


@pytest.mark.parametrize("case", PLACED)
def test_ranks_are_put_where_there_is_room_and_what_is_unusual_is_said(case: str):
    hosts, asked, devices, said = PLACED[case]
    placed = place(hosts, asked)
    assert " ".join(placed.devices) == devices and bool(placed.notes) == bool(said)
    assert all(words in placed.notes[0] for words in said)
    shared = case == "GPUs are shared"
    assert {s.memory_cap for s in placed.seats} == {0.46 if shared else None}
    assert "cpu" in devices or {s.shared_gpu_ranks for s in placed.seats} == {2 if shared else 1}


def test_cores_are_divided_and_uneven_sharing_of_gpus_makes_all_ranks_talk_over_gloo():
    for cores, threads in ((8, 4), (2, 1), (1, 1)):
        assert {s.threads for s in place([host(cores=cores)] * 2).seats} == {threads}
    placed = place([host(gpu(0), gpu(1))] * 3)
    assert placed.devices == ("cuda:0", "cuda:0", "cuda:1")
    assert [s.memory_cap for s in placed.seats] == [0.46, 0.46, None]
    assert {s.shared_gpu_ranks for s in placed.seats} == {2}


def test_devices_that_cannot_be_had():
    for machine, devices, says in ((host(gpu(0)), ["cuda:3"], "no cuda:3 .it has cuda:0"),
                                   (host(), ["cuda:0"], "it has no GPU"),
                                   (host(gpu(0), cuda=None), ["cuda:0"], "built for CPUs"),
                                   (host(gpu(0)), ["cuda:0", "cuda:0"], "2 are named for 1 ranks")):  # fmt: skip
        with pytest.raises(SpecError, match=says):
            place([machine], devices)


# -- facts ---------------------------------------------------------------------------------------------------------
def test_probe_names_gpus_as_torch_does_who_uses_them_and_a_broken_driver():
    found = probe(lambda: two_gpus(SOMEBODY), env={})
    assert [g.device for g in found.gpus] == ["cuda:0", "cuda:1"]
    assert not found.gpus[0].busy and "process 77 (python" in found.gpus[1].busy
    found = probe(lambda: two_gpus(SOMEBODY), env={}, ours=frozenset({77}))
    assert not any(g.busy for g in found.gpus), "our own processes are not somebody else's"
    assert "names a MIG slice" in probe(two_gpus, env={"CUDA_VISIBLE_DEVICES": "MIG-1234"}).note
    assert probe(GpuReport, env={}) == Host(name=socket.gethostname(), cores=usable_cores())
    broken = probe(lambda: GpuReport(error="NVML: RM has detected an NVML/RM version mismatch."), env={})
    assert "version mismatch" in place([broken]).notes[0]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [(None, ["GPU-0", "GPU-1"]), ("1", ["GPU-1"]), ("1,0", ["GPU-1", "GPU-0"]), ("", []), ("-1", []), ("GPU-1", ["GPU-1"]),
     ("0,9,1", ["GPU-0"])],
)  # fmt: skip
def test_cuda_visible_devices_renames(visible: str | None, uuids: list[str]):
    seen = _visible((gpu(0), gpu(1)), visible)
    assert [g.uuid for g in seen] == uuids and [g.device for g in seen] == [f"cuda:{i}" for i in range(len(uuids))]


def test_a_containers_quota_counts_and_what_our_ranks_hold_in_it_makes_no_gpu_busy(tmp_path: Path):
    """There NVML names no process. A GPU that is not ours may be somebody's."""
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) >= 1
    now = host(gpu(0, used=40 * GIB), gpu(1, used=40 * GIB))
    assert free_gpus(now) == [] and [g.device for g in free_gpus(without_ours(now, {"cuda:0"}))] == ["cuda:0"]
    seen = host(gpu(0, (SOMEBODY,), used=40 * GIB))
    assert without_ours(seen, {"cuda:0"}) == seen and free_gpus(host(gpu(0), cuda=None)) == []


# -- what kernel and hosts say to each other, and which host gets which engine; without any host ----------------------
def printed(value: dict) -> str:
    output = io.StringIO()
    host_script.reply(value, output)
    return output.getvalue()


def test_a_long_reply_is_in_short_lines_amid_other_output_under_the_same_names():
    assert (host_script.MARK, host_script.PREFIX) == (MARK, PREFIX)
    value = {"log": "line\n" * 2000, "name": "ünter"}
    text = printed(value)
    assert len(text.splitlines()) > 5 and max(map(len, text.splitlines())) < 1024
    assert host_script.answer(f"Welcome to gpu1\n{text}bye") == {**value, "node": ""}
    with pytest.raises(ValueError, match="no reply"):
        host_script.answer(text[: len(text) // 2])


def test_replies_of_the_tasks_of_a_step_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    """Slurm labels each line with its task, and mixes them."""
    lines = []
    for task, name in enumerate(("fA", "fB")):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        lines.append([f"{task}: {line}" for line in printed({"log": name * 2000}).splitlines()])
    mixed = "\n".join(line for pair in zip(*lines, strict=True) for line in pair)
    process = SimpleNamespace(poll=lambda: 0, returncode=0)
    command = Command(process, io.BytesIO(mixed.encode()), io.BytesIO(b"srun: error: fC: gone"))  # type: ignore[arg-type]
    said = SlurmShell("python", "1")._answers("fA,fB,fC", command, 1.0)
    assert [said[name].value["log"] for name in ("fA", "fB")] == ["fA" * 2000, "fB" * 2000]
    assert said["fC"].failure == "fC: srun: error: fC: gone"


class Shares(HostEngines):
    """Three hosts of two ranks, some of whose engines run; the others' answers are given."""

    def __init__(self, running: dict[str, list[int]], **asked: int) -> None:
        self._asked = SshHosts(names=("a", "b", "c"), **{"ranks_per_host": 2, **asked})  # type: ignore[arg-type]
        self._hosts = {n: RankHost(name=n, ranks=2, pids=set(range(10))) for n in ("a", "b", "c")}
        self.token = "token"
        answers = {n: HostAnswer(value={"running": running[n]}) if n in running else HostAnswer(failure=f"{n}: no")
                   for n in "abc"}  # fmt: skip
        self.shell = SimpleNamespace(script=lambda *args, **more: answers)  # type: ignore[assignment]

    def _allocate(self):
        return []

    def _agents(self, counts):
        return {}

    def _end_commands(self):
        return []


def test_an_engine_is_replaced_on_the_host_that_lacks_it_and_beyond_that_they_take_turns_unless_there_are_gpus():
    nannies = [101, 102]  # carry the mark too
    assert Shares({"a": [1, 2, *nannies], "b": [3, 103], "c": [5, 6, *nannies]})._shares(1) == {"b": 1}
    full = {"a": [1, 2], "b": [3, 4]}
    assert Shares(full)._shares(3) == {"a": 2, "b": 1}
    with pytest.raises(StartError, match="GPUs for 0 of 3 more ranks"):
        Shares(full, ranks_per_host=None, gpus_per_host=2)._shares(3)  # type: ignore[arg-type]
    with pytest.raises(StartError, match="a: no"):
        Shares({})._shares(1)
    hosts = SlurmHosts(hosts=4, gpus_per_host=8, time="1:00:00", options=("--constraint=h100",))
    assert hosts.ranks == 32
    wanted = "--nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --time=1:00:00 --constraint=h100"
    assert hosts.request == wanted.split()


# -- which engine becomes which rank, and the names and addresses of hosts
def endpoint(address: str, interface: str = "eth0"):
    return Endpoint(address=address, port=4000, interface=interface)


def test_an_address_is_good_where_all_others_reach_it_and_a_host_that_another_does_not_reach_is_named():
    """And the ranks of one host stand together."""
    assert rank_order({i: {"id": host} for i, host in enumerate("abab")}) == [0, 2, 1, 3]
    a, b = [endpoint("10.0.0.1"), endpoint("10.1.0.1", "eth1")], [endpoint("10.0.0.2")]
    endpoints = {"a": a, "b": b, "c": [endpoint("10.0.0.3")]}
    tried = {(x, y): [""] * len(endpoints[y]) for x in endpoints for y in endpoints if x != y}
    tried["c", "a"] = ["no answer", ""]
    found = reached_by_all(endpoints, tried)
    assert found["a"] == a[1] and found["b"] == b[0]
    with pytest.raises(StartError) as refused:
        reached_by_all({"a": a, "b": b}, {("a", "b"): [""], ("b", "a"): ["no answer", "Connection refused"]})
    why = "10.0.0.1 port 4000 (eth0): no answer, 10.1.0.1 port 4000 (eth1): Connection refused; open"
    assert str(refused.value).startswith(f"b does not reach a: {why}")
    tried["b", "a"], tried["c", "a"] = ["", "no answer"], ["no answer", ""]
    with pytest.raises(StartError, match="b does not reach a: 10.1.0.1 port 4000 .eth1.: no answer; open"):
        reached_by_all(endpoints, tried)
    with pytest.raises(StartError, match="c has no network"):
        reached_by_all({**endpoints, "c": []}, tried | {("c", "a"): ["", ""], ("b", "a"): ["", ""]})
    assert unique_names({"1": "gpu", "2": "gpu", "3": "login"}) == {"1": "gpu", "2": "gpu #2", "3": "login"}
