"""Folders that are written: `Files` has what an exported script reads, samples as numpy arrays and folders for
`from_pretrained`; `export_pretrained` makes a checkpoint's model one for `from_pretrained`. No ranks are needed."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from fsdp_lab.backends.state import PARAM, Chunk, buffer_key, buffers_in, key
from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.models.batches import open_source
from fsdp_lab.models.build import Initializer, build_skeleton
from fsdp_lab.models.cache import weights_folder
from fsdp_lab.models.check import checked_records, held_out_count, is_language, is_plain
from fsdp_lab.models.configs import given_config, resolve
from fsdp_lab.models.lora import AdaptedValues, adapted, is_adapter, save_adapters
from fsdp_lab.models.presets import facts_of
from fsdp_lab.models.pretrained import Pretrained
from fsdp_lab.models.sources import IGNORED
from fsdp_lab.models.tokens import open_tokenizer
from fsdp_lab.models.weights import Weights
from fsdp_lab.rank.checkpointing import read_shards
from fsdp_lab.spec.checkpoint_format import Checkpoint
from fsdp_lab.spec.workload import Workload

SPEC_INSTEAD = "or export the Spec itself, which contains it"
SUFFIX = ".files"  # of the folder, in place of the script's .py
_ROWS = 4096  # written at once
MODEL_FILES = ("config.json", "adapter_config.json")  # by which a folder is one of a model
_PLAIN = ("model.safetensors", "model.safetensors.index.json")  # what `from_pretrained` opens


class Files:
    """The files for a Workload of transformers. Raises SpecError for a model or data that a script cannot train. `model`: a
    skeleton, with adapters if there are some. `weights`: the user's own folder, if all values of the model are in it and
    `from_pretrained` opens it. `weighs`: whether samples have different numbers of labels, which are then among the
    files."""

    def __init__(self, workload: Workload) -> None:
        config = resolve(workload.model, dropout=workload.dropout)
        self._workload, self._facts = workload, facts_of(config)
        self.kind = self._facts.kind
        if self.kind == "image":
            reason = f"{self._facts.model_type} classifies images, and a script reads only text"
            raise SpecError("workload.model", reason, f"choose a language model, {SPEC_INSTEAD}")
        if self.kind == "masked" and not is_plain(workload):
            is_chat = checked_records(workload, self._facts)[0].is_chat
            if is_chat or workload.packing == "padded":
                chats, padded = ("data", "chats", "give text"), ("packing", "padded samples", "use packed")
                field, samples, hint = chats if is_chat else padded
                reason = f"a script hides words of whole windows of text, not of {samples}"
                raise SpecError(f"workload.{field}", reason, f"{hint}, {SPEC_INSTEAD}")
        self._base = build_skeleton(config)
        self.model: PreTrainedModel = self._base if workload.lora is None else adapted(config, workload.adapters)
        self._source = open_source(workload, config)
        self.weighs = self._source.labels is not None
        self.weights: Path | None = None
        self._given: Pretrained | None = None
        if (folder := weights_folder(workload)) is not None:
            self._given = Pretrained(self._base, workload, Weights(folder))
            if not self._given.fresh and any((folder / name).is_file() for name in _PLAIN):
                self.weights = folder.absolute()

    def write(self, folder: Path) -> None:
        """Writes all into an empty folder. The values that are written must fit the memory."""
        self._write_samples(folder)
        seed, base = self._workload.seed, self._base
        values = self._given or Initializer(base, seed)
        if self.weights is None:
            buffers = dict(buffers_in(base))
            stored = {name: buffers[name] for name in values.buffers}
            state = buffers | _read(values, dict(base.named_parameters()) | stored)
            base.save_pretrained(folder / "model", state_dict=state)
        else:
            base.config.save_pretrained(folder / "model")
        if self._workload.lora is not None:
            parameters = {name: p for name, p in self.model.named_parameters() if is_adapter(name)}
            adapters = _read(AdaptedValues(values, self.model, seed), parameters)
            save_adapters(self.model, adapters, folder / "adapter", str(self.weights or ""))

    def _write_samples(self, folder: Path) -> None:
        """Writes those that are trained on. A masked model's are unmasked; labels that are the ids are left out."""
        count = self._source.count - held_out_count(self._workload, self._source.count)
        of_ids = np.uint16 if (self._facts.vocab_size or 0) <= 1 << 16 else np.int32
        dtypes: dict[str, Any] = {"labels": np.int32, "attention_mask": np.uint8}
        written: dict[str, Any] = {}
        labels_differ = False
        for first in range(0, count, _ROWS):
            rows = np.arange(first, min(count, first + _ROWS), dtype=np.int64)
            batch = {name: tensor.numpy() for name, tensor in self._source.collate(rows, rows).items()}
            ids, labels = batch["input_ids"], batch["labels"]
            if self.kind == "masked":
                batch = {"input_ids": np.where(labels == IGNORED, ids, labels)}
            labels_differ |= not np.array_equal(ids, labels)
            for name, values in batch.items():
                if name not in written:
                    shape, dtype = (count, values.shape[1]), dtypes.get(name, of_ids)
                    written[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, shape)
                written[name][rows] = values
        if not labels_differ:
            (folder / "labels.npy").unlink()
        if self._source.labels is not None:
            np.save(folder / "label_counts.npy", self._source.labels[:count])


def _read(values: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The initial values of parameters or buffers, which may be on meta, by name."""
    read = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for name, tensor in tensors.items()}
    for name, tensor in read.items():
        values.read_into(name, 0, tensor.view(-1))
    return read


def write_folder(target: Path, write: Callable[[Path], None]) -> Path:
    """Writes a folder atomically; one that exists is replaced when the new one is complete. Raises ArgumentError."""
    try:
        part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            write(part)
            part.chmod(0o755)  # as a folder that was made by hand; a temporary one is private
            for file in part.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)
            if target.exists():
                shutil.rmtree(target)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as e:
        reason = f"{target} could not be written: {e.strerror}"
        raise ArgumentError("path", reason, "make room, or name another place") from e
    return target


def export_pretrained(saved: Checkpoint, folder: Path, *, force: bool = False) -> Path:
    """Writes config, weights (fp32, safetensors) and tokenizer atomically; the model must fit the host's memory. Of a model
    with adapters, these alone, in peft's format. The config is the one that was given to the lab. Buffers that differ
    between ranks are those of the first rank. Returns the folder's absolute path. Raises ArgumentError."""
    target = folder.expanduser().absolute()
    hint = "name a new folder in one that exists and is yours"
    if not target.parent.is_dir():
        raise ArgumentError("path", f"{folder} cannot be written: there is no folder {target.parent}", hint)
    # With `force` an existing folder is replaced, but only one that holds a model.
    if target.exists() and not (force and any((target / name).is_file() for name in MODEL_FILES)):
        raise ArgumentError("path", f"{folder} exists already", f"{hint}, or give force (--force) to replace a model")
    if saved.spec.workload.is_own:
        reason = f"{saved.path.name} is of a model of your own, which transformers does not know"
        raise ArgumentError("checkpoint", reason, "read its safetensors with torch.distributed.checkpoint")
    workload = saved.spec.workload
    model = adapted(resolve(workload.model), workload.adapters)
    values = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
    values.update({name: torch.empty_like(b) for name, b in buffers_in(model)})
    try:
        first, parameters = saved.manifest["writers"][0], saved.manifest["parameters"]
        stored = {name: key(name, PARAM) if name in parameters else buffer_key(first, name) for name in values}
        chunks = [Chunk(name=stored[name], start=0, values=value.view(-1)) for name, value in values.items()]
        read_shards(saved.path, chunks, optional=())
    except (LookupError, OSError) as e:
        raise ArgumentError("checkpoint", f"{saved.path.name} cannot be read: {e}", "take another one") from e

    def write(part: Path) -> None:
        if workload.lora is None:
            model.config = given_config(workload.model)
            model.save_pretrained(part, state_dict=values)
        else:
            begins_with = weights_folder(workload)
            save_adapters(model, values, part, "" if begins_with is None else str(begins_with.absolute()))
        if is_language(workload):
            open_tokenizer(workload).save(part)

    return write_folder(target, write)
