"""What kernel and hosts say to each other, and which host gets which engine; without any host."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from fsdp_lab.base.process import MARK
from fsdp_lab.cluster import StartError, host_script
from fsdp_lab.cluster.addresses import Endpoint, reached_by_all, unique_names
from fsdp_lab.cluster.assembly import rank_order
from fsdp_lab.cluster.batch_engines import SlurmShell
from fsdp_lab.cluster.detached import PREFIX
from fsdp_lab.cluster.host_engines import Command, HostAnswer, HostEngines, RankHost
from fsdp_lab.cluster.hosts import SlurmHosts, SshHosts


def printed(value: dict) -> str:
    output = io.StringIO()
    host_script.reply(value, output)
    return output.getvalue()


def test_the_script_that_needs_no_package_has_the_same_names():
    assert (host_script.MARK, host_script.PREFIX) == (MARK, PREFIX)


def test_a_long_reply_is_in_short_lines_amid_other_output():
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
        answers = {
            n: HostAnswer(value={"running": running[n]}) if n in running else HostAnswer(failure=f"{n}: no")
            for n in "abc"
        }
        self.shell = SimpleNamespace(script=lambda *args, **more: answers)  # type: ignore[assignment]

    def _allocate(self):
        return []

    def _agents(self, counts):
        return {}

    def _end_commands(self):
        return []


def test_an_engine_is_replaced_on_the_host_that_lacks_it():
    nannies = [101, 102]  # carry the mark too
    assert Shares({"a": [1, 2, *nannies], "b": [3, 103], "c": [5, 6, *nannies]})._shares(1) == {"b": 1}


def test_beyond_what_hosts_were_to_have_they_take_turns_unless_there_are_gpus():
    full = {"a": [1, 2], "b": [3, 4]}
    assert Shares(full)._shares(3) == {"a": 2, "b": 1}
    with pytest.raises(StartError, match="GPUs for 0 of 3 more ranks"):
        Shares(full, ranks_per_host=None, gpus_per_host=2)._shares(3)  # type: ignore[arg-type]
    with pytest.raises(StartError, match="a: no"):
        Shares({})._shares(1)


def test_slurm_is_asked_for_what_was_wanted():
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


def test_hosts_of_one_name_get_different_ones():
    assert unique_names({"1": "gpu", "2": "gpu", "3": "login"}) == {"1": "gpu", "2": "gpu #2", "3": "login"}
