"""`fit_errors`: the uncertainties and quantiles of `fsdp_lab.planner.bands`, from rows that were predicted without their source;
`coverage`: how many rows of each source lie in a band that was made without it.

Sizes are chosen from `GRID`, one kind after the other, for the least interval score of the 80 % band (Gneiting and Raftery,
2007, section 6.2: its width, and ten times the distance of each row outside), with all sources weighted alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from fsdp_lab.planner.bands import LEVELS, Doubt, Quantiles, TimeErrors, worse
from fsdp_lab.planner.devices import Rates
from fsdp_lab.planner.fitting import predicted_s
from fsdp_lab.planner.published import PublishedCase

GRID = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
COVERED = 0.8
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Response:
    """A row, its error ln(measured / predicted), and what its prediction does if a kind of rate is wrong by each size of
    `GRID`: [kinds, sizes], above the prediction and below."""

    case: PublishedCase
    error: float
    above: np.ndarray
    below: np.ndarray

    @classmethod
    def of(cls, case: PublishedCase, rates: Rates) -> Response:
        """rates: fitted without the case's fold."""
        usual = predicted_s(case, rates)

        def responses(sign: int) -> np.ndarray:
            changed = [[predicted_s(case, worse(rates, doubt, sign * size)) if size else usual for size in GRID] for doubt in Doubt]
            return np.maximum(0.0, sign * np.log(np.array(changed) / usual))

        return cls(case=case, error=math.log((case.measured_s or usual) / usual), above=responses(1), below=responses(-1))
