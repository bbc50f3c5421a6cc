"""The model of a checkpoint, opened by transformers, has every value that the ranks held."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.cli.main import main
from fsdp_lab.export import export_model
from fsdp_lab.rank import Session
from fsdp_lab.spec.checkpoint_format import find
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, SMALL, session, spec

IMAGES = {"model": "resnet-1m", "data": "images"}


def _saved(place: Place, given: dict[str, Any], root: str) -> Session:
    """A training of three steps, with a checkpoint of the last."""
    s = session(place)
    s.apply("run", given)
    s.train(3)
    Path(root).mkdir(exist_ok=True)
    s.save(root)
    s.saves(30.0)
    return s


def _trained(place: Place, given: dict[str, Any], root: str) -> dict[str, Tensor]:
    """What DDP's rank holds whole."""
    s = _saved(place, given, root)
    values = {n.removeprefix("module."): t.detach().clone() for n, t in s.namespace()["model"].state_dict().items()}
    s.close()
    return values


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "opener"), [({}, AutoModelForCausalLM), (IMAGES, AutoModelForImageClassification)])
def test_from_pretrained_opens_it(pool: Pool, tmp_path: Path, changes: dict[str, Any], opener: Any) -> None:
    held = pool.run(_trained, 2, spec(**DDP, **changes).to_dict(), str(tmp_path / "saved"), reduction=None)[0]
    opened = opener.from_pretrained(export_model(tmp_path / "saved", tmp_path / "model")).state_dict()
    assert opened.keys() == held.keys() and all(torch.equal(opened[name], value) for name, value in held.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "saved"]


def written(place: Place, given: dict[str, Any], root: str, prompts: list[str], new_tokens: int) -> dict[str, str]:
    """A saved training's texts, of this rank's prompts."""
    s = _saved(place, given, root)
    texts: dict[str, str] = s.generate("run", prompts, {"new_tokens": new_tokens})["texts"]
    s.close()
    return texts


def continued(model: Any, tokenizer: Any, prompts: list[str], new_tokens: int) -> dict[str, str]:
    """Number of the prompt -> its text by transformers."""
    texts = {}
    for number, prompt in enumerate(prompts):
        asked = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        (out,) = model.generate(**asked, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        texts[str(number)] = tokenizer.decode(out[asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def test_what_is_exported_writes_the_same_with_its_tokenizer_and_keeps_its_config(pool: Pool, tmp_path: Path) -> None:
    prompts = ["def f(", "import"]
    given = spec(model={**SMALL, "resid_pdrop": 0.25})
    one, other = pool.run(written, 2, given.to_dict(), str(tmp_path / "saved"), prompts, 16, reduction=None)
    folder = export_model(tmp_path / "saved", tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert (model.config.resid_pdrop, model.config.use_cache) == (0.25, True)
    assert continued(model, tokenizer, prompts, 16) == {**one, **other}


def test_what_is_there_is_not_lost(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.run(_trained, 1, spec(world_size=1, **DDP).to_dict(), str(tmp_path / "saved"), reduction=None)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(ArgumentError, match="exists already"):
            export_model(tmp_path / "saved", taken, force=force)
    with pytest.raises(ArgumentError, match="there is no folder"):
        export_model(tmp_path / "saved", tmp_path / "no" / "where")
    with pytest.raises(ArgumentError, match="it holds none"):
        export_model(taken, tmp_path / "model")
    assert [p.name for p in taken.iterdir()] == ["thesis.txt"]

    saved = find(tmp_path / "saved")
    assert main(["checkpoints", str(tmp_path / "saved")]) == 0
    assert f"{saved.path.name}  after 3 steps, " in capsys.readouterr().out
    assert main(["checkpoints", str(saved.path), "--export", str(tmp_path / "model")]) == 0
    assert main(["checkpoints", str(saved.path), "--export", str(tmp_path / "model")]) == 2
    assert main(["checkpoints", str(saved.path), "--export", str(tmp_path / "model"), "--force"]) == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "gpt2"
    next(saved.path.glob("*.safetensors")).unlink()
    capsys.readouterr()
    assert main(["checkpoints", str(tmp_path / "saved")]) == 0
    assert f"incomplete: {saved.path.name} lacks its file" in capsys.readouterr().out
    assert main(["checkpoints", str(tmp_path / "nowhere")]) == 2
