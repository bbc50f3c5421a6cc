"""`StepEvent`: what one rank measured in one step. Nothing else feeds plots, tables, history or exports.

Floor 0. An event crosses processes as a dict of plain scalars (`to_dict`), so that pickle, msgpack and JSON all take it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_lab.spans import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Collectives of one kind in one step of one rank.

    `link_bytes` is what this rank sends over its link: (W-1)/W of the payload, twice that for an all-reduce.
    `seconds` is issue to completion, summed; collectives that overlap count each. `exposed_seconds` is what computing
    waited for them, every instant once (`fsdp_lab.wire.meter.exposed`).
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of one rank, by role. The first three are on the compute device; what offload moved is `host_bytes`.

    `peak_bytes` is the allocator's peak on a GPU. On a CPU it is the peak of tensors that were alive at once, read in a
    ledger step (see `fsdp_lab.rank.probes`) and repeated until the next one. `working_bytes` is the peak less what stays:
    activations, unsharded parameters, communication buffers. Zero where no ledger step has been yet.
    """

    parameters_bytes: int = 0
    gradients_bytes: int = 0
    optimizer_bytes: int = 0
    host_bytes: int = 0
    working_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int | None = None  # what the caching allocator holds; None on a CPU
    rss_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """One optimizer step of one rank."""

    run: str
    spec_id: str
    rank: int
    world_size: int
    step: int  # committed optimizer steps before this one: 0, 1, 2, ...
    samples: int  # the global sample counter after this step
    end_unix_s: float
    step_time_s: float
    tokens: int  # of this rank in this step; for images, patches are not tokens: images are counted
    loss: float  # mean over this rank's micro-batches
    mean_loss: float  # mean over the ranks
    grad_norm: float  # global, before clipping
    flops: int  # model FLOPs of this rank in this step: forward and backward, recompute not counted
    peak_flops_per_s: float | None = None  # of the device in the compute dtype
    peak_source: str = ""
    memory: Memory = field(default_factory=Memory)
    comm: Mapping[str, Traffic] = field(default_factory=dict)  # by kind, as `fsdp_lab.wire.group` names it
    first_after_switch: bool = False
    ledger: bool = False  # slowed by measuring; left out of medians
    slow: bool = False  # halted at its phases (slow motion): its times say nothing
    skipped: bool = False  # fp16: gradients overflowed, the optimizer did not step
    begin_s: float = 0.0  # of the step, on the clock that rank 0's `time.perf_counter` is; see `clock_error_s`
    clock_error_s: float | None = None  # how far `begin_s` may be off beside rank 0's; None: the clocks were not compared
    spans: tuple[Span, ...] = ()  # of a traced step (the last of a chunk); empty in all others
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
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1, relative to `peak_flops_per_s`; None where no peak is known."""
        return self.flops / self.step_time_s / self.peak_flops_per_s if self.peak_flops_per_s else None

    @property
    def counts(self) -> bool:
        """Whether the step's time belongs in a median."""
        return not (self.first_after_switch or self.ledger or self.slow)

    def to_dict(self) -> dict[str, Any]:
        d = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        d["memory"] = dataclasses.asdict(self.memory)
        d["comm"] = {kind: dataclasses.asdict(t) for kind, t in self.comm.items()}
        d["notes"] = list(self.notes)
        d["spans"] = [span.to_row() for span in self.spans]
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> StepEvent:
        fields = dict(d)
        fields["memory"] = Memory(**fields["memory"])
        fields["comm"] = {kind: Traffic(**t) for kind, t in fields["comm"].items()}
        fields["notes"] = tuple(fields["notes"])
        fields["spans"] = tuple(Span.from_row(row) for row in fields.get("spans", ()))
        return cls(**fields)
