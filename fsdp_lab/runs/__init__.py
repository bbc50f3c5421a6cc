"""Runs as the kernel sees them: driven chunk by chunk, saved, recovered, summarised, compared and shown on a timeline.

The names below are imported when they are used, so that what stores runs works where ipyparallel is not installed."""

from typing import TYPE_CHECKING

from fsdp_lab.base import lazy_names

if TYPE_CHECKING:
    from fsdp_lab.runs.comparison import Comparison as Comparison, Refusal as Refusal
    from fsdp_lab.runs.control import SwitchRequest as SwitchRequest
    from fsdp_lab.runs.evaluation import EvalConfig as EvalConfig, Evaluation as Evaluation
    from fsdp_lab.runs.recommendation import Recommendation as Recommendation, recommend as recommend
    from fsdp_lab.runs.recovery import Incident as Incident, RecoveryPolicy as RecoveryPolicy
    from fsdp_lab.runs.run import Run as Run
    from fsdp_lab.runs.saving import CheckpointConfig as CheckpointConfig, SavedCheckpoint as SavedCheckpoint
    from fsdp_lab.runs.slow_motion import SlowMotion as SlowMotion, StepMoment as StepMoment
    from fsdp_lab.runs.steps import EventStore as EventStore, Step as Step
    from fsdp_lab.runs.summary import step_table as step_table, summarize as summarize
    from fsdp_lab.runs.sweep import Sweep as Sweep
    from fsdp_lab.runs.timeline import Timeline as Timeline
    from fsdp_lab.runs.view import RunState as RunState, Switch as Switch
    from fsdp_lab.runs.watched import WatchedRun as WatchedRun

_NAMES = {
    "comparison": ("Comparison", "Refusal"),
    "control": ("SwitchRequest",),
    "evaluation": ("EvalConfig", "Evaluation"),
    "recommendation": ("Recommendation", "recommend"),
    "recovery": ("Incident", "RecoveryPolicy"),
    "run": ("Run",),
    "saving": ("CheckpointConfig", "SavedCheckpoint"),
    "slow_motion": ("SlowMotion", "StepMoment"),
    "steps": ("EventStore", "Step"),
    "summary": ("step_table", "summarize"),
    "sweep": ("Sweep",),
    "timeline": ("Timeline",),
    "view": ("RunState", "Switch"),
    "watched": ("WatchedRun",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)
if not TYPE_CHECKING:  # a `__getattr__` would let any name pass
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
