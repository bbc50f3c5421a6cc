"""A script contains one's own code, or imports it, and gives the run's losses; what it cannot contain is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.export import export_model
from fsdp_lab.export.script import script
from fsdp_lab.spec.spec import Spec
from tests.export.ranks import exported
from tests.own import TEXT, cell, own, spec
from tests.pool import Pool
from tests.rank.test_own import saved, train_afresh
from tests.rank.test_session import DDP

CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2", "clip_norm": 0.1, "accumulate": 2, "sync": "last", "seed": 3},
    "fsdp1": {"backend": "fsdp1", "wrap": "class:Block"},
    "dropout": {**DDP, "optimizer": "sgd", "lr": 0.1, "recompute": "every:2", "accumulate": 2},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_losses_are_the_labs_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    dropout = cell(TEXT.replace("self.fc(self.norm(x))", "F.dropout(self.fc(self.norm(x)), 0.2, self.training)"), 13)
    specs = {name: spec(**own(dropout if name == "dropout" else None, **changes)) for name, changes in CASES.items()}
    assert exported(tmp_path, specs, 3) == train_afresh(pool, specs, 3)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_script_has_the_code_once_and_nothing_of_transformers(changes: dict[str, Any]) -> None:
    text = script(spec(**own(**changes)))[0]
    assert all(text.count(word) == 1 for word in ("WIDTH = 16", "class Net(", "class Block(", "class Samples("))
    assert "OWN_MODEL, OWN_LOSS, OWN_DATA = build, loss, Samples" in text
    assert "transformers import" not in text and "SEQ_LEN" not in text and "fsdp_lab import" not in text


def test_a_script_imports_what_can_be_imported() -> None:
    made = Spec().replace(model="tests.own_module:build", loss="tests.own_module:loss", data="tests.own_module:Samples")
    text = script(made)[0]
    assert "from tests.own_module import build\n" in text and "from tests.own_module import Samples\n" in text


REFUSED: list[tuple[str, dict[str, str], str]] = [
    ("SCALE = torch.ones(1)\n\ndef build():\n    return Net() if SCALE else None\n", {},
     "workload.model: the source of build does not contain SCALE; define it inside"),
    ("def make_optimizer():\n    return Net()\n", {"build": "make_optimizer"},
     "workload.model: make_optimizer has two meanings in a script; rename it"),
    ("samples = Samples()\n", {"Samples": "samples"},
     "workload.data: the source of Samples does not contain the state of this Samples"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "others", "said"), REFUSED)
def test_what_a_script_cannot_contain_is_named(more: str, others: dict[str, str], said: str) -> None:
    names = cell(f"{TEXT}\n\n{more}", 12)
    names |= {name: names[other] for name, other in others.items()}
    with pytest.raises(SpecError) as refused:
        script(spec(**own(names)))
    assert str(refused.value).startswith(said)


@pytest.mark.slow
def test_its_checkpoint_is_no_model_of_transformers(pool: Pool, tmp_path: Path) -> None:
    saved(pool, spec(), tmp_path)
    sentence = "checkpoint: .* is of a model of your own, which transformers does not know"
    with pytest.raises(ArgumentError, match=sentence):
        export_model(tmp_path, tmp_path / "model")
