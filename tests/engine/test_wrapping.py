"""Which modules become units: the policies on one small model of each family, and that sharding by each changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_lab.base.errors import SpecError
from fsdp_lab.engine import full_state, fully_shard, runtime_of, sharded_parameters, units_of
from fsdp_lab.models import Batches, build_skeleton, resolve
from fsdp_lab.models.wrapping import blocks, units
from fsdp_lab.spec.spec import Spec
from tests.engine.toys import Net, assert_equal, by_policy, make, plain_step
from tests.models.small import SMALL, filled
from tests.pool import Place, Pool

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
POLICIES = ("block", "every:2", "every:3", "min_params:1", "min_params:3000", "min_params:20000", "whole")


@pytest.fixture(scope="module", params=list(SMALL))
def model(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    return request.param, build_skeleton(resolve(SMALL[request.param]))


def names(model: nn.Module, groups: list[list[nn.Module]]) -> list[list[str]]:
    name_of = {module: name for name, module in model.named_modules()}
    return [[name_of[m] for m in group] for group in groups]


def test_blocks_are_found_in_every_family(model: tuple[str, nn.Module]) -> None:
    family, module = model
    assert names(module, units(module, "block")) == [[name] for name in BLOCKS[family]]
    assert names(module, [blocks(module)]) == [BLOCKS[family]]


@pytest.mark.parametrize("k", [1, 2, 3, 100])
def test_every_k_blocks_are_one_unit(model: tuple[str, nn.Module], k: int) -> None:
    family, module = model
    found = names(module, units(module, f"every:{k}"))
    assert [name for group in found for name in group] == BLOCKS[family]
    assert all(len(group) == k for group in found[:-1]) and 1 <= len(found[-1]) <= k


def test_a_class_is_named(model: tuple[str, nn.Module]) -> None:
    family, module = model
    name = type(module.get_submodule(BLOCKS[family][0])).__name__
    assert names(module, units(module, f"class:{name}")) == [[name] for name in BLOCKS[family]]


def test_whole_is_one_unit(model: tuple[str, nn.Module]) -> None:
    assert units(model[1], "whole") == []


@pytest.mark.parametrize("least", [1, 1000, 20_000, 10**9])
def test_units_of_a_least_size(model: tuple[str, nn.Module], least: int) -> None:
    """Each has that many parameters of its own, nothing is left that could be one too, and lists are no units."""
    _, module = model
    found = [m for (m,) in units(module, f"min_params:{least}")]
    chosen = set(found)

    def own(m: nn.Module) -> int:
        inner = {id(p) for other in m.modules() if other in chosen and other is not m for p in other.parameters()}
        return sum(p.numel() for p in m.parameters() if id(p) not in inner)

    assert all(own(m) >= least for m in found)
    assert not any(isinstance(m, nn.ModuleList) for m in found)
    others = [m for m in module.modules() if m not in chosen and m is not module and not isinstance(m, nn.ModuleList)]
    assert not [m for m in others if own(m) >= least and closed(m, module)]
    for i, m in enumerate(found):
        assert not any(other in found[i + 1 :] for other in m.modules())  # inner ones come first


def closed(module: nn.Module, model: nn.Module) -> bool:
    """Whether no parameter in it is used outside."""
    inside = {id(m) for m in module.modules()}
    held = {id(p) for p in module.parameters()}
    outside = [m for m in model.modules() if id(m) not in inside]
    return not any(id(p) in held for m in outside for p in m._parameters.values() if p is not None)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_unit_is_tied_to_what_lies_outside(model: tuple[str, nn.Module], policy: str) -> None:
    _, module = model
    for group in units(module, policy):
        assert all(closed(m, module) for m in group)


def test_a_tied_module_is_passed_over() -> None:
    gpt2 = build_skeleton(resolve(SMALL["gpt2"]))
    assert names(gpt2, units(gpt2, "class:Embedding")) == [["transformer.wpe"]]  # wte is the head's too
    untied = build_skeleton(resolve(SMALL["llama"]))
    assert names(untied, units(untied, "class:Embedding")) == [["model.embed_tokens"]]
    net = make(depth=3)
    net.blocks[0].up.weight = net.blocks[2].up.weight
    assert names(net, units(net, "block")) == [["blocks.1"]]


class Tree(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own = nn.Linear(2, 2)
        self.children_ = nn.ModuleList([Tree(depth - 1) for _ in range(2)] if depth else [])


def test_a_class_inside_itself_is_sharded_from_within() -> None:
    tree = Tree(2)
    found = [m for (m,) in units(nn.Sequential(tree), "class:Tree")]
    assert len(found) == 7 and found[-1] is tree
    for i, m in enumerate(found):
        assert not any(other in found[i + 1 :] for other in m.modules())


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


# -- on ranks ----------------------------------------------------------------------------------------------------------


def by_every_policy(place: Place, family: str) -> None:
    """Sharded by each policy, a model gives the plain one's loss and, after a step, its parameters.

    T5's decoder blocks all take the encoder's output. Its gradient is a sum whose order depends on what lies between
    (units see their inputs through views), so its last bits differ.
    """
    plain = filled(SMALL[family])
    batches = [_batch(family, rank) for rank in range(place.world_size)]
    stepped = copy.deepcopy(plain)
    plain_step(stepped, _loss, batches, torch.optim.SGD(stepped.parameters(), lr=0.1))
    policies: list[Any] = [*POLICIES, lambda m: [[b] for b in blocks(m)[1:]], lambda m: [blocks(m)[::2]]]
    for policy in policies:
        model = copy.deepcopy(plain)
        by_policy(model, policy)
        optimizer = torch.optim.SGD(sharded_parameters(model), lr=0.1)
        loss = _loss(model, batches[place.rank])
        assert torch.equal(loss, _loss(plain, batches[place.rank])), policy
        loss.backward()
        optimizer.step()
        if family == "t5":
            for name, t in full_state(model):
                assert torch.allclose(t, stepped.get_parameter(name), rtol=0, atol=1e-6), (policy, name)
        else:
            assert_equal(model, stepped)
        if policy in ("block", "whole"):
            found = [unit.name for unit in units_of(model)]
            assert found == ["", *(BLOCKS[family] if policy == "block" else [])]
        assert runtime_of(model).root.name == ""


def _batch(family: str, rank: int) -> Any:
    workload = Spec(world_size=2).replace(model=SMALL[family], seq_len=8, micro_batch=1).workload
    return Batches(workload, resolve(SMALL[family]), rank=rank, world_size=2).batch(0, 0)


def _loss(model: Any, batch: Any) -> Any:
    model.eval()  # the same dropout for all: none
    return model(**batch)["loss"]


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_every_policy_trains_alike(pool: Pool, family: str) -> None:
    pool.run(by_every_policy, 2, family)


def the_policy_is_named(place: Place) -> None:
    model = by_policy(make(Net, depth=4), "every:2")
    assert runtime_of(model).root.name == ""
    assert [unit.name for unit in units_of(model)] == ["", "blocks.0", "blocks.2"]
    ours = by_policy(make(Net, depth=4), "whole")
    assert len(units_of(ours)) == 1
    with pytest.raises(RuntimeError, match="sharded already"):
        fully_shard(ours)


def test_a_policy_by_name(pool: Pool) -> None:
    pool.run(the_policy_is_named, 1)
