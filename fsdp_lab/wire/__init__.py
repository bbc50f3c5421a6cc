"""The wire: one process group of ours that all bytes between ranks cross.

Read hub.py, work.py, group.py, in this order.
"""

from fsdp_lab.wire.group import Wire, register
from fsdp_lab.wire.hub import Hub, RankAborted, Reduction, WireTimeout
from fsdp_lab.wire.meter import Collective, Meter, exposed, link_bytes, spans, traffic, waits
from fsdp_lab.wire.work import WireWork

__all__ = [
    "Collective",
    "Hub",
    "Meter",
    "RankAborted",
    "Reduction",
    "Wire",
    "WireTimeout",
    "WireWork",
    "exposed",
    "link_bytes",
    "register",
    "spans",
    "traffic",
    "waits",
]
