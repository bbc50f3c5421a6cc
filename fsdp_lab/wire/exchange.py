"""`exchange_descriptors`: ranks of one host give each other file descriptors of their memory, over sockets whose names the
kernel makes.

Whether ranks share a host is asked of the kernel: they have the same boot and network namespace, and each could map the
memory of all others. The names of hosts say nothing: containers share them, and one host can have several. What any rank
finds is written to the store, so that all come to the same answer.

Each two ranks keep their connection. Nothing is sent over it afterwards: it ends when one of them leaves, however it does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from socket import MSG_PEEK
from typing import Self, TypeVar

from torch import distributed as dist

SEVERAL_HOSTS = "its ranks are on several hosts"
_PEER = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid
_TOKEN_BYTES, _RANK_BYTES = 16, 4
_ANSWER_S = 10.0  # at most, for what ranks do that are all here
_STRANGER_S = 1.0  # for who connects to say who it is
T = TypeVar("T")
Own = TypeVar("Own")
Everyone = Sequence[Mapping[str, str]]  # of each rank, what it says of itself


class NotShared(Exception):
    """Ranks do not share memory; the message says why. All ranks of the group raise it."""


@dataclass(frozen=True)
class PeerConnection:
    """Another rank: the connection to it, which does not block, and the descriptors that it gave."""

    socket: socket.socket
    descriptors: Sequence[int]

    @property
    def is_gone(self) -> bool:
        """Whether it has closed the connection, or has ended."""
        try:
            return not self.socket.recv(1, MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


def host_id() -> str:
    """Identifies this boot of this machine, and the network namespace, in which the sockets' names are."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"


def exchange_descriptors(
    store: dist.Store,
    rank: int,
    size: int,
    offer: Callable[[], tuple[Own, Sequence[int]]],
    use: Callable[[Own, Mapping[int, PeerConnection]], T],
    timeout_s: float,
) -> T:
    """Gives the descriptors of what `offer` makes to all other ranks, and returns what `use` makes of it and of the others,
    whose descriptors are closed then. Collective. Raises NotShared; either function may raise OSError for that. Raises
    dist.DistStoreError if a rank does not come."""
    facts = {"why": "", "host": "", "user": str(os.geteuid())}
    with contextlib.ExitStack() as stack:
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            own, descriptors = offer()
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind("")  # a name that the kernel makes, which is in no folder and gone with the socket
            listener.listen(size)
            facts |= {"host": host_id(), "name": listener.getsockname().hex(), "token": token.hex()}
        except (OSError, AttributeError) as e:
            facts["why"] = getattr(e, "strerror", None) or str(e)
        everyone = _share_facts(store, "has", rank, size, facts, timeout_s)
        _check(everyone)
        for what, why in (("host", SEVERAL_HOSTS), ("user", "its ranks are of several users")):
            if len({f[what] for f in everyone}) > 1:
                raise NotShared(why)
        answer_s = min(_ANSWER_S, timeout_s / 2)
        with _Exchange(rank, everyone, listener, descriptors, answer_s) as connections:
            why, made = "", None
            try:
                made = use(own, connections.opened())
            except (OSError, ValueError) as e:
                why = f"rank {rank} could not map the memory of the others ({e})"
            _check(_share_facts(store, "uses", rank, size, {"why": why}, timeout_s))
            assert made is not None
            return made


class _Exchange:
    """Connects with each other rank: to those after it, and from those before it."""

    def __init__(
        self, rank: int, everyone: Everyone, listener: socket.socket, descriptors: Sequence[int], answer_s: float
    ) -> None:
        self._rank, self._everyone, self._listener = rank, everyone, listener
        self._token = bytes.fromhex(everyone[rank]["token"])
        self._descriptors, self.peers = list(descriptors), dict[int, PeerConnection]()
        self._open: dict[int, socket.socket] = {}
        self._end_s = time.monotonic() + answer_s

    def opened(self) -> Mapping[int, PeerConnection]:
        """Raises OSError or ValueError."""
        for r in range(self._rank + 1, len(self._everyone)):
            connection = self._open[r] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._left_s)
            connection.connect(bytes.fromhex(self._everyone[r]["name"]))
            self._give(connection, bytes.fromhex(self._everyone[r]["token"]))
        while len(self.peers) < self._rank:
            self._accept()
        for r in range(self._rank + 1, len(self._everyone)):
            self._open[r].settimeout(self._left_s)
            message, descriptors = self._received(self._open[r])
            self._keep(r, self._open.pop(r), descriptors)
            if message != self._token + r.to_bytes(_RANK_BYTES, "little"):
                raise ValueError(f"rank {r} answered for another one")
        return self.peers

    @property
    def _left_s(self) -> float:
        return max(0.01, self._end_s - time.monotonic())

    def _accept(self) -> None:
        self._listener.settimeout(self._left_s)
        connection, _ = self._listener.accept()
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user != os.geteuid():
                return
            connection.settimeout(min(self._left_s, _STRANGER_S))
            try:
                message, descriptors = self._received(connection)
            except OSError:
                return  # a stranger
            r = int.from_bytes(message[_TOKEN_BYTES:], "little")
            known = secrets.compare_digest(message[:_TOKEN_BYTES], self._token)
            if not known or r in self.peers or not 0 <= r < self._rank:
                _close(descriptors)
                return
            stack.pop_all()
        self._keep(r, connection, descriptors)
        self._give(connection, bytes.fromhex(self._everyone[r]["token"]))

    def _keep(self, r: int, connection: socket.socket, descriptors: Sequence[int]) -> None:
        connection.setblocking(False)
        self.peers[r] = PeerConnection(connection, descriptors)
        if len(descriptors) != len(self._descriptors):
            raise ValueError(f"rank {r} sent {len(descriptors)} descriptors")

    def _give(self, connection: socket.socket, token: bytes) -> None:
        socket.send_fds(connection, [token + self._rank.to_bytes(_RANK_BYTES, "little")], self._descriptors)

    def _received(self, connection: socket.socket) -> tuple[bytes, list[int]]:
        flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        message, descriptors, *_ = socket.recv_fds(
            connection, _TOKEN_BYTES + _RANK_BYTES, len(self._descriptors), flags
        )
        return message, list(descriptors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Closes all descriptors, and the connections too unless they are used."""
        for peer in self.peers.values():
            _close(peer.descriptors)
        for connection in (*self._open.values(), *([peer.socket for peer in self.peers.values()] if error else [])):
            connection.close()


def _close(descriptors: Sequence[int]) -> None:
    for d in descriptors:
        os.close(d)


def _check(everyone: Everyone) -> None:
    if why := next((facts["why"] for facts in everyone if facts["why"]), None):
        raise NotShared(why)


def _share_facts(
    store: dist.Store, what: str, rank: int, size: int, facts: Mapping[str, str], timeout_s: float
) -> list[dict[str, str]]:
    """The facts of all ranks, in their order, through the store."""
    keys = [f"{what}/{r}" for r in range(size)]
    store.set(keys[rank], json.dumps(facts))
    store.wait(keys, timedelta(seconds=timeout_s))
    return [json.loads(store.get(key)) for key in keys]
