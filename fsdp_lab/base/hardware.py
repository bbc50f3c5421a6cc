"""GPUs by name: peak compute, memory and link bandwidth from data sheets. The planner's devices are made from this table.

Floor 0: no torch. Compute rates are dense, in FLOP/s; a link's rate is of one GPU in one direction, in bytes/s. Data
sheets often print figures with 2:4 sparsity, which are twice these, and both directions of a link together."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace

from fsdp_lab.base.formatting import GIB

DTYPES = ("bf16", "fp16", "tf32", "fp32")
# PCI Express base specification 4.0: 16 lanes of 16 GT/s, 128 of 130 bits are data.
PCIE4_BYTES_PER_S = 16 * 16e9 * 128 / 130 / 8
# A network card of each GPU, as in NVIDIA's DGX reference designs; bits a second of the port.
NETWORKS_BITS_PER_S: Mapping[str, float] = {"400 Gb/s": 400e9, "100 Gb/s": 100e9, "25 Gb/s": 25e9}


@dataclass(frozen=True)
class Gpu:
    """Dense TFLOP/s of the vendor's data sheet: with tensor cores for half and tf32, without for fp32; None: unsupported."""

    device_name: str  # a part of `torch.cuda.get_device_name`, in lower case
    bf16: float | None
    tf32: float | None
    fp32: float
    source: str
    _: KW_ONLY
    fp16: float | None = None  # None: as bf16
    nvlink: float | None = None  # GB/s of all NVLinks of one GPU, one direction; None: it has none
    generation: str = ""  # of its tensor cores: "volta", "turing", "ampere", "ada", "hopper", "blackwell"
    memory: tuple[float, float] = (0, 0)  # usable GiB, and TB/s; 0: the planner has no such device
    matrix_share: float | None = None  # of the bf16 peak, measured with large matrix products
    power_share: float = 1.0  # of that, for a part with a lower power limit
    pcie_bytes_per_s: float = PCIE4_BYTES_PER_S
    remark: str = ""  # about `matrix_share` where none was measured

    def flops_per_s(self, dtype: str) -> float | None:
        """dtype: "bf16", "fp16", "tf32" or "fp32"; None if there is no figure."""
        tflops: float | None = getattr(self, dtype, None) if dtype in DTYPES else None
        tflops = tflops or self.bf16 if dtype == "fp16" else tflops
        return None if tflops is None else tflops * 1e12

    @property
    def nvlink_bytes_per_s(self) -> float | None:
        return None if self.nvlink is None else self.nvlink * 1e9

    @property
    def memory_bytes(self) -> int:
        return int(self.memory[0] * GIB)

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory[1] * 1e12


# By common name; `gpu_of_device` takes the first row whose `device_name` fits. The bf16 column agrees with
# stas00/ml-engineering (compute/accelerator), MosaicML Composer's speed_monitor.py and Lightning Fabric's throughput.py
# where those have the device. NVLink and memory: of the same data sheet, which gives both directions of NVLink: half of it.
# Measured TFLOP/s: stas00/ml-engineering@744d01e (compute/accelerator).
GPUS: Mapping[str, Gpu] = {
    "gb200": Gpu("gb200", 2500, 1250, 80, "NVIDIA GB200 NVL72 data sheet", nvlink=900, generation="blackwell",
                 memory=(186, 8.0), matrix_share=1822 / 2500),
    "b300": Gpu("b300", 2250, 1125, 75, "NVIDIA HGX data sheet", nvlink=900),
    "b200": Gpu("b200", 2250, 1125, 75, "NVIDIA HGX data sheet", nvlink=900, generation="blackwell", memory=(180, 8.0),
                matrix_share=1745 / 2250),
    "h200": Gpu("h200", 989.4, 494.7, 66.9, "NVIDIA H200 data sheet", nvlink=450, generation="hopper", memory=(141, 4.8),
                matrix_share=794.5 / 989.4),
    "h100-pcie": Gpu("h100 pcie", 756, 378, 51, "NVIDIA H100 data sheet", nvlink=300, generation="hopper",
                     memory=(80, 2.0)),
    "h100": Gpu("h100 80gb hbm3", 989.4, 494.7, 66.9, "NVIDIA H100 data sheet", nvlink=450, generation="hopper",
                memory=(80, 3.35), matrix_share=794.5 / 989.4),
    "a100": Gpu("a100", 312, 156, 19.5, "NVIDIA A100 data sheet", nvlink=300, generation="ampere", matrix_share=271.2 / 312),
    "l40s": Gpu("l40s", 362, 183, 91.6, "NVIDIA L40S data sheet", generation="ada", memory=(45, 0.864)),
    "a10g": Gpu("a10g", 125, 62.5, 31.2, "NVIDIA A10 data sheet, taken for the A10G as Lightning does",
                generation="ampere", memory=(22.5, 0.6)),
    "a10": Gpu("nvidia a10", 125, 62.5, 31.2, "NVIDIA A10 data sheet"),
    "v100": Gpu("v100-sxm", None, None, 15.7, "NVIDIA V100 data sheet", fp16=125, nvlink=150, generation="volta",
                memory=(32, 0.9)),
    "v100-pcie": Gpu("v100-pcie", None, None, 14, "NVIDIA V100 data sheet", fp16=112),
    "t4": Gpu("tesla t4", None, None, 8.1, "NVIDIA T4 data sheet", fp16=65, generation="turing", memory=(15, 0.32),
               pcie_bytes_per_s=PCIE4_BYTES_PER_S / 2),
}  # fmt: skip


# Parts that a prediction distinguishes, and a link or a device name does not.
_AT_72_W = "; at 72 W it may be less"
_NO_PEERS = "; GPUs of a host send through its memory, which may be slower"
VARIANTS: Mapping[str, Gpu] = {
    "a100-40": replace(GPUS["a100"], memory=(40, 1.555)),
    "a100-80": replace(GPUS["a100"], memory=(80, 2.039)),
    # Leonardo's own part is said to have 124 multiprocessors instead of 108; no data sheet was read.
    "a100-64": replace(GPUS["a100"], bf16=358, memory=(64, 1.64)),
    # The H100 of torchtitan's benchmarks: "96 GB HBM2e 2.4 TB/s, 500 W" (torchtitan@b5bcd76 benchmarks); its clocks at that
    # power are not published.
    "h100-hbm2e": replace(GPUS["h100"], memory=(95, 2.4), power_share=500 / 700),
    # Half of the data sheet's figures with sparsity; 72 W.
    "l4": Gpu("", 121, 60, 30.3, "NVIDIA L4 data sheet", generation="ada", memory=(22.5, 0.3), remark=_AT_72_W),
    # Cards for workstations: tensor cores with fp32 accumulation, which GeForce cards do at half the rate of the others.
    "rtx3090": Gpu("", 71, 35.6, 35.6, "NVIDIA GA102 whitepaper", generation="ampere", memory=(23.7, 0.936),
                   remark=_NO_PEERS),
    "rtx4090": Gpu("", 165.2, 82.6, 82.6, "NVIDIA Ada whitepaper", generation="ada", memory=(23.6, 1.008), remark=_NO_PEERS),
    "rtx5090": Gpu("", 209.5, 104.8, 104.8, "NVIDIA RTX Blackwell whitepaper", generation="blackwell", memory=(31.4, 1.792),
                   pcie_bytes_per_s=2 * PCIE4_BYTES_PER_S, remark=_NO_PEERS),
    "rtx-a6000": Gpu("", 154.8, 77.4, 38.7, "NVIDIA GA102 whitepaper", generation="ampere", memory=(47.5, 0.768)),
    "rtx6000-ada": Gpu("", 364.2, 182.1, 91.1, "NVIDIA Ada professional whitepaper", generation="ada", memory=(45, 0.96)),
}  # fmt: skip


def gpu_of_device(device_name: str) -> Gpu | None:
    """The row of a `torch.cuda.get_device_name`; None for a device that is not in the table, or a slice of one (MIG)."""
    low = device_name.lower()
    return None if "mig" in low.split() else next((gpu for gpu in GPUS.values() if gpu.device_name in low), None)
