"""The backends compute the same thing: in fp32, on the rank-ordered wire, equal bit for bit.

Ours against FSDP2 and DDP, over models and strategies, is in tests/engine/test_parity.py."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from fsdp_lab.backends import check
from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.batches import Batches
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.spec.spec import Spec
from tests.backends import train
from tests.covering import tiered
from tests.engine.parity import Outcome, Outcomes, assert_equal, plan
from tests.models.small import filled
from tests.pool import Place, Pool, RankError

SMALL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 36, "n_head": 4, "vocab_size": 384, "n_positions": 32}


BACKENDS = ("lab", "fsdp2", "fsdp1", "ddp")


def spec(world_size: int, **changes: Any) -> Spec:
    base = Spec(world_size=world_size).replace(model=SMALL, seq_len=32, micro_batch=2, lr=0.01)
    return base.replace(**changes)


def sharded(backend: str, world_size: int, **changes: Any) -> Spec:
    return spec(world_size, backend=backend, sharding="no_shard" if backend == "ddp" else "full_shard", **changes)


def outcome(outcomes: Outcomes, *parts: tuple[Spec, int], reduction: str = "rank_ordered") -> Outcome:
    return outcomes.of(plan(*parts), reduction=reduction)[0]


STRATEGIES = [{"sharding": "shard_grad_op", "wrap": "min_params:2000"}, {"wrap": "whole", "recompute": "full"},
              {"forward_prefetch": 1, "recompute": "every:2"}, {"backend": "fsdp2", "offload": "all"},
              {"backend": "fsdp2", "wrap": "every:2", "backward_prefetch": 2, "forward_prefetch": 2}]  # fmt: skip


def test_a_strategy_does_not_change_the_result(outcomes: Outcomes) -> None:
    for changes in STRATEGIES:
        for backend in ("fsdp2", "fsdp1") if "backend" not in changes else ("fsdp2",):
            got = outcome(outcomes, (spec(2, **{"backend": backend, **changes}), 2))
            assert_equal(got, outcome(outcomes, (sharded("fsdp2", 2), 2)))
    with pytest.raises(RankError, match=r"strategy\.offload: FSDP1 pins"):
        outcome(outcomes, (spec(2, backend="fsdp1", offload="all"), 2))


def _trained_offloaded(place: Place, given: dict[str, Any]) -> tuple[list[float], int, int]:
    """On a CPU as on a GPU: FSDP1 computes with a copy, pinned there, of what it was built with. Returns losses, the number
    of copies, and of those that exist when the backend was released, and torch still has the module."""
    copies: list[weakref.ref[Any]] = []

    def pinned(t: torch.Tensor) -> torch.Tensor:
        """As pinned memory, it is freed with its last reference, and not before."""
        memory = t.detach().numpy().copy()
        copies.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", pinned)
        patch.setattr(torch.cpu.Stream, "synchronize", lambda self: None, raising=False)
        patch.setattr("fsdp_lab.backends.check", lambda *_: None)
        backend = train.start(place, Spec.from_dict(given))
        losses = train.steps(place, Spec.from_dict(given), backend, 0, 2)
        module = backend.module
        backend.release()
        del backend
        gc.collect()
    held = sum(copy() is not None for copy in copies)
    assert module is not None
    return losses, len(copies), held


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (2, {"sharding": "no_shard"}), (2, {"precision": "bf16"})])
def test_what_fsdp1_offloads_has_the_initial_values_and_is_freed(pool: Pool, ranks: int, changes: dict[str, Any]):
    offloaded, plain = (spec(ranks, backend="fsdp1", **more, **changes) for more in ({"offload": "all"}, {}))
    both = (pool.run(_trained_offloaded, ranks, s.to_dict())[0] for s in (offloaded, plain))
    (mine, copies, held), (theirs, *_) = both
    assert mine == pytest.approx(theirs, rel=1e-6) and copies and not held


@pytest.mark.slow
@pytest.mark.parametrize("sharding, precision", [("no_shard", "fp16"), ("no_shard", "bf16"), ("shard_grad_op", "fp32")])
def test_fsdp1_accumulates_where_it_is_not_refused(outcomes: Outcomes, sharding: str, precision: str) -> None:
    """Gradients of units that are not sharded cannot wait in a low precision: torch would add them to fp32 ones."""
    options = {"accumulate": 3, "optimizer": "sgd", "precision": precision}
    fsdp1, fsdp2 = spec(2, backend="fsdp1", sharding=sharding, **options), sharded("fsdp2", 2, **options)
    refused = fsdp1.validate(sync=2)
    assert (refused is not None) == (sharding == "no_shard") == bool(fsdp1.validate(sync="last"))
    sync = "every" if refused else 2
    one, two = outcomes.of(*(plan((s.replace(sync=sync), 2)) for s in (fsdp1, fsdp2)))
    rtol, atol = (1e-5, 1e-6) if precision == "fp32" else (1e-2, 1e-3)
    for name, tensor in two.parameters.items():
        torch.testing.assert_close(one.parameters[name], tensor, rtol=rtol, atol=atol)


@pytest.mark.slow
def test_a_number_of_micro_batches_is_between_every_one_and_the_last(outcomes: Outcomes) -> None:
    """Of 3, every second one leaves one for the last communication. What has been sent is added up alike."""
    options = {"accumulate": 3, "optimizer": "sgd"}
    by_sync = {}
    for sync in ("every", "last", 2):
        lab, *others = outcomes.of(*(plan((sharded(b, 2, sync=sync, **options), 2)) for b in BACKENDS))
        for other in others:
            torch.testing.assert_close(other.parameters, lab.parameters, rtol=1e-5, atol=1e-6)
            assert sync != "last" or other.losses == lab.losses
        by_sync[sync] = lab.parameters
    two = by_sync.pop(2)
    for other in by_sync.values():
        assert any(not torch.equal(two[name], t) for name, t in other.items())
        torch.testing.assert_close(two, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", tiered(["bf16", "bf16-pure", "fp16"], lambda precision: precision == "bf16"))
def test_low_precision_stays_near_fp32(outcomes: Outcomes, precision: str) -> None:
    """And begins with the loss of a model that is cast by hand; under DDP, of torch's autocast."""
    plain, low = outcome(outcomes, (sharded("fsdp2", 2), 3)), torch.float16 if precision == "fp16" else torch.bfloat16
    model, batch = filled(SMALL), Batches(spec(2).workload, resolve(SMALL), rank=0, world_size=2).batch(0)
    with torch.no_grad(), torch.autocast("cpu", dtype=low):
        mixed = model(**batch)["loss"].item()
    cast = model.to(low)(**batch)["loss"].item()
    plans = (plan((sharded(backend, 2, precision=precision), 3)) for backend in BACKENDS)
    for backend, other in zip(BACKENDS, outcomes.of(*plans, reduction="auto"), strict=True):
        assert other.losses[0][0] == pytest.approx(mixed if backend == "ddp" else cast, rel=1e-4)
        for one, two in zip(plain.losses[0], other.losses[0], strict=True):
            assert one != two  # it did compute in another precision
            assert abs(one - two) < 0.05
        assert all(t.dtype == torch.float32 for t in other.parameters.values())


def test_a_limit_of_reductions_is_refused_where_fsdp2_has_none_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton, device = build_skeleton(resolve(SMALL)), torch.device("cpu")
    spec = Spec().replace(model=SMALL, backend="fsdp2", limit_reductions=2)
    monkeypatch.setattr(FSDPModule, "set_reduce_scatter_max_input_buffers", None, raising=False)
    check(skeleton, spec, device)
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_max_input_buffers")
    with pytest.raises(SpecError, match="has no limit to set") as refused:
        check(skeleton, spec, device)
    assert refused.value.fix == {"limit_reductions": 1}
    check(skeleton, spec.replace(**refused.value.fix), device)
