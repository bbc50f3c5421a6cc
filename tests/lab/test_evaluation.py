"""Evaluations of a run: when they are due, what is best, when it is enough, and what is kept of them."""

import math

import pytest

from fsdp_lab.base.errors import ArgumentError, FieldError, SpecError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import EvalConfig, Evaluation, RunState, summarize
from fsdp_lab.runs.evaluation import EarlyStopping
from fsdp_lab.runs.steps import assemble
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.workload import Workload
from tests.cluster.fake_rank import EVAL_LOSSES
from tests.lab.events import SPEC, steps
from tests.lab.past import past
from tests.waiting import until

BEST = EVAL_LOSSES.index(min(EVAL_LOSSES[:5]))


def test_a_judge_knows_the_best_and_when_it_is_enough():
    judge = EarlyStopping(patience=3)
    better = [judge.take(Evaluation(*one)) for one in enumerate(EVAL_LOSSES[:5])]
    assert better == [True, True, False, True, True] and judge.best == Evaluation(4, 5.0) and not judge.reason
    assert not judge.take(Evaluation(5, 5.0)) and not judge.take(Evaluation(6, math.nan)) and judge.stale == 2
    assert not judge.reason and not judge.take(Evaluation(7, -math.inf))
    assert judge.reason == "the evaluation loss has not fallen below 5 (after 5 steps) in 3 evaluations"
    judge.forget(4)
    assert judge.best == Evaluation(3, 6.0) and judge.stale == 0 and len(judge.evaluations) == 4
    judge.switched(SPEC, SPEC.replace(lr=1.0))
    assert judge.best == Evaluation(3, 6.0)
    judge.switched(SPEC, SPEC.replace(held_out=0.1))
    assert judge.best is None and judge.evaluations == []
    judge = EarlyStopping(patience=1)
    judge.take(Evaluation(0, math.nan))
    assert judge.reason == "the evaluation loss was not finite in 1 evaluation" and judge.best is None
    assert not EarlyStopping().reason and not EarlyStopping().words(Workload())


def test_refusals_come_before_anything_starts(lab: Lab):
    for given, field in (({"every": 1.5}, "every"), ({"every": 1, "samples": 0}, "samples"),
                         ({"every": 1, "patience": 0}, "patience")):  # fmt: skip
        with pytest.raises(ArgumentError, match=rf"evaluate\.{field}: .* is refused; give a whole number of 1 or more"):
            EvalConfig(**given)
    for metrics in ({"loss": max}, {"": max}, {"a": 1}, [max], {3: max}):
        with pytest.raises(ArgumentError, match="evaluate.metrics: .* is refused; give functions by their names"):
            EvalConfig(every=1, metrics=metrics)
    before = lab.current
    for options, field in (({"evaluate": 0}, "evaluate.every"), ({"evaluate": 1, "held_out": 0}, "workload.held_out")):
        with pytest.raises(FieldError) as refused:
            lab.run(**options)
        assert refused.value.field == field and lab.current is before
    with pytest.raises(SpecError, match="workload.held_out: 900 are too many"):  # the ranks know how many there are
        lab.run(evaluate=EvalConfig(every=1, samples=900), steps=3).wait(20)
    run = lab.run(evaluate=5)
    with pytest.raises(SpecError, match="nothing is held out to evaluate on; use held_out 0.05"):
        run.apply(held_out=0)
    with pytest.raises(SpecError, match="64 are too many"):
        run.apply(held_out=0.01).wait(10)
    assert not run.done and run.refused is not None


def test_a_run_stops_when_its_patience_is_out_and_says_why(lab: Lab):
    run = lab.run(steps=50, evaluate=EvalConfig(every=1, patience=3)).wait(20)
    assert run.state is RunState.STOPPED and run.step == 8
    assert run.reason == "the evaluation loss has not fallen below 5 (after 5 steps) in 3 evaluations"
    assert [e.step for e in run.evaluations] == list(range(8)) and run.best == Evaluation(BEST, EVAL_LOSSES[BEST])
    note = "evaluation loss 5.2000 (perplexity 181.3) after 8 steps, best 5.0000 (perplexity 148.4) after 5 steps"
    assert note in run.table().notes and run.summary()["best_evaluation"] == {"step": 4, "loss": 5.0}
    kept = lab.runs()[run.id]
    assert kept.best == run.best and kept.table().notes == run.table().notes and kept.reason == run.reason
    assert kept.evaluations[:6] == run.evaluations[:6] and math.isnan(kept.evaluations[6].loss)
    run = lab.run(steps=11, evaluate=4).wait(20)
    assert run.state is RunState.FINISHED and [e.step for e in run.evaluations] == [3, 7, 10], "and after the last"
    assert {e.step for e in run.events.since()[0] if e.eval_loss is not None} == {3, 7, 10}
    plain = lab.run(steps=2).wait(20)
    assert plain.evaluations == () and plain.best is None and "evaluations" not in plain.summary()


def test_the_best_is_told_while_the_ranks_are_at_its_step(lab: Lab):
    run = lab.run(evaluate=2)
    seen: list[tuple[Evaluation, list[int]]] = []
    run.on_best.append(lambda best: seen.append((best, [s["step"] for s in run._driver.call("status")])))
    until(lambda: run.step > 9)
    run.stop(10)
    assert [best.step for best, _ in seen] == [1, 3, 5, 7][-len(seen) :] and len(seen) >= 2
    assert all(ranks == [best.step + 1] * 2 for best, ranks in seen)


def test_what_is_gone_back_behind_is_forgotten_live_and_on_disk(lab: Lab):
    run = lab.run(evaluate=1)
    until(lambda: len(run.evaluations) > 5)
    run.apply(lr=0.5).wait(10)
    assert run.best == Evaluation(BEST, EVAL_LOSSES[BEST]), "another rate goes on"
    switched = run.apply(seed=5).wait(10)
    until(lambda: len(run.evaluations) > 1)
    assert not switched.carried and run.evaluations[0] == Evaluation(0, EVAL_LOSSES[0])
    before = run.apply(seq_len=64).wait(10).step
    until(lambda: len(run.evaluations) > 1)
    run.stop(10)
    assert run.evaluations[0].step == before, "other samples are held out"
    kept = lab.runs()[run.id]
    assert kept.evaluations[0] == run.evaluations[0] and len(kept.evaluations) == len(run.evaluations)


def test_a_summary_is_of_the_spec_applied_last():
    told = [*steps(0, 1, eval_loss=3.0), *steps(2, eval_loss=math.nan), *steps(3, eval_loss=2.5), *steps(4)]
    entry = summarize(SPEC, assemble(told))
    assert [e["step"] for e in entry["evaluations"]] == [0, 1, 2, 3]
    assert entry["best_evaluation"] == {"step": 3, "loss": 2.5}
    assert summarize(SPEC, assemble(steps(0, eval_loss=math.nan)))["best_evaluation"] is None
    assert past(spec=Spec()).events.since()[0][0].eval_loss is None
