"""Skeletons: parameters without memory, real buffers, ties kept, nothing left patched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.build import build_skeleton, parameters_on_meta
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.wrapping import blocks
from tests.models.small import SIZES, SMALL


@pytest.mark.parametrize("name", SMALL)
def test_a_skeleton_is_the_eager_model_without_its_values(name: str) -> None:
    config = resolve(SMALL[name])
    skeleton = build_skeleton(config)
    eager = type(skeleton)(config)
    assert all(p.is_meta and p.dtype == torch.float32 for p in skeleton.parameters())
    ours, theirs = dict(skeleton.named_parameters()), dict(eager.named_parameters())
    assert {n: (p.shape, p.requires_grad) for n, p in ours.items()} == {
        n: (p.shape, p.requires_grad) for n, p in theirs.items()
    }
    buffers = dict(skeleton.named_buffers())
    assert buffers.keys() == dict(eager.named_buffers()).keys()
    for path, buffer in eager.named_buffers():
        assert torch.equal(buffers[path], buffer), path
    assert skeleton.training

    def shared(model: nn.Module) -> set[frozenset[str]]:
        names: dict[int, set[str]] = {}
        for path, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), set()).add(path)
        return {frozenset(s) for s in names.values() if len(s) > 1}

    assert shared(skeleton) == shared(eager), "ties are one parameter"
    assert bool(shared(skeleton)) == (name in ("gpt2", "llama tied", "bert", "t5"))


HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2}
BART = {"model_type": "bart", "d_model": 32, "vocab_size": 300, **HEADS, **LAYERS}
WIDTHS = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
FUNNEL = {"model_type": "funnel", "vocab_size": 300, "block_sizes": [2, 2], "num_decoder_layers": 1, **WIDTHS}


@pytest.mark.parametrize(
    ("model", "classes", "count"),
    [
        (SMALL["gpt2"], ("GPT2Block",), 4),
        (SMALL["t5"], ("T5Block",), 4),
        (SMALL["resnet"], ("ResNetBasicLayer",), 6),
        (SMALL["convnext"], ("ConvNextLayer",), 3),
        (BART, ("BartEncoderLayer", "BartDecoderLayer"), 4),
        (FUNNEL, ("FunnelLayer",), 5),
    ],
    ids=["gpt2", "t5", "resnet", "convnext", "two classes", "lists in a list"],
)
def test_blocks_are_what_repeats(model: Any, classes: tuple[str, ...], count: int) -> None:
    skeleton = build_skeleton(resolve(model))
    assert {type(m).__name__ for m in blocks(skeleton)} == {*classes} and len(blocks(skeleton)) == count
    order = list(skeleton.modules())
    places = [next(i for i, m in enumerate(order) if m is b) for b in blocks(skeleton)]
    assert places == sorted(places)


def test_the_door_to_meta_is_shut_again_after_an_error() -> None:
    before = nn.Module.register_parameter
    built: list[nn.Linear] = []
    with pytest.raises(ZeroDivisionError), parameters_on_meta():
        assert nn.Linear(2, 2).weight.is_meta
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert not built[0].weight.is_meta, "another thread builds real modules meanwhile"
    assert nn.Module.register_parameter is before
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2", "n_embd": 30, "n_head": 4}, "workload.model"),
        ({"model_type": "ibert", **SIZES}, "ibert computes its buffer .*weight_integer from parameters"),
    ],
)
def test_a_model_that_cannot_be_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        build_skeleton(resolve(config))
