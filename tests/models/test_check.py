"""`check`: what is wrong with a workload is said with the field and the way out, and what is right passes."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fsdp_lab.base.errors import ArgumentError, SpecError
from fsdp_lab.base.generation import Sampling
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.check import check
from fsdp_lab.models.configs import resolve
from fsdp_lab.rank.generation import encoded
from fsdp_lab.spec.spec import Spec
from fsdp_lab.spec.workload import Workload

TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300, "n_positions": 64}
GROUPED = {"model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize("workload", [
    Workload(model="llama-7b", seq_len=4096), Workload(model="t5-1m", seq_len=5000), Workload(model=TINY, seq_len=64),
    Workload(model={**GROUPED, "num_key_value_heads": 2}),
    Workload(model={"model_type": "convnext", "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
             data="images"),
])  # fmt: skip
def test_what_is_right_passes(workload: Workload) -> None:
    check(workload)


@pytest.mark.parametrize(("fields", "field", "words"), [
    ({"model": "gtp2-10m"}, "workload.model", "gpt2-10m"),
    ({"model": {**TINY, "vocab_size": 258}}, "workload.model", "vocab_size of 259 or more"),
    ({"model": {**TINY, "n_head": 3}, "seq_len": 16}, "workload.model", "can be built"),
    ({"model": {**GROUPED, "num_key_value_heads": 3}}, "workload.model", "cannot compute"),
    ({"model": {"model_type": "vit", "num_labels": 1}, "data": "images"}, "workload.model", "num_labels"),
    ({"seq_len": 1025}, "workload.seq_len", "1024 or less, or a model with more positions"),
    ({"model": TINY, "seq_len": 65}, "workload.seq_len", "64 positions"),
    ({"model": "bert-1m", "seq_len": 600}, "workload.seq_len", "512 or less"),
    ({"data": "images"}, "workload.data", "reads text"), ({"model": "vit-1m"}, "workload.data", 'use "images"'),
    ({"model": "vit-1m", "data": "images", "tokenizer": "bytes"}, "workload.tokenizer", "have no tokens"),
    ({"model": "vit-1m", "data": "images", "packing": "padded"}, "workload.packing", "have no tokens"),
    ({"data": "/no/such/file"}, "workload.data", "no such file or folder"),
    ({"model": "vit-1m", "data": "/no/such/folder"}, "workload.data", "no such folder"),
    ({"model": "vit-1m", "data": __file__}, "workload.data", "is a file"),
])  # fmt: skip
def test_what_is_wrong_names_the_field_and_the_way_out(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        check(Workload(**fields))
    assert caught.value.field == field and caught.value.hint
    assert field != "workload.seq_len" or f"{caught.value.fix['seq_len']} " in str(caught.value)


def test_text_that_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    cases = {"empty.txt": (b"", "empty"), "short.txt": (b"abc", "shorter than one sequence"),
             "binary.bin": (b"\x7fELF\0\0" * 99, "not text")}  # fmt: skip
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SpecError, match=words) as caught:
            check(Workload(data=str(tmp_path / name)))
        assert caught.value.field == "workload.data"
        with pytest.raises(SpecError, match=words):
            Batches(Workload(data=str(tmp_path / name)), resolve("gpt2-1m"), rank=0, world_size=1)
    (tmp_path / "none").mkdir()
    with pytest.raises(SpecError, match="contains no text"):
        check(Workload(data=str(tmp_path / "none")))


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "mine.txt").write_text("x" * 1000)
    monkeypatch.setattr(np, "memmap", forbidden)  # the tests may run as root, who may read everything
    with pytest.raises(SpecError, match="cannot be read"):
        check(Workload(data=str(tmp_path / "mine.txt")))


def test_folders_of_images_that_do_not_fit_are_refused_and_their_models_continue_no_text(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no sub-folder with images"):
        check(Workload(model="vit-1m", data=str(tmp_path)))
    for label in range(11):
        (tmp_path / f"class{label:02}").mkdir()
        (tmp_path / f"class{label:02}" / "x.png").write_bytes(b"not an image")
    with pytest.raises(SpecError, match="11 classes and the model 10"):
        check(Workload(model="vit-1m", data=str(tmp_path)))
    (tmp_path / "class00" / "x.png").unlink()
    check(Workload(model="vit-1m", data=str(tmp_path)))  # the images themselves are read when they are needed
    given, no_batches = Spec().replace(model="vit-1m", data="images"), cast(Batches, None)
    with pytest.raises(ArgumentError, match="prompts: vit classifies images and does not continue a text; train a"):
        encoded(given, no_batches, ["a"], Sampling())
