"""`limit_memory`, whose text runs on the ranks: lets a process allocate so much more, as on a small machine."""

import ctypes
import re
import resource
from pathlib import Path

BLOCK_BYTES = 1 << 20


class MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h: `arena` is the first of its sizes, `hblkhd` the fifth."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def limit_memory(more_bytes: int | None, taken: list[int]) -> None:
    """Sets a limit of the system's for private memory; None lifts it. `taken`: blocks that are held meanwhile, because glibc
    gives out again what a process has freed, without asking the system. Their pages are not touched."""
    library, most = ctypes.CDLL(None), resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    while taken:
        library.free(ctypes.c_void_p(taken.pop()))
    if more_bytes is not None:
        if hasattr(library, "mallinfo2"):  # glibc since 2.33
            take_free(library, taken)
        (held_kib,) = re.findall(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())
        resource.setrlimit(resource.RLIMIT_DATA, ((int(held_kib) << 10) + more_bytes, most))


def take_free(library: ctypes.CDLL, taken: list[int]) -> None:
    """Takes blocks until the library asks the system for one."""
    library.malloc.restype, library.mallinfo2.restype = ctypes.c_void_p, MallInfo
    while True:
        before = library.mallinfo2().sizes
        address = library.malloc(ctypes.c_size_t(BLOCK_BYTES))
        after = library.mallinfo2().sizes
        if address is None or after[0] + after[4] > before[0] + before[4]:
            library.free(ctypes.c_void_p(address))
            return
        taken.append(address)
