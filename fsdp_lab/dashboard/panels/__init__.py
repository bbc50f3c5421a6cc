"""The pictures of a run, one file each. To add one: write a class with `base.Panel`'s members and list it here."""

from __future__ import annotations

from collections.abc import Callable

from .base import Assembler, Captions, Frame, Key, Panel, Pinnable, Step
from .communication import CommunicationPanel
from .ledger import LedgerPanel
from .loss import LossPanel
from .memory import MemoryPanel
from .steps import StepsPanel
from .tflops import TflopsPanel
from .throughput import ThroughputPanel
from .timeline import TimelinePanel

__all__ = ["PANELS", "Assembler", "Captions", "Frame", "Key", "Panel", "Pinnable", "Step"]

# In the order in which cards are laid out. Each is made with the shared frame and the world size.
PANELS: tuple[Callable[[Frame, int], Panel], ...] = (
    MemoryPanel,
    CommunicationPanel,
    TimelinePanel,
    TflopsPanel,
    ThroughputPanel,
    LossPanel,
    LedgerPanel,
    StepsPanel,
)
