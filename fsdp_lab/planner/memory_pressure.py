"""When memory is nearly full: FSDP1's collectives no longer overlap.

FSDP1 gathers on a stream of its own, so a freed buffer can be taken again only when the stream that used it has come that
far; where the device is nearly full, the allocator then gives back what it holds and asks the driver anew, and each time the
host waits for the device (arXiv 2304.11277, sections 3.4.2 and 5.4). FSDP2 frees without that, and its memory is its plan.
"""

from __future__ import annotations

from fsdp_lab.core.model_shape import ModelShape
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.compute import BYTES
from fsdp_lab.planner.devices import Machine
from fsdp_lab.planner.step import recomputed

NEARLY = 0.92  # of the device's memory; the rest is the driver's, the communicator's and what is in pieces
GATHERED = 3  # blocks at once: one in use and two that the rate limiter lets go ahead


def pressed(spec: Spec, shape: ModelShape, machine: Machine) -> bool:
    """Whether collectives wait for memory. What does not fit at all is not slowed: nothing is known of it."""
    if spec.strategy.backend != "fsdp1" or spec.shard_factor == 1 or machine.device.generation == "cpu":
        return False
    return NEARLY < needed_bytes(spec, shape) / machine.device.memory_bytes <= 1.0


def needed_bytes(spec: Spec, shape: ModelShape) -> float:
    """Of a rank at the end of a micro-batch's forward: state, what is kept for the backward, blocks in flight."""
    dtypes, root, block = spec.strategy.dtypes, shape.units[0], max(shape.units[1:], key=lambda unit: unit.numel)
    reduced = BYTES[dtypes.reduce]
    in_flight = (GATHERED * BYTES[dtypes.param] + 2 * reduced) * block.numel + (
        BYTES[dtypes.param] + reduced
    ) * root.numel
    state = (4 if spec.workload.optimizer == "sgd" else 12) + 4  # fp32 values and moments; gradients
    return state * shape.parameters / spec.shard_factor + kept_bytes(spec, shape) + in_flight


def kept_bytes(spec: Spec, shape: ModelShape) -> float:
    """Activations of a micro-batch, with the logits. Of a recomputed block only its input stays, beside one block's own."""
    tokens, dtype = shape.tokens(spec.workload.seq_len), spec.strategy.dtypes.param
    own = [unit.saved[dtype].bytes_of(tokens) for unit in shape.units[1:]]
    inputs = [BYTES[dtype] * unit.boundary_elements * tokens for unit in shape.units[1:]]
    again = recomputed(spec, len(shape.units))
    blocks = sum(inputs[i] if i + 1 in again else own[i] for i in range(len(own)))
    logits = shape.units[0].saved[dtype].bytes_of(tokens)  # they go before the blocks are computed again
    passing = max(logits, max(own)) if again else logits
    return spec.workload.micro_batch * (blocks + passing)
