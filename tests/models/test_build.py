"""Skeletons: parameters without memory, real buffers, ties kept, nothing left patched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models import build_skeleton, resolve
from fsdp_lab.models.build import parameters_on_meta
from fsdp_lab.models.wrapping import block_class_names, blocks
from tests.models.small import SMALL


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


@pytest.mark.parametrize("name", SMALL)
def test_ties_are_one_parameter(name: str) -> None:
    config = resolve(SMALL[name])
    skeleton, eager = build_skeleton(config), type(build_skeleton(config))(config)

    def shared(model: nn.Module) -> set[frozenset[str]]:
        names: dict[int, set[str]] = {}
        for path, p in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(p), set()).add(path)
        return {frozenset(s) for s in names.values() if len(s) > 1}

    assert shared(skeleton) == shared(eager)
    assert bool(shared(skeleton)) == (name in ("gpt2", "llama tied", "bert", "t5"))


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [
        ("gpt2", ("GPT2Block",), 4),
        ("llama", ("LlamaDecoderLayer",), 4),
        ("bert", ("BertLayer",), 4),
        ("t5", ("T5Block",), 4),
        ("vit", ("ViTLayer",), 5),
        ("resnet", ("ResNetBasicLayer",), 6),
        ("convnext", ("ConvNextLayer",), 3),
    ],
)
def test_blocks_are_what_repeats(name: str, classes: tuple[str, ...], count: int) -> None:
    skeleton = build_skeleton(resolve(SMALL[name]))
    assert block_class_names(skeleton) == classes
    assert len(blocks(skeleton)) == count
    order = list(skeleton.modules())
    places = [next(i for i, m in enumerate(order) if m is b) for b in blocks(skeleton)]
    assert places == sorted(places)


def test_encoder_and_decoder_of_two_classes_are_both_blocks() -> None:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 300,
             "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2}  # fmt: skip
    skeleton = build_skeleton(resolve({"model_type": "bart", **sizes}))
    assert block_class_names(skeleton) == ("BartEncoderLayer", "BartDecoderLayer")
    assert blocks(nn.Linear(2, 2)) == []


def test_lists_in_a_list_are_no_blocks_but_what_they_contain() -> None:
    sizes = {"block_sizes": [2, 2], "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
    skeleton = build_skeleton(resolve({"model_type": "funnel", "vocab_size": 300, **sizes}))
    assert block_class_names(skeleton) == ("FunnelLayer",) and len(blocks(skeleton)) == 5


def test_a_buffer_that_is_computed_from_parameters_is_refused_by_name() -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 300,
    }
    with pytest.raises(SpecError, match="ibert computes its buffer .*weight_integer from parameters"):
        build_skeleton(resolve({"model_type": "ibert", **sizes}))


def test_the_door_to_meta_is_shut_again_after_an_error() -> None:
    before = nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError), parameters_on_meta():
        assert nn.Linear(2, 2).weight.is_meta
        raise ZeroDivisionError
    assert nn.Module.register_parameter is before
    assert not nn.Linear(2, 2).weight.is_meta


def test_another_thread_builds_real_modules_meanwhile() -> None:
    built: list[nn.Linear] = []
    with parameters_on_meta():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert not built[0].weight.is_meta


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_embd": 30, "n_head": 4},
        {"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4},
    ],
)
def test_a_model_that_cannot_be_is_refused_in_its_own_words(config: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        build_skeleton(resolve(config))
    assert caught.value.field == "workload.model"


def test_half_precision_in_a_config_does_not_reach_the_master_parameters() -> None:
    skeleton = build_skeleton(resolve({**SMALL["llama tied"], "dtype": "bfloat16"}))
    assert {p.dtype for p in skeleton.parameters()} == {torch.float32}
