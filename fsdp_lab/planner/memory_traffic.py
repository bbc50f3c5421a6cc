"""What norms, activations, residuals and losses move through memory, counted from the kernels that published code runs.

Each constant is the bytes that an element's kernels read and write: forward, backward; then the same where a compiler has
joined neighbours. Half precision is 2 bytes; what casts to fp32 moves 4. Nothing here is fitted. Dropout is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_lab.core.model_shape import UnitShape

Bytes = tuple[float, float, float, float]

LAYER_NORM: Bytes = (4, 10, 2, 4)  # one kernel; backward: the gradient of its input, then of its weights
RMS_NORM: Bytes = (36, 66, 2, 4)  # as Llama's code has it: cast, square, mean, product, cast, weight, a kernel each
RESIDUAL: Bytes = (6, 6, 6, 4)  # two read, one written; joined: with the norm behind it
ACTIVATION: Bytes = (4, 6, 4, 6)  # GELU or ReLU
GATE: Bytes = (10, 18, 6, 12)  # SiLU and a product, of which the backward reads both factors
ROTARY: Bytes = (20, 20, 4, 4)  # of queries and keys, in fp32
LOSS: Bytes = (14, 22, 4, 4)  # of a logit: cast, log-softmax; its gradient, cast
PER_SAVED: Bytes = (
    1.1,
    1.7,
    0.8,
    1.1,
)  # of a byte that is saved, where a unit is no transformer's: as of a GPT's block


@dataclass(frozen=True, kw_only=True)
class MemoryTraffic:
    """Bytes of a token in half precision: each operation a kernel of its own; and joined by a compiler."""

    forward: float
    backward: float
    joined_forward: float
    joined_backward: float


def memory_traffic(unit: UnitShape) -> MemoryTraffic | None:
    """As its products tell: a head with its loss is one product without attention. None: it is no transformer's."""
    if unit.heads:
        return _blocks(unit)
    if len(unit.products) == 1 and not unit.saved["bf16"].fixed_bytes:
        head = unit.products[0]
        return _sum((head.count * head.outputs * head.share, LOSS))
    return None


def _blocks(unit: UnitShape) -> MemoryTraffic | None:
    """Of one block or several. What widens to twice its inner width is gated, and such models (Llama and what came after
    it) have RMS norms and rotary positions."""
    hidden = unit.boundary_elements or max(unit.products, key=lambda p: p.outputs).inputs
    width = max((p.inputs for p in unit.products if p.outputs == hidden), default=0)
    blocks = sum(p.count for p in unit.products if (p.inputs, p.outputs) == (width, hidden))
    if not blocks:
        return None
    widened = sum(p.count * p.outputs for p in unit.products if p.inputs == hidden and p.outputs in (width, 2 * width))
    logits = sum(p.count * p.outputs * p.share for p in unit.products if p.outputs > max(4 * hidden, 2 * width))
    ends, inner, heads = 2 * blocks * hidden, blocks * width, unit.pair_flops / 4
    if widened >= 2 * inner:
        return _sum((ends, RESIDUAL), (ends, RMS_NORM), (2 * heads, ROTARY), (inner, GATE), (logits, LOSS))
    return _sum((ends, RESIDUAL), (ends, LAYER_NORM), (inner, ACTIVATION), (logits, LOSS))


def _sum(*parts: tuple[float, Bytes]) -> MemoryTraffic:
    """parts: elements of a token, and the bytes of each."""
    a, b, c, d = (sum(elements * each[i] for elements, each in parts) for i in range(4))
    return MemoryTraffic(forward=a, backward=b, joined_forward=c, joined_backward=d)
