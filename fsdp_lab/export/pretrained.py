"""A checkpoint's model as a folder for `AutoModel...from_pretrained(folder)` of transformers. No ranks are needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fsdp_lab.backends.shard_files import read_shards
from fsdp_lab.backends.state import PARAM, Chunk, buffer_key, buffers_in, key
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.export.files import write_folder
from fsdp_lab.models import resolve
from fsdp_lab.models.check import is_language
from fsdp_lab.models.configs import given_config
from fsdp_lab.models.lora import adapted, save_adapters
from fsdp_lab.models.pretrained import weights_folder
from fsdp_lab.models.tokenizers import open_tokenizer
from fsdp_lab.spec.checkpoint_format import Checkpoint
from fsdp_lab.spec.workload import Workload

MODEL_FILES = ("config.json", "adapter_config.json")  # by which a folder is one of a model


def export_pretrained(saved: Checkpoint, folder: Path, *, force: bool = False) -> Path:
    """Writes config, weights (fp32, safetensors) and tokenizer atomically; the model must fit the host's memory. Of a model
    with adapters, these alone, in peft's format.

    The config is the one that was given to the lab, with its dropout and cache. Buffers that differ between ranks, such as
    BatchNorm's statistics, are those of the first rank.

    Returns the folder's absolute path. Raises ArgumentError of the path, or of a checkpoint that cannot be read.
    """
    target = _checked(folder, force=force)
    if saved.spec.workload.is_own:
        reason = f"{saved.path.name} is of a model of your own, which transformers does not know"
        raise ArgumentError("checkpoint", reason, "read its safetensors with torch.distributed.checkpoint")
    workload = saved.spec.workload
    model = adapted(resolve(workload.model), workload.adapters)
    values = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
    values.update({name: torch.empty_like(b) for name, b in buffers_in(model)})
    try:
        read_shards(saved.path, list(_chunks(saved, values)), optional=())
    except (LookupError, OSError) as e:
        raise ArgumentError("checkpoint", f"{saved.path.name} cannot be read: {e}", "take another one") from e

    def write(part: Path) -> None:
        _save_model(model, workload, values, part)
        if is_language(workload):
            open_tokenizer(workload).save(part)

    return write_folder(target, write)


def _save_model(model: PreTrainedModel, workload: Workload, values: dict[str, Tensor], folder: Path) -> None:
    if workload.lora is None:
        model.config = given_config(workload.model)
        model.save_pretrained(folder, state_dict=values)
        return
    begins_with = weights_folder(workload)
    save_adapters(model, values, folder, "" if begins_with is None else str(begins_with.absolute()))


def _checked(folder: Path, *, force: bool) -> Path:
    """Raises ArgumentError. With `force` an existing folder is replaced, but only one that holds a model."""
    target = folder.expanduser().absolute()
    hint = "name a new folder in one that exists and is yours"
    if not target.parent.is_dir():
        raise ArgumentError("path", f"{folder} cannot be written: there is no folder {target.parent}", hint)
    if target.exists() and not (force and any((target / name).is_file() for name in MODEL_FILES)):
        raise ArgumentError("path", f"{folder} exists already", f"{hint}, or give force (--force) to replace a model")
    return target


def _chunks(saved: Checkpoint, values: dict[str, Tensor]) -> Iterator[Chunk]:
    first = saved.manifest["writers"][0]
    for name, value in values.items():
        stored = key(name, PARAM) if name in saved.manifest["parameters"] else buffer_key(first, name)
        yield Chunk(name=stored, start=0, values=value.view(-1))
