"""Another user of this machine connects to every port that a lab listens on: no result changes, and no run ends."""

import contextlib
import json
import os
import random
import socket
import struct

import psutil
import pytest
import zmq

from fsdp_lab.base.process import marked
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState
from tests.lab.events import losses
from tests.lab.test_real_ranks import SMALL
from tests.waiting import until

STEPS = 30
ANSWER_S = 0.3
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # of ZeroMQ
READY = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
STORE = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # of a client of TCPStore: who it is, then what it asks
PING = b"\x0d" + struct.pack("<I", 7)
SET = b"\x01" + struct.pack("<Q", 7) + b"abort/0" + struct.pack("<Q", 6) + b"1 stop"


def listeners(lab: Lab) -> list[tuple[int, str, int]]:
    """(pid, address, port) of the kernel, which is this process, of the controller and of the ranks."""
    pids = [os.getpid(), *(p.pid for p in marked(lab.cluster.token))]
    return [(pid, c.laddr.ip, c.laddr.port) for pid in pids for c in psutil.Process(pid).net_connections(kind="inet")
            if c.status == psutil.CONN_LISTEN]  # fmt: skip


def messages(rng: random.Random) -> list[bytes]:
    """Garbage, and what the listeners expect from those they know."""
    garbage = [rng.randbytes(size) for size in (1, 7, 8, 9, 64, 4096, 1 << 20)]
    numbers = [struct.pack("<q", number) for number in (0, 1, 2, 3, -1, 1 << 62)]  # how a pair of Gloo begins
    zeromq = [GREETING, GREETING + READY + b"\x00\x05hello", GREETING + rng.randbytes(256)]
    return [b"", *garbage, *numbers, numbers[1] + rng.randbytes(64), STORE + PING, STORE + SET, *zeromq]


def request(kind: str) -> list[bytes]:
    """A message of ipyparallel whose signature is wrong."""
    header = {"msg_id": "0", "msg_type": kind, "session": "0", "username": "stranger", "date": "", "version": "5.3"}
    return [b"<IDS|MSG>", b"0" * 64, json.dumps(header).encode(), b"{}", b"{}", b"{}"]


def attack(ports: list[int], opened: list[socket.socket]) -> None:
    """Sends everything to every port. `opened`: connections that it leaves open; others it ends by a reset."""
    rng = random.Random(0)
    for message in messages(rng):
        for port in ports:
            s = socket.create_connection(("127.0.0.1", port), timeout=5)
            with contextlib.suppress(OSError):
                s.sendall(message)
            if rng.random() < 0.5:
                opened.append(s)
            else:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                s.close()
    with zmq.Context() as context:  # by ZeroMQ's own client
        for kind in (zmq.DEALER, zmq.PUB):
            for port in ports:
                with context.socket(kind) as s:
                    s.linger = s.sndtimeo = 50
                    s.connect(f"tcp://127.0.0.1:{port}")
                    with contextlib.suppress(zmq.ZMQError):
                        for what in ("shutdown_request", "apply_request", "connection_request", "purge_request"):
                            s.send_multipart(request(what))


@pytest.mark.slow
def test_a_lab_listens_on_loopback_and_all_its_ports_are_zeromq_s(real_lab: Lab) -> None:
    real_lab.run(**SMALL, steps=1).wait(60)
    found = listeners(real_lab)
    assert found and {address for _, address, _ in found} == {"127.0.0.1"}
    for *_, port in found:  # ranks of one host open no port of a store's or Gloo's, which wait to be told something
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as s:
            assert s.recv(1) == b"\xff", "ZeroMQ greets whoever connects"


@pytest.mark.nightly
def test_a_stranger_changes_no_result_and_ends_no_run() -> None:
    """On a lab of its own: connections of strangers stay until its groups are closed."""
    with Lab(2, reduction="rank_ordered") as lab:
        expected = losses(lab.run(**SMALL, steps=STEPS).wait(120))
        pids, ports, opened = lab.cluster.pids, sorted({port for _, _, port in listeners(lab)}), list[socket.socket]()
        run = lab.run(**SMALL)
        until(lambda: run.step > 1)
        attack(ports, opened)
        until(lambda: run.step > STEPS or run.done)
        assert ports and run.stop(20) and run.state is RunState.STOPPED
        assert {step: loss for step, loss in losses(run).items() if step in expected} == expected
        again = lab.run(**SMALL, sharding="shard_grad_op", steps=3).wait(60)  # other groups, while connections are open
        for s in opened:
            s.close()
        assert again.state is RunState.FINISHED and lab.cluster.pids == pids and not lab.cluster.lost
