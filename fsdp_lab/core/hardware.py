"""GPUs by name: peak compute rates and link bandwidths, from data sheets.

Compute rates are dense, in FLOP/s; link rates are of one GPU in one direction, in bytes/s. Data sheets often print rates
with 2:4 sparsity, which are twice as high, and both directions of a link together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Dense TFLOP/s of the vendor's data sheet: with tensor cores for half and tf32, without for fp32; None: it cannot."""

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    nvlink_bytes_per_s: float | None  # all NVLinks of one GPU, one direction; None: it has none
    source: str
    device_name: str  # a part of `torch.cuda.get_device_name`, in lower case

    def flops_per_s(self, dtype: str) -> float | None:
        """dtype: "bf16", "fp16", "tf32" or "fp32"; None where it has no figure for it."""
        tflops: float | None = getattr(self, dtype, None) if dtype in DTYPES else None
        return None if tflops is None else tflops * 1e12


DTYPES = ("bf16", "fp16", "tf32", "fp32")


def _gpu(
    device_name: str,
    bf16: float | None,
    tf32: float | None,
    fp32: float,
    source: str,
    *,
    fp16: float | None = None,
    nvlink: float | None = None,
) -> Gpu:
    """nvlink: GB/s, one direction."""
    link = None if nvlink is None else nvlink * 1e9
    return Gpu(bf16=bf16, fp16=fp16 or bf16, tf32=tf32, fp32=fp32, nvlink_bytes_per_s=link, source=source,
               device_name=device_name)  # fmt: skip


# By the name that people give it; the first whose `device_name` fits is a device's. The bf16 column agrees with
# stas00/ml-engineering (compute/accelerator), with MosaicML Composer's speed_monitor.py and with Lightning Fabric's
# throughput.py where those have the device. NVLink: of the same data sheet, which gives both directions: half of it.
GPUS: Mapping[str, Gpu] = {
    "gb200": _gpu("gb200", 2500, 1250, 80, "NVIDIA GB200 NVL72 data sheet", nvlink=900),
    "b300": _gpu("b300", 2250, 1125, 75, "NVIDIA HGX data sheet", nvlink=900),
    "b200": _gpu("b200", 2250, 1125, 75, "NVIDIA HGX data sheet", nvlink=900),
    "h200": _gpu("h200", 989.4, 494.7, 66.9, "NVIDIA H200 data sheet", nvlink=450),
    "h100-pcie": _gpu("h100 pcie", 756, 378, 51, "NVIDIA H100 data sheet", nvlink=300),
    "h100": _gpu("h100 80gb hbm3", 989.4, 494.7, 66.9, "NVIDIA H100 data sheet", nvlink=450),
    "a100": _gpu("a100", 312, 156, 19.5, "NVIDIA A100 data sheet", nvlink=300),
    "l40s": _gpu("l40s", 362, 183, 91.6, "NVIDIA L40S data sheet"),
    "a10g": _gpu("a10g", 125, 62.5, 31.2, "NVIDIA A10 data sheet, taken for the A10G as Lightning does"),
    "a10": _gpu("nvidia a10", 125, 62.5, 31.2, "NVIDIA A10 data sheet"),
    "v100": _gpu("v100-sxm", None, None, 15.7, "NVIDIA V100 data sheet", fp16=125, nvlink=150),
    "v100-pcie": _gpu("v100-pcie", None, None, 14, "NVIDIA V100 data sheet", fp16=112),
    "t4": _gpu("tesla t4", None, None, 8.1, "NVIDIA T4 data sheet", fp16=65),
}

# PCI Express base specification 4.0: 16 lanes of 16 GT/s, 128 of 130 bits are data.
PCIE4_BYTES_PER_S = 16 * 16e9 * 128 / 130 / 8
# A network card of each GPU, as in NVIDIA's DGX reference designs; bits a second of the port.
NETWORKS_BITS_PER_S: Mapping[str, float] = {"400 Gb/s": 400e9, "100 Gb/s": 100e9, "25 Gb/s": 25e9}


def gpu_of_device(device_name: str) -> Gpu | None:
    """The table's row for `torch.cuda.get_device_name`; None for a device that is not in it, or a slice of one (MIG)."""
    low = device_name.lower()
    if "mig" in low.split():
        return None
    return next((gpu for gpu in GPUS.values() if gpu.device_name in low), None)
