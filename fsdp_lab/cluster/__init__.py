"""The ranks as ipyparallel engines: started or taken, placed on devices, joined, called, watched and ended.

The only package that knows ipyparallel. Names are imported when first asked for, because the guardian is a module of
this package too and has to start in a few milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_lab.cluster.calls import Call
    from fsdp_lab.cluster.cluster import Cluster, Progress, RankStatus
    from fsdp_lab.cluster.errors import ClusterError, Interrupted, RankError, RankHung, RankLost, RankStuck, StartError
    from fsdp_lab.cluster.placement import Placement, Seat

__all__ = [
    "Call",
    "Cluster",
    "ClusterError",
    "Interrupted",
    "Placement",
    "Progress",
    "RankError",
    "RankHung",
    "RankLost",
    "RankStatus",
    "RankStuck",
    "Seat",
    "StartError",
]


def __getattr__(name: str) -> Any:
    if name == "Call":
        from fsdp_lab.cluster import calls as home
    elif name in ("Cluster", "Progress", "RankStatus"):
        from fsdp_lab.cluster import cluster as home  # type: ignore[no-redef]
    elif name in ("Placement", "Seat"):
        from fsdp_lab.cluster import placement as home  # type: ignore[no-redef]
    elif name in __all__:
        from fsdp_lab.cluster import errors as home  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(home, name)
