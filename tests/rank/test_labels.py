"""Samples with different numbers of labels: loss and gradients are those of the whole global batch, however it is split."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsdp_lab.models.batches import Batches
from fsdp_lab.models.configs import resolve
from fsdp_lab.spec.spec import Spec
from tests.backends.train import whole
from tests.models.small import filled
from tests.models.words import chat, json_lines, uneven, word_tokenizer
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, answers, call, session, spec, train, trainer_of

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
    with closing(session(place, reduction="rank_ordered")) as s:
        for one in given:
            s.apply("run", one, fresh=True, evaluated=HELD_OUT)
            (event,) = s.train(1, evaluations={0: HELD_OUT})["events"]
            after = {name: p.numpy() for name, p in whole(trainer_of(s).backend).items()}
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
@pytest.mark.parametrize(("kind", "world_size"), [("chats", 2), ("masked", 1), ("texts", 4)])
def test_loss_gradients_and_evaluation_are_those_of_one_process(pool: Pool, tmp_path: Path, kind: str, world_size: int):
    """And those of all backends have the same bits."""
    changes = of_kind(kind, tmp_path)
    loss, norm, eval_loss, after, unlike = plainly(spec(1, **changes))
    assert unlike > 1e-3, "samples count by their labels"
    kinds = {1: ["lab"], 2: [*BACKENDS], 4: ["lab", "ddp"]}[world_size]
    for accumulate in (1, 2) if world_size < 4 else (2,):
        split = {"accumulate": accumulate, "micro_batch": GLOBAL // world_size // accumulate, "sync": "last"}
        given = [spec(world_size, **changes, **BACKENDS[backend], **split).to_dict() for backend in kinds]
        found = pool.run(_one_step, world_size, given, reduction=None)[0]
        for got_loss, got_norm, got_eval, got_after in found:
            assert (got_loss, got_norm) == found[0][:2] and got_loss == pytest.approx(loss, rel=1e-6)
            assert got_norm == pytest.approx(norm, rel=1e-5) and got_eval == pytest.approx(eval_loss, rel=1e-5)
            for name, values in after.items():
                np.testing.assert_array_equal(got_after[name], found[0][3][name], err_msg=name)
                np.testing.assert_allclose(got_after[name], values, rtol=0, atol=2e-6, err_msg=name)


def _refused(place: Place, good: dict[str, Any], bad: list[dict[str, Any]]) -> list[Any]:
    """RANK in a path is this rank's number."""
    for one in bad:
        one["workload"]["data"] = one["workload"]["data"].replace("RANK", str(place.rank))
    calls = [call("apply!", "run", one) for one in bad]
    with closing(session(place)) as s:
        return answers(s, [call("apply", "run", good), train(1), *calls, train(1)])


def test_if_one_rank_cannot_read_its_data_or_reads_other_data_all_refuse_and_go_on(pool: Pool, tmp_path: Path) -> None:
    folder = word_tokenizer(tmp_path / "tokenizer")
    for rank, values in enumerate((uneven(50, 9), [*uneven(50, 9), 3])):
        json_lines(tmp_path / str(rank) / "some.jsonl", values)
        json_lines(tmp_path / str(rank) / "other.jsonl", uneven(50, 8 + rank))
    bad = [spec(data=str(tmp_path / "RANK" / name), tokenizer=folder) for name in ("some.jsonl", "other.jsonl")]
    for answer in pool.run(_refused, 2, spec().to_dict(), [one.to_dict() for one in bad], reduction=None):
        _, before, unread, unlike, after = answer
        assert "record 51 'text' is of type int" in unread
        assert unlike.startswith("SpecError: workload.data: rank 1 and rank 0 read different data from ")
        assert [e["step"] for told in (before, after) for e in told["events"]] == [0, 1]
