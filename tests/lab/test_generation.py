"""Texts that the model of a run continues: asked for while it trains and afterwards, and at its evaluations."""

from __future__ import annotations

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.cluster import ClusterError
from fsdp_lab.lab import Lab
from fsdp_lab.runs import EvalConfig, RunState
from tests.lab.test_lab import until
from tests.rank.test_generation import LLAMA

SMALL = {"model": LLAMA, "seq_len": 32, "micro_batch": 2}
PROMPTS = ("def ", "import os", "x")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_writes_while_it_trains_and_after_it(real_lab: Lab) -> None:
    run = real_lab.run(**SMALL, evaluate=EvalConfig(every=3, samples=4, prompts=PROMPTS))
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
    with pytest.raises(ClusterError, match=r"lab\.generate\(text\) asks what the ranks hold"):
        run.generate("once")
    assert [c.prompt for _, c in run.completions[:3]] == [*PROMPTS]
    assert real_lab.history is not None
    real_lab.history.flush()
    kept = real_lab.runs()[run.id]
    assert kept.completions == run.completions and len(kept.completions) % 3 == 0


def test_a_request_that_comes_too_late_or_is_no_text_says_so(lab: Lab) -> None:
    run = lab.run(steps=2)
    with pytest.raises(ArgumentError, match="prompts: '' is refused"):
        run.generate("")
    with pytest.raises(ArgumentError, match="new_tokens: 0 is refused"):
        run.generate("a", new_tokens=0)
    run.wait(60)
    with pytest.raises(ClusterError, match=r"lab\.generate\(text\) asks what the ranks hold"):
        run.generate("a")
    with pytest.raises(ArgumentError, match="evaluate.prompts: 1 is refused"):
        lab.run(evaluate=EvalConfig(every=1, prompts=(1,)))  # type: ignore[arg-type]
