"""The last steps as a table of figures: what the plots draw, to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from fsdp_lab.core.formatting import count, duration, figures, size
from fsdp_lab.dashboard.columns import Columns
from fsdp_lab.dashboard.panels.base import Captions, Patches, StepAxis
from fsdp_lab.runs.steps import Step

ROWS = 8
HEADS = (
    "step",
    "loss",
    "step time",
    "tokens/s",
    "TFLOPS per rank",
    "communication",
    "exposed",
    "peak memory",
    "remark",
)


class StepsPanel:
    """A row a step, newest first; ranks as their mean, memory as the fullest rank's. Words only: nothing is drawn."""

    name = "steps"
    title = "Last steps"
    wide = True
    root = None

    def __init__(self, frame: StepAxis, world_size: int) -> None:
        self._recent: deque[Step] = deque(maxlen=ROWS)

    @property
    def sources(self) -> Sequence[Columns]:
        return ()

    def update(self, steps: Sequence[Step]) -> int:
        self._recent.extend(steps)
        return len(steps)

    def patches(self) -> Patches:
        return {}

    def captions(self) -> Captions:
        return Captions(table=(HEADS, *(_row(s) for s in reversed(self._recent))))


def _row(s: Step) -> tuple[str, ...]:
    return (
        f"{s.number:,}",
        f"{s.events[0].mean_loss:.4f}",
        duration(s.step_time_s),
        count(sum(e.tokens for e in s.events) / s.step_time_s),
        figures(fmean(e.tflops for e in s.events)),
        duration(fmean(sum(t.seconds for t in e.comm.values()) for e in s.events)),
        duration(fmean(e.exposed_comm_s for e in s.events)),
        size(peak) if (peak := max(e.memory.peak_bytes for e in s.events)) else "–",
        _remark(s),
    )


def _remark(s: Step) -> str:
    said = []
    if any(e.first_after_switch for e in s.events):
        said.append("first after a change")
    if any(e.ledger for e in s.events):
        said.append("memory measured, hence slower")
    if any(e.skipped for e in s.events):
        said.append("fp16 overflow, optimizer step skipped")
    missing = sorted(set(range(s.world_size)) - {e.rank for e in s.events})
    if missing:
        said.append(f"no word from rank {', '.join(map(str, missing))}")
    return "; ".join(said)
