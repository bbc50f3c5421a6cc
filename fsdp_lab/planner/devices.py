"""`Device` and `Machine`: what a prediction is made for. Peaks are of `fsdp_lab.core.hardware`, the rest stands here.

Sources: memory, its bandwidth and PCI Express of the vendor's data sheets; `matrix_share`, what a large bf16 matrix product
reaches of the data sheet's peak, of stas00/ml-engineering@744d01e (compute/accelerator: 271.2 TFLOPS on an A100, 794.5 on an
H100, 1745 on a B200, 1822 on a GB200); where it measured none, the share of the A100 is assumed, and the plan says so.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_lab.core.errors import ArgumentError, SpecError, check_whole
from fsdp_lab.core.hardware import GPUS, PCIE4_BYTES_PER_S
from fsdp_lab.planner.curve import Curve

GIB = 1 << 30
ASSUMED_SHARE = 0.87


@dataclass(frozen=True, kw_only=True)
class MeasuredCurves:
    """Seconds by size, of one device while all ranks of its machine do the same."""

    products: Mapping[str, Curve]  # by dtype: of one matrix product, by its FLOPs
    scores: Mapping[str, Curve]  # by dtype: of attention's forward beside its products, by heads x pairs of tokens
    copies: Curve  # of reading and writing, by bytes
    updates: Mapping[str, Curve]  # by optimizer: of the gradients' norm and the update, by elements


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. Rates in FLOP/s and bytes/s, of one direction of a link."""

    name: str
    peak_flops_per_s: Mapping[str, float]  # dense, by dtype: "bf16", "fp16", "tf32", "fp32"
    matrix_share: float  # of that, in a large matrix product
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the other devices of its host: all its NVLinks, or PCI Express
    switched: bool  # each device has that link to itself; False: the host's devices share it
    generation: str  # of its tensor cores: "volta", "turing", "ampere", "hopper", "blackwell"; "cpu"
    assumed: Mapping[str, str]  # what no source says, and what was taken
    measured: MeasuredCurves | None = (
        None  # seconds by size, of a device that was measured; they go before the rates above
    )

    def flops_per_s(self, dtype: str) -> float:
        """The peak for matrix products of this dtype. Raises SpecError where the device has none."""
        found = self.peak_flops_per_s.get(dtype)
        if found is None:
            others = ", ".join(d for d in self.peak_flops_per_s if d != "tf32")
            raise SpecError("strategy.precision", f"a {self.name} has no matrix products in {dtype}", f"use {others}")
        return found

    def curve(self, dtype: str) -> Curve:
        """Seconds of a matrix product by its FLOPs, where they were measured. Raises SpecError as `flops_per_s`."""
        self.flops_per_s(dtype)
        assert self.measured is not None
        return self.measured.products[dtype]


def _device(name: str, generation: str, memory_gib: float, memory_tb_per_s: float, *, matrix_share: float | None = None,
            gpu: str = "", pcie_bytes_per_s: float = PCIE4_BYTES_PER_S, power: float = 1.0) -> Device:  # fmt: skip
    """power: of what large products reach, where the part may draw less than the data sheet's; attention, at a third of the
    peak, does not come near that limit."""
    row = GPUS[gpu or name]
    peaks = {dtype: row.flops_per_s(dtype) for dtype in ("bf16", "fp16", "tf32", "fp32")}
    assumed = {} if matrix_share else {"matrix_share": f"{ASSUMED_SHARE} of the peak, as an A100 reaches"}
    return Device(
        name=name, peak_flops_per_s={dtype: peak for dtype, peak in peaks.items() if peak}, generation=generation,
        matrix_share=(matrix_share or ASSUMED_SHARE) * power, memory_bytes=int(memory_gib * GIB),
        memory_bytes_per_s=memory_tb_per_s * 1e12, link_bytes_per_s=row.nvlink_bytes_per_s or pcie_bytes_per_s,
        switched=row.nvlink_bytes_per_s is not None, assumed=assumed,
    )  # fmt: skip


_TABLE = (
    _device("v100", "volta", 32, 0.9),
    _device("t4", "turing", 15, 0.32, pcie_bytes_per_s=PCIE4_BYTES_PER_S / 2),
    _device("a10g", "ampere", 22.5, 0.6),
    _device("l40s", "ada", 45, 0.864),
    # NVIDIA L4 data sheet: half of the figures with sparsity, 300 GB/s, 72 W.
    Device(
        name="l4",
        peak_flops_per_s={"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "fp32": 30.3e12},
        generation="ada",
        matrix_share=ASSUMED_SHARE,
        memory_bytes=int(22.5 * GIB),
        memory_bytes_per_s=0.3e12,
        link_bytes_per_s=PCIE4_BYTES_PER_S,
        switched=False,
        assumed={"matrix_share": f"{ASSUMED_SHARE} of the peak, as an A100 reaches; at 72 W it may be less"},
    ),
    _device("a100-40", "ampere", 40, 1.555, gpu="a100", matrix_share=271.2 / 312),
    _device("a100-80", "ampere", 80, 2.039, gpu="a100", matrix_share=271.2 / 312),
    _device("h100", "hopper", 80, 3.35, matrix_share=794.5 / 989.4),
    _device("h100-pcie", "hopper", 80, 2.0),
    # The H100 of torchtitan's benchmarks: "96 GB HBM2e 2.4 TB/s, 500 W" (torchtitan@b5bcd76 benchmarks); its clocks at that
    # power are not published.
    _device("h100-hbm2e", "hopper", 95, 2.4, gpu="h100", matrix_share=794.5 / 989.4, power=500 / 700),
    _device("h200", "hopper", 141, 4.8, matrix_share=794.5 / 989.4),
    _device("b200", "blackwell", 180, 8.0, matrix_share=1745 / 2250),
    _device("gb200", "blackwell", 186, 8.0, matrix_share=1822 / 2500),
)
DEVICES: Mapping[str, Device] = {device.name: device for device in _TABLE}
_OTHER_NAMES = {"a100": "a100-80", "h100-sxm": "h100", "h100-80": "h100", "h200-141": "h200"}


def device(name: str) -> Device:
    """By name. Raises ArgumentError, with the nearest names."""
    low = name.strip().lower().replace(" ", "-").replace("_", "-")
    low = _OTHER_NAMES.get(low, low)
    if low in DEVICES:
        return DEVICES[low]
    near = difflib.get_close_matches(low, DEVICES, n=3, cutoff=0.3) or list(DEVICES)
    raise ArgumentError("hardware", f"{name!r} is not known", f"use one of {', '.join(near)}", {"hardware": near[0]})


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`ranks` devices in hosts of `per_host`, whose network cards together send `network_bytes_per_s` each way."""

    device: Device
    ranks: int
    per_host: int
    network_bytes_per_s: float  # of a host
    assumed: Mapping[str, str]
    collectives: Mapping[str, Curve] = field(default_factory=dict)  # where measured: seconds by kind and link bytes
    pairs: Mapping[str, Curve] = field(default_factory=dict)  # the same of groups of two, all at once

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.per_host)


# The network of a host where nobody says: that of the vendor's reference design or of the usual cloud machine.
_NETWORKS_GBIT: Mapping[str, float] = {
    "volta": 100, "turing": 50, "ampere": 1600, "ada": 400, "hopper": 3200, "blackwell": 3200,
}  # fmt: skip


def machine(hardware: str | Device, ranks: int, *, hosts: int | None = None,
            network_gbit_per_s: float | None = None) -> Machine:  # fmt: skip
    """The machine that is meant; what is not said is assumed, and stands in `assumed`.

    Args:
        hardware: a device, or its name.
        hosts: None: of eight devices each, as far as they go.
        network_gbit_per_s: of all network cards of a host together, one way.

    Raises:
        ArgumentError: an unknown device, ranks that the hosts do not divide, a rate that cannot be.
    """
    found = hardware if isinstance(hardware, Device) else device(hardware)
    check_whole("ranks", ranks)
    if hosts is not None and (hosts < 1 or ranks % hosts):
        good = [n for n in range(1, ranks + 1) if ranks % n == 0]
        nearest = min(good, key=lambda n: (abs(n - hosts), n))
        raise ArgumentError(
            "hosts", f"{ranks} ranks cannot be divided among {hosts} hosts", f"use {nearest}", {"hosts": nearest}
        )
    if network_gbit_per_s is not None and not 0 < network_gbit_per_s < 1e6:
        raise ArgumentError("network", f"{network_gbit_per_s} Gb/s is refused", "give a number above 0, such as 400")
    assumed = {}
    per_host = ranks // hosts if hosts is not None else min(8, ranks)
    if hosts is None and ranks > 8:
        assumed["hosts"] = f"{-(-ranks // 8)}, of 8 devices each"
    network = network_gbit_per_s
    if network is None:
        network = _NETWORKS_GBIT.get(found.generation, 100)
        if ranks > per_host:
            assumed["network"] = f"{network:.0f} Gb/s a host"
    return Machine(device=found, ranks=ranks, per_host=per_host, network_bytes_per_s=network * 1e9 / 8, assumed=assumed)
