"""`Weights`: the tensors of a folder, read by range (pretrained.py: for a model).

It reads safetensors, one file or several with their index, as `save_pretrained` and `HuggingFaceStorageWriter` write them;
pytorch_model.bin, likewise, by torch's loading that runs nothing; and the checkpoints of a run of this lab.

Note: by range. The header of a file of safetensors says where each tensor lies, so a rank reads its ranges, a piece at a
time, and never holds more. torch maps pytorch_model.bin, whose pages that were read count as memory for a while.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.spec import checkpoint_format
from fsdp_lab.spec.param_groups import unwrapped

INDEX = ".index.json"
SAFETENSORS = ".safetensors"
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES: Mapping[str, torch.dtype] = {**_FLOATS, **_WHOLE, "BOOL": torch.bool}
_FIELD = "workload.weights"
_PIECE = 1 << 20  # elements copied between two calls of `check`
_SAVE = "model.save_pretrained(folder)"
_PICKLE, _TORCH_INDEX = "pytorch_model.bin", ".metadata"  # the latter of torch's Distributed Checkpoints
_PARAMETER, _BUFFER = "parameter.", "buffer."  # names in a checkpoint of this lab: backends/state.py


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a tensor, one entry of a file: elements offsets[d] to offsets[d] + sizes[d] of each dimension d."""

    path: Path
    name: str  # in the file
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin_byte: int = 0  # in a file of safetensors

    def runs(self, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yields (first element of the flattened tensor, first element of the box, count) of its consecutive elements."""
        inner = len(shape)  # dimensions from here on are whole, but for the first of them
        while inner > 0 and (inner == len(shape) or self.sizes[inner] == shape[inner]):
            inner -= 1
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        count = math.prod(self.sizes[inner:])
        base = sum(o * s for o, s in zip(self.offsets, strides, strict=True))
        for i in range(math.prod(self.sizes[:inner])):
            at, rest = base, i
            for d in reversed(range(inner)):
                rest, place = divmod(rest, self.sizes[d])
                at += place * strides[d]
            yield at, i * count, count


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a folder. `flat`: only its number of elements is known, not its shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    flat: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        return self.numel == math.prod(shape) if self.flat else self.shape == shape


class Weights:
    """The tensors of a folder, by the names that they have there.

    Raises SpecError: there are none, they are in a format that is not read, or a file is broken.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._pickles: dict[Path, dict[str, Tensor]] = {}
        self._tensors = self._all()
        for name, stored in self._tensors.items():
            if sum(math.prod(box.sizes) for box in stored.boxes) != stored.numel:
                raise _broken(f"{self.folder} lacks a part of {name}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def __getitem__(self, name: str) -> StoredTensor:
        """Raises SpecError for a name that no file has."""
        if name not in self._tensors:
            raise SpecError(_FIELD, f"{self.folder} has no values for {name}", "give the weights of this model")
        return self._tensors[name]

    @property
    def files(self) -> list[str]:
        """The names of the files."""
        return sorted({box.path.name for stored in self._tensors.values() for box in stored.boxes})

    @property
    def is_plain(self) -> bool:
        """True if every tensor is whole in one file of safetensors, in its shape."""
        boxes = [box for t in self._tensors.values() for box in t.boxes]
        flat = any(t.flat for t in self._tensors.values())
        beside = all(box.path.parent == self.folder and box.path.suffix == SAFETENSORS for box in boxes)
        return beside and not flat and len(boxes) == len(self._tensors)

    @property
    def fingerprint(self) -> str:
        """Equal for folders with the same tensors in files of the same sizes; their values are not read."""
        sizes = {box.path: box.path.stat().st_size for stored in self._tensors.values() for box in stored.boxes}
        digest = hashlib.blake2b(repr(sorted((p.name, size) for p, size in sizes.items())).encode(), digest_size=8)
        for name, stored in sorted(self._tensors.items()):
            places = [(b.path.name, b.name, b.offsets, b.sizes) for b in stored.boxes]
            digest.update(repr((name, stored.dtype, stored.shape, places)).encode())
        return digest.hexdigest()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """A tensor [stop - start] in the dtype of the file: elements [start, stop) of the flattened tensor."""
        values = torch.empty(stop - start, dtype=self[name].dtype)
        self.read_into(name, start, values)
        return values

    def read_into(self, name: str, start: int, target: Tensor, check: Callable[[], object] = lambda: None) -> None:
        """Sets `target` [n], flat, of any dtype and on any device, to elements [start, start + n) of a tensor.

        `check` is called before each piece that is read; what it raises ends the reading. Raises OSError for a file that
        cannot be read, or became shorter.
        """
        stored, stop, target = self[name], start + target.numel(), target.detach()
        for box in stored.boxes:
            for at, skip, count in box.runs(stored.shape):
                first, last = max(start, at), min(stop, at + count)
                for begin in range(first, last, _PIECE):
                    check()
                    end = min(begin + _PIECE, last)
                    values = self._values(box, stored.dtype, skip + begin - at, skip + end - at)
                    target[begin - start : end - start].copy_(values)

    def _values(self, box: Box, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a box, flat. They are read: safetensors would map the whole file as private memory."""
        if box.path in self._pickles:
            return self._pickles[box.path][box.name].reshape(-1)[start:stop]
        count = (stop - start) * dtype.itemsize
        values = np.fromfile(box.path, np.uint8, count, offset=box.begin_byte + start * dtype.itemsize)
        if len(values) < count:
            raise OSError(f"{box.path} changed while it was read: it became shorter")
        return torch.from_numpy(values).view(dtype)

    def _all(self) -> dict[str, StoredTensor]:
        folder = self.folder
        if not folder.is_dir():
            hint = f"give a folder that {_SAVE} wrote"
            raise SpecError(_FIELD, f"there is no folder {folder}", hint, {"weights": None})
        try:
            if files := _safetensors_of(folder) or _pickles_of(folder):
                return self._collected(files)
            with suppress(ArgumentError):
                return self._of_checkpoint(checkpoint_format.find(folder))
        except OSError as e:
            raise _broken(f"{folder} cannot be read: {e.strerror or e}") from None
        raise _without_weights(folder)

    def _collected(self, files: Mapping[Path, set[str] | None]) -> dict[str, StoredTensor]:
        """All tensors of these files, as `from_pretrained` reads them; of two with one name the later one."""
        parts: dict[str, tuple[torch.dtype, dict[tuple[int, ...], Box]]] = {}
        for path, names in files.items():
            if not path.is_file():
                raise _broken(f"{path} is missing")
            entries = _entries(path) if path.suffix == SAFETENSORS else self._entries_of_pickle(path)
            if names is not None and (lacking := sorted(names - entries.keys())):
                raise _broken(f"{path} lacks {lacking[0]}, which the index says it has")
            for name, (dtype, box) in entries.items():
                parts.setdefault(name, (dtype, {}))[1][box.offsets] = box
        tensors = {name: (dtype, tuple(boxes.values())) for name, (dtype, boxes) in parts.items()}
        return {
            n: StoredTensor(dtype=dtype, shape=_extent(boxes), boxes=boxes) for n, (dtype, boxes) in tensors.items()
        }

    def _entries_of_pickle(self, path: Path) -> dict[str, tuple[torch.dtype, Box]]:
        try:
            held = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
            for key in ("model", "state_dict", "module"):  # beside an optimizer, as trainers save them
                held = held[key] if isinstance(held.get(key), Mapping) else held
            held = {name: t for name, t in held.items() if isinstance(t, Tensor)}
        except Exception as e:  # of many classes: no pickle, one of other objects, one of torch before 1.6
            reason = f"{path} holds other things than tensors, or is not whole ({' '.join(str(e).split())[:150]})"
            raise _broken(reason, f"convert it where you trust it: {_SAVE}") from None
        self._pickles[path] = held
        if strange := next((t.dtype for t in held.values() if t.dtype not in DTYPES.values()), None):
            raise _of_strange_type(path, str(strange).removeprefix("torch."))
        boxes = {n: Box(path=path, name=n, offsets=(0,) * t.dim(), sizes=tuple(t.shape)) for n, t in held.items()}
        return {name: (t.dtype, boxes[name]) for name, t in held.items()}

    def _of_checkpoint(self, saved: checkpoint_format.Checkpoint) -> dict[str, StoredTensor]:
        """The model of a checkpoint of this lab, whose tensors are flat, and the buffers of its first rank."""
        stored = self._collected({saved.path / file: None for file in saved.manifest["files"]})
        prefixes = (_PARAMETER, f"{_BUFFER}{saved.manifest['writers'][0]}.")
        of_model = [(p, name) for name in stored for p in prefixes if name.startswith(p)]
        return {name.removeprefix(prefix): replace(stored[name], flat=True) for prefix, name in of_model}


def has_weights(folder: Path) -> bool:
    """Returns whether there are files of weights beside a config, readable or not."""
    patterns = ("*.safetensors", "pytorch_model*.bin", "*.gguf", _TORCH_INDEX)
    files = chain.from_iterable(map(folder.glob, patterns))
    return any(not file.name.startswith("adapter_") for file in files)


def _without_weights(folder: Path) -> SpecError:
    """The refusal of a folder, by what is there instead."""
    there = sorted(p.name for pattern in ("*.gguf", "*.safetensors") for p in folder.glob(pattern))
    if (folder / _TORCH_INDEX).is_file():
        reason = f"{folder} is a Distributed Checkpoint of torch, whose index is a pickle that can run code"
        command = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FOLDER/{_PICKLE}"
        how = f"convert it where you trust it ({command}) and give FOLDER"
    elif not there:
        reason, how = f"{folder} has neither model.safetensors nor {_PICKLE}", f"give a folder that {_SAVE} wrote"
    elif there[0].endswith(".gguf"):
        reason = f"{there[0]} is a GGUF file, whose weights are quantised"
        how = f"open it with from_pretrained(folder, gguf_file={there[0]!r}), then {_SAVE}"
    else:
        reason = f"{folder} has {len(there)} files {there[0]}, {there[1]}, and no index that says which"
        how = f"write them with {_SAVE}, or keep one"
    return _broken(reason, f"{how}, or begin with random")


def _broken(reason: str, hint: str = "copy the folder again") -> SpecError:
    return SpecError(_FIELD, reason, hint, {"weights": "random"})


def _of_strange_type(path: Path, dtype: str) -> SpecError:
    reason = f"{path} has values of type {dtype}, which cannot be trained"
    return _broken(reason, f"convert them: {_SAVE} with a dtype such as bfloat16")


def _safetensors_of(folder: Path) -> dict[Path, set[str] | None]:
    """File -> the names that an index says it has, or None for all; empty if there are none. As transformers chooses."""
    if (whole := folder / "model.safetensors").is_file():
        return {whole: None}
    indexes = sorted(folder.glob(f"*{SAFETENSORS}{INDEX}"))
    if indexes:
        usual = folder / f"model{SAFETENSORS}{INDEX}"
        return _indexed(usual if usual in indexes else indexes[0])
    if (folder / checkpoint_format.MANIFEST).exists():
        return {}
    single = [p for p in sorted(folder.glob(f"*{SAFETENSORS}")) if not p.name.startswith("adapter_")]
    sharded = len(single) > 1 and all(p.name.startswith("shard-") for p in single)  # of HuggingFaceStorageWriter
    return dict.fromkeys(single) if len(single) == 1 or sharded else {}


def _pickles_of(folder: Path) -> dict[Path, set[str] | None]:
    if (index := folder / f"{_PICKLE}{INDEX}").is_file():
        return _indexed(index)
    return {folder / _PICKLE: None} if (folder / _PICKLE).is_file() else {}


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


def _entries(path: Path) -> dict[str, tuple[torch.dtype, Box]]:
    """The tensors of a file of safetensors. Raises SpecError for one that is broken."""
    with open(path, "rb") as file:
        if file.read(8) == b"version ":  # as the text that git keeps in place of a large file begins
            raise _broken(f"{path} is only Git LFS's pointer to the file", "run git lfs pull in its repository")
    entries = {}
    try:
        with safe_open(str(path), framework="np") as tensors, open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")  # of the header, which safetensors has checked
            places = json.loads(file.read(size))
            sharding = json.loads((tensors.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise _of_strange_type(path, part.get_dtype())
                sizes = tuple(part.get_shape())
                offsets = tuple(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(sizes)
                begin_byte = 8 + size + places[name]["data_offsets"][0]
                box = Box(path=path, name=name, offsets=offsets, sizes=sizes, begin_byte=begin_byte)
                entries[name] = DTYPES[part.get_dtype()], box
    except SpecError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError) as e:
        raise _broken(f"{path} is no whole safetensors file ({e})") from None
    return entries


def _extent(boxes: Sequence[Box]) -> tuple[int, ...]:
    """The shape of the tensor that they make up."""
    ends = zip(*([o + s for o, s in zip(b.offsets, b.sizes, strict=True)] for b in boxes), strict=True)
    return tuple(max(end) for end in ends)


def unwrap_names(folder: str | os.PathLike[str], to: str | os.PathLike[str]) -> Path:
    """Writes the safetensors of `folder` into the new folder `to`, without "module.", "_orig_mod." and the like in names.
    Other files, such as config.json, are copied. One file is in memory at a time. Returns `to`.

    Raises ArgumentError: there are no safetensors, no name has such a part, two become the same, or `to` exists.
    """
    source, target = Path(folder).expanduser(), Path(to).expanduser()
    files = sorted(source.glob(f"*{SAFETENSORS}"))
    if not files:
        raise ArgumentError("folder", f"{source} has no safetensors", "give a folder that save_pretrained wrote")
    names: dict[Path, list[str]] = {}
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            names[file] = list(tensors.keys())
    stored = [name for some in names.values() for name in some]
    if all(unwrapped(name) == name for name in stored):
        raise ArgumentError("folder", f"no name in {source} is of a wrapped model", "use it as it is")
    twice = [name for name, count in Counter(map(unwrapped, stored)).items() if count > 1]
    if twice:
        raise ArgumentError("folder", f"{source} has {twice[0]} with and without a wrapper", "take one of them out")
    if target.exists():
        raise ArgumentError("to", f"{target} exists", "give a new folder")
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file not in names and not file.name.endswith(INDEX):
            shutil.copy2(file, target)
    for file in files:
        with safe_open(str(file), framework="pt") as tensors:
            renamed = {unwrapped(name): tensors.get_tensor(name) for name in names[file]}
            save_file(renamed, target / file.name, tensors.metadata())
    for file in source.glob(f"*{INDEX}"):
        index = json.loads(file.read_text())
        index["weight_map"] = {unwrapped(name): where for name, where in index["weight_map"].items()}
        (target / file.name).write_text(json.dumps(index, indent=2))
    return target
