"""The pictures of a run. To add one: write a subclass of `base.Panel` and list it here."""

from collections.abc import Callable

from fsdp_lab.dashboard.panels.axis import StepAxis
from fsdp_lab.dashboard.panels.base import Captions, Key, Panel
from fsdp_lab.dashboard.panels.communication import CommunicationPanel, RanksPanel
from fsdp_lab.dashboard.panels.curves import CompletionsPanel, LossPanel, TflopsPanel, ThroughputPanel
from fsdp_lab.dashboard.panels.memory import LedgerPanel, MemoryPanel
from fsdp_lab.dashboard.panels.timeline import TimelinePanel

__all__ = ["PANELS", "Captions", "Key", "Panel", "StepAxis", "TimelinePanel"]

# In the order in which cards are laid out. Each is made with the shared frame and the world size.
PANELS: tuple[Callable[[StepAxis, int], Panel], ...] = (
    MemoryPanel,
    CommunicationPanel,
    TflopsPanel,
    ThroughputPanel,
    LossPanel,
    RanksPanel,
    CompletionsPanel,
    TimelinePanel,
    LedgerPanel,
)
