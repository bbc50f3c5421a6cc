"""A whole lab whose ranks use a simulated NCCL (`tests.lab.nccl_rank`): stop, a killed rank, drills, recovery. The losses
are those of a lab over Gloo that nothing befell."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import psutil
import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.process import marked
from fsdp_lab.cli import drill
from fsdp_lab.cli.drill import DrillBench, DrillPlan, losses
from fsdp_lab.cluster import calls
from fsdp_lab.lab import Lab
from fsdp_lab.runs import RunState
from fsdp_lab.runs.recovery import LIVE, REPLICA
from fsdp_lab.spec.faults import Fault, FaultKind
from fsdp_lab.spec.spec import Spec
from tests.lab.conftest import HANG_S
from tests.lab.test_lab import until

pytestmark = pytest.mark.slow

WORK = Spec().replace(model="gpt2-1m", micro_batch=1, seq_len=32)
STEPS, SAVED_EVERY = 10, 3
LAB, FSDP2, DDP = drill.FORMS
STALL_S = 1.5  # less than HANG_S


@pytest.fixture(scope="module")
def resident_nccl() -> Iterator[Lab]:
    """Ranks that are given time to leave a step: on a busy machine they need it, and none is to be replaced for that."""
    with (
        pytest.MonkeyPatch.context() as patch,
        Lab(2, hang_s=HANG_S, reduction="rank_ordered", rank_module="tests.lab.nccl_rank") as lab,
    ):
        patch.setattr(calls, "INTERRUPTED_CALL_S", 20.0)
        token = lab.cluster.token
        yield lab
    until(lambda: not marked(token), 5)


@pytest.fixture
def lab(resident_nccl: Lab) -> Iterator[Lab]:
    """Two healthy ranks; afterwards no run that goes on, and engines that answer."""
    if resident_nccl.ranks != 2 or resident_nccl.lost:
        resident_nccl.resize(2)
    yield resident_nccl
    if resident_nccl.current is not None:
        resident_nccl.current.stop(10)


@pytest.fixture(scope="module")
def undisturbed(resident_real: Lab) -> Mapping[int, float]:
    """step -> loss, over Gloo."""
    return losses(resident_real.run(WORK, steps=STEPS).wait(90))


def test_stop_frees_a_rank_that_waits_for_its_device_and_the_model_is_kept(
    lab: Lab, undisturbed: Mapping[int, float]
) -> None:
    """Stopped under each backend, it goes on under the next."""
    pids, found, step = lab.cluster.pids, {}, 0
    for form in (LAB, DDP, FSDP2):
        run = lab.run(WORK.replace(**form), fresh=step == 0)
        until(lambda run=run, step=step: run.step > step + 1 or run.done, 60)
        run.arm(Fault(kind=FaultKind.STALL, ranks=(1,), for_s=STALL_S)).wait(10)
        until(lambda: lab.rank_status()[0].waits_s > 0.3, 5)
        begun_s = time.monotonic()
        assert run.stop(10) and time.monotonic() - begun_s < STALL_S + 2
        assert run.state is RunState.STOPPED and run.switches[0].carried is (step > 0) and run.switches[0].step == step
        found, step = found | losses(run), run.step
    last = lab.run(WORK, fresh=False, steps=max(1, STEPS - step)).wait(60)
    found |= losses(last)
    assert {n: found[n] for n in undisturbed} == undisturbed
    assert lab.cluster.pids == pids and lab.lost == {}


@pytest.fixture(scope="module")
def bench(resident_nccl: Lab, undisturbed: Mapping[int, float]) -> Iterator[DrillBench]:
    """The one of `fsdp-lab drill`, with fewer steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drill, "STEPS", STEPS)
        patch.setattr(drill, "EVERY", SAVED_EVERY)
        bench = DrillBench(resident_nccl, WORK)
        assert bench._losses == undisturbed
        yield bench


@pytest.mark.parametrize(
    ("kind", "form", "rank", "source"),
    [
        ("stop", DDP, 1, REPLICA),
        ("cut", FSDP2, 0, LIVE),
    ],
)
def test_drills_are_survived(
    lab: Lab, bench: DrillBench, kind: str, form: Mapping[str, str], rank: int, source: str
) -> None:
    pids = lab.cluster.pids
    assert bench.drill(DrillPlan(kind=kind, rank=rank, step=SAVED_EVERY + 1, delay_s=0.02, form=form)) == []
    assert lab.current is not None
    (incident,) = lab.current.incidents
    assert incident.source == source and incident.resumed_ranks == 2
    gone = set(pids) - set(lab.cluster.pids)
    assert gone == (set() if source == LIVE else {pids[rank]}), "nobody else is replaced"
    assert not any(psutil.pid_exists(pid) for pid in gone)


def test_a_slow_link_is_refused_and_the_run_goes_on(
    lab: Lab, bench: DrillBench, undisturbed: Mapping[int, float]
) -> None:
    with pytest.raises(ArgumentError, match="refused over NCCL"):
        bench.drill(DrillPlan(kind="slow", rank=1, step=2, delay_s=0.0, form=LAB))
    run = lab.current
    assert run is not None and run.state is RunState.FINISHED and losses(run) == undisturbed and not run.incidents
