"""`read_index`: the tensors of a Distributed Checkpoint that `torch.distributed.checkpoint.save` wrote.

Note: what is unpickled. The index, `.metadata`, is a pickle. It is read by an unpickler to which a name outside of `_NAMES`
and torch's dtypes is an error. The names of torch's classes stand for `InertRecord`, which keeps a state and does nothing,
so that neither torch's code nor the file's runs, whatever the file holds. A `.distcp` file has one `torch.save` archive
for each item; torch's own restricted loading says where its values begin, and reads none of them (`values_offset`).
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view

from fsdp_lab.core.errors import SpecError

INDEX = ".metadata"
_FIELD = "workload.weights"
_OTHERWISE = "begin with random"


class InertRecord:
    """Stands for an object of the index: what it was given as its state, and no behaviour."""

    state: Any = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        self.state = state


_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES: Mapping[str, Sequence[str]] = {
    _METADATA: ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties",
                "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    _OLD_METADATA: ("TensorProperties", "MEM_FORMAT_ENCODING"),
    _FILES: ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}  # fmt: skip
_NAMES: Mapping[tuple[str, str], type] = {
    **{(module, name): InertRecord for module, names in _CLASSES.items() for name in names},
    ("torch", "Size"): tuple, ("collections", "OrderedDict"): dict,
}  # fmt: skip
_TORCH_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _ForeignName(Exception):
    """A name that no index has."""


def _member(kind: object, name: object) -> InertRecord:
    """A member of an enumeration, as Python 3.11.2 pickles it: by `getattr`, which this stands for."""
    if kind is not InertRecord or not isinstance(name, str):
        raise _ForeignName("builtins.getattr")
    return InertRecord()


class _Unpickler(pickle.Unpickler):
    """See the note."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _TORCH_DTYPES:
            return _TORCH_DTYPES[name]
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in _NAMES:
            raise _ForeignName(f"{module}.{name}")
        return _NAMES[module, name]


@dataclass(frozen=True, kw_only=True)
class SavedChunk:
    """A part of a tensor: elements offsets[d] to offsets[d] + sizes[d] of each dimension d, and the archive that has it."""

    path: Path
    offset: int  # of the archive in the file
    nbytes: int  # of the archive
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class IndexedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]


def read_index(folder: Path) -> dict[str, IndexedTensor]:
    """The tensors of the model in a checkpoint, by the names that the model gave them.

    Raises:
        SpecError: the index is none, or asks for what no index needs; there are several models; a file is missing or short.
        OSError: it cannot be read.
    """
    index = folder / INDEX
    try:
        with open(index, "rb") as file:
            found = _Unpickler(file).load().state
        tensors = {name: entry.state for name, entry in found["state_dict_metadata"].items() if _is_tensor(entry)}
        places = {
            (key.state["fqn"], key.state.get("offset")): info.state for key, info in found["storage_data"].items()
        }
        paths = found.get("planner_data") or {}
        names = _model_names(index, {name: tuple(map(str, paths.get(name, (name,)))) for name in tensors})
        return {short: _tensor(folder, name, tensors[name], places) for name, short in names.items()}
    except (SpecError, OSError):
        raise
    except _ForeignName as e:
        raise _refusal(f"{index}, a pickle, names {e}, which no Distributed Checkpoint needs and which could run code; it "
                       "was not run", "take weights that you can trust") from None  # fmt: skip
    except Exception as e:  # of a pickle that is none, or of other objects
        raise _refusal(f"{index} is no index of a Distributed Checkpoint ({type(e).__name__}: {e})",
                       "copy the folder again") from None  # fmt: skip


def _refusal(reason: str, hint: str) -> SpecError:
    return SpecError(_FIELD, " ".join(reason.split()), f"{hint}, or {_OTHERWISE}", {"weights": "random"})


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry.state, dict) and "chunks" in entry.state


def _tensor(
    folder: Path, name: str, stored: Mapping[str, Any], places: Mapping[Any, Mapping[str, Any]]
) -> IndexedTensor:
    dtype = stored["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has no dtype")
    chunks = (chunk.state for chunk in stored["chunks"])
    return IndexedTensor(
        dtype=dtype,
        shape=_numbers(stored["size"]),
        chunks=tuple(_chunk(folder, name, c, places[name, c["offsets"]]) for c in chunks),
    )


def _chunk(folder: Path, name: str, chunk: Mapping[str, Any], place: Mapping[str, Any]) -> SavedChunk:
    path, (begin, nbytes) = folder / place["relative_path"], _numbers((place["offset"], place["length"]))
    if path.parent != folder:
        raise ValueError(f"{place['relative_path']!r} does not lie beside it")
    if place.get("transform_descriptors"):
        raise _refusal(f"{name} in {path} is compressed ({', '.join(place['transform_descriptors'])}), which cannot be read "
                       "by range", "save it without extensions")  # fmt: skip
    if not path.is_file():
        raise _refusal(f"{path} is missing", "copy the folder again")
    if path.stat().st_size < begin + nbytes:
        raise _refusal(f"{path} has {path.stat().st_size:,} bytes and should have {begin + nbytes:,} or more",
                       "copy the folder again")  # fmt: skip
    return SavedChunk(
        path=path, offset=begin, nbytes=nbytes, offsets=_numbers(chunk["offsets"]), sizes=_numbers(chunk["sizes"])
    )


def _numbers(values: Sequence[Any]) -> tuple[int, ...]:
    if any(type(v) is not int or v < 0 for v in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)


# -- which of the tensors are the model --------------------------------------------------------------------------------


def _model_names(index: Path, paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Name in the index -> name in its model, of the model's tensors. `paths`: where each was in the saved dictionaries."""
    groups: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for name, path in paths.items():
        if not any(part.startswith("optim") for part in path[:-1]):
            groups[path[:-1]][name] = path[-1]
    if not groups:
        return {}
    best = max(_preference(path, len(names)) for path, names in groups.items())
    models = [path for path, names in groups.items() if _preference(path, len(names)) == best]
    if len(models) > 1:
        listed = ", ".join(".".join(path) for path in models)
        raise _refusal(f"{index} has {len(models)} models ({listed})", 'save one of them, under "model"')
    return groups[models[0]]


def _preference(path: tuple[str, ...], count: int) -> tuple[bool, bool, int]:
    return "model" in path, any(part.startswith("model") or part in ("module", "state_dict") for part in path), count


# -- where the values of an item are -----------------------------------------------------------------------------------


def values_offset(path: Path, offset: int, nbytes: int, dtype: torch.dtype, sizes: Sequence[int]) -> int:
    """Where in the file the first value of a tensor [*sizes] is, of the `torch.save` archive at `offset`.

    Raises:
        OSError: it holds something else.
    """
    try:
        with open(path, "rb") as file, FakeTensorMode():
            held = torch.load(_create_file_view(file, offset, nbytes), weights_only=True)  # type: ignore[arg-type]
        fits = held.dtype == dtype and tuple(held.shape) == tuple(sizes) and held.is_contiguous()
        skipped = held.untyped_storage()._checkpoint_offset + held.storage_offset() * dtype.itemsize
    except OSError:
        raise
    except Exception as e:  # whatever torch's loading says of it
        raise OSError(f"{path} has at byte {offset:,} no tensor ({type(e).__name__})") from None
    if not fits or skipped + math.prod(sizes) * dtype.itemsize > nbytes:
        raise OSError(f"{path} has at byte {offset:,} another tensor than the index says, or a transposed one")
    return offset + int(skipped)
