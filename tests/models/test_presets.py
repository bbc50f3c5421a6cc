"""Presets: what they promise, and how lightly they are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models import PRESETS, build_skeleton, resolve
from fsdp_lab.models.presets import closest, facts_of
from fsdp_lab.spec.workload import Workload


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_it_says(name: str) -> None:
    model = build_skeleton(resolve(name))
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters
    assert all(p.is_meta for p in model.parameters())


def test_every_family_begins_at_1m_and_text_and_vision_reach_billions() -> None:
    families = {p.family for p in PRESETS.values()}
    assert families == {"gpt2", "llama", "bert", "t5", "vit", "resnet"}
    for family in families:
        smallest = min(p.parameters for p in PRESETS.values() if p.family == family)
        assert 0.8e6 < smallest < 1.2e6
    assert max(p.parameters for p in PRESETS.values()) > 400e9


def test_the_default_workload_is_a_preset() -> None:
    assert Workload().model in PRESETS


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("gpt-2-10m", "gpt2-10m"), ("GPT2-1M", "gpt2-1m"), ("llama-7bn", "llama-7b"), ("resnet50", "resnet-60m")],
)
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
