"""`ModelShape`: what a planner needs of a model, as numbers, unit by unit. Floor 0: no torch.

`fsdp_lab.planner.known` makes it of the few numbers that published tables give of a transformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Product:
    """`count` matrix products with a weight, of all tokens that the unit sees: [tokens, inputs] x [inputs, outputs]."""

    inputs: int
    outputs: int
    count: int = 1

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that the forward of one sample of T tokens keeps for its backward: `per_token * T + per_pair * T^2 + fixed`."""

    per_token_bytes: float = 0.0
    per_pair_bytes: float = 0.0  # 0 where attention does not write its matrix down
    fixed_bytes: float = 0.0

    def bytes_of(self, tokens: int) -> float:
        return self.per_token_bytes * tokens + self.per_pair_bytes * tokens * tokens + self.fixed_bytes


@dataclass(frozen=True, kw_only=True)
class UnitShape:
    """A module that is gathered as one: a block, or the root with what is in no block."""

    name: str  # such as "transformer.h.0"; "root"
    parameters: tuple[int, ...]  # elements of each tensor, in the module's order
    products: tuple[Product, ...] = ()
    pair_flops: float = 0.0  # of attention, forward, for each pair of tokens of a sample: 4 x heads x their width
    saved: Mapping[str, Saved]  # by compute dtype: "fp32", "bf16", "fp16"
    boundary_elements: float = 0.0  # of a token: the unit's input, which is all that recompute keeps of it
    heads: int = 0  # of that attention
    causal: bool = False  # a fused kernel skips half of the pairs
    share: float = 1.0  # of a sample's tokens that it sees: one half in an encoder or a decoder

    @cached_property
    def numel(self) -> int:
        return sum(self.parameters)

    def forward_flops(self, tokens: int) -> float:
        """Of one sample."""
        seen = self.share * tokens
        return 2 * sum(p.weights for p in self.products) * seen + self.pair_flops * seen * seen


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """`units[0]` is the root, the others stand in the order of the forward."""

    name: str
    units: tuple[UnitShape, ...]
    image_tokens: int | None = None  # of an image; None: a sample has as many tokens as the sequence is long

    @property
    def parameters(self) -> int:
        """Ties counted once."""
        return sum(unit.numel for unit in self.units)

    def tokens(self, seq_len: int) -> int:
        """Of one sample."""
        return self.image_tokens if self.image_tokens is not None else seq_len

    def forward_flops(self, seq_len: int) -> float:
        """Of one sample."""
        return sum(unit.forward_flops(self.tokens(seq_len)) for unit in self.units)
