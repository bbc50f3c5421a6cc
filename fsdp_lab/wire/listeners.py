"""Gloo's listening sockets: who may still connect to them.

Note: a listener after its group is open. Gloo listens at a port as long as a group lives, keeps the descriptor of every
connection, and gives one that says an expected number the place of a rank. All connections of a group are made while it is
opened; `shut` then attaches a socket filter to the listener, which drops every packet that asks for a connection. So another
user finds a port that does not answer. Connections that exist have no filter: they took the listener's before it had one.
Closing the socket, or `shutdown` of it, is no way: Gloo's thread would wait for events of a closed descriptor, or be woken
without end. Only Linux has such filters; elsewhere the port stays open.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

ATTACH_FILTER = 26  # SO_ATTACH_FILTER of asm-generic/socket.h
RETURN = 0x06  # BPF_RET | BPF_K: how many bytes of a packet are kept
DESCRIPTORS = "/proc/self/fd"
Made = TypeVar("Made")


def made_by(make: Callable[[], Made]) -> tuple[Made, list[int]]:
    """What `make` returns, and the descriptors of sockets that listen since. Only on Linux; elsewhere none are found."""
    before = _sockets()
    made = make()
    return made, [d for d, _ in sorted(_sockets() - before) if _listens(d)]


def shut(descriptors: list[int]) -> None:
    """Nobody connects to these listening sockets any more. A system that refuses the filter leaves them as they are."""
    drop = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, 0), 8)
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    for descriptor in descriptors:
        with suppress(OSError), _socket(descriptor) as listener:
            listener.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, program)


def _sockets() -> set[tuple[int, str]]:
    """Descriptors of this process that are sockets, each with the name of its socket: numbers are used again."""
    found = set()
    for name in os.listdir(DESCRIPTORS) if sys.platform == "linux" else ():
        with suppress(OSError):  # closed meanwhile
            found.add((int(name), os.readlink(f"{DESCRIPTORS}/{name}")))
    return {(descriptor, target) for descriptor, target in found if target.startswith("socket:")}


def _listens(descriptor: int) -> bool:
    with suppress(OSError), _socket(descriptor) as found:
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


@contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket]:
    """Of a descriptor that stays open."""
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()
