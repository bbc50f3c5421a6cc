"""fsdp_lab: a laboratory for Fully Sharded Data Parallel.

The public names live on their floors and are imported when they are first asked for, so that `import fsdp_lab` costs
nothing: no torch, no Jupyter, and a machine with neither can still read and write Specs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_lab.cluster import ClusterError, RankHung, RankLost
    from fsdp_lab.dashboard import Dashboard, WhatIf
    from fsdp_lab.events import Memory, StepEvent, Traffic
    from fsdp_lab.lab import Lab
    from fsdp_lab.models.presets import PRESETS
    from fsdp_lab.report import write_report
    from fsdp_lab.runs import Comparison, Evaluating, History, Recommendation, Recovering, Run, RunState, Saving
    from fsdp_lab.spec import Precision, Spec, SpecError, Strategy, Workload
    from fsdp_lab.table import Table

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "ClusterError",
    "Comparison",
    "Dashboard",
    "Evaluating",
    "History",
    "Lab",
    "Memory",
    "Precision",
    "RankHung",
    "RankLost",
    "Recommendation",
    "Recovering",
    "Run",
    "RunState",
    "Saving",
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
    "ClusterError": "fsdp_lab.cluster",
    "Comparison": "fsdp_lab.runs",
    "Dashboard": "fsdp_lab.dashboard",
    "Evaluating": "fsdp_lab.runs",
    "History": "fsdp_lab.runs",
    "Lab": "fsdp_lab.lab",
    "Memory": "fsdp_lab.events",
    "PRESETS": "fsdp_lab.models.presets",
    "Precision": "fsdp_lab.spec",
    "RankHung": "fsdp_lab.cluster",
    "RankLost": "fsdp_lab.cluster",
    "Recommendation": "fsdp_lab.runs",
    "Recovering": "fsdp_lab.runs",
    "Run": "fsdp_lab.runs",
    "RunState": "fsdp_lab.runs",
    "Saving": "fsdp_lab.runs",
    "Spec": "fsdp_lab.spec",
    "SpecError": "fsdp_lab.spec",
    "StepEvent": "fsdp_lab.events",
    "Strategy": "fsdp_lab.spec",
    "Table": "fsdp_lab.table",
    "Traffic": "fsdp_lab.events",
    "WhatIf": "fsdp_lab.dashboard",
    "Workload": "fsdp_lab.spec",
    "write_report": "fsdp_lab.report",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # asked for once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
