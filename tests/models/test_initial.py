"""Initial values: by (seed, name) alone, and drawn as the model itself would draw them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fsdp_lab.models import build
from fsdp_lab.models.build import Initializer, build_skeleton
from fsdp_lab.models.configs import resolve
from tests.models.small import SMALL, filled, part

NAMES = [n for n, _ in build_skeleton(resolve(SMALL["llama tied"])).named_parameters()]


@settings(max_examples=6)
@given(order=st.permutations(NAMES), seed=st.integers(0, 2**62))
def test_values_do_not_depend_on_the_order_of_asking(order: list[str], seed: int) -> None:
    one = Initializer(build_skeleton(resolve(SMALL["llama tied"])), seed)
    expected = {name: one(name) for name in NAMES}
    torch.manual_seed(seed % 1000)
    other = Initializer(build_skeleton(resolve(SMALL["llama tied"])), seed)
    assert all(torch.equal(other(name), expected[name]) for name in order)


def test_values_do_not_depend_on_the_rest_of_the_model() -> None:
    deep = {**SMALL["llama tied"], "num_hidden_layers": 5, "tie_word_embeddings": False}
    one, other = (Initializer(build_skeleton(resolve(c)), 3) for c in (SMALL["llama tied"], deep))
    assert all(torch.equal(one(name), other(name)) for name in NAMES)


def test_seeds_and_names_differ() -> None:
    model = build_skeleton(resolve("gpt2-1m"))
    zero, one = Initializer(model, 0), Initializer(model, 1)
    first, second = "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight"
    assert not torch.equal(zero(first), one(first))
    assert not torch.equal(zero(first), zero(second))
    with pytest.raises(KeyError):
        zero("lm_head.weight")  # a tied parameter has one name, its first


SIZES = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 300}
# Families that compute initial values from others, which are on meta.
COMPUTED: dict[str, dict[str, Any]] = {
    "mamba": {"model_type": "mamba", **SIZES, "time_step_rank": 4},
    "mamba2": {"model_type": "mamba2", **SIZES, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
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
    assert any(
        name in path for name in ("A_log", "time_decay") for path, _ in eager.named_parameters() if path not in drawn
    )


def test_a_parameter_that_is_scaled_in_place_begins_scaled_whatever_dtype_the_config_names() -> None:
    scaled = {**COMPUTED["mamba"], "num_hidden_layers": 4, "rescale_prenorm_residual": True, "dtype": "bfloat16"}
    values = Initializer(build_skeleton(resolve(scaled)), 0)("backbone.layers.0.mixer.out_proj.weight")
    bound = (2 * SIZES["hidden_size"]) ** -0.5  # of its uniform distribution
    assert values.dtype == torch.float32 and 0.9 * bound < 2 * values.abs().max() <= bound


@pytest.mark.parametrize("name", ["gpt2", "t5", "convnext"])
def test_values_are_distributed_as_the_model_itself_draws_them(name: str) -> None:
    config = resolve(SMALL[name])
    skeleton = build_skeleton(config)
    initial = Initializer(skeleton, 0)
    torch.manual_seed(0)
    eager = type(skeleton)(config)
    for path, theirs in eager.named_parameters():
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


def test_what_lies_behind_a_range_is_not_drawn_and_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_part_that_is_drawn_apart_is_kept() -> None:
    initial = Initializer(build_skeleton(resolve("bert-1m")), 0)
    embedding = initial("bert.embeddings.word_embeddings.weight")
    assert not embedding[0].any() and embedding[1:].any(dim=1).all()


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
