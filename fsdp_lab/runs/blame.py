"""`Blame`: where the time of each rank's steps went, in parts that add up to it; and who makes the others wait, and why.

A rank that waits in a collective waits for the last rank to issue it, until that rank does, and then for the transfer. So
"waiting for rank k" is told from a slow link. What makes rank k late is the part in which it takes longer than the others.

Source of the parts: `StepEvent.part_s`, `late`, `input_s`, `checkpoint_s`, `evaluation_s` and `exposed_comm_s`. Where ranks
do not share memory, as over NCCL, `late` is unknown: the transfer then has the waits for late ranks in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median, stdev
from typing import Any

from fsdp_lab.base.events import StepEvent
from fsdp_lab.base.formatting import Table, duration
from fsdp_lab.runs.steps import Step

WINDOW = 100  # the newest steps
LEAST = 0.03  # of the time: less is nobody's fault
_SURE = 2.5  # standard errors


class Part(StrEnum):
    COMPUTE = "compute"  # forward and backward
    OPTIMIZER = "optimizer"
    INPUT = "input"  # waiting for the data loader
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    HOST = "host"  # between two parts: logging, metrics, what is none of the others
    TRANSFER = "transfer"
    LATE = "waiting"  # for a rank that was not there yet


WHY = {
    Part.COMPUTE: "computes longer than the others",
    Part.OPTIMIZER: "steps its optimizer longer than the others",
    Part.INPUT: "waits for its input",
    Part.CHECKPOINT: "writes checkpoints",
    Part.EVALUATION: "evaluates",
    Part.HOST: "is busy between its steps",
    Part.TRANSFER: "waits for the link",
    Part.LATE: "waits for others",
}


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A rank for which the others wait. share: of the time, 0 to 1; all would gain as much without it."""

    rank: int
    share: float
    part: Part  # in which it takes longer than they do


@dataclass(frozen=True, kw_only=True)
class Blame:
    """seconds: by rank and part, of a mean step; those of a rank add up to the step's wall time. late: of `Part.LATE`, [rank
    that waits][rank that is waited for]. culprits: longest first."""

    steps: int
    seconds: Mapping[int, Mapping[Part, float]]
    late: Mapping[int, Mapping[int, float]]
    culprits: tuple[Culprit, ...]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Blame:
        """Of those of the steps that are whole and count: they were not slowed by measuring."""
        whole = [step.events for step in steps if step.is_whole and all(event.counts for event in step.events)]
        ranks = [event.rank for event in whole[0]] if whole else []
        parts = {rank: [_parts(events[i]) for events in whole] for i, rank in enumerate(ranks)}
        late = {rank: [dict(events[i].late) for events in whole] for i, rank in enumerate(ranks)}
        seconds = {rank: _mean(rows) for rank, rows in parts.items()}
        found = (_culprit(rank, parts, late) for rank in ranks if len(ranks) > 1)
        culprits = sorted((one for one in found if one is not None and one.share > LEAST), key=lambda one: -one.share)
        late_mean = {rank: _mean(rows) for rank, rows in late.items()}
        return cls(steps=len(whole), seconds=seconds, late=late_mean, culprits=tuple(culprits))

    @property
    def sentence(self) -> str:
        """Who wastes the time, and why."""
        if not self.steps:
            return "No whole step that counts has been recorded yet."
        said = [f"{c.share:.0%} of the time all wait for rank {c.rank}, which {WHY[c.part]}" for c in self.culprits]
        share, named = {part: self.share(part) for part in Part}, {c.part for c in self.culprits}
        own = [part for part in _NOUN if share[part] > LEAST and part not in named]
        said += [f"{share[part]:.0%} of all ranks' time goes to {_NOUN[part]}" for part in own]
        if len(self.seconds) > 1 and not self.culprits:
            said.insert(0, "no rank makes the others wait")
        if len(self.seconds) > 1:
            said.append(f"the transfer takes {share[Part.TRANSFER]:.0%}")
        text = "; ".join(said) or "all of the time goes to the model"
        return text[0].upper() + text[1:] + "."

    def share(self, part: Part) -> float:
        """Of the mean rank's time, 0 to 1."""
        whole = sum(sum(parts.values()) for parts in self.seconds.values())
        return sum(parts.get(part, 0.0) for parts in self.seconds.values()) / whole if whole else 0.0

    def table(self) -> Table:
        columns = ("rank", "step", *Part, "waits for")
        rows = []
        for rank, parts in sorted(self.seconds.items()):
            whole = sum(parts.values())
            late = sorted(self.late[rank].items(), key=lambda one: -one[1])
            cells = [f"{parts.get(part, 0.0) / whole:.1%}" for part in Part]
            names = ", ".join(
                f"rank {other} {seconds / whole:.0%}" for other, seconds in late if seconds / whole > 0.005
            )
            rows.append((str(rank), duration(whole), *cells, names or "–"))
        return Table(columns=columns, rows=tuple(rows), caption=self.sentence, left=frozenset({"waits for"}))

    def to_dict(self) -> dict[str, Any]:
        seconds = {str(rank): {part.value: s for part, s in parts.items()} for rank, parts in self.seconds.items()}
        late = {str(rank): {str(other): s for other, s in of_rank.items()} for rank, of_rank in self.late.items()}
        culprits = [{"rank": c.rank, "share": c.share, "part": c.part.value} for c in self.culprits]
        return {"steps": self.steps, "sentence": self.sentence, "culprits": culprits, "seconds": seconds, "late": late}

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


_NOUN = {
    Part.INPUT: "the input",
    Part.CHECKPOINT: "checkpoints",
    Part.EVALUATION: "evaluations",
    Part.HOST: "what the script does between its steps",
}


def _parts(event: StepEvent) -> dict[Part, float]:
    """The seconds of a step; they add up to its time."""
    exposed = event.exposed_comm_s if math.isfinite(event.exposed_comm_s) else 0.0
    late = min(exposed, sum(seconds for _, seconds in event.late))
    parts = {Part.LATE: late, Part.TRANSFER: exposed - late, Part.OPTIMIZER: event.part_s.get("optimizer", 0.0)}
    for part in (Part.INPUT, Part.CHECKPOINT, Part.EVALUATION):
        parts[part] = getattr(event, f"{part}_s") or 0.0
    named = parts[Part.INPUT] + parts[Part.CHECKPOINT] + parts[Part.EVALUATION]
    parts[Part.HOST] = max(0.0, event.part_s.get("", 0.0) - named)
    parts[Part.COMPUTE] = max(0.0, event.step_time_s - sum(parts.values()))
    return parts


def _culprit(
    rank: int, parts: Mapping[int, Sequence[Mapping[Part, float]]], late: Mapping[int, Sequence[Mapping[int, float]]]
) -> Culprit | None:
    """What a rank is blamed for: the time that the others wait for it, as far as it takes longer than they do in some part,
    and that not by chance: all ranks are late at times."""
    others = [other for other in parts if other != rank]
    excess: dict[Part, float] = {}
    for part in (part for part in Part if part not in (Part.TRANSFER, Part.LATE)):
        rows = [own[part] - median(parts[o][i][part] for o in others) for i, own in enumerate(parts[rank])]
        spread = stdev(rows) / math.sqrt(len(rows)) if len(rows) > 2 else math.inf
        if fmean(rows) > _SURE * spread:
            excess[part] = fmean(rows)
    if not excess:
        return None
    waited_s = min(fmean(row.get(rank, 0.0) for row in late[other]) for other in others)
    step_s = fmean(sum(row.values()) for row in parts[rank])
    share = min(waited_s, sum(excess.values())) / step_s
    return Culprit(rank=rank, share=share, part=max(excess, key=lambda part: excess[part]))


def _mean(rows: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: fmean(row.get(key, 0.0) for row in rows) for key in keys}
