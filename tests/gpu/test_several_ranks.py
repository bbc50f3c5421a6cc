"""Ranks that share a GPU, and ranks on GPUs of their own, which NCCL connects.

What the ranks do is mostly what those of tests/rank do, on CPUs and over a simulated NCCL. Kernels may add in another order,
so losses have a tolerance."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp_lab.base.events import StepEvent
from fsdp_lab.rank.ledger import KernelTimes
from fsdp_lab.rank.trainer import checksum
from fsdp_lab.spec.checkpoint_format import begin, finish
from fsdp_lab.spec.spec import Spec
from tests.gpu.test_one_rank import EACH, FUSED, alone_s, as_spec, kernels_in, waits_only_to_read
from tests.pool import Place, Pool, RankError
from tests.rank.test_checkpoint import _resumed, _undisturbed
from tests.rank.test_hang import LIMIT_S, _hangs
from tests.rank.test_not_finite import said_by
from tests.rank.test_session import BACKENDS, _fails, _follow, _interrupted, session, spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


def on(*devices: str) -> Any:
    """A value for `devices`, by rank."""
    gpus = len(set(devices))
    few = pytest.mark.skipif(torch.cuda.device_count() < gpus, reason=f"it needs {gpus} GPU{'s' * (gpus > 1)}")
    return pytest.param(devices, marks=few, id=f"{len(devices)} on {gpus}")


KILL_LIMIT_S = 4.0  # ranks build their models meanwhile
SHARED, OWN = on("cuda:0", "cuda:0"), on("cuda:0", "cuda:1")
BOTH = pytest.mark.parametrize("devices", [SHARED, OWN])


def trained(pool: Pool, devices: Sequence[str], wanted: Spec, steps: int = 4, shared_memory: bool = True) -> Any:
    """The events of rank 0; all ranks tell the same losses."""
    plan = [(wanted.to_dict(), steps)]
    ranks = pool.run(_follow, len(devices), plan, "auto", shared_memory, devices=devices, reduction=None)
    assert all(losses_in(said) == losses_in(ranks[0][0]) for said, _ in ranks)
    events: list[dict[str, Any]] = ranks[0][0]
    return events


def losses_in(events: Sequence[dict[str, Any]]) -> list[float]:
    return [event["mean_loss"] for event in events]


@pytest.mark.parametrize("devices", [OWN])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("changes", EACH, ids=str)
def test_each_strategy_trains_what_fsdp2_trains(
    pool: Pool, devices: Sequence[str], precision: str, changes: dict[str, Any]
) -> None:
    base = as_spec(len(devices), precision=precision)
    theirs, mine = (trained(pool, devices, s) for s in (base.replace(backend="fsdp2"), base.replace(**changes)))
    assert losses_in(mine) == pytest.approx(losses_in(theirs), rel=1e-4 if precision == "fp32" else 2e-2)
    assert {c.name for e in mine for c in StepEvent.from_dict(e).carriers} == {"NCCL"}


@pytest.mark.parametrize("devices", [SHARED])
@pytest.mark.parametrize("changes", EACH, ids=str)
def test_ranks_share_a_gpu_through_its_memory(pool: Pool, devices: Sequence[str], changes: dict[str, Any]) -> None:
    """And train the same through the host's."""
    wanted = as_spec(2, **changes)
    events = [StepEvent.from_dict(e) for e in trained(pool, devices, wanted)]
    assert events[-1].mean_loss < events[0].mean_loss
    assert "shared by 2 ranks over the GPU's memory" in events[0].notes[0]
    assert {c.name for e in events for c in e.carriers} == {"the GPU's memory"}
    kind = "all_reduce" if wanted.strategy.is_replicated else "all_gather"
    assert events[0].comm[kind].seconds > 0
    staged = trained(pool, devices, wanted, shared_memory=False)
    assert losses_in(staged) == pytest.approx([e.mean_loss for e in events], rel=1e-5)
    assert "shared by 2 ranks over Gloo" in staged[0]["notes"][0]


@pytest.mark.parametrize("devices", [on(*["cuda:0"] * 4), on(*(f"cuda:{i}" for i in range(4)))])
@pytest.mark.parametrize("backend", ["lab", "fsdp2", "fsdp1"])
def test_hybrid_sharding_trains_what_full_sharding_trains(pool: Pool, devices: Sequence[str], backend: str) -> None:
    plain, hybrid = as_spec(4), as_spec(4, backend=backend, sharding="hybrid_shard", shard_size=2)
    theirs, mine = (losses_in(trained(pool, devices, s)) for s in (plain, hybrid))
    assert mine == pytest.approx(theirs, rel=1e-4)


@BOTH
@pytest.mark.parametrize("name", ["lab", "ddp"])
def test_an_interrupt_inside_a_collective_loses_nothing(pool: Pool, devices: Sequence[str], name: str) -> None:
    expected = losses_in(trained(pool, devices, spec(**BACKENDS[name]), 5))
    for whom in ("0", "all"):
        found = pool.run(_interrupted, 2, BACKENDS[name], whom, devices=devices, reduction=None)
        for stopped, step, losses, _ in found:
            assert stopped and step == 2 and losses == pytest.approx(expected, rel=1e-4)


@BOTH
def test_a_rank_that_raises_frees_one_inside_a_collective(pool: Pool, devices: Sequence[str]) -> None:
    (zero, steps), (one, _) = pool.run(_fails, 2, 1.0, devices=devices, reduction=None)
    assert zero == "RankAborted: rank 1 failed: ZeroDivisionError: division by zero"
    assert one == "ZeroDivisionError: division by zero" and steps == [2, 3]


@BOTH
@pytest.mark.parametrize(("name", "what"), [("lab", "all_gather"), ("ddp", "all_reduce")])
def test_a_rank_that_never_comes_is_named(pool: Pool, devices: Sequence[str], name: str, what: str) -> None:
    for said, seconds, steps in pool.run(_hangs, 2, BACKENDS[name], 1, devices=devices, reduction=None):
        assert said.startswith(f"RankAborted: rank 1 did not join {what} ") and "in _stall_here" in said
        assert seconds > LIMIT_S and steps == [2, 3], "no step is lost"


def _killed(place: Place, changes: dict[str, Any], folder: str, victim: int) -> Any:
    """The victim is killed in its third step. Others write what they hold into a checkpoint, and what they saw to a file."""
    s = session(place, reduction="rank_ordered", hang_s=KILL_LIMIT_S)
    s.apply("run", spec(place.world_size, **changes).to_dict())
    s.train(2)
    before = checksum(s._lifecycle.require().backend)
    s.arm({"kind": "kill", "ranks": [victim], "at_step": 2, "phase": "backward"})
    start_s = time.perf_counter()
    said = said_by(s)
    seconds = time.perf_counter() - start_s
    after, root = checksum(s._lifecycle.require().backend), Path(folder)
    writers = [rank for rank in range(place.world_size) if rank != victim]
    part = s.rescue(folder, writers)
    told = {"said": said, "seconds": seconds, "intact": before == after, "part": part}
    (root.parent / f"told{place.rank}").write_text(json.dumps(told))


def _restored(place: Place, given: dict[str, Any], path: str) -> list[float]:
    s = session(place, reduction="rank_ordered")
    s.restore("run", given, path)
    losses = [e["mean_loss"] for e in s.train(3)["events"]]
    s.close()
    return losses


@BOTH
@pytest.mark.parametrize(("name", "victim"), [("lab", 0), ("ddp", 1)])
def test_a_killed_rank_leaves_others_that_can_save_what_they_hold(
    pool: Pool, devices: Sequence[str], tmp_path: Path, name: str, victim: int
) -> None:
    changes = {**BACKENDS[name], "sharding": "no_shard"}  # what one rank holds is the whole model
    expected, partial = losses_in(trained(pool, devices, spec(**changes), 5)), begin(tmp_path, 2)
    with pytest.raises(RankError, match="process ended while it worked"):
        pool.run(_killed, 2, changes, str(partial), victim, devices=devices, reduction=None)
    told = json.loads((tmp_path / f"told{1 - victim}").read_text())
    assert told["said"].startswith("RankAborted: ") and f"rank {victim}" in told["said"] and told["intact"]
    saved = finish(partial, [told["part"]], kind="rescue")
    plan = spec(**changes).to_dict(), str(saved.path)
    for losses in pool.run(_restored, 2, *plan, devices=devices, reduction=None):
        assert losses == pytest.approx(expected[2:], rel=1e-4)


@pytest.mark.parametrize("many", [SHARED, OWN, on("cuda:0", "cuda:1", "cuda:0", "cuda:1")])
@pytest.mark.parametrize("grows", [True, False], ids=["from one", "to one"])
def test_a_checkpoint_goes_on_with_other_ranks(pool: Pool, many: Sequence[str], grows: bool, tmp_path: Path) -> None:
    (before, first), (after, then) = ((devices, spec(len(devices), micro_batch=4 // len(devices)).to_dict())
                                      for devices in ((many[:1], many) if grows else (many, many[:1])))  # fmt: skip
    told = pool.run(_undisturbed, len(before), [first], str(tmp_path), devices=before, reduction=None)
    events, _, ended = told[0][0]
    for ((back, again, _),) in pool.run(_resumed, len(after), [(then, ended["path"])], devices=after, reduction=None):
        assert back["step"] == 2 and losses_in(again) == pytest.approx(losses_in(events), rel=1e-4)


def _exposed(place: Place, given: dict[str, Any]) -> tuple[float, float]:
    """Seconds of exposed communication in a ledger step, as its event has them and as the trace of its kernels has."""
    traced: list[Any] = []
    of = KernelTimes.of
    with mock.patch.object(KernelTimes, "of", lambda events: of(traced.append(kernels_in(events)) or events)):
        s = session(place)
        s.apply("gpu", given)
        (event,) = [StepEvent.from_dict(e) for e in s.train(3)["events"] if e["ledger"]]
        s.close()
    return sum(t.exposed_seconds for t in event.comm.values()), alone_s(traced[0])


@pytest.mark.parametrize("devices", [OWN])
@pytest.mark.parametrize("name", list(BACKENDS))
def test_exposed_communication_is_what_the_trace_shows(pool: Pool, devices: Sequence[str], name: str) -> None:
    for told_s, traced_s in pool.run(_exposed, 2, spec(**BACKENDS[name]).to_dict(), devices=devices, reduction=None):
        assert traced_s > 0 and told_s == pytest.approx(traced_s, rel=1e-3)


@pytest.mark.parametrize("devices", [OWN])
@pytest.mark.parametrize(("changes", "reads"), [({"clip_norm": 1.0}, 3), (FUSED, 1)], ids=str)
@pytest.mark.parametrize("name", list(BACKENDS))
def test_over_nccl_the_host_waits_only_to_read_the_vote(
    pool: Pool, devices: Sequence[str], name: str, changes: dict[str, Any], reads: int
) -> None:
    given = as_spec(2, **BACKENDS[name], accumulate=2, **changes).to_dict()
    found = pool.run(waits_only_to_read, 2, given, devices=devices, reduction=None)
    assert found == [([3, 4, 5], reads)] * 2


def test_the_number_of_ranks_changes_while_a_lab_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two on as many GPUs as there are, to four, to one."""
    pytest.importorskip("ipyparallel")
    from fsdp_lab.cluster.nvml import GpuStatus
    from fsdp_lab.lab import Lab
    from tests.lab import test_recovery as lab_tests

    monkeypatch.setattr(GpuStatus, "busy", "")  # by the ranks of other tests

    work = {**lab_tests.SMALL, "precision": "fp32"}
    with Lab(2, reduction="rank_ordered") as lab:
        undisturbed = lab_tests.losses(lab.run(**work, steps=lab_tests.STEPS).wait(120))
        lab_tests.grows_and_shrinks(lab, lab.run(**work, steps=lab_tests.STEPS), undisturbed)
