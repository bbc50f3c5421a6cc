"""Rank 0's store is on one machine a file that only this user opens, on several a port of one address. Groups that could
not be opened do not keep ranks from meeting later. A store may not answer, and a rank sees that
a peer of its machine is gone."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import distributed as dist

from fsdp_lab.base.process import Identity, machine
from fsdp_lab.rank.abort import BoundedStore, Peers
from fsdp_lab.rank.rendezvous import FILE, close_groups, find_store, host_store, open_groups, own_connection
from fsdp_lab.wire import WireContext
from tests.pool import Place, Pool

HOST = """
import sys
from fsdp_lab.rank.rendezvous import host_store
store = host_store()
store.set("told", "1")
print(store.place, flush=True)
sys.stdin.read()
"""


def listeners() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_a_store_of_one_machine_listens_nowhere_and_is_a_file_of_this_user_alone() -> None:
    before = listeners()
    store = host_store()
    assert listeners() == before
    found = os.stat(store.place.removeprefix(FILE))
    assert found.st_mode & 0o777 == 0o600 and found.st_uid == os.geteuid()
    store.set("told", "1")
    other = find_store(store.place)
    assert other.get("told") == b"1"
    assert other.compare_set("first", "", "a") == other.compare_set("first", "", "b") == b"a"
    assert own_connection(store).check(["first"])
    other.delete_key("first")
    assert not store.check(["first"])


def test_a_store_of_several_machines_listens_where_it_is_told_and_nowhere_else() -> None:
    here = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
    before = listeners()
    store = host_store(here)
    ((address, port),) = listeners() - before
    assert address == here and store.place == f"tcp://{here}:{port}"
    store.set("told", "1")
    assert find_store(store.place).get("told") == b"1"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there are no files in memory here")
def test_nothing_is_left_of_a_store_and_what_ranks_have_opened_still_works() -> None:
    rank_0 = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    place = rank_0.stdout.readline().strip()
    mine = find_store(place)
    rank_0.kill()
    rank_0.communicate()
    assert not os.path.exists(place.removeprefix(FILE))
    assert mine.get("told") == b"1"  # so no request waits for a rank that is gone
    mine.set("more", "2")
    assert own_connection(mine).get("more") == b"2"
    sentence = "cannot open rank 0's store .*rank 0 has ended, or is in another container"
    with pytest.raises(ConnectionError, match=sentence):
        find_store(place)


def test_without_files_in_memory_the_store_is_in_a_private_folder_that_goes_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = host_store()
    file = Path(store.place.removeprefix(FILE))
    assert file.parent.parent == tmp_path and file.parent.stat().st_mode & 0o777 == 0o700
    store.set("told", "1")
    assert find_store(store.place).get("told") == b"1"
    del store
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["", "file"])
def test_a_store_that_others_may_open_or_have_is_refused_and_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    (file := folder / "file").touch(mode=0o600)
    assert not find_store(f"file:{file}").check(["told"])
    (folder / what).chmod(0o640)
    before = psutil.Process().num_fds()
    with pytest.raises(ConnectionError, match=r"is not used: it.* belongs to user \d+ with mode 640, and must be of"):
        find_store(f"file:{file}")
    with pytest.raises(ConnectionError, match=re.escape("No such file")):
        find_store(f"file:{tmp_path / 'none'}")
    assert psutil.Process().num_fds() == before
    (folder / what).chmod(0o600 if what else 0o700)
    mine = os.getuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(ConnectionError, match=f"belongs to user {mine} .* must be of user {mine + 1} alone"):
        find_store(f"file:{file}")


def _alone_first(place: Place) -> float:
    if place.rank == 0:  # the other one does not come
        context = WireContext(timeout_s=1)
        with pytest.raises(dist.DistStoreError, match="not all ranks came to open the process groups within 1 s"):
            open_groups(place.info, dist.PrefixStore("alone", place.store), context, 0)
        close_groups(context)
    context = WireContext(timeout_s=10)
    wire = open_groups(place.info, dist.PrefixStore("together", place.store), context, 1)
    total = torch.tensor([float(place.rank + 1)])
    wire.allreduce([total]).wait()
    close_groups(context)
    return float(total)


def test_a_rank_that_waited_in_vain_meets_the_others_afterwards(pool: Pool) -> None:
    assert pool.run(_alone_first, 2, reduction=None) == [3.0, 3.0]


def test_a_request_without_an_answer_times_out_and_later_ones_work_again() -> None:
    store, answers = BoundedStore(dist.HashStore(), 0.2), threading.Event()
    assert store.call(lambda _: 1) == 1
    with pytest.raises(dist.DistNetworkError, match=r"no answer for 0\.2 s"):
        store.call(lambda _: answers.wait())
    with pytest.raises(dist.DistNetworkError):
        store.call(lambda _: 2)  # not sent while the previous one is pending
    answers.set()
    assert store._unanswered is not None and store._unanswered.result(10) and store.call(lambda _: 3) == 3
    with pytest.raises(ZeroDivisionError):  # what a request raises is raised
        store.call(lambda _: 1 / 0)


def test_a_rank_without_memory_for_a_thread_asks_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    bounded = BoundedStore(dist.HashStore(), 1.0)
    bounded.call(lambda s: s.set("why", "no memory"))
    assert bounded.call(lambda s: s.get("why")) == b"no memory"


def says(store: dist.Store, rank: int, process: Identity, where: str) -> None:
    store.set(f"process/{rank}", json.dumps({"machine": where, "process": asdict(process)}))


def test_a_peer_is_gone_when_its_process_is_and_no_other_process_is_taken_for_it() -> None:
    store = dist.HashStore()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process = Identity.of(child.pid)
        says(store, 1, process, machine())
        says(store, 2, process, "another machine")
        says(store, 3, replace(process, born=process.born + "1"), machine())
        peers = Peers(store, 0)
        for rank in range(5):
            peers.look_up(rank)
        assert [peers.ended(rank) for rank in range(5)] == [False, False, False, True, False]
    finally:
        child.kill()
        child.wait()
    assert [peers.ended(rank) for rank in range(5)] == [False, True, False, True, False]
