"""fsdp_lab: a laboratory for Fully Sharded Data Parallel.

Public names are imported at their first use, so that `import fsdp_lab` imports neither torch nor Jupyter, and Specs can be
read and written on a machine without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_lab.base import __version__ as __version__, lazy_names

if TYPE_CHECKING:
    from fsdp_lab.base.errors import ArgumentError, SpecError
    from fsdp_lab.base.events import Memory, StepEvent, Traffic
    from fsdp_lab.base.formatting import Table
    from fsdp_lab.cluster import ClusterError, RankHung, RankLost
    from fsdp_lab.dashboard import Dashboard
    from fsdp_lab.lab import Lab
    from fsdp_lab.models.presets import PRESETS
    from fsdp_lab.models.weights import unwrap_names
    from fsdp_lab.rank.torchrun import init_process_group
    from fsdp_lab.report import WhatIf, write_report
    from fsdp_lab.runs import CheckpointConfig, Comparison, EvalConfig, Recommendation, RecoveryPolicy, Run, RunState
    from fsdp_lab.runs.history.history import History
    from fsdp_lab.runs.history.loops import watch
    from fsdp_lab.spec.spec import Precision, Spec, Strategy
    from fsdp_lab.spec.workload import Workload


__all__ = [
    "PRESETS",
    "ArgumentError",
    "CheckpointConfig",
    "ClusterError",
    "Comparison",
    "Dashboard",
    "EvalConfig",
    "History",
    "Lab",
    "Memory",
    "Precision",
    "RankHung",
    "RankLost",
    "Recommendation",
    "RecoveryPolicy",
    "Run",
    "RunState",
    "Spec",
    "SpecError",
    "StepEvent",
    "Strategy",
    "Table",
    "Traffic",
    "WhatIf",
    "Workload",
    "init_process_group",
    "unwrap_names",
    "watch",
    "write_report",
]

_HOMES = {
    "ArgumentError": "base.errors",
    "ClusterError": "cluster",
    "Comparison": "runs",
    "Dashboard": "dashboard",
    "EvalConfig": "runs",
    "History": "runs.history.history",
    "Lab": "lab",
    "Memory": "base.events",
    "PRESETS": "models.presets",
    "Precision": "spec.spec",
    "RankHung": "cluster",
    "RankLost": "cluster",
    "Recommendation": "runs",
    "RecoveryPolicy": "runs",
    "Run": "runs",
    "RunState": "runs",
    "CheckpointConfig": "runs",
    "Spec": "spec.spec",
    "SpecError": "base.errors",
    "StepEvent": "base.events",
    "Strategy": "spec.spec",
    "Table": "base.formatting",
    "Traffic": "base.events",
    "WhatIf": "report",
    "Workload": "spec.workload",
    "init_process_group": "rank.torchrun",
    "unwrap_names": "models.weights",
    "watch": "runs.history.loops",
    "write_report": "report",
}

_first_use, __dir__ = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    try:
        return _first_use(name)
    except ModuleNotFoundError as e:
        from fsdp_lab.base.errors import not_installed

        raise not_installed(f"{__name__}.{name}", e) from None
