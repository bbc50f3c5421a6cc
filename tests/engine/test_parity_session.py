"""Ours under the trainer and the session: gradient norms, fp16's scaler, and all that moves in a switch."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_lab.spec.spec import Precision, Spec
from tests.backends.train import whole
from tests.engine.parity import digest, spec
from tests.pool import Place
from tests.rank.test_session import session

SAID = ("mean_loss", "grad_norm", "skipped", "samples")  # by the events of all ranks alike


@dataclass(frozen=True)
class Run:
    """What one run of a session said."""

    losses: list[list[float]]  # by rank
    events: list[dict[str, Any]]  # of rank 0
    scale: float  # at the end
    parameters: dict[str, Tensor]

    def all(self, name: str) -> list[Any]:
        return [e[name] for e in self.events]

    def same(self, other: "Run") -> bool:
        """Everything to the bit."""
        said = all(self.all(name) == other.all(name) for name in SAID)
        return (said and (self.losses, self.scale) == (other.losses, other.scale)
                and all(torch.equal(t, other.parameters[name]) for name, t in self.parameters.items()))  # fmt: skip


Follow = Callable[..., Run]


@pytest.fixture(scope="module")
def follow(ran: Callable[..., list[Any]]) -> Follow:
    """Applies and trains one after the other; `scale`: the loss scale to begin with, in place of the scaler's own."""

    def run(*parts: tuple[Spec, int], scale: float | None = None) -> Run:
        plan = json.dumps([(s.to_dict(), n) for s, n in parts], sort_keys=True)
        answers = ran(_follow, parts[0][0].world_size, plan, scale, reduction=None)
        (events, of_parameters, scale_at_end, parameters), *_ = answers
        assert {digest for _, digest, *_ in answers} == {of_parameters}, "the ranks do not agree on the parameters"
        for others, *_ in answers[1:]:
            assert [[e[n] for n in SAID] for e in others] == [[e[n] for n in SAID] for e in events]
        return Run([[e["loss"] for e in answer[0]] for answer in answers], events, scale_at_end, parameters)

    return run


def _follow(place: Place, plan: str, scale: float | None) -> list[Any]:
    s: Any = session(place, reduction="rank_ordered")
    events: list[dict[str, Any]] = []
    draws: Tensor | None = None
    for given, steps in json.loads(plan):
        s.apply("run", given)
        draws = torch.get_rng_state() if draws is None else draws
        if scale is not None and not events:
            s.trainer.scaler.scale = scale
        events += s.train(steps)["events"]
        assert torch.equal(torch.get_rng_state(), draws), "whoever draws goes on as if there had been none"
    scaler = s.trainer.scaler
    parameters = whole(s.trainer.backend)
    s.close()
    return [events, digest(parameters.items()), scaler.scale, parameters if place.rank == 0 else None]


# -- fp16's scaler ---------------------------------------------------------------------------------------------------
FP16 = {"precision": "fp16", "optimizer": "sgd"}
OVERFLOWS = 2.0**26  # a scale at which no gradient is finite in fp16; it is halved until they are


@pytest.mark.slow
def test_overflows_are_skipped_alike(follow: Follow) -> None:
    """The same steps and scale, and other steps have FSDP2's bits; also where ours is left half way down to its scale."""
    fsdp2, lab = (spec("gpt2", 3, backend=b, **FP16) for b in ("fsdp2", "lab"))
    wanted = follow((fsdp2, 12), scale=OVERFLOWS)
    assert wanted.all("skipped")[0] and not wanted.all("skipped")[-1] and wanted.scale < OVERFLOWS
    assert wanted.all("grad_norm")[0] == math.inf and wanted.all("grad_norm")[-1] < math.inf
    around = [(lab, 2), (fsdp2, 2), (lab.replace(sharding="zero1", offload="optimizer"), 4), (lab, 4)]
    assert follow(*around, scale=OVERFLOWS).same(wanted)


@pytest.mark.slow
def test_low_gradients_are_unscaled_in_fp32(follow: Follow) -> None:
    """Kept in fp16 until the step, gradients divided by the scale there would vanish, and their norm overflow."""
    low = Precision(param="fp16", reduce="fp16", keep_low_precision_gradients=True)
    high = follow((spec("gpt2", 2, backend="lab", **FP16), 3))
    assert follow((spec("gpt2", 2, backend="lab", **{**FP16, "precision": low}), 3)).same(high)


# -- a whole training moves ------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_training_moves_whole(follow: Follow) -> None:
    """Through every backend, hybrid sharding, bf16 and a change of the batch: against FSDP2 in the same turns.

    Losses and parameters have equal bits: so the data went on where it was, moments and their count of steps came along, and
    the fp32 masters were neither lost in bf16 nor by the way of hybrid sharding. Neither switches nor steps draw
    random numbers."""
    turns: list[tuple[dict[str, Any], int]] = [
        ({}, 1), ({"sharding": "hybrid_shard"}, 2), ({}, 3), ({"precision": "bf16"}, 1),
        ({"micro_batch": 1, "accumulate": 2}, 1),
    ]  # fmt: skip
    fsdp2 = follow(*((spec("llama tied", 4, **s), n) for s, n in turns))
    ours: list[tuple[dict[str, Any], int]] = [
        ({"backend": "lab"}, 1), ({"backend": "lab", "sharding": "hybrid_shard", "wrap": "every:2"}, 2),
        ({"backend": "ddp"}, 1), ({"backend": "fsdp1"}, 1), ({"backend": "lab", "offload": "all"}, 1),
        ({"backend": "lab", "precision": "bf16", "sharding": "zero1"}, 1),
        ({"backend": "lab", "micro_batch": 1, "accumulate": 2}, 1),
    ]  # fmt: skip
    moved = follow(*((spec("llama tied", 4, **s), n) for s, n in ours))
    assert moved.same(fsdp2) and moved.all("samples") == [8 * (i + 1) for i in range(8)]
