"""Requests to a store that does not answer; and a rank sees that a peer of its machine is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest
from torch import distributed as dist

from fsdp_lab.base.process import Identity, machine
from fsdp_lab.rank.abort import BoundedStore, Peers


def test_a_request_without_an_answer_times_out_and_later_ones_work_again() -> None:
    store, answers = BoundedStore(dist.HashStore(), 0.2), threading.Event()
    assert store.call(lambda _: 1) == 1
    with pytest.raises(dist.DistNetworkError, match=r"no answer for 0\.2 s"):
        store.call(lambda _: answers.wait())
    with pytest.raises(dist.DistNetworkError):
        store.call(lambda _: 2)  # not sent while the previous one is pending
    answers.set()
    assert store._unanswered is not None and store._unanswered.result(10)
    assert store.call(lambda _: 3) == 3
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
