"""`Weights`: the tensors of a folder, found by the headers of its files and read by range (pretrained.py: for a model).

It reads safetensors: one file, or several with their index, as `save_pretrained` writes them; Distributed Checkpoints, as
torch or its `HuggingFaceStorageWriter` writes them (torch_checkpoint.py says what is unpickled); the checkpoints of a run of
this lab.

Note: by range. The format of safetensors is eight bytes with the length of a JSON header, the header, which gives the place
of each tensor, and the values (https://huggingface.co/docs/safetensors). So a range of elements is a range of bytes, which
is read straight into its tensor. The library's own slices map the file into memory: its pages count as the process's while
they are read, and rows are the least that it gives.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_lab.core import checkpoint_format
from fsdp_lab.core.errors import ArgumentError, SpecError
from fsdp_lab.models import torch_checkpoint

INDEX = ".index.json"
SAFETENSORS = ".safetensors"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_FIELD = "workload.weights"
_PIECE_BYTES = 4 << 20  # read at once, between two calls of `check`
_MOST_HEADER_BYTES = 100_000_000  # as the library's own limit
_SAVE = "model.save_pretrained(folder)"


def _unchecked() -> None:
    """The default of `check`."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A part of a tensor that a file has, in order: elements offsets[d] to offsets[d] + sizes[d] of each dimension d."""

    path: Path
    offset: int  # of its first byte in the file, or of its archive
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    archive_bytes: int = 0  # of the `torch.save` archive that has it; 0: none

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def runs(self, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(first element of the flattened tensor, first element of the box, count) of its consecutive elements."""
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


class Weights:
    """The tensors of a folder, by the names that they have there.

    Raises:
        SpecError: there are none, they are in a format that cannot be read by range, or a file is broken.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._tensors = _tensors_of(self.folder)
        for name, stored in self._tensors.items():
            if sum(box.numel for box in stored.boxes) != stored.numel:
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
        """Their names."""
        return sorted({box.path.name for stored in self._tensors.values() for box in stored.boxes})

    @property
    def is_plain(self) -> bool:
        """Whether every tensor is whole in one file, in its shape."""
        return all(
            len(t.boxes) == 1 and t.boxes[0].path.parent == self.folder and not t.flat and not t.boxes[0].archive_bytes
            for t in self._tensors.values()
        )

    @property
    def fingerprint(self) -> str:
        """Equal for folders with the same tensors in files of the same sizes; their values are not read."""
        digest = hashlib.blake2b(digest_size=8)
        for name, stored in sorted(self._tensors.items()):
            places = [(b.path.name, b.offset, b.offsets, b.sizes) for b in stored.boxes]
            digest.update(repr((name, stored.dtype, stored.shape, places)).encode())
        return digest.hexdigest()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """A tensor [stop - start] in the dtype of the file: elements [start, stop) of the flattened tensor."""
        values = torch.empty(stop - start, dtype=self[name].dtype)
        self.read_into(name, start, values)
        return values

    def read_into(self, name: str, start: int, target: Tensor, check: Callable[[], object] = _unchecked) -> None:
        """Set `target` [n], flat, of any dtype and on any device, to elements [start, start + n) of a tensor.

        `check` is called before each piece that is read; what it raises ends the reading. Raises OSError for a file that
        cannot be read, or became shorter.
        """
        stored, stop, target = self[name], start + target.numel(), target.detach()
        for box in stored.boxes:
            begin = None if box.archive_bytes else box.offset
            for at, skip, count in box.runs(stored.shape):
                first, last = max(start, at), min(stop, at + count)
                if first < last:
                    begin = _first_value(box, stored.dtype) if begin is None else begin
                    part = target[first - start : last - start]
                    _read_run(box.path, begin, skip + first - at, part, stored.dtype, check)


def _first_value(box: Box, dtype: torch.dtype) -> int:
    return torch_checkpoint.values_offset(box.path, box.offset, box.archive_bytes, dtype, box.sizes)


def _read_run(path: Path, offset: int, skip: int, target: Tensor, dtype: torch.dtype,
              check: Callable[[], object]) -> None:  # fmt: skip
    """Sets `target` to the elements from number `skip` on of those that begin at `offset` of a file."""
    piece = max(1, _PIECE_BYTES // dtype.itemsize)
    straight = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
    scratch = target if straight else torch.empty(min(piece, target.numel()), dtype=dtype)
    with open(path, "rb", buffering=0) as file:
        for begin in range(0, target.numel(), piece):
            check()
            part = target[begin : begin + piece]
            into = part if straight else scratch[: part.numel()]
            _read_bytes(file.fileno(), into, offset + (skip + begin) * dtype.itemsize, path)
            if not straight:
                part.copy_(into)


def _read_bytes(file: int, into: Tensor, offset: int, path: Path) -> None:
    # By its address: a storage that numpy has seen can never be freed or resized, which the backends do.
    view = memoryview((ctypes.c_ubyte * into.nbytes).from_address(into.data_ptr())).cast("B")
    while view:
        count = os.preadv(file, [view], offset)
        if not count:
            raise OSError(f"{path} became shorter while it was read")
        view, offset = view[count:], offset + count


# -- what a folder holds -----------------------------------------------------------------------------------------------


def has_weights(folder: Path) -> bool:
    """Whether there are files of weights beside a config, readable or not."""
    return any(True for pattern in ("*.safetensors", "pytorch_model*.bin", "*.gguf", torch_checkpoint.INDEX)
               for file in folder.glob(pattern) if not file.name.startswith("adapter_"))  # fmt: skip


def _tensors_of(folder: Path) -> dict[str, StoredTensor]:
    if not folder.is_dir():
        raise SpecError(_FIELD, f"there is no folder {folder}", f"give a folder that {_SAVE} wrote", {"weights": None})
    _refuse_quantised(folder)
    try:
        if files := _safetensors_of(folder):
            return _of_safetensors(folder, files)
        if (folder / torch_checkpoint.INDEX).is_file():
            return _of_torch(folder)
        with suppress(ArgumentError):
            return _of_checkpoint(checkpoint_format.find(folder))
    except OSError as e:
        raise _broken(f"{folder} cannot be read: {e.strerror or e}") from None
    raise _without_weights(folder)


def _without_weights(folder: Path) -> SpecError:
    """What is there instead."""
    found = sorted(
        p.name for pattern in ("pytorch_model*.bin", "*.gguf", "*.safetensors") for p in folder.glob(pattern)
    )
    if not found:
        return SpecError(_FIELD, f"{folder} has neither model.safetensors nor another file of weights",
                         f"give a folder that {_SAVE} wrote, or random", {"weights": "random"})  # fmt: skip
    if found[0].endswith(".gguf"):
        reason = f"{found[0]} is a GGUF file, whose weights are quantised"
        how = f"open it with from_pretrained(folder, gguf_file={found[0]!r}), then {_SAVE}"
    elif found[0].endswith(".bin"):
        reason, how = f"{found[0]} is a pickle, which can run code and cannot be read by range", f"convert it: {_SAVE}"
    else:
        reason = f"{folder} has {len(found)} files {found[0]}, {found[1]}, and no index that says which"
        how = f"write them with {_SAVE}, or keep one"
    return SpecError(_FIELD, reason, f"{how}, or begin with random", {"weights": "random"})


def _refuse_quantised(folder: Path) -> None:
    with suppress(OSError, ValueError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if isinstance(config, dict) and config.get("quantization_config"):
            raise SpecError(_FIELD, f"the weights in {folder} are quantised, which cannot be trained",
                            f"give those that were quantised, or convert them: dequantize(), then {_SAVE}",
                            {"weights": "random"})  # fmt: skip


def _broken(reason: str, hint: str = "copy the folder again") -> SpecError:
    return SpecError(_FIELD, reason, hint, {"weights": "random"})


# -- safetensors -------------------------------------------------------------------------------------------------------


def _safetensors_of(folder: Path) -> dict[str, set[str] | None]:
    """File -> the names that an index says it has, or None for all; empty if there are none. As transformers chooses."""
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": None}
    indexes = sorted(folder.glob(f"*{SAFETENSORS}{INDEX}"))
    usual = folder / f"model{SAFETENSORS}{INDEX}"
    if indexes:
        index = usual if usual in indexes else indexes[0]
        return _indexed(index)
    if (folder / checkpoint_format.MANIFEST).exists():
        return {}
    single = [p for p in sorted(folder.glob(f"*{SAFETENSORS}")) if not p.name.startswith("adapter_")]
    sharded = len(single) > 1 and all(p.name.startswith("shard-") for p in single)  # of a Distributed Checkpoint
    return {p.name: None for p in single} if len(single) == 1 or sharded else {}


def _indexed(index: Path) -> dict[str, set[str] | None]:
    files: dict[str, set[str] | None] = {}
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file in named.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} does not lie beside it")
            names = files.setdefault(file, set())
            assert names is not None
            names.add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _broken(f"{index} is no index of safetensors ({type(e).__name__}: {e})") from None
    return files


def _of_safetensors(folder: Path, files: Mapping[str, set[str] | None]) -> dict[str, StoredTensor]:
    """All tensors of these files, as `from_pretrained` reads them; of two with one name the later one."""
    boxes: dict[str, tuple[torch.dtype, dict[tuple[int, ...], Box]]] = {}
    for file, names in files.items():
        found = _header(folder / file)
        if names is not None and (lacking := sorted(names - found.keys())):
            raise _broken(f"{folder / file} lacks {lacking[0]}, which the index says it has")
        for name, (dtype, box) in found.items():
            boxes.setdefault(name, (dtype, {}))[1][box.offsets] = box
    return {name: StoredTensor(dtype=dtype, shape=_extent([*parts.values()]), boxes=tuple(parts.values()))
            for name, (dtype, parts) in boxes.items()}  # fmt: skip


def _extent(boxes: Sequence[Box]) -> tuple[int, ...]:
    """The shape of the tensor that they make up."""
    ends = zip(*([o + s for o, s in zip(b.offsets, b.sizes, strict=True)] for b in boxes), strict=True)
    return tuple(max(end) for end in ends)


def _header(path: Path) -> dict[str, tuple[torch.dtype, Box]]:
    """The tensors of one file: see the note. Raises SpecError for one that is broken, OSError for one that is not there."""
    if not path.is_file():
        raise _broken(f"{path} is missing")
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            first = file.read(8)
            if first == b"version ":  # as the text that git keeps in place of a large file begins
                raise _broken(f"{path} is only Git LFS's pointer to the file", "run git lfs pull in its repository")
            length = int.from_bytes(first, "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise ValueError("it is too short for its header")
            header: dict[str, Any] = json.loads(file.read(length))
        extra = header.pop("__metadata__", None) or {}
        offsets = json.loads(extra["DCP_SHARDING_INFO"]) if "DCP_SHARDING_INFO" in extra else {}
        return {name: _entry(path, 8 + length, size, entry, offsets.get(name)) for name, entry in header.items()}
    except SpecError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _broken(f"{path} is no whole safetensors file: {e if isinstance(e, ValueError) else 'its header is wrong'}"
                      ) from None  # fmt: skip


def _entry(path: Path, begin: int, size: int, entry: Mapping[str, Any], sharding: Any) -> tuple[torch.dtype, Box]:
    if entry["dtype"] not in DTYPES:
        raise _of_strange_type(path, entry["dtype"])
    dtype, sizes, (first, last) = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), entry["data_offsets"]
    if last - first != math.prod(sizes) * dtype.itemsize:
        raise ValueError("the place of a tensor does not fit its shape")
    if begin + last > size:
        raise ValueError(f"it has {size:,} bytes and should have {begin + last:,} or more")
    offsets = tuple(sharding["saved_offsets"]) if sharding else (0,) * len(sizes)
    return dtype, Box(path=path, offset=begin + first, offsets=offsets, sizes=sizes)


def _of_strange_type(path: Path, dtype: str) -> SpecError:
    return SpecError(_FIELD, f"{path} has values of type {dtype}, which cannot be trained",
                     f"convert them: {_SAVE} with a dtype such as bfloat16", {"weights": "random"})  # fmt: skip


# -- Distributed Checkpoints -------------------------------------------------------------------------------------------


def _of_torch(folder: Path) -> dict[str, StoredTensor]:
    found = torch_checkpoint.read_index(folder)
    if strange := next((t for t in found.values() if t.dtype not in DTYPES.values()), None):
        raise _of_strange_type(folder, str(strange.dtype).removeprefix("torch."))
    return {
        name: StoredTensor(
            dtype=t.dtype,
            shape=t.shape,
            boxes=tuple(Box(path=c.path, offset=c.offset, offsets=c.offsets, sizes=c.sizes, archive_bytes=c.nbytes)
                        for c in t.chunks),
        )
        for name, t in found.items()
    }  # fmt: skip


# -- checkpoints of this lab -------------------------------------------------------------------------------------------

_PARAMETER, _BUFFER = "parameter.", "buffer."  # names in a checkpoint of this lab: backends/state.py


def _of_checkpoint(saved: checkpoint_format.Checkpoint) -> dict[str, StoredTensor]:
    """The model of a checkpoint of this lab, whose tensors are flat, and the buffers of its first rank."""
    stored = _of_safetensors(saved.path, dict.fromkeys(saved.manifest["files"]))
    buffers = f"{_BUFFER}{saved.manifest['writers'][0]}."
    found = {}
    for name, tensor in stored.items():
        if name.startswith(_PARAMETER):
            found[name.removeprefix(_PARAMETER)] = _flat(tensor)
        elif name.startswith(buffers):
            found[name.removeprefix(buffers)] = _flat(tensor)
    return found


def _flat(tensor: StoredTensor) -> StoredTensor:
    return StoredTensor(dtype=tensor.dtype, shape=tensor.shape, boxes=tensor.boxes, flat=True)
