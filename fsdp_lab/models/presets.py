"""Presets: models from 1M to 405B parameters as plain config dicts; and `facts_of`, the facts that a config states.

Neither torch nor transformers is imported, except by `facts_of` for a model type that no preset has.

Small presets are sized for two CPU ranks, with the 384 ids of ByT5 (3 special ids, 256 bytes, 125 extra ids) and small
images. Large ones have the shape and vocabulary of a published model; the bytes of the text use 259 of their ids. The
number of positions does not grow with `Workload.seq_len`: another sequence length must not change the model, or a live run
could not keep its parameters. `fsdp_lab.models.check` refuses a longer sequence and names presets that take it."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from fsdp_lab.base.errors import SpecError

Kind = Literal["causal", "masked", "seq2seq", "image"]

BYTE_VOCABULARY = 384


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model by name: `config` is what `transformers.AutoConfig.for_model` takes."""

    name: str
    family: str
    kind: Kind
    parameters: int  # exact, ties counted once
    config: Mapping[str, Any]
    note: str


def closest(name: str) -> Sequence[str]:
    """Presets that a mistyped `name` may mean, similarly spelled, or some small ones."""
    return difflib.get_close_matches(name.lower(), PRESETS, cutoff=0.5) or ["gpt2-1m", "llama-1m", "bert-1m"]


def key_of(model: str | Mapping[str, Any]) -> str:
    """A text by which a model is known: the name of a preset, or a config as JSON."""
    return model if isinstance(model, str) else json.dumps(model, sort_keys=True, default=dict)


# One function per family, with the numbers in which its models differ; then the table of them.
# fmt: off

def gpt2_config(
    width: int, layers: int, heads: int, positions: int = 1024, vocabulary: int = BYTE_VOCABULARY
) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": heads,
        "n_positions": positions, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
    }


# Width, layers and positions of the models that a calibration trains, on CPUs and on GPUs.
TIMED = ((32, 6, 128), (32, 2, 128), (256, 2, 128), (256, 4, 128), (2048, 2, 512), (2048, 4, 512))


def timed_config(width: int, layers: int, positions: int) -> dict[str, Any]:
    return gpt2_config(width, layers, max(2, width // 64), positions)


def _llama(width: int, layers: int, heads: int, kv_heads: int, inner: int, *,
           vocabulary: int = BYTE_VOCABULARY, tied: bool = False, positions: int = 4096,
           theta: float = 10_000.0) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
        "tie_word_embeddings": tied, "max_position_embeddings": positions, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
    }


def _bert(width: int, layers: int, heads: int, vocabulary: int = BYTE_VOCABULARY) -> dict[str, Any]:
    return {
        "model_type": "bert", "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": 4 * width, "max_position_embeddings": 512,
        "pad_token_id": 0,
    }


def _t5(
    width: int, layers: int, heads: int, head_width: int, inner: int, vocabulary: int = BYTE_VOCABULARY
) -> dict[str, Any]:
    return {
        "model_type": "t5", "vocab_size": vocabulary, "d_model": width, "num_layers": layers,
        "num_decoder_layers": layers, "num_heads": heads, "d_kv": head_width, "d_ff": inner,
        "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    }


def _vit(
    width: int, layers: int, heads: int, *, inner: int = 0, image: int = 224, patch: int = 16, classes: int = 1000
) -> dict[str, Any]:
    return {
        "model_type": "vit", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": inner or 4 * width, "image_size": image, "patch_size": patch, "num_channels": 3,
        "num_labels": classes,
    }


def _resnet(
    layer: str, stem: int, widths: tuple[int, ...], depths: tuple[int, ...], *, image: int = 224, classes: int = 1000
) -> dict[str, Any]:
    # image_size is no field of ResNetConfig, but a config keeps unknown fields; images have this size.
    return {
        "model_type": "resnet", "layer_type": layer, "embedding_size": stem, "hidden_sizes": list(widths),
        "depths": list(depths), "image_size": image, "num_channels": 3, "num_labels": classes,
    }


_Row = tuple[str, int, dict[str, Any], str]
_FAMILIES: tuple[tuple[str, Kind, tuple[_Row, ...]], ...] = (
    ("gpt2", "causal", (
        ("1m", 973_568, gpt2_config(128, 4, 4), "bytes; a step is some tens of milliseconds on a laptop core"),
        ("10m", 10_314_880, gpt2_config(320, 8, 5), "bytes; the default"),
        ("30m", 29_093_376, gpt2_config(512, 9, 8), "bytes"),
        ("124m", 124_439_808, gpt2_config(768, 12, 12, vocabulary=50257), "GPT-2 small"),
        ("355m", 354_823_168, gpt2_config(1024, 24, 16, vocabulary=50257), "GPT-2 medium"),
        ("774m", 774_030_080, gpt2_config(1280, 36, 20, vocabulary=50257), "GPT-2 large"),
        ("1.5b", 1_557_611_200, gpt2_config(1600, 48, 25, vocabulary=50257), "GPT-2 XL"),
        ("6.7b", 6_658_404_352, gpt2_config(4096, 32, 32, positions=2048, vocabulary=50257),
         "the 6.7B shape of the GPT-3 paper"),
        ("13b", 12_853_386_240, gpt2_config(5120, 40, 40, positions=2048, vocabulary=50257),
         "the 13B shape of the GPT-3 paper, 40 heads"),
        ("30b", 29_974_418_432, gpt2_config(7168, 48, 56, positions=2048, vocabulary=50257), "the shape of OPT 30B"),
        ("66b", 65_719_544_832, gpt2_config(9216, 64, 72, positions=2048, vocabulary=50257), "the shape of OPT 66B"),
        ("175b", 174_604_259_328, gpt2_config(12288, 96, 96, positions=2048, vocabulary=50257), "the shape of GPT-3"),
    )),
    ("llama", "causal", (
        ("1m", 951_424, _llama(128, 4, 4, 4, 384), "bytes; embeddings not tied"),
        ("10m", 10_163_520, _llama(320, 8, 5, 5, 864), "bytes; embeddings not tied"),
        ("125m", 124_668_672, _llama(768, 12, 12, 4, 2048, vocabulary=32000),
         "grouped-query attention; embeddings not tied"),
        ("1b", 1_235_814_400,
         _llama(2048, 16, 32, 8, 8192, vocabulary=128256, tied=True, positions=8192, theta=5e5),
         "the shape of Llama 3.2 1B; embeddings tied"),
        ("3b", 3_212_749_824,
         _llama(3072, 28, 24, 8, 8192, vocabulary=128256, tied=True, positions=8192, theta=5e5),
         "the shape of Llama 3.2 3B; embeddings tied"),
        ("7b", 6_738_415_616, _llama(4096, 32, 32, 32, 11008, vocabulary=32000), "the shape of Llama 2 7B"),
        ("8b", 8_030_261_248,
         _llama(4096, 32, 32, 8, 14336, vocabulary=128256, positions=8192, theta=5e5), "the shape of Llama 3 8B"),
        ("13b", 13_015_864_320, _llama(5120, 40, 40, 40, 13824, vocabulary=32000), "the shape of Llama 2 13B"),
        ("70b", 70_553_706_496,
         _llama(8192, 80, 64, 8, 28672, vocabulary=128256, positions=8192, theta=5e5), "the shape of Llama 3 70B"),
        ("405b", 405_853_388_800,
         _llama(16384, 126, 128, 8, 53248, vocabulary=128256, positions=8192, theta=5e5), "the shape of Llama 3 405B"),
    )),
    ("bert", "masked", (
        ("1m", 925_440, _bert(128, 4, 4), "bytes"),
        ("10m", 10_255_424, _bert(320, 8, 5), "bytes"),
        ("110m", 109_514_298, _bert(768, 12, 12, 30522), "BERT base"),
        ("335m", 335_174_458, _bert(1024, 24, 16, 30522), "BERT large"),
        ("1.3b", 1_276_395_322, _bert(2048, 24, 32, 30522), "the 1.3B shape of Megatron-LM's BERT"),
        ("3.9b", 3_862_520_122, _bert(2560, 48, 40, 30522), "the 3.9B shape of Megatron-LM's BERT"),
    )),
    ("t5", "seq2seq", (
        ("1m", 968_448, _t5(128, 2, 4, 32, 512), "bytes"),
        ("10m", 10_288_320, _t5(320, 4, 5, 64, 1024), "bytes"),
        ("60m", 60_506_624, _t5(512, 6, 8, 64, 2048, 32128), "T5 small"),
        ("220m", 222_903_552, _t5(768, 12, 12, 64, 3072, 32128), "T5 base"),
        ("740m", 737_668_096, _t5(1024, 24, 16, 64, 4096, 32128), "T5 large"),
        ("2.9b", 2_851_598_336, _t5(1024, 24, 32, 128, 16384, 32128), "T5 3B"),
        ("11b", 11_307_321_344, _t5(1024, 24, 128, 128, 65536, 32128), "T5 11B"),
    )),
    ("vit", "image", (
        ("1m", 1_007_626, _vit(128, 5, 4, image=32, patch=4, classes=10), "32 x 32 pixels, 10 classes"),
        ("10m", 9_904_330, _vit(320, 8, 5, image=32, patch=4, classes=10), "32 x 32 pixels, 10 classes"),
        ("86m", 86_567_656, _vit(768, 12, 12), "ViT-B/16"),
        ("304m", 304_326_632, _vit(1024, 24, 16), "ViT-L/16"),
        ("632m", 632_045_800, _vit(1280, 32, 16, patch=14), "ViT-H/14"),
        ("1.8b", 1_844_440_680, _vit(1664, 48, 16, inner=8192, patch=14), "ViT-G/14"),
        ("5.9b", 5_906_154_600, _vit(3200, 48, 25, inner=12800, patch=14), "the shape of InternViT-6B"),
    )),
    ("resnet", "image", (
        ("1m", 1_091_890, _resnet("basic", 40, (40, 80, 160), (2, 2, 2), image=64, classes=10),
         "64 x 64 pixels, 10 classes"),
        ("11m", 11_181_642, _resnet("basic", 64, (64, 128, 256, 512), (2, 2, 2, 2), image=64, classes=10),
         "ResNet-18 at 64 x 64 pixels, 10 classes"),
        ("26m", 25_557_032, _resnet("bottleneck", 64, (256, 512, 1024, 2048), (3, 4, 6, 3)), "ResNet-50"),
        ("60m", 60_192_808, _resnet("bottleneck", 64, (256, 512, 1024, 2048), (3, 8, 36, 3)), "ResNet-152"),
        ("930m", 936_563_944, _resnet("bottleneck", 256, (1024, 2048, 4096, 8192), (3, 8, 36, 3)),
         "ResNet-152, four times as wide"),
    )),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({
    f"{family}-{size}": Preset(name=f"{family}-{size}", family=family, kind=kind, parameters=parameters,
                               config=MappingProxyType(config), note=note)
    for family, kind, rows in _FAMILIES
    for size, parameters, config, note in rows
})


DEFAULT_IMAGE_PIXELS = 224  # for vision configs without a size, such as ResNet's

_KINDS: Mapping[str, Kind] = {
    "gpt2": "causal", "llama": "causal", "bert": "masked", "t5": "seq2seq", "vit": "image", "resnet": "image",
    "convnext": "image",
}
# Their positions begin behind the padding id, so that pad_token_id + 1 of the config's number have no token.
_BEHIND_PADDING = frozenset((
    "camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
))
# fmt: on
# They keep keys and values in every forward, whatever `use_cache` says: a block that is recomputed adds its own twice.
CACHE_ALWAYS = frozenset({"flaubert", "xlm"})
_POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts of a config. `max_positions` None: unlimited; the fields of images are None for text models."""

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
    """Facts of a dict with "model_type" or of a transformers config.

    Raises SpecError: transformers has no model for it of a kind that the lab trains."""

    def read(name: str, default: Any = None) -> Any:
        parts = (config, getattr(config, "text_config", None), getattr(config, "vision_config", None))
        values = (p.get(name) if isinstance(p, Mapping) else getattr(p, name, None) for p in parts)
        return next((value for value in values if value is not None), default)

    model_type = str(read("model_type", ""))
    kind = _KINDS.get(model_type) or _kind_in_transformers(model_type, config)
    if kind != "image":
        # n_positions of old T5 configs is no limit: positions are relative.
        positions = next((read(n) for n in _POSITIONS if isinstance(read(n), int) and read(n) > 0), None)
        if positions is not None and model_type in _BEHIND_PADDING:
            positions -= read("pad_token_id", 0) + 1
        most = None if model_type == "t5" else positions
        return Facts(model_type=model_type, kind=kind, vocab_size=read("vocab_size"), max_positions=most)
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
    """The head that transformers has for this type; of several, encoder-decoder first, then encoder."""
    from transformers.models.auto import modeling_auto as auto

    is_decoder = bool(getattr(config, "is_decoder", False))
    has_encoder = bool(getattr(config, "is_encoder_decoder", True))  # a dict does not say
    names: tuple[tuple[Kind, str], ...] = (
        ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
        ("masked", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
        ("causal", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
        ("image", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    )
    for kind, table in names:
        # Speech models without an encoder of text are among the encoder-decoders, and predict what they read.
        if model_type in getattr(auto, table) and not {"masked": is_decoder, "seq2seq": not has_encoder}.get(kind):
            return kind
    reason = f"transformers has no language model or image classifier of type {model_type!r}"
    hint = "choose a causal, masked or encoder-decoder language model, or an image classifier"
    raise SpecError("workload.model", reason, hint)
