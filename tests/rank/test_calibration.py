"""What is measured for as long on one rank as on another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_lab.rank import calibration
from fsdp_lab.rank.calibration import MEASURING_S, HardwareProbe


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("call_s", [1e-6, 3e-4, 0.7 * MEASURING_S, 5 * MEASURING_S])
def test_a_figure_takes_as_long_on_every_rank_whatever_a_call_takes_there(
    monkeypatch: pytest.MonkeyPatch, call_s: float
) -> None:
    clock, met_s = Clock(), list[float]()
    monkeypatch.setattr(calibration, "time", clock)
    info: Any = SimpleNamespace(device=torch.device("cpu"))
    world: Any = SimpleNamespace(control=lambda tensor: met_s.append(clock.now_s))
    assert HardwareProbe(info, world)._seconds(lambda: clock.passes(call_s)) == pytest.approx(call_s)
    (begun_s,) = met_s
    assert MEASURING_S <= clock.now_s - begun_s < MEASURING_S + 2 * call_s
