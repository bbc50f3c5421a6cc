"""fsdp_lab: a laboratory for Fully Sharded Data Parallel.

Public names are imported at their first use, so that `import fsdp_lab` imports neither torch nor Jupyter, and Specs can be
read and written on a machine without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fsdp_lab.core import __version__ as __version__

if TYPE_CHECKING:
    from fsdp_lab.cluster import ClusterError, RankHung, RankLost
    from fsdp_lab.core.errors import ArgumentError, SpecError
    from fsdp_lab.core.events import Memory, StepEvent, Traffic
    from fsdp_lab.core.formatting import Table
    from fsdp_lab.core.spec import Precision, Spec, Strategy, Workload
    from fsdp_lab.dashboard import Dashboard, WhatIf
    from fsdp_lab.history import History
    from fsdp_lab.lab import Lab
    from fsdp_lab.models.presets import PRESETS
    from fsdp_lab.report import write_report
    from fsdp_lab.runs import CheckpointConfig, Comparison, EvalConfig, Recommendation, RecoveryPolicy, Run, RunState


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
    "write_report",
]

_HOME = {
    "ArgumentError": "fsdp_lab.core.errors",
    "ClusterError": "fsdp_lab.cluster",
    "Comparison": "fsdp_lab.runs",
    "Dashboard": "fsdp_lab.dashboard",
    "EvalConfig": "fsdp_lab.runs",
    "History": "fsdp_lab.history",
    "Lab": "fsdp_lab.lab",
    "Memory": "fsdp_lab.core.events",
    "PRESETS": "fsdp_lab.models.presets",
    "Precision": "fsdp_lab.core.spec",
    "RankHung": "fsdp_lab.cluster",
    "RankLost": "fsdp_lab.cluster",
    "Recommendation": "fsdp_lab.runs",
    "RecoveryPolicy": "fsdp_lab.runs",
    "Run": "fsdp_lab.runs",
    "RunState": "fsdp_lab.runs",
    "CheckpointConfig": "fsdp_lab.runs",
    "Spec": "fsdp_lab.core.spec",
    "SpecError": "fsdp_lab.core.errors",
    "StepEvent": "fsdp_lab.core.events",
    "Strategy": "fsdp_lab.core.spec",
    "Table": "fsdp_lab.core.formatting",
    "Traffic": "fsdp_lab.core.events",
    "WhatIf": "fsdp_lab.dashboard",
    "Workload": "fsdp_lab.core.spec",
    "write_report": "fsdp_lab.report",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as e:
        from fsdp_lab.core.errors import not_installed

        raise not_installed(f"{__name__}.{name}", e) from None
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
