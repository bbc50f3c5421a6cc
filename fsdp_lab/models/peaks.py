"""What a device can do at best, so that achieved FLOP/s can be put in relation to it (MFU)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fsdp_lab.core.hardware import gpu_of_device

_SLOT_S = 0.02  # for the products of one size and layout
_EDGES: Mapping[str, tuple[int, ...]] = {"cpu": (128, 256, 512, 1024), "cuda": (2048, 4096, 8192)}
# Which factors are transposed views, as in a Linear: backward to its input, forward, backward to its weight.
_LAYOUTS: Mapping[str, tuple[bool, bool]] = {"A B": (False, False), "A B^T": (False, True), "A^T B": (True, False)}


class Peak(NamedTuple):
    """`flops_per_s` is None where nothing is known; `source` says where the figure is from, for people."""

    flops_per_s: float | None
    source: str


class BestPeak:
    """A device's peak in one dtype, and at least what its steps have reached: a utilisation is never above 100 %.

    Matrix products alone can be slower than a step: measured while something else used the cores, or in a dtype whose
    speed depends on shapes that were not tried. The same holds for a data sheet: a step above it shows that the sheet
    is not this device's, so the peak is raised there as well, and `source` says both.
    """

    def __init__(self, given: Peak) -> None:
        """`given`: as `device_peak` found it."""
        self.given = self._best = given

    def reach(self, flops_per_s: float) -> Peak:
        """The peak after a step that reached `flops_per_s`; an unknown peak stays unknown."""
        best = self._best.flops_per_s
        if best is not None and flops_per_s > best:
            self._best = Peak(flops_per_s, f"reached in a training step, above {self.given.source}")
        return self._best


def device_peak(device: torch.device | str, dtype: torch.dtype) -> Peak:
    """The best FLOP/s of matrix products in `dtype` on `device`: from a data sheet where there is one, else
    measured.

    Measuring takes about 0.3 s and computes on the device with the threads that torch has now: ranks that
    measure at once see what they leave each other. fp32 on a GPU means without TF32, unless torch was told to
    use it. A slice of a GPU (MIG) and a GPU that is not in the table are measured.
    """
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if (known := _from_table(name, _column(dtype))) is not None:
            return known
    return measured_peak(device, dtype)


def measured_peak(device: torch.device | str, dtype: torch.dtype) -> Peak:
    """The best of matrix products of several sizes in the three layouts of training: what this machine does at this
    moment, other work included.

    One layout is not enough: without bf16 units a CPU multiplies A^T B twenty times as fast as A B.
    """
    device = torch.device(device)
    best, kind, count = 0.0, "", 0
    try:
        for layout, transposed in _LAYOUTS.items():
            for edge in _EDGES.get(device.type, _EDGES["cpu"]):
                times = _product_times(device, dtype, edge, transposed)
                count += len(times)
                if (rate := 2 * edge**3 / min(times)) > best:
                    best, kind = rate, f"{layout} of {edge} x {edge}"
                if 8 * min(times) > _SLOT_S:  # the next edge is twice this one
                    break
    except RuntimeError as e:  # a dtype that this device has no matrix product for
        return Peak(None, f"no figure: {str(e).splitlines()[0]}")
    threads = torch.get_num_threads()
    where = f"{threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else str(device)
    dtype_name = str(dtype).removeprefix("torch.")
    return Peak(best, f"measured: best of {count} matrix products, {kind} in {dtype_name}, {where}")


def _product_times(device: torch.device, dtype: torch.dtype, edge: int, transposed: tuple[bool, bool]) -> list[float]:
    """Seconds of each product that fits into a slot, at least of one; the first, which warms up, is left out."""
    made = [torch.full((edge, edge), 0.5, dtype=dtype, device=device) for _ in range(2)]
    a, b = (factor.t() if flip else factor for factor, flip in zip(made, transposed, strict=True))
    out = torch.empty(edge, edge, dtype=dtype, device=device)
    torch.mm(a, b, out=out)
    _finish(device)
    times: list[float] = []
    while sum(times) < _SLOT_S:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        _finish(device)
        times.append(max(time.perf_counter() - start, 1e-9))
    return times


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _column(dtype: torch.dtype) -> str:
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "")


def _from_table(name: str, column: str) -> Peak | None:
    gpu = gpu_of_device(name)
    rate = gpu.flops_per_s(column) if gpu is not None else None
    return None if gpu is None or rate is None else Peak(rate, f"{gpu.source}, dense {column}")
