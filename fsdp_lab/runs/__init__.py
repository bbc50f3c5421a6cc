"""Runs as the kernel sees them: driven chunk by chunk, saved, recovered, summarised, compared and shown on a timeline."""

from fsdp_lab.core.formatting import Table
from fsdp_lab.runs.comparison import Comparison, Refusal
from fsdp_lab.runs.control import SwitchRequest
from fsdp_lab.runs.evaluation import EvalConfig, Evaluation
from fsdp_lab.runs.recommend import Recommendation, recommend
from fsdp_lab.runs.recovery import Incident, RecoveryPolicy
from fsdp_lab.runs.run import Run
from fsdp_lab.runs.saving import CheckpointConfig, SavedCheckpoint
from fsdp_lab.runs.slow_motion import SlowMotion, StepMoment
from fsdp_lab.runs.steps import EventStore, Step
from fsdp_lab.runs.summary import step_table, summarize
from fsdp_lab.runs.sweep import Sweep
from fsdp_lab.runs.timeline import Timeline
from fsdp_lab.runs.view import RunState, Switch

__all__ = [
    "CheckpointConfig",
    "Comparison",
    "EvalConfig",
    "Evaluation",
    "EventStore",
    "Incident",
    "Recommendation",
    "RecoveryPolicy",
    "Refusal",
    "Run",
    "RunState",
    "SavedCheckpoint",
    "SlowMotion",
    "Step",
    "StepMoment",
    "Sweep",
    "Switch",
    "SwitchRequest",
    "Table",
    "Timeline",
    "recommend",
    "step_table",
    "summarize",
]
