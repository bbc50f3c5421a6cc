"""`DeferredStorage`: what a new backend will hold, not yet allocated; `free`, which returns storage to the allocator; and
`return_memory`, with which the allocator returns it to the system.

A backend is built unit by unit, and the storage of each unit is freed as soon as the unit exists (`defer`). So building
one takes the memory of one unit, also beside a live one. It is allocated again, at its size and with zeros, when values
come: all of it (`fill`), or a few parameters at a time (transfer.py).

Note: freed storage. A tensor whose storage is freed keeps its shape, and what views it later sees the new allocation.
But torch makes no new slice of it, so slices are made before; and reading it reads address 0.

Shards that other ranks map (`gather="mapped"`) are not torch's to free: they exist from the build on, until nobody has them.
So a switch from or to them holds both.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Collection, Iterable

import torch
from torch import Tensor


class DeferredStorage:
    """See the module."""

    def __init__(self) -> None:
        # By the identity of the first storage: sizes.
        self._owed: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}

    def defer(self, tensor: Tensor, *others: Tensor) -> None:
        """Free a tensor's storage until it is allocated; that of `others` together with it."""
        storages = [_storage(t) for t in (tensor, *others)]
        owed = [(s, s.nbytes()) for s in storages if s.nbytes() and s.resizable()]  # torch's pinned memory is not
        if owed:
            self._owed.setdefault(storages[0]._cdata, []).extend(owed)
        for storage, _ in owed:
            storage.resize_(0)

    def allocate(self, tensors: Iterable[Tensor] | None) -> None:
        """Allocates the storage of these, or of all, where it is deferred."""
        keys = list(self._owed) if tensors is None else [_storage(t)._cdata for t in tensors]
        for storage, nbytes in (owed for key in keys for owed in self._owed.pop(key, ())):
            storage.resize_(nbytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()  # padding must be zero


def return_memory(device: torch.device) -> None:
    """Make the allocators return cached memory to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):  # of pinned memory
            torch._C._host_emptyCache()
    with contextlib.suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def free(tensors: Iterable[Tensor], busy: Collection[int] = ()) -> None:
    """Return storage to the allocator now, even if it is still referenced, unless its address is in `busy`.

    Dropping a wrapped model does not free it: FSDP1 leaks about 18 MiB for each build of a 3.3M-parameter GPT-2.
    """
    for t in tensors:
        storage = _storage(t)
        if storage.nbytes() and storage.resizable() and storage.data_ptr() not in busy:
            storage.resize_(0)


def storage_id(t: Tensor) -> int:
    """Equal for tensors that share storage, also for what is freed."""
    return int(_storage(t)._cdata)


def _storage(t: Tensor) -> torch.UntypedStorage:
    inner: Tensor = getattr(t, "_local_tensor", t)
    return inner.untyped_storage()
