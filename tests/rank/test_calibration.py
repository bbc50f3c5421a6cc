"""What is measured for as long on one rank as on another."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_lab.rank import calibration, prepare
from fsdp_lab.rank.calibration import MEASURING_S, HardwareProbe, measured_groups
from fsdp_lab.rank.measure import precision_notes


@pytest.mark.parametrize(
    ("hosts", "per_host"), [(("a", "a", "b", "b"), 2), (("a", "b", "a", "b"), 4), (("a", "a", "b"), 3), ((), 4)]
)
def test_ranks_of_a_host_are_counted_where_hosts_are_alike(hosts: tuple[str, ...], per_host: int) -> None:
    info: Any = SimpleNamespace(device=torch.device("cpu"), world_size=len(hosts) or 4)
    world: Any = SimpleNamespace(context=SimpleNamespace(hosts=hosts))
    assert HardwareProbe(info, world)._per_host == per_host


def test_collectives_are_measured_in_the_groups_that_shardings_use() -> None:
    assert measured_groups(4, 4) == measured_groups(2, 1) == {}
    assert measured_groups(4, 2) == {"inside": [[0, 1], [2, 3]], "across": [[0, 2], [1, 3]]}


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("call_s", [1e-6, 0.7 * MEASURING_S, 5 * MEASURING_S])
def test_a_figure_takes_as_long_on_every_rank_whatever_a_call_takes(monkeypatch: pytest.MonkeyPatch, call_s: float):
    clock, met_s = Clock(), list[float]()
    monkeypatch.setattr(calibration, "time", clock)
    info: Any = SimpleNamespace(device=torch.device("cpu"))
    world: Any = SimpleNamespace(control=lambda tensor: met_s.append(clock.now_s))
    assert HardwareProbe(info, world)._seconds(lambda: clock.passes(call_s)) == pytest.approx(call_s)
    (begun_s,) = met_s
    assert MEASURING_S <= clock.now_s - begun_s < MEASURING_S + 2 * call_s


class OverNccl:
    """A wire of 4 ranks over NCCL on a device that moves 1 MiB in 100 us; the host takes a second to issue anything."""

    def __init__(self) -> None:
        self.clock, self.device_s, self.sent = Clock(), 0.0, list[int]()
        self.context = SimpleNamespace(nccl=self, hosts=())

    def size(self) -> int:
        return 4

    def all_gather_single(self, whole: torch.Tensor, part: torch.Tensor) -> Any:
        self.clock.passes(1.0)
        self.device_s += whole.nbytes / (1 << 20) * 1e-4
        self.sent.append(whole.nbytes)
        return SimpleNamespace(wait=lambda: None)

    def control(self, values: torch.Tensor) -> None:
        """The others vote as this rank does."""

    def carries(self, tensor: torch.Tensor) -> bool:
        return True

    def record(self) -> Any:
        at_s = self.device_s
        return SimpleNamespace(elapsed_time=lambda later: 1e3 * (later.at_s - at_s), at_s=at_s)

    def synchronize(self) -> None:
        pass


def test_a_link_of_nccl_is_timed_by_the_device_on_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bus bandwidth: of what all ranks gather, three of four parts arrive over a rank's link."""
    wire: Any = OverNccl()
    monkeypatch.setattr(prepare, "_ON_DEVICE_BYTES", (1 << 10, 1 << 13, 1 << 16))
    found = prepare.measured_bandwidths(wire, torch.device("cpu"))
    assert list(found) == [1 << 10, 1 << 13, 1 << 16] and set(wire.sent) == set(found)
    assert list(found.values()) == pytest.approx([0.75 * (1 << 20) / 1e-4] * 3)
    assert prepare.measured_speed(wire, torch.device("cpu")) == pytest.approx(max(found.values()))
    # no larger collective is measured where one takes long
    monkeypatch.setattr(prepare, "_ON_DEVICE_BYTES", (1 << 20, 1 << 23, 1 << 26))
    monkeypatch.setattr(prepare, "LONGEST_S", 8e-4 + 1e-9)  # 8 MiB take 800 us, and 64 MiB would take 6.4 ms
    assert list(prepare.measured_bandwidths(wire, torch.device("cpu"))) == [1 << 20, 1 << 23]


@pytest.mark.parametrize(("name", "noted"), [
    ("Tesla T4", {"bf16"}), ("Tesla V100-SXM2-16GB", {"bf16"}), ("NVIDIA A100-SXM4-80GB", {"fp32"}),
    ("A GPU that is not in the table", set()), ("CPU", {"bf16", "fp16"}),
])  # fmt: skip
def test_a_precision_is_noted_where_the_device_is_not_made_for_it(name: str, noted: set[str]) -> None:
    assert {dtype for dtype in ("bf16", "fp16", "fp32") if precision_notes(name, dtype)} == noted
