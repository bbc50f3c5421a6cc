"""`Weights`: the tensors of a folder, read by range (pretrained.py: for a model).

It reads safetensors, one file or several with their index, as `save_pretrained` writes them; the shards of torch's
`HuggingFaceStorageWriter`; and the checkpoints of a run of this lab.

Note: by range. The header of a file of safetensors says where each tensor lies, so a rank reads its ranges, a piece at a
time, and never holds more."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.models.cache import WEIGHTS
from fsdp_lab.spec import checkpoint_format
from fsdp_lab.spec.param_groups import unwrapped

INDEX = ".index.json"
SAFETENSORS = ".safetensors"
_WHOLE_FILE = "model.safetensors"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES: Mapping[str, torch.dtype] = {**_FLOATS, **_WHOLE, "BOOL": torch.bool}
_FIELD = "workload.weights"
_PIECE = 1 << 20  # elements copied between two calls of `check`
_SAVE = "model.save_pretrained(folder)"
_PARAMETER, _BUFFER = "parameter.", "buffer."  # names in a checkpoint of this lab: backends/state.py


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """Consecutive elements of a flattened tensor in a file."""

    path: Path
    begin: int  # the first of them in the tensor
    numel: int
    begin_byte: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a folder. `flat`: only its number of elements is known, not its shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]
    flat: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.numel == math.prod(shape) if self.flat else self.shape == shape


class Weights:
    """The tensors of a folder, by the names that they have there.

    Raises SpecError: there are none, they are in a format that is not read, or a file is broken."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            hint = f"give a folder that {_SAVE} wrote"
            raise SpecError(_FIELD, f"there is no folder {self.folder}", hint, {"weights": None})
        try:
            self._tensors = self._all()
        except OSError as e:
            raise _broken(f"{self.folder} cannot be read: {e.strerror or e}") from None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def __getitem__(self, name: str) -> StoredTensor:
        """Raises SpecError for a name that no file has."""
        if name not in self._tensors:
            raise SpecError(_FIELD, f"{self.folder} has no values for {name}", "give the weights of this model")
        return self._tensors[name]

    @property
    def fingerprint(self) -> str:
        """Equal for folders with the same tensors in files of the same sizes; their values are not read."""
        digest = hashlib.blake2b(digest_size=8)
        for name, stored in sorted(self._tensors.items()):
            parts = [(p.path.name, p.path.stat().st_size, p.begin, p.numel) for p in stored.parts]
            digest.update(repr((name, stored.dtype, stored.shape, parts)).encode())
        return digest.hexdigest()

    def read_into(self, name: str, start: int, target: Tensor, check: Callable[[], object] = lambda: None) -> None:
        """Sets `target` [n], flat, of any dtype and on any device, to elements [start, start + n) of a tensor.

        `check` is called before each piece that is read; what it raises ends the reading. Raises OSError for a file that
        cannot be read, or became shorter."""
        stored, stop, target = self[name], start + target.numel(), target.detach()
        for part in stored.parts:
            last = min(stop, part.begin + part.numel)
            for begin in range(max(start, part.begin), last, _PIECE):
                check()
                end = min(begin + _PIECE, last)
                count, at = (n * stored.dtype.itemsize for n in (end - begin, begin - part.begin))
                # Read: safetensors would map the whole file as private memory.
                values = np.fromfile(part.path, np.uint8, count, offset=part.begin_byte + at)
                if len(values) < count:
                    raise OSError(f"{part.path} changed while it was read: it became shorter")
                target[begin - start : end - start].copy_(torch.from_numpy(values).view(stored.dtype))

    def _all(self) -> dict[str, StoredTensor]:
        folder = self.folder
        if files := _files_of(folder):
            return _collected(files)
        with suppress(ArgumentError):
            return _of_checkpoint(checkpoint_format.find(folder))
        there = sorted(p.name for p in chain.from_iterable(map(folder.glob, WEIGHTS)))
        reason = f"{folder} has neither {_WHOLE_FILE} nor an index of several"
        said = f", but {', '.join(there[:2])}, which the lab does not read" if there else ""
        how = f"open it where you trust it, then {_SAVE}, or begin with random"
        raise _broken(reason + said, how if there else f"give a folder that {_SAVE} wrote, or begin with random")


def _broken(reason: str, hint: str = "copy the folder again") -> SpecError:
    return SpecError(_FIELD, reason, hint, {"weights": "random"})


def _files_of(folder: Path) -> dict[Path, set[str] | None]:
    """File -> the names that an index says it has, or None for all; empty if there are none. As transformers chooses."""
    if (whole := folder / _WHOLE_FILE).is_file():
        return {whole: None}
    indexes = sorted(folder.glob(f"*{SAFETENSORS}{INDEX}"))
    if indexes:
        usual = folder / f"{_WHOLE_FILE}{INDEX}"
        return _indexed(usual if usual in indexes else indexes[0])
    if (folder / checkpoint_format.MANIFEST).exists():
        return {}
    single = [p for p in sorted(folder.glob(f"*{SAFETENSORS}")) if not p.name.startswith("adapter_")]
    sharded = len(single) > 1 and all(p.name.startswith("shard-") for p in single)  # of HuggingFaceStorageWriter
    return dict.fromkeys(single) if len(single) == 1 or sharded else {}


def _indexed(index: Path) -> dict[Path, set[str] | None]:
    files: dict[Path, set[str]] = {}
    try:
        for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} does not lie beside it")
            files.setdefault(index.parent / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _broken(f"{index} is no index of weights ({type(e).__name__}: {e})") from None
    return {**files}


def _collected(files: Mapping[Path, set[str] | None]) -> dict[str, StoredTensor]:
    """All tensors of these files, as `from_pretrained` reads them; of two with one name the later one."""
    entries: dict[str, dict[tuple[int, ...], _Entry]] = {}
    for path, names in files.items():
        if not path.is_file():
            raise _broken(f"{path} is missing")
        of_file = _entries(path)
        if names is not None and (lacking := sorted(names - of_file.keys())):
            raise _broken(f"{path} lacks {lacking[0]}, which the index says it has")
        for name, entry in of_file.items():
            entries.setdefault(name, {})[entry.offsets] = entry
    return {name: _joined(name, [*of_name.values()]) for name, of_name in entries.items()}


def _joined(name: str, entries: "Sequence[_Entry]") -> StoredTensor:
    """The tensor that the entries of some files make up. Raises SpecError if these are not whole rows, or not all."""
    first = entries[0]
    rows = [max(e.offsets[0] + e.sizes[0] for e in entries)] if first.sizes else []
    shape = (*rows, *first.sizes[1:])
    row = math.prod(shape[1:])
    begins = [row * sum(e.offsets[:1]) for e in entries]
    pairs = zip(begins, entries, strict=True)
    parts = [FilePart(path=e.path, begin=n, numel=math.prod(e.sizes), begin_byte=e.begin_byte) for n, e in pairs]
    if any(e.sizes[1:] != shape[1:] or any(e.offsets[1:]) for e in entries):
        hint = "write them with HuggingFaceStorageWriter(enable_consolidation=True)"
        raise _broken(f"{first.path.parent} has {name} in parts that are not whole rows", hint)
    if sum(part.numel for part in parts) != math.prod(shape):
        raise _broken(f"{first.path.parent} lacks a part of {name}")
    return StoredTensor(dtype=first.dtype, shape=shape, parts=tuple(parts))


def _of_checkpoint(saved: checkpoint_format.Checkpoint) -> dict[str, StoredTensor]:
    """The model of a checkpoint of this lab, whose tensors are flat, and the buffers of its first rank."""
    stored = _collected({saved.path / file: None for file in saved.manifest["files"]})
    prefixes = (_PARAMETER, f"{_BUFFER}{saved.manifest['writers'][0]}.")
    of_model = [(p, name) for name in stored for p in prefixes if name.startswith(p)]
    return {name.removeprefix(prefix): replace(stored[name], flat=True) for prefix, name in of_model}


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """An entry of a file: elements offsets[d] to offsets[d] + sizes[d] of each dimension d of a tensor."""

    path: Path
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin_byte: int


def _entries(path: Path) -> dict[str, _Entry]:
    """The tensors of a file of safetensors. Raises SpecError for one that is broken."""
    entries = {}
    try:
        with safe_open(str(path), framework="np") as tensors, open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")  # of the header, which safetensors has checked
            header: dict[str, Any] = json.loads(file.read(size))
            sharding = json.loads((tensors.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
        for name, given in header.items():
            if name == "__metadata__":
                continue
            if (dtype := _DTYPES.get(given["dtype"])) is None:
                reason = f"{path} has values of type {given['dtype']}, which cannot be trained"
                raise _broken(reason, f"convert them: {_SAVE} with a dtype such as bfloat16")
            sizes, begin_byte = tuple(given["shape"]), 8 + size + given["data_offsets"][0]
            offsets = tuple(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(sizes)
            entries[name] = _Entry(path=path, dtype=dtype, offsets=offsets, sizes=sizes, begin_byte=begin_byte)
    except SpecError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError) as e:
        hint = "copy the folder again, or run git lfs pull where it is a pointer of Git LFS"
        raise _broken(f"{path} is no whole safetensors file ({e})", hint) from None
    return entries


def unwrap_names(folder: str | os.PathLike[str], to: str | os.PathLike[str]) -> Path:
    """Writes the safetensors of `folder` into the new folder `to`, without "module.", "_orig_mod." and the like in names.
    Other files, such as config.json, are copied. One file is in memory at a time. Returns `to`.

    Raises ArgumentError: there are no safetensors, two names become the same, or `to` exists."""
    source, target = Path(folder).expanduser(), Path(to).expanduser()
    files = sorted(source.glob(f"*{SAFETENSORS}"))
    if not files:
        raise ArgumentError("folder", f"{source} has no safetensors", "give a folder that save_pretrained wrote")
    stored = [name for file in files for name in _entries(file)]
    if len({*map(unwrapped, stored)}) < len(stored):
        reason = f"{source} has a tensor with and without a wrapper's name"
        raise ArgumentError("folder", reason, "take one of them out")
    if target.exists():
        raise ArgumentError("to", f"{target} exists", "give a new folder")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(f"*{SAFETENSORS}"))
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            renamed = {unwrapped(name): tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
            save_file(renamed, target / file.name, tensors.metadata())
    for file in target.glob(f"*{INDEX}"):
        index = json.loads(file.read_text())
        index["weight_map"] = {unwrapped(name): where for name, where in index["weight_map"].items()}
        file.write_text(json.dumps(index, indent=2))
    return target
