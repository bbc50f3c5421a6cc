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
from fsdp_lab.models import Batches, build_skeleton, resolve
from fsdp_lab.rank import Session
from fsdp_lab.rank.trainer import Trainer
from fsdp_lab.spec.spec import Spec
from tests.backends.train import whole
from tests.covering import tiered
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, DDP, apply, fails, play, session, spec, train

SAMPLES = 7  # no multiple of what the ranks take at a time
STEPS = 4  # the third is a ledger step
EVALUATIONS = dict.fromkeys((0, 1, 2), SAMPLES)
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
          "num_labels": 10, "num_channels": 3, "image_size": 32}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 384,
         "num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": False,
         "bos_token_id": None, "eos_token_id": 1}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "lab": {"backward_prefetch": 2, "forward_prefetch": 1},
    "lab_zero1": {"sharding": "zero1", "recompute": "full", "offload": "optimizer"},
    # no unit is the root's: its prefetch would show
    "fsdp2_units": {"backend": "fsdp2", "wrap": "min_params:1", "model": LLAMA},
    "fsdp1": {"backend": "fsdp1", "sharding": "shard_grad_op", "recompute": "every:2"},
    "ddp": {**DDP, "accumulate": 2, "sync": "last"},
    "resnet": {**DDP, "model": RESNET, "data": "images"},
}
SAMPLE = {name: KINDS[name] for name in ("lab", "resnet")}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    **{name: KINDS[name] for name in ("lab_zero1", "fsdp2_units", "ddp")},
    "lab": {"reshard_size": 2},
    "fsdp1": {"backend": "fsdp1", "sharding": "hybrid_shard"},
}


def _unsharded_bytes(backend: Backend) -> int:
    """Held on the device beside the shards."""
    return sum(t.untyped_storage().size() for role, t in backend.transient_tensors() if role is Role.UNSHARDED)


def _as_it_was(s: Session) -> bool:
    """Another evaluation, of the step that has ended: what it leaves of modes, buffers and gathered parameters."""
    trainer = _trainer(s)
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


def _trainer(s: Session) -> Trainer:
    assert s.trainer is not None
    return s.trainer


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


def _trained(events: list[dict[str, Any]]) -> list[Any]:
    """What a step comes to, and what it sent; no times."""
    traffic = [{kind: (t["calls"], t["link_bytes"]) for kind, t in e["comm"].items()} for e in events]
    same = ("step", "samples", "loss", "mean_loss", "grad_norm", "checksum")
    return [[*(e[name] for name in same), sent] for e, sent in zip(events, traffic, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "kinds"),
    tiered(
        [(2, SAMPLE), (4, FOUR_RANKS)],
        lambda world_size, kinds: world_size == 2,
    ),
)
def test_evaluation_changes_no_bit_of_training_and_no_byte_of_its_traffic(
    pool: Pool, world_size: int, kinds: dict[str, dict[str, Any]]
) -> None:
    specs = [spec(world_size, **changes).to_dict() for changes in kinds.values()]
    of_ranks = pool.run(_twice, world_size, specs, reduction=None, timeout_s=300)
    for kind, per_rank in zip(kinds, zip(*of_ranks, strict=True), strict=True):
        for plain, evaluated, as_it_was in per_rank:
            assert _trained(plain) == _trained(evaluated), kind
            assert [e["step"] for e in evaluated if e["eval_loss"] is not None] == list(EVALUATIONS), kind
            assert all(e["eval_loss"] is None for e in plain) and as_it_was, kind
        said = [[e["eval_loss"] for e in evaluated] for _, evaluated, _ in per_rank]
        assert said == said[:1] * world_size, kind


def _beside_plain(place: Place, given: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Of each Spec: the evaluation loss after two steps, and that of the whole model in one forward."""
    found = []
    with closing(session(place)) as s:
        for one in given:
            s.apply("run", one, fresh=True)
            event = s.train(2, evaluations={1: SAMPLES})["events"][-1]
            found.append((event["eval_loss"], _plain(Spec.from_dict(one), whole(_trainer(s).backend))))
    return found


def _plain(given: Spec, parameters: dict[str, torch.Tensor]) -> float:
    config = resolve(given.workload.model)
    workload = given.replace(micro_batch=SAMPLES).workload
    ((batch, _),) = Batches(workload, config, rank=0, world_size=1).held_out(SAMPLES)
    with torch.no_grad():
        model = build_skeleton(config).eval()
        return float(torch.func.functional_call(model, parameters, kwargs=batch)["loss"])


@pytest.mark.slow
def test_the_evaluation_loss_is_that_of_a_plain_forward_for_all_backends(pool: Pool) -> None:
    given = [spec(**changes).to_dict() for changes in BACKENDS.values()]
    for found in pool.run(_beside_plain, 2, given, reduction=None):
        losses = [loss for loss, _ in found]
        assert losses == pytest.approx([plain for _, plain in found], rel=1e-6)
        assert losses == pytest.approx(losses[:1] * len(given), rel=1e-6)


def _stopped(place: Place, given: dict[str, Any]) -> Any:
    """Rank 1 stalls in the evaluation after the second step; SIGINT reaches rank 0; then they go on."""
    s = session(place, reduction="rank_ordered")
    s.apply("run", given)
    batches = _trainer(s).batches
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
    rest = s.train(STEPS - 2, evaluations={2: SAMPLES})
    s.close()
    return stopped, rest["events"]


@pytest.mark.parametrize("kind", tiered(["lab", "fsdp1"], lambda kind: kind == "lab"))
def test_a_stop_during_an_evaluation_gives_it_up_and_keeps_the_step(pool: Pool, kind: str) -> None:
    given = spec(**KINDS[kind])
    (_, steady), _ = play(pool, 2, apply(given), train(STEPS), reduction="rank_ordered")
    for stopped, rest in pool.run(_stopped, 2, given.to_dict(), reduction=None):
        assert stopped["stopped"] and stopped["step"] == 2
        assert [e["step"] for e in stopped["events"]] == [0, 1]
        assert all(e["eval_loss"] is None for e in stopped["events"])
        assert [e["mean_loss"] for e in [*stopped["events"], *rest]] == [e["mean_loss"] for e in steady["events"]]
        assert rest[0]["eval_loss"] > 0


def test_what_is_not_held_out_is_refused_and_nothing_is_trained(pool: Pool) -> None:
    refused = fails(apply(spec(held_out=0), evaluated=1)), fails(train(2, evaluations={1: 10**6}))
    for _, *said, after in play(pool, 2, apply(spec()), *refused, train(1, evaluations={0: SAMPLES})):
        assert all(text.startswith("SpecError: workload.held_out: ") for text in said)
        assert [(e["step"], e["spec_id"]) for e in after["events"]] == [(0, spec().id)]
