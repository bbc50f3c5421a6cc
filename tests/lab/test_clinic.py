"""Ten pains on two real ranks: the cause is named by itself, the cure changes the figure; on healthy runs none is named."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fsdp_lab.cluster import ClusterError
from fsdp_lab.core.spec import Spec
from fsdp_lab.dashboard.clinic.pains import PAINS, AnyRun, Pain
from fsdp_lab.history import History
from fsdp_lab.lab import Lab
from fsdp_lab.runs import Run, RunState, WatchedRun, exercises
from fsdp_lab.runs.diagnosis import Cause
from tests.lab.test_exercises import check
from tests.lab.test_lab import until
from tests.lab.test_watch import BUILD, LOOP, cell, watched

pytestmark = pytest.mark.slow

SMALL = {"model": "gpt2-1m", "micro_batch": 2, "seq_len": 64}
LARGER = {"model": "gpt2-1m", "micro_batch": 8, "seq_len": 128}
# Runs that nothing is wrong with: each backend, sharding and precision once, accumulation with and without exchange,
# recomputation, adapters that save memory, offload beside long steps.
HEALTHY: list[dict[str, Any]] = [
    {},
    {"sharding": "zero1", "precision": "bf16"},
    {"backend": "fsdp2", "sharding": "shard_grad_op", "accumulate": 3},
    {"backend": "fsdp1", "sharding": "no_shard"},
    {"backend": "ddp", "sharding": "no_shard", "accumulate": 3, "sync": "last"},
    {"wrap": "every:2", "optimizer": "sgd", "recompute": "full"},
    {"lora": {"r": 4}, "recompute": "full"},
    {"freeze": ["transformer.h.*"], "wrap": "whole"},
    {"offload": "optimizer", "micro_batch": 16},
]


def improved(pain: Pain, sick: AnyRun, cured: AnyRun) -> bool:
    before, after = pain.measure.value(sick), pain.measure.value(cured)
    return after < before if pain.measure.lower_is_better else after > before


@pytest.mark.parametrize("name", PAINS)
def test_the_cause_is_named_and_the_cure_is_measured(real_lab: Lab, name: str) -> None:
    pain = PAINS[name]
    sick = pain.reproduce(real_lab)
    (named,) = sick.diagnoses
    assert named.cause is pain.cause and named.sentence.endswith(".") and named.cure
    cured = pain.cure(real_lab, sick)
    assert cured.state is RunState.FINISHED and pain.cause not in {d.cause for d in cured.diagnoses}, cured
    assert improved(pain, sick, cured), f"{pain.measure.name}: {pain.measure.of(sick)}, then {pain.measure.of(cured)}"


def test_a_rank_that_runs_the_model_alone_is_named_also_where_no_other_collective_meets_its_own(real_lab: Lab) -> None:
    then = "if i == 2: net(torch.ones(1, 32)) if rank == 0 else time.sleep(30)"
    code = (_dedented("    import fsdp_lab; fsdp_lab.init_process_group()\n" + BUILD + LOOP.format(steps=4, then=then))
            .replace("watch(net, adam, tokens=4)", "watch(net, adam, tokens=4, hang_s=2)")
            .replace("torch.manual_seed(0)", "torch.manual_seed(0); rank = torch.distributed.get_rank()"))  # fmt: skip
    before, begun_s = real_lab.current, time.monotonic()
    wait = cell(real_lab, code)
    until(
        lambda: isinstance(real_lab.current, WatchedRun) and real_lab.current is not before and real_lab.current.done,
        60,
    )
    assert time.monotonic() - begun_s < 25, "neither the lab's limit nor the end of the sleep"
    with pytest.raises(Exception, match="Interrupt|interrupted"):
        wait()
    assert [d.cause for d in real_lab.current.diagnoses] == [Cause.GENERATION], real_lab.current


def test_a_stored_run_is_diagnosed_as_the_live_one_was(real_lab: Lab) -> None:
    live = PAINS["batches"].reproduce(real_lab)
    assert isinstance(real_lab.history, History) and real_lab.history.flush(10)
    assert real_lab.runs()[live.id].diagnoses == live.diagnoses != ()


@pytest.mark.parametrize("changes", HEALTHY, ids=str)
def test_nothing_is_named_where_nothing_is_wrong(real_lab: Lab, changes: dict[str, Any]) -> None:
    run = real_lab.run(Spec().replace(**{**(LARGER if "lora" in changes else SMALL), **changes}), steps=9).wait(90)
    assert run.diagnoses == ()


@pytest.mark.parametrize("shard", ["ddp", "hybrid"])
def test_nothing_is_named_of_a_loop_in_which_nothing_is_wrong(real_lab: Lab, shard: str) -> None:
    """Replicas do exchange gradients."""
    build = BUILD
    if shard == "ddp":
        build = build.partition("    for layer")[0] + "    net = nn.parallel.DistributedDataParallel(net)\n    adam = " \
            "torch.optim.AdamW(net.parameters())\n"  # fmt: skip
    elif shard == "hybrid":
        mesh = 'torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))'
        build = build.replace("fully_shard(layer)", "fully_shard(layer, mesh=mesh)")
        build = build.replace("fully_shard(net)", "fully_shard(net, mesh=mesh)")
        build = build.replace("    torch.manual_seed", f"    mesh = {mesh}\n    torch.manual_seed")
    before = real_lab.current
    cell(
        real_lab,
        _dedented("    import fsdp_lab; fsdp_lab.init_process_group()\n" + build + LOOP.format(steps=8, then="")),
    )()
    run = watched(real_lab, before).wait(10)
    assert run.state is RunState.FINISHED and run.diagnoses == ()


def _dedented(code: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in code.splitlines())


def test_what_is_not_there_is_not_cured(real_lab: Lab) -> None:
    run = real_lab.run(**SMALL, steps=2).wait(60)
    assert isinstance(run, Run)
    with pytest.raises(ClusterError, match="does not have the cause"):
        PAINS["accumulation"].cure(real_lab, run)


PATIENT = Spec().replace(
    model="gpt2-1m", micro_batch=1, seq_len=32, accumulate=2, sync="last", link="0.01 GB/s, 100 us"
)


@pytest.fixture(scope="module")
def patient(resident_real: Lab) -> Run:
    run = resident_real.run(PATIENT, steps=8).wait(90)
    assert {d.cause for d in run.diagnoses} == {Cause.ACCUMULATION, Cause.COMMUNICATION}
    return run


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (None, "Nothing is changed yet"),
        ({"sync": "every"}, "Still there: Computing waits"),
        ({"sharding": "shard_grad_op"}, "Still there: Each rank holds whole gradients"),
        ({"link": None}, "another machine: link is"),
        ({"accumulate": 1}, "2 samples a step, and the patient 4"),
        ({"sharding": "no_shard"}, ""),
        ({"backend": "ddp", "sharding": "no_shard", "sync": "every"}, ""),
    ],
    ids=str,
)
def test_the_exercise_refuses_half_a_cure(
    real_lab: Lab, patient: Run, changes: dict[str, Any] | None, text: str
) -> None:
    steps = 2 if text.startswith(("another machine", "2 samples")) else 8
    after = patient if changes is None else real_lab.run(patient.spec.replace(**changes), steps=steps).wait(90)
    check(exercises.heals(patient, after), text)


def test_the_ten_are_those_that_can_be_named() -> None:
    assert {pain.cause for pain in PAINS.values()} == set(Cause)
