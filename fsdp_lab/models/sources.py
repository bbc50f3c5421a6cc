"""`Source`: samples by their position in the data, and what all kinds of samples share."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Batch: TypeAlias = Any  # a dict of tensors by name; of a dataset of the user's own, any nest of tensors
Indices: TypeAlias = npt.NDArray[np.int64]

MASKED_SHARE = 0.15
IGNORED = -100  # the label that transformers' losses leave out


class Source:
    """Samples by position in the data.

    Attributes:
        is_even: whether all of the data's rows are samples, with the same number of labels.
        labels: how many labels count of each sample, all above 0; None: of every sample the same number.
    """

    is_even = True
    count: int
    description: str
    fingerprint: str
    labels: Indices | None = None

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        """A batch; `samples` are the samples' global numbers, for what is random in each epoch."""
        raise NotImplementedError

    def held_out_batch(self, positions: Indices, counted: int) -> Batch:
        """A batch for evaluation; all but the first `counted` samples are padding, and have no labels."""
        batch = self.collate(positions, positions)
        batch["labels"][counted:] = IGNORED
        return batch
