"""`Source`: samples by their position in the data. Those of tokens, for each kind of language model, and images.

Packed, all samples are one after the other, and a row is a window of seq_len of that, which may hold several samples or a
part of one; a shorter rest is dropped. Padded, a row is one sample, with padding behind it that is neither attended to nor
predicted. Rows without any label (a window between two answers) are left out."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.cache import Progress
from fsdp_lab.models.data import FolderImages, Ids, SyntheticImages
from fsdp_lab.models.presets import Facts
from fsdp_lab.models.tokens import Tokenizer, Tokens
from fsdp_lab.spec.workload import Workload

Batch: TypeAlias = Any  # a dict of tensors by name; of a dataset of the user's own, any nest of tensors
Indices: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

MASKED_SHARE = 0.15
IGNORED = -100  # the label that transformers' losses leave out
_ROWS = 4096  # that are counted at once


class Source:
    """Samples by position in the data.

    Attributes:
        labels: how many labels count of each sample, all above 0; None: of every sample the same number.
        is_chat: whether samples are chats, whose answers are predicted."""

    count: int
    description: str
    fingerprint: str
    labels: Indices | None = None
    is_chat = False

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        """A batch; `samples` are the samples' global numbers, for what is random in each epoch."""
        raise NotImplementedError

    def held_out_batch(self, positions: Indices, counted: int) -> Batch:
        """A batch for evaluation; all but the first `counted` samples are padding, and have no labels."""
        batch = self.collate(positions, positions)
        batch["labels"][counted:] = IGNORED
        return batch


class ImageSource(Source):
    """Images and their classes."""

    def __init__(self, images: SyntheticImages | FolderImages) -> None:
        self._images = images
        self.count = images.count
        self.description, self.fingerprint = images.description, images.fingerprint

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        pixels, labels = zip(*(self._images.image(int(p)) for p in positions), strict=True)
        return {"pixel_values": torch.from_numpy(np.stack(pixels)), "labels": torch.tensor(labels)}


class Rows(NamedTuple):
    """Some rows, all (B, seq_len)."""

    ids: Ids
    is_token: Flags  # not padding
    is_wanted: Flags  # to be predicted: of chats, answers; never padding


class TokenSource(Source):
    """Rows of tokens that have labels. Raises SpecError if none has any."""

    def __init__(
        self, tokens: Tokens, tokenizer: Tokenizer, workload: Workload, facts: Facts, progress: Progress
    ) -> None:
        seq_len, self.is_padded = workload.seq_len, workload.packing == "padded"
        self._tokens, self._tokenizer, self._seq_len, self._seed = tokens, tokenizer, seq_len, workload.seed
        if self.is_padded:
            self._begins, self._ends = np.concatenate([[0], tokens.ends])[:-1], tokens.ends
            lengths = self._ends - self._begins
            if len(over := np.flatnonzero(lengths > seq_len)):
                first, most, longest = int(over[0]), int(lengths.max()), facts.max_positions
                fits = longest is None or most <= longest
                longer = f"a seq_len of {most}" if fits else f"a model with more than {longest} positions"
                begin = tokens.ids[self._begins[first] + np.arange(min(8, lengths[first]))]
                said = f"sample {first + 1} of {workload.data}, which begins with {tokenizer.decode(begin.tolist())!r}"
                reason = f"{said}, has {lengths[first]} tokens, more than seq_len {seq_len}"
                hint = f"use packing packed or {longer}, or shorten it"
                raise SpecError("workload.seq_len", reason, hint, {"seq_len": most} if fits else {"packing": "packed"})
        else:
            self._begins = np.arange(len(tokens.ids) // seq_len, dtype=np.int64) * seq_len
            self._ends = self._begins + seq_len
            if not len(self._begins):
                there = len(tokens.ids)
                reason = f"{workload.data} has {there} tokens, fewer than one sequence of {seq_len}"
                hint = "give more text" + (f", or seq_len {there} or less" if there > 1 else "")
                raise SpecError("workload.data", reason, hint)
        rows = np.arange(len(self._begins), dtype=np.int64)
        if not self.is_padded and tokens.answers is None and (alike := self._labels_of_full()):
            counts = np.full(len(rows), alike, dtype=np.int64)
        else:
            parts = [rows[:0]]
            for i in range(0, len(rows), _ROWS):
                parts.append(self._count(self._read(rows[i : i + _ROWS])))
                progress(False)  # after each part, since all tokens may be read
            counts = np.concatenate(parts)
        self._kept = np.flatnonzero(counts)
        self.count = len(self._kept)
        if not self.count:
            hint = "give other data" if tokens.answers is None else "name the role of the answers assistant"
            raise SpecError("workload.data", f"no sample of {workload.data} has anything to predict", hint)
        kept = counts[self._kept]
        self.labels = None if (kept == kept[0]).all() else kept
        self.fingerprint, self.is_chat = tokens.fingerprint, tokens.answers is not None
        kind, without = "rows" if self.is_padded else "windows", len(counts) - self.count
        left_out = (f"{without:,} {kind} without labels left out",) if without else ()
        self.description = f"{tokens.name} ({', '.join((*tokens.notes, *left_out))})"

    def _read(self, rows: Indices) -> Rows:
        """Rows of the data, also those without labels."""
        places = self._begins[rows][:, None] + np.arange(self._seq_len)
        is_token = places < self._ends[rows][:, None]
        places = np.where(is_token, places, 0)
        ids = np.where(is_token, self._tokens.ids[places].astype(np.int64), self._tokenizer.pad_id)
        answers = self._tokens.answers
        return Rows(ids, is_token, is_token if answers is None else is_token & answers[places].astype(np.bool_))

    def rows(self, positions: Indices) -> Rows:
        """Samples, before it is chosen what is predicted."""
        return self._read(self._kept[positions])

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        rows = self.rows(positions)
        batch = {name: torch.from_numpy(array) for name, array in self._tensors(rows, samples).items()}
        return batch if self.is_padded else {k: t for k, t in batch.items() if k != "attention_mask"}

    def _labels_of_full(self) -> int:
        """Returns how many labels count of a row of wanted tokens without padding; 0 where it depends on the row."""
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
        """Returns whether a token is of the second half; none is where there is only one token."""
        lengths = _counted(rows.is_token)
        halves = np.where(lengths > 1, lengths // 2, self._seq_len)
        return rows.is_token & (np.arange(self._seq_len) >= halves[:, None])

    def _tensors(self, rows: Rows, samples: Indices) -> dict[str, Ids]:
        second = self._second(rows)
        first, width = rows.is_token & ~second, self._seq_len // 2
        order = np.argsort(~second, axis=1, kind="stable")  # those of the second half first
        places = order[:, : self._seq_len - width]
        labels = np.where(second & rows.is_wanted, rows.ids, IGNORED)
        read = np.where(first, rows.ids, self._tokenizer.pad_id)
        return {
            "input_ids": np.ascontiguousarray(read[:, :width]),
            "attention_mask": first[:, :width].astype(np.int64),
            "labels": np.take_along_axis(labels, places, axis=1),
        }


class MaskedTokens(TokenSource):
    """15% of a row's tokens are predicted, at least one, never a special one: 80% of them show the mask, 10% a random token.

    The places depend on the sample's number, so they differ between epochs. Their number depends on the row alone."""

    def __init__(
        self, tokens: Tokens, tokenizer: Tokenizer, workload: Workload, facts: Facts, progress: Progress
    ) -> None:
        if tokenizer.mask_id is None:
            reason = f"{tokenizer.name} has no mask token, which a {facts.model_type} needs"
            raise SpecError("workload.tokenizer", reason, "give one that has, or use bytes", {"tokenizer": "bytes"})
        self._is_special = np.zeros(tokenizer.vocabulary, dtype=np.bool_)
        self._is_special[list(tokenizer.special_ids)] = True
        self._ordinary = np.flatnonzero(~self._is_special)
        self._mask_id = tokenizer.mask_id
        super().__init__(tokens, tokenizer, workload, facts, progress)

    def _labels_of_full(self) -> int:
        return 0 if self._tokens.has_special else max(1, round(MASKED_SHARE * self._seq_len))

    def _count(self, rows: Rows) -> Indices:
        tokens = _counted(rows.is_token)
        wanted: Indices = np.maximum(1, np.round(MASKED_SHARE * tokens)).astype(np.int64)
        return np.minimum(wanted, _counted(self._can_be_hidden(rows)))

    def _can_be_hidden(self, rows: Rows) -> Flags:
        return rows.is_wanted & ~self._is_special[rows.ids]

    def _tensors(self, rows: Rows, samples: Indices) -> dict[str, Ids]:
        labels = np.full_like(rows.ids, IGNORED)
        counts, can_be_hidden = self._count(rows), self._can_be_hidden(rows)
        for ids, label, places, count, sample in zip(rows.ids, labels, can_be_hidden, counts, samples, strict=True):
            random = np.random.default_rng((self._seed, int(sample)))
            chosen = random.permutation(np.flatnonzero(places))[:count]
            label[chosen] = ids[chosen]
            draws = random.random(count)
            ids[chosen[draws < 0.8]] = self._mask_id
            replaced = chosen[draws >= 0.9]
            ids[replaced] = self._ordinary[random.integers(0, len(self._ordinary), size=len(replaced))]
        return {"input_ids": rows.ids, "attention_mask": rows.is_token.astype(np.int64), "labels": labels}


def _counted(flags: Flags) -> Indices:
    counts: Indices = flags.sum(axis=1, dtype=np.int64)
    return counts
