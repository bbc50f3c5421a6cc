"""GPUs by name: peak compute, memory and link bandwidth from data sheets. The planner's devices are made from this table.

Floor 0: no torch. Compute rates are dense, in FLOP/s; a link's rate is of one GPU in one direction, in bytes/s. Data
sheets often print figures with 2:4 sparsity, which are twice these, and both directions of a link together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from fsdp_lab.base.formatting import GIB

DTYPES = ("bf16", "fp16", "tf32", "fp32")
# PCI Express base specification 4.0: 16 lanes of 16 GT/s, 128 of 130 bits are data.
PCIE4_BYTES_PER_S = 16 * 16e9 * 128 / 130 / 8
# A network card of each GPU, as in NVIDIA's DGX reference designs; bits a second of the port.
NETWORKS_BITS_PER_S: Mapping[str, float] = {"400 Gb/s": 400e9, "100 Gb/s": 100e9, "25 Gb/s": 25e9}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Dense TFLOP/s of the vendor's data sheet: with tensor cores for half and tf32, without for fp32; None: unsupported."""

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    nvlink_bytes_per_s: float | None  # all NVLinks of one GPU, one direction; None: it has none
    source: str
    device_name: str  # a part of `torch.cuda.get_device_name`, in lower case
    generation: str = ""  # of its tensor cores: "volta", "turing", "ampere", "ada", "hopper", "blackwell"
    memory_bytes: int = 0  # usable; 0: the planner has no such device
    memory_bytes_per_s: float = 0.0
    matrix_share: float | None = None  # of the bf16 peak, measured with large matrix products
    power_share: float = 1.0  # of that, for a part with a lower power limit
    pcie_bytes_per_s: float = PCIE4_BYTES_PER_S
    remark: str = ""  # about `matrix_share` where none was measured

    def flops_per_s(self, dtype: str) -> float | None:
        """dtype: "bf16", "fp16", "tf32" or "fp32"; None if there is no figure."""
        tflops: float | None = getattr(self, dtype, None) if dtype in DTYPES else None
        return None if tflops is None else tflops * 1e12


def _gpu(
    device_name: str,
    bf16: float | None,
    tf32: float | None,
    fp32: float,
    source: str,
    *,
    fp16: float | None = None,
    nvlink: float | None = None,
    memory: tuple[float, float] = (0, 0),
    measured: float | None = None,
    generation: str = "",
    pcie_bytes_per_s: float = PCIE4_BYTES_PER_S,
    remark: str = "",
) -> Gpu:
    """nvlink: GB/s, one direction. memory: GiB and TB/s. measured: TFLOP/s of large bf16 matrix products. Others: fields."""
    return Gpu(
        device_name=device_name,
        bf16=bf16,
        fp16=fp16 or bf16,
        tf32=tf32,
        fp32=fp32,
        source=source,
        nvlink_bytes_per_s=None if nvlink is None else nvlink * 1e9,
        memory_bytes=int(memory[0] * GIB),
        memory_bytes_per_s=memory[1] * 1e12,
        matrix_share=measured / bf16 if measured and bf16 else None,
        generation=generation,
        pcie_bytes_per_s=pcie_bytes_per_s,
        remark=remark,
    )


# By common name; `gpu_of_device` takes the first row whose `device_name` fits. The bf16 column agrees with
# stas00/ml-engineering (compute/accelerator), MosaicML Composer's speed_monitor.py and Lightning Fabric's throughput.py
# where those have the device. NVLink and memory: of the same data sheet, which gives both directions of NVLink: half of it.
# Measured TFLOP/s: stas00/ml-engineering@744d01e (compute/accelerator).
GPUS: Mapping[str, Gpu] = {
    "gb200": _gpu("gb200", 2500, 1250, 80, "NVIDIA GB200 NVL72 data sheet", nvlink=900, generation="blackwell",
                  memory=(186, 8.0), measured=1822),
    "b300": _gpu("b300", 2250, 1125, 75, "NVIDIA HGX data sheet", nvlink=900),
    "b200": _gpu("b200", 2250, 1125, 75, "NVIDIA HGX data sheet", nvlink=900, generation="blackwell", memory=(180, 8.0),
                 measured=1745),
    "h200": _gpu("h200", 989.4, 494.7, 66.9, "NVIDIA H200 data sheet", nvlink=450, generation="hopper", memory=(141, 4.8),
                 measured=794.5),
    "h100-pcie": _gpu("h100 pcie", 756, 378, 51, "NVIDIA H100 data sheet", nvlink=300, generation="hopper",
                      memory=(80, 2.0)),
    "h100": _gpu("h100 80gb hbm3", 989.4, 494.7, 66.9, "NVIDIA H100 data sheet", nvlink=450, generation="hopper",
                 memory=(80, 3.35), measured=794.5),
    "a100": _gpu("a100", 312, 156, 19.5, "NVIDIA A100 data sheet", nvlink=300, generation="ampere", measured=271.2),
    "l40s": _gpu("l40s", 362, 183, 91.6, "NVIDIA L40S data sheet", generation="ada", memory=(45, 0.864)),
    "a10g": _gpu("a10g", 125, 62.5, 31.2, "NVIDIA A10 data sheet, taken for the A10G as Lightning does",
                 generation="ampere", memory=(22.5, 0.6)),
    "a10": _gpu("nvidia a10", 125, 62.5, 31.2, "NVIDIA A10 data sheet"),
    "v100": _gpu("v100-sxm", None, None, 15.7, "NVIDIA V100 data sheet", fp16=125, nvlink=150, generation="volta",
                 memory=(32, 0.9)),
    "v100-pcie": _gpu("v100-pcie", None, None, 14, "NVIDIA V100 data sheet", fp16=112),
    "t4": _gpu("tesla t4", None, None, 8.1, "NVIDIA T4 data sheet", fp16=65, generation="turing", memory=(15, 0.32),
               pcie_bytes_per_s=PCIE4_BYTES_PER_S / 2),
}  # fmt: skip


def _with_memory(gpu: Gpu, gib: float, tb_per_s: float, *, power_share: float = 1.0) -> Gpu:
    memory, bandwidth = int(gib * GIB), tb_per_s * 1e12
    return dataclasses.replace(gpu, memory_bytes=memory, memory_bytes_per_s=bandwidth, power_share=power_share)


# Parts that a prediction distinguishes, and a link or a device name does not.
_AT_72_W = "; at 72 W it may be less"
VARIANTS: Mapping[str, Gpu] = {
    "a100-40": _with_memory(GPUS["a100"], 40, 1.555),
    "a100-80": _with_memory(GPUS["a100"], 80, 2.039),
    # Leonardo's own part is said to have 124 multiprocessors instead of 108; no data sheet was read.
    "a100-64": _with_memory(dataclasses.replace(GPUS["a100"], bf16=358, fp16=358), 64, 1.64),
    # The H100 of torchtitan's benchmarks: "96 GB HBM2e 2.4 TB/s, 500 W" (torchtitan@b5bcd76 benchmarks); its clocks at that
    # power are not published.
    "h100-hbm2e": _with_memory(GPUS["h100"], 95, 2.4, power_share=500 / 700),
    # Half of the data sheet's figures with sparsity; 72 W.
    "l4": _gpu("", 121, 60, 30.3, "NVIDIA L4 data sheet", generation="ada", memory=(22.5, 0.3), remark=_AT_72_W),
}


def gpu_of_device(device_name: str) -> Gpu | None:
    """The row of a `torch.cuda.get_device_name`; None for a device that is not in the table, or a slice of one (MIG)."""
    low = device_name.lower()
    if "mig" in low.split():
        return None
    return next((gpu for gpu in GPUS.values() if gpu.device_name in low), None)
