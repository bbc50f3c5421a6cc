"""`Room`: who gets a place on a shared machine, what a refusal says, and that a place is free when its lab has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fsdp_lab.cluster import room as room_module
from fsdp_lab.cluster.guardian import Guardian
from fsdp_lab.cluster.placement import CudaDevice, Host, place
from fsdp_lab.cluster.room import LEARNER, RANK_BYTES, VARIABLE, Room, RoomLimits, RoomPlace
from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.lab import Lab


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    """A room of 40 learners and two labs at once, which this process is in."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "room"))
    monkeypatch.setenv(LEARNER, "learner-01")
    return Room.make(tmp_path / "room", RoomLimits(learners=40, labs=2, ranks=2))


@pytest.fixture
def places() -> Iterator[list[RoomPlace]]:
    """Places that are left at the end."""
    found: list[RoomPlace] = []
    yield found
    for one in found:
        one.leave()


def as_learner(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEARNER, name)


def test_a_lab_outside_a_class_has_the_machine_for_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Room.here() is None


def test_a_full_machine_refuses_a_lab_before_anything_starts(room: Room, places: list[RoomPlace], monkeypatch):
    places.append(room.take(2))
    as_learner("learner-02", monkeypatch)
    places.append(room.take(2))
    as_learner("learner-03", monkeypatch)
    before = set(psutil.Process().children(recursive=True))
    began_s = time.monotonic()
    with pytest.raises(ArgumentError) as refused:
        Lab(ranks=2)
    assert time.monotonic() - began_s < 5, "no engine was awaited"
    assert set(psutil.Process().children(recursive=True)) <= before, "nothing was started"
    assert "2 labs with 4 ranks run on it, it holds 4, and this lab needs 2" in refused.value.reason
    assert "lab.close()" in refused.value.hint and "wait" in refused.value.hint
    places[0].leave()
    places.append(room.take(2))  # who waited has the place now


def test_a_learner_has_so_many_ranks_over_all_notebooks(room: Room, places: list[RoomPlace], monkeypatch):
    with pytest.raises(ArgumentError, match=r"8 are too many here.*at most 2.*Lab\(ranks=2\)"):
        Lab(ranks=8)
    monkeypatch.setenv("JPY_SESSION_NAME", "/class/learner-01/03_inside_a_step.ipynb")
    places.append(room.take(2))
    with pytest.raises(ArgumentError, match="you have 2 ranks already, in 03_inside_a_step.ipynb, and may have 2"):
        room.take(1)
    as_learner("learner-02", monkeypatch)
    places.append(room.take(1))


def test_more_ranks_of_a_lab_are_refused_and_the_place_stays(room: Room, places: list[RoomPlace]):
    places.append(room.take(1))
    places[0].change(2)
    with pytest.raises(ArgumentError, match="at most 2"):
        places[0].change(3)
    with pytest.raises(ArgumentError, match="at most 2"):
        places[0].check(3)
    assert [t.ranks for t in room.taken()] == [2]
    places[0].fill([os.getpid()])
    assert [t.pids for t in room.taken()] == [(os.getpid(),)]
    places[0].change(1)
    assert [(t.ranks, t.pids) for t in room.taken()] == [(1, (os.getpid(),))], "a shorter content leaves no rest"


def test_memory_that_labs_in_their_start_still_need_is_not_given_away(room: Room, places: list[RoomPlace], monkeypatch):
    enough = room_module.SPARE_BYTES + room_module.LAB_BYTES + 2 * RANK_BYTES
    monkeypatch.setattr(room_module, "free_bytes", lambda: enough)
    places.append(room.take(2))
    as_learner("learner-02", monkeypatch)
    with pytest.raises(ArgumentError, match="has no memory left: 1 lab with 2 ranks runs on it"):
        room.take(1)
    monkeypatch.setattr(room_module, "rss_bytes", lambda pid: RANK_BYTES)  # they have come so far
    places[0].fill([1, 2])
    places.append(room.take(2))


TAKES = """
import sys, time
from pathlib import Path
from fsdp_lab.cluster.guardian import Guardian
from fsdp_lab.cluster.room import Room
place = Room.here().take(2)
if sys.argv[1:]:
    guardian = Guardian("token", Path(sys.argv[1]), [place.descriptor])
    print(guardian.identity.pid, flush=True)
else:
    print(0, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("guarded", [False, True])
def test_the_place_of_a_killed_lab_is_free_when_its_ranks_have_ended(room: Room, tmp_path: Path, guarded: bool):
    folder = tmp_path / "fsdp_lab-private"
    folder.mkdir(mode=0o700)
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES, *([str(folder)] if guarded else [])], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    guardian = int(process.stdout.readline())
    assert len(room.taken()) == 1
    if guarded:
        os.kill(guardian, signal.SIGSTOP)  # as if it were still ending ranks
    process.kill()
    process.wait()
    process.stdout.close()
    if guarded:
        assert len(room.taken()) == 1, "the guardian has it"
        os.kill(guardian, signal.SIGCONT)
        deadline = time.monotonic() + 20
        while room.taken() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert room.taken() == [] and not list((room.folder / "places").iterdir())


def test_a_released_guardian_leaves_the_place(room: Room, tmp_path: Path):
    mine = room.take(2)
    guardian = Guardian("token", tmp_path, [mine.descriptor])
    mine.leave()
    mine.leave()
    assert len(room.taken()) == 1
    guardian.release()
    assert room.taken() == []


def test_a_room_whose_server_is_gone_is_said(room: Room, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ArgumentError, match="no room of a class.*--class"):
        Lab(ranks=2)


def test_ranks_do_not_outlive_their_kernel_in_a_class(room: Room):
    with pytest.raises(ArgumentError, match="persist: in a class a place is free"):
        Lab(ranks=2, persist=True)
    assert room.taken() == []


def test_labs_that_start_together_take_turns_in_their_order(room: Room, places: list[RoomPlace], monkeypatch):
    """On one core: the second waits for the first, which has started, or has ended."""
    monkeypatch.setattr(room_module, "usable_cores", lambda: 1)
    monkeypatch.setattr(room_module, "STARTS_PER_CORE", 1)
    monkeypatch.setattr(room_module, "TURN_S", 0.0)
    wide = Room.make(room.folder.parent / "wide", RoomLimits(learners=3, labs=3))
    for i in range(3):
        as_learner(f"learner-0{i}", monkeypatch)
        places.append(wide.take(2))
    places[0].await_turn(lambda before: pytest.fail("nobody is before it"))
    heard: list[int] = []

    def hear(before: int) -> None:
        heard.append(before)
        if len(heard) == 2:
            places[0].start()
        if len(heard) == 4:
            places[1].leave()

    places[2].await_turn(hear)
    assert heard == [2, 2, 1, 1]


# -- shares ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("learners", "labs", "cores", "threads"), [(40, 8, 2, 1), (8, 8, 64, 4), (3, 3, 2, 1), (1, 1, 8, 4)]
)
def test_every_lab_has_the_cores_as_if_all_ran(learners, labs, cores, threads, monkeypatch, tmp_path):
    monkeypatch.setattr(room_module, "usable_cores", lambda: cores)
    monkeypatch.setattr(room_module, "total_bytes", lambda: 1 << 40)
    monkeypatch.setattr(room_module, "probe", lambda ours=(): Host(name="h", cores=cores))
    limits = RoomLimits.of_machine(learners)
    assert limits.labs == labs and Room.make(tmp_path, limits).cores == max(1, cores // labs)
    mine = Room(tmp_path, limits).take(2)
    assert mine.environment(2)["OMP_NUM_THREADS"] == str(threads)
    assert place([mine.host(())] * 2).seats[0].threads == threads
    mine.leave()


def test_memory_bounds_the_labs_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room_module, "usable_cores", lambda: 64)
    monkeypatch.setattr(room_module, "total_bytes", lambda: 8 << 30)
    monkeypatch.setattr(room_module, "probe", lambda: Host(name="h", cores=64))
    assert 1 < RoomLimits.of_machine(40).labs < 10
    assert RoomLimits.of_machine(40, labs=12).labs == 12, "who says so knows better"


@pytest.mark.parametrize(("arguments", "field"), [((0,), "class"), ((4, 0), "labs"), ((4, None, 0), "ranks")])
def test_numbers_are_checked(arguments: tuple[int, ...], field: str):
    with pytest.raises(ArgumentError, match=f"^{field}: 0 is refused"):
        RoomLimits.of_machine(*arguments)


def test_labs_get_the_least_used_gpus_and_parts_of_them(room: Room, places: list[RoomPlace], monkeypatch):
    """Four GPUs; the first lab takes two, the second the others, though neither has a process on them yet."""

    def four(ours: frozenset[int] = frozenset()) -> Host:
        gpus = [CudaDevice(device=f"cuda:{i}", uuid=f"GPU-{i}", name="T4", total_bytes=16 << 30) for i in range(4)]
        return Host(name="h", cores=8, gpus=tuple(gpus), torch_cuda="13.0")

    monkeypatch.setattr(room_module, "probe", four)
    found = []
    for name in ("learner-01", "learner-02"):
        as_learner(name, monkeypatch)
        places.append(room.take(2))
        found.append(place([places[-1].host(())] * 2).devices)
    assert found == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]
    crowded = Room.make(room.folder.parent / "crowded", RoomLimits(learners=40, labs=6))
    as_learner("learner-03", monkeypatch)
    places.append(crowded.take(2))
    seats = place([places[-1].host(())] * 2).seats
    assert [seat.memory_cap for seat in seats] == [0.23, 0.23], "three ranks on each, and their contexts"
    assert seats[0].shared_gpu_ranks == 1, "two ranks of one lab are on two GPUs, so they use NCCL"
