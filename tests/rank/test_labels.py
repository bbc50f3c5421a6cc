"""Samples with different numbers of labels: loss and gradients are those of the whole global batch, however it is split."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models import Batches, resolve
from fsdp_lab.spec.spec import Spec
from tests.backends.train import whole
from tests.covering import tiered
from tests.models.small import filled
from tests.models.words import chat, json_lines, uneven, word_tokenizer
from tests.pool import Place, Pool
from tests.rank.test_lr_schedule import outcome, planned, trained
from tests.rank.test_session import BACKENDS, session, spec

GLOBAL, LR, HELD_OUT = 8, 0.5, 10
BERT = {"model_type": "bert", "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 384, "max_position_embeddings": 64}  # fmt: skip


def of_kind(kind: str, folder: Path) -> dict[str, Any]:
    """Changes of a Spec: padded texts, packed chats, or padded texts for a masked model."""
    tokenizer = word_tokenizer(folder / "tokenizer")
    texts = uneven(100, 30)
    if kind == "chats":
        said = [chat(question, answer) for question, answer in zip(uneven(200, 9), [*texts, *texts], strict=True)]
        data = {"data": json_lines(folder / "chats.jsonl", said, field="messages")}
    else:
        data = {"data": json_lines(folder / "texts.jsonl", texts), "packing": "padded"}
    if kind == "masked":
        data["model"] = BERT
    return {**data, "tokenizer": tokenizer, "held_out": 0.2, "optimizer": "sgd", "lr": LR, "weight_decay": 0.0}


def _one_step(place: Place, given: list[dict[str, Any]]) -> list[Any]:
    """Of each Spec: the loss and gradient norm of a step, the evaluation after it, and the parameters."""
    found = []
    with closing(session(place)) as s:
        for one in given:
            s.apply("run", one, fresh=True, evaluated=HELD_OUT)
            (event,) = s.train(1, evaluations={0: HELD_OUT})["events"]
            assert s.trainer is not None
            after = {name: p.numpy() for name, p in whole(s.trainer.backend).items()}
            found.append((event["mean_loss"], event["grad_norm"], event["eval_loss"], after))
    return found


def plainly(given: Spec) -> tuple[float, float, float, dict[str, np.ndarray], float]:
    """The same from one forward of the whole batch, and how far the mean of the samples' means would be from its loss."""
    config = resolve(given.workload.model)
    model = filled(given.workload.model).train()
    whole_batch = given.replace(micro_batch=GLOBAL, accumulate=1).workload
    batch = Batches(whole_batch, config, rank=0, world_size=1).batch(0)
    alone = [model(**{k: t[i : i + 1] for k, t in batch.items()}).loss.item() for i in range(GLOBAL)]
    loss = model(**batch).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= LR * p.grad
        several = given.replace(micro_batch=HELD_OUT, accumulate=1).workload
        ((held_out, _),) = Batches(several, config, rank=0, world_size=1).held_out(HELD_OUT)
        eval_loss = model.eval()(**held_out).loss
    after = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return loss.item(), float(norm), float(eval_loss), after, abs(loss.item() - sum(alone) / GLOBAL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "world_size"), tiered([("chats", 2), ("masked", 1), ("texts", 4)], lambda kind, world: world != 4)
)
def test_loss_gradients_and_evaluation_are_those_of_one_process(
    pool: Pool, tmp_path: Path, kind: str, world_size: int
) -> None:
    changes = of_kind(kind, tmp_path)
    loss, norm, eval_loss, after, unlike = plainly(spec(1, **changes))
    assert unlike > 1e-3, "samples count by their labels"
    splits = [(1, GLOBAL // world_size), (2, GLOBAL // world_size // 2)]
    kinds = [kind for kind in BACKENDS if world_size > 1 or kind != "fsdp1"]
    given = [
        spec(world_size, **changes, **BACKENDS[backend]).replace(accumulate=accumulate, micro_batch=micro)
        for accumulate, micro in splits
        for backend in kinds
    ]
    found = pool.run(_one_step, world_size, [each.to_dict() for each in given], reduction=None)
    for got_loss, got_norm, got_eval, got_after in found[0]:
        assert got_loss == pytest.approx(loss, rel=1e-6)
        assert got_norm == pytest.approx(norm, rel=1e-5)
        assert got_eval == pytest.approx(eval_loss, rel=1e-5)
        for name, values in after.items():
            np.testing.assert_allclose(got_after[name], values, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_all_backends_have_the_same_bits(pool: Pool, tmp_path: Path) -> None:
    changes = of_kind("chats", tmp_path)
    plans = [planned((spec(**changes, **backend, accumulate=2, sync="last"), 3)) for backend in BACKENDS.values()]
    told = pool.run(trained, 2, plans, reduction=None)
    losses, _ = outcome(told, 0)
    assert len(set(losses)) == 3
    for plan in range(1, len(plans)):
        assert outcome(told, plan) == outcome(told, 0)
        assert [e["grad_norm"] for e in told[0][plan]] == [e["grad_norm"] for e in told[0][0]]


def _refused(place: Place, good: dict[str, Any], bad: dict[str, Any]) -> list[Any]:
    """Rank 1 alone cannot read the data of `bad`."""
    s = session(place)
    s.apply("run", good)
    before = s.train(1)["events"][0]["mean_loss"]
    bad["workload"]["data"] = bad["workload"]["data"].replace("RANK", str(place.rank))
    try:
        s.apply("run", bad)
    except SpecError as e:
        said = str(e)
    after = s.train(1)["events"][0]["step"]
    s.close()
    return [said, before, after]


def test_if_one_rank_cannot_read_its_data_all_refuse_and_go_on(pool: Pool, tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer")
    for rank, values in enumerate((uneven(50, 9), [*uneven(50, 9), 3])):
        json_lines(tmp_path / str(rank) / "some.jsonl", values)
    bad = spec(2, data=str(tmp_path / "RANK" / "some.jsonl"), tokenizer=folder)
    (said, before, after), (others, *_) = pool.run(_refused, 2, spec(2).to_dict(), bad.to_dict(), reduction=None)
    assert said == others and "record 51 'text' is of type int" in said
    assert before > 0 and after == 1
