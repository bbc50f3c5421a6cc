"""`StepEvent`: what one rank measured in one step. Nothing else feeds plots, tables, history or exports.

Floor 0. An event crosses processes as a dict of plain scalars (`to_dict`), so that pickle, msgpack and JSON all take it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fsdp_lab.core.spans import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Collectives of one kind in one step of one rank.

    `link_bytes` is what this rank sends over its link: (W-1)/W of the payload, twice that for an all-reduce.
    `seconds` is issue to completion, summed; collectives that overlap count each. `exposed_seconds` is what computing
    waited for them, every instant once (`fsdp_lab.wire.meter.exposed`); NaN where it has not been measured.
    """

    calls: int = 0
    link_bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            calls=self.calls + other.calls,
            link_bytes=self.link_bytes + other.link_bytes,
            seconds=self.seconds + other.seconds,
            exposed_seconds=self.exposed_seconds + other.exposed_seconds,
        )


class Role(StrEnum):
    """What a block of device memory is for; the same for every backend. Each block has one role."""

    PARAMETERS = "parameters"  # this rank's shard of them, padding included; under DDP all of them
    UNSHARDED = "unsharded"  # what was gathered to compute with
    GRADIENTS = "gradients"  # of parameters: as autograd makes them, flat or in DDP's buckets, and reduced
    OPTIMIZER = "optimizer"  # its state and, while it steps, its scratch
    ACTIVATIONS = "activations"  # see Classes
    COMMUNICATION = "communication"  # what collectives send and receive, where it is none of the above
    OTHER = "other"  # the model's buffers, the batch, what is not known


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBytes:
    """Bytes of the compute device at one moment, by `Role`; what offload keeps on the host is not among them.

    `activations_bytes` are whatever forwards and backwards allocate that has no other role: what autograd keeps for the
    backward, results on their way from one operator to the next, gradients with respect to them, and scratch.
    """

    parameters_bytes: int = 0
    unsharded_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    communication_bytes: int = 0
    other_bytes: int = 0

    @classmethod
    def of(cls, sizes: Mapping[Role, int]) -> RoleBytes:
        """From bytes by role."""
        return cls(**{f"{role.value}_bytes": size for role, size in sizes.items()})

    def of_role(self, role: Role) -> int:
        return int(getattr(self, f"{role.value}_bytes"))

    @property
    def total_bytes(self) -> int:
        return sum(self.of_role(role) for role in Role)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """A point of a ledger step's curve of memory over time."""

    at_s: float  # from the step's begin; measuring makes a ledger step longer than others
    phase: str  # "begin" (before the forward), "forward", "backward", "update": what was under way
    unit: str  # the unit that began or ended last, by the name of its module; "root" outside units
    moment: str  # "begin" or "end" of it in this phase, or "highest": the highest point since
    classes: RoleBytes

    def to_row(self) -> list[Any]:
        return [self.at_s, self.phase, self.unit, self.moment, *(self.classes.of_role(role) for role in Role)]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> MemorySample:
        at_s, phase, unit, moment, *sizes = row
        classes = RoleBytes.of(dict(zip(Role, sizes, strict=True)))
        return cls(at_s=at_s, phase=phase, unit=unit, moment=moment, classes=classes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank.

    The first three are what it holds of a class when it holds all of that, on the compute device, without padding; what
    offload moved is `host_bytes`. `peak_bytes` is the most that was allocated at once: of this very step on a GPU, as the
    allocator tells it; on a CPU that of the last ledger step (see `fsdp_lab.rank.ledger`), 0 where there was none yet.
    `at_peak` says what it was made of, as the last ledger step found it: its total is the peak.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    host_bytes: int = 0
    peak_bytes: int = 0
    at_peak: RoleBytes = field(default_factory=RoleBytes)
    allocated_bytes: int = 0  # what stays between steps; on a CPU with `host_bytes`, since that is one memory
    reserved_bytes: int | None = None  # what the caching allocator holds; None on a CPU
    outside_bytes: int = 0  # not the allocator's: used less reserved of the whole GPU; RSS less allocated on a CPU
    limit_bytes: int | None = None  # what this rank may take: of the GPU, or the memory of the machine
    rss_bytes: int = 0

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Memory:
        return cls(**{**d, "at_peak": RoleBytes(**d.get("at_peak", {}))})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One optimizer step of one rank."""

    run: str
    spec_id: str
    rank: int
    world_size: int
    step: int  # committed optimizer steps before this one: 0, 1, 2, ...
    attempt: int = 0  # how often the ranks had begun again from an earlier step in this run; set by the kernel
    samples: int  # the global sample counter after this step
    end_unix_s: float
    step_time_s: float
    tokens: int  # of this rank in this step; for images, patches are not tokens: images are counted
    loss: float  # mean over this rank's micro-batches
    mean_loss: float  # mean over the ranks
    grad_norm: float  # global, before clipping
    flops: int  # model FLOPs of this rank in this step: forward and backward, recompute not counted
    recompute_flops: int = 0  # what `Strategy.recompute` makes the device do again
    peak_flops_per_s: float | None = None  # of the device in the compute dtype, at least what its steps have reached
    peak_source: str = ""
    memory: Memory = field(default_factory=Memory)
    memory_curve: tuple[
        MemorySample, ...
    ] = ()  # of a ledger step, at the begins and ends of units and the peaks between
    comm: Mapping[str, Traffic] = field(default_factory=dict)  # by kind, as `fsdp_lab.wire.group` names it
    first_after_switch: bool = False
    ledger: bool = False  # slowed by measuring; left out of medians
    slow: bool = False  # halted at its phases (slow motion): its times say nothing
    skipped: bool = False  # fp16: gradients overflowed, the optimizer did not step
    begin_s: float = 0.0  # of the step, on the clock that rank 0's `time.perf_counter` is; see `clock_error_s`
    clock_error_s: float | None = (
        None  # how far `begin_s` may be off beside rank 0's; None: the clocks were not compared
    )
    spans: tuple[Span, ...] = ()  # of a traced step (the last of a chunk); empty in all others
    checksum: int | None = (
        None  # this rank's part of that of the parameters after this step; see `fsdp_lab.rank.checksum`
    )
    eval_loss: float | None = (
        None  # mean over held-out samples after this step, the same on every rank; None: not evaluated
    )
    replica: int = 0  # which copy of the parameters this rank's shards belong to
    notes: tuple[str, ...] = ()  # what the times are worth, in words

    @property
    def tokens_per_s(self) -> float:
        """Of this rank; a run's throughput is the sum over ranks."""
        return self.tokens / self.step_time_s

    @property
    def exposed_comm_s(self) -> float:
        """Exposed communication of this rank in this step, all kinds."""
        return sum(t.exposed_seconds for t in self.comm.values())

    @property
    def tflops(self) -> float:
        """Model TFLOPS of this rank."""
        return self.flops / self.step_time_s / 1e12

    @property
    def hardware_flops(self) -> int:
        """What the device did in this step: model FLOPs and recompute."""
        return self.flops + self.recompute_flops

    @property
    def best_flops_per_s(self) -> float | None:
        """`peak_flops_per_s`, or what this step reached where that is more, as in older files; None: unknown."""
        return max(self.peak_flops_per_s, self.hardware_flops / self.step_time_s) if self.peak_flops_per_s else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1, relative to `best_flops_per_s`; None where no peak is known."""
        return self.flops / self.step_time_s / best if (best := self.best_flops_per_s) else None

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, 0 to 1: as `mfu`, with recompute counted (arXiv 2205.05198, section 6.3)."""
        return self.hardware_flops / self.step_time_s / best if (best := self.best_flops_per_s) else None

    @property
    def counts(self) -> bool:
        """Whether the step's time belongs in a median."""
        return not (self.first_after_switch or self.ledger or self.slow)

    def to_dict(self) -> dict[str, Any]:
        d = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        d["memory"] = dataclasses.asdict(self.memory)
        d["comm"] = {kind: dataclasses.asdict(t) for kind, t in self.comm.items()}
        d["memory_curve"] = [sample.to_row() for sample in self.memory_curve]
        d["notes"] = list(self.notes)
        d["spans"] = [span.to_row() for span in self.spans]
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> StepEvent:
        fields = dict(d)
        fields["memory"] = Memory.from_dict(fields["memory"])
        fields["memory_curve"] = tuple(MemorySample.from_row(row) for row in fields.get("memory_curve", ()))
        fields["comm"] = {kind: Traffic(**t) for kind, t in fields["comm"].items()}
        fields["notes"] = tuple(fields["notes"])
        fields["spans"] = tuple(Span.from_row(row) for row in fields.get("spans", ()))
        return cls(**fields)
