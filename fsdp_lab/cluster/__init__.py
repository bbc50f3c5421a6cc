"""The ranks as ipyparallel engines: started or taken, placed on devices, joined, called, supervised and ended.

The only package that uses ipyparallel. Names are imported when first used, because the guardian is a module of this package
too and has to start in a few milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_lab.cluster.assembly import StartProgress
    from fsdp_lab.cluster.calls import Call
    from fsdp_lab.cluster.cluster import Cluster
    from fsdp_lab.cluster.errors import ClusterError, Interrupted, RankError, RankHung, RankLost, RankStuck, StartError
    from fsdp_lab.cluster.membership import RankStatus

_HOME = {
    "Call": "calls",
    "Cluster": "cluster",
    "StartProgress": "assembly",
    "RankStatus": "membership",
    **dict.fromkeys(
        ("ClusterError", "Interrupted", "RankError", "RankHung", "RankLost", "RankStuck", "StartError"), "errors"
    ),
}

__all__ = [
    "Call",
    "Cluster",
    "ClusterError",
    "Interrupted",
    "RankError",
    "RankHung",
    "RankLost",
    "RankStatus",
    "RankStuck",
    "StartError",
    "StartProgress",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
