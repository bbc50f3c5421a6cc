"""Checks of the exercises. Each takes an answer, a value or a Spec, and what was measured or planned, and returns `Marked`:
whether it is right, and a sentence that names the mistake.

A check looks at bytes, memory and plans. Only `faster_and_no_larger` looks at times, over a link that is slow by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from html import escape
from typing import Any, ParamSpec

from course.board import note
from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.events import Role
from fsdp_lab.base.formatting import duration, plural, size, traffic
from fsdp_lab.planner.plan import Plan, fit_sentence
from fsdp_lab.planner.questions import Target, planned, searched, shape_of
from fsdp_lab.runs import Run, RunState, Sweep, WatchedRun
from fsdp_lab.runs.recovery import REPLICA
from fsdp_lab.runs.slow_motion import StepMoment
from fsdp_lab.runs.steps import Step
from fsdp_lab.spec.describe import WatchedLoop, describe_value, field_title
from fsdp_lab.spec.param_groups import matches
from fsdp_lab.spec.spec import Spec

AnyRun = Run | WatchedRun | None
Given = ParamSpec("Given")
PHASES = ("unshard", "compute", "reshard", "reduce")
EXACT = 0.005  # of a number of bytes
AS_FAST = 1.05  # times the fastest: nearer plans cannot be told apart


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
        return f"<p><b>{'✔' if self.passed else '✘'}</b> {escape(repr(self))}</p>"


class NotYet(Exception):
    """The answer is wrong, as the sentence says."""


def check(answer: Callable[Given, str]) -> Callable[Given, Marked]:
    """Makes a check of a function that returns what is said of a right answer, and raises NotYet for a wrong one. The
    docstring begins with the notebook's number, under which the board of the class has it."""
    exercise = (answer.__doc__ or "")[:2]

    @wraps(answer)
    def marked(*args: Given.args, **options: Given.kwargs) -> Marked:
        try:
            told = Marked(passed=True, sentence=answer(*args, **options))
        except NotYet as e:
            told = Marked(passed=False, sentence=str(e))
        note(exercise, passed=told.passed)
        return told

    return marked


@check
def sends_less(run: AnyRun, *, share: float = 0.6) -> str:
    """01: a rank sends at most `share` of what it sent when the run began, after switches while it trained."""
    steps = _steps(run)
    if run is None or not steps:
        raise NotYet("Nothing has been trained: press Start in the dashboard, and run this cell while it trains.")
    first, last = steps[0], steps[-1]
    before, sent = _sent_bytes(first), _sent_bytes(last)
    old, new = sum(before.values()), sum(sent.values())
    if first.spec_id == last.spec_id:
        raise NotYet(f"A rank sends {traffic(new)} a step, as when this run began: change a control while it trains.")
    specs = {switch.after.id: switch.after for switch in run.switches}
    spec = specs[last.spec_id]
    work = ("model", "data", "seq_len", "accumulate", "freeze", "lora", "world_size")
    _same_work(specs[first.spec_id], spec, work, "Change how it is sharded, not what is trained.")
    told = f"From {traffic(old)} to {traffic(new)} a step: {new / old:.0%}"
    if new <= share * old:
        return f"{told}, and training went on at step {last.number}."
    if sent.get("all_gather", 0) > new / 2:
        twice = ", of most units twice" if spec.strategy.reshards_after_forward else ""
        most = f"gathered parameters in {spec.strategy.dtypes.param}{twice}"
    else:
        how = "all-reduced, which sends twice a reduce-scatter" if spec.strategy.is_replicated else "reduced"
        most = f"gradients, {how}, in {spec.strategy.dtypes.reduce}"
    raise NotYet(f"{told}, and at most {share:.0%} were asked for. Most of it is {most}.")


MISTAKES = {  # kind of collective -> how many times the truth -> what was counted
    "all_gather": {
        4: "fp32 values of the whole model; they are gathered in bf16, 2 bytes each, and half is here already",
        2: "twice too much: a rank sends its own half of the model, and each value has 2 bytes in bf16",
        1.61: "what full_shard gathers, most units twice; here they stay gathered for the backward",
        3.22: "what full_shard gathers in fp32; here they stay gathered, in bf16",
        0.5: "half of it: each rank sends its shard whole to the other",
    },
    "reduce_scatter": {
        0.5: "gradients in bf16; precision bf16 reduces them in fp32, 4 bytes each",
        2: "the gradients of the whole model; a rank keeps the half that is its own",
        4: "the whole model twice; an all-reduce would send half of that",
    },
}


@check
def predicts_traffic(run: Run, **answers: Any) -> str:
    """02: `answers`, by kind of collective, are the bytes that a rank sent in the last step. The run keeps gathered
    parameters for its backward, computes in bf16 and reduces in fp32, on two ranks."""
    sent = _sent_bytes(_steps(run)[-1])
    for kind, mistakes in MISTAKES.items():
        given, name = answers.get(kind), kind.replace("_", "-")
        if isinstance(given, bool) or not isinstance(given, int | float):
            what = "nothing was" if given in (None, ...) else repr(given)
            raise NotYet(f"{name}: {what} given; give a number of bytes.")
        ratio = given / sent.get(kind, 0)
        if abs(ratio - 1) > EXACT:
            hint = f"{ratio:.3g} times what was sent; elements, times bytes each, times the part that is sent"
            why = next((text for at, text in mistakes.items() if abs(ratio / at - 1) < 0.03), hint)
            raise NotYet(f"{name}: {given:,.0f} bytes are {why}.")
    told = ", ".join(f"{sent[kind]:,} by {kind.replace('_', '-')}" for kind in MISTAKES)
    return f"A rank sent {told}, as its last step has measured."


TIMES = {  # a phase -> why it happens as often as it does
    "compute": "a step has a forward and a backward",
    "unshard": "between forward and backward it stays gathered under this sharding",
    "reshard": "between forward and backward it stays gathered, and after the backward it is freed",
    "reduce": "the gradients of a unit are reduced once, after its backward",
}


@check
def orders_phases(moments: Iterable[StepMoment], order: Any, *, unit: str) -> str:
    """03: `order` lists the phases of a unit in the order of a step in slow motion."""
    names = ", ".join(PHASES)
    if isinstance(order, str) or not isinstance(order, Sequence) or not order or ... in order:
        raise NotYet(f"Give a list, such as ['unshard', 'compute', ...]; the phases are {names}.")
    given = [str(phase).strip().lower() for phase in order]
    if strange := next((phase for phase in given if phase not in PHASES), None):
        raise NotYet(f"{strange!r} is no phase of a unit; the phases are {names}.")
    truth = [m.phase for m in moments if m.unit == unit]
    told = f"{unit}: {', '.join(truth)}."
    if given == truth:
        return told
    if given == [*truth[:-2], truth[-1], truth[-2]]:  # its gradients are whole by then, so it computes the same
        return f"{told} This engine frees the parameters first, so that their memory is there sooner."
    whole = False
    for i, phase in enumerate(given):
        if phase == "compute" and not whole:
            raise NotYet(f"At place {i + 1} the unit computes, but its parameters are in shards: gather them before.")
        if phase == "unshard" and whole:
            why = "it is whole already: it stays gathered for the backward"
            raise NotYet(f"At place {i + 1} the unit is gathered, but {why}.")
        if phase == "reduce" and given[:i].count("compute") < 2:
            why = "there are none before the unit's backward has computed"
            raise NotYet(f"At place {i + 1} gradients are reduced, but {why}.")
        whole = phase == "unshard" or (whole and phase != "reshard")
    for phase in PHASES:
        there, happens = (plural(phases.count(phase), "time") for phases in (given, truth))
        if there != happens:
            raise NotYet(f"{phase} is there {there}, and happens {happens}: {TIMES[phase]}.")
    raise NotYet(f"The phases are right and their order is not: after {given[0]}, think of what the next one needs.")


@check
def faster_and_no_larger(sweep: Sweep, *, share: float = 0.85) -> str:
    """04: the second run's steps take at most `share` of the first's, with no more memory, for the same work."""
    if len(sweep.specs) < 2:
        raise NotYet("Your Spec is the one that it should beat: change something in mine.")
    base, mine = sweep.specs[:2]
    work = (*base.to_dict()["workload"], "world_size", "link")
    _same_work(base, mine, work, "Change how it is sharded, over the same link.")
    runs = sweep.in_order[:2]
    if len(runs) < 2 or any(run.state is not RunState.FINISHED for run in runs):
        raise NotYet("One of the runs did not finish: see the table above.")
    summaries = [run.summary() for run in runs]
    old_s, new_s = (one["step_time_s"]["median"] for one in summaries)
    old_bytes, new_bytes = (max(one["peak_memory_bytes"]) for one in summaries)
    told = f"A step takes {new_s / old_s:.0%} of {duration(old_s)}, "
    told += f"the peak is {new_bytes / old_bytes:.0%} of {size(old_bytes)}"
    if new_bytes > old_bytes * (1 + EXACT):
        more = f"it takes {size(new_bytes - old_bytes)} more memory"
        raise NotYet(f"{told}: {more}. What stays gathered has to be somewhere.")
    if new_s > share * old_s:
        sent = [sum(_sent_bytes(_steps(run)[-1]).values()) for run in runs]
        less = f"a rank sends {sent[1] / sent[0]:.0%} of the bytes, and this link is what a step waits for"
        raise NotYet(f"{told}, and at most {share:.0%} of the time were asked for: {less}.")
    return f"{told}."


@check
def repeats_nothing(run: Run) -> str:
    """05: a run that lost a rank went on from a replica: no step trained twice, nothing written beforehand."""
    if not run.incidents:
        raise NotYet("Nothing befell this run: inject a fault with lab.drill('kill') while it trains.")
    incident, factor = run.incidents[-1], run.spec.shard_factor
    if incident.resumed_step is None:
        raise NotYet(f"The run did not go on: {run.reason or incident.sentence} Give recover=True.")
    if run.saves:
        wrote = plural(len(run.saves), "checkpoint")
        raise NotYet(f"It wrote {wrote}: leave save out, and let the ranks hold what is needed.")
    if incident.source == REPLICA:
        return f"It went on at step {incident.resumed_step} from the other rank's copy, and no file was written."
    lost = "its part of the optimizer's state" if run.spec.strategy.shards_optimizer_only else "its shards"
    why = f"{lost} were nowhere else, since {plural(factor, 'rank')} share one copy"
    repeated = f"so {plural(incident.lost_steps, 'step')} were trained again"
    raise NotYet(f"It resumed from {incident.source}, {repeated}: {why if factor > 1 else 'no copy was left'}.")


@check
def fits_and_is_fastest(base: Spec, mine: Any, target: Target) -> str:
    """06: `mine` fits on the target, and takes at most `AS_FAST` times the step of the fastest that a search finds."""
    plan = _plan(base, mine, target, same_batch=False)
    if not plan.fits:
        at_peak = plan.memory.at_peak
        role = max(Role, key=at_peak.of_role)
        cure = "recompute them, or take fewer samples at a time"
        cure = cure if role is Role.ACTIVATIONS else "shard over more ranks"
        most = f"Most of it is {role.value}, {size(at_peak.of_role(role))}: {cure}."
        raise NotYet(f"It {fit_sentence(plan)}. {most}")
    ratio = plan.step_time_s / searched(base, target).top[0].plan.step_time_s
    told = f"It fits with {size(plan.margin_bytes)} to spare, and a step takes {duration(plan.step_time_s)}"
    if ratio > AS_FAST:
        spare = "Memory that is left can hold larger micro-batches, or parameters that stay gathered"
        raise NotYet(f"{told}, {ratio:.2f} times that of the fastest. It is bound by {plan.binding}. {spare}.")
    return f"{told}, {1 - ratio:.0%} less than the best that the search tries." if ratio < 0.995 else f"{told}."


@check
def gathers_inside_hosts(base: Spec, mine: Any, target: Target) -> str:
    """09: `mine` fits on the target, and none of its all-gathers leaves a host."""
    plan = _plan(base, mine, target, same_batch=True)
    factor, per_host = mine.shard_factor, plan.machine.per_host
    if not plan.fits:
        shared = "every rank holds a whole copy" if factor == 1 else f"{factor} ranks share one copy"
        raise NotYet(f"It {fit_sentence(plan)}: {shared}.")
    gather_s = duration(plan.comm_s.get("all_gather", 0.0))
    if per_host % factor:
        crossing = f"all-gathers cross the network, {gather_s} a step"
        raise NotYet(f"It fits, but {factor} ranks share one copy, and a host has {per_host}: {crossing}.")
    return f"{factor} ranks of one host share a copy. All-gathers take {gather_s} a step, over NVLink."


def _plan(base: Spec, mine: Any, target: Target, *, same_batch: bool) -> Plan:
    """The plan of an answer. Raises NotYet for what is no answer, other work, and what cannot be planned."""
    if not isinstance(mine, Spec):
        raise NotYet("mine is not a Spec yet: write mine = spec.replace(...).")
    if mine == base:
        raise NotYet("mine is the Spec that was given: change something in mine.")
    work = [*base.to_dict()["workload"], "world_size", "precision"]
    if not same_batch:
        work = [name for name in work if name not in ("micro_batch", "accumulate")]
    _same_work(base, mine, work, "Leave that as it was.")
    if mine.global_batch != base.global_batch:
        stay = f"micro_batch times accumulate has to stay {base.workload.micro_batch * base.workload.accumulate}"
        raise NotYet(f"A step has {mine.global_batch} samples, and {base.global_batch} were asked for: {stay}.")
    try:
        return planned(mine, target)
    except FieldError as e:
        raise NotYet(f"{e}.") from None


@check
def trains_last_block(run: Run) -> str:
    """07: a GPT-2 was trained with all but its last block frozen: by the patterns, and by the optimizer's state."""
    w, units = run.spec.workload, shape_of(run.spec.replace(freeze=None, lora=None)).units
    last = len(units) - 2  # units[0] is the root
    if w.lora is not None:
        raise NotYet("These are adapters, matrices beside the model: use freeze, without lora.")
    if not w.freeze:
        raise NotYet("Everything is trained: freeze takes patterns of parameter names, as ['transformer.wte.*'].")
    frozen = [matches(f"transformer.h.{i}.mlp.c_fc.weight", w.freeze) for i in range(last + 1)]
    if frozen[last]:
        raise NotYet(f"The last block is transformer.h.{last}, and it is frozen too.")
    if not all(frozen[:last]):
        raise NotYet(f"transformer.h.{frozen.index(False)} is trained as well.")
    states = 2 * 4 * units[-1].numel / run.spec.shard_factor  # two moments in fp32
    held = _steps(run)[-1].events[0].memory.optimizer_bytes
    told = f"The optimizer's state of a rank is {size(held)}"
    if held > states * 1.02:
        rest = "embeddings (wte, wpe) or the last norm (ln_f) are trained as well"
        raise NotYet(f"{told}, and the last block's is {size(states)}: {rest}.")
    return f"{told}: that of the last block alone."


@check
def accumulates(before: AnyRun, after: AnyRun, *, micro_batches: int = 4) -> str:
    """08: the second of two watched loops takes so many micro-batches a step, and reduces their gradients once."""
    if before is None or after is None or after is before or not _steps(after):
        raise NotYet("There is no second loop yet: write it in the cell above, in a watch of its own, and run that.")
    if not isinstance(after.spec, WatchedLoop):
        raise NotYet("That is a run of the lab's own: write the loop, with fsdp_lab.watch around it.")
    one, several = _steps(before)[-1].events[0], _steps(after)[-1].events[0]
    more = several.flops / one.flops
    if abs(more - micro_batches) > 0.1:
        times = "as much" if more == 1 else f"{more:.3g} times as much"
        asked = f"{micro_batches} micro-batches are {micro_batches} times that"
        raise NotYet(f"A step computes {times} as one of the loop before, and {asked}.")
    wanted, calls = (e.comm["reduce_scatter"].calls if "reduce_scatter" in e.comm else 0 for e in (one, several))
    if not calls:
        why = "so each rank trains on its own: the last micro-batch has to synchronise"
        raise NotYet(f"Gradients are never reduced, {why}.")
    if calls != wanted:
        how = "net.set_requires_gradient_sync(False) before all micro-batches but the last"
        raise NotYet(f"Gradients are reduced {calls} times a step, and {wanted} are enough, one for each unit: {how}.")
    return f"{micro_batches} micro-batches, and {calls} reductions a step, one for each unit, as before."


@check
def heals(patient: AnyRun, after: AnyRun) -> str:
    """11: the same work has none of the patient's troubles any more."""
    if patient is None or not isinstance(patient.spec, Spec):
        raise NotYet("There is no patient: run the cell above first.")
    if after is None or not isinstance(after.spec, Spec) or after.spec.id == patient.spec.id:
        raise NotYet("Nothing is changed yet: give fields of the Spec to `mine`.")
    if other := _other_work(patient.spec, after.spec, ("model", "data", "seq_len", "world_size", "link")):
        raise NotYet(f"That is other work, or another machine: {other}.")
    if after.spec.global_batch != patient.spec.global_batch:
        samples = f"{after.spec.global_batch} samples a step, and the patient {patient.spec.global_batch}"
        raise NotYet(f"That is other work: it has {samples}.")
    if after.state is not RunState.FINISHED or len(_steps(after)) < len(_steps(patient)):
        raise NotYet("It has not ended well, or has fewer steps than the patient: see run.reason.")
    if left := after.diagnoses:
        raise NotYet(" ".join(f"Still there: {d}" for d in left))
    return f"{plural(len(patient.diagnoses), 'trouble')} gone, for the same work."


def _steps(run: AnyRun) -> list[Step]:
    return [] if run is None else [step for step in run.events.steps() if step.is_whole]


def _sent_bytes(step: Step) -> Mapping[str, int]:
    """What rank 0 sent, by kind, without the vote at a step's end."""
    return {kind: t.link_bytes for kind, t in step.events[0].comm.items() if kind != "control"}


def _same_work(base: Spec, mine: Spec, fields: Iterable[str], hint: str) -> None:
    """Raises NotYet where one of the fields of the work differs."""
    if other := _other_work(base, mine, fields):
        raise NotYet(f"That is other work: {other}. {hint}")


def _other_work(base: Spec, mine: Spec, fields: Iterable[str]) -> str:
    """Fields of the work that differ, as text; empty if none does."""
    told = {n: [describe_value(n, value) for value in values] for n, values in base.difference(mine).items()}
    return ", ".join(f"{field_title(n)} is {told[n][1]} and was {told[n][0]}" for n in fields if n in told)
