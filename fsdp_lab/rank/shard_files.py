"""`write_shard` and `read_shards`: the files of a checkpoint, by torch's Distributed Checkpoint.

They are safetensors in its Hugging Face format. The layout is known beforehand (backends/state.py), so its planners have
nothing to negotiate and need no process group, and a thread can write while training continues.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fsdp_lab.backends.state import Chunk


def write_shard(folder: Path, rank: int, chunks: Sequence[Chunk]) -> tuple[str | None, int]:
    """Writes this rank's file; returns its name and size in bytes, or None and 0 without chunks. Not collective. Each
    name occurs at most once. Raises OSError."""
    if not chunks:
        return None, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is used
        try:
            dcp.save({}, storage_writer=_Writer(folder, rank), planner=_SavePlanner(chunks), no_dist=True)
        except dcp.api.CheckpointException as e:
            raise next(iter(e.failures.values()))[0] from None
    file = next(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))
    return file.name, file.stat().st_size


def read_shards(folder: Path, targets: Sequence[Chunk], optional: tuple[str, ...]) -> None:
    """Fills the targets from the files of all ranks that saved. Not collective.

    `optional`: prefixes of names that may be missing; such a target, or the missing part of it, is left unchanged.

    Raises LookupError if the files do not have all of a target, OSError if one cannot be read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reader, planner = HuggingFaceStorageReader(str(folder)), _LoadPlanner(targets, optional)
            dcp.load({}, storage_reader=reader, planner=planner, no_dist=True)
        except dcp.api.CheckpointException as e:
            raise next(iter(e.failures.values()))[0] from None


class _Writer(HuggingFaceStorageWriter):
    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._rank = rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Puts the rank into the file's name; each rank plans by itself."""
        return [dataclasses.replace(plan, storage_data={"shard_index": self._rank + 1}) for plan in plans]


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self._chunks = {c.name: c for c in chunks}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(c) for c in self._chunks.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata(state_dict_metadata={})  # the files have it

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._chunks[index.fqn].values


def _item(c: Chunk) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(c.name, torch.Size([c.start])),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=_extent(c),
            properties=TensorProperties.create_from_tensor(c.values),
            size=c.values.shape,  # of this part: the whole is known when all files are read
        ),
    )


def _extent(c: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([c.start]), sizes=c.values.shape)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, targets: Sequence[Chunk], optional: tuple[str, ...]) -> None:
        super().__init__()
        self._targets = {c.name: c for c in targets}
        self._optional = optional

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for c in self._targets.values() for item in self._items(c)])

    def _items(self, c: Chunk) -> list[ReadItem]:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata.get(c.name)
        if not isinstance(saved, TensorStorageMetadata):
            if c.name.startswith(self._optional):
                return []
            raise LookupError(f"it has no {c.name}")
        if saved.properties.dtype != c.values.dtype:
            raise LookupError(f"its {c.name} is {saved.properties.dtype}, not {c.values.dtype}")
        items = create_read_items_for_chunk_list(c.name, saved, [_extent(c)])
        if sum(item.lengths.numel() for item in items) != c.values.numel() and not c.name.startswith(self._optional):
            raise LookupError(f"it lacks a part of {c.name}[{c.start}:{c.stop}]")
        return items

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._targets[index.fqn].values

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise TypeError("a checkpoint has only tensors")
