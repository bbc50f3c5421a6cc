"""Shapes and tapes: what a planner knows of a model is what the model is."""

import math

import pytest

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.flops import count_flops
from fsdp_lab.models.presets import PRESETS, key_of
from fsdp_lab.planner.calibration import references
from fsdp_lab.planner.model_shape import ALLOCATED, ARRIVED, FREED, MADE
from fsdp_lab.planner.shapes import packaged_jsons, shape_for
from fsdp_lab.planner.shapes.recorded import shape_of
from fsdp_lab.planner.shapes.tape import size_of


def test_a_preset_s_shape_has_its_parameters() -> None:
    assert {name: shape_for(name).parameters for name in PRESETS} == {n: p.parameters for n, p in PRESETS.items()}


@pytest.mark.parametrize("name", [name for name in PRESETS if name.endswith(("-1m", "-7b"))])
def test_a_tape_ends_with_nothing_but_the_loss(name: str) -> None:
    """A gradient is as large as its parameter, whatever the numbers of samples and tokens."""
    shape = shape_for(name)
    for wrap in ("every:3", "whole"):
        assert shape_for(name, wrap).parameters == shape.parameters
    for tape in shape.tapes.values():
        made = arrived = left = 0
        for segment in tape:
            for c in segment.changes:
                left += {ALLOCATED: 1, FREED: -1}.get(c.kind, 0) * c.size.bytes_of(3, 64)
                arrived += c.kind == ARRIVED
                if c.kind == MADE:
                    made += 1
                    unit = shape.call_tree[segment.point.call].unit if c.unit is None else c.unit
                    assert c.size.bytes_of(3, 4096) / shape.units[unit].parameters[c.index] in (2, 4)
        assert 0 <= left <= 64 and arrived == sum(len(u.parameters) for u in shape.units) >= made > 0
    if name == "llama-7b":
        assert len(set(map(id, shape.units))) <= 4, "blocks that are alike are one object"


TIERS = {"resnet-1m": pytest.mark.slow, "gpt2-1m": pytest.mark.nightly, "t5-1m": pytest.mark.nightly}


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier) for name, tier in TIERS.items()])
def test_the_file_says_what_a_recording_says(name: str) -> None:
    assert shape_for(name) == shape_of(name)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_so_are_the_models_of_a_calibration(device: str) -> None:
    """Else a kernel would record them while its user waits."""
    models = [spec.workload.model for ranks in (1, 2) for _, spec in references(ranks, ["bf16"], [device] * ranks)]
    assert {key_of(model) for model in models} <= packaged_jsons().keys()


@pytest.mark.parametrize("name", ["gpt2-124m", "vit-1m"])
def test_products_are_those_that_are_counted(name: str) -> None:
    """But for a first convolution's gradient of pixels, which nobody asks for."""
    counted = count_flops(resolve(name), 128).model
    assert 3 * shape_for(name).forward_flops(128) == pytest.approx(counted, rel=0.003)


def test_kernels_are_those_that_a_gpu_ran_and_move_what_their_tensors_are() -> None:
    """tests/results/h100.txt: 870 kernels in a step of the plain model in bf16, and of an optimizer that launches some ten
    operations, 320 chunks of 64 Ki elements at a time."""
    shape = shape_for("gpt2-124m")
    forward, backward = (sum(unit.kernels["half"][i].count for unit in shape.units) for i in (0, 1))
    update = 10 * math.ceil(shape.parameters / (320 << 16))
    assert forward + backward + update == pytest.approx(870, rel=0.2) and forward < backward
    assert sum(unit.kernels["half"][0].count for unit in shape_for("gpt2-124m", "every:5").units) == forward
    # Of a head: logits in bf16 to fp32, a log-softmax that reads its rows three times, and the loss, on 50,257 words.
    head = shape.units[0].kernels["half"]
    words, moved = 50257, head[0].size.bytes_of(8, 1024) / (8 * 1024)
    assert moved == pytest.approx(words * ((2 + 4) + (3 * 4 + 4) + 4), rel=0.03)
    assert head[1].size.bytes_of(16, 1024) == pytest.approx(2 * head[1].size.bytes_of(8, 1024), rel=0.02)


@pytest.mark.slow
def test_any_config_and_any_wrap() -> None:
    config = {"model_type": "opt", "hidden_size": 64, "num_hidden_layers": 6, "ffn_dim": 128, "num_attention_heads": 4,
              "vocab_size": 384, "word_embed_proj_dim": 64, "max_position_embeddings": 256}  # fmt: skip
    shape = shape_for(config, "class:OPTDecoderLayer")
    assert shape.parameters == sum(p.numel() for p in build_skeleton(resolve(config)).parameters())
    assert len(shape.units) == 7
    with pytest.raises(SpecError, match=r"strategy\.wrap"):
        shape_for("gpt2-1m", "class:Nothing")


def test_a_size_tells_how_it_grows() -> None:
    samples, seq_len = 37, 2 * 479
    assert size_of(4 * samples * seq_len * 384, seq_len).bytes_of(2, 10) == 4 * 2 * 10 * 384
    assert size_of(2 * samples * 5 * (seq_len // 2) ** 2, seq_len).bytes_of(3, 8) == 2 * 3 * 5 * 16
    assert size_of(8 * samples * (seq_len + 1), seq_len).bytes_of(2, 10) == 8 * 2 * 11
    assert size_of(4096, seq_len).bytes_of(7, 7) == 4096
