"""Samples of tokens, for each kind of language model: rows of a `Tokens`, `PackedRows` or `PaddedRows`, and their labels.

Packed, all samples are one after the other, and a row is a window of seq_len of that, which may hold several samples or a
part of one; a shorter rest is dropped. Padded, a row is one sample, with padding behind it that is neither attended to nor
predicted. Rows without any label (a window between two answers) are left out.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.workload import Workload
from fsdp_lab.models.cache import Progress
from fsdp_lab.models.data import Ids
from fsdp_lab.models.presets import Facts
from fsdp_lab.models.sources import IGNORED, MASKED_SHARE, Batch, Indices, Source
from fsdp_lab.models.tokenizers import Tokenizer
from fsdp_lab.models.tokens import Tokens

Flags: TypeAlias = npt.NDArray[np.bool_]

_ROWS = 4096  # that are counted at once


class Rows(NamedTuple):
    """Some rows, all (B, seq_len)."""

    ids: Ids
    is_token: Flags  # not padding
    is_wanted: Flags  # to be predicted: of chats, answers; never padding


class PackedRows:
    """Windows. Raises SpecError if there is none."""

    is_padded = False

    def __init__(self, tokens: Tokens, seq_len: int, name: str) -> None:
        self.count, self.all_wanted = len(tokens.ids) // seq_len, tokens.answers is None
        if not self.count:
            there = len(tokens.ids)
            raise SpecError("workload.data", f"{name} has {there} tokens, fewer than one sequence of {seq_len}",
                            "give more text" + (f", or seq_len {there} or less" if there > 1 else ""))  # fmt: skip
        self._ids = tokens.ids[: self.count * seq_len].reshape(self.count, seq_len)
        self._answers = None if tokens.answers is None else tokens.answers[: self._ids.size].reshape(self._ids.shape)

    def read(self, rows: Indices) -> Rows:
        ids = self._ids[rows].astype(np.int64)
        is_token = np.ones(ids.shape, dtype=np.bool_)
        return Rows(ids, is_token, is_token if self._answers is None else self._answers[rows].astype(np.bool_))


class PaddedRows:
    """Samples with padding. Raises SpecError if one is longer than a row."""

    is_padded, all_wanted = True, False

    def __init__(self, tokens: Tokens, seq_len: int, pad_id: int, longest: int | None) -> None:
        self._tokens, self._pad_id, self._places = tokens, pad_id, np.arange(seq_len)
        self._begins = np.concatenate([[0], tokens.ends[:-1]]) if len(tokens.ends) else tokens.ends
        self.count = len(tokens.ends)
        lengths = tokens.ends - self._begins
        over = np.flatnonzero(lengths > seq_len)
        if len(over):
            raise _too_long(tokens.place(int(over[0])), int(lengths[over[0]]), int(lengths.max()), seq_len, longest)

    def read(self, rows: Indices) -> Rows:
        begins = self._begins[rows][:, None]
        is_token = begins + self._places < self._tokens.ends[rows][:, None]
        where = np.where(is_token, begins + self._places, 0)
        ids = np.where(is_token, self._tokens.ids[where].astype(np.int64), self._pad_id)
        answers = self._tokens.answers
        return Rows(ids, is_token, is_token if answers is None else is_token & answers[where].astype(np.bool_))


def _too_long(place: str, length: int, most: int, seq_len: int, longest: int | None) -> SpecError:
    fits = longest is None or most <= longest
    longer = f"a seq_len of {most}" if fits else f"a model with more than {longest} positions"
    return SpecError("workload.seq_len", f"{place} has {length} tokens, more than seq_len {seq_len}",
                     f"use packing packed or {longer}, or shorten it",
                     {"seq_len": most} if fits else {"packing": "packed"})  # fmt: skip


# -- samples of each kind --------------------------------------------------------------------------------------------


class TokenSource(Source):
    """Rows of tokens that have labels. Raises SpecError if none has any."""

    def __init__(self, tokens: Tokens, tokenizer: Tokenizer, workload: Workload, facts: Facts,
                 progress: Progress) -> None:  # fmt: skip
        seq_len = workload.seq_len
        self._rows = (PackedRows(tokens, seq_len, workload.data) if workload.packing == "packed" else
                      PaddedRows(tokens, seq_len, tokenizer.pad_id, facts.max_positions))  # fmt: skip
        self._tokenizer, self._seq_len, self._seed = tokenizer, seq_len, workload.seed
        counts = self._count_all(progress)
        self._kept = np.flatnonzero(counts)
        self.count = len(self._kept)
        if not self.count:
            raise SpecError("workload.data", f"no sample of {workload.data} has anything to predict", "give other data")
        kept = counts[self._kept]
        self.labels = None if (kept == kept[0]).all() else kept
        self.is_even = self.labels is None and self.count == len(counts)
        self.fingerprint = tokens.fingerprint
        self.description = self._describe(workload, tokens, len(counts) - self.count)

    def _describe(self, workload: Workload, tokens: Tokens, without_labels: int) -> str:
        parts = [f"{len(tokens.ends):,} samples", f"{len(tokens.ids):,} tokens of {self._tokenizer.name}"]
        parts += [f"{tokens.left_out:,} without text left out"] if tokens.left_out else []
        rows = "rows" if self._rows.is_padded else "windows"
        parts += [f"{without_labels:,} {rows} without labels left out"] if without_labels else []
        return f"{workload.data} ({', '.join(parts)})"

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        rows = self._rows.read(self._kept[positions])
        batch = {name: torch.from_numpy(array) for name, array in self._tensors(rows, samples).items()}
        return batch if self._rows.is_padded else {k: t for k, t in batch.items() if k != "attention_mask"}

    def _count_all(self, progress: Progress) -> Indices:
        """How many labels count of each row. `progress` is called after each part, since all tokens may be read."""
        rows = np.arange(self._rows.count, dtype=np.int64)
        if self._rows.all_wanted and (alike := self._labels_of_full()):
            return np.full(len(rows), alike, dtype=np.int64)
        parts = []
        for i in range(0, len(rows), _ROWS):
            parts.append(self._count(self._rows.read(rows[i : i + _ROWS])))
            progress()
        return np.concatenate(parts) if parts else rows

    def _labels_of_full(self) -> int:
        """How many labels count of a row without padding all of whose tokens are wanted; 0 where it depends on the row."""
        raise NotImplementedError

    def _count(self, rows: Rows) -> Indices:
        raise NotImplementedError

    def _tensors(self, rows: Rows, samples: Indices) -> dict[str, Ids]:
        raise NotImplementedError


class CausalTokens(TokenSource):
    """Each token is predicted from those before it: the model shifts the labels, and the first is not predicted."""

    def _labels_of_full(self) -> int:
        return self._seq_len - 1

    def _count(self, rows: Rows) -> Indices:
        return _counted(rows.is_wanted[:, 1:])

    def _tensors(self, rows: Rows, samples: Indices) -> dict[str, Ids]:
        labels = np.where(rows.is_wanted, rows.ids, IGNORED)
        return {"input_ids": rows.ids, "attention_mask": rows.is_token.astype(np.int64), "labels": labels}


class HalvedTokens(TokenSource):
    """The encoder reads the first half of a row's tokens, the decoder predicts the second."""

    def _labels_of_full(self) -> int:
        return self._seq_len - self._seq_len // 2

    def _count(self, rows: Rows) -> Indices:
        return _counted(self._second(rows) & rows.is_wanted)

    def _second(self, rows: Rows) -> Flags:
        """Whether a token is of the second half; none is where there is only one token."""
        lengths = _counted(rows.is_token)
        halves = np.where(lengths > 1, lengths // 2, self._seq_len)
        return rows.is_token & (np.arange(self._seq_len) >= halves[:, None])

    def _tensors(self, rows: Rows, samples: Indices) -> dict[str, Ids]:
        second = self._second(rows)
        first, width = rows.is_token & ~second, self._seq_len // 2
        places = np.argsort(~second, axis=1, kind="stable")[
            :, : self._seq_len - width
        ]  # those of the second half first
        labels = np.where(second & rows.is_wanted, rows.ids, IGNORED)
        read = np.where(first, rows.ids, self._tokenizer.pad_id)
        return {
            "input_ids": np.ascontiguousarray(read[:, :width]),
            "attention_mask": first[:, :width].astype(np.int64),
            "labels": np.take_along_axis(labels, places, axis=1),
        }


class MaskedTokens(TokenSource):
    """15% of a row's tokens are predicted, at least one, never a special one: 80% of them show the mask, 10% a random token.

    The places depend on the sample's number, so they differ between epochs. Their number depends on the row alone.
    """

    def __init__(self, tokens: Tokens, tokenizer: Tokenizer, workload: Workload, facts: Facts,
                 progress: Progress) -> None:  # fmt: skip
        if tokenizer.mask_id is None:
            raise SpecError("workload.tokenizer", f"{tokenizer.name} has no mask token, which a {facts.model_type} needs",
                            "give one that has, or use bytes", {"tokenizer": "bytes"})  # fmt: skip
        self._is_special = np.zeros(tokenizer.vocabulary, dtype=np.bool_)
        self._is_special[list(tokenizer.special_ids)] = True
        self._ordinary = np.flatnonzero(~self._is_special)
        self._mask_id = tokenizer.mask_id
        super().__init__(tokens, tokenizer, workload, facts, progress)

    def _labels_of_full(self) -> int:
        return 0

    def _count(self, rows: Rows) -> Indices:
        tokens = _counted(rows.is_token)
        wanted: Indices = np.maximum(1, np.round(MASKED_SHARE * tokens)).astype(np.int64)
        return np.minimum(wanted, _counted(self._can_be_hidden(rows)))

    def _can_be_hidden(self, rows: Rows) -> Flags:
        return rows.is_wanted & ~self._is_special[rows.ids]

    def _tensors(self, rows: Rows, samples: Indices) -> dict[str, Ids]:
        labels = np.full_like(rows.ids, IGNORED)
        counts, can_be_hidden = self._count(rows), self._can_be_hidden(rows)
        for row, sample in enumerate(samples):
            self._hide(rows.ids[row], labels[row], np.flatnonzero(can_be_hidden[row]), int(counts[row]), int(sample))
        return {"input_ids": rows.ids, "attention_mask": rows.is_token.astype(np.int64), "labels": labels}

    def _hide(self, ids: Ids, labels: Ids, places: Indices, count: int, sample: int) -> None:
        """Changes one sample's ids and labels, both (seq_len,), in place."""
        random = np.random.default_rng((self._seed, sample))
        chosen = random.permutation(places)[:count]
        labels[chosen] = ids[chosen]
        draws = random.random(count)
        ids[chosen[draws < 0.8]] = self._mask_id
        replaced = chosen[draws >= 0.9]
        ids[replaced] = self._ordinary[random.integers(0, len(self._ordinary), size=len(replaced))]


def _counted(flags: Flags) -> Indices:
    """How many are set in each row."""
    counts: Indices = flags.sum(axis=1, dtype=np.int64)
    return counts
