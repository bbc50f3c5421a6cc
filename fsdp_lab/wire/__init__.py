"""The wire: one instrumented process group that all bytes between ranks cross.

Read context.py, work.py, group.py, in this order; link.py and nccl.py are independent, and so is shared memory: arena.py,
channels.py, shared_memory.py, host_group.py, gpu_memory.py."""

from fsdp_lab.wire.arena import REPORT as ARENA_REPORT
from fsdp_lab.wire.context import SHARED_MEMORY, RankAborted, ReductionOrder, WireContext, WireTimeout
from fsdp_lab.wire.gpu_memory import CudaMemory, DeviceMemory
from fsdp_lab.wire.group import Wire, register
from fsdp_lab.wire.link import Alarm, Link, LinkDirection
from fsdp_lab.wire.meter import Collective, across, exposed, link_bytes, spans, traffic, waits
from fsdp_lab.wire.nccl import Nccl

__all__ = [
    "ARENA_REPORT",
    "SHARED_MEMORY",
    "Alarm",
    "Collective",
    "CudaMemory",
    "DeviceMemory",
    "Link",
    "LinkDirection",
    "Nccl",
    "RankAborted",
    "ReductionOrder",
    "Wire",
    "WireContext",
    "WireTimeout",
    "across",
    "exposed",
    "link_bytes",
    "register",
    "spans",
    "traffic",
    "waits",
]
