"""One's own module, loss and dataset in a Lab: sent from a cell to two ranks, again after one was killed, and stored."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.cluster import code_delivery
from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.spec import Spec
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState
from fsdp_lab.runs.evaluation import EvalConfig
from fsdp_lab.runs.parity import Verdict, parity
from tests.lab.test_lab import until
from tests.own import TEXT, cell, own
from tests.rank.test_session import DDP

pytestmark = pytest.mark.slow


@pytest.fixture
def lab(real_lab: Lab) -> Lab:
    return real_lab


def losses(run: Run) -> list[float]:
    return [e.mean_loss for e in run.events.since()[0] if e.rank == 0]


def test_a_cells_code_trains_and_its_source_is_stored(lab: Lab) -> None:
    run = lab.run(**own(), steps=6, evaluate=EvalConfig(every=3, samples=2)).wait(90)
    assert run.state is RunState.FINISHED and len(losses(run)) == 6, run.reason
    entry = run.summary()
    assert entry["memory_at_peak_bytes"] and entry["comm_bytes_per_step"]["all_gather"] > 0
    assert "loss" in str(run.table())
    assert lab.history is not None
    lab.history.flush()
    stored = lab.runs()[0]
    assert stored.spec == run.spec and "class Block(nn.Module)" in stored.spec.workload.model["source"]
    again = lab.run(stored.spec, steps=6).wait(90)
    assert losses(again) == losses(run), "the lab remembers what it has sent"


def test_ranks_keep_the_newest_code_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_delivery, "KEPT", 3)
    specs = [lab.run(**own(cell(TEXT.replace("/ 4", f"/ {n}"), n)), steps=1).wait(60).spec for n in (5, 6)]
    newest = {code.digest for code in specs[1].workload.sent_code().values()}
    assert [set(status["code"]) for status in lab.cluster.call("status")] == [newest] * 2
    assert lab.run(specs[0], steps=1).wait(60).state is RunState.FINISHED, "it is sent again"


def test_backends_agree_and_the_strategy_is_switched_live(lab: Lab) -> None:
    sweep = lab.compare(
        steps=4, rounds=2, **{**own(), "data": [own()["data"]]}, backend=["lab", "fsdp2", "fsdp1"]
    ).wait(180)
    assert [row.parity.verdict for row in sweep.comparison().rows[1:]] == [Verdict.EQUAL] * 2
    run = lab.run(**own(), steps=400, save=None)
    run.apply(**DDP).wait(60)
    run.apply(backend="fsdp2", sharding="full_shard").wait(60)
    assert [s.carried for s in run.switches] == [False, True, True]
    until(lambda: run.step > 6 or run.done, 60)
    run.stop(20)
    alone = lab.run(**own(), steps=4).wait(60)
    assert losses(alone) == losses(run)[:4] == losses(sweep.runs[0])
    assert parity(alone, sweep.runs[1]).verdict is Verdict.EQUAL


def test_a_killed_rank_is_replaced_and_gets_the_code_again(lab: Lab, tmp_path: Path) -> None:
    steady = lab.run(**own(), steps=30).wait(90)
    run = lab.run(**own(), steps=30, save=str(tmp_path), recover=True)
    until(lambda: run.step > 5 or run.done, 60)
    lab.drill("kill", rank=1)
    run.wait(120)
    assert run.state is RunState.FINISHED, run.reason
    assert len(run.incidents) == 1 and losses(run)[-1] == losses(steady)[-1]
    alone = lab.resume(tmp_path, world_size=1, micro_batch=4, steps=2).wait(120)
    assert alone.state is RunState.FINISHED, alone.reason
    assert [e.step for e in alone.events.since()[0]] == [30, 31]


def test_what_cannot_be_sent_or_used_is_refused_and_the_lab_goes_on(lab: Lab, tmp_path: Path) -> None:
    names = cell(TEXT + "\n\ndef locked():\n    return LOCK and Net()\n", 7)
    names["LOCK"] = threading.Lock()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model": names["locked"]}, "workload.model: it cannot be sent to the ranks: .*lock"),
        ({"model": names["Net"]()}, "workload.model: a Net that is built already is refused"),
        ({"loss": None}, "workload.loss: a model of your own has none yet"),
        ({"data": "stdlib"}, "workload.data: 'stdlib' is for models of transformers"),
        ({"seq_len": 64}, "workload.seq_len: it means nothing for a model of your own"),
        ({"model": "gpt2-1m"}, "workload.loss: a model of transformers computes its own loss"),
    ]
    for changes, said in refused:
        with pytest.raises(SpecError, match=said):
            lab.run(**own(names, **changes))
    (tmp_path / "only_here.py").write_text("class Net: ...\n")
    named = lab.run(**own(names, model="only_here:Net"), steps=1)
    with pytest.raises(SpecError, match="workload.model: only_here:Net cannot be imported on this rank"):
        named.wait(60)
    stranger = Spec.from_json(lab.run(**own(cell(TEXT.replace("48", "40"), 8)), steps=1).wait(60).spec.to_json())
    other = stranger.to_dict()
    other["workload"]["model"]["digest"] = "0" * 32
    with pytest.raises(SpecError, match="the code of build is not here, because .*; give model=... again"):
        lab.run(other)
    assert lab.run(**own(), steps=1).wait(60).state is RunState.FINISHED and not lab.lost
