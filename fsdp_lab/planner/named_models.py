"""Models by the names that tables use: their shapes, where a row names a model and not its sizes.

Sources: the models' published configurations (Llama 2, arXiv 2307.09288; Llama 3, arXiv 2407.21783; GPT-3, arXiv 2005.14165;
T5, arXiv 1910.10683; MPT and others: their config.json). What a table itself gives goes before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.core.model_shape import MatMul, ModelShape, SavedBytes, UnitShape


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A transformer of one of three families: "gpt" (learned positions, GELU), "llama" (gated, no biases), "t5"."""

    family: str
    layers: int  # of a T5: of its encoder, and as many of its decoder
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    seq_len: int  # where nobody says
    head_width: int = 0  # 0: hidden / heads
    tied: bool = False

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_width or self.hidden

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int = 50257, seq_len: int = 2048) -> NamedModel:
    return NamedModel(family="gpt", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, inner=4 * hidden,
                 vocabulary=vocabulary, seq_len=seq_len, tied=True)  # fmt: skip


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int, seq_len: int
) -> NamedModel:
    return NamedModel(family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, inner=inner,
                 vocabulary=vocabulary, seq_len=seq_len)  # fmt: skip


def _t5(heads: int, inner: int) -> NamedModel:
    return NamedModel(family="t5", layers=24, hidden=1024, heads=heads, kv_heads=heads, inner=inner, vocabulary=32128,
                 seq_len=512, head_width=128, tied=True)  # fmt: skip


_NAMES: tuple[tuple[str, NamedModel], ...] = (
    (r"t5.*11b", _t5(128, 65536)),
    (r"t5.*3b", _t5(32, 16384)),
    (r"llama.?3.*405b", _llama(126, 16384, 128, 8, 53248, 128256, 8192)),
    (r"llama.?3.*70b", _llama(80, 8192, 64, 8, 28672, 128256, 8192)),
    (r"llama.?3.*13b", _llama(40, 5120, 40, 8, 13824, 128256, 4096)),
    (r"llama.?3.*[78]b", _llama(32, 4096, 32, 8, 14336, 128256, 8192)),
    (r"llama.*70b", _llama(80, 8192, 64, 8, 28672, 32000, 4096)),
    (r"llama.*34b", _llama(48, 8192, 64, 8, 22016, 32000, 4096)),
    (r"llama.*30b|llama.*33b", _llama(60, 6656, 52, 52, 17920, 32000, 2048)),
    (r"llama.*65b", _llama(80, 8192, 64, 64, 22016, 32000, 2048)),
    (r"llama.*13b", _llama(40, 5120, 40, 40, 13824, 32000, 4096)),
    (r"tinyllama", _llama(22, 2048, 32, 4, 5632, 32000, 2048)),
    (r"llama.*7b|granite.*7b", _llama(32, 4096, 32, 32, 11008, 32000, 4096)),
    (r"mistral.*7b", _llama(32, 4096, 32, 8, 14336, 32000, 8192)),
    (r"smollm3.*3b", replace(_llama(36, 2048, 16, 4, 11008, 128256, 8192), tied=True)),
    (r"gpt.*1t\b", _gpt(128, 25600, 160)),
    (r"gpt.*530b", _gpt(105, 20480, 128)),
    (r"(gpt|opt).*175b", _gpt(96, 12288, 96)),
    (r"gpt.?neox.*20b", _gpt(44, 6144, 64, 50432)),
    (r"opt.*66b", _gpt(64, 9216, 72, 50272)),
    (r"(gpt|opt).*30b", _gpt(48, 7168, 56, 50272)),
    (r"(gpt|opt).*13b", _gpt(40, 5120, 40, 50272)),
    (r"(gpt|opt).*6\.7b", _gpt(32, 4096, 32, 50272)),
)


class RowReader(Protocol):
    """A row's cells, and a note of what is taken instead of them."""

    def text(self, column: str) -> str: ...
    def number(self, column: str) -> float | None: ...
    def assume(self, column: str, value: object) -> object: ...


def named_model(name: str) -> NamedModel | None:
    """The model that a table means by this name; None: it is in none that is known here."""
    return next((found for pattern, found in _NAMES if re.search(pattern, name.lower())), None)


def model_of_row(row: RowReader) -> NamedModel:
    """The model of a row. Raises ArgumentError where neither its name nor its columns say enough."""
    name = row.text("model").lower()
    base = named_model(name)
    given: dict[str, Any] = {
        field: int(value) for column, field in _COLUMNS.items() if (value := row.number(column)) is not None
    }
    if base is not None:
        for column, field in _COLUMNS.items():
            if field not in given:
                row.assume(column, getattr(base, field))
        return replace(base, **given)
    if not {"layers", "hidden"} <= given.keys():
        raise ArgumentError("model", f"{row.text('model') or 'nothing'!r} is not known, and the row gives no sizes",
                        "fill in n_layers and hidden, or name a model such as llama-3 8b")  # fmt: skip
    return _by_sizes(row, name, given)


_COLUMNS: Mapping[str, str] = {
    "n_layers": "layers", "hidden": "hidden", "n_heads": "heads", "n_kv_heads": "kv_heads", "ffn_hidden": "inner",
    "vocab": "vocabulary",
}  # fmt: skip


def _by_sizes(row: RowReader, name: str, given: dict[str, Any]) -> NamedModel:
    """A decoder that no table knows, by its sizes: of the family whose parameters come nearest to those that it has."""
    hidden = given["hidden"]
    heads = given.get("heads") or int(row.assume("n_heads", max(1, hidden // 128)))  # type: ignore[call-overload]
    gated = re.search("llama|mistral|qwen|gemma|yi|deepseek|olmo|smol|granite|falcon3", name) is not None
    inner = -(-8 * hidden // 768) * 256  # two thirds of 4 x hidden, in steps of 256
    gpt, llama = _gpt(given["layers"], hidden, heads), _llama(given["layers"], hidden, heads, heads, inner, 32000, 4096)
    sizes = {**given, "heads": heads, "kv_heads": given.get("kv_heads", heads)}
    of_each = [replace(model, **sizes) for model in (gpt, llama)]
    parameters = row.number("params")
    if not gated and "mpt" not in name and "gpt" not in name and parameters is not None:
        gated = abs(_count(of_each[1]) - parameters) < abs(_count(of_each[0]) - parameters)
    found = of_each[gated]
    for column, field in _COLUMNS.items():
        if field not in given and column != "n_heads":
            row.assume(column, getattr(found, field))
    return found


def _count(model: NamedModel) -> int:
    return shape_of(model).parameters


@lru_cache(maxsize=256)
def shape_of(model: NamedModel) -> ModelShape:
    """What is saved is in half precision with fused attention: of a block its norms' inputs, the heads, the products'
    inputs and the activation's; of the root the logits and two copies of them in fp32."""
    if model.family == "t5":
        return _t5_shape(model)
    h, inner, kv = model.hidden, model.inner, model.kv_width
    heads = (
        MatMul(inputs=h, outputs=model.width),
        MatMul(inputs=h, outputs=kv, count=2),
        MatMul(inputs=model.width, outputs=h),
    )
    if model.family == "gpt":
        products = (*heads, MatMul(inputs=h, outputs=inner), MatMul(inputs=inner, outputs=h))
        kept = 2 * (2 * h + 3 * h + 2 * h + 2 * inner + 2 * h)
    else:
        products = (*heads, MatMul(inputs=h, outputs=inner, count=2), MatMul(inputs=inner, outputs=h))
        kept = 2 * (4 * h + 4 * h + 2 * h + 4 * inner + 2 * h)
    block = UnitShape(
        name="block",
        parameters=(*(p.inputs * p.outputs for p in products for _ in range(p.count)), h, h),
        products=products,
        pair_flops=4 * model.width,
        heads=model.heads,
        causal=True,
        saved={
            dtype: SavedBytes(per_token_bytes=kept * size / 2)
            for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4))
        },
        boundary_elements=h,
    )
    return ModelShape(name=f"{model.family} of {model.layers} x {h}", units=(_root(model), *[block] * model.layers))


def _root(model: NamedModel) -> UnitShape:
    table = model.vocabulary * model.hidden
    positions = model.seq_len * model.hidden if model.family == "gpt" else 0
    logits = SavedBytes(per_token_bytes=10.0 * model.vocabulary)
    return UnitShape(
        name="root", parameters=tuple(n for n in (table, 0 if model.tied else table, positions, model.hidden) if n),
        products=(MatMul(inputs=model.hidden, outputs=model.vocabulary),),
        saved={"bf16": logits, "fp16": logits, "fp32": logits}, boundary_elements=model.hidden,
    )  # fmt: skip


def _t5_shape(model: NamedModel) -> ModelShape:
    """Encoder and decoder see as many tokens each; the decoder's blocks attend twice."""
    h, width = model.hidden, model.width
    units = []
    for attends in (1, 2):
        products = (MatMul(inputs=h, outputs=width, count=3 * attends), MatMul(inputs=width, outputs=h, count=attends),
                    MatMul(inputs=h, outputs=model.inner), MatMul(inputs=model.inner, outputs=h))  # fmt: skip
        kept = 2 * (8 * h + 4 * width * attends + 2 * model.inner)
        units.append(UnitShape(
            name="block", parameters=tuple(p.inputs * p.outputs for p in products for _ in range(p.count)),
            products=products, pair_flops=4 * width * attends, heads=model.heads * attends,
            saved={dtype: SavedBytes(per_token_bytes=kept * size / 2, per_pair_bytes=2 * size * model.heads * attends)
                   for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4))}, boundary_elements=h,
        ))  # fmt: skip
    encoder, decoder = units
    return ModelShape(name="t5", units=(_root(model), *[encoder] * model.layers, *[decoder] * model.layers))
