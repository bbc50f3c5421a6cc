"""A loss or gradient that is not finite: the step is applied on no rank, whose it was is said, and the training goes on from
the last good step."""

import re
from typing import Any

import pytest
import torch

from fsdp_lab.backends.base import Backend, local_tensor
from fsdp_lab.rank import Session
from tests.covering import tiered
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, COSINE, running, spec, trainer_of

WAY_OUT = "; the step was applied on no rank; lower lr, set clip_norm, or use precision bf16 or fp32"


def said_by(s: Session, steps: int = 3) -> str:
    """What training raises, with its kind."""
    try:
        s.train(steps)
    except RuntimeError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def held(s: Session) -> list[torch.Tensor]:
    """Parameters and optimizer state."""
    backend: Backend = trainer_of(s).backend
    state = [t for one in backend.optimizer.state.values() for t in one.values() if isinstance(t, torch.Tensor)]
    return [local_tensor(t).clone() for t in [*(p.local for p in backend.param_shards()), *state]]


def _poisoned(place: Place, given: dict[str, Any], phase: str, ranks: list[int]) -> Any:
    """The third step meets a NaN on `ranks`: what is said, whether anything was changed, and the losses of all steps."""
    with running(place, given, reduction="rank_ordered") as s:
        losses = [e["mean_loss"] for e in s.train(2)["events"]]
        s.arm({"kind": "nan", "ranks": ranks, "phase": phase, "at_step": 2})
        before = held(s)
        said = said_by(s)
        same = all(torch.equal(a, b) for a, b in zip(before, held(s), strict=True))
        assert not s.apply("run", given, fresh=False)["step"] > 2
        losses += [e["mean_loss"] for e in s.train(3)["events"]]
    return said, same, losses


@pytest.mark.parametrize(
    ("backend", "phase"), tiered([("lab", "backward"), ("fsdp2", "forward")], lambda backend, phase: backend == "lab")
)
def test_the_rank_whose_it_is_says_so_and_nothing_is_changed(pool: Pool, steady: list[float], backend: str, phase: str):
    given = spec(**BACKENDS[backend]).to_dict()
    (zero, *rest), (one, *others) = pool.run(_poisoned, 2, given, phase, [1], reduction=None)
    assert rest == others == [True, steady[:5]]
    if phase == "forward":
        assert one == f"NotFinite: its loss in step 2 is nan{WAY_OUT}"
        assert zero == "RankAborted: rank 1 failed: NotFinite: its loss in step 2 is not finite"
    else:
        sentence = r"NotFinite: its gradient of (transformer\.\S+) in step 2 is not finite"
        found = re.fullmatch(sentence + re.escape(WAY_OUT), one)
        assert found is not None, one
        assert zero == f"RankAborted: rank 1 failed: NotFinite: its gradient of {found[1]} in step 2 is not finite"


@pytest.mark.slow
def test_ranks_whose_it_is_together_all_say_so(pool: Pool) -> None:
    hybrid = spec(4, sharding="hybrid_shard", shard_size=2).to_dict()
    said = [told for told, *_ in pool.run(_poisoned, 4, hybrid, "backward", [1, 2], reduction=None)]
    assert [text.partition(":")[0] for text in said] == ["RankAborted", "NotFinite", "NotFinite", "RankAborted"]
    assert said[0].startswith("RankAborted: rank 1 failed: NotFinite: its gradient of ")


def _overflows(place: Place) -> tuple[str, int]:
    """Each gradient is finite, and their squares are not."""
    with running(place, spec()) as s:
        inner = trainer_of(s).backend.loss
        trainer_of(s).backend.loss = lambda batch: 1e25 * inner(batch)  # type: ignore[method-assign]
        return said_by(s), s.train(1)["step"]


@pytest.mark.slow
def test_a_sum_that_overflows_is_said_by_rank_0(pool: Pool) -> None:
    (zero, step), (one, _) = pool.run(_overflows, 2, reduction=None)
    assert zero == f"NotFinite: the gradient norm of step 0 is not finite, though each gradient is{WAY_OUT}"
    assert one.startswith("RankAborted: rank 0 failed: NotFinite: the gradient norm of step 0 ") and step == 1


FP16 = {"precision": "fp16", "lr": 1e-4, **COSINE}


def _scaled(place: Place) -> tuple[list[dict[str, Any]], str]:
    nan = {"kind": "nan", "ranks": [1], "phase": "backward"}
    with running(place, spec(**FP16)) as s:
        s.arm(nan)
        events = s.train(3)["events"]
        trainer_of(s).scaler.scale = 1.0  # as after sixteen such steps
        s.arm(nan)
        return events, said_by(s)


def test_fp16_skips_the_step_while_its_scale_can_be_lowered_and_it_counts(pool: Pool) -> None:
    (events, _), (_, said) = pool.run(_scaled, 2, reduction=None)
    told = [(e["skipped"], e["loss_scale"]) for e in events]
    assert told == [(True, 2.0**16), (False, 2.0**15), (False, 2.0**15)]
    assert [e["lr"] for e in events] == [1e-4 * spec(**FP16).workload.rates.factor(step) for step in range(3)]
    assert said.startswith("NotFinite: its gradient of ")
