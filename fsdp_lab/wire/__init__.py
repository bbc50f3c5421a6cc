"""The wire: one process group of ours that all bytes between ranks cross.

Read hub.py, work.py, group.py, in this order.
"""

from fsdp_lab.wire.group import Wire, register
from fsdp_lab.wire.hub import Hub, Issued, RankAborted, Reduction, WireTimeout
from fsdp_lab.wire.meter import Meter, between, link_bytes
from fsdp_lab.wire.work import WireWork

__all__ = [
    "Hub",
    "Issued",
    "Meter",
    "RankAborted",
    "Reduction",
    "Wire",
    "WireTimeout",
    "WireWork",
    "between",
    "link_bytes",
    "register",
]
