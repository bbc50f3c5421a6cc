"""Requests to a store that does not answer."""

from __future__ import annotations

import threading
import time

import pytest
from torch import distributed as dist

from fsdp_lab.rank.abort import BoundedStore


def test_a_request_without_an_answer_times_out_and_later_ones_work_again() -> None:
    store, answers = BoundedStore(dist.HashStore(), 0.2), threading.Event()
    assert store.call(lambda _: 1) == 1
    begun_s = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match=r"no answer for 0\.2 s"):
        store.call(lambda _: answers.wait())
    assert time.monotonic() - begun_s < 10, "not forever"
    with pytest.raises(dist.DistNetworkError):
        store.call(lambda _: 2)  # not sent while the previous one is pending
    answers.set()
    assert store._unanswered is not None and store._unanswered.result(10)
    assert store.call(lambda _: 3) == 3


def test_what_a_request_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        BoundedStore(dist.HashStore(), 5).call(lambda _: 1 / 0)


def test_a_rank_without_memory_for_a_thread_asks_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store = dist.HashStore()
    bounded = BoundedStore(store, 1.0)
    bounded.call(lambda s: s.set("why", "no memory"))
    assert bounded.call(lambda s: s.get("why")) == b"no memory"
