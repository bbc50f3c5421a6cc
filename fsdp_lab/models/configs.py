"""`resolve`: the transformers config for a `Workload.model`."""

import contextlib
import copy
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import configuration_auto

from fsdp_lab.base.errors import SpecError, is_number
from fsdp_lab.models.cache import hub_folder, is_hub_name
from fsdp_lab.models.presets import PRESETS, closest, facts_of
from fsdp_lab.spec.spec import plain

_FIELD = "workload.model"
_RANDOM = ("drop", "jitter")  # in names of fields: dropout, stochastic depth, noise of a router
_TYPES: Mapping[str, str] = configuration_auto.CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]


def resolve(model: str | Mapping[str, Any] | PreTrainedConfig, *, dropout: str = "off") -> PreTrainedConfig:
    """The transformers config of `model`, always a new object.

    `model` is a preset ("gpt2-10m"), a model type of transformers ("opt", with its default sizes), a folder with a
    config.json or the path of such a file, a dict with "model_type", a config object, or the name of a model on the Hugging
    Face Hub ("org/name"), whose config is fetched. Weights beside a config.json are for `Pretrained`. Which families of
    transformers train, under which backend, and why others do not: tests/results/families.txt, which
    `python -m tests.bench families` finds.

    dropout: as in a Workload: "off" sets every dropout and every router's noise to 0, "config" leaves them. Layers are never
    left out (`layerdrop`): ranks that skip different ones would not gather the same. Experts are computed eagerly where
    the config does not say how: see `leaves_experts_open`.

    Raises SpecError: no such model, or a config that transformers refuses."""
    config = given_config(model)
    if getattr(config, "quantization_config", None):
        reason = "its config is of quantized weights, which cannot be trained"
        raise SpecError(_FIELD, reason, "remove quantization_config from the config")
    _without_dropout(config, _RANDOM if dropout == "off" else ("layerdrop",))
    for part in filter(None, (config, getattr(config, "text_config", None))):
        part.use_cache = False  # keys and values are cached for generation; wrong when a block is recomputed
        if leaves_experts_open(part):
            part._experts_implementation = "eager"
    if facts_of(config).kind == "causal":
        # There is no padding. With a padding id, the byte of that id would not be learned, and every forward would search
        # the input for it, which synchronises a GPU.
        with contextlib.suppress(Exception):  # of huggingface_hub: ModernBERT's decoder takes no None
            config.pad_token_id = None
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def leaves_experts_open(config: PreTrainedConfig) -> bool:
    """Returns whether a model has experts, and its config does not say how they compute: transformers would take a grouped
    product, which takes bf16 alone."""
    has_experts = any("expert" in name and not name.startswith("_") for name in vars(config))
    return has_experts and getattr(config, "_experts_implementation", None) is None


def given_config(model: str | Mapping[str, Any] | PreTrainedConfig) -> PreTrainedConfig:
    """The config as it is given, dropout and cache included; always a new object. Raises SpecError as `resolve`."""
    if isinstance(model, PreTrainedConfig):
        return copy.deepcopy(model)
    if isinstance(model, Mapping):
        return _from_dict(model)
    if model in PRESETS:
        return _from_dict(PRESETS[model].config)
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise SpecError(_FIELD, f"{model} contains no config.json", "give the folder of a saved model")
    if is_hub_name(model):
        path = hub_folder(model, _FIELD, ("config.json",)) / "config.json"
    if path.is_file():
        hint = "give a config.json of transformers"
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise SpecError(_FIELD, f"{path} cannot be read as JSON ({e})", hint) from None
        if not isinstance(loaded, dict):
            raise SpecError(_FIELD, f"{path} is not a JSON object", hint)
        return _from_dict(loaded)
    if model in _TYPES:
        return _from_dict({"model_type": model})
    reason = f"{model!r} is neither a preset, nor a file or folder, nor a model type of transformers"
    raise SpecError(_FIELD, reason, f"use {' or '.join(closest(model))}, or a folder that save_pretrained has written")


def _from_dict(given: Mapping[str, Any]) -> PreTrainedConfig:
    fields = plain(given)
    model_type = fields.pop("model_type", None)
    if model_type not in _TYPES:
        similar = difflib.get_close_matches(str(model_type), _TYPES, n=3) or ["gpt2", "llama"]
        reason = f"transformers has no type {model_type!r}" if model_type else "the config has no model_type"
        raise SpecError(_FIELD, reason, f"give one such as {', '.join(similar)}")
    try:
        config = AutoConfig.for_model(model_type, **fields)
    except Exception as e:  # of many classes; the message names the field
        raise SpecError(_FIELD, f"{model_type} refuses the config: {first_line(e)}", "correct that field") from e
    assert isinstance(config, PreTrainedConfig)
    return config


def first_line(error: BaseException) -> str:
    """An error's message on one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def _without_dropout(config: PreTrainedConfig, named: Sequence[str]) -> None:
    """Set the fields with one of these in their names to 0, of the type that they have."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _without_dropout(value, named)
        elif any(n in name for n in named):
            if is_number(value):
                setattr(config, name, type(value)(0))
            elif isinstance(value, (list, tuple)) and all(map(is_number, value)):  # of each stage
                setattr(config, name, type(value)(type(v)(0) for v in value))
