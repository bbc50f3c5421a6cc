"""What must be known of a config before any model exists: its kind, vocabulary, positions, images.

Works on a preset's dict without transformers, and on any transformers config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_lab.core.errors import SpecError
from fsdp_lab.models.presets import Kind

DEFAULT_IMAGE_PIXELS = 224  # for vision configs that, like ResNet's, do not say

_KINDS: Mapping[str, Kind] = {
    "gpt2": "causal", "llama": "causal", "bert": "masked", "t5": "seq2seq", "vit": "image", "resnet": "image",
    "convnext": "image",
}  # fmt: skip
_POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a config says. `max_positions` None: unlimited; the fields of images are None for text models."""

    model_type: str
    kind: Kind
    vocab_size: int | None = None
    max_positions: int | None = None
    image_pixels: tuple[int, int] | None = None  # height, width
    channels: int = 3
    classes: int = 0
    patch: int | None = None  # pixels along an edge; None where the model has no patches

    @property
    def is_text(self) -> bool:
        return self.kind != "image"

    def tokens_per_sample(self, seq_len: int) -> int:
        """Bytes of a text window (T5: of both halves), patches of an image, or 1: a convnet's whole image."""
        if self.image_pixels is None:
            return seq_len
        if self.patch is None:
            return 1
        return (self.image_pixels[0] // self.patch) * (self.image_pixels[1] // self.patch)


def facts_of(config: Any) -> Facts:
    """Facts of a config, given as a dict with "model_type" or as a transformers config.

    Raises:
        SpecError: no model of a kind that the lab trains exists for it.
    """

    def read(name: str, default: Any = None) -> Any:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        return default if value is None else value

    model_type = str(read("model_type", ""))
    kind = _KINDS.get(model_type) or _kind_in_transformers(model_type, config)
    if kind != "image":
        # T5's n_positions, where an old config has it, limits nothing: its positions are relative.
        positions = next((read(n) for n in _POSITIONS if isinstance(read(n), int) and read(n) > 0), None)
        return Facts(model_type=model_type, kind=kind, vocab_size=read("vocab_size"),
                     max_positions=None if model_type == "t5" else positions)  # fmt: skip
    patch = read("patch_size")
    return Facts(
        model_type=model_type,
        kind=kind,
        image_pixels=_pair(read("image_size", DEFAULT_IMAGE_PIXELS)),
        channels=read("num_channels", 3),
        classes=read("num_labels", 2),
        patch=_pair(patch)[0] if patch is not None and model_type != "convnext" else None,
    )


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _kind_in_transformers(model_type: str, config: Any) -> Kind:
    """Which head transformers has for this type; of several, encoder-decoder first, then encoder."""
    from transformers.models.auto import modeling_auto as auto

    def has(name: str) -> bool:
        return model_type in getattr(auto, name)

    if has("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"):
        return "seq2seq"
    decoder = bool(getattr(config, "is_decoder", False))
    if has("MODEL_FOR_MASKED_LM_MAPPING_NAMES") and not decoder:
        return "masked"
    if has("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"):
        return "causal"
    if has("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"):
        return "image"
    raise SpecError(
        "workload.model",
        f"transformers has no language model or image classifier of type {model_type!r}",
        "choose a causal, masked or encoder-decoder language model, or an image classifier",
    )
