"""One's own module, loss and dataset in a Lab: sent from a cell to two ranks, again after one was killed, and stored."""

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.cluster import code_delivery
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState
from fsdp_lab.runs.evaluation import EvalConfig
from fsdp_lab.spec.spec import Spec
from tests.lab.events import losses
from tests.own import TEXT, cell, own
from tests.waiting import until

pytestmark = pytest.mark.slow
lab = pytest.fixture(lambda real_lab: real_lab)

ENTROPY = "\nentropy = lambda outputs, batch: F.cross_entropy(outputs, batch['y']) / (len(outputs) < 3)\n"
EVALUATING = EvalConfig(every=3, samples=12, metrics={"entropy": cell(TEXT + ENTROPY, 31)["entropy"]})


def test_a_cells_code_trains_and_its_source_is_stored(lab: Lab) -> None:
    run = lab.run(**own(), steps=4, evaluate=EVALUATING).wait(90)
    assert run.state is RunState.FINISHED and len(losses(run)) == 4, run.reason
    entry = run.summary()
    assert [e["entropy"] for e in entry["evaluations"]] == pytest.approx([e.loss for e in run.evaluations])
    assert f", entropy {run.evaluations[-1].loss:.4g} after 4 steps" in str(run.table())
    assert entry["memory_at_peak_bytes"] and entry["comm_bytes_per_step"]["all_gather"] > 0
    assert "loss" in str(run.table())
    lab.history.flush()
    stored = lab.runs()[0]
    assert stored.evaluations == run.evaluations and stored.summary() == entry
    assert stored.spec == run.spec and "class Block(nn.Module)" in stored.spec.workload.model["source"]
    assert losses(lab.run(stored.spec, steps=4).wait(90)) == losses(run), "the lab remembers what it has sent"


def test_ranks_keep_the_newest_code_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_delivery, "KEPT", 3)
    specs = [lab.run(**own(cell(TEXT.replace("/ 4", f"/ {n}"), n)), steps=1).wait(60).spec for n in (5, 6)]
    newest = {code.digest for code in specs[1].workload.sent_code().values()}
    assert [set(status["code"]) for status in lab.cluster.call("status")] == [newest] * 2
    assert lab.run(specs[0], steps=1).wait(60).state is RunState.FINISHED, "it is sent again"


def test_a_killed_rank_is_replaced_and_gets_the_code_again(lab: Lab, tmp_path: Path) -> None:
    steady = lab.run(**own(), steps=15).wait(90)
    names = cell(TEXT, 9)
    run = lab.run(
        **own(names, data=names["Samples"]()), steps=15, save=str(tmp_path), recover=True, evaluate=EVALUATING
    )
    until(lambda: run.step > 4 or run.done)
    told = " ".join(run.notes)
    assert "Checkpoints only at the end" in told and "as a script: data: it is an object" in told
    assert "as a script" not in " ".join(steady.notes)
    lab.drill("kill", rank=1)
    run.wait(120)
    assert run.state is RunState.FINISHED, run.reason
    assert [(e.step, [*e.metrics]) for e in run.evaluations] == [(n, ["entropy"]) for n in (2, 5, 8, 11, 14)]
    assert len(run.incidents) == 1 and losses(run)[14] == losses(steady)[14]
    alone = lab.resume(tmp_path, world_size=1, micro_batch=4, steps=2).wait(120)
    assert alone.state is RunState.FINISHED, alone.reason
    assert [e.step for e in alone.events.since()[0]] == [15, 16]


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
    wrong = lab.run(**own(micro_batch=3, held_out=0.25), steps=4, evaluate=EVALUATING)  # it is tried on two samples
    with pytest.raises(ArgumentError, match=r"evaluate.metrics: entropy failed \(ValueError: it returned inf\)"):
        wrong.wait(60)
    assert wrong.step == 3 and wrong.reason.startswith("evaluate.metrics: entropy failed")
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


MODULE = """
import torch
import net_parts

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x):
        return net_parts.act(self.fc(x)) * 1.0

def loss(model, batch):
    return (model(batch) - 1).square().mean()

class Samples:
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.randn(8, generator=torch.Generator().manual_seed(i))
"""
PARTS = "def act(x):\n    return x * 2.0\n"


def test_ranks_use_a_module_as_the_kernel_has_imported_it(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also a module that this one imports, by a name, by an object or from a cell; the ranks do not see the files at all."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # so that a change within a second is imported

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    write("net_module", MODULE)
    write("net_parts", PARTS)
    net, parts = importlib.import_module("net_module"), importlib.import_module("net_parts")

    def trained(model: Any = "net_module:Net", loss: Any = "net_module:loss", data: Any = "net_module:Samples") -> Any:
        run = lab.run(model=model, loss=loss, data=data, wrap="whole", micro_batch=2, steps=3).wait(90)
        assert run.state is RunState.FINISHED, run.reason
        return [*losses(run).values()]

    from_cell = cell("from net_module import Net\n\ndef build():\n    return Net()\n", 11)["build"]
    first = trained()
    assert first == trained(net.Net, net.loss, net.Samples) == trained(from_cell)
    write("net_parts", PARTS.replace("2.0", "3.0"))
    assert trained() == first, "the ranks use what the kernel has"
    importlib.reload(parts)
    second = trained(from_cell)
    assert second == trained() != first
    old = net.Net
    write("net_module", MODULE.replace("* 1.0", "* 4.0").replace("manual_seed(i)", "manual_seed(i + 1)"))
    importlib.reload(net)
    third = trained()
    assert third == trained(net.Net, net.loss, net.Samples) and third[0] not in {*first, *second}
    assert trained(old, data=net.Samples) not in (second, third), "its old forward, on the new samples"
    write("net_engine", "from tests.your_engines import FullyShard as Mine\n")
    engine = importlib.import_module("net_engine")
    small: dict[str, Any] = {"model": "gpt2-1m", "seq_len": 32, "engine": "net_engine:Mine", "steps": 1}
    assert lab.run(**small).wait(60).state is RunState.FINISHED
    write("net_engine", "class Mine: pass\n")
    importlib.reload(engine)
    with pytest.raises(SpecError, match="Mine has no method shard"):
        lab.run(**small).wait(60)
