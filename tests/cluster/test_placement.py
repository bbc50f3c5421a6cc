"""Where ranks are put, for machines that this one is not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.process import usable_cores
from fsdp_lab.cluster.nvml import GpuProcess, GpuReport, GpuStatus
from fsdp_lab.cluster.placement import Host, _visible, free_gpus, place, probe, without_ours

GIB = 2**30


def gpu(i: int, users: tuple[GpuProcess, ...] = (), used: int = 0) -> GpuStatus:
    return GpuStatus(
        device=f"cuda:{i}", uuid=f"GPU-{i}", name="H200", total_bytes=140 * GIB, used_bytes=used, processes=users
    )


def host(*gpus: GpuStatus, cores: int = 8, name: str = "here", cuda: str | None = "13.0") -> Host:
    return Host(name=name, cores=cores, gpus=gpus, torch_cuda=cuda)


SOMEBODY = GpuProcess(pid=77, name="python", owner="bob", used_bytes=40 * GIB)


def two_gpus(*processes: GpuProcess) -> GpuReport:
    """The second is used by the processes."""
    idle = GpuStatus(uuid="GPU-a", name="H200", total_bytes=140 * GIB, used_bytes=0)
    used = sum(process.used_bytes for process in processes)
    return GpuReport(
        gpus=(idle, GpuStatus(uuid="GPU-b", name="H200", total_bytes=140 * GIB, used_bytes=used, processes=processes))
    )


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
    for machine, devices, says in (
        (host(gpu(0)), ["cuda:3"], "no cuda:3 .it has cuda:0"),
        (host(), ["cuda:0"], "it has no GPU"),
        (host(gpu(0), cuda=None), ["cuda:0"], "built for CPUs"),
        (host(gpu(0)), ["cuda:0", "cuda:0"], "2 are named for 1 ranks"),
    ):
        with pytest.raises(SpecError, match=says):
            place([machine], devices)


# -- facts ---------------------------------------------------------------------------------------------------------


def test_probe_names_gpus_as_torch_does_and_who_uses_them():
    found = probe(lambda: two_gpus(SOMEBODY), env={})
    assert [g.device for g in found.gpus] == ["cuda:0", "cuda:1"]
    assert not found.gpus[0].busy and "process 77 (python" in found.gpus[1].busy
    found = probe(lambda: two_gpus(SOMEBODY), env={}, ours=frozenset({77}))
    assert not any(g.busy for g in found.gpus), "our own processes are not somebody else's"
    assert "names a MIG slice" in probe(two_gpus, env={"CUDA_VISIBLE_DEVICES": "MIG-1234"}).note


def test_no_driver_is_no_gpu_and_a_broken_one_is_a_note():
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
    assert [g.uuid for g in seen] == uuids
    assert [g.device for g in seen] == [f"cuda:{i}" for i in range(len(uuids))]


def test_a_containers_quota_counts(tmp_path: Path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) >= 1


def test_what_our_ranks_hold_in_a_container_makes_no_gpu_busy():
    """There NVML names no process. A GPU that is not ours may be somebody's."""
    now = host(gpu(0, used=40 * GIB), gpu(1, used=40 * GIB))
    assert free_gpus(now) == []
    assert [g.device for g in free_gpus(without_ours(now, {"cuda:0"}))] == ["cuda:0"]
    seen = host(gpu(0, (SOMEBODY,), used=40 * GIB))
    assert without_ours(seen, {"cuda:0"}) == seen
    assert free_gpus(host(gpu(0), cuda=None)) == []
