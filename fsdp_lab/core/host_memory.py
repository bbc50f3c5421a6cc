"""How a rank has its host memory, wherever we start one: for the lab, for a bench, and for what it is compared with.

torch asks Linux for pages of 2 MiB under large tensors: a step makes and drops many, and every page of 4 KiB is a fault. And
glibc keeps one heap: where each thread has its own, what is free in one serves no other, and with every switch a rank would
keep a little more. Values do not change by it.
"""

from __future__ import annotations

from collections.abc import Mapping

HOST_MEMORY: Mapping[str, str] = {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_ARENA_MAX": "1"}  # what the user has set wins
