"""One Spec being trained, as the kernel sees it: its events, its switches, its end, and what is said of it."""

from fsdp_lab.runs.archive import HistoryError
from fsdp_lab.runs.comparison import Comparison, Refusal
from fsdp_lab.runs.evaluation import Evaluating, Evaluation
from fsdp_lab.runs.history import History
from fsdp_lab.runs.past import PastRun
from fsdp_lab.runs.recommend import Recommendation, recommend
from fsdp_lab.runs.recovery import Incident, Recovering
from fsdp_lab.runs.run import Run, RunState, Switch, Ticket
from fsdp_lab.runs.runs import Runs
from fsdp_lab.runs.saving import Saved, Saving
from fsdp_lab.runs.slow_motion import Moment, SlowMotion
from fsdp_lab.runs.store import EventStore
from fsdp_lab.runs.summary import step_table, summarize
from fsdp_lab.runs.sweep import Sweep
from fsdp_lab.runs.timeline import Timeline
from fsdp_lab.table import Table

__all__ = [
    "Comparison",
    "Evaluating",
    "Evaluation",
    "EventStore",
    "History",
    "HistoryError",
    "Incident",
    "Moment",
    "PastRun",
    "Recommendation",
    "Recovering",
    "Refusal",
    "Run",
    "RunState",
    "Runs",
    "Saved",
    "Saving",
    "SlowMotion",
    "Sweep",
    "Switch",
    "Table",
    "Ticket",
    "Timeline",
    "recommend",
    "step_table",
    "summarize",
]
