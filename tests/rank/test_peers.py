"""A rank sees that a peer of its machine is gone, and takes no other process for it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

from torch import distributed as dist

from fsdp_lab.base.process import Identity, machine
from fsdp_lab.rank.abort import Peers


def says(store: dist.Store, rank: int, process: Identity, where: str) -> None:
    store.set(f"process/{rank}", json.dumps({"machine": where, "process": asdict(process)}))


def test_a_peer_is_gone_when_its_process_is() -> None:
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
