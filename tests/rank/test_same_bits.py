"""Trainings that ask for much: the same bits under every backend, through switches, and whatever is looked at meanwhile."""

from typing import Any

import numpy as np
import pytest
import torch

from fsdp_lab.models.configs import resolve
from fsdp_lab.models.own import drawing
from fsdp_lab.spec.spec import Spec
from tests.backends.test_optimizers import GROUPS
from tests.pool import Place, Pool
from tests.rank.test_generation import PROMPTS, SAMPLES, TOKENS, traffic
from tests.rank.test_session import COSINE, DDP, Call, apply, call, play, running, spec, train, trainer_of

KINDS: list[dict[str, Any]] = [{"backward_prefetch": 2, "forward_prefetch": 1, "recompute": "full"},
                               {"backend": "fsdp2", "forward_prefetch": 1},
                               {"backend": "fsdp1", "sharding": "shard_grad_op", "recompute": "every:2"}, DDP,
                               {"sharding": "zero1", "offload": "optimizer"}]  # fmt: skip
# each of which changes the losses
ASKED: list[dict[str, Any]] = [{"dropout": "config"}, COSINE, {"param_groups": GROUPS}]
SAME = ("step", "samples", "mean_loss", "grad_norm")


def asking(without: dict[str, Any] | None = None, **changes: Any) -> Spec:
    """All that is asked for, or without one of it."""
    asked = {key: value for one in ASKED if one is not without for key, value in one.items()}
    return spec(accumulate=2, sync="last", **asked, **changes)


def looked_at(given: Spec) -> list[Call]:
    """Four steps: over an emulated link, with evaluations and texts, traced in two places, and two of them in the ledger."""
    wanted = {"prompts": PROMPTS, "sampling": {"new_tokens": TOKENS}}
    return [apply(given.replace(link="20 MB/s, 0.2 ms"), fresh=True, evaluated=SAMPLES, **wanted),
            train(2, checks=range(2), evaluations={0: SAMPLES, 1: SAMPLES}, **wanted),
            call("generate", "run", PROMPTS, {"new_tokens": TOKENS}), train(2, checks=range(2, 4), ledgers=[3])]  # fmt: skip


def summed(of_ranks: list[list[dict[str, Any]]]) -> list[Any]:
    """What each step came to, with the checksum of the first replica's parameters."""
    return [([events[0][name] for name in SAME], sum(e["checksum"] for e in events if e["replica"] == 0) % (1 << 64))
            for events in zip(*of_ranks, strict=True)]  # fmt: skip


@pytest.mark.slow
def test_backends_switches_evaluations_texts_ledgers_and_links_change_no_bit(pool: Pool) -> None:
    calls: list[Call] = []
    for kind in KINDS:
        calls += [apply(asking(**kind), fresh=True), train(4, checks=range(4)), *looked_at(asking(**kind))]
    for i, kind in enumerate(KINDS[:4]):
        calls += [apply(asking(**kind), fresh=i == 0), train(1, checks=[i])]
    for without in ASKED:
        calls += [apply(asking(without), fresh=True), train(2)]
    of_ranks = play(pool, 2, *calls, reduction="rank_ordered")
    steady = summed([told[1]["events"] for told in of_ranks])
    for i, kind in enumerate(KINDS):
        runs = [told[6 * i : 6 * i + 6] for told in of_ranks]
        assert summed([plain["events"] for _, plain, *_ in runs]) == steady, kind
        for _, plain, _, first, _, second in runs:
            seen = [*first["events"], *second["events"]]
            assert [[e[n] for n in (*SAME, "checksum")] for e in seen] == [
                [e[n] for n in (*SAME, "checksum")] for e in plain["events"]
            ], kind
            assert traffic(seen[:2]) == traffic(plain["events"][:2]), kind
            assert [e["ledger"] for e in seen] == [False, False, True, True], kind
    looked = [[told[6 * i + 3 : 6 * i + 5] for i in range(len(KINDS))] for told in of_ranks]
    for by_kind in looked:
        for step in range(2):
            losses = [first["events"][step]["eval_loss"] for first, _ in by_kind]
            assert losses == pytest.approx(losses[:1] * len(KINDS), rel=1e-6)
        assert all(texts == by_kind[0][1] for _, texts in by_kind), "every backend writes the same"
    assert sorted(int(n) for by_kind in looked for n in by_kind[0][1]["texts"]) == [*range(len(PROMPTS))]
    rates = asking().workload.rates
    assert [e["lr"] for e in of_ranks[0][1]["events"]] == [0.01 * rates.factor(step) for step in range(4)]
    switched = [told[6 * len(KINDS) + 1 : 6 * len(KINDS) + 8 : 2] for told in of_ranks]
    assert summed([[e for a in told for e in a["events"]] for told in switched]) == steady, "through switches"
    for _, less in zip(ASKED, of_ranks[0][-5::2], strict=True):
        assert [e["mean_loss"] for e in less["events"]] != [one[2] for one, _ in steady[:2]]


# -- dropout as a config says; in a resumed run: test_checkpoint.py ----------------------------------------------------
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
    two = play(pool, 2, apply(spec(2, accumulate=2, dropout="config")), train(1))
    one = pool.run(_losses, 1, spec(1, dropout="config").to_dict(), reduction=None)[0]
    means = [float(np.float32(np.float32(one[r]) + np.float32(one[r + 2]))) / 2 for r in range(2)]
    assert [told["events"][0]["loss"] for _, told in two] == means


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
    assert found[0] == found[1] and len(set(map(tuple, found))) == 3 and torch.equal(torch.get_rng_state(), before)
