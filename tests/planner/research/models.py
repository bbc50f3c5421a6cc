"""Shapes of transformers by the names that publications use.

Sources: the models' published configurations (Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783; GPT-3, arXiv 2005.14165;
T5, arXiv 1910.10683; MPT and others: their config.json), in `data/models.csv`. Sizes in a table take precedence."""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from fsdp_lab.planner.costs import BYTES
from fsdp_lab.planner.model_shape import MatMul, ModelShape, SizeFormula, UnitShape

MASK_ITEM = 2  # bytes of an element of a mask: FSDP casts buffers as it casts parameters


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A transformer of one of three families: "gpt" (learned positions, GELU), "llama" (gated, no biases), "t5"."""

    family: str
    layers: int  # of a T5: of its encoder, and of its decoder
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    seq_len: int  # the default
    head_width: int = 0  # 0: hidden / heads
    tied: bool = False
    masks: bool = False  # a block keeps a mask of all pairs as a buffer

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_width or self.hidden

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads


def gpt_model(layers: int, hidden: int, heads: int) -> NamedModel:
    return NamedModel(family="gpt", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, inner=4 * hidden,
                 vocabulary=50257, seq_len=2048, tied=True)  # fmt: skip


@cache
def _named_models() -> list[tuple[str, NamedModel]]:
    """Patterns of lower-case names, with their models. minGPT (github.com/karpathy/minGPT, model.py) has a head of its own,
    and a buffer with the causal mask in every block."""
    with (Path(__file__).parent / "data" / "models.csv").open(encoding="utf-8", newline="") as file:
        rows = [(row.pop("pattern"), row.pop("family"), row) for row in csv.DictReader(file)]
    return [(pattern, NamedModel(family=family, **{name: int(value) for name, value in row.items()}))
            for pattern, family, row in rows]  # fmt: skip


def named_model(name: str) -> NamedModel | None:
    """The model of this name; None if it is not known."""
    return next((model for pattern, model in _named_models() if re.search(pattern, name.lower())), None)


@lru_cache(maxsize=256)
def shape_of(model: NamedModel) -> ModelShape:
    """Saved activations are those with fused attention: of a block the inputs of norms, products and activation, and the
    heads; of the root the logits and two copies of them in fp32. A T5's saves the scores too. Its encoder and decoder have
    equal numbers of tokens, and the decoder's blocks attend twice."""
    h, inner = model.hidden, model.inner
    if model.family == "t5":
        encoder, decoder = (_t5_block(model, attentions) for attentions in (1, 2))
        return ModelShape(name="t5", units=(_root(model), *[encoder] * model.layers, *[decoder] * model.layers))
    is_gpt = model.family == "gpt"
    products = (
        MatMul(inputs=h, outputs=model.width), MatMul(inputs=h, outputs=model.kv_width, count=2),
        MatMul(inputs=model.width, outputs=h),
        MatMul(inputs=h, outputs=inner, count=1 if is_gpt else 2), MatMul(inputs=inner, outputs=h),
    )  # fmt: skip
    saved = 2 * (9 * h + 2 * inner) if is_gpt else 2 * (12 * h + 4 * inner)
    block = UnitShape(
        name="block", parameters=(*_weights(products), h, h), products=products, pair_flops=4 * model.width,
        heads=model.heads, causal=True, saved=_saved_bytes(saved), boundary_elements=h,
    )  # fmt: skip
    masks = MASK_ITEM * model.seq_len**2 * model.layers if model.masks else 0
    return ModelShape(name=f"{model.family} of {model.layers} x {h}", units=(_root(model), *[block] * model.layers),
                      buffers_bytes=masks)  # fmt: skip


def _t5_block(model: NamedModel, attentions: int) -> UnitShape:
    h, width, heads = model.hidden, model.width, model.heads * attentions
    products = (
        MatMul(inputs=h, outputs=width, count=3 * attentions), MatMul(inputs=width, outputs=h, count=attentions),
        MatMul(inputs=h, outputs=model.inner), MatMul(inputs=model.inner, outputs=h),
    )  # fmt: skip
    return UnitShape(
        name="block", parameters=_weights(products), products=products, pair_flops=4 * width * attentions, heads=heads,
        saved=_saved_bytes(2 * (8 * h + 4 * width * attentions + 2 * model.inner), 4 * heads), boundary_elements=h,
    )  # fmt: skip


def _root(model: NamedModel) -> UnitShape:
    table = model.vocabulary * model.hidden
    positions = model.seq_len * model.hidden if model.family == "gpt" else 0
    logits = SizeFormula(((1, 1, 10.0 * model.vocabulary),))
    return UnitShape(
        name="root", parameters=tuple(n for n in (table, 0 if model.tied else table, positions, model.hidden) if n),
        products=(MatMul(inputs=model.hidden, outputs=model.vocabulary),), saved=dict.fromkeys(BYTES, logits),
        boundary_elements=model.hidden,
    )  # fmt: skip


def _weights(products: Sequence[MatMul]) -> tuple[int, ...]:
    """Elements of each product's weight."""
    return tuple(p.inputs * p.outputs for p in products for _ in range(p.count))


def _saved_bytes(per_token: int, per_pair: int = 0) -> dict[str, SizeFormula]:
    """By dtype, from bytes in half precision."""
    pairs = ((1, 2, per_pair / 2),) if per_pair else ()
    whole = ((1, 1, per_token / 2), *pairs)
    return {dtype: SizeFormula(tuple((b, t, each * item) for b, t, each in whole)) for dtype, item in BYTES.items()}
