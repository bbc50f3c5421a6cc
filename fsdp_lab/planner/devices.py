"""The hardware of a prediction: a `Machine` of `Device`s, and the `Rates` that software reaches on it.

Data sheets are in `fsdp_lab.base.hardware`. If no source has measured how much of the peak large matrix products reach, the
share of an A100 is assumed and listed in the plan."""

import bisect
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp_lab.base.errors import ArgumentError, SpecError, check_whole
from fsdp_lab.base.formatting import GIB, Table
from fsdp_lab.base.hardware import DTYPES, GPUS, VARIANTS, Gpu

ASSUMED_SHARE = 0.87  # of the bf16 peak


@dataclass(frozen=True)
class Curve:
    """Seconds by size, interpolated between measured points on a log-log scale, for devices such as CPUs that no single rate
    describes. Below the first point seconds are constant; above the last they are proportional to the size."""

    points: tuple[tuple[float, float], ...]  # (size, seconds), sizes rising

    @classmethod
    def of(cls, rows: Iterable[Sequence[float]]) -> "Curve":
        """From rows [size, seconds] in any order; equal sizes are averaged. Raises ValueError if there are none."""
        by_size: dict[float, list[float]] = {}
        for size, seconds in rows:
            by_size.setdefault(size, []).append(max(seconds, 1e-9))
        if not by_size:
            raise ValueError("a curve needs one point or more")
        return cls(tuple((size, sum(each) / len(each)) for size, each in sorted(by_size.items())))

    def __call__(self, size: float) -> float:
        """Seconds; 0 for a size of 0."""
        if size <= 0:
            return 0.0
        i = bisect.bisect_left(self.points, (size, 0.0))
        if i == 0:
            return self.points[0][1]
        (x0, y0) = self.points[i - 1]
        if i == len(self.points):
            return y0 * size / x0
        x1, y1 = self.points[i]
        along = math.log(size / x0) / math.log(x1 / x0)
        return y0 * math.exp(along * math.log(y1 / y0))

    @property
    def best(self) -> float:
        """The highest rate of any point, in sizes per second."""
        return max(size / seconds for size, seconds in self.points)


@dataclass(frozen=True, kw_only=True)
class MeasuredCurves:
    """Seconds by size of one device, measured while all ranks of its machine do the same."""

    products: Mapping[str, Curve]  # by dtype: one matrix product, by FLOPs
    scores: Mapping[str, Curve]  # by dtype: attention's forward without its products, by heads x pairs of tokens
    copies: Curve  # reading and writing, by bytes
    updates: Mapping[str, Curve]  # by optimizer: the gradient norm and the update, by elements


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. Rates in FLOP/s and bytes/s, one direction of a link."""

    name: str
    peak_flops_per_s: Mapping[str, float]  # dense, by dtype: "bf16", "fp16", "tf32", "fp32"; MFU is relative to it
    matrix_share: float  # of the peak, in a large matrix product
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the other devices of its host: all its NVLinks, or PCI Express
    switched: bool  # each device has that link to itself; False: the host's devices share it
    generation: str  # of its tensor cores, as in `base.hardware`; "cpu"; "here": a calibrated GPU
    assumed: Mapping[str, str]  # assumptions where no source has a figure
    measured: MeasuredCurves | None = None  # used instead of the rates above

    @property
    def type(self) -> str:
        """torch's name of the device: "cpu" or "cuda"."""
        return "cpu" if self.generation == "cpu" else "cuda"

    def flops_per_s(self, dtype: str) -> float:
        """The peak for matrix products of this dtype. Raises SpecError if the device does not support it."""
        if dtype not in self.peak_flops_per_s:
            others = ", ".join(d for d in self.peak_flops_per_s if d != "tf32")
            raise SpecError("strategy.precision", f"a {self.name} has no matrix products in {dtype}", f"use {others}")
        return self.peak_flops_per_s[dtype]


def _device(name: str, gpu: Gpu | None = None) -> Device:
    gpu = gpu or VARIANTS.get(name) or GPUS[name]
    assumed = f"{ASSUMED_SHARE} of the peak, as an A100 reaches{gpu.remark}"
    return Device(
        name=name,
        peak_flops_per_s={dtype: peak for dtype in DTYPES if (peak := gpu.flops_per_s(dtype))},
        generation=gpu.generation,
        matrix_share=(gpu.matrix_share or ASSUMED_SHARE) * gpu.power_share,
        memory_bytes=gpu.memory_bytes,
        memory_bytes_per_s=gpu.memory_bytes_per_s,
        link_bytes_per_s=gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s,
        switched=gpu.nvlink_bytes_per_s is not None,
        assumed={} if gpu.matrix_share else {"matrix_share": assumed},
    )


WORKSTATION = ("rtx3090", "rtx4090", "rtx5090", "rtx-a6000", "rtx6000-ada")
_NAMES = "v100 t4 a10g l40s l4 a100-40 a100-64 a100-80 h100 h100-pcie h100-hbm2e h200 b200 gb200"
DEVICES: Mapping[str, Device] = {name: _device(name) for name in (*_NAMES.split(), *WORKSTATION)}
_OTHER_NAMES = {"a100": "a100-80", "h100-sxm": "h100", "h100-80": "h100", "h200-141": "h200"}


def device(name: str) -> Device:
    """A device by name, or by figures of one's own: "165/24/1.008" for dense TFLOPS in bf16, GiB and TB/s of memory, and
    "/300" for GB/s of NVLink, one way, if it has any. Raises ArgumentError, with the nearest names and all."""
    if "/" in name:
        return _device(name, _own(name))
    low = name.strip().lower().replace(" ", "-").replace("_", "-")
    low = _OTHER_NAMES.get(low, low).removeprefix("nvidia-").removeprefix("geforce-").replace("-", "")
    for known, found in DEVICES.items():
        if low in (known.replace("-", ""), known.removeprefix("rtx").replace("-", "")):
            return found
    similar = difflib.get_close_matches(low, DEVICES, n=3, cutoff=0.3)
    others = [one for one in DEVICES if one not in similar]
    hint = f"use {', '.join(similar)}; or one of {', '.join(others)}" if similar else f"use one of {', '.join(others)}"
    raise ArgumentError("hardware", f"{name!r} is not known", hint, {"hardware": [*similar, *others][0]})


def _own(text: str) -> Gpu:
    try:
        bf16, gib, tb_per_s, *link = figures = [float(word) for word in text.split("/")]
        if len(link) < 2 and all(0 < figure < 1e6 for figure in figures):
            nvlink, memory = next(iter(link), None), (gib, tb_per_s)
            return Gpu("", bf16, None, 0, "", nvlink=nvlink, generation="ampere", memory=memory)
    except ValueError:
        pass
    raise ArgumentError("hardware", f"{text!r} is refused", "give TFLOPS/GIB/TBS as 165/24/1.008, or a name")


def device_table() -> Table:
    """All devices, with the figures that a plan uses most."""
    rows = []
    for d in DEVICES.values():
        peaks = [d.peak_flops_per_s.get(dtype, 0) for dtype in ("bf16", "fp16", "fp32")]
        cells = [f"{peak / 1e12:.4g}" if peak else "–" for peak in peaks]
        cells += [f"{d.memory_bytes / GIB:.4g}", f"{d.memory_bytes_per_s / 1e12:.3g}"]
        cells.append(f"{d.link_bytes_per_s / 1e9:.3g}")
        rows.append((d.name, *cells, (VARIANTS.get(d.name) or GPUS[d.name]).source))
    rates_of = ("bf16 TFLOPS", "fp16 TFLOPS", "fp32 TFLOPS", "GiB", "TB/s", "link GB/s")
    return Table(columns=("name", *rates_of, "source"), rows=tuple(rows), left=frozenset(("name", "source")))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`ranks` devices in hosts of `per_host`, whose network cards together send `network_bytes_per_s` each way."""

    device: Device
    ranks: int
    per_host: int
    network_bytes_per_s: float  # per host
    assumed: Mapping[str, str]
    # If measured: seconds by kind and link bytes, of the group of all ranks, and of others, all of a kind at once.
    collectives: Mapping[str, Curve] = field(default_factory=dict)
    inside: Mapping[str, Curve] = field(default_factory=dict)  # of the ranks of each host, if there are several hosts
    across: Mapping[str, Curve] = field(default_factory=dict)  # of one rank of each host

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.per_host)

    @property
    def is_measured(self) -> bool:
        """True if all of it was measured: the devices, and their network if there are several hosts."""
        return self.device.measured is not None and (self.hosts == 1 or bool(self.collectives))

    @property
    def switches_reduce(self) -> bool:
        """True if NCCL reduces in the switches of the one host. Hosts of four GPUs have none."""
        newer = self.device.generation in ("hopper", "blackwell")
        return newer and self.device.switched and self.per_host >= 8 and self.hosts == 1

    def allows(self, ranks: int) -> bool:
        """Returns whether so many ranks are a part of a host, or whole hosts."""
        return ranks <= self.per_host or ranks % self.per_host == 0

    def with_ranks(self, ranks: int) -> "Machine":
        """The same devices and network with a number of ranks that it `allows`."""
        hosts = max(1, ranks // self.per_host)
        resized = machine(self.device, ranks, hosts=hosts, network_gbit_per_s=self.network_bytes_per_s * 8 / 1e9)
        assumed = dict(self.assumed)
        if "hosts" in assumed:
            assumed["hosts"] = f"{hosts}, of {self.per_host} devices each"
        return replace(resized, assumed=assumed)

    def limited(self, limit_bytes: int | None) -> "Machine":
        """The same machine with a memory limit per device. Raises ArgumentError for one of 0 or less."""
        if limit_bytes is None:
            return self
        if limit_bytes <= 0:
            raise ArgumentError("memory_limit", f"{limit_bytes} bytes are refused", "give a size above 0")
        return replace(self, device=replace(self.device, memory_bytes=min(limit_bytes, self.device.memory_bytes)))


# The default network of a host: that of the vendor's reference design or of the usual cloud machine; of A100s, whose
# networks differ most, the median of the sources in tests/planner/research/data/fsdp_measurements.csv that state theirs.
_NETWORKS_GBIT = {"volta": 100.0, "turing": 50.0, "ampere": 800.0, "ada": 400.0, "hopper": 3200.0, "blackwell": 3200.0}
_NETWORKS_GBIT |= dict.fromkeys(WORKSTATION, 10.0)  # Ethernet of a workstation


def machine(
    hardware: str | Device,
    ranks: int,
    *,
    hosts: int | None = None,
    per_host: int | None = None,  # devices of a host, if `hosts` is None; the default is eight
    network_gbit_per_s: float | None = None,  # of all network cards of a host together, one way
) -> Machine:
    """A machine with defaults for what is not given, which are listed in `assumed`. Raises ArgumentError for an unknown
    device, ranks that the hosts do not divide, and a rate out of range."""
    of = hardware if isinstance(hardware, Device) else device(hardware)
    check_whole("ranks", ranks)
    if hosts is not None and (hosts < 1 or ranks % hosts):
        raise _indivisible("hosts", ranks, hosts, f"{ranks} ranks cannot be divided among {hosts} hosts")
    if network_gbit_per_s is not None and not 0 < network_gbit_per_s < 1e6:
        raise ArgumentError("network", f"{network_gbit_per_s} Gb/s is refused", "give a number above 0, such as 400")
    assumed, network = {}, network_gbit_per_s
    if hosts is not None:
        per_host = ranks // hosts
    elif per_host is None:
        per_host = min(8, ranks)
        if ranks > 8:
            assumed["hosts"] = f"{-(-ranks // 8)}, of 8 devices each"
    elif per_host < 1 or (ranks > per_host and ranks % per_host):
        raise _indivisible("per_host", ranks, per_host, f"{ranks} GPUs cannot be divided among hosts of {per_host}")
    per_host = min(per_host, ranks)
    if network is None:
        network = _NETWORKS_GBIT.get(of.name, _NETWORKS_GBIT.get(of.generation, 100.0))
        if ranks > per_host:
            assumed["network"] = f"{network:.0f} Gb/s a host"
    return Machine(device=of, ranks=ranks, per_host=per_host, network_bytes_per_s=network * 1e9 / 8, assumed=assumed)


def _indivisible(field: str, ranks: int, given: int, reason: str) -> ArgumentError:
    nearest = min((n for n in range(1, ranks + 1) if ranks % n == 0), key=lambda n: abs(n - given))
    return ArgumentError(field, reason, f"use {nearest}", {field: nearest})


@dataclass(frozen=True, kw_only=True)
class HostOverhead:
    """Time of Python, autograd and a backend: beside computing on a CPU; on a GPU, of the host that runs ahead of it, and
    beside `Rates.eager_s` and `SEND_KERNELS`."""

    step_s: float = 0.0  # per step
    send_s: float = 0.0  # per gather or reduction, beside the collective; below 0 if issuing it in a step is cheaper
    tensor_s: float = 0.0  # per parameter tensor and step: the operators that use it, its part of the optimizer step
    stretch: float = 1.0  # time of a collective in a step relative to one alone: cold memory, late ranks


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Free parameters of the cost model: few, global, and fitted together (tests/planner/research), none to a single
    published row. Shares are of the device's or the link's best, 0 to 1."""

    matrix: float  # matrix products inside a model, relative to one large product alone
    # Fused attention's own FLOPs (half of the pairs if causal), by generation; Hopper's for those that were not calibrated.
    attention: Mapping[str, float]
    memory: float  # of the memory bandwidth; not fitted
    operands: float  # how often a matrix product moves its operands through memory
    # Of a collective, fitted to timings (tests/planner/research/data/collective_timings.csv) and not to steps: shares to
    # payloads of 4 GiB and more, the hop to those of 16 MB and more. A test repeats it.
    link: float  # inside a host
    network: float  # between hosts
    latency_s: float  # per step of its ring inside a host: NCCL's own (src/graph/tuning.cc, hwLat, protocol Simple)
    hop_s: float  # between hosts
    jitter_s: float  # mean delay of a rank at a collective; the last one is waited for
    interference: float  # slowdown of computing by a collective in flight, as a share of the collective's time
    step_s: float  # per step, beside its micro-batches: the loop, the optimizer's launches, logging
    kernel_s: float  # the host's time to issue a kernel of the forward; on a GPU, which may wait for it
    # The same where all kernels were counted (`UnitShape.kernels`), not fitted: between a fast workstation's 5 us and the
    # 47 us that eager Python took on a virtual machine with an H100.
    eager_s: float = 15.3e-6
    traffic: float = 1.0  # of norms, activations and losses through memory, relative to what their kernels need
    hosts: Mapping[str, HostOverhead] = field(default_factory=dict)  # by backend
    # By dtype, if measured: bytes moved in each direction by anything but matrix products, per byte saved by the forward.
    traffic_of: Mapping[str, float] = field(default_factory=dict)
    # If measured: memory traffic of a product per byte of its weight, beyond one that is repeated. Bytes at the rate of the
    # best copy, which is a cache's on a CPU: so it is above 1.
    weights: float = 0.0

    def host(self, backend: str) -> HostOverhead:
        return self.hosts.get(backend, HostOverhead())


# Fitted to all usable rows of tests/planner/research/data/fsdp_measurements.csv. A test repeats the fit.
PUBLISHED = Rates(
    matrix=0.8672,
    attention={"ampere": 0.3124, "hopper": 0.168},
    memory=0.9,
    operands=1.11,
    link=0.8,
    network=0.82,
    latency_s=3.4e-6,
    hop_s=38e-6,
    jitter_s=1.316e-4,
    interference=0.1508,
    step_s=0.008815,
    kernel_s=4.844e-5,
)
