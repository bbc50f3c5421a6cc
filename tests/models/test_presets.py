"""Presets: what they promise, and how lightly they are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.presets import PRESETS, closest, facts_of

FEW = [name for name in PRESETS if name.endswith(("-1m", "-124m", "-7b"))]


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(n, marks=pytest.mark.nightly) for n in PRESETS if n not in FEW)])
def test_a_preset_has_the_parameters_it_says(name: str) -> None:
    model = build_skeleton(resolve(name))
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(("typo", "meant"), [("GPT2-1M", "gpt2-1m"), ("resnet50", "resnet-60m")])
def test_a_typing_error_is_told_the_nearest_names(typo: str, meant: str) -> None:
    assert meant in closest(typo)
    with pytest.raises(SpecError, match=meant) as caught:
        resolve(typo)
    assert caught.value.field == "workload.model"


def test_presets_and_check_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from fsdp_lab.models.check import check;"
        "from fsdp_lab.spec.workload import Workload;"
        "check(Workload()); check(Workload(model='vit-1m', data='images'));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_positions_that_begin_behind_the_padding_id_are_fewer() -> None:
    """RoBERTa's 34 positions hold 32 tokens."""
    roberta = {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 34, "vocab_size": 300}
    assert facts_of(roberta).max_positions == 32
    assert facts_of({**roberta, "model_type": "bert"}).max_positions == 34
