"""Checks of the course's exercises (notebooks/00_the_course.ipynb). Each takes an answer, a value or a Spec, and what was
measured or planned, and returns `Marked`: whether it is right, and a sentence that names the mistake.

A check looks at bytes, memory and plans. Only `faster_and_no_larger` looks at times, over a link that is slow by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdp_lab.core.describe import describe_value, field_title
from fsdp_lab.core.errors import FieldError
from fsdp_lab.core.events import Role
from fsdp_lab.core.formatting import duration, plural, size, traffic
from fsdp_lab.core.loops import WatchedLoop
from fsdp_lab.core.patterns import matches
from fsdp_lab.core.spec import Spec
from fsdp_lab.planner.memory import MemoryPlan
from fsdp_lab.planner.plan import fit_sentence
from fsdp_lab.planner.questions import Target, planned, searched, shape_of
from fsdp_lab.runs.recovery import REPLICA
from fsdp_lab.runs.run import Run
from fsdp_lab.runs.slow_motion import StepMoment
from fsdp_lab.runs.steps import Step
from fsdp_lab.runs.sweep import Sweep
from fsdp_lab.runs.view import RunState
from fsdp_lab.runs.watched import WatchedRun

GATHER, REDUCTIONS = "all_gather", ("reduce_scatter", "all_reduce")
PHASES = ("unshard", "compute", "reshard", "reduce")
EXACT = 0.005  # of a number of bytes
AS_FAST = 1.05  # times the fastest: nearer plans cannot be told apart
WORK = (
    "model",
    "data",
    "seq_len",
    "accumulate",
    "freeze",
    "lora",
    "world_size",
)  # what a switch of strategy leaves alone


@dataclass(frozen=True, kw_only=True, repr=False)
class Marked:
    """An answer, checked: true where it is right. In a notebook it shows its sentence."""

    passed: bool
    sentence: str

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"{'Passed' if self.passed else 'Not yet'}. {self.sentence}"

    def _repr_html_(self) -> str:
        sign = "✔" if self.passed else "✘"
        return f"<p><b>{sign}</b> {escape(repr(self))}</p>"


def _right(sentence: str) -> Marked:
    return Marked(passed=True, sentence=sentence)


def _wrong(sentence: str) -> Marked:
    return Marked(passed=False, sentence=sentence)


# -- notebook 01 -----------------------------------------------------------------------------------------------------


def sends_less(run: Run | WatchedRun | None, *, share: float = 0.6) -> Marked:
    """Whether a rank sends at most `share` of what it sent when the run began, after switches while it trained."""
    steps = _steps(run)
    if run is None or not steps:
        return _wrong("Nothing has been trained: press Start in the dashboard, and run this cell while it trains.")
    if steps[0].spec_id == steps[-1].spec_id:
        sent = traffic(sum(_sent_bytes(steps[-1]).values()))
        return _wrong(f"A rank sends {sent} a step, as when this run began: change a control while it trains.")
    specs = {switch.after.id: switch.after for switch in run.switches}
    first, last = specs[steps[0].spec_id], specs[steps[-1].spec_id]
    if other := _other_work(first, last, WORK):
        return _wrong(f"That is other work: {other}. Change how it is sharded, not what is trained.")
    before, now = (_sent_bytes(step) for step in (steps[0], steps[-1]))
    ratio = sum(now.values()) / sum(before.values())
    told = f"From {traffic(sum(before.values()))} to {traffic(sum(now.values()))} a step: {ratio:.0%}"
    if ratio <= share:
        return _right(f"{told}, and training went on at step {steps[-1].number}.")
    return _wrong(f"{told}, and at most {share:.0%} were asked for. {_most_of(now, last)}")


def _most_of(sent: Mapping[str, int], spec: Spec) -> str:
    """What most of the traffic is, and why it is so much."""
    dtypes, gathered = spec.strategy.dtypes, sent.get(GATHER, 0)
    if gathered > sum(sent.values()) / 2:
        twice = ", of most units twice" if spec.strategy.reshards_after_forward else ""
        return f"Most of it is gathered parameters in {dtypes.param}{twice}."
    reduced = "all-reduced, which sends twice a reduce-scatter" if spec.strategy.is_replicated else "reduced"
    return f"Most of it is gradients, {reduced}, in {dtypes.reduce}."


# -- notebook 02 -----------------------------------------------------------------------------------------------------


def predicts_traffic(run: Run, **answers: Any) -> Marked:
    """Whether `answers`, by kind of collective, are the bytes that a rank sent in the last step. The run keeps gathered
    parameters for its backward, computes in bf16 and reduces in fp32, on two ranks."""
    sent = _sent_bytes(_steps(run)[-1])
    mistakes = {
        GATHER: {4: "fp32 values of the whole model; they are gathered in bf16, 2 bytes each, and half is here already",
                 2: "twice too much: a rank sends its own half of the model, and each value has 2 bytes in bf16",
                 1.61: "what full_shard gathers, most units twice; here they stay gathered for the backward",
                 3.22: "what full_shard gathers in fp32; here they stay gathered, in bf16",
                 0.5: "half of it: each rank sends its shard whole to the other"},
        "reduce_scatter": {0.5: "gradients in bf16; precision bf16 reduces them in fp32, 4 bytes each",
                           2: "the gradients of the whole model; a rank keeps the half that is its own",
                           4: "the whole model twice; an all-reduce would send half of that"},
    }  # fmt: skip
    for kind, truth in ((kind, sent.get(kind, 0)) for kind in mistakes):
        given, name = answers.get(kind), kind.replace("_", "-")
        if isinstance(given, bool) or not isinstance(given, int | float):
            return _wrong(
                f"{name}: {'nothing was' if given in (None, ...) else repr(given)} given; give a number of bytes."
            )
        ratio = given / truth
        if abs(ratio - 1) <= EXACT:
            continue
        why = next((text for at, text in mistakes[kind].items() if abs(ratio / at - 1) < 0.03), "")
        hint = why or f"{ratio:.3g} times what was sent; elements, times bytes each, times the part that is sent"
        return _wrong(f"{name}: {given:,.0f} bytes are {hint}.")
    told = ", ".join(f"{sent[kind]:,} by {kind.replace('_', '-')}" for kind in mistakes)
    return _right(f"A rank sent {told}, as its last step has measured.")


# -- notebook 03 -----------------------------------------------------------------------------------------------------


def orders_phases(moments: Iterable[StepMoment], order: Any, *, unit: str) -> Marked:
    """Whether `order` lists the phases of a unit in the order of a step in slow motion."""
    if isinstance(order, str) or not isinstance(order, Sequence) or not order or ... in order:
        return _wrong(f"Give a list, such as ['unshard', 'compute', ...]; the phases are {', '.join(PHASES)}.")
    given = [str(phase).strip().lower() for phase in order]
    if strange := next((phase for phase in given if phase not in PHASES), None):
        return _wrong(f"{strange!r} is no phase of a unit; the phases are {', '.join(PHASES)}.")
    truth = [m.phase for m in moments if m.unit == unit]
    freed_last = [*truth[:-2], truth[-1], truth[-2]]  # its gradients are whole by then, so it computes the same
    if given in (truth, freed_last):
        note = (
            "" if given == truth else " This engine frees the parameters first, so that their memory is there sooner."
        )
        return _right(f"{unit}: {', '.join(truth)}.{note}")
    return _wrong(_disorder(given, truth))


def _disorder(given: Sequence[str], truth: Sequence[str]) -> str:
    """The first thing that is wrong with an order of phases."""
    whole = False
    for i, phase in enumerate(given):
        if phase == "compute" and not whole:
            return f"At place {i + 1} the unit computes, but its parameters are in shards: gather them before."
        if phase == "unshard" and whole:
            return (
                f"At place {i + 1} the unit is gathered, but it is whole already: it stays gathered for the backward."
            )
        if phase == "reduce" and given[:i].count("compute") < 2:
            return (
                f"At place {i + 1} gradients are reduced, but there are none before the unit's backward has computed."
            )
        whole = phase == "unshard" or (whole and phase != "reshard")
    for phase, times in ((phase, truth.count(phase)) for phase in PHASES):
        if given.count(phase) != times:
            why = {
                "compute": "a step has a forward and a backward",
                "unshard": "between forward and backward it stays gathered under this sharding",
                "reshard": "between forward and backward it stays gathered, and after the backward it is freed",
                "reduce": "the gradients of a unit are reduced once, after its backward",
            }[phase]
            return f"{phase} is there {plural(given.count(phase), 'time')}, and happens {plural(times, 'time')}: {why}."
    return f"The phases are right and their order is not: after {given[0]}, think of what the next one needs."


# -- notebook 04 -----------------------------------------------------------------------------------------------------


def faster_and_no_larger(sweep: Sweep, *, share: float = 0.85) -> Marked:
    """Whether the second run's steps take at most `share` of the first's, with no more memory, for the same work."""
    if len(sweep.specs) < 2:
        return _wrong("Your Spec is the one that it should beat: change something in mine.")
    base, mine = sweep.specs[:2]
    work = (*base.to_dict()["workload"], "world_size", "link")
    if other := _other_work(base, mine, work):
        return _wrong(f"That is other work: {other}. Change how it is sharded, over the same link.")
    runs = sweep.in_order
    if len(runs) < 2 or any(run.state is not RunState.FINISHED for run in runs[:2]):
        return _wrong("One of the runs did not finish: see the table above.")
    found = [run.summary() for run in runs[:2]]
    step_s = [one["step_time_s"]["median"] for one in found]
    peak = [max(one["peak_memory_bytes"]) for one in found]
    time_told, peak_told = (
        f"{new / old:.0%} of {unit(old)}" for (old, new), unit in ((step_s, duration), (peak, size))
    )
    told = f"A step takes {time_told}, the peak is {peak_told}"
    if peak[1] > peak[0] * (1 + EXACT):
        return _wrong(
            f"{told}: it takes {size(peak[1] - peak[0])} more memory. What stays gathered has to be somewhere."
        )
    if step_s[1] > share * step_s[0]:
        sent = [sum(_sent_bytes(_steps(run)[-1]).values()) for run in runs[:2]]
        less = f"a rank sends {sent[1] / sent[0]:.0%} of the bytes, and this link is what a step waits for"
        return _wrong(f"{told}, and at most {share:.0%} of the time were asked for: {less}.")
    return _right(f"{told}.")


# -- notebook 05 -----------------------------------------------------------------------------------------------------


def repeats_nothing(run: Run) -> Marked:
    """Whether a run that lost a rank went on from a replica: no step trained twice, nothing written beforehand."""
    if not run.incidents:
        return _wrong("Nothing befell this run: inject a fault with lab.drill('kill') while it trains.")
    incident = run.incidents[-1]
    if incident.resumed_step is None:
        return _wrong(f"The run did not go on: {run.reason or incident.sentence} Give recover=True.")
    if run.saves:
        return _wrong(
            f"It wrote {plural(len(run.saves), 'checkpoint')}: leave save out, and let the ranks hold what is needed."
        )
    if incident.source != REPLICA:
        factor = run.spec.shard_factor
        lost = "its part of the optimizer's state" if run.spec.strategy.shards_optimizer_only else "its shards"
        repeated = f"so {plural(incident.lost_steps, 'step')} were trained again"
        why = (
            f"{lost} were nowhere else, since {plural(factor, 'rank')} share one copy"
            if factor > 1
            else "no copy was left"
        )
        return _wrong(f"It went on from {incident.source}, {repeated}: {why}.")
    return _right(f"It went on at step {incident.resumed_step} from the other rank's copy, and no file was written.")


# -- notebooks 06 and 09: plans --------------------------------------------------------------------------------------


def fits_and_is_fastest(base: Spec, mine: Any, target: Target) -> Marked:
    """Whether `mine` fits on the target, and takes at most `AS_FAST` times the step of the fastest that a search finds."""
    if (wrong := _planned_work(base, mine, leave=("micro_batch", "accumulate"))) is not None:
        return wrong
    if mine.global_batch != base.global_batch:
        return _wrong(f"A step has {mine.global_batch} samples, and {base.global_batch} were asked for: micro_batch times "
                      f"accumulate has to stay {base.workload.micro_batch * base.workload.accumulate}.")  # fmt: skip
    try:
        plan, top = planned(mine, target), searched(base, target).top
    except FieldError as e:
        return _wrong(f"{e}.")
    if not plan.fits:
        return _wrong(f"It {fit_sentence(plan)}. {_largest_part(plan.memory)}")
    ratio = plan.step_time_s / top[0].plan.step_time_s
    told = f"It fits with {size(plan.margin_bytes)} to spare, and a step takes {duration(plan.step_time_s)}"
    if ratio > AS_FAST:
        spare = "Memory that is left can hold larger micro-batches, or parameters that stay gathered"
        return _wrong(f"{told}, {ratio:.2f} times that of the fastest. It is bound by {plan.binding}. {spare}.")
    beats = f", {1 - ratio:.0%} less than the best that the search tries" if ratio < 0.995 else ""
    return _right(f"{told}{beats}.")


def _largest_part(memory: MemoryPlan) -> str:
    """What most of the peak is, and what makes it smaller."""
    role = max(Role, key=memory.at_peak.of_role)
    cure = "recompute them, or take fewer samples at a time" if role is Role.ACTIVATIONS else "shard over more ranks"
    return f"Most of it is {role.value}, {size(memory.at_peak.of_role(role))}: {cure}."


def gathers_inside_hosts(base: Spec, mine: Any, target: Target) -> Marked:
    """Whether `mine` fits on the target, and none of its all-gathers leaves a host."""
    if (wrong := _planned_work(base, mine)) is not None:
        return wrong
    try:
        plan = planned(mine, target)
    except FieldError as e:
        return _wrong(f"{e}.")
    factor, per_host = mine.shard_factor, plan.machine.per_host
    if not plan.fits:
        shared = "every rank holds a whole copy" if factor == 1 else f"{factor} ranks share one copy"
        return _wrong(f"It {fit_sentence(plan)}: {shared}.")
    gather_s = duration(plan.comm_s.get(GATHER, 0.0))
    if per_host % factor:
        crossing = f"all-gathers cross the network, {gather_s} a step"
        return _wrong(f"It fits, but {factor} ranks share one copy, and a host has {per_host}: {crossing}.")
    return _right(f"{factor} ranks of one host share a copy. All-gathers take {gather_s} a step, over NVLink.")


def _planned_work(base: Spec, mine: Any, leave: Sequence[str] = ()) -> Marked | None:
    """What is wrong with an answer before it is planned; None: nothing."""
    if not isinstance(mine, Spec):
        return _wrong("mine is not a Spec yet: write mine = spec.replace(...).")
    if mine == base:
        return _wrong("mine is the Spec that was given: change something in mine.")
    work = [name for name in (*base.to_dict()["workload"], "world_size", "precision") if name not in leave]
    other = _other_work(base, mine, work)
    return _wrong(f"That is other work: {other}. Leave that as it was.") if other else None


# -- notebook 07 -----------------------------------------------------------------------------------------------------


def trains_last_block(run: Run) -> Marked:
    """Whether a GPT-2 was trained with all but its last block frozen: by the patterns, and by the optimizer's state."""
    w, units = run.spec.workload, shape_of(run.spec.replace(freeze=None, lora=None)).units
    last = len(units) - 2  # units[0] is the root
    if w.lora is not None:
        return _wrong("These are adapters, matrices beside the model: use freeze, without lora.")
    if not w.freeze:
        return _wrong("Everything is trained: freeze takes patterns of parameter names, as ['transformer.wte.*'].")
    blocks = [f"transformer.h.{i}.mlp.c_fc.weight" for i in range(last + 1)]
    frozen = [matches(name, w.freeze) for name in blocks]
    if frozen[last]:
        return _wrong(f"The last block is transformer.h.{last}, and it is frozen too.")
    if not all(frozen[:last]):
        return _wrong(f"transformer.h.{frozen.index(False)} is trained as well.")
    states = 2 * 4 * units[-1].numel / run.spec.shard_factor  # two moments in fp32
    found = _steps(run)[-1].events[0].memory.optimizer_bytes
    if found > states * 1.02:
        told = f"The optimizer's state of a rank is {size(found)}, and the last block's is {size(states)}"
        return _wrong(f"{told}: embeddings (wte, wpe) or the last norm (ln_f) are trained as well.")
    return _right(f"The optimizer's state of a rank is {size(found)}: that of the last block alone.")


# -- notebook 08 -----------------------------------------------------------------------------------------------------


def accumulates(before: Run | WatchedRun | None, after: Run | WatchedRun | None, *, micro_batches: int = 4) -> Marked:
    """Whether the second of two watched loops takes so many micro-batches a step, and reduces their gradients once."""
    if before is None or after is None or after is before or not _steps(after):
        return _wrong("There is no second loop yet: write it in the cell above, in a watch of its own, and run that.")
    if not isinstance(after.spec, WatchedLoop):
        return _wrong("That is a run of the lab's own: write the loop, with fsdp_lab.watch around it.")
    one, several = _steps(before)[-1].events[0], _steps(after)[-1].events[0]
    found = several.flops / one.flops
    if abs(found - micro_batches) > 0.1:
        times = "as much" if found == 1 else f"{found:.3g} times as much"
        asked = f"{micro_batches} micro-batches are {micro_batches} times that"
        return _wrong(f"A step computes {times} as one of the loop before, and {asked}.")
    calls = [e.comm[REDUCTIONS[0]].calls if REDUCTIONS[0] in e.comm else 0 for e in (one, several)]
    if not calls[1]:
        return _wrong(
            "Gradients are never reduced, so each rank trains on its own: the last micro-batch has to synchronise."
        )
    if calls[1] != calls[0]:
        return _wrong(f"Gradients are reduced {calls[1]} times a step, and {calls[0]} are enough, one for each unit: "
                      "net.set_requires_gradient_sync(False) before all micro-batches but the last.")  # fmt: skip
    return _right(f"{micro_batches} micro-batches, and {calls[1]} reductions a step, one for each unit, as before.")


# -- notebook 11 -----------------------------------------------------------------------------------------------------


def heals(patient: Run | WatchedRun | None, after: Run | WatchedRun | None) -> Marked:
    """Whether the same work has none of the patient's troubles any more."""
    if patient is None or not isinstance(patient.spec, Spec):
        return _wrong("There is no patient: run the cell above first.")
    if after is None or not isinstance(after.spec, Spec) or after.spec.id == patient.spec.id:
        return _wrong("Nothing is changed yet: give fields of the Spec to `mine`.")
    if other := _other_work(patient.spec, after.spec, ("model", "data", "seq_len", "world_size", "link")):
        return _wrong(f"That is other work, or another machine: {other}.")
    if after.spec.global_batch != patient.spec.global_batch:
        samples = f"{after.spec.global_batch} samples a step, and the patient {patient.spec.global_batch}"
        return _wrong(f"That is other work: it has {samples}.")
    if after.state is not RunState.FINISHED or len(_steps(after)) < len(_steps(patient)):
        return _wrong("It has not ended well, or has fewer steps than the patient: see run.reason.")
    if left := after.diagnoses:
        return _wrong(" ".join(f"Still there: {d}" for d in left))
    return _right(f"{plural(len(patient.diagnoses), 'trouble')} gone, for the same work.")


# -- helpers ---------------------------------------------------------------------------------------------------------


def _steps(run: Run | WatchedRun | None) -> list[Step]:
    return [] if run is None else [step for step in run.events.steps() if step.is_whole]


def _sent_bytes(step: Step) -> dict[str, int]:
    """What rank 0 sent, by kind, without the vote at a step's end."""
    return {kind: t.link_bytes for kind, t in step.events[0].comm.items() if kind != "control"}


def _other_work(base: Spec, mine: Spec, fields: Iterable[str]) -> str:
    """Fields of the work that differ, as text; empty if none does."""
    differing = base.difference(mine)
    told = {name: [describe_value(name, value) for value in values] for name, values in differing.items()}
    return ", ".join(
        f"{field_title(name)} is {told[name][1]} and was {told[name][0]}" for name in fields if name in told
    )
