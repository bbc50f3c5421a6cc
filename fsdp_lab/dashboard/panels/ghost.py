"""`Prediction`: what is predicted of a Spec, as panels draw it beside what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fsdp_lab.core.events import RoleBytes
from fsdp_lab.dashboard.panels.base import Key

HOLLOW = "hollow"  # what a legend draws with an outline alone


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A prediction for one rank. The step time is predicted if this machine is calibrated."""

    spec_id: str
    at_peak: RoleBytes
    host_bytes: int
    step_time_s: float | None = None
    tokens: int = 0  # of all ranks in a step, counted as events count them

    @property
    def peak_bytes(self) -> int:
        return self.at_peak.total_bytes


@runtime_checkable
class PredictionPanel(Protocol):
    """A panel that draws predictions, too."""

    def predict(self, ghost: Prediction) -> None:
        """Of what is chosen, whether the ranks have it already or not; it stays until there is another."""


GHOST_KEY = Key(label="predicted", token="ink.marker", hatch=HOLLOW)


def told(predicted: str, measured: str | None) -> str:
    """The text of a prediction, with its measurement if there is one."""
    return f"predicted {predicted}" + (f", measured {measured}" if measured is not None else " for what is chosen")
