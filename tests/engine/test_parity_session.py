"""Ours under the trainer and the session: gradient norms, clipping, fp16's scaler, and all that moves in a switch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_lab.rank import Session
from fsdp_lab.spec.spec import Precision, Spec
from tests.backends.train import whole
from tests.covering import tiered
from tests.engine.parity import digest, spec
from tests.pool import Place, Pool

NO_SHARD = {"backend": "lab", "sharding": "no_shard"}


@dataclass(frozen=True)
class Run:
    """What one run of a session said, on rank 0 unless it says otherwise."""

    losses: list[list[float]]  # by rank
    mean_losses: list[float]
    norms: list[float]
    samples: list[int]
    skipped: list[bool]
    scale: float  # at the end
    parameters: dict[str, Tensor]

    def same(self, other: Run) -> bool:
        """Everything to the bit."""
        names = ("losses", "mean_losses", "norms", "samples", "skipped", "scale")
        said = all(getattr(self, n) == getattr(other, n) for n in names)
        return said and all(torch.equal(t, other.parameters[name]) for name, t in self.parameters.items())


class RunList:
    """Runs in the pool, each once for this module: what several are compared with is trained for the first of them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._known: dict[str, Run] = {}

    def follow(self, *parts: tuple[Spec, int], scale: float | None = None) -> Run:
        """Apply and train one after the other; `scale`: the loss scale to begin with, in place of the scaler's own."""
        plan = [(s.to_dict(), n) for s, n in parts]
        key = json.dumps([plan, scale], sort_keys=True)
        if key not in self._known:
            world_size = parts[0][0].world_size
            self._known[key] = _joined(self._pool.run(_follow, world_size, plan, scale, reduction=None, timeout_s=120))
        return self._known[key]


def _joined(answers: list[Any]) -> Run:
    events = answers[0][0]
    assert len({answer[1] for answer in answers}) == 1, "the ranks do not agree on the parameters"
    for mine, *_ in answers[1:]:
        for a, b in zip(events, mine, strict=True):
            assert all(a[n] == b[n] for n in ("mean_loss", "grad_norm", "skipped", "samples"))
    return Run(
        losses=[[e["loss"] for e in answer[0]] for answer in answers],
        mean_losses=[e["mean_loss"] for e in events],
        norms=[e["grad_norm"] for e in events],
        samples=[e["samples"] for e in events],
        skipped=[e["skipped"] for e in events],
        scale=answers[0][2],
        parameters=answers[0][3],
    )


@pytest.fixture(scope="module")
def runs(pool: Pool) -> RunList:
    return RunList(pool)


def _session(place: Place) -> Session:
    return Session(
        rank=place.rank, world_size=place.world_size, device="cpu", store=place.store, threads=1, timeout_s=20,
        reduction="rank_ordered",
    )  # fmt: skip


def _follow(place: Place, plan: list[tuple[dict[str, Any], int]], scale: float | None) -> list[Any]:
    s = _session(place)
    events: list[dict[str, Any]] = []
    for given, steps in plan:
        s.apply("run", given)
        assert s.trainer is not None
        if scale is not None and not events:
            s.trainer.scaler.scale = scale
        events += s.train(steps)["events"]
    assert s.trainer is not None
    scaler = s.trainer.scaler
    parameters = whole(s.trainer.backend)
    s.close()
    return [events, digest(parameters.items()), scaler.scale, parameters if place.rank == 0 else None]


# -- gradient norms and clipping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", tiered(["gpt2", "t5"], lambda model: model == "gpt2"))
def test_gradient_norms(runs: RunList, model: str) -> None:
    """Whatever the gradients are cut into: their squares are summed in fp64, and the norm is rounded."""
    fsdp2 = runs.follow((spec(model, 3), 2))
    for strategy in ({}, {"sharding": "zero1"}, {"sharding": "no_shard"}, {"offload": "optimizer", "wrap": "every:2"}):
        assert runs.follow((spec(model, 3, backend="lab", **strategy), 2)).same(fsdp2)


CLIP = {"clip_norm": 0.05, "optimizer": "sgd", "lr": 0.5}


@pytest.mark.parametrize(
    "strategy",
    tiered(
        [
            {"offload": "all", "wrap": "every:2"},
            {"sharding": "zero1"},
            {"sharding": "no_shard"},
            {},
            {"backend": "fsdp1"},
        ],
        lambda strategy: len(strategy) == 2,
    ),
    ids=str,
)
def test_clipped_steps_have_the_same_bits(runs: RunList, strategy: dict[str, Any]) -> None:
    """Since the norm has."""
    fsdp2 = runs.follow((spec("gpt2", 3, **CLIP), 3))
    assert all(norm > CLIP["clip_norm"] for norm in fsdp2.norms)
    assert runs.follow((spec("gpt2", 3, **{"backend": "lab", **CLIP, **strategy}), 3)).same(fsdp2)


@pytest.mark.slow
def test_clipping_goes_on_alike_through_switches(runs: RunList) -> None:
    ddp = runs.follow((spec("gpt2", 3, backend="ddp", **CLIP), 5))
    around = [(spec("gpt2", 3, **NO_SHARD, **CLIP), 2), (spec("gpt2", 3, backend="ddp", **CLIP), 1),
              (spec("gpt2", 3, backend="lab", **CLIP, offload="optimizer", recompute="full"), 2)]  # fmt: skip
    assert runs.follow(*around).same(ddp)
    assert runs.follow((spec("gpt2", 3, **NO_SHARD, **CLIP), 5)).same(ddp)


# -- fp16's scaler ---------------------------------------------------------------------------------------------------

FP16 = {"precision": "fp16", "optimizer": "sgd"}
OVERFLOWS = 2.0**34  # a scale at which no gradient is finite in fp16; it is halved until they are


@pytest.mark.parametrize(
    ("world_size", "strategy"),
    tiered(
        [(2, {}), (3, {}), (3, {"sharding": "no_shard", "offload": "all"})],
        lambda world_size, strategy: world_size == 2,
    ),
    ids=str,
)
def test_overflows_are_skipped_alike(runs: RunList, world_size: int, strategy: dict[str, Any]) -> None:
    """The same steps are skipped, the same scale is found, and the other steps have the bits of FSDP2's."""
    fsdp2 = runs.follow((spec("gpt2", world_size, **FP16), 20), scale=OVERFLOWS)
    assert fsdp2.skipped[0] and not fsdp2.skipped[-1] and fsdp2.scale < OVERFLOWS
    assert fsdp2.norms[0] == math.inf and fsdp2.norms[-1] < math.inf
    ours = runs.follow((spec("gpt2", world_size, backend="lab", **FP16, **strategy), 20), scale=OVERFLOWS)
    assert ours.same(fsdp2)


@pytest.mark.slow
def test_the_scaler_moves_in_a_switch(runs: RunList) -> None:
    """Half way down to its scale, and back from FSDP2: as if ours had never been left."""
    lab = spec("gpt2", 2, backend="lab", **FP16)
    steady = runs.follow((lab, 20), scale=OVERFLOWS)
    around = [(lab, 3), (spec("gpt2", 2, **FP16), 4), (lab.replace(sharding="zero1", offload="optimizer"), 5), (lab, 8)]
    assert runs.follow(*around, scale=OVERFLOWS).same(steady)


@pytest.mark.slow
def test_low_gradients_are_unscaled_in_fp32(runs: RunList) -> None:
    """Kept in fp16 until the step, gradients divided by the scale there would vanish, and their norm overflow."""
    low = Precision(param="fp16", reduce="fp16", keep_low_precision_gradients=True)
    high = runs.follow((spec("gpt2", 2, backend="lab", **FP16), 3))
    kept = runs.follow((spec("gpt2", 2, backend="lab", **{**FP16, "precision": low}), 3))
    assert kept.same(high)


# -- a whole training moves ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_moves_whole(runs: RunList) -> None:
    """Through every backend, hybrid sharding, bf16 and a change of the batch: against FSDP2 in the same turns.

    Losses and parameters have equal bits: so the data went on where it was, moments and their count of steps came along, and
    the fp32 masters were neither lost in bf16 nor by the way of hybrid sharding.
    """
    turns: list[tuple[dict[str, Any], int]] = [
        ({}, 2), ({"sharding": "hybrid_shard"}, 2), ({}, 3), ({"precision": "bf16"}, 2),
        ({"micro_batch": 1, "accumulate": 2}, 1), ({}, 1),
    ]  # fmt: skip
    fsdp2 = runs.follow(*((spec("llama tied", 4, **s), n) for s, n in turns))
    ours: list[tuple[dict[str, Any], int]] = [
        ({"backend": "lab"}, 1), ({"backend": "fsdp2"}, 1),
        ({"backend": "lab", "sharding": "hybrid_shard", "wrap": "every:2"}, 2),
        ({"backend": "ddp"}, 1), ({"backend": "fsdp1"}, 1), ({"backend": "lab", "offload": "all"}, 1),
        ({"backend": "lab", "precision": "bf16", "sharding": "zero1"}, 2),
        ({"backend": "lab", "micro_batch": 1, "accumulate": 2}, 1), ({"backend": "lab"}, 1),
    ]  # fmt: skip
    moved = runs.follow(*((spec("llama tied", 4, **s), n) for s, n in ours))
    assert moved.same(fsdp2)
    assert moved.samples == [8 * (i + 1) for i in range(11)]


def _draws(place: Place, given: list[dict[str, Any]]) -> list[bool]:
    """For each Spec after the first: whether the generator's state is the same after the switch to it."""
    s = _session(place)
    s.apply("run", given[0])
    s.train(1)
    unchanged = []
    for one in given[1:]:
        torch.manual_seed(place.rank)
        before = torch.get_rng_state()
        s.apply("run", one)
        unchanged.append(torch.equal(torch.get_rng_state(), before))
        s.train(1)
        unchanged.append(torch.equal(torch.get_rng_state(), before))
    s.close()
    return unchanged


@pytest.mark.slow
def test_random_numbers_go_on_over_a_switch(pool: Pool) -> None:
    """A switch and its steps draw none, so that whoever draws (a cell on the ranks) goes on as if there had been none."""
    strategies = [
        {},
        {"backend": "lab"},
        {"backend": "ddp"},
        {"backend": "lab", "precision": "bf16"},
        {"backend": "fsdp1"},
    ]
    for unchanged in pool.run(_draws, 2, [spec("gpt2", 2, **s).to_dict() for s in strategies], reduction=None):
        assert all(unchanged)
