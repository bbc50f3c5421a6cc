"""`Tokens`: the samples of a workload as token ids, made once for each content (cache.py), and memory-mapped.

Files of its folder: `ids` (uint16 if the vocabulary allows, or uint32), `ends` (int64: where each sample ends in `ids`),
`numbers` (int64: of each sample in its file), `answers` (uint8, of chats: whether the token is the assistant's), and
`about.json`. They do not depend on seq_len. Whatever the size of the data, `_BATCH_CHARS` of it are in memory at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from fsdp_lab.models.cache import Cache, Progress, Progresses
from fsdp_lab.models.records import Records, Sample, refusal
from fsdp_lab.models.tokenizers import InexactChat, Tokenizer

Mapped: TypeAlias = npt.NDArray[Any]

_FORMAT = 3  # of the folder: a change of what is written makes all of them anew
_BATCH_CHARS, _BATCH_RECORDS = 2 << 20, 4096
_END_BYTES = 2 << 20


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Memory-mapped token ids of `len(ends)` samples; `answers` is None unless they are chats."""

    ids: Mapped
    ends: Mapped
    numbers: Mapped
    answers: Mapped | None
    files: tuple[tuple[str, int], ...]  # with the first sample of each
    left_out: int  # samples without any token
    fingerprint: str

    def place(self, sample: int) -> str:
        """The file and the number of a sample, for messages."""
        file = next(name for name, first in reversed(self.files) if first <= sample)
        return f"record {self.numbers[sample]} of {file}"


def open_tokens(records: Records, tokenizer: Tokenizer, *, whole: bool, progress: Progresses) -> Tokens:
    """The tokens of `records`, made if they are not kept yet. `whole`: each sample is a row of its own, with the special
    tokens that the tokenizer puts around it. Raises SpecError, and what `progress.check` raises."""
    name = hashlib.blake2b(digest_size=16)
    name.update(repr((_FORMAT, records.digest(), tokenizer.digest, whole)).encode())

    def make(folder: Path) -> None:
        _write(folder, records, tokenizer, whole, progress.made)

    folder = Cache().folder(f"tokens-{name.hexdigest()}", make, progress)
    about = json.loads((folder / "about.json").read_text())
    ids, ends = _mapped(folder / "ids", about["dtype"]), _mapped(folder / "ends", "int64")
    answers = _mapped(folder / "answers", "uint8") if about["is_chat"] else None
    return Tokens(
        ids=ids,
        ends=ends,
        numbers=_mapped(folder / "numbers", "int64"),
        answers=answers,
        files=tuple((str(records.files[file][0]), first) for file, first in about["files"]),
        left_out=about["left_out"],
        fingerprint=_fingerprint(tokenizer.digest, ids, ends, *([answers] if answers is not None else [])),
    )


def _mapped(path: Path, dtype: str) -> Mapped:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


def _fingerprint(digest: str, *arrays: Mapped) -> str:
    """Of the tokenizer, and of both ends of all arrays."""
    found = hashlib.blake2b(repr((digest, *(len(array) for array in arrays))).encode(), digest_size=8)
    for array in arrays:
        count = _END_BYTES // array.itemsize
        found.update(array[:count].tobytes() + array[-count:].tobytes())
    return found.hexdigest()


def encoded(batch: Sequence[Sample], tokenizer: Tokenizer, *, whole: bool) -> list[tuple[list[int], list[bool]]]:
    """Ids of each record, without the end token, and of chats which of them are answers. Raises SpecError for a chat."""
    if batch and not isinstance(batch[0].value, str):
        return [_encoded_chat(record, tokenizer) for record in batch]
    texts = [cast(str, record.value) for record in batch]
    return [(ids if text else [], []) for ids, text in zip(tokenizer.encode(texts, whole=whole), texts, strict=True)]


def _encoded_chat(record: Sample, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    try:
        ids, answers = tokenizer.encode_chat(cast("dict[str, Any]", record.value))
    except InexactChat as e:
        hint = "correct it, give a tokenizer with a template that marks answers, or name a column of text"
        raise refusal(f"record {record.number} of {record.file}: {e}", hint) from None
    return ids, answers


# -- writing ---------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes the files of a folder, batch by batch."""

    def __init__(self, folder: Path, files: ExitStack, dtype: str, end_id: int | None) -> None:
        """`end_id`: what is put after each sample that does not end with it; None: nothing."""
        types = {"ids": dtype, "ends": "int64", "numbers": "int64", "answers": "uint8"}
        self._dtypes = types
        self._files = {name: files.enter_context((folder / name).open("wb")) for name in types}
        self._end_id = end_id
        self._begin = self._end = self._count = 0  # of the sample in progress; of samples that are complete
        self.files: list[tuple[str, int]] = []
        self.left_out = 0

    def add(self, batch: Sequence[Sample], parts: Sequence[tuple[list[int], list[bool]]]) -> None:
        columns: dict[str, list[Any]] = {name: [] for name in self._files}
        for record, (ids, answers) in zip(batch, parts, strict=True):
            columns["ids"] += ids
            columns["answers"] += answers
            self._end += len(ids)
            if record.ends:
                self._end_sample(record, ids, columns)
        for name, file in self._files.items():
            file.write(np.asarray(columns[name], dtype=self._dtypes[name]).tobytes())
            file.flush()

    def _end_sample(self, record: Sample, ids: list[int], columns: dict[str, list[Any]]) -> None:
        if self._end == self._begin:
            self.left_out += 1
            return
        if self._end_id is not None and ids[-1:] != [self._end_id]:
            columns["ids"].append(self._end_id)
            self._end += 1
        if not self.files or self.files[-1][0] != record.file:
            self.files.append((record.file, self._count))
        columns["ends"].append(self._end)
        columns["numbers"].append(record.number)
        self._begin = self._end
        self._count += 1


def _write(folder: Path, records: Records, tokenizer: Tokenizer, whole: bool, progress: Progress) -> None:
    dtype = "uint16" if tokenizer.vocabulary <= 1 << 16 else "uint32"
    with ExitStack() as files:
        writer = _Writer(folder, files, dtype, None if records.is_chat else tokenizer.end_id)
        for batch in _batches(records.read()):
            writer.add(batch, encoded(batch, tokenizer, whole=whole))
            progress()
    place = {str(path): i for i, (path, _) in enumerate(records.files)}  # the same data may be somewhere else next time
    files_from = [(place[file], first) for file, first in writer.files]
    about = {"dtype": dtype, "is_chat": records.is_chat, "files": files_from, "left_out": writer.left_out}
    (folder / "about.json").write_text(json.dumps(about))


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
