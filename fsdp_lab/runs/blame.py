"""`Blame`: where the time of each rank's steps went, in parts that add up to it; and who makes the others wait, and why.

A rank that waits in a collective waits for the last rank to issue it, until that rank does, and then for the transfer. So
"waiting for rank k" is told from a slow link. What makes rank k late is the part in which it takes longer than the others.

Note: what would be gained without it. The rank that waits least for rank k comes next: without what makes rank k late, the
others would wait for that one, by as much as it waits less for rank k than they do.

Note: sources. `StepEvent.part_s` and `exposed_comm_s` are of any step, `late` where ranks share memory. Where no step of a
run has it, as over Gloo or NCCL, it is found in the traced steps by the clocks of all ranks, and the same share of exposed
communication is taken for the other steps."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median_high, stdev
from typing import Any

from fsdp_lab.base.events import StepEvent
from fsdp_lab.base.formatting import Table, duration, plural, size
from fsdp_lab.runs.steps import EventStore, Step
from fsdp_lab.runs.timeline import late_in_trace

WINDOW = 100  # the newest steps
TRACES = 16  # traced steps, which may be older
LEAST = 0.03  # of the time: less is nobody's fault
_SURE = 3.5  # standard errors: each run has some thirty chances


class Part(StrEnum):
    COMPUTE = "compute"  # forward and backward
    OPTIMIZER = "optimizer"
    INPUT = "input"  # waiting for the data loader
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    HOST = "host"  # between two parts: logging, metrics, clipping, what is none of the others
    TRANSFER = "transfer"
    LATE = "waiting"  # for a rank that was not there yet


WHY = {
    Part.COMPUTE: "takes longer from its forward to the end of its backward",
    Part.OPTIMIZER: "steps its optimizer longer than the others",
    Part.INPUT: "waits for its input",
    Part.CHECKPOINT: "writes checkpoints",
    Part.EVALUATION: "evaluates",
    Part.HOST: "is busy beside the model",
    Part.TRANSFER: "waits for the link",
    Part.LATE: "waits for others",
}


OWN = tuple(part for part in Part if part not in (Part.TRANSFER, Part.LATE))
_Waits = dict[int, float]  # seconds, by the rank that is waited for
_Events = Sequence[Sequence[StepEvent]]  # of steps, of all ranks


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A rank for which the others wait. Shares are of the time, 0 to 1."""

    rank: int
    share: float  # in which the median rank waits for it
    gain: float  # by which steps were shorter if it took no longer than the others
    following: int  # the rank for which they would wait next
    part: Part  # in which it takes longer than they do

    @property
    def sentence(self) -> str:
        without = f"{self.gain:.0%} shorter" if self.gain > LEAST else "no shorter"
        next_one = f", as rank {self.following} comes next" if self.share - self.gain > LEAST else ""
        what = f"{self.share:.0%} of the time all wait for rank {self.rank}, which {WHY[self.part]}"
        return f"{what}; without that, steps would be {without}{next_one}"


@dataclass(frozen=True, kw_only=True)
class Blame:
    """seconds: by rank and part, of a mean step; those of a rank add up to the step's wall time. late: of `Part.LATE`, [rank
    that waits][rank that is waited for]. culprits: longest first. calls, sent_bytes: collectives of a mean rank and step."""

    steps: int
    seconds: Mapping[int, Mapping[Part, float]]
    late: Mapping[int, Mapping[int, float]]
    culprits: tuple[Culprit, ...]
    calls: float = 0.0
    sent_bytes: float = 0.0

    @classmethod
    def newest(cls, events: EventStore, last: int = WINDOW) -> "Blame":
        """Of the last steps of a run."""
        return cls.of(events.last_steps(last), events.traced()[-TRACES:])

    @classmethod
    def of(cls, steps: Sequence[Step], traced: Sequence[Step] = ()) -> "Blame":
        """Of those of the steps that are whole and count: they were not slowed by measuring. `traced`: steps of the same run
        that tell who was late, where most of these do not."""
        whole = [step.events for step in steps if step.is_whole and all(event.counts for event in step.events)]
        ranks = [event.rank for event in whole[0]] if whole else []
        alike = [s.events for s in traced if s.is_whole and whole and s.spec_id == whole[0][0].spec_id]
        waits = _waits(whole, alike or whole)
        parts = {r: [_parts(events[i], waits[r][n]) for n, events in enumerate(whole)] for i, r in enumerate(ranks)}
        excess = _excess(parts) if len(ranks) > 1 else {}
        found = [_culprit(rank, longer, parts, waits) for rank, longer in excess.items() if longer]
        traffic = [t for events in whole for event in events for t in event.comm.values()]
        count = max(1, len(ranks) * len(whole))
        return cls(
            steps=len(whole),
            seconds={rank: _mean(rows) for rank, rows in parts.items()},
            late={rank: _mean(rows) for rank, rows in waits.items()},
            culprits=tuple(sorted((c for c in found if c.share > LEAST), key=lambda c: -c.share)),
            calls=sum(t.calls for t in traffic) / count,
            sent_bytes=sum(t.link_bytes for t in traffic) / count,
        )

    @property
    def sentence(self) -> str:
        """Who wastes the time, and why."""
        if not self.steps:
            return "No whole step that counts has been recorded yet."
        said = [c.sentence for c in self.culprits]
        share, named = {part: self.share(part) for part in Part}, {c.part for c in self.culprits}
        own = [part for part in _NOUN if share[part] > LEAST and part not in named]
        said += [f"{share[part]:.0%} of all ranks' time goes to {_NOUN[part]}" for part in own]
        if len(self.seconds) > 1 and not self.culprits:
            said.insert(0, "no rank makes the others wait")
        if len(self.seconds) > 1:
            said.append(f"the transfer takes {share[Part.TRANSFER]:.0%}{self._each}")
        text = "; ".join(said) or "all of the time goes to the model"
        return text[0].upper() + text[1:] + "."

    @property
    def _each(self) -> str:
        """What a collective sends, and how long it is waited for after the last rank has come: a slow link is seen there."""
        if self.share(Part.TRANSFER) <= LEAST or not self.calls:
            return ""
        seconds = fmean(parts[Part.TRANSFER] for parts in self.seconds.values()) / self.calls
        many = plural(round(self.calls), "collective")
        return f": {many} a step, of {size(self.sent_bytes / self.calls)} and {duration(seconds)} each"

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
            shares = ((other, seconds / whole) for other, seconds in late)
            names = ", ".join(f"rank {other} {share:.0%}" for other, share in shares if share > 0.005)
            rows.append((str(rank), duration(whole), *cells, names or "–"))
        return Table(columns=columns, rows=tuple(rows), caption=self.sentence, left=frozenset({"waits for"}))

    def to_dict(self) -> dict[str, Any]:
        seconds = {str(rank): {part.value: s for part, s in parts.items()} for rank, parts in self.seconds.items()}
        late = {str(rank): {str(other): s for other, s in of_rank.items()} for rank, of_rank in self.late.items()}
        culprits = [dataclasses.asdict(c) for c in self.culprits]
        return {"steps": self.steps, "sentence": self.sentence, "culprits": culprits, "seconds": seconds, "late": late}

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


_NOUN = {
    Part.INPUT: "the input",
    Part.CHECKPOINT: "checkpoints",
    Part.EVALUATION: "evaluations",
    Part.HOST: "what the script does beside the model",
}


def _waits(steps: _Events, traces: _Events) -> dict[int, list[_Waits]]:
    """Rank -> of each step, its waits for others: no longer than its exposed communication, where that is known."""
    told = any(event.late for events in steps for event in events)
    traced = [] if told else [(events, row) for events in traces if (row := late_in_trace(events))]
    found: dict[int, list[_Waits]] = {}
    for i, rank in enumerate(event.rank for event in (steps[0] if steps else ())):
        mean: _Waits = _mean([row[rank] for _, row in traced])
        mean_s = fmean([events[i].exposed_comm_s for events, _ in traced] or [math.nan])  # NaN: unknown
        found[rank] = []
        for event in (events[i] for events in steps):
            own, most_s = dict(event.late) or mean, event.exposed_comm_s
            factors = (1.0 if own is not mean else most_s / (mean_s or 1.0), most_s / (sum(own.values()) or 1.0))
            factor = min((one for one in factors if not math.isnan(one)), default=1.0)
            found[rank].append({other: seconds * factor for other, seconds in own.items()})
    return found


def _exposed_s(event: StepEvent) -> float:
    """Exposed communication; 0 where it is unknown."""
    return event.exposed_comm_s if math.isfinite(event.exposed_comm_s) else 0.0


def _parts(event: StepEvent, waits: _Waits) -> dict[Part, float]:
    """The seconds of a step; they add up to its time."""
    late_s = sum(waits.values())
    parts = {
        Part.LATE: late_s,
        Part.TRANSFER: max(0.0, _exposed_s(event) - late_s),
        Part.HOST: event.part_s.get("", 0.0),
    }
    for part in (Part.OPTIMIZER, Part.INPUT, Part.CHECKPOINT, Part.EVALUATION):
        parts[part] = event.part_s.get(part.value, 0.0)
    parts[Part.COMPUTE] = max(0.0, event.step_time_s - sum(parts.values()))
    return parts


def _excess(parts: Mapping[int, Sequence[Mapping[Part, float]]]) -> dict[int, dict[Part, float]]:
    """Rank -> part -> seconds of a mean step by which it takes longer than the median of the others, where that is not by
    chance, as told from the steps that have the part; where the others never have it, there is no chance."""
    found: dict[int, dict[Part, float]] = {rank: {} for rank in parts}
    for part in OWN:
        steps = [tuple(row[part] for row in rows) for rows in zip(*parts.values(), strict=True)]
        some = [step for step in steps if any(step)]
        beyond = [_beyond_others(step) for step in some]
        having = {i for step in some for i, seconds in enumerate(step) if seconds}
        for i, rank in enumerate(parts):
            rows = [row[i] for row in beyond]
            error_s = stdev(rows) / math.sqrt(len(rows)) if len(rows) > 2 else math.inf
            if having == {i} or (rows and fmean(rows) > _SURE * error_s):
                found[rank][part] = sum(rows) / len(steps)
    return found


def _beyond_others(values: Sequence[float]) -> list[float]:
    """By how much each is above the median of the others."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    beyond, others = [0.0] * len(values), len(values) - 1
    for place, i in enumerate(order):
        low, high = (k + (k >= place) for k in ((others - 1) // 2, others // 2))
        beyond[i] = values[i] - (values[order[low]] + values[order[high]]) / 2
    return beyond


def _culprit(
    rank: int,
    longer: Mapping[Part, float],
    parts: Mapping[int, Sequence[Mapping[Part, float]]],
    waits: Mapping[int, Sequence[_Waits]],
) -> Culprit:
    """What a rank is blamed for: the time that the others wait for it, as far as it takes `longer` than they do."""
    means = {other: fmean(row.get(rank, 0.0) for row in rows) for other, rows in waits.items() if other != rank}
    typical_s, following = median_high(means.values()), min(means, key=lambda other: means[other])
    share_s, step_s = min(typical_s, sum(longer.values())), fmean(sum(row.values()) for row in parts[rank])
    return Culprit(
        rank=rank,
        share=share_s / step_s,
        gain=max(0.0, share_s - (typical_s - means[following])) / step_s,
        following=following,
        part=max(longer, key=lambda part: longer[part]),
    )


def _mean(rows: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: fmean(row.get(key, 0.0) for row in rows) for key in keys}
