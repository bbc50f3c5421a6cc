"""`GpuArena`: memory of a GPU in which other ranks on the same GPU read, for a `GpuGroup` of its tensors.

Note: ranks that share a GPU. NCCL takes one rank a GPU, and over Gloo tensors are copied to the host and back. But such
ranks are in one memory: each allocates pieces of it that the driver exports (CUDA IPC), and others open them. A collective
is then that of shared_memory.py, with copies and sums on the GPU. What ranks tell each other goes through the host, which
waits for the GPU in two places: before a rank says that its bytes are there, and before it says that it has read those of
others. Nothing else depends on streams: after a wait results are complete, and what was freed meanwhile has been read.

The driver allocates the pieces, since torch's own way to share tensors leaves named files behind when a process is killed.
There are as many as collectives in flight need, and they are freed with their group. When a group is opened each rank reads
a pattern from each other one: where memory is not shared, all ranks together go on through the host."""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import finalize

import torch
from torch import Tensor, distributed as dist

from fsdp_lab.wire.arena import ArenaBlock, class_bytes

_PIECE_BYTES = 32 << 20  # at least, of what is allocated at once
_PIECE_BITS = 40  # of an offset: below them the place in a piece, above them which piece
_PATTERN_BYTES = 1 << 10  # at the beginning of a rank's first piece, while a group is opened
_HANDLE_BYTES = 64  # of the driver's
_PEER_ACCESS = 1  # a flag of `cuIpcOpenMemHandle`, the only one there is


class DeviceMemory(Protocol):
    """Pieces of a device's memory that processes share. Its methods raise OSError. A test has a simulated one."""

    def allocate(self, nbytes: int) -> tuple[Tensor, bytes]:
        """uint8 [nbytes], and a handle by which other processes open it; freed with the tensor."""

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        """uint8 [nbytes], of another process."""


class GpuArena:
    """A rank's own, for one group. `store`: the group's, by which others find the pieces. `synchronize` waits for the
    current stream."""

    def __init__(self, memory: DeviceMemory, store: dist.Store, rank: int, synchronize: Callable[[], None]) -> None:
        """Raises OSError."""
        self._memory, self._store, self._rank, self.synchronize = memory, store, rank, synchronize
        self._pieces: list[Tensor] = []
        self._ends: list[int] = []  # of each piece, where its blocks end
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets by size
        self._used = 0  # blocks
        self._extend(_PIECE_BYTES)
        self._pieces[0][:_PATTERN_BYTES].copy_(_pattern(rank))
        self.synchronize()

    @property
    def descriptors(self) -> Sequence[int]:
        return ()

    def peer(self, rank: int, descriptors: Sequence[int]) -> "PeerGpuMemory":
        """Another rank's. Raises OSError where it cannot be read."""
        peer = PeerGpuMemory(self._memory, self._store, rank)
        try:
            is_right = torch.equal(peer.bytes_at(0, _PATTERN_BYTES).cpu(), _pattern(rank))
        except RuntimeError as e:  # of CUDA
            raise OSError(None, str(e)) from None
        if not is_right:
            raise OSError(None, f"what rank {rank} wrote to this GPU cannot be read")
        return peer

    def allocate(self, nbytes: int) -> ArenaBlock:
        """Raises MemoryError."""
        size = class_bytes(nbytes)
        offset = self._free[size].pop() if self._free[size] else self._next(size)
        self._used += 1
        return ArenaBlock(offset, size)

    def _next(self, size: int) -> int:
        """The offset of a block that was none before: in the first piece that has room, or in a new one."""
        number = next((n for n, p in enumerate(self._pieces) if p.nbytes - self._ends[n] >= size), len(self._pieces))
        if number == len(self._pieces):
            try:
                self._extend(max(size, _PIECE_BYTES))
            except OSError as e:
                raise MemoryError(f"{size} bytes of the GPU could not be allocated: {e.strerror}") from None
        begin, self._ends[number] = self._ends[number], self._ends[number] + size
        return (number << _PIECE_BITS) + begin

    def _extend(self, nbytes: int) -> None:
        piece, handle = self._memory.allocate(nbytes)
        self._store.set(_key(self._rank, len(self._pieces)), f"{nbytes} {handle.hex()}")
        self._pieces.append(piece)
        self._ends.append(0)

    def free(self, block: ArenaBlock) -> None:
        self._free[block.nbytes].append(block.offset)
        self._used -= 1
        if not self._used:  # blocks of other sizes may take their place
            self._free.clear()
            self._ends = [0] * len(self._pieces)

    def share(self, block: ArenaBlock) -> None:
        raise NotImplementedError("what is sent is copied to a block of its own")

    def bytes_at(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        begin = offset & ((1 << _PIECE_BITS) - 1)
        return self._pieces[offset >> _PIECE_BITS][begin : begin + nbytes].view(dtype)

    def find(self, tensor: Tensor) -> tuple[ArenaBlock, int] | None:
        """No tensor of others is in it."""
        return None

    def keep_private(self, tensor: Tensor) -> None:
        return

    def trim(self) -> None:
        return


class PeerGpuMemory:
    """Another rank's, whose pieces are opened when they are first read."""

    def __init__(self, memory: DeviceMemory, store: dist.Store, rank: int) -> None:
        self._memory, self._store, self._rank = memory, store, rank
        self._pieces: dict[int, Tensor] = {}

    def bytes_at(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Raises OSError."""
        number, begin = offset >> _PIECE_BITS, offset & ((1 << _PIECE_BITS) - 1)
        if number not in self._pieces:
            nbytes_there, handle = self._store.get(_key(self._rank, number)).decode().split()
            self._pieces[number] = self._memory.open(bytes.fromhex(handle), int(nbytes_there))
        return self._pieces[number][begin : begin + nbytes].view(dtype)

    def close(self) -> None:
        self._pieces = {}


def _key(rank: int, number: int) -> str:
    return f"piece/{rank}/{number}"


def _pattern(rank: int) -> Tensor:
    """uint8 [_PATTERN_BYTES], another one for each rank."""
    return (torch.arange(_PATTERN_BYTES) * (2 * rank + 3) % 251).to(torch.uint8)


class CudaMemory:
    """`DeviceMemory` of a GPU, by the driver: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html"""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError without a driver."""
        self._device, self._driver = device, ctypes.CDLL("libcuda.so.1")

    def allocate(self, nbytes: int) -> tuple[Tensor, bytes]:
        address, handle = ctypes.c_uint64(), _Handle()
        with torch.cuda.device(self._device):
            try:
                self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
            except OSError:
                torch.cuda.empty_cache()  # torch keeps what is free
                self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
            tensor = self._tensor(address.value, nbytes, "cuMemFree_v2")
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return tensor, bytes(handle)

    def open(self, handle: bytes, nbytes: int) -> Tensor:
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        with torch.cuda.device(self._device):
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_PEER_ACCESS))
            return self._tensor(address.value, nbytes, "cuIpcCloseMemHandle")

    def _tensor(self, address: int, nbytes: int, end: str) -> Tensor:
        """uint8 [nbytes]; `end`: what the driver is to do when nobody has it."""
        memory = _Span(address, nbytes)
        finalize(memory, _end, self._device, getattr(self._driver, end), address).atexit = False
        try:
            tensor = torch.as_tensor(memory, device=self._device)  # keeps it
        except (RuntimeError, TypeError, ValueError) as e:  # as a build of torch without NumPy
            raise OSError(None, f"torch cannot use the driver's memory ({e})") from None
        if tensor.data_ptr() != address:
            raise OSError(None, "it is the memory of another GPU, of which torch would make a copy")
        return tensor

    def _call(self, name: str, *arguments: Any) -> None:
        torch.cuda.current_stream(self._device).synchronize()  # torch's context is this thread's then
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise OSError(code, f"{name} failed with CUDA's error {code}")


def _end(device: torch.device, call: Any, address: int) -> None:
    """In whatever thread the last reference went."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()
        call(ctypes.c_uint64(address))


class _Handle(ctypes.Structure):
    """Passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_BYTES)]


class _Span:
    """A range of a GPU's addresses, which torch takes as a tensor."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
