"""The whole path on real ranks: a small GPT-2 on two Gloo ranks in ipyparallel engines, driven by a Lab."""

import json
import math

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.cluster import ClusterError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import EvalConfig, RunState
from tests.lab.events import losses
from tests.lab.test_lab import going
from tests.rank.test_generation import LLAMA
from tests.waiting import until

SMALL = {"model": "gpt2-1m", "micro_batch": 1, "seq_len": 64}
lab = pytest.fixture(lambda real_lab: real_lab)


def test_a_run_trains_and_tells_all(lab: Lab):
    run = lab.run(**SMALL, steps=12, ledger_every=5).wait(90)
    entry = json.loads(json.dumps(run.summary()))
    assert len(entry["losses"]) == 12 and entry["losses"][-1] < entry["losses"][0]
    assert entry["step_time_s"]["median"] > 0 and len(entry["tflops_per_rank"]) == 2 and entry["tokens_per_s"] > 0
    assert entry["comm_bytes_per_step"]["all_gather"] > 0 and all(p > 0 for p in entry["peak_memory_bytes"])
    assert all(any("CPU" in note for note in e.notes) for e in run.events.latest().values())
    until(lambda: [s.step for s in lab.rank_status()] == [12, 12])  # heartbeats come on their own
    told = run.events.since()[0]
    assert sorted({e.step for e in told if e.ledger}) == [2, 4, 9]  # the third after a switch is one anyway
    assert all(bool(e.memory_curve) == e.ledger for e in told)
    assert sum(entry["memory_at_peak_bytes"]["activations"]) > 0
    with pytest.raises(ClusterError, match="finished"):
        run.ledger()


def test_a_ledger_step_on_demand_and_stop_frees_ranks_in_any_collective_and_they_go_on(lab: Lab):
    run = going(lab, **SMALL)
    until(lambda: any(e.ledger for e in run.events.since()[0]))
    asked_at = run.step
    run.ledger()
    until(lambda: any(e.ledger and e.step >= asked_at for e in run.events.since()[0]))
    assert run.stop()
    late = {e.step for e in run.events.since()[0] if e.ledger and e.step > 2}
    assert len(late) == 1  # once, on all ranks alike
    step = run.step
    run = lab.run(run.spec, fresh=False)
    until(lambda: run.step > step + 2 or run.done)
    assert run.state is RunState.RUNNING and all(math.isfinite(x) for x in losses(run).values())


def test_a_rate_of_nothing_evaluates_the_untrained_model(lab: Lab):
    run = lab.run(**SMALL, lr=1e-30, steps=3, evaluate=EvalConfig(every=1, samples=4)).wait(60)
    assert len(run.evaluations) == 3 and len({e.loss for e in run.evaluations}) == 1


@pytest.mark.slow
def test_a_step_in_slow_motion_that_is_left_after_some_phases_trains_as_any_other(lab: Lab):
    """Bit for bit the losses of a run that was never halted."""
    plain = losses(lab.run(**SMALL, steps=6).wait(90))
    lab.run(**SMALL, steps=3).wait(90)
    with lab.slow_motion() as slow:
        for moment in slow:
            if moment.index == 9:
                break
    assert slow.event is not None and slow.event.mean_loss == plain[3]
    assert losses(lab.run(lab.spec, steps=2, fresh=False).wait(60)) == {step: plain[step] for step in (4, 5)}


# -- texts that the model of a run continues --------------------------------------------------------------------------
WRITING = {"model": LLAMA, "seq_len": 32, "micro_batch": 2}
PROMPTS = ("def ", "import os", "x")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_writes_while_it_trains_and_after_it(real_lab: Lab) -> None:
    run = real_lab.run(**WRITING, evaluate=EvalConfig(every=3, samples=4, prompts=PROMPTS))
    until(lambda: len(run.completions) >= 3)
    live = run.generate(list(PROMPTS), new_tokens=5).wait(60)
    assert len(live) == 3 and all(isinstance(text, str) for text in live)
    with pytest.raises(ArgumentError, match="longer than the model's 2048 positions"):
        run.generate("x" * 3000).wait(60)
    run.apply(backend="fsdp2").wait(60)
    assert len(run.generate("once", temperature=0.9, seed=3).wait(60)) == 1
    run.pause()
    until(lambda: run.state is RunState.PAUSED)
    paused = run.generate(list(PROMPTS)).wait(60)
    run.stop(10)
    assert real_lab.generate(list(PROMPTS)) == paused, "the ranks hold the same parameters still"
    assert [c.prompt for _, c in run.completions[:3]] == [*PROMPTS]
    real_lab.history.flush()
    kept = real_lab.runs()[run.id]
    assert kept.completions == run.completions and len(kept.completions) % 3 == 0


def test_a_request_that_comes_too_late_or_is_no_text_says_so(lab: Lab) -> None:
    run = lab.run(**SMALL, steps=2)
    with pytest.raises(ArgumentError, match="prompts: '' is refused"):
        run.generate("")
    with pytest.raises(ArgumentError, match="new_tokens: 0 is refused"):
        run.generate("a", new_tokens=0)
    run.wait(60)
    with pytest.raises(ClusterError, match=r"lab\.generate\(text\) asks what the ranks hold"):
        run.generate("a")
    with pytest.raises(ArgumentError, match="evaluate.prompts: 1 is refused"):
        lab.run(evaluate=EvalConfig(every=1, prompts=(1,)))  # type: ignore[arg-type]
