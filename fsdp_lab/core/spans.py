"""`Span`: an interval of one rank's step; what the timeline draws and traces are exported from.

Floor 0. A traced step's event carries its spans, each as a flat list of plain scalars (`to_row`), so that a step of
hundreds is small on its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Track(StrEnum):
    """In which row of a rank's timeline a span stands; what it belongs to."""

    COMPUTE = "compute"  # the rank's own thread (on a GPU: stream) works: forward, backward, optimizer
    WAIT = "wait"  # it waits for a collective: exposed communication
    ALL_GATHER = "all_gather"  # these five: from issue to completion of one collective
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    CONTROL = "control"  # the lab's own vote
    OTHER = "other"  # broadcasts, barriers, all-to-alls, point to point
    HOST_COPY = "host_copy"  # between host and device, under offload

    @classmethod
    def of(cls, kind: str) -> Track:
        """The track of a kind of collective, as `fsdp_lab.wire` names it."""
        return cls(kind) if kind in (cls.ALL_GATHER, cls.REDUCE_SCATTER, cls.ALL_REDUCE, cls.CONTROL) else cls.OTHER


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Seconds are from the step's beginning (`StepEvent.begin_s`) on the rank's own clock.

    `name` says what was done: "forward", "backward", "optimizer" of computing, a collective's kind else. The fields from
    `sequence` on are those of collectives, and of the waits for them.
    """

    track: Track
    name: str
    unit: str  # such as "transformer.h.0"; "root"; "bucket 2" of DDP; "" where there is none
    start_s: float
    end_s: float
    sequence: int = -1  # the rank's own count of collectives
    ordinal: int = -1  # the group's: the same number on all its ranks is the same collective
    group: str = ""
    size: int = 1  # ranks in the group
    dtype: str = ""
    link_bytes: int = 0
    payload_bytes: int = 0  # the whole tensor: of an all-gather the output, of a reduce-scatter the input

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def algorithm_bytes_per_s(self) -> float | None:
        """Payload over time (nccl-tests' "algbw"); None where nothing was sent or no time passed."""
        return self.payload_bytes / self.seconds if self.payload_bytes and self.seconds > 0 else None

    @property
    def bus_bytes_per_s(self) -> float | None:
        """What one rank's link carried over time (nccl-tests' "busbw"); None as above."""
        return self.link_bytes / self.seconds if self.link_bytes and self.seconds > 0 else None

    def to_row(self) -> list[Any]:
        return [getattr(self, name) for name in _FIELDS]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Span:
        values = dict(zip(_FIELDS, row, strict=True))
        return cls(**{**values, "track": Track(values["track"])})


_FIELDS = tuple(f.name for f in dataclasses.fields(Span))


def exposed_by_unit(spans: Sequence[Span]) -> dict[str, float]:
    """Exposed communication of each unit in a traced step, in seconds: what was waited for its collectives.

    Waits of a step do not overlap (`fsdp_lab.wire.meter.exposed` counts every instant once), so the sum is the step's.
    """
    found: dict[str, float] = {}
    for span in spans:
        if span.track is Track.WAIT:
            found[span.unit] = found.get(span.unit, 0.0) + span.seconds
    return found
