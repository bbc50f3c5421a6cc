"""A limit of memory holds also where a process has freed much before."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from fsdp_lab.cluster.memory_limit import MemoryLimit

PIECE = 100_000  # smaller than what the C library takes from the system block by block


def could_take(most_mib):
    taken = []
    try:
        while len(taken) * PIECE < most_mib << 20:
            taken.append(bytearray(PIECE))
    except MemoryError:
        pass
    return len(taken) * PIECE >> 20


pieces = [bytearray(PIECE) for _ in range(2000)]
last = bytearray(PIECE)  # behind them, so that they cannot be given back
del pieces
limit = MemoryLimit()
limit.set(20 << 20)
little = could_take(150)
limit.lift()
print(little, could_take(150))
"""


def test_what_was_freed_does_not_count_as_room() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    little, much = map(int, done.stdout.split())
    assert little <= 25 and much >= 149
