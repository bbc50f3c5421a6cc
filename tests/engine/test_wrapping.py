"""Which modules become units: the policies on one small model of each family."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.wrapping import blocks, units
from tests.engine.toys import make
from tests.models.small import SMALL

BLOCKS = {
    "gpt2": [f"transformer.h.{i}" for i in range(4)],
    "llama": [f"model.layers.{i}" for i in range(4)],
    "llama tied": [f"model.layers.{i}" for i in range(2)],
    "bert": [f"bert.encoder.layer.{i}" for i in range(4)],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "vit": [f"vit.layers.{i}" for i in range(5)],
    "resnet": [f"resnet.encoder.stages.{s}.layers.{i}" for s in range(3) for i in range(2)],
    "convnext": ["convnext.encoder.stages.0.layers.0", *(f"convnext.encoder.stages.1.layers.{i}" for i in range(2))],
}


def names(model: nn.Module, groups: list[list[nn.Module]]) -> list[list[str]]:
    name_of = {module: name for name, module in model.named_modules()}
    return [[name_of[m] for m in group] for group in groups]


def closed(module: nn.Module, model: nn.Module) -> bool:
    """Whether no parameter in it is used outside."""
    inside = {id(m) for m in module.modules()}
    held = {id(p) for p in module.parameters()}
    outside = [m for m in model.modules() if id(m) not in inside]
    return not any(id(p) in held for m in outside for p in m._parameters.values() if p is not None)


def of_a_least_size(model: nn.Module, least: int) -> None:
    """Each has that many parameters of its own, nothing is left that could be one too, and lists are no units."""
    found = [m for (m,) in units(model, f"min_params:{least}")]
    chosen = set(found)

    def own(m: nn.Module) -> int:
        inner = {id(p) for other in m.modules() if other in chosen and other is not m for p in other.parameters()}
        return sum(p.numel() for p in m.parameters() if id(p) not in inner)

    assert all(own(m) >= least and closed(m, model) for m in found)
    assert not any(isinstance(m, nn.ModuleList) for m in found)
    others = [m for m in model.modules() if m not in chosen and m is not model and not isinstance(m, nn.ModuleList)]
    assert not [m for m in others if own(m) >= least and closed(m, model)]
    for i, m in enumerate(found):
        assert not any(other in found[i + 1 :] for other in m.modules())  # inner ones come first


@pytest.mark.parametrize("family", SMALL)
def test_every_policy_finds_its_units_in_every_family(family: str) -> None:
    model, wanted = build_skeleton(resolve(SMALL[family])), BLOCKS[family]
    assert names(model, units(model, "block")) == [[name] for name in wanted]
    assert names(model, [blocks(model)]) == [wanted]
    assert names(model, units(model, f"class:{type(model.get_submodule(wanted[0])).__name__}")) == [[n] for n in wanted]
    assert units(model, "whole") == []
    for k in (1, 2, 3, 100):
        found = names(model, units(model, f"every:{k}"))
        assert [name for group in found for name in group] == wanted
        assert all(len(group) == k for group in found[:-1]) and 1 <= len(found[-1]) <= k
    for least in (1, 1000, 3000, 20_000, 10**9):
        of_a_least_size(model, least)


def test_a_tied_module_is_passed_over() -> None:
    gpt2 = build_skeleton(resolve(SMALL["gpt2"]))
    assert names(gpt2, units(gpt2, "class:Embedding")) == [["transformer.wpe"]]  # wte is the head's too
    untied = build_skeleton(resolve(SMALL["llama"]))
    assert names(untied, units(untied, "class:Embedding")) == [["model.embed_tokens"]]
    net = make(depth=3)
    net.blocks[0].up.weight = net.blocks[2].up.weight
    assert names(net, units(net, "block")) == [["blocks.1"]]


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        ("class:Nothing", r"no module of class Nothing; use one of Block, ModuleList, Net"),
        ("bloc", r'strategy.wrap: .bloc. is refused; give "block", "every:K"'),
        ("every:0", "is refused"),
        ("every:x", "is refused"),
        ("min_params:", "is refused"),
    ],
)
def test_what_is_no_policy_is_refused(wrap: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        units(make(), wrap)


def test_a_model_without_blocks_is_refused_with_a_way_out() -> None:
    with pytest.raises(SpecError, match="no repeated blocks were found in this model; use min_params:N or whole") as e:
        units(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "block")
    assert e.value.fix == {"wrap": "whole"}
