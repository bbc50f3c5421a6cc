"""Skeletons: parameters without memory, real buffers, ties kept; their initial values; and which modules become units."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from transformers import masking_utils

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models import build, own
from fsdp_lab.models.build import Initializer, build_skeleton, parameters_on_meta
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.wrapping import blocks, units
from fsdp_lab.spec.spec import Spec
from tests.engine.toys import make
from tests.models.small import BART, SIZES, SMALL, filled, part


@pytest.mark.parametrize("name", SMALL)
def test_a_skeleton_is_the_eager_model_without_its_values(name: str) -> None:
    config = resolve(SMALL[name])
    skeleton = build_skeleton(config)
    eager = type(skeleton)(config)
    assert all(p.is_meta and p.dtype == torch.float32 for p in skeleton.parameters())
    ours, theirs = ({n: (p.shape, p.requires_grad) for n, p in m.named_parameters()} for m in (skeleton, eager))
    assert ours == theirs
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


WIDTHS = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
FUNNEL = {"model_type": "funnel", "vocab_size": 300, "block_sizes": [2, 2], "num_decoder_layers": 1, **WIDTHS}


@pytest.mark.parametrize(("model", "classes", "count"),
                         [(BART, ("BartEncoderLayer", "BartDecoderLayer"), 4), (FUNNEL, ("FunnelLayer",), 5)],
                         ids=["two classes", "lists in a list"])  # fmt: skip
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
    assert nn.Module.register_parameter is before and not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(("config", "said"), [
    ({"model_type": "gpt2", "n_embd": 30, "n_head": 4}, "workload.model"),
    ({"model_type": "ibert", **SIZES}, "ibert computes its buffer .*weight_integer from parameters"),
])  # fmt: skip
def test_a_model_that_cannot_be_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        build_skeleton(resolve(config))


# -- initial values: by (seed, name) alone, and drawn as the model itself would draw them ---------------------------------
NAMES = [n for n, _ in build_skeleton(resolve(SMALL["llama tied"])).named_parameters()]


@settings(max_examples=6)
@given(order=st.permutations(NAMES), seed=st.integers(0, 2**62))
def test_values_do_not_depend_on_the_order_of_asking(order: list[str], seed: int) -> None:
    one = Initializer(build_skeleton(resolve(SMALL["llama tied"])), seed)
    expected = {name: one(name) for name in NAMES}
    torch.manual_seed(seed % 1000)
    other = Initializer(build_skeleton(resolve(SMALL["llama tied"])), seed)
    assert all(torch.equal(other(name), expected[name]) for name in order)


def test_values_depend_on_seed_and_name_and_not_on_the_rest_of_the_model() -> None:
    deep = {**SMALL["llama tied"], "num_hidden_layers": 5, "tie_word_embeddings": False}
    one, other = (Initializer(build_skeleton(resolve(c)), 3) for c in (SMALL["llama tied"], deep))
    assert all(torch.equal(one(name), other(name)) for name in NAMES)
    model = build_skeleton(resolve("gpt2-1m"))
    zero, one = Initializer(model, 0), Initializer(model, 1)
    first, second = "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight"
    assert not torch.equal(zero(first), one(first)) and not torch.equal(zero(first), zero(second))
    with pytest.raises(KeyError):
        zero("lm_head.weight")  # a tied parameter has one name, its first


OF_STATES = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 300}
# Families that compute initial values from others, which are on meta.
COMPUTED: dict[str, dict[str, Any]] = {
    "mamba": {"model_type": "mamba", **OF_STATES, "time_step_rank": 4},
    "mamba2": {"model_type": "mamba2", **OF_STATES, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "rwkv": {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300, "context_length": 16},
}


@pytest.mark.parametrize("name", COMPUTED)
def test_values_that_a_module_computes_are_those_of_the_model_itself(name: str) -> None:
    """Where they are drawn they are the same for a seed; where they are not, the same as everywhere."""
    config = resolve(COMPUTED[name])
    skeleton = build_skeleton(config)
    one, again = Initializer(skeleton, 0), Initializer(skeleton, 0)
    eager, other = (type(skeleton)(config) for _ in range(2))
    drawn = {n for (n, a), b in zip(eager.named_parameters(), other.parameters(), strict=True) if not torch.equal(a, b)}
    for path, theirs in eager.named_parameters():
        ours = one(path)
        assert torch.equal(ours, again(path)) and bool(ours.isfinite().all()), path
        assert path in drawn or torch.equal(ours, theirs), path
    assert any(name in p for name in ("A_log", "time_decay") for p, _ in eager.named_parameters() if p not in drawn)


def test_a_parameter_that_is_scaled_in_place_begins_scaled_whatever_dtype_the_config_names() -> None:
    scaled = {**COMPUTED["mamba"], "num_hidden_layers": 4, "rescale_prenorm_residual": True, "dtype": "bfloat16"}
    values = Initializer(build_skeleton(resolve(scaled)), 0)("backbone.layers.0.mixer.out_proj.weight")
    bound = (2 * OF_STATES["hidden_size"]) ** -0.5  # of its uniform distribution
    assert values.dtype == torch.float32 and 0.9 * bound < 2 * values.abs().max() <= bound


@pytest.mark.parametrize("name", ["gpt2", "t5", "convnext"])
def test_values_are_distributed_as_the_model_itself_draws_them(name: str) -> None:
    config = resolve(SMALL[name])
    skeleton = build_skeleton(config)
    initial = Initializer(skeleton, 0)
    torch.manual_seed(0)
    for path, theirs in type(skeleton)(config).named_parameters():
        ours = initial(path)
        assert ours.shape == theirs.shape and ours.dtype == torch.float32 and not ours.is_meta
        if theirs.unique().numel() == 1:
            assert torch.equal(ours, theirs), path
        else:
            # A standard deviation of n draws wavers by 1/sqrt(2n) of itself.
            waver = 6 / (2 * theirs.numel()) ** 0.5
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=waver + 0.01), path
            assert abs(ours.mean().item()) < 6 * theirs.std().item() / theirs.numel() ** 0.5, path


@pytest.mark.parametrize("name", ["llama tied", "bert", "resnet"])
def test_ranges_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    initial = Initializer(build_skeleton(resolve(SMALL[name])), 7)
    monkeypatch.setattr(build, "_PIECE", 1024)
    for path in initial._shapes:
        whole = initial(path).reshape(-1)
        n = whole.numel()
        for start, stop in ((0, n), (n // 2, n), (n // 3, n // 2), (n - 1, n)):
            assert torch.equal(part(initial, path, start, stop), whole[start:stop]), path


@pytest.mark.parametrize(("function", "arguments"), [
    (torch.nn.init.normal_, {"mean": 0.5, "std": 2.0}), (torch.nn.init.uniform_, {"a": -1.0}),
    (torch.nn.init.trunc_normal_, {"std": 0.02}), (torch.nn.init.ones_, {}), (torch.nn.init.xavier_uniform_, {}),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
@pytest.mark.parametrize("n", [343, 1024])  # 3 n in pieces: of 1,029 a few are left
def test_any_function_draws_the_same_in_pieces(
    monkeypatch: pytest.MonkeyPatch, function: Any, arguments: dict[str, Any], n: int
) -> None:
    initial = Initializer(torch.nn.Linear(n, 3, bias=False), 1)
    row = build.Draw(torch.nn.init.zeros_, {}, (torch.Size([n]), (1,), n))
    initial._draws = {"weight": [build.Draw(function, arguments), row]}
    monkeypatch.setattr(build, "_PIECE", 1024)
    assert torch.equal(part(initial, "weight", 1, 3 * n), initial("weight").reshape(-1)[1:])


def test_a_part_drawn_apart_is_kept_and_what_lies_behind_a_range_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = Initializer(build_skeleton(resolve("bert-1m")), 0)("bert.embeddings.word_embeddings.weight")
    assert not embedding[0].any() and embedding[1:].any(dim=1).all()
    sizes: list[int] = []
    initial = Initializer(build_skeleton(resolve("bert-1m")), 0, lambda: sizes.append(0))
    inner = build.Draw.run_on

    def seen(self: build.Draw, target: torch.Tensor, generator: torch.Generator) -> None:
        sizes[-1] += target.numel()
        inner(self, target, generator)

    monkeypatch.setattr(build, "_PIECE", 1024)
    monkeypatch.setattr(build.Draw, "run_on", seen)
    part(initial, "bert.embeddings.word_embeddings.weight", 2000, 3000)
    assert sizes == [1024 + 128, 1024, 1024]  # its first row is made zero


def test_a_live_model_and_the_global_generator_are_only_read() -> None:
    model = filled("resnet-1m")
    for buffer in model.buffers():
        buffer.add_(1)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.random.get_rng_state()
    initial = Initializer(model, 5)
    for name, _ in model.named_parameters():
        initial(name)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    torch.nn.init.zeros_(w := torch.ones(2))  # the functions that were replaced are back
    assert not w.any()


# -- units -------------------------------------------------------------------------------------------------------------
BLOCKS = {
    "gpt2": [f"transformer.h.{i}" for i in range(4)], "llama": [f"model.layers.{i}" for i in range(4)],
    "llama tied": [f"model.layers.{i}" for i in range(2)], "bert": [f"bert.encoder.layer.{i}" for i in range(4)],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "vit": [f"vit.layers.{i}" for i in range(5)],
    "resnet": [f"resnet.encoder.stages.{s}.layers.{i}" for s in range(3) for i in range(2)],
    "convnext": ["convnext.encoder.stages.0.layers.0", *(f"convnext.encoder.stages.1.layers.{i}" for i in range(2))],
}  # fmt: skip


def names(model: nn.Module, groups: list[list[nn.Module]]) -> list[list[str]]:
    name_of = {module: name for name, module in model.named_modules()}
    return [[name_of[m] for m in group] for group in groups]


def closed(module: nn.Module, model: nn.Module) -> bool:
    """Whether no parameter in it is used outside."""
    inside, held = {id(m) for m in module.modules()}, {id(p) for p in module.parameters()}
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


@pytest.mark.parametrize(("wrap", "says"), [
    ("class:Nothing", r"no module of class Nothing; use one of Block, ModuleList, Net"),
    ("bloc", r'strategy.wrap: .bloc. is refused; give "block", "every:K"'), ("every:0", "is refused"),
    ("every:x", "is refused"), ("min_params:", "is refused"),
])  # fmt: skip
def test_what_is_no_policy_is_refused(wrap: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        units(make(), wrap)


def test_a_model_without_blocks_is_refused_with_a_way_out() -> None:
    with pytest.raises(SpecError, match="no repeated blocks were found in this model; use min_params:N or whole") as e:
        units(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "block")
    assert e.value.fix == {"wrap": "whole"}


@pytest.mark.parametrize(("packed", "name", "n"), [(False, own._PACKED, 1), (True, own._PACKED, 3), (False, "?", 3)])
def test_a_model_is_asked_once_about_packing(monkeypatch: pytest.MonkeyPatch, packed: bool, name: str, n: int):
    """It waits for a GPU to answer. Where it says yes, or transformers asks otherwise, it is asked every time."""
    model, ids, asked = filled(SMALL["llama tied"]), torch.arange(64).view(2, 32), list[int]()
    wanted = model(input_ids=ids, labels=ids)["loss"]

    def answer(positions: Tensor) -> Tensor | None:
        asked.append(1)
        return torch.zeros_like(ids) if packed else None

    monkeypatch.setattr(masking_utils, own._PACKED, answer)
    monkeypatch.setattr(own, "_PACKED", name)
    loss = own.objective(Spec().workload)
    assert all(torch.allclose(loss(model, {"input_ids": ids, "labels": ids}), wanted) for _ in range(3))
    assert len(asked) == n and masking_utils.find_packed_sequence_indices is answer
