"""The wire: one process group of ours that all bytes between ranks cross.

Read hub.py, work.py, group.py, in this order; link.py by itself.
"""

from fsdp_lab.wire.group import Wire, register
from fsdp_lab.wire.hub import Hub, RankAborted, Reduction, WireTimeout
from fsdp_lab.wire.link import Alarm, Link, Way
from fsdp_lab.wire.meter import Collective, Meter, exposed, link_bytes, spans, traffic, waits
from fsdp_lab.wire.work import WireWork

__all__ = [
    "Alarm",
    "Collective",
    "Hub",
    "Link",
    "Meter",
    "RankAborted",
    "Reduction",
    "Way",
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
