"""`diagnose`: known troubles of a run, each named from what its ranks have reported, with what helps.

It reads what every panel reads, the step events, the Spec, the audit and why a run has failed, so it works on runs of any
kind: live, stored, and loops that are only watched. Times are medians of steps that count; limits are at the top. What may
have a good reason is named only where it costs much."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fsdp_lab.base.errors import Cause
from fsdp_lab.base.events import AuditFinding, AuditKind, Memory, StepEvent, Track
from fsdp_lab.base.formatting import median_known, plural, size
from fsdp_lab.runs.blame import TRACES, Blame, Part
from fsdp_lab.runs.steps import EventStore, Step
from fsdp_lab.spec.describe import Trained
from fsdp_lab.spec.spec import Spec, Strategy

WINDOW = 64  # the newest steps that are looked at
LEAST_STEPS = 5  # that count, for a statement about times
WAITING_SHARE = 0.55  # of a step that computing waits for collectives
LEAST_SENT_BYTES = 1 << 20  # in a step: small loops wait for each other, not for the link
OFFLOAD_SHARE = 0.2  # of a step that copies to and from the host and the optimizer there take
ROOM = 0.5  # of a device's memory, that everything together would leave at least, where offload is not needed
ADAPTERS_SAVE = 0.25  # of the peak without them, at least
ACTIVATIONS_SHARE = 0.6  # of the peak
SENDS_MORE = 1.02  # times what replicas would send; small messages, such as votes, are counted too
WHOLE = 0.9  # of the whole model: gradients as large are not sharded
RECOMPILED_STEPS = 3  # one or two are normal: shapes become dynamic
UNSYNCHRONISED_STEPS = 3
LATE_STEPS = 16  # that count, to blame a rank
LATE_SHARE = 0.05  # of the time that the others wait for it
_IN_A_SHARD_GROUP = {"all_gather", "reduce_scatter", "control"}  # kinds that exchange nothing between replicas


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A trouble of a run.

    `sentence`: what was measured, or what a failure means. `cure`: what to do. `changes`: fields of the Spec by flat name
    that do it, for `run.apply` or `lab.run`; empty where no field does."""

    cause: Cause
    sentence: str
    cure: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.sentence} {self.cure}"


# What a failure means whose cause its error names, and the cure.
_FAILURES = {
    Cause.LOADING: (
        "Memory ran out before the first step: each rank built the whole model, with its values, before it was sharded.",
        "Give the folder of the weights as `model`: each rank then reads its own shards, by range. In a script: build "
        "the model on the meta device, shard it, and load each rank's part (torch.distributed.checkpoint).",
    ),
    Cause.CHECKPOINT: (
        "The weights do not fit the model: their names are those of a wrapped one.",
        "Save from the inner module, or take the prefix off: fsdp_lab.unwrap_names(folder, to).",
    ),
    Cause.BATCHES: (
        "The ranks have unequal numbers of batches, and those that go on wait for collectives which the others never issue.",
        "Let all ranks make as many steps: a DistributedSampler with drop_last=True, or before each step agree whether "
        "every rank has a batch (an all-reduce of a flag).",
    ),
    Cause.GENERATION: (
        "A sharded model gathers its parameters in each forward, for which all ranks are needed.",
        "Let every rank run it, with as many forwards: generate(..., synced_gpus=True), the same prompt lengths and "
        "numbers of new tokens, and print on rank 0 alone. Or gather the parameters first, on all ranks.",
    ),
}

# What helps where a rank is late, by the part in which it takes longer.
_LATE = {
    Part.COMPUTE: "Look at its batches, what it does between forward and backward, and its device: who else uses it.",
    Part.OPTIMIZER: "Look whether it holds more parameters, and at its device: another process on it, its clock.",
    Part.INPUT: "Give its DataLoader workers and prefetching, or look at its storage.",
    Part.CHECKPOINT: "Save asynchronously, or let every rank write its part: torch.distributed.checkpoint.async_save.",
    Part.EVALUATION: "Share the evaluation out evenly among the ranks.",
    Part.HOST: "Log and compute metrics there less often, or in a thread.",
}


def diagnose(
    spec: Trained, events: EventStore, failure: Cause | None = None, audit: Sequence[AuditFinding] = ()
) -> tuple[Diagnosis, ...]:
    """The troubles of a run, as far as they can be told; () if it is well, or young. `failure`: why it failed, if known.
    `audit`: what that of its updates found."""
    spec_id = spec.id  # a property that is computed at each access
    steps = [s for s in events.last_steps(WINDOW) if s.spec_id == spec_id]
    case = _Case(spec=spec, steps=steps, traced=events.traced()[-TRACES:], audit=audit)
    found = [find(case) for find in _FINDERS]
    if failure in _FAILURES and (failure is not Cause.LOADING or spec.world_size > 1):
        sentence, cure = _FAILURES[failure]
        found.insert(0, Diagnosis(cause=failure, sentence=sentence, cure=cure))
    return tuple(d for d in found if d is not None)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """The facts from which troubles are told."""

    spec: Trained
    steps: Sequence[Step]  # whole ones, under this Spec
    traced: Sequence[Step] = ()
    audit: Sequence[AuditFinding] = ()

    @property
    def strategy(self) -> Strategy | None:
        return self.spec.strategy if isinstance(self.spec, Spec) else None

    @property
    def shard_factor(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.spec.shard_factor if isinstance(self.spec, Spec) else self.spec.shard_size

    @property
    def counted(self) -> list[Step]:
        return [s for s in self.steps if s.counts]

    @property
    def memory(self) -> Memory | None:
        """The memory of the rank with the highest peak, where a ledger step has told it."""
        last = [e.memory for e in self.steps[-1].events] if self.steps else []
        return max((m for m in last if m.at_peak.total_bytes), key=lambda m: m.peak_bytes, default=None)

    @property
    def model_bytes(self) -> int:
        """The size of all parameters, from the shards of the ranks that share them."""
        if not self.steps:
            return 0
        return sum(e.memory.parameters_bytes for e in self.steps[-1].events) * self.shard_factor // self.spec.world_size


def _adapters(case: _Case) -> Diagnosis | None:
    """LoRA saves the gradients and the optimizer state of the parameters that are frozen."""
    m = case.memory
    if m is None or not isinstance(case.spec, Spec) or case.spec.workload.adapters is None or m.host_bytes:
        return None
    workload = case.spec.workload
    sizes = 2 if "adam" in workload.optimizer.lower() else 1 if workload.optimizer_args else 0  # of the state, roughly
    whole = m.parameters_bytes * (1 + sizes)
    saved = max(0, whole - m.gradients_bytes - m.optimizer_bytes)
    share, activations = saved / (m.peak_bytes + saved), m.at_peak.activations_bytes
    recomputes = case.spec.strategy.recompute != "none"
    if share >= ADAPTERS_SAVE or activations < ACTIVATIONS_SHARE * m.peak_bytes or recomputes:
        return None
    return Diagnosis(
        cause=Cause.ADAPTERS,
        sentence=f"LoRA saves little here: {size(saved)} of gradients and optimizer state, {share:.0%} of what the peak "
        f"would be. {size(activations)} of the peak of {size(m.peak_bytes)} are activations, which the frozen model needs, "
        "too.",
        cure="Recompute activations in the backward, or take a smaller micro-batch or shorter sequences.",
        changes={"recompute": "full"},
    )


def _accumulation(case: _Case) -> Diagnosis | None:
    if case.shard_factor < 2 or (m := case.memory) is None:
        return None
    if case.strategy is not None:
        if case.strategy.shards_optimizer_only or not isinstance(case.spec, Spec) or case.spec.sync_interval < 2:
            return None
        held = m.at_peak.gradients_bytes
    else:
        samples = (sample for step in case.steps for e in step.events for sample in e.memory_curve)
        # In a forward, gradients are those of earlier micro-batches.
        held = max((s.classes.gradients_bytes for s in samples if s.phase == "forward"), default=0)
    whole = case.model_bytes
    if not whole or held < WHOLE * whole:
        return None
    shard = whole // case.shard_factor
    return Diagnosis(
        cause=Cause.ACCUMULATION,
        sentence=f"Each rank holds whole gradients, {size(held)} where its shard is {size(shard)}: they are not reduced "
        "until the last micro-batch of a step.",
        cure='Reduce them after every micro-batch: sync="every", or without no_sync() and '
        "set_requires_gradient_sync(False). It sends more, and each rank keeps its shard only.",
        changes={"sync": "every"} if case.strategy is not None else {},
    )


def _communication(case: _Case) -> Diagnosis | None:
    """Not named where replicas would send as much: then sharding is not the cause. What a loop trains is not known."""
    counted, spec, n = case.counted, case.spec, case.spec.world_size
    if case.shard_factor < 2 or len(counted) < LEAST_STEPS:
        return None
    shares = [[e.exposed_comm_s / e.step_time_s for e in step.events] for step in counted]
    share = min(map(median_known, zip(*shares, strict=True)))
    newest = counted[-1].events[0]
    sent, calls = sum(t.link_bytes for t in newest.comm.values()), sum(t.calls for t in newest.comm.values())
    if not share >= WAITING_SHARE or sent < LEAST_SENT_BYTES:  # also where it is not known
        return None
    # A rank with a replica all-reduces all gradients: it sends 2 (n - 1) / n of them (arXiv 2304.11277, section 3.2.2).
    frozen = isinstance(spec, Spec) and (spec.workload.freeze or spec.workload.lora is not None)
    replica_sent = 0.0 if frozen else 2 * (n - 1) / n * case.model_bytes
    if isinstance(spec, Spec) and sent < SENDS_MORE * replica_sent:
        return None
    sentence = f"Computing waits for collectives {share:.0%} of each step: a rank sends {size(sent)} a step, "
    sentence += f"in {calls} collectives of {size(sent / max(1, calls))}."
    if replica_sent:
        sentence += f" With a replica on each rank it would be {size(replica_sent)}."
    cure, changes = _less_communication(case)
    return Diagnosis(cause=Cause.COMMUNICATION, sentence=sentence, cure=cure, changes=changes)


def _less_communication(case: _Case) -> tuple[str, dict[str, Any]]:
    memory, spec = case.memory, case.spec
    more = "a larger micro-batch computes more with each gather, and hybrid sharding keeps gathers on one host"
    if not isinstance(spec, Spec):
        return f"If a replica fits, DDP sends less; {more}.", {}
    replica: dict[str, Any] = {"sharding": "no_shard"}
    if spec.validate(**replica) is not None:
        replica["backend"] = "ddp"
    if memory is not None and memory.limit_bytes and spec.validate(**replica) is None:
        shards = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.host_bytes
        needed = memory.peak_bytes + (case.shard_factor - 1) * shards
        if needed < ROOM * memory.limit_bytes:
            room = f"about {size(needed)} of {size(memory.limit_bytes)}"
            return f"A replica fits, {room}: do not shard. Else {more}.", replica
    return f"{more[:1].upper()}{more[1:]}.", {"micro_batch": 4 * spec.workload.micro_batch}


def _offload(case: _Case) -> Diagnosis | None:
    m = case.steps[-1].events[0].memory if case.steps else None
    s = case.strategy
    if s is None or m is None or s.offload == "none" or not m.limit_bytes or len(case.counted) < LEAST_STEPS:
        return None
    needed = m.peak_bytes + m.host_bytes
    share = median([_host_share(e) for step in case.steps for e in step.events if e.spans] or [0.0])
    if needed > ROOM * m.limit_bytes or share < OFFLOAD_SHARE:
        return None
    return Diagnosis(
        cause=Cause.OFFLOAD,
        sentence=f"Offload takes time and is not needed: {share:.0%} of a step are copies between host and device and the "
        f"optimizer on the host, and all of it would take {size(needed)} of the device's {size(m.limit_bytes)}.",
        cure='Switch it off; or keep parameters on the device with offload="optimizer"; or make steps longer by a larger '
        "micro-batch.",
        changes={"offload": "none"},
    )


def _host_share(e: StepEvent) -> float:
    """The share of a traced step in which the host copies or updates."""
    host_s = sum(s.seconds for s in e.spans if s.track is Track.HOST_COPY or s.name == "optimizer")
    return host_s / e.step_time_s if e.step_time_s else 0.0


def _compilation(case: _Case) -> Diagnosis | None:
    again = [e for step in case.steps for e in step.events if e.recompiled]
    steps = sorted({e.step for e in again})
    if len(steps) < RECOMPILED_STEPS:
        return None
    guard = next((reason for e in reversed(again) for reason in reversed(e.recompiled) if reason), "")
    because = f" The last guard that failed: {guard}." if guard else ""
    return Diagnosis(
        cause=Cause.COMPILATION,
        sentence=f"torch.compile compiled again in {plural(len(steps), 'step')}, last in step {steps[-1]}.{because}",
        cure="Keep what changes from step to step in tensors, not in Python numbers or shapes (pad batches to one length); "
        "or do not compile.",
        changes={"compile": False} if case.strategy is not None else {},
    )


def _replicas(case: _Case) -> Diagnosis | None:
    updated = [s for s in case.steps if not any(e.skipped for e in s.events)]
    copies = case.spec.world_size // max(1, case.shard_factor)
    if copies < 2 or len(updated) < UNSYNCHRONISED_STEPS or case.strategy is not None:
        return None
    if any(set(e.comm) - _IN_A_SHARD_GROUP or math.isnan(e.exposed_comm_s) for s in updated for e in s.events):
        return None
    return Diagnosis(
        cause=Cause.REPLICAS,
        sentence=f"{copies} copies of the parameters are trained apart: in {plural(len(updated), 'step')} nothing was "
        "reduced between them, so each learns from its own batches alone.",
        cure="Give FSDP the whole two-dimensional mesh (replicas x shards), not its shard dimension; with FSDP1 always give "
        "a device_mesh. For plain replicas use DDP.",
    )


def _updates(case: _Case) -> Diagnosis | None:
    """The first finding of the audit; the others are counted. Replicas that exchange nothing are named as such."""
    known = () if _replicas(case) is None else (AuditKind.REPLICAS_DIFFER,)
    found = [finding for finding in case.audit if finding.kind not in known]
    if not found:
        return None
    first, more = found[0], len({finding.parameter for finding in found} - {found[0].parameter})
    others = f" ({plural(more, 'other')}: run.audit())" if more else ""
    named = f"{first.parameter} ({first.kind.text})" if first.parameter else first.kind.text.capitalize()
    return Diagnosis(
        cause=Cause.UPDATES,
        sentence=f"{named}: {first.what}, seen in step {first.step}{others}.",
        cure=f"{first.kind.hint[:1].upper()}{first.kind.hint[1:]}.",
    )


def _late(case: _Case) -> Diagnosis | None:
    blame = Blame.of(case.counted, case.traced)
    culprits = [culprit for culprit in blame.culprits if culprit.share > LATE_SHARE]
    if blame.steps < LATE_STEPS or not culprits:
        return None
    sentence = "; ".join(culprit.sentence for culprit in culprits) + "."
    return Diagnosis(cause=Cause.LATE, sentence=sentence, cure=_LATE[culprits[0].part])


_FINDERS: tuple[Callable[[_Case], Diagnosis | None], ...] = (
    *(_updates, _replicas, _accumulation, _adapters, _late, _communication, _offload, _compilation),
)
