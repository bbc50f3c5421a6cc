"""Initial values: by (seed, name) alone, and drawn as the model itself would draw them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_lab.models import Initializer, build_skeleton, resolve
from tests.models.small import SMALL, filled

NAMES = [n for n, _ in build_skeleton(resolve(SMALL["llama tied"])).named_parameters()]


@settings(max_examples=20)
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


@pytest.mark.parametrize("name", SMALL)
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


def test_a_part_that_is_drawn_apart_is_kept() -> None:
    initial = Initializer(build_skeleton(resolve("bert-1m")), 0)
    embedding = initial("bert.embeddings.word_embeddings.weight")
    assert not embedding[0].any() and embedding[1:].any(dim=1).all()
    assert initial.recipe("bert.embeddings.word_embeddings.weight") == (
        "normal(mean=0, std=0.02), then zeros() on a part"
    )


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


def test_residual_projections_are_narrower_with_depth() -> None:
    initial = Initializer(build_skeleton(resolve("gpt2-1m")), 0)
    assert initial.recipe("transformer.h.0.attn.c_proj.weight") == "normal(mean=0, std=0.007071)"
