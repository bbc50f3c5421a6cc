"""How long a unit computes: matrix products, attention, and the traffic of all else.

Of a product [tokens, inputs] x [inputs, outputs]: its FLOPs at the device's rate for large products, and its operands once
through memory (a roofline whose two sides are added, which makes narrow matrices slower, as they are). Of fused attention:
its own FLOPs, of which causal masking skips half, at a rate of its own; its backward computes the scores again, 2.5 times
the forward (FlashAttention-2, arXiv 2307.08691, section 4.1). Of plain attention: two products of all pairs, and the matrix
of scores through memory. Of norms, activations, residuals and losses: memory traffic, as `moved` counts it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from fsdp_lab.core.model_shape import UnitShape
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.devices import Device
from fsdp_lab.planner.memory_traffic import PER_SAVED, memory_traffic
from fsdp_lab.planner.rates import Rates

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Read and written for each fp32 element: value, gradient, moments; torch's foreach AdamW, operation by operation.
OPTIMIZER_BYTES = {"adamw": 80, "sgd": 12}
FUSED_ADAMW_BYTES = 28


class Attention(StrEnum):
    """The kernel: what no Spec says, since libraries choose it. Its rate is `Rates.attention` times `GAIN`."""

    PLAIN = "plain"  # the matrix of scores is written down
    FLASH1 = "flash1"  # FlashAttention, and Triton's of the same age
    FLASH2 = "flash2"  # FlashAttention-2, which torch's scaled_dot_product_attention has had since 2.2


GAIN = {
    Attention.FLASH1: 1.0,
    Attention.FLASH2: 1.8,
}  # causal, width 128, on an A100: arXiv 2307.08691, figures 5 and 6
SCORE_BYTES = 12  # of memory traffic for each score and head: written, masked, softened and read, in half precision


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a prediction takes to be used.

    `operators`: where a unit is recomputed, half of its matrix products and its attention are kept all the same
    (torchtitan's selective activation checkpoints). `stops_early`: recompute stops when the last tensor that the backward
    needs is there, before the unit's last product (torch's checkpoints since 2.1). `fused_optimizer`: one pass over AdamW's
    state; torch's default makes eight. `keeps_gradients`: between steps they are filled with zeros, and not dropped (torch's
    optimizers before 2.0). `holds_scores`: the peak has the matrix of scores in it, though the step is as quick as with a
    fused kernel.
    """

    attention: Attention = Attention.FLASH2
    operators: bool = False
    stops_early: bool = True
    fused_optimizer: bool = False
    keeps_gradients: bool = False
    holds_scores: bool = False


USUAL = Software()


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one unit in one micro-batch."""

    forward_s: float
    backward_s: float
    again_s: float  # what recompute adds to the backward


def work(unit: UnitShape, tokens: int, spec: Spec, device: Device, rates: Rates, software: Software, *,
         recomputed: bool) -> Work:  # fmt: skip
    """tokens: of one sample."""
    dtype, samples = spec.strategy.dtypes.param, spec.workload.micro_batch
    products = product_seconds(unit, tokens * samples, dtype, device, rates)
    scores = attention_seconds(unit, tokens, samples, dtype, device, rates, software.attention)
    if (times := rates.traffic_of.get(dtype)) is not None:
        counted = (times * kept_bytes(unit, tokens, dtype),) * 2
    else:
        counted = moved_bytes(unit, tokens, dtype, joined=spec.strategy.compile)
    other, other_back = (samples * size / (device.memory_bytes_per_s * rates.memory) for size in counted)
    hosted = rates.host(spec.strategy.backend).tensor_s * len(unit.parameters) / 2
    again = products / 2 + other if software.operators else products + scores + other
    if software.stops_early and unit.products and not software.operators:
        last = replace(unit, products=(replace(unit.products[-1], count=1),))
        again -= product_seconds(last, tokens * samples, dtype, device, rates)
    return Work(
        forward_s=products + scores + other + hosted,
        backward_s=2 * products
        + (2.0 if software.attention is Attention.PLAIN else 2.5) * scores
        + other_back
        + hosted,
        again_s=again + hosted if recomputed else 0.0,
    )


def kept_bytes(unit: UnitShape, tokens: int, dtype: str) -> float:
    """Of one sample, for the backward, without attention's scores: their traffic is theirs."""
    return replace(unit.saved[dtype], per_pair_bytes=0.0).bytes_of(tokens)


def moved_bytes(unit: UnitShape, tokens: int, dtype: str, *, joined: bool) -> tuple[float, float]:
    """Of one sample, forward and backward, by what is neither a product nor attention."""
    counted = memory_traffic(unit)
    if counted is None:
        kept = kept_bytes(unit, tokens, dtype)
        forward, backward = PER_SAVED[2:] if joined else PER_SAVED[:2]
        return forward * kept, backward * kept
    seen = unit.share * tokens * BYTES[dtype] / 2
    if joined:
        return counted.joined_forward * seen, counted.joined_backward * seen
    return counted.forward * seen, counted.backward * seen


def product_seconds(unit: UnitShape, tokens: float, dtype: str, device: Device, rates: Rates) -> float:
    """Of the forward's matrix products."""
    if device.measured is not None:
        curve = device.curve(dtype)
        return sum(p.count * curve(2 * unit.share * tokens * p.share * p.inputs * p.outputs) for p in unit.products)
    rate = device.flops_per_s(dtype) * device.matrix_share * rates.matrix
    bandwidth = device.memory_bytes_per_s * rates.memory
    seen = unit.share * tokens
    total = 0.0
    for p in unit.products:
        operands = rates.operands * BYTES[dtype] * (p.share * seen * (p.inputs + p.outputs) + p.inputs * p.outputs)
        total += p.count * (2 * p.share * seen * p.inputs * p.outputs / rate + operands / bandwidth)
    return total


def attention_seconds(unit: UnitShape, tokens: float, samples: int, dtype: str, device: Device, rates: Rates,
                      kernel: Attention) -> float:  # fmt: skip
    """Of the forward; tokens: of one sample."""
    pairs, peak = samples * (unit.share * tokens) ** 2, device.flops_per_s(dtype)
    if device.measured is not None:
        return unit.pair_flops * pairs / peak + device.measured.scores[dtype](unit.heads * pairs)
    if kernel is Attention.PLAIN:
        moved = SCORE_BYTES * unit.heads * pairs / (device.memory_bytes_per_s * rates.memory)
        return unit.pair_flops * pairs / (peak * device.matrix_share * rates.matrix) + moved
    flops = unit.pair_flops * pairs * (0.5 if unit.causal else 1.0)
    return flops / (peak * rates.attention_share(device.generation) * GAIN[kernel])


def optimizer_seconds(elements: float, optimizer: str, device: Device, rates: Rates, software: Software) -> float:
    """Of a rank's own shard."""
    if device.measured is not None:
        return device.measured.updates[optimizer](elements)
    fused = optimizer == "adamw" and software.fused_optimizer
    each = FUSED_ADAMW_BYTES if fused else OPTIMIZER_BYTES[optimizer]
    return elements * each / (device.memory_bytes_per_s * rates.memory)
