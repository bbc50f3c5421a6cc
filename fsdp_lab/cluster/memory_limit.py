"""`MemoryLimit`: how much more memory this process may allocate, as on a small machine."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

BLOCK_BYTES = 1 << 20


class MemoryLimit:
    """A limit of the system's for private memory. glibc keeps what a process has freed, and gives it out again without
    asking the system, so the larger part of that is taken first; its pages are not touched."""

    def __init__(self) -> None:
        self._taken: list[int] = []  # addresses of blocks

    def set(self, more_bytes: int) -> None:
        """Raises RuntimeError where the system has no such limit."""
        self.lift()
        self._take_free()
        self._apply(more_bytes)

    def lift(self) -> None:
        """The process may allocate as much as before."""
        self._apply(None)
        for address in self._taken:
            ctypes.CDLL(None).free(ctypes.c_void_p(address))
        self._taken = []

    def _apply(self, more_bytes: int | None) -> None:
        try:
            import resource

            (held_kib,) = re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
        except (ImportError, OSError, ValueError):
            raise RuntimeError("the memory of a process can be limited on Linux alone") from None
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = most if more_bytes is None else (int(held_kib) << 10) + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (soft, most))

    def _take_free(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "mallinfo2"):  # another C library, or glibc before 2.33
            return
        library.malloc.restype, library.mallinfo2.restype = ctypes.c_void_p, _MallInfo
        while True:
            before = library.mallinfo2()
            address = library.malloc(ctypes.c_size_t(BLOCK_BYTES))
            after = library.mallinfo2()
            if address is None or after.arena + after.hblkhd > before.arena + before.hblkhd:  # nothing was free
                library.free(ctypes.c_void_p(address))
                return
            self._taken.append(address)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
                     "keepcost")
    )  # fmt: skip
