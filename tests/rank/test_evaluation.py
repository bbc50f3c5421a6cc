"""Evaluation on real ranks: it disturbs no step, all backends find the same, and one that is stopped loses nothing."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from typing import Any

import pytest
import torch

from fsdp_lab.backends import Backend
from fsdp_lab.base.events import Role
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.rank import Session
from fsdp_lab.spec.spec import Spec
from tests.backends.train import whole
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, apply, fails, play, running, session, spec, train, trainer_of

SAMPLES = 7  # no multiple of what the ranks take at a time
STEPS = 3  # the third is a ledger step
EVALUATIONS = dict.fromkeys((0, 1), SAMPLES)
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "basic",
          "num_labels": 10, "num_channels": 3, "image_size": 32}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 384,
         "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": False,
         "bos_token_id": None, "eos_token_id": 1}  # fmt: skip
UNITS = {"backend": "fsdp2", "wrap": "min_params:1", "model": LLAMA}  # none is the root's: its prefetch would show
BATCH_NORM = {**DDP, "model": RESNET, "data": "images"}


def _unsharded_bytes(backend: Backend) -> int:
    """Held on the device beside the shards."""
    return sum(t.untyped_storage().size() for role, t in backend.transient_tensors() if role is Role.UNSHARDED)


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
    trainer.evaluated(event, SAMPLES)
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


def _beside_plain(place: Place, given: dict[str, Any]) -> tuple[float, float]:
    """The evaluation loss after two steps, and that of the whole model in one forward."""
    with running(place, given) as s:
        event = s.train(2, evaluations={1: SAMPLES})["events"][-1]
        return event["eval_loss"], _plain(Spec.from_dict(given), whole(trainer_of(s).backend))


def _plain(given: Spec, parameters: dict[str, torch.Tensor]) -> float:
    config = resolve(given.workload.model)
    workload = given.replace(micro_batch=SAMPLES).workload
    ((batch, _),) = Batches(workload, config, rank=0, world_size=1).held_out(SAMPLES)
    with torch.no_grad():
        model = build_skeleton(config).eval()
        return float(torch.func.functional_call(model, parameters, kwargs=batch)["loss"])


def test_the_evaluation_loss_is_that_of_a_plain_forward(pool: Pool) -> None:
    for loss, plain in pool.run(_beside_plain, 2, spec().to_dict(), reduction=None):
        assert loss == pytest.approx(plain, rel=1e-6)


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
            waiter = threading.Thread(target=lambda: evaluating.wait(20) and os.kill(os.getpid(), signal.SIGINT))
            waiter.start()
        stopped = s.train(5, evaluations={1: SAMPLES})
        batches.held_out = inner  # type: ignore[method-assign]
        rest = s.train(2, evaluations={2: SAMPLES})
    return stopped, rest["events"]


def test_a_stop_during_an_evaluation_gives_it_up_and_keeps_the_step(pool: Pool, steady: list[float]) -> None:
    for stopped, rest in pool.run(_stopped, 2, spec().to_dict(), reduction=None):
        assert stopped["stopped"] and stopped["step"] == 2
        assert [e["step"] for e in stopped["events"]] == [0, 1]
        assert all(e["eval_loss"] is None for e in stopped["events"])
        assert [e["mean_loss"] for e in [*stopped["events"], *rest]] == steady[:4]
        assert rest[0]["eval_loss"] > 0


def test_what_is_not_held_out_is_refused_and_nothing_is_trained(pool: Pool) -> None:
    refused = fails(apply(spec(held_out=0), evaluated=1)), fails(train(2, evaluations={1: 10**6}))
    for _, *said, after in play(pool, 2, apply(spec()), *refused, train(1, evaluations={0: SAMPLES})):
        assert all(text.startswith("SpecError: workload.held_out: ") for text in said)
        assert [(e["step"], e["spec_id"]) for e in after["events"]] == [(0, spec().id)]
