"""The tokenizer and the chat template of SmolLM2, a model that was trained: what it is given to learn, and where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from fsdp_lab.core.workload import Workload
from fsdp_lab.models import cache, resolve
from fsdp_lab.models.batches import open_source
from fsdp_lab.models.sources import IGNORED
from tests.models.test_tokens import GPT2
from tests.models.words import json_lines

pytestmark = pytest.mark.slow
SAID = [
    {"role": "system", "content": "You count."},
    {"role": "user", "content": "One, two, three, and?"},
    {"role": "assistant", "content": "Four, of course."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Five.\nSix."},
]


@pytest.fixture
def folder(smollm2: Path) -> str:
    return str(smollm2)


def test_answers_alone_are_learned(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    alone = AutoTokenizer.from_pretrained(folder)
    data = json_lines(tmp_path / "chats.jsonl", [SAID, SAID[:3]], field="messages")
    model = {**GPT2, "vocab_size": len(alone), "n_positions": 256}
    workload = Workload(model=model, data=data, tokenizer=folder, packing="padded", seq_len=128, held_out=0.0)
    source = open_source(workload, resolve(model))
    both = source.collate(np.arange(2), np.arange(2))
    whole = alone.apply_chat_template(SAID, tokenize=True, return_dict=False)
    assert both["input_ids"][0, : len(whole)].tolist() == whole and not both["attention_mask"][0, len(whole) :].any()
    learned = [[i for i in row if i != IGNORED] for row in both["labels"].tolist()]
    assert alone.decode(learned[0]) == "Four, of course.<|im_end|>Five.\nSix.<|im_end|>"
    assert alone.decode(learned[1]) == "Four, of course.<|im_end|>"


def test_text_comes_back(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    said = "Shards of a unit — gathered, used, and freed. Ünïcode, too: 你好 🙂\n\n" * 20
    (tmp_path / "said.txt").write_text(said, encoding="utf-8")
    alone = AutoTokenizer.from_pretrained(folder)
    model = {**GPT2, "vocab_size": len(alone)}
    workload = Workload(model=model, data=str(tmp_path / "said.txt"), tokenizer=folder, seq_len=2, held_out=0.0)
    source = open_source(workload, resolve(model))
    ids = source.collate(np.arange(source.count), np.arange(source.count))["input_ids"].reshape(-1).tolist()
    assert ids == [*alone(said).input_ids, alone.eos_token_id][: len(ids)]
    assert said.startswith(alone.decode(ids, skip_special_tokens=True).rstrip("�"))
