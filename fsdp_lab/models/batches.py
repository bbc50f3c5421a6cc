"""`Batches`: which samples a rank trains on, and as which tensors.

All samples of a run are numbered, over all ranks, micro-batches and epochs. A sample's content depends on (data, seed, its
number) alone. So every backend, strategy and split over ranks reads the same global batch, and a run can resume from its
sample count at another world size.

The last samples of the data are held out for evaluation; training never reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fsdp_lab.core.spec import Workload
from fsdp_lab.models.check import IMAGES, check_held_out, check_shapes, checked_text, held_out_count
from fsdp_lab.models.data import BYTE_OFFSET, FolderImages, Ids, SyntheticImages, Text, encode
from fsdp_lab.models.presets import Kind, facts_of

Batch: TypeAlias = dict[str, Tensor]
Indices: TypeAlias = npt.NDArray[np.int64]

MASKED_SHARE = 0.15
MASK_ID = 2  # ByT5's <unk>, which no byte maps to
IGNORED = -100  # the label that transformers' losses leave out


class Source:
    """Samples by position in the data."""

    count: int
    description: str
    fingerprint: str

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        """A batch; `samples` are the samples' global numbers, for what is random in each epoch."""
        raise NotImplementedError


class Order:
    """Sample number -> position in the data: one permutation per epoch, drawn from the seed."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epochs: dict[int, Indices] = {}

    def __call__(self, samples: Indices) -> Indices:
        """Positions of samples, of the same shape."""
        epochs, places = np.divmod(samples, self._count)
        positions = np.empty_like(samples)
        for epoch in np.unique(epochs):
            is_in_epoch = epochs == epoch
            positions[is_in_epoch] = self._permutation(int(epoch))[places[is_in_epoch]]
        return positions

    def _permutation(self, epoch: int) -> Indices:
        if epoch not in self._epochs:
            # A batch is in one epoch or in two consecutive ones.
            self._epochs = {e: p for e, p in self._epochs.items() if abs(e - epoch) <= 1}
            self._epochs[epoch] = np.random.default_rng((self._seed, epoch)).permutation(self._count)
        return self._epochs[epoch]


class Batches:
    """Batches of one rank.

    Args:
        workload: its model's kind decides the tensors; data, seq_len, micro_batch and seed decide the samples.
        config: the transformers config of the model, from `resolve`.
        source: the `source` of another Batches of the same data, seq_len, seed and model, to load it once.

    Raises:
        SpecError: data that cannot be read, is too short, or does not suit this kind of model.
    """

    def __init__(
        self, workload: Workload, config: Any, *, rank: int, world_size: int, source: Source | None = None
    ) -> None:
        self.source = source or open_source(workload, config)
        self._order = Order(self.source.count - held_out_count(workload, self.source.count), workload.seed)
        self._workload, self._size = workload, workload.micro_batch
        self._rank, self._world_size = rank, world_size

    def batch(self, samples_before: int, micro: int = 0) -> Batch:
        """Tensors on the CPU for micro-batch `micro` of the step that begins at sample `samples_before`.

        Causal: input_ids, labels (B, S); the model shifts the labels. Masked: the same with 15% of the positions hidden, and
        labels at those alone. Encoder-decoder: input_ids (B, S // 2) is the first half of a window, labels (B, S - S // 2)
        the second. Images: pixel_values (B, C, H, W), labels (B,). Every sample of a kind has the same number of labels, so
        that the mean of the ranks' mean losses is the mean over the global batch."""
        samples = self.samples(samples_before, micro)
        return self.source.collate(self._order(samples), samples)

    def held_out(self, count: int) -> Iterator[tuple[Batch, int]]:
        """This rank's part of `count` held-out samples, as (batch, number of its samples that count).

        The samples are spread evenly over all that are held out and do not depend on world size or micro-batch. All ranks
        get the same number of batches of one shape; padding samples in the last ones have no labels.

        Raises:
            SpecError: fewer samples are held out.
        """
        self.check_held_out(count)
        held = held_out_count(self._workload, self.source.count)
        positions = self.source.count - held + np.arange(count, dtype=np.int64) * held // count
        for begin in range(self._rank * self._size, count + self._rank * self._size, self._world_size * self._size):
            counted = min(max(count - begin, 0), self._size)
            chosen = positions[np.minimum(np.arange(begin, begin + self._size), count - 1)]
            batch = self.source.collate(chosen, chosen)
            batch["labels"][counted:] = IGNORED
            yield batch, counted

    def check_held_out(self, count: int) -> None:
        """Raises SpecError if fewer samples are held out."""
        check_held_out(self._workload, self.source.count, count)

    def samples(self, samples_before: int, micro: int = 0) -> Indices:
        """The global numbers of the samples of `batch(samples_before, micro)`."""
        first = samples_before + (micro * self._world_size + self._rank) * self._size
        return np.arange(first, first + self._size, dtype=np.int64)


def open_source(workload: Workload, config: Any) -> Source:
    """The workload's samples, for the kind of model of `config`. Raises SpecError."""
    facts = facts_of(config)
    check_shapes(workload, facts)
    if facts.kind == "image":
        return ImageSource(SyntheticImages(facts) if workload.data == IMAGES else FolderImages(workload.data, facts))
    sources: dict[Kind, type[TextSource]] = {"causal": CausalText, "masked": MaskedText, "seq2seq": HalvedText}
    return sources[facts.kind](checked_text(workload), workload.seq_len, workload.seed)


# -- samples of each kind --------------------------------------------------------------------------------------------


class TextSource(Source):
    """Consecutive windows of a text, `seq_len` bytes each."""

    def __init__(self, text: Text, seq_len: int, seed: int) -> None:
        self._windows = text.windows(seq_len)
        self._seed = seed
        self.count = len(self._windows)
        self.description, self.fingerprint = text.description, text.fingerprint


class CausalText(TextSource):
    """The model predicts the next byte; transformers shifts the labels."""

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        ids = torch.from_numpy(encode(self._windows[positions]))
        return {"input_ids": ids, "labels": ids.clone()}


class HalvedText(TextSource):
    """The encoder reads the first half of a window, the decoder predicts the second.

    T5 was trained on corrupted spans, but those need ids that not every vocabulary has.
    """

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        ids = torch.from_numpy(encode(self._windows[positions]))
        half = ids.shape[1] // 2
        return {"input_ids": ids[:, :half].contiguous(), "labels": ids[:, half:].contiguous()}


class MaskedText(TextSource):
    """15% of the positions, at least one, are predicted: 80% of them show MASK_ID, 10% a random byte.

    The positions depend on the sample's number, so they differ between epochs. Their number is always the same.
    """

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        ids = encode(self._windows[positions])
        labels = np.full_like(ids, IGNORED)
        for row, sample in enumerate(samples):
            self._hide(ids[row], labels[row], int(sample))
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}

    def _hide(self, ids: Ids, labels: Ids, sample: int) -> None:
        """Changes one sample's ids and labels, both (seq_len,), in place."""
        random = np.random.default_rng((self._seed, sample))
        chosen = random.permutation(len(ids))[: max(1, round(MASKED_SHARE * len(ids)))]
        labels[chosen] = ids[chosen]
        draws = random.random(len(chosen))
        ids[chosen[draws < 0.8]] = MASK_ID
        replaced = chosen[draws >= 0.9]
        ids[replaced] = random.integers(0, 256, size=len(replaced)) + BYTE_OFFSET


class ImageSource(Source):
    """Images and their classes."""

    def __init__(self, images: SyntheticImages | FolderImages) -> None:
        self._images = images
        self.count = images.count
        self.description, self.fingerprint = images.description, images.fingerprint

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        pixels, labels = zip(*(self._images.image(int(p)) for p in positions), strict=True)
        return {"pixel_values": torch.from_numpy(np.stack(pixels)), "labels": torch.tensor(labels)}
