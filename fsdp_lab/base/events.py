"""What ranks report: a `StepEvent` for each step, `Span`s of a traced step, a `PhaseSnapshot` for each phase in slow motion.

Nothing else feeds plots, tables, history or exports. They cross processes as dicts or lists of plain scalars (`to_dict`,
`to_row`), so that pickle, msgpack and JSON can carry them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Self

from fsdp_lab.base.generation import Completion


class Track(StrEnum):
    """The row of a rank's timeline in which a span is drawn."""

    COMPUTE = "compute"  # the rank's main thread (on a GPU: stream) computes: forward, backward, optimizer
    WAIT = "wait"  # it waits for a collective: exposed communication
    ALL_GATHER = "all_gather"  # this and the next four: from issue to completion of one collective
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    CONTROL = "control"  # the vote at the end of a step (rank/trainer.py)
    OTHER = "other"  # broadcasts, barriers, all-to-alls, point to point
    HOST_COPY = "host_copy"  # between host and device, under offload

    @classmethod
    def of(cls, kind: str) -> Track:
        """The track of a collective, by the kind that `fsdp_lab.wire` gives it."""
        return cls(kind) if kind in (cls.ALL_GATHER, cls.REDUCE_SCATTER, cls.ALL_REDUCE, cls.CONTROL) else cls.OTHER


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An interval of one rank's step, in seconds since its begin (`StepEvent.begin_s`) on the rank's own clock.

    `name`: "forward", "backward" or "optimizer" for computation, otherwise the kind of the collective. The fields from
    `sequence` on are set for collectives and for waits."""

    track: Track
    name: str
    unit: str  # such as "transformer.h.0"; "root"; "bucket 2" of DDP; "" if none
    start_s: float
    end_s: float
    sequence: int = -1  # the rank's count of collectives
    ordinal: int = -1  # the group's count: the same number on all its ranks is the same collective
    group: str = ""
    size: int = 1  # ranks in the group
    dtype: str = ""
    link_bytes: int = 0
    payload_bytes: int = 0  # the whole tensor: output of an all-gather, input of a reduce-scatter

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def algorithm_bytes_per_s(self) -> float | None:
        """Payload over time (nccl-tests' "algbw"); None if nothing was sent or no time passed."""
        return self.payload_bytes / self.seconds if self.payload_bytes and self.seconds > 0 else None

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Bytes over one rank's link per second (nccl-tests' "busbw"); None as above."""
        return self.link_bytes / self.seconds if self.link_bytes and self.seconds > 0 else None

    def to_row(self) -> list[Any]:
        return [getattr(self, name) for name in _SPAN_FIELDS]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> Span:
        values = dict(zip(_SPAN_FIELDS, row, strict=True))
        return cls(**{**values, "track": Track(values["track"])})


_SPAN_FIELDS = tuple(f.name for f in dataclasses.fields(Span))


def exposed_by_unit(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of exposed communication by unit, in a traced step: the waits for its collectives. Waits of a step do not
    overlap (`fsdp_lab.wire.meter.exposed`), so the sum over units is that of the step."""
    by_unit: dict[str, float] = {}
    for span in spans:
        if span.track is Track.WAIT:
            by_unit[span.unit] = by_unit.get(span.unit, 0.0) + span.seconds
    return by_unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Collectives of one kind in one step of one rank.

    `link_bytes`: sent by this rank over its link, (W-1)/W of the payload, twice that for an all-reduce. `seconds`: from
    issue to completion, summed, also over collectives that overlap. `exposed_seconds`: the time that computation waited
    for them, counting each instant once (`fsdp_lab.wire.meter.exposed`); NaN if not measured."""

    calls: int = 0
    link_bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Carrier:
    """What carries the collectives of a training, and its speed for this rank in one direction, measured by some large
    all-gathers with nothing beside them."""

    between: str  # "ranks"; of hybrid sharding "shards", inside a shard group, or "replicas"
    name: str  # "shared memory", "Gloo" or "NCCL"
    bytes_per_s: float


# Of a step whose collectives nobody saw.
UNKNOWN_TRAFFIC: Mapping[str, Traffic] = {"other": Traffic(seconds=math.nan, exposed_seconds=math.nan)}


class Role(StrEnum):
    """The use of a block of device memory, the same for every backend. Each block has one role."""

    PARAMETERS = "parameters"  # this rank's shard, with padding; under DDP all parameters
    UNSHARDED = "unsharded"  # all-gathered parameters
    GRADIENTS = "gradients"  # of parameters: as autograd produces them, flat or in DDP's buckets, and reduced
    OPTIMIZER = "optimizer"  # its state and, during its step, its temporaries
    ACTIVATIONS = "activations"  # see RoleBytes
    COMMUNICATION = "communication"  # buffers of collectives that have none of the roles above
    OTHER = "other"  # the model's buffers, the batch, unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleBytes:
    """Bytes on the compute device at one moment, by `Role`; without those that offload moved to the host.

    `activations_bytes`: everything that forward and backward allocate and that has no other role: tensors that autograd
    saves for the backward, intermediate results, gradients with respect to them, and temporaries."""

    parameters_bytes: int = 0
    unsharded_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    communication_bytes: int = 0
    other_bytes: int = 0

    @classmethod
    def of(cls, sizes: Mapping[Role, int]) -> RoleBytes:
        """`sizes`: bytes by role; roles that are missing have 0."""
        return cls(**{f"{role.value}_bytes": size for role, size in sizes.items()})

    def of_role(self, role: Role) -> int:
        return int(getattr(self, f"{role.value}_bytes"))

    @property
    def total_bytes(self) -> int:
        return sum(self.of_role(role) for role in Role)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySample:
    """A point of a ledger step's curve of memory over time."""

    at_s: float  # since the step's begin; measuring makes a ledger step longer than others
    phase: str  # the phase in progress: "begin" (before the forward), "forward", "backward", "update"
    unit: str  # the unit that began or ended last, by the name of its module; "root" outside units
    moment: str  # "begin" or "end" of the unit in this phase, or "highest": the highest point since
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

    The first three: this rank's shards of parameters, gradients and optimizer state on the compute device, once they all
    exist, without padding; `host_bytes` is what offload moved. `peak_bytes`: the most that was allocated at once, on a
    GPU in this step, from the allocator; on a CPU in the last ledger step (`fsdp_lab.rank.ledger`), 0 before the first.
    `at_peak`: its composition by role in the last ledger step; the total is the peak."""

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    host_bytes: int = 0
    peak_bytes: int = 0
    at_peak: RoleBytes = field(default_factory=RoleBytes)
    allocated_bytes: int = 0  # between steps; on a CPU with `host_bytes`, which is the same memory
    reserved_bytes: int | None = None  # by the caching allocator; None on a CPU
    outside_bytes: int = 0  # not by the allocator: used minus reserved of the GPU; RSS minus allocated on a CPU
    pool_bytes: int = 0  # of a pool of shared memory for what CPU ranks gather and send, in use or not
    limit_bytes: int | None = None  # available to this rank: of the GPU, or of the machine
    rss_bytes: int = 0  # with this rank's own pool, and without the others'
    # The most by which RSS grew while this rank built the model and read its weights; 0 of a training that read none.
    loading_bytes: int = 0
    # Of the caching allocator, since the event before: how often it had to free what it cached, and could not allocate.
    alloc_retries: int = 0
    ooms: int = 0

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Memory:
        return cls(**{**d, "at_peak": RoleBytes(**d["at_peak"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One optimizer step of one rank."""

    run: str
    spec_id: str
    rank: int
    world_size: int
    step: int  # committed optimizer steps before this one: 0, 1, 2, ...
    attempt: int = 0  # how many times the run had restarted from an earlier step; set by the kernel
    samples: int  # the global sample counter after this step; 0: unknown, as of a watched loop
    end_unix_s: float
    step_time_s: float
    tokens: int  # of this rank in this step; of image models, the number of images; 0: unknown
    loss: float  # mean over this rank's micro-batches; NaN: unknown, as are the next two
    mean_loss: float  # mean over the ranks; a watched loop's ranks do not exchange it: see `runs.steps.Step`
    grad_norm: float  # global, before clipping
    flops: int  # model FLOPs of this rank in this step: forward and backward, without recomputation; 0: unknown
    recompute_flops: int = 0  # of the recomputation that `Strategy.recompute` causes
    peak_flops_per_s: float | None = None  # of the device in the compute dtype; at least what its steps have reached
    peak_source: str = ""
    memory: Memory = field(default_factory=Memory)
    memory_curve: tuple[MemorySample, ...] = ()  # of a ledger step: begins and ends of units, and the peaks between
    comm: Mapping[str, Traffic] = field(default_factory=dict)  # by kind of collective (`fsdp_lab.wire.group`)
    first_after_switch: bool = False
    ledger: bool = False  # a ledger step, slowed by measuring; not in medians
    inspected: bool = False  # a user's own engine was checked in it, which takes time; not in medians
    slow: bool = False  # stopped at its phases (slow motion), so its times are meaningless
    lr: float | None = None  # of its update; None: unknown
    loss_scale: float | None = None  # of its gradients; None: without loss scaling, or unknown
    skipped: bool = False  # the optimizer did not step: fp16 gradients overflowed, or a watched loop goes on adding
    begin_s: float = 0.0  # of the step, in `time.perf_counter` of rank 0, within `clock_error_s`
    clock_error_s: float | None = None  # None: the clocks were not compared
    spans: tuple[Span, ...] = ()  # of a traced step (the last of a chunk); empty in all others
    checksum: int | None = None  # this rank's part of the parameters' checksum (`fsdp_lab.rank.trainer.checksum`)
    eval_loss: float | None = None  # mean over held-out samples after this step, the same on every rank
    eval_metrics: Mapping[str, float] = field(default_factory=dict)  # the user's own, by name, with `eval_loss`
    replica: int = 0  # which copy of the parameters this rank's shards belong to
    completions: tuple[Completion, ...] = ()  # of this rank's prompts, after an evaluation
    notes: tuple[str, ...] = ()  # how representative the times are
    carriers: tuple[Carrier, ...] = ()  # told in the first step after a switch
    host: str = ""  # of this rank; "": unknown
    across_bytes: int = 0  # of all kinds, sent by this rank to ranks on other hosts
    across_s: float = 0.0  # issue to completion of the collectives of groups on several hosts, summed as in `Traffic`
    input_s: float | None = None  # the main thread waited for its batches; None: unknown, as are the next two
    checkpoint_s: float | None = None  # writing checkpoints between two updates
    evaluation_s: float | None = None  # in forwards without gradients between two updates
    # Of `exposed_comm_s`, the time in which another rank had not issued the collective yet: (rank, seconds). Known where
    # ranks share memory; elsewhere the spans of a traced step tell it (`runs.timeline.late_in_trace`).
    late: tuple[tuple[int, float], ...] = ()
    # Seconds of the main thread, on a GPU of its stream, outside of waits for collectives: "forward", "backward",
    # "optimizer", "input", "checkpoint", "evaluation", and "" between these.
    part_s: Mapping[str, float] = field(default_factory=dict)
    recompiled: tuple[str, ...] = ()  # by torch.compile in this step: the guard that failed, of each, as far as known
    # Of this rank's GPU with all its processes, read from the driver once a second: the share of time in which any kernel
    # ran, as nvidia-smi has it, power and temperature. None: on a CPU, or not reported, as for a MIG slice.
    gpu_percent: float | None = None
    gpu_power_w: float | None = None
    gpu_temperature_c: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Throughput of this rank; that of a run is the sum over ranks. NaN if unknown."""
        return (self.tokens or math.nan) / self.step_time_s

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of exposed communication of this rank, of all kinds."""
        return sum(t.exposed_seconds for t in self.comm.values())

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of this rank; NaN if unknown."""
        return (self.flops or math.nan) / self.step_time_s / 1e12

    @property
    def hardware_flops(self) -> int:
        """FLOPs that the device executed in this step: the model's and recomputation."""
        return self.flops + self.recompute_flops

    @property
    def best_flops_per_s(self) -> float | None:
        """The larger of `peak_flops_per_s` and the rate of this step; None: unknown."""
        return max(self.peak_flops_per_s, self.hardware_flops / self.step_time_s) if self.peak_flops_per_s else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1, relative to `best_flops_per_s`; None if no peak is known."""
        return self.flops / self.step_time_s / best if (best := self.best_flops_per_s) else None

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation, 0 to 1: as `mfu`, with recompute counted (arXiv 2205.05198, section 6.3)."""
        return self.hardware_flops / self.step_time_s / best if (best := self.best_flops_per_s) else None

    @property
    def counts(self) -> bool:
        """Whether medians include the step's time."""
        return not (self.first_after_switch or self.ledger or self.inspected or self.slow)

    def to_dict(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """`names`: of the fields that are wanted; none: all."""
        values = {name: getattr(self, name) for name in names or self.__slots__}
        return {name: _PLAIN[name](value) if name in _PLAIN else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> StepEvent:
        fields = dict(d)
        fields["memory"] = Memory.from_dict(fields["memory"])
        fields["comm"] = {kind: Traffic(**t) for kind, t in fields["comm"].items()}
        parts: Mapping[str, Any] = {"memory_curve": MemorySample, "completions": Completion, "spans": Span}
        for name, kind in parts.items():
            fields[name] = tuple(map(kind.from_row, fields.get(name, ())))
        fields["notes"], fields["recompiled"] = tuple(fields["notes"]), tuple(fields["recompiled"])
        fields["late"] = tuple((int(rank), float(seconds)) for rank, seconds in fields.get("late", ()))
        fields["carriers"] = tuple(Carrier(**d) for d in fields["carriers"])
        return cls(**fields)


def _fields(part: Any) -> dict[str, Any]:
    """Its fields by name, several times as fast as `dataclasses.asdict`."""
    return {name: getattr(part, name) for name in part.__slots__}


_PLAIN: Mapping[str, Callable[[Any], Any]] = {  # of fields of `StepEvent` that are no scalars
    "memory": lambda memory: {**_fields(memory), "at_peak": _fields(memory.at_peak)},
    "comm": lambda comm: {kind: _fields(t) for kind, t in comm.items()},
    "late": lambda late: [list(one) for one in late],
    "carriers": lambda carriers: [_fields(carrier) for carrier in carriers],
    **dict.fromkeys(("memory_curve", "completions", "spans"), lambda parts: [part.to_row() for part in parts]),
    **dict.fromkeys(("notes", "recompiled"), list),
    **dict.fromkeys(("part_s", "eval_metrics"), dict),
}


# -- what an audit of a loop's updates found -------------------------------------------------------------------------


class AuditKind(Enum):
    """What is found, and what to do about it."""

    STUCK = "stuck", "look at its group's learning rate, and whether the optimizer holds this tensor or a copy"
    LOW_PRECISION = (
        "update lost",
        "keep fp32 parameters, and compute in lower precision by autocast or the wrapper; or raise the learning rate",
    )
    NO_GRADIENT = "no gradient", "look for a detach, a no_grad or an unused output behind its module; or freeze it"
    ZERO_GRADIENT = "gradient is zero", "look for a factor behind it that is always zero; or freeze it"
    FROZEN_MOVED = "frozen, and moves", "take it out of the optimizer, and set its gradient to None when it is frozen"
    NOT_IN_OPTIMIZER = "in no optimizer", "give it to the optimizer, or freeze it"
    TWICE = "updated twice", "give it to one optimizer, once"
    BESIDE_ADAPTERS = "trained beside adapters", "freeze it; what is saved of adapters lacks it"
    REPLICAS_DIFFER = (
        "replicas differ",
        "average its gradients, or wrap it with the rest; ranks that are to differ are watched with audit=False",
    )
    SAME_DATA = "same batches on all ranks", "give each rank its part, as by a DistributedSampler, or a seed of its own"
    REDUCED_OFTEN = "reduced too often", "costs only time: use DDP's no_sync, or FSDP2's set_requires_all_reduce"
    FORM_IGNORED = "gathered in full", "shard it by fully_shard, which gathers it in the form that its type asks for"
    SKIPPED = "updates skipped", "look for gradients that are not finite; lower the scaler's init_scale, or use bf16"

    @property
    def text(self) -> str:
        return self.value[0]

    @property
    def hint(self) -> str:
        return self.value[1]


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """`parameter`: its name in the model; "" where it is none in particular. `step`: the one after which it was certain;
    of replicas, the first in which they differ. `what`: is seen, in a sentence."""

    kind: AuditKind
    parameter: str
    rank: int
    step: int
    what: str

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "kind": self.kind.name}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        return cls(**{**d, "kind": AuditKind[d["kind"]]})


# -- phases of a step in slow motion ---------------------------------------------------------------------------------


ROOT = "root"  # replaces "", the name of the root module's own unit


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterHolding:
    """What one rank holds of one parameter at that moment. Ranges are of the flattened parameter, [start, stop)."""

    name: str  # original name
    unit: str  # name of its unit, such as "transformer.h.0", or ROOT
    numel: int  # of the whole parameter
    start: int  # range of the rank's shard, which may be empty
    stop: int
    state: str  # "sharded", "gathering" (its all-gather is in flight), or "unsharded": the whole parameter is there
    gradient: str  # "none", "unsharded", "reducing" (its reduction is in flight), or "sharded"

    @property
    def held(self) -> tuple[int, int]:
        """The range that can be read: the whole parameter if it is unsharded, otherwise the shard."""
        return (0, self.numel) if self.state == "unsharded" else (self.start, self.stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSnapshot:
    """One rank immediately before a phase of a step; slow motion shows those of all ranks side by side."""

    rank: int
    world_size: int
    step: int  # optimizer step in progress
    index: int  # 0, 1, 2, ... within the step
    phase: str  # a `schedule.Phase`
    unit: str  # the unit of the phase; ROOT for that of the root module
    direction: str  # "forward", "backward" or "update"
    parameters: tuple[ParameterHolding, ...]

    def to_dict(self) -> dict[str, Any]:
        d = dataclasses.asdict(self)
        return {**d, "parameters": list(d["parameters"])}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> PhaseSnapshot:
        return cls(**{**d, "parameters": tuple(ParameterHolding(**p) for p in d["parameters"])})
