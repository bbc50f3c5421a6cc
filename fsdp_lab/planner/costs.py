"""Seconds of one operation: a unit's forward and backward (`work`), an optimizer step, a collective.

Matrix products [tokens, inputs] x [inputs, outputs]: FLOPs at the device's rate for large products, plus the memory traffic
of operands (a roofline whose two sides are added, so that narrow matrices are slower). Fused attention: its
own FLOPs, of which causal masking skips half, at a rate of its own; its backward computes the scores again, 2.5 times the
forward (FlashAttention-2, arXiv 2307.08691, section 4.1). Plain attention: two products of all pairs, and the matrix of
scores through memory. Norms, activations, residuals and losses: memory traffic, counted from the kernels of published code
(`memory_traffic`).

Collectives: a ring of n ranks sends (n-1)/n of the payload over every link for an all-gather or a reduce-scatter, twice that
for an all-reduce (Patarasu and Yuan, 2009; nccl-tests' "busbw" is that over the time). Within a host each device has its own
link. Between hosts NCCL makes several rings through different network cards, so that one group's ring has the whole host's
network; groups on the same hosts share it. Switches of Hopper's hosts and later ones add up themselves (NVLS), so that an
all-reduce inside such a host sends each byte once instead of twice."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fsdp_lab.engine.schedule import Direction
from fsdp_lab.planner.devices import Device, Machine, Rates
from fsdp_lab.planner.model_shape import MatMul, SizeFormula, UnitShape
from fsdp_lab.spec.optimizer import TorchOptimizer
from fsdp_lab.spec.spec import Spec, Strategy

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes of DDP's buckets, torch's defaults
# FlashAttention-2, which torch's scaled_dot_product_attention has since 2.2, reaches `Rates.attention` times this. (Causal,
# width 128, on an A100: arXiv 2307.08691, figures 5 and 6.)
FLASH2 = 1.8
FUSED_BACKWARD = 2.5  # fused attention's backward, relative to its forward, whose scores it computes again
# FlashAttention's kernels are for heads of whole multiples of this width (flash_api.cpp, `round_multiple`): a narrower head
# takes as long as one of the next width.
HEAD_STEP = 32
# How much longer a product in half precision takes if a row of one of its matrices is no multiple of 16 bytes: no kernel of
# the tensor cores' newest instructions is eligible (on an H100 3.53, github m87-labs/kestrel pull request 143). Published
# rows are not charged: their frameworks pad vocabularies.
UNALIGNED = 3.5


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one unit in one micro-batch."""

    forward_s: float
    backward_s: float
    recompute_s: float  # in the backward
    issue_s: Mapping[Direction, float]  # the host's time to issue the kernels


@dataclass(frozen=True, kw_only=True)
class Computing:
    """Computes the `Work` of units with torch's usual kernels: FlashAttention-2, and checkpoints whose recompute stops at
    the last tensor that the backward needs, before the unit's last product."""

    spec: Spec
    tokens: int  # of one sample
    device: Device
    rates: Rates

    @property
    def dtype(self) -> str:
        return self.spec.strategy.dtypes.param

    @property
    def samples(self) -> int:
        return self.spec.workload.micro_batch

    def work(self, unit: UnitShape, *, recomputed: bool) -> Work:
        device, rates, compiled = self.device, self.rates, self.spec.strategy.compile
        products, (scores, scores_back) = self.product_s(unit), self.attention_s(unit)
        if (times := rates.traffic_of.get(self.dtype)) is not None:
            traffic = (times * saved_bytes(unit, self.tokens, self.dtype),) * 2
        else:
            traffic = self.traffic_bytes(unit)
        moved_per_s = device.memory_bytes_per_s * rates.memory / rates.traffic
        weights = BYTES[self.dtype] * sum(p.count * p.inputs * p.outputs for p in unit.products)
        products += rates.weights * weights / device.memory_bytes_per_s
        other, other_back = (self.samples * size / moved_per_s for size in traffic)
        issue = rates.kernel_s * self.kernels(unit)
        issue_back = BACKWARD_LAUNCH * issue
        on_cpu = device.type == "cpu"
        if unit.kernels and not on_cpu and not compiled:
            counted = unit.kernels[arithmetic(self.spec.strategy)]
            other, other_back = (one.size.bytes_of(self.samples, self.tokens) / moved_per_s for one in counted)
            issue, issue_back = (rates.eager_s * one.count for one in counted)
        of_tensors = rates.host(self.spec.strategy.backend).tensor_s * len(unit.parameters) / 2
        host, issuing = (of_tensors, 0.0) if on_cpu else (0.0, of_tensors)  # a GPU does not wait for it
        recompute = self.recompute_s(unit, products, scores, other)
        recomputes = recomputed and unit.has_backward
        forward = products + scores + other + host
        back = (1 + unit.trained_share) * products + scores_back + other_back + host
        issued_back = issue_back + issuing + (issue if recomputes else 0.0)
        return Work(
            forward_s=forward,
            backward_s=back if unit.has_backward else 0.0,
            recompute_s=recompute + host if recomputes else 0.0,
            issue_s={Direction.FORWARD: issue + issuing, Direction.BACKWARD: issued_back},
        )

    def product_s(self, unit: UnitShape) -> float:
        """Matrix products of the forward."""
        device, rates, dtype = self.device, self.rates, self.dtype
        seen = unit.share * (self.tokens * self.samples)
        is_charged = device.type == "cuda" and dtype != "fp32" and bool(unit.kernels)

        def slowed(p: MatMul) -> float:
            return UNALIGNED if is_charged and (p.inputs % 8 or p.outputs % 8) else 1.0

        rate = device.flops_per_s(dtype) * device.matrix_share * rates.matrix
        if device.measured is not None:
            curve = device.measured.products[dtype]
            return sum(p.count * slowed(p) * curve(2 * seen * p.share * p.inputs * p.outputs) for p in unit.products)
        bandwidth = device.memory_bytes_per_s * rates.memory
        total = 0.0
        for p in unit.products:
            operands = rates.operands * BYTES[dtype] * (p.share * seen * (p.inputs + p.outputs) + p.inputs * p.outputs)
            total += p.count * (slowed(p) * 2 * p.share * seen * p.inputs * p.outputs / rate + operands / bandwidth)
        return total

    def attention_s(self, unit: UnitShape) -> tuple[float, float]:
        """Attention without its products with weights: (forward, backward)."""
        pairs, peak = self.samples * (unit.share * self.tokens) ** 2, self.device.flops_per_s(self.dtype)
        if (measured := self.device.measured) is not None:
            seconds = unit.pair_flops * pairs / peak + measured.scores[self.dtype](unit.heads * pairs)
            return seconds, FUSED_BACKWARD * seconds
        return self.fused_attention_s(unit, pairs, peak, FLASH2)

    def fused_attention_s(self, unit: UnitShape, pairs: float, peak: float, gain: float) -> tuple[float, float]:
        flops = unit.pair_flops * pairs * (0.5 if unit.causal else 1.0) * padding(unit)
        attention = self.rates.attention
        seconds = flops / (peak * attention.get(self.device.generation, attention["hopper"]) * gain)
        return seconds, FUSED_BACKWARD * seconds

    def traffic_bytes(self, unit: UnitShape) -> tuple[float, float]:
        """Memory traffic of one sample without products and attention: (forward, backward)."""
        return traffic_bytes(unit, self.tokens, self.dtype, memory_traffic(unit), fused=self.spec.strategy.compile)

    def kernels(self, unit: UnitShape) -> float:
        """Kernels of a unit's forward that a compiler has fused. Others are counted (`UnitShape.kernels`)."""
        blocks = blocks_of(unit) if unit.heads else None
        return sum(p.count for p in unit.products) + (blocks.count * FUSED_KERNELS if blocks else 0)

    def recompute_s(self, unit: UnitShape, products: float, scores: float, other: float) -> float:
        """Returns the seconds of a second forward up to the last product, from those of a forward's parts."""
        last = (replace(unit.products[-1], count=1),) if unit.products else ()
        return products + other + scores - self.product_s(replace(unit, products=last))

    def optimizer_s(self, elements: float) -> float:
        """One update of a rank's shard. Measured are plain AdamW and SGD; others are in proportion to their traffic."""
        optimizer = self.spec.workload.torch_optimizer
        each = update_bytes(optimizer)
        if self.device.measured is None:
            return elements * each / (self.device.memory_bytes_per_s * self.rates.memory)
        name = optimizer.name if optimizer.is_known else "adamw"
        return self.device.measured.updates[name](elements) * each / update_bytes(TorchOptimizer(name=name))


ComputingOf = Callable[..., Computing]  # of its fields


def arithmetic(strategy: Strategy) -> str:
    """The name of the tape of a model, as in `ModelShape.tapes`."""
    return "fp32" if strategy.dtypes.param == "fp32" else "autocast" if strategy.traits.autocasts else "half"


def saved_bytes(unit: UnitShape, tokens: int, dtype: str) -> float:
    """Bytes that one sample's forward saves for the backward, without attention's scores, which are counted apart."""
    return SizeFormula(tuple(term for term in unit.saved[dtype].terms if term[1] < 2)).bytes_of(1, tokens)


def traffic_bytes(
    unit: UnitShape, tokens: int, dtype: str, traffic: "Bytes | None", *, fused: bool
) -> tuple[float, float]:
    """Bytes of a sample's forward and backward, from the traffic of a token; None: in proportion to what is saved."""
    size = unit.share * tokens * BYTES[dtype] / 2
    if traffic is None:
        traffic, size = PER_SAVED, saved_bytes(unit, tokens, dtype)
    forward, backward = traffic[2:] if fused else traffic[:2]
    return forward * size, backward * size


def padding(unit: UnitShape) -> float:
    """The width of a head in FlashAttention's kernel relative to its own; 1 without attention."""
    if not unit.heads:
        return 1.0
    width = unit.pair_flops / 4 / unit.heads
    return math.ceil(width / HEAD_STEP) * HEAD_STEP / width


def update_bytes(optimizer: TorchOptimizer) -> int:
    """Read and written per fp32 element: value, gradient, state. A fused kernel touches each once; torch's others have
    an operation for each term: about as many as AdamW for each slot, where the class is not known."""
    if optimizer.is_fused:
        return 12 + 8 * len(optimizer.slots)
    if optimizer.name == "sgd":
        return 12 + 20 * bool(optimizer["momentum"]) + 12 * bool(optimizer["nesterov"])
    return 80 + 12 * bool(optimizer["amsgrad"]) if optimizer.is_known else 12 + 34 * len(optimizer.slots)


# Bytes that an element's kernels read and write: forward, backward; then the same if a compiler has fused neighbours.
# Half precision is 2 bytes; a cast to fp32 moves 4. Nothing here is fitted. Dropout is not counted.
Bytes = tuple[float, float, float, float]

LAYER_NORM: Bytes = (4, 10, 2, 4)  # one kernel; backward: the gradient of its input, then of its weights
RMS_NORM: Bytes = (36, 66, 2, 4)  # as in Llama's code: cast, square, mean, product, cast, weight, a kernel each
RESIDUAL: Bytes = (6, 6, 6, 4)  # two read, one written; fused: with the next norm
ACTIVATION: Bytes = (4, 6, 4, 6)  # GELU or ReLU
GATE: Bytes = (10, 18, 6, 12)  # SiLU and a product, whose backward reads both factors
ROTARY: Bytes = (20, 20, 4, 4)  # of queries and keys, in fp32
LOSS: Bytes = (14, 22, 4, 4)  # of a logit: cast, log-softmax; its gradient, cast
PER_SAVED: Bytes = (1.1, 1.7, 0.8, 1.1)  # per saved byte, for units of other models; as in a GPT's block


def memory_traffic(unit: UnitShape, *, norm: Bytes = RMS_NORM, loss: Bytes = LOSS) -> Bytes | None:
    """Bytes per token in half precision, of a transformer's block or of a head with its loss, which is one product without
    attention. None for other units. norm: of a gated block."""
    if not unit.heads:
        if len(unit.products) != 1 or any(not t for _, t, _ in unit.saved["bf16"].terms):
            return None
        head = unit.products[0]
        return _sum_traffic((head.count * head.outputs * head.share, loss))
    blocks = blocks_of(unit)
    if blocks is None:
        return None
    wide = max(4 * blocks.hidden, 2 * blocks.inner)
    logits = sum(p.count * p.outputs * p.share for p in unit.products if p.outputs > wide)
    ends, inner, heads = 2 * blocks.count * blocks.hidden, blocks.count * blocks.inner, unit.pair_flops / 4
    if blocks.is_gated:
        return _sum_traffic((ends, RESIDUAL), (ends, norm), (2 * heads, ROTARY), (inner, GATE), (logits, LOSS))
    return _sum_traffic((ends, RESIDUAL), (ends, LAYER_NORM), (inner, ACTIVATION), (logits, LOSS))


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of a unit. One that widens to twice its inner width is gated, and such models (Llama and later ones) have
    RMS norms and rotary positions."""

    count: int
    hidden: float
    inner: int
    is_gated: bool


def blocks_of(unit: UnitShape) -> Blocks | None:
    """None for a unit without blocks."""
    hidden = unit.boundary_elements or max(unit.products, key=lambda p: p.outputs).inputs
    inner = max((p.inputs for p in unit.products if p.outputs == hidden), default=0)
    count = sum(p.count for p in unit.products if (p.inputs, p.outputs) == (inner, hidden))
    widened = sum(p.count * p.outputs for p in unit.products if p.inputs == hidden and p.outputs in (inner, 2 * inner))
    return Blocks(count=count, hidden=hidden, inner=inner, is_gated=widened >= 2 * count * inner) if count else None


def _sum_traffic(*parts: tuple[float, Bytes]) -> Bytes:
    """parts: elements per token, and the bytes of each."""
    a, b, c, d = (sum(elements * each[i] for elements, each in parts) for i in range(4))
    return a, b, c, d


# Kernels of a block's forward besides its matrix products, with two of attention, as a compiler fuses them. This number, and
# those of the backward and of a collective, are assumed: only their product with `Rates.kernel_s` shows.
FUSED_KERNELS = 6
BACKWARD_LAUNCH = 0.4  # host's time of a backward, relative to the forward: more kernels, but autograd issues them
SEND_KERNELS = 20  # a gather or a reduction of a unit takes the host as long as so many kernels


# How much faster an all-reduce of NVLS is than a ring: half of the bytes, at three quarters of the rate
# (tests/planner/research/data/collective_timings.csv, 1 GiB and more on eight H100 or H200).
MULTICAST = 1.33
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # of the payload through the ring


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """`size` ranks, `stride` apart: 1 in a shard group, the shard's size in a replicate group."""

    size: int
    stride: int = 1


def link_bytes(kind: str, payload_bytes: float, size: int) -> float:
    """Bytes that a rank sends, and receives, in a ring of `size` ranks."""
    return PASSES[kind] * payload_bytes * (size - 1) / size


def collective_seconds(kind: str, payload_bytes: float, group: RankGroup, machine: Machine, rates: Rates) -> float:
    """One collective alone; 0 for a group of one."""
    if group.size < 2:
        return 0.0
    sent = link_bytes(kind, payload_bytes, group.size)
    if kind in machine.collectives or (kind in machine.inside and group.size * group.stride <= machine.per_host):
        return _measured_seconds(kind, sent, group, machine)
    shared = 1 if machine.device.switched else min(machine.per_host, group.size * group.stride)
    slowest = sent * shared / (machine.device.link_bytes_per_s * rates.link)
    if kind == "all_reduce" and machine.switches_reduce:
        slowest /= MULTICAST
    if group.size * group.stride > machine.per_host:
        rings = min(group.stride, machine.per_host)  # groups that use a host's network at once
        slowest = max(slowest, sent * rings / (machine.network_bytes_per_s * rates.network))
    hosts = min(group.size, -(-group.size * group.stride // machine.per_host))
    return slowest + rates.latency_s * (group.size - hosts) + rates.hop_s * (hosts - 1)


def _measured_seconds(kind: str, sent: float, group: RankGroup, machine: Machine) -> float:
    """From the curve of the links that the group uses; inside a host, of all its ranks. Groups that share a host's network
    take as long as the measured ones, with as many bytes on it."""
    rings = min(group.stride, machine.per_host)
    if group.size * group.stride > machine.per_host:
        return machine.collectives[kind](sent) if rings == 1 else machine.across[kind](sent * rings / machine.per_host)
    return (machine.inside.get(kind) or machine.collectives[kind])(sent)


def late_s(size: int, rates: Rates) -> float:
    """Delay of the last of `size` ranks at a collective. If each is late by an exponentially distributed time, the last is
    late by the mean times 1 + 1/2 + ... + 1/size, about ln(size) (Rényi, On the theory of order statistics, 1953)."""
    return rates.jitter_s * math.log(size)
