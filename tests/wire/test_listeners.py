"""Nobody connects to a listening socket that is shut, and connections that were made before stay."""

from __future__ import annotations

import socket
import sys

import pytest
import torch
from torch import distributed as dist

from fsdp_lab.rank.rendezvous import close_groups, open_groups
from fsdp_lab.wire import listeners
from tests.pool import Place, Pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has socket filters")
ANSWER_S = 0.3


def test_a_shut_listener_keeps_its_connections() -> None:
    server, (descriptor,) = listeners.made_by(lambda: socket.create_server(("127.0.0.1", 0)))
    address = server.getsockname()
    with server, socket.create_connection(address) as early, server.accept()[0] as accepted:
        assert descriptor == server.fileno()
        with socket.create_connection(address, timeout=ANSWER_S):
            listeners.shut([descriptor])
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=ANSWER_S)
        early.sendall(b"still here")
        assert accepted.recv(64) == b"still here"


def test_other_descriptors_are_no_listeners() -> None:
    with socket.socket() as one:
        made, found = listeners.made_by(lambda: (socket.socket(), open("/dev/null"), one.dup()))  # noqa: SIM115
        for opened in made:
            opened.close()
    assert found == []


def ports() -> set[int]:
    """At which this process listens."""
    import psutil

    return {c.laddr.port for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}


def answers(place: Place) -> list[str]:
    """Of the ports that a group has opened, to a stranger, between two collectives. The process may have others, of groups
    of torch's own."""
    before = ports()
    open_groups(place.info, place.store, place.context, 0)
    dist.all_reduce(torch.ones(10))
    found = []
    for port in ports() - before:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S).close()
            found.append("connected")
        except TimeoutError:
            found.append("no answer")
    x = torch.ones(10)
    dist.all_reduce(x)
    assert x[0] == place.world_size
    close_groups(place.context)
    return found


def test_gloo_s_ports_are_shut_when_a_group_is_open(pool: Pool) -> None:
    for found in pool.run(answers, 2, reduction=None):
        assert found and set(found) == {"no answer"}
