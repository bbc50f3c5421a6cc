"""`Ghost`: what is predicted of a Spec, as panels draw it beside what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ...events import Classes
from .base import Key

HOLLOW = "hollow"  # what a legend draws with an outline alone


@dataclass(frozen=True, kw_only=True)
class Ghost:
    """Of each rank. A step's time is predicted where this machine is calibrated."""

    spec_id: str
    at_peak: Classes
    host_bytes: int
    step_time_s: float | None = None
    tokens: int = 0  # of all ranks in a step, counted as events count them

    @property
    def peak_bytes(self) -> int:
        return self.at_peak.total_bytes


@runtime_checkable
class Foretold(Protocol):
    """A panel that draws predictions, too."""

    def foretell(self, ghost: Ghost) -> None:
        """Of what is chosen, whether the ranks have it already or not; it stays until there is another."""


GHOST_KEY = Key(label="predicted", token="ink.marker", hatch=HOLLOW)


def told(predicted: str, measured: str | None) -> str:
    """A prediction in words, beside its measurement where there is one."""
    return f"predicted {predicted}" + (f", measured {measured}" if measured is not None else " for what is chosen")
