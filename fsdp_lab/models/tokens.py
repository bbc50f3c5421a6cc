"""`Tokens`: the samples of a workload as token ids, memory-mapped; text as bytes as it is, other samples made once.

What is made is one Arrow file for each content, kept by `cached`. Its rows are samples, or pieces of a text: their ids,
which of them are answers (of chats), and whether they end a sample. They do not depend on seq_len.
Whatever the size of the data, `_BATCH_CHARS` of it are in memory at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from fsdp_lab.models.cache import Progress, cached
from fsdp_lab.models.data import Ids, Text, encode
from fsdp_lab.models.records import Records, Sample, refusal
from fsdp_lab.models.tokenizers import InexactChat, Tokenizer

if TYPE_CHECKING:
    import pyarrow

_FORMAT = 5  # a change of what is written makes all files anew
_BATCH_CHARS, _BATCH_RECORDS = 2 << 20, 4096
_FINGERPRINTED = 1 << 20  # tokens at either end


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids of `len(ends)` samples, one after the other; `answers` is None unless they are chats."""

    ids: _Bytes | _Lists
    ends: Ids  # of each sample in `ids`
    answers: _Lists | None = None
    has_special: bool = True  # whether some may be special ones
    name: str
    notes: tuple[str, ...]
    fingerprint: str


class _Bytes:
    """The bytes of a text as token ids."""

    def __init__(self, text: Text) -> None:
        self._data = text.data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, places: Ids) -> Ids:
        return encode(self._data[places])


class _Lists:
    """The values of a column of lists, one after the other."""

    def __init__(self, column: pyarrow.ChunkedArray) -> None:
        self._parts = [chunk.flatten().to_numpy() for chunk in column.chunks]
        self._begins = np.cumsum([0, *map(len, self._parts)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, places: Ids) -> npt.NDArray[Any]:
        values = np.empty(places.shape, dtype=self._parts[0].dtype if self._parts else np.uint16)
        parts = np.searchsorted(self._begins, places, side="right") - 1
        for part in np.unique(parts):
            chosen = parts == part
            values[chosen] = self._parts[part][places[chosen] - self._begins[part]]
        return values


def bytes_as_tokens(text: Text) -> Tokens:
    """The bytes of a text, which is one sample."""
    name, _, note = text.description.removesuffix(")").rpartition(" (")
    ends = np.array([len(text.data)], dtype=np.int64)
    mark = text.fingerprint
    return Tokens(ids=_Bytes(text), ends=ends, has_special=False, name=name, notes=(note,), fingerprint=mark)


def open_tokens(records: Records, tokenizer: Tokenizer, *, whole: bool, progress: Progress) -> Tokens:
    """The tokens of `records`, made if they are not kept yet. `whole`: each sample is a row of its own, with the special
    tokens that the tokenizer puts around it. Raises SpecError, and what `progress` raises."""
    import pyarrow

    key = repr((_FORMAT, records.digest(), tokenizer.digest, whole)).encode()
    name = f"tokens-{hashlib.blake2b(key, digest_size=16).hexdigest()}.arrow"
    file = cached(name, lambda path: _write(path, records, tokenizer, whole, progress), progress)
    with pyarrow.memory_map(str(file)) as mapped:
        table = pyarrow.ipc.open_stream(mapped).read_all()
    ids = _Lists(table["ids"])
    ends = np.cumsum(pyarrow.compute.list_value_length(table["ids"]).to_numpy(), dtype=np.int64)
    ends = ends[np.flatnonzero(table["ends"].to_numpy())]
    has_text = np.diff(ends, prepend=0) > 0
    left_out, ends = int((~has_text).sum()), ends[has_text]
    answers = _Lists(table["answers"]) if records.is_chat else None
    digest = hashlib.blake2b(repr((tokenizer.digest, len(ids), len(ends))).encode(), digest_size=8)
    edge = np.unique(np.r_[: min(_FINGERPRINTED, len(ids)), max(0, len(ids) - _FINGERPRINTED) : len(ids)])
    for column in filter(None, (ids, answers)):
        digest.update(column[edge].tobytes())
    digest.update(ends[:_FINGERPRINTED].tobytes())
    notes: tuple[str, ...] = (f"{len(ends):,} samples", f"{len(ids):,} tokens of {tokenizer.name}")
    notes = (*notes, f"{left_out:,} without text left out") if left_out else notes
    return Tokens(ids=ids, ends=ends, answers=answers, name=records.name, notes=notes, fingerprint=digest.hexdigest())


def encoded(batch: Sequence[Sample], tokenizer: Tokenizer, *, whole: bool) -> list[tuple[list[int], list[bool]]]:
    """Ids of each record, without the end token, and of chats which of them are answers. Raises SpecError for a chat."""
    if batch and not isinstance(batch[0].value, str):
        chats: list[tuple[list[int], list[bool]]] = []
        for record in batch:
            try:
                chats.append(tokenizer.encode_chat(cast("dict[str, Any]", record.value)))
            except InexactChat as e:
                hint = "correct it, give a tokenizer with a template that marks answers, or name a column of text"
                raise refusal(f"record {record.number} of {record.file}: {e}", hint) from None
        return chats
    texts = [cast(str, record.value) for record in batch]
    return [(ids if text else [], []) for ids, text in zip(tokenizer.encode(texts, whole=whole), texts, strict=True)]


def _write(path: Path, records: Records, tokenizer: Tokenizer, whole: bool, progress: Progress) -> None:
    import pyarrow

    id_type = pyarrow.uint16() if tokenizer.vocabulary <= 1 << 16 else pyarrow.uint32()
    flag = pyarrow.uint8()
    schema = pyarrow.schema([("ids", pyarrow.list_(id_type)), ("answers", pyarrow.list_(flag)), ("ends", flag)])
    length = 0  # of the sample in progress
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        for batch in _batches(records.read()):
            parts = encoded(batch, tokenizer, whole=whole)
            for sample, (ids, _) in zip(batch, parts, strict=True):
                length += len(ids)
                if sample.ends:
                    if length and not records.is_chat and ids[-1:] != [tokenizer.end_id]:
                        ids.append(tokenizer.end_id)
                    length = 0
            columns = {
                "ids": [ids for ids, _ in parts],
                "answers": [[*map(int, answers)] for _, answers in parts],
                "ends": [int(sample.ends) for sample in batch],
            }
            stream.write_batch(pyarrow.RecordBatch.from_pydict(columns, schema=schema))
            progress(False)


def _batches(records: Iterable[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    chars = 0
    for record in records:
        batch.append(record)
        chars += len(str(record.value))
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
