"""`Batches`: which samples a rank trains on, and as which tensors.

All samples of a run are numbered, over all ranks, micro-batches and epochs. A sample's content depends on (data, seed, its
number) alone. So every backend, strategy and split over ranks reads the same global batch, and a run can resume from its
sample count at another world size. The last samples are held out for evaluation; training never reads them.

Note: samples with different numbers of labels (padding, chats). The loss of a step is the mean over all labels of the
global batch, however it is split. A model's loss is the mean over one micro-batch, of which the backends take the mean,
which would count a label of a short sample for more. So `Batches` gives each micro-batch the weight

    labels of the micro-batch x world_size x accumulate / labels of the global batch

by which its loss is multiplied. Every rank knows the numbers of all samples' labels, so that nothing is sent. Labels are
counted as the loss does: a causal model does not predict a row's first token."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from fsdp_lab.models import check, sources
from fsdp_lab.models.cache import Progress, no_progress
from fsdp_lab.models.check import check_held_out, checked_records, checked_text, held_out_count, is_plain
from fsdp_lab.models.data import FolderImages, SyntheticImages
from fsdp_lab.models.presets import Kind, facts_of
from fsdp_lab.models.sources import Batch, CausalTokens, HalvedTokens, Indices, MaskedTokens, Source, TokenSource
from fsdp_lab.models.tokens import ByteTokenizer, Tokenizer, bytes_as_tokens, open_tokenizer, open_tokens
from fsdp_lab.spec.workload import SAMPLES, Workload


class Order:
    """Sample number -> position in the data: one permutation per epoch, drawn from the seed."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed
        self._epochs: dict[int, Indices] = {}

    def __call__(self, samples: Indices) -> Indices:
        """Positions of samples, of the same shape."""
        epochs, places = np.divmod(samples, self._count)
        positions = np.empty_like(samples)
        for epoch in map(int, np.unique(epochs)):
            if epoch not in self._epochs:
                # A batch is in one epoch or in two consecutive ones.
                self._epochs = {e: p for e, p in self._epochs.items() if abs(e - epoch) <= 1}
                self._epochs[epoch] = np.random.default_rng((self._seed, epoch)).permutation(self._count)
            is_in_epoch = epochs == epoch
            positions[is_in_epoch] = self._epochs[epoch][places[is_in_epoch]]
        return positions


SOURCE_FIELDS = (*SAMPLES, "model", "seed")


class Batches:
    """Batches of one rank.

    Args:
        workload: its model's kind decides the tensors; data, seq_len, micro_batch and seed decide the samples.
        config: the transformers config of the model, from `resolve`; None with a `source`.
        source: the `source` of another Batches that differs in no field of `SOURCE_FIELDS`, to load it once.
        progress: what to call while the data is made into tokens.

    Raises SpecError: data that cannot be read, is too short, or does not suit this kind of model."""

    def __init__(self, workload: Workload, config: Any, *, rank: int, world_size: int, source: Source | None = None,
                 progress: Progress = no_progress) -> None:  # fmt: skip
        self.source = source or open_source(workload, config, progress)
        self._order = Order(self.source.count - held_out_count(workload, self.source.count), workload.seed)
        self._workload, self._size = workload, workload.micro_batch
        self._rank, self._world_size = rank, world_size

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The workload's tokenizer, to continue texts with. Raises SpecError."""
        return open_tokenizer(self._workload)

    def batch(self, samples_before: int, micro: int = 0) -> Batch:
        """Tensors on the CPU for micro-batch `micro` of the step that begins at sample `samples_before`.

        Causal: input_ids, labels (B, S); the model shifts the labels. Masked: the same with 15% of the positions hidden, and
        labels at those alone. Encoder-decoder: input_ids (B, S // 2) is the first half of a window, labels (B, S - S // 2)
        the second. Images: pixel_values (B, C, H, W), labels (B,). With padding there is an attention_mask (B, S) as well,
        1 at tokens."""
        samples = self.samples(samples_before, micro)
        return self.source.collate(self._order(samples), samples)

    def weight(self, samples_before: int, micro: int = 0) -> float:
        """The factor of the mean loss of `batch(samples_before, micro)`: see the note. It is 1 in the mean."""
        if self.source.labels is None:
            return 1.0
        parts = self._world_size * self._workload.accumulate
        step = np.arange(samples_before, samples_before + parts * self._size, dtype=np.int64)
        labels = self.source.labels[self._order(self.samples(samples_before, micro))].sum()
        return float(labels) * parts / float(self.source.labels[self._order(step)].sum())

    def held_out(self, count: int) -> Iterator[tuple[Batch, float]]:
        """This rank's part of `count` held-out samples, or of all, as (batch, for how many samples its mean loss counts).

        That is the number of its samples, or, where they have different numbers of labels, its share of all labels times
        `count`. The samples are spread evenly over all that are held out and do not depend on world size or micro-batch.
        All ranks get the same number of batches of one shape; those that fill up the last ones have no labels.

        Raises SpecError: no samples are held out."""
        count = self.check_held_out(count)
        held = held_out_count(self._workload, self.source.count)
        positions = self.source.count - held + np.arange(count, dtype=np.int64) * held // count
        labels = self.source.labels
        total = 0.0 if labels is None else float(labels[positions].sum())
        for begin in range(self._rank * self._size, count + self._rank * self._size, self._world_size * self._size):
            counted = min(max(count - begin, 0), self._size)
            chosen = positions[np.minimum(np.arange(begin, begin + self._size), count - 1)]
            share = counted if labels is None else count * float(labels[chosen[:counted]].sum()) / total
            yield self.source.held_out_batch(chosen, counted), share

    def check_held_out(self, count: int) -> int:
        """Returns how many samples `held_out(count)` has. Raises SpecError if there are none."""
        return check_held_out(self._workload, self.source.count, count)

    def samples(self, samples_before: int, micro: int = 0) -> Indices:
        """The global numbers of the samples of `batch(samples_before, micro)`."""
        first = samples_before + (micro * self._world_size + self._rank) * self._size
        return np.arange(first, first + self._size, dtype=np.int64)


def open_source(workload: Workload, config: Any, progress: Progress = no_progress) -> Source:
    """The workload's samples, for the kind of model of `config`. Raises SpecError."""
    facts = facts_of(config)
    check.check_shapes(workload, facts)
    if facts.kind == "image":
        is_made = workload.data == check.IMAGES
        return sources.ImageSource(SyntheticImages(facts) if is_made else FolderImages(workload.data, facts))
    if is_plain(workload):
        tokenizer: Tokenizer = ByteTokenizer()
        tokens = bytes_as_tokens(checked_text(workload))
    else:
        records, tokenizer = checked_records(workload, facts)
        tokens = open_tokens(records, tokenizer, whole=workload.packing == "padded", progress=progress)
    kinds: dict[Kind, type[TokenSource]] = {"causal": CausalTokens, "masked": MaskedTokens, "seq2seq": HalvedTokens}
    return kinds[facts.kind](tokens, tokenizer, workload, facts, progress)
