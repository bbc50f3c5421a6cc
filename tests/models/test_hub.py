"""Names on the Hugging Face Hub: what it has is read as a folder is; where it cannot be reached, a sentence says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch

from fsdp_lab.models import cache
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.cache import weights_folder
from fsdp_lab.models.check import check
from fsdp_lab.models.configs import resolve
from fsdp_lab.spec.workload import Workload
from tests.models.small import filled
from tests.models.words import uneven, word_tokenizer

OFFLINE = """
from fsdp_lab.spec.workload import Workload
from fsdp_lab.models.check import check
for fields in ({"model": "org/name"}, {"data": "org/name"}, {"tokenizer": "org/name"}):
    try:
        check(Workload(**fields))
    except Exception as e:
        print(e)
"""


@pytest.mark.slow
def test_a_name_is_refused_at_once_where_the_hub_cannot_be_reached(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), cache.VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=240, env=environment)
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["workload.model", "workload.data", "workload.tokenizer"]
    assert all("the Hugging Face Hub does not give it" in line and "hf download org/name" in line for line in lines)


def test_what_the_hub_has_is_fetched_once_and_read_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    word_tokenizer(tmp_path / "model")
    filled({"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 384, "n_positions": 64,
            "bos_token_id": None, "eos_token_id": None}).save_pretrained(tmp_path / "model")  # type: ignore[operator]  # fmt: skip
    (tmp_path / "dataset").mkdir()
    datasets.Dataset.from_dict({"text": uneven(50, 9)}).to_parquet(tmp_path / "dataset" / "train-0.parquet")
    fetched: list[Any] = []

    def snapshot(name: str, *, repo_type: str, **options: Any) -> str:
        fetched.append((name, repo_type, options["allow_patterns"]))
        return str(tmp_path / repo_type)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    named = Workload(model="org/name", data="org/texts", seq_len=8)
    alike = Workload(model=str(tmp_path / "model"), data=str(tmp_path / "dataset" / "train-0.parquet"), seq_len=8)
    for _ in range(2):
        check(named)
        assert weights_folder(named) == tmp_path / "model"
        one, other = (Batches(w, resolve(w.model), rank=0, world_size=1).batch(0) for w in (named, alike))
        assert all(torch.equal(one[name], other[name]) for name in other)
    cache.hub_folder.cache_clear()
    assert len(fetched) == 4 and len({*map(str, fetched)}) == 4, "config, weights, tokenizer and data"
