"""Texts that a training's model continues: every backend gives transformers' own tokens, and no training changes by it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import Role
from fsdp_lab.base.generation import Sampling, checked_prompts
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.rank import Session
from fsdp_lab.spec.spec import Spec
from tests.backends.train import whole
from tests.pool import Place, Pool
from tests.rank.test_session import apply, call, fails, play, session, spec, train, trainer_of

PROMPTS = ["A", "a longer prompt than the first", "def f(", "é, of two bytes", "x" * 20]  # no multiple of the ranks
TOKENS = 12
T5 = {"model_type": "t5", "vocab_size": 384, "d_model": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
      "d_ff": 48, "d_kv": 8, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip
OPENAI = {"model_type": "openai-gpt", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 384, "n_positions": 64}
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 384,
         "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": False,
         "bos_token_id": None, "eos_token_id": 1}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"model": OPENAI, "sharding": "zero1"},  # has no cache
    {"model": LLAMA, "offload": "all"},
    {"model": T5, "backend": "fsdp2", "forward_prefetch": 1},
    {"model": T5, "backend": "fsdp1", "sharding": "shard_grad_op"},
    {"backend": "fsdp1", "recompute": "full"},
]


def _by_transformers(given: Spec, parameters: dict[str, torch.Tensor], prompts: list[str]) -> list[str]:
    """The same model alone, by `generate`."""
    config = resolve(given.workload.model)
    model = build_skeleton(config)
    model.load_state_dict(parameters, assign=True, strict=False)
    model.tie_weights()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([[byte + 3 for byte in prompt.encode()]])
        asked = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=1, pad_token_id=0,
                                 decoder_start_token_id=getattr(config, "decoder_start_token_id", None))  # fmt: skip
        out = model.eval().generate(ids, attention_mask=torch.ones_like(ids), generation_config=asked)[0]
        new = out[1:] if config.is_encoder_decoder else out[ids.shape[1] :]
        texts.append(bytes(i - 3 for i in new.tolist() if 3 <= i < 259).decode(errors="replace"))
    return texts


def _gathered_bytes(s: Session) -> int:
    transient = trainer_of(s).backend.transient_tensors()
    return sum(t.untyped_storage().size() for role, t in transient if role is Role.UNSHARDED)


def _generated(place: Place, given: list[dict[str, Any]]) -> list[Any]:
    """Of each Spec, after a step: this rank's texts, transformers' own, and the bytes of gathered parameters before and
    after the texts."""
    found = []
    with closing(session(place)) as s:
        for one in given:
            s.apply("run", one, fresh=True)
            s.train(1)
            before = _gathered_bytes(s)
            texts = {int(n): text for n, text in s.generate("run", PROMPTS, {"new_tokens": TOKENS})["texts"].items()}
            held = (before, _gathered_bytes(s))
            found.append((texts, _by_transformers(Spec.from_dict(one), whole(trainer_of(s).backend), PROMPTS), held))
            assert len(s.train(1)["events"]) == 1
    return found


@pytest.mark.slow
def test_every_backend_writes_what_transformers_does(pool: Pool) -> None:
    """That training goes on as before is in test_same_bits.py."""
    of_ranks = pool.run(_generated, 2, [spec(**kind).to_dict() for kind in KINDS], reduction=None, timeout_s=300)
    for kind, per_rank in zip(KINDS, zip(*of_ranks, strict=True), strict=True):
        texts = {number: text for own, *_ in per_rank for number, text in own.items()}
        assert [texts[number] for number in range(len(PROMPTS))] == per_rank[0][1], kind
        for rank, (own, _, (before, after)) in enumerate(per_rank):
            assert before == after, kind
            assert [*own] == [*range(rank, len(PROMPTS), 2)], kind


@pytest.mark.slow
def test_an_evaluation_has_its_texts_and_what_is_drawn_depends_on_the_seed(pool: Pool) -> None:
    drawing = {"new_tokens": TOKENS, "temperature": 2.0, "top_k": 50, "top_p": 0.9}
    calls = [call("generate", "run", PROMPTS, {**drawing, "seed": seed}) for seed in (1, 1, 2)]
    asked = train(3, evaluations={1: 2}, prompts=PROMPTS, sampling={"new_tokens": TOKENS})
    by_world = []
    for world_size in (1, 2):
        given = spec(world_size, micro_batch=4 // world_size)
        of_ranks = play(pool, world_size, apply(given), asked, *calls)
        for rank, (_, trained, first, again, other) in enumerate(of_ranks):
            completions = [e["completions"] for e in trained["events"]]
            assert completions[0] == completions[2] == []
            assert [prompt for prompt, _ in completions[1]] == PROMPTS[rank::world_size]
            assert first == again != other
        by_world.append({number: text for told in of_ranks for number, text in told[2]["texts"].items()})
    assert by_world[0].keys() == by_world[1].keys()
    same = sum(by_world[0][number] == by_world[1][number] for number in by_world[0])
    assert same >= len(PROMPTS) - 1, "the parameters agree to rounding, and so do the draws, but for a close call"


BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
        "vocab_size": 384, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.slow
def test_what_cannot_be_continued_is_refused_and_training_goes_on(pool: Pool) -> None:
    """And before it trains, where its evaluations are to have these prompts."""
    plan: list[tuple[Spec, str, dict[str, Any], str]] = [
        (spec(model=BERT), "a", {}, "bert fills masked tokens and does not continue a text"),
        (spec(), "a" * 60, {"new_tokens": 5}, "has 60 tokens, and with 5 new ones it is longer than the model's 64"),
    ]
    calls = [fails(call("generate", "another", ["a"], {}))]
    for given, prompt, sampling, _ in plan:
        early = apply(given, fresh=True, evaluated=1, prompts=[prompt], sampling=sampling)
        calls += [fails(early), apply(given, fresh=True), fails(call("generate", "run", [prompt], sampling)), train(1)]
    for _, another, *told in play(pool, 2, apply(spec()), *calls):
        assert "run: these ranks have left run another" in another
        for i, (*_, sentence) in enumerate(plan):
            before, _, later, trained = told[4 * i : 4 * i + 4]
            assert before == later and sentence in later and len(trained["events"]) == 1


@pytest.mark.parametrize(("sampling", "field"), [
    ({"new_tokens": 0}, "new_tokens"), ({"temperature": -1}, "temperature"), ({"temperature": float("nan")}, "temperature"),
    ({"top_k": 5}, "temperature"), ({"temperature": 1, "top_k": 0}, "top_k"), ({"temperature": 1, "top_p": 1.5}, "top_p"),
    ({"seed": -1}, "seed"),
])  # fmt: skip
def test_a_wrong_way_to_sample_is_refused_by_name(sampling: dict[str, Any], field: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        Sampling(**sampling)
    assert refused.value.field == field and refused.value.hint


@pytest.mark.parametrize("prompts", ["", [], [1], None, {"a": 1}])
def test_prompts_are_texts(prompts: Any) -> None:
    with pytest.raises(ArgumentError, match="prompts: .* give a text, or a list of texts"):
        checked_prompts(prompts)
    assert checked_prompts("a") == ("a",) and checked_prompts(["a", "b"]) == ("a", "b")
