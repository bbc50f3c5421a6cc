"""Evaluations, and texts that a training's model continues: no training changes by them, all backends find the same and give
transformers' own tokens, and an evaluation that is stopped loses nothing."""

import os
import signal
import threading
from contextlib import closing
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from fsdp_lab.backends import Backend
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.events import Role
from fsdp_lab.base.generation import Sampling, checked_prompts
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.rank import Session
from fsdp_lab.spec.spec import Spec
from tests.backends.train import whole
from tests.pool import Place, Pool
from tests.rank.test_labels import BERT
from tests.rank.test_session import DDP, apply, call, fails, play, running, session, spec, train, trainer_of

PROMPTS = ["A", "a longer prompt than the first", "def f(", "é, of two bytes", "x" * 20]  # no multiple of the ranks
TOKENS = 12
T5 = {"model_type": "t5", "vocab_size": 384, "d_model": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
      "d_ff": 48, "d_kv": 8, "decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}  # fmt: skip
OPENAI = {"model_type": "openai-gpt", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 384, "n_positions": 64}
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 384,
         "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": False,
         "bos_token_id": None, "eos_token_id": 1}  # fmt: skip
SAMPLES = 7  # no multiple of what the ranks take at a time
STEPS = 3  # the third is a ledger step
EVALUATIONS = dict.fromkeys((0, 1), SAMPLES)
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "basic",
          "num_labels": 10, "num_channels": 3, "image_size": 32}  # fmt: skip
UNITS = {"backend": "fsdp2", "wrap": "min_params:1", "model": LLAMA}  # none is the root's: its prefetch would show
BATCH_NORM = {**DDP, "model": RESNET, "data": "images"}
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


def _unsharded_bytes(backend: Backend) -> int:
    """Held on the device beside the shards."""
    return sum(t.untyped_storage().size() for role, t in backend.transient_tensors() if role is Role.UNSHARDED)


def _generated(place: Place, given: list[dict[str, Any]]) -> list[Any]:
    """Of each Spec, after a step: this rank's texts, transformers' own, and gathered bytes before and after the texts."""
    found = []
    with closing(session(place)) as s:
        for one in given:
            s.apply("run", one, fresh=True)
            s.train(1)
            before = _unsharded_bytes(trainer_of(s).backend)
            texts = {int(n): text for n, text in s.generate("run", PROMPTS, {"new_tokens": TOKENS})["texts"].items()}
            held = (before, _unsharded_bytes(trainer_of(s).backend))
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
        of_ranks = play(pool, world_size, apply(spec(world_size, micro_batch=4 // world_size)), asked, *calls)
        for rank, (_, trained, first, again, other) in enumerate(of_ranks):
            completions = [e["completions"] for e in trained["events"]]
            assert completions[0] == completions[2] == []
            assert [prompt for prompt, _ in completions[1]] == PROMPTS[rank::world_size] and first == again != other
        by_world.append({number: text for told in of_ranks for number, text in told[2]["texts"].items()})
    assert by_world[0].keys() == by_world[1].keys()
    same = sum(by_world[0][number] == by_world[1][number] for number in by_world[0])
    assert same >= len(PROMPTS) - 1, "the parameters agree to rounding, and so do the draws, but for a close call"


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


def test_prompts_are_texts() -> None:
    for prompts in ("", [], [1], None, {"a": 1}):
        with pytest.raises(ArgumentError, match="prompts: .* give a text, or a list of texts"):
            checked_prompts(prompts)  # type: ignore[arg-type]
    assert checked_prompts("a") == ("a",) and checked_prompts(["a", "b"]) == ("a", "b")
    assert checked_prompts(chat := [{"role": "user", "content": "a"}]) == (chat,) == checked_prompts([chat])


# -- evaluations -----------------------------------------------------------------------------------------------------
def _as_it_was(s: Session) -> bool:
    """Another evaluation, of the step that has ended: what it leaves of modes, buffers and gathered parameters."""
    trainer = trainer_of(s)
    module = trainer.backend.module
    next(m for name, m in module.named_modules() if name).training = False  # not all are as the root

    def look() -> tuple[Any, ...]:
        buffers = [b.clone() for b in module.buffers()]
        return [m.training for m in module.modules()], _unsharded_bytes(trainer.backend), buffers

    event = trainer.step()
    modes, held_bytes, buffers = look()
    trainer.evaluated(event, SAMPLES, {})
    after = look()
    return (modes, held_bytes) == after[:2] and all(torch.equal(a, b) for a, b in zip(buffers, after[2], strict=True))


def _twice(place: Place, given: list[dict[str, Any]]) -> list[Any]:
    """Of each Spec: the events without and with evaluations, and whether one leaves all as it was."""
    found = []
    with closing(session(place, reduction="rank_ordered")) as s:
        for one in given:
            runs = []
            for evaluations in ({}, EVALUATIONS):
                s.apply("run", one, fresh=True, evaluated=SAMPLES)
                runs.append(s.train(STEPS, checks=range(STEPS), evaluations=evaluations)["events"])
            found.append([*runs, _as_it_was(s)])
    return found


def traffic(events: list[dict[str, Any]]) -> list[Any]:
    """What each step sent."""
    return [{kind: (t["calls"], t["link_bytes"]) for kind, t in e["comm"].items()} for e in events]


@pytest.mark.slow
def test_evaluation_changes_no_bit_of_training_and_no_byte_of_its_traffic(pool: Pool) -> None:
    """More kinds are in test_same_bits.py."""
    kinds = [BATCH_NORM, UNITS]
    same = ("step", "samples", "loss", "mean_loss", "grad_norm", "checksum")
    of_ranks = pool.run(_twice, 2, [spec(**changes).to_dict() for changes in kinds], reduction=None)
    for kind, per_rank in zip(kinds, zip(*of_ranks, strict=True), strict=True):
        for plain, evaluated, as_it_was in per_rank:
            assert [[e[n] for n in same] for e in plain] == [[e[n] for n in same] for e in evaluated], kind
            assert traffic(plain) == traffic(evaluated), kind
            assert [e["step"] for e in evaluated if e["eval_loss"] is not None] == list(EVALUATIONS), kind
            assert all(e["eval_loss"] is None for e in plain) and as_it_was, kind
        said = [[e["eval_loss"] for e in evaluated] for _, evaluated, _ in per_rank]
        assert said == said[:1] * 2, kind


def _stopped(place: Place, given: dict[str, Any]) -> Any:
    """Rank 1 stalls in the evaluation after the second step; SIGINT reaches rank 0; then they go on."""
    with running(place, given, reduction="rank_ordered") as s:
        batches = trainer_of(s).batches
        inner, evaluating = batches.held_out, threading.Event()

        def stalls(count: int) -> Any:
            for part in inner(count):
                evaluating.set()
                yield part
                while place.rank == 1 and s.context.aborted is None:
                    threading.Event().wait(0.02)

        batches.held_out = stalls  # type: ignore[method-assign]
        if place.rank == 0:
            threading.Thread(target=lambda: evaluating.wait(20) and os.kill(os.getpid(), signal.SIGINT)).start()
        stopped = s.train(5, evaluations={1: SAMPLES})
        batches.held_out = inner  # type: ignore[method-assign]
        rest = s.train(2, evaluations={2: SAMPLES})
    return stopped, rest["events"]


def test_a_stop_during_an_evaluation_gives_it_up_and_keeps_the_step(pool: Pool, steady: list[float]) -> None:
    for stopped, rest in pool.run(_stopped, 2, spec().to_dict(), reduction=None):
        assert stopped["stopped"] and stopped["step"] == 2 and [e["step"] for e in stopped["events"]] == [0, 1]
        assert all(e["eval_loss"] is None for e in stopped["events"])
        assert [e["mean_loss"] for e in [*stopped["events"], *rest]] == steady[:4] and rest[0]["eval_loss"] > 0


def test_what_is_not_held_out_is_refused_and_nothing_is_trained(pool: Pool) -> None:
    calls = fails(apply(spec(held_out=0), evaluated=1)), apply(spec(), evaluated=10**6)
    for _, said, much, after in play(pool, 2, apply(spec()), *calls, train(1, evaluations={0: SAMPLES})):
        assert said.startswith("SpecError: workload.held_out: none of ")
        (note,) = [note for note in much["notes"] if "samples are held out (each seq_len 32 tokens" in note]
        assert note.endswith("evaluations have these, not samples=1000000")
        assert [(e["step"], e["spec_id"]) for e in after["events"]] == [(0, spec().id)]
