"""Free ports of this machine."""

import contextlib
import random
import socket


def free_ports(count: int) -> list[int]:
    """Below those that Linux gives out by itself: whoever asks for any port, as Gloo and Jupyter's kernels do, could get one
    of these between this answer and its use. Raises OSError if too few are free."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 1_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{count} ports are needed, and {len(found)} are free")
