"""fsdp_lab: a laboratory for Fully Sharded Data Parallel.

Public names are imported at their first use, so that `import fsdp_lab` imports neither torch nor Jupyter, and Specs can be
read and written on a machine without them."""

from typing import TYPE_CHECKING, Any

from fsdp_lab.base import __version__ as __version__, lazy_names

if TYPE_CHECKING:
    from fsdp_lab.base.errors import ArgumentError as ArgumentError, SpecError as SpecError
    from fsdp_lab.base.events import Memory as Memory, StepEvent as StepEvent, Traffic as Traffic
    from fsdp_lab.base.formatting import Table as Table
    from fsdp_lab.cluster import ClusterError as ClusterError, RankHung as RankHung, RankLost as RankLost
    from fsdp_lab.dashboard import Dashboard as Dashboard
    from fsdp_lab.lab import Lab as Lab, load_ipython_extension as load_ipython_extension
    from fsdp_lab.models.presets import PRESETS as PRESETS
    from fsdp_lab.models.weights import unwrap_names as unwrap_names
    from fsdp_lab.rank.torchrun import init_process_group as init_process_group
    from fsdp_lab.report import WhatIf as WhatIf, write_report as write_report
    from fsdp_lab.runs.attach import lightning_callback as lightning_callback, trainer_callback as trainer_callback
    from fsdp_lab.runs.comparison import Comparison as Comparison
    from fsdp_lab.runs.evaluation import EvalConfig as EvalConfig
    from fsdp_lab.runs.history.history import History as History
    from fsdp_lab.runs.history.loops import watch as watch
    from fsdp_lab.runs.recommendation import Recommendation as Recommendation
    from fsdp_lab.runs.recovery import RecoveryPolicy as RecoveryPolicy
    from fsdp_lab.runs.run import Run as Run
    from fsdp_lab.runs.saving import CheckpointConfig as CheckpointConfig
    from fsdp_lab.runs.view import RunState as RunState
    from fsdp_lab.spec.spec import Precision as Precision, Spec as Spec, Strategy as Strategy
    from fsdp_lab.spec.workload import Workload as Workload

_NAMES = {
    "base.errors": "ArgumentError SpecError",
    "base.events": "Memory StepEvent Traffic",
    "base.formatting": "Table",
    "cluster": "ClusterError RankHung RankLost",
    "dashboard": "Dashboard",
    "lab": "Lab load_ipython_extension",
    "models.presets": "PRESETS",
    "models.weights": "unwrap_names",
    "rank.torchrun": "init_process_group",
    "report": "WhatIf write_report",
    "runs": "CheckpointConfig Comparison EvalConfig Recommendation RecoveryPolicy Run RunState",
    "runs.attach": "lightning_callback trainer_callback",
    "runs.history.history": "History",
    "runs.history.loops": "watch",
    "spec.spec": "Precision Spec Strategy",
    "spec.workload": "Workload",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)
_first_use, __dir__ = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    try:
        return _first_use(name)
    except ModuleNotFoundError as e:
        from fsdp_lab.base.errors import not_installed

        raise not_installed(f"{__name__}.{name}", e) from None
