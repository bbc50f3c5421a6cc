"""`write_shard` and `read_shards`: flat tensors to and from the files of a checkpoint, with torch's Distributed
Checkpoint.

The files are safetensors in its Hugging Face format. The layout is known beforehand (backends/snapshot.py), so that its
planners have nothing to negotiate and need no process group: a thread can write while training continues."""

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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fsdp_lab.backends.snapshot import Chunk


def write_shard(folder: Path, rank: int, chunks: Sequence[Chunk]) -> tuple[str | None, int]:
    """Writes this rank's file; returns its name and size in bytes, or None and 0 if there is nothing to write. Not
    collective. Each name at most once. Raises OSError."""
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

    Raises:
        LookupError: a target is not in the files, or only a part of it. OSError: a file cannot be read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.load({}, storage_reader=HuggingFaceStorageReader(str(folder)), planner=_LoadPlanner(targets, optional),
                     no_dist=True)  # fmt: skip
        except dcp.api.CheckpointException as e:
            raise next(iter(e.failures.values()))[0] from None


class _Writer(HuggingFaceStorageWriter):
    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._rank = rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Each rank plans by itself; its rank is in the file's name."""
        return [dataclasses.replace(plan, storage_data={"shard_index": self._rank + 1}) for plan in plans]


class _SavePlanner(SavePlanner):
    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = {c.name: c for c in chunks}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(c) for c in self._chunks.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata(state_dict_metadata={})  # the files have it

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._chunks[write_item.index.fqn].values


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


class _LoadPlanner(LoadPlanner):
    def __init__(self, targets: Sequence[Chunk], optional: tuple[str, ...]) -> None:
        self._targets = {c.name: c for c in targets}
        self._optional = optional
        self._metadata = Metadata(state_dict_metadata={})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for c in self._targets.values() for item in self._items(c)])

    def _items(self, c: Chunk) -> list[ReadItem]:
        saved = self._metadata.state_dict_metadata.get(c.name)
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

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        offset, n = read_item.dest_offsets[0], read_item.lengths[0]
        return self._targets[read_item.dest_index.fqn].values[offset : offset + n]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # it was read into its target

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise TypeError("a checkpoint has only tensors")
