"""Dropout as a config says: the same masks at other world sizes. Under all backends: test_same_bits.py; in a resumed run:
test_checkpoint.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fsdp_lab.models.configs import resolve
from fsdp_lab.models.own import drawing
from tests.pool import Place, Pool
from tests.rank.test_same_bits import summed
from tests.rank.test_session import apply, play, running, spec, train, trainer_of

ON = {"dropout": "config"}  # 0.1 in GPT-2: of embeddings, attention and residuals


def test_what_a_router_draws_whatever_its_config_says_is_the_same_again(pool: Pool) -> None:
    phimoe = {"model_type": "phimoe", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 384,
              "num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
              "max_position_embeddings": 64}  # fmt: skip
    calls = [c for changes in ({}, {"backend": "fsdp2"})
             for c in (apply(spec(model=phimoe, **changes), fresh=True), train(2, checks=range(2)))]  # fmt: skip
    told = play(pool, 2, *calls, reduction="rank_ordered")
    assert summed([mine[1]["events"] for mine in told]) == summed([mine[3]["events"] for mine in told])


def test_masks_belong_to_the_samples_and_not_to_the_rank(pool: Pool) -> None:
    """Two ranks that accumulate two have the losses of one rank's first four micro-batches."""
    two = play(pool, 2, apply(spec(2, accumulate=2, **ON)), train(1))
    one = pool.run(_losses, 1, spec(1, **ON).to_dict(), reduction=None)[0]
    assert [told["events"][0]["loss"] for _, told in two] == [
        float(np.float32(np.float32(one[r]) + np.float32(one[r + 2]))) / 2 for r in range(2)
    ]


def _losses(place: Place, given: dict[str, Any]) -> list[float]:
    """Of the first four micro-batches, one after the other, at the initial values."""
    with running(place, given) as s:
        trainer, found = trainer_of(s), []
        for i in range(4):
            trainer.progress.samples = 2 * i
            found.append(float(trainer._accumulate()))
            trainer.discard()
    return found


def test_a_config_keeps_its_dropout_but_leaves_out_no_layer() -> None:
    assert resolve("gpt2-1m").attn_pdrop == 0.0 and resolve("gpt2-1m", dropout="config").attn_pdrop == 0.1
    opt = resolve({"model_type": "opt", "layerdrop": 0.5}, dropout="config")
    assert (opt.dropout, opt.layerdrop) == (0.1, 0.0)


def test_draws_depend_on_seed_and_sample_and_end_with_the_context() -> None:
    device, before = torch.device("cpu"), torch.get_rng_state()
    found = []
    for seed, sample in ((0, 0), (0, 0), (0, 4), (1, 0)):
        with drawing(seed, sample, device):
            found.append(torch.rand(4).tolist())
    assert found[0] == found[1] and len(set(map(tuple, found))) == 3
    assert torch.equal(torch.get_rng_state(), before)
