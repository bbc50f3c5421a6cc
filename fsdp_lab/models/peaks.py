"""What a device can do at best, so that achieved FLOP/s can be put in relation to it (MFU)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from fsdp_lab.hardware import gpu_of_device

_MEASURE_S = 0.2  # for all sizes of matrix together
_EDGES: Mapping[str, tuple[int, ...]] = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}


class Peak(NamedTuple):
    """`flops_per_s` is None where nothing is known; `source` says where the figure is from, for people."""

    flops_per_s: float | None
    source: str


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
    """The best of several square matrix products: what this machine does at this moment, other work
    included.
    """
    device = torch.device(device)
    best, best_edge, count = 0.0, 0, 0
    try:
        for edge in _EDGES.get(device.type, _EDGES["cpu"]):
            end = time.perf_counter() + _MEASURE_S / 4
            for seconds in _product_times(device, dtype, edge):
                rate, count = 2 * edge**3 / seconds, count + 1
                if rate > best:
                    best, best_edge = rate, edge
                if time.perf_counter() > end:
                    break
            if 8 * seconds > _MEASURE_S / 4:  # the next edge is twice this one
                break
    except RuntimeError as e:  # a dtype that this device has no matrix product for
        return Peak(None, f"no figure: {str(e).splitlines()[0]}")
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    kind = f"{best_edge} x {best_edge} in {str(dtype).removeprefix('torch.')}"
    return Peak(best, f"measured: best of {count} matrix products, {kind}, {where}")


def _product_times(device: torch.device, dtype: torch.dtype, edge: int) -> Iterator[float]:
    """Seconds of one product after another, without end; the first, which warms up, is not told."""
    a = torch.full((edge, edge), 0.5, dtype=dtype, device=device)
    b, out = a.clone(), torch.empty_like(a)
    torch.mm(a, b, out=out)
    while True:
        _finish(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        _finish(device)
        yield max(time.perf_counter() - start, 1e-9)


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
