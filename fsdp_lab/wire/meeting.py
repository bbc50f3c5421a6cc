"""How the ranks of one host exchange descriptors of their memory: `meet`, over sockets with names that the kernel makes.

Whether ranks share a host is asked of the kernel: they have the same boot and network namespace, and each could map the
memory of all others. The names of hosts say nothing: containers share them, and one host can have several. What any rank
finds is written to the store, so that all come to the same answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import distributed as dist

_PEER = struct.Struct("3i")  # SO_PEERCRED: pid, uid, gid
_TOKEN_BYTES = 16
T = TypeVar("T")
Own = TypeVar("Own")


class NotShared(Exception):
    """Ranks do not share memory; the message says why. All ranks of the group raise it."""


def host_id() -> str:
    """Of this boot of this machine, and of the network namespace, in which the sockets' names are."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"


def meet(
    store: dist.Store,
    rank: int,
    size: int,
    offer: Callable[[], tuple[Own, Sequence[int]]],
    use: Callable[[Own, Mapping[int, Sequence[int]]], T],
    timeout_s: float,
) -> T:
    """Gives the descriptors of what `offer` makes to all other ranks, and returns what `use` makes of it and of theirs, by
    rank, which are closed then. Collective. Raises NotShared; either function may raise OSError for that."""
    with contextlib.ExitStack() as stack:
        facts: dict[str, str] = {"why": "", "host": ""}
        try:
            (own, descriptors), listener = offer(), stack.enter_context(_listener(size, timeout_s))
            token = secrets.token_bytes(_TOKEN_BYTES)
            facts |= {"host": host_id(), "name": listener.getsockname().hex(), "token": token.hex()}
        except OSError as e:
            facts["why"] = e.strerror or str(e)
        everyone = _told(store, "has", rank, size, facts)
        _check(everyone)
        if len({f["host"] for f in everyone}) > 1:
            raise NotShared("its ranks are on several hosts")
        why, found = "", None
        try:
            _give(rank, everyone, descriptors, timeout_s)
            theirs = _taken(listener, rank, size, token, len(descriptors))
            stack.callback(_close, theirs)
            found = use(own, theirs)
        except (OSError, ValueError) as e:
            why = f"rank {rank} could not map the memory of the others ({e})"
        _check(_told(store, "uses", rank, size, {"why": why}))
        assert found is not None
        return found


def _check(everyone: Sequence[Mapping[str, str]]) -> None:
    if why := next((facts["why"] for facts in everyone if facts["why"]), None):
        raise NotShared(why)


def _close(found: Mapping[int, Sequence[int]]) -> None:
    for d in (d for descriptors in found.values() for d in descriptors):
        os.close(d)


def _told(store: dist.Store, what: str, rank: int, size: int, facts: Mapping[str, str]) -> list[dict[str, str]]:
    """What each rank has told, in their order."""
    store.set(f"{what}/{rank}", json.dumps(facts))
    return [json.loads(store.get(f"{what}/{r}")) for r in range(size)]


def _listener(size: int, timeout_s: float) -> socket.socket:
    """With a name that the kernel makes, which is in no folder and gone with the socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.settimeout(timeout_s)
    try:
        listener.bind("")
        listener.listen(size)
    except BaseException:
        listener.close()
        raise
    return listener


def _give(rank: int, everyone: Sequence[Mapping[str, str]], descriptors: Sequence[int], timeout_s: float) -> None:
    for r, facts in enumerate(everyone):
        if r != rank:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
                s.settimeout(timeout_s)
                s.connect(bytes.fromhex(facts["name"]))
                socket.send_fds(s, [bytes.fromhex(facts["token"]) + rank.to_bytes(4, "little")], list(descriptors))


def _taken(listener: socket.socket, rank: int, size: int, token: bytes, count: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    try:
        while len(found) < size - 1:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(listener.gettimeout())
                message, descriptors, _, _ = socket.recv_fds(connection, _TOKEN_BYTES + 4, count)
                peer = int.from_bytes(message[_TOKEN_BYTES:], "little")
                known = secrets.compare_digest(message[:_TOKEN_BYTES], token) and _is_of_this_user(connection)
                if not known or len(descriptors) != count or peer in (rank, *found) or not 0 <= peer < size:
                    for d in descriptors:
                        os.close(d)
                    if known:
                        raise ValueError(f"rank {peer} sent {len(descriptors)} descriptors")
                    continue  # a stranger
                found[peer] = list(descriptors)
    except BaseException:
        _close(found)
        raise
    return found


def _is_of_this_user(connection: socket.socket) -> bool:
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())
