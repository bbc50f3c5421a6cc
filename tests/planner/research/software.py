"""Plans with the `Software` of published measurements, where the planner assumes today's."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsdp_lab.planner import costs
from fsdp_lab.planner.costs import FLASH2, Bytes, Computing, arithmetic, blocks_of, memory_traffic, traffic_bytes
from fsdp_lab.planner.devices import Machine
from fsdp_lab.planner.memory import CONTEXT_BYTES, MODELS, MemoryPlan, memory
from fsdp_lab.planner.memory_models.base import GRADIENTS, OPTIMIZER, PARAMETERS, MemoryModel
from fsdp_lab.planner.memory_models.fsdp import DDPMemory, FSDP1Memory
from fsdp_lab.planner.model_shape import ModelShape, UnitShape
from fsdp_lab.planner.plan import Plan, plan
from fsdp_lab.planner.step import recomputed
from fsdp_lab.spec.spec import Spec
from tests.planner.research.tape import Attention, Software, dense_tape

# Memory that torch's allocator reserves, relative to the allocated peak, while the device has room: the median over
# torchtitan's published rows, 1.16 to 1.63. In figure 8 it is 1.48 to 1.83 for GPT-175B, whose gathered units cannot be used
# again at once, and 1.15 to 1.44 for T5. Under pressure it releases unused blocks, so `reserved_bytes` decides what fits.
SPARE = 1.5
FULL = 0.95  # share of device memory that an allocator reserves at most


# cuDNN over FlashAttention-2 on an H100: up to 1.75, the release notes of PyTorch 2.5.
GAIN = {Attention.FLASH1: 1.0, Attention.FLASH2: FLASH2, Attention.CUDNN: FLASH2 * 1.75}
# Memory traffic per score and head in half precision: write, mask, softmax, read; and where mask and softmax are one kernel
# (Megatron-LM, arXiv 2104.04473, section 4.2).
SCORE_BYTES, FUSED_SCORE_BYTES = 12, 8
DROPOUT_BYTES = 5  # of an element in half precision: read, write, its mask
HALF_LOSS: Bytes = (4, 8, 4, 8)  # log-softmax; its gradient
# Kernels of a block's forward besides products and attention. Assumed: only the product with `Rates.kernel_s` shows.
GATED_KERNELS, PLAIN_KERNELS, PLAIN_ATTENTION_KERNELS, FUSED_ATTENTION_KERNELS = 28, 12, 7, 2


@dataclass(frozen=True, kw_only=True)
class SoftwareComputing(Computing):
    software: Software

    def attention_s(self, unit: UnitShape) -> tuple[float, float]:
        pairs, peak = self.samples * (unit.share * self.tokens) ** 2, self.device.flops_per_s(self.dtype)
        if self.software.attention is not Attention.PLAIN:
            return self.fused_attention_s(unit, pairs, peak, GAIN[self.software.attention])
        each = FUSED_SCORE_BYTES if self.software.fused_softmax else SCORE_BYTES
        moved = (each + DROPOUT_BYTES * self.software.drops) * unit.heads * pairs
        products_s = unit.pair_flops * pairs / (peak * self.device.matrix_share * self.rates.matrix)
        seconds = products_s + moved / (self.device.memory_bytes_per_s * self.rates.memory)
        return seconds, 2.0 * seconds

    def traffic_bytes(self, unit: UnitShape) -> tuple[float, float]:
        software = self.software
        traffic = memory_traffic(unit, norm=costs.LAYER_NORM if software.fused_norms else costs.RMS_NORM,
                                 loss=HALF_LOSS if software.half_loss else costs.LOSS)  # fmt: skip
        forward, back = traffic_bytes(unit, self.tokens, self.dtype, traffic, fused=self.spec.strategy.compile)
        size = unit.share * self.tokens * (2 if self.dtype != "fp32" else 4) / 2
        dropout = 2 * DROPOUT_BYTES * unit.boundary_elements * size if software.drops and unit.heads else 0.0
        return forward + dropout, back + dropout

    def kernels(self, unit: UnitShape) -> float:
        products = sum(p.count for p in unit.products)
        blocks = blocks_of(unit) if unit.heads else None
        if blocks is None:
            return products * (1 if self.spec.strategy.compile else 3)
        is_plain = self.software.attention is Attention.PLAIN
        attention = PLAIN_ATTENTION_KERNELS if is_plain else FUSED_ATTENTION_KERNELS
        if self.spec.strategy.compile:
            return products + blocks.count * (attention + costs.FUSED_KERNELS - FUSED_ATTENTION_KERNELS)
        return products + blocks.count * (attention + (GATED_KERNELS if blocks.is_gated else PLAIN_KERNELS))

    def recompute_s(self, unit: UnitShape, products: float, scores: float, other: float) -> float:
        if self.software.operators:  # which keep the first product, the third, and so on, in calling order
            each = [p.inputs * p.outputs * p.share for p in unit.products for _ in range(p.count)]
            return (1 - (sum(each[::2]) / sum(each) if each else 1.0)) * products + other
        usual = super().recompute_s(unit, products, scores, other)
        return usual if self.software.stops_early else products + other + scores

    def optimizer_s(self, elements: float) -> float:
        return super().optimizer_s(elements) / (2 if self.software.half_state else 1)


class KeepingFSDP1(FSDP1Memory):
    """FSDP1 whose gradients are filled with zeros, and so stay."""

    def begin_micro_batch(self, *, reduces: bool) -> None:
        self.begun = True
        super().begin_micro_batch(reduces=reduces)


class FirstFSDP1(FSDP1Memory):
    """FSDP1 in its first step: what is kept between steps does not exist yet."""

    def alloc_state(self) -> None:
        self.tracker.alloc(PARAMETERS, self.shards)

    def update(self) -> None:
        self.tracker.alloc(OPTIMIZER, self.state)
        super().update()


class KeepingDDP(DDPMemory):
    """DDP that has gradients beside its buckets."""

    def alloc_state(self) -> None:
        super().alloc_state()
        self.tracker.alloc(GRADIENTS, self.gradient_shards)


def memory_model(spec: Spec, software: Software) -> type[MemoryModel]:
    if spec.strategy.backend == "fsdp1" and software.first_step:
        return FirstFSDP1
    if software.keeps_gradients:
        return {"fsdp1": KeepingFSDP1, "ddp": KeepingDDP}[spec.strategy.backend]
    return MODELS[spec.strategy.backend]


def taped(spec: Spec, shape: ModelShape, software: Software) -> ModelShape:
    """The shape with the tape of this Spec, whatever it recomputes."""
    units = frozenset(recomputed(spec, len(shape.units)))
    s, name = spec.strategy, arithmetic(spec.strategy)
    tape = dense_tape(shape, s.dtypes.param, software, compiled=s.compile, recomputed=units)
    return replace(shape, tapes={name: tape, f"{name}, recompute": tape})


def planned_memory(spec: Spec, shape: ModelShape, software: Software) -> MemoryPlan:
    """Memory on a GPU."""
    return memory(spec, taped(spec, shape, software), device="cuda", model=memory_model(spec, software))


def peak_of_kind(planned: MemoryPlan, kind: str, capacity_bytes: float) -> float:
    """The peak as tools report it on a device of that capacity: "allocated" by tensors, "reserved" by the allocator, or
    "used" on the device (nvidia-smi), which includes the context."""
    if kind == "allocated":
        return planned.peak_bytes
    context = CONTEXT_BYTES if kind == "used" else 0
    reserved = min(SPARE * planned.peak_bytes, FULL * capacity_bytes - context)
    return max(reserved, planned.reserved_bytes) + context


def planned(spec: Spec, shape: ModelShape, machine: Machine, software: Software) -> Plan:
    found = plan(spec, taped(spec, shape, software), machine, computing=partial(SoftwareComputing, software=software))
    assumed: dict[str, Any] = {**found.assumed, "attention": software.attention.value}
    return replace(found, assumed=assumed, memory=planned_memory(spec, shape, software))
