"""`Columns`: a bounded table that grows at one end: panels append rows, the live view sends them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows of a table.

    `first` is the number of the first row, counted from the table's last `clear`; `generation` counts the clears.
    `numbers` has one row for each column, so that a column is contiguous.
    """

    generation: int
    first: int
    numbers: Numbers
    texts: Mapping[str, list[str]]

    @property
    def rows(self) -> int:
        return int(self.numbers.shape[1])

    @property
    def next(self) -> int:
        return self.first + self.rows


class Columns:
    """A table with columns of float64 and, optionally, of text; only its last `limit` rows are kept.

    Rows are numbered from the last `clear`, so that a reader who remembers (generation, next row) can request what is
    new, and recognise a block received twice. Not synchronised: one thread writes and reads.
    """

    def __init__(self, name: str, numbers: Sequence[str], *, texts: Sequence[str] = (), limit: int = 1000) -> None:
        self.name = name
        self.numbers = tuple(numbers)
        self.texts = tuple(texts)
        self.limit = limit
        self.generation = 0
        self.next = 0
        self._ring = np.empty((len(self.numbers), 2 * limit))
        self._end = 0  # of the kept rows, in the ring
        self._texts: dict[str, deque[str]] = {name: deque(maxlen=limit) for name in self.texts}

    @property
    def first(self) -> int:
        return max(0, self.next - self.limit)

    def __len__(self) -> int:
        return self.next - self.first

    def append(self, rows: Sequence[Sequence[float]], texts: Mapping[str, Sequence[str]] | None = None) -> int:
        """Adds rows, each in the order of `numbers`; returns how many."""
        if not rows:
            return 0
        new = np.asarray(rows, dtype=np.float64).T[:, -self.limit :]
        if self._end + new.shape[1] > self._ring.shape[1]:
            kept = self._ring[:, max(0, self._end - self.limit) : self._end].copy()
            self._end = kept.shape[1]
            self._ring[:, : self._end] = kept
        self._ring[:, self._end : self._end + new.shape[1]] = new
        self._end += new.shape[1]
        self.next += len(rows)
        for name in self.texts:
            self._texts[name].extend((texts or {})[name])
        return len(rows)

    def clear(self) -> None:
        """Removes all rows; readers start again."""
        self.generation += 1
        self.next = self._end = 0
        for text in self._texts.values():
            text.clear()

    def replace(self, rows: Sequence[Sequence[float]], texts: Mapping[str, Sequence[str]] | None = None) -> int:
        self.clear()
        return self.append(rows, texts)

    def column(self, name: str) -> Numbers:
        """The kept rows of one column, oldest first: a view, valid until the next append."""
        return self._ring[self.numbers.index(name), self._end - len(self) : self._end]

    def since(self, generation: int, row: int) -> Block:
        """Rows from `row` on; all kept rows if that generation is over, or `row` is no longer kept."""
        first = max(row, self.first) if generation == self.generation else self.first
        count = self.next - first
        return Block(
            generation=self.generation,
            first=first,
            numbers=self._ring[:, self._end - count : self._end].copy(),
            texts={name: list(text)[len(text) - count :] for name, text in self._texts.items()},
        )

    def all(self) -> Block:
        return self.since(self.generation, 0)
