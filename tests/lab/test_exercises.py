"""The checks of the course's exercises: each refuses the empty answer and plausible wrong ones with a sentence that names
the mistake, and takes those of solutions/exercises.py and others. What they look at is of real ranks, and of the planner."""

import re
import runpy
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from course import exercises
from course.board import Board
from course.exercises import Marked
from course.pains import PAINS
from fsdp_lab.base.errors import ArgumentError, Cause
from fsdp_lab.base.events import Traffic
from fsdp_lab.cluster import ClusterError, RankLost
from fsdp_lab.lab import Lab
from fsdp_lab.planner.questions import Target
from fsdp_lab.runs import RunState
from fsdp_lab.runs.engine_check import EngineCheck
from fsdp_lab.runs.history import History
from fsdp_lab.runs.recovery import BEGINNING, REPLICA, Incident
from fsdp_lab.runs.steps import EventStore
from fsdp_lab.runs.watched import WatchedRun
from fsdp_lab.spec.spec import Spec
from tests.lab import events
from tests.own import cell
from tests.waiting import until
from tests.your_engines import SOLUTION

FILE = Path(__file__).resolve().parents[2] / "notebooks" / "solutions" / "exercises.py"
SOLUTIONS = SimpleNamespace(**runpy.run_path(str(FILE)))
SPEC = Spec().replace(model="gpt2-1m", seq_len=64, micro_batch=2)
BLOCK = "transformer.h.1"


def check(marked: Marked, text: str) -> None:
    """`text`: what a wrong answer is told; "": the answer is right."""
    assert bool(marked) == (not text), marked
    assert re.search(text or "^Passed", repr(marked)), marked
    assert marked.sentence.endswith(".") and not marked.sentence.endswith("..")
    assert ("✔" in marked._repr_html_()) == marked.passed


# -- notebook 01 -----------------------------------------------------------------------------------------------------
def test_a_rank_sends_less() -> None:
    """MiB that a rank sends a step: gathers of most units twice and a reduce-scatter at first."""
    check(exercises.sends_less(None), "press Start")
    first, half = {"all_gather": 6.0, "reduce_scatter": 3.0}, {"all_gather": 3.0, "reduce_scatter": 1.5}

    def switched(changes: dict[str, Any], **sent: float) -> Any:
        before, after, store = SPEC, SPEC.replace(**changes), EventStore()
        for step, spec, mib in ((0, before, first), (1, after, sent)):
            comm = {kind: Traffic(calls=1, link_bytes=int(n * 2**20)) for kind, n in mib.items()}
            store.add(events.steps(step, spec=spec, comm=comm))
        return SimpleNamespace(events=store, switches=[SimpleNamespace(after=spec) for spec in (before, after)])

    for changes, sent, text in (
        ({}, first, "as when this run began: change a control"),
        ({"accumulate": 2}, half, "other work: accumulate is 2 and was 1"),
        ({"backend": "ddp", "sharding": "no_shard"}, {"all_reduce": 6.0}, "gradients, all-reduced, which sends twice"),
        ({"forward_prefetch": 2}, first, "gathered parameters in fp32, of most units twice"),
        (SOLUTIONS.SENDS_LESS[1], half, ""),
    ):  # fmt: skip
        check(exercises.sends_less(switched(changes, **sent)), text)


@pytest.mark.slow
def test_solutions_pass_on_real_ranks(real_lab: Lab) -> None:
    """A run that is switched while it trains; and a comparison of two Specs, as if over a link of 10 MB/s."""
    run = real_lab.run(SPEC)
    until(lambda: run.step > 1)
    switch = run.apply(**SOLUTIONS.SENDS_LESS[0]).wait(60)
    until(lambda: run.step > switch.step + 1)
    check(exercises.sends_less(run), "")
    run.stop(10)
    sweep = real_lab.compare([SPEC, SPEC.replace(**SOLUTIONS.FASTER[0])], steps=3, rounds=1).wait(120)
    sent = [sum(run.summary()["comm_bytes_per_step"].values()) for run in sweep.in_order]
    runs = [over_link(n, max(run.summary()["peak_memory_bytes"])) for n, run in zip(sent, sweep.in_order, strict=True)]
    two: Any = SimpleNamespace(specs=sweep.specs, in_order=runs)
    check(exercises.faster_and_no_larger(two), "")


# -- notebooks 02 and 03 ---------------------------------------------------------------------------------------------
N = 973_568  # parameters of gpt2-1m


def test_traffic_is_predicted_and_phases_are_put_in_order(real_lab: Lab) -> None:
    run = real_lab.run(SPEC, sharding="shard_grad_op", precision="bf16", steps=1).wait(60)
    right = SOLUTIONS.TRAFFIC
    for changes, text in (({}, ""), ({"all_gather": 1.002 * N}, ""),
                          ({"all_gather": ...}, "all-gather: nothing was given"),
                          ({"all_gather": "all"}, "all-gather: 'all' given; give a number"),
                          ({"all_gather": 4 * N}, "fp32 values of the whole model"),
                          ({"all_gather": 7}, "times what was sent; elements, times bytes each"),
                          ({"reduce_scatter": N}, "reduces them in fp32"),
                          ({"reduce_scatter": None}, "reduce-scatter: nothing was given")):  # fmt: skip
        check(exercises.predicts_traffic(run, **{**right, **changes}), text)
    moments = list(real_lab.slow_motion())
    for order, text in (
        (" ".join(SOLUTIONS.ORDER), ""), ("Unshard compute compute reduce reshard", "frees the parameters first"),
        ("", "Give a list"), ("gather compute", "'gather' is no phase"),
        ("compute unshard compute reshard reduce", "At place 1 the unit computes, but its parameters are in shards"),
        ("unshard compute reshard unshard compute reshard reduce", "unshard is there 2 times, and happens 1 time"),
        ("unshard compute reduce compute reshard", "At place 3 gradients are reduced, but there are none"),
        ("unshard compute unshard compute reshard reduce", "whole already"),
    ):  # fmt: skip
        marked = exercises.orders_phases(moments, order.split(), unit=BLOCK)
        assert text in repr(marked) and bool(marked) == (not text or "first" in text)
    check(exercises.orders_phases(moments, None, unit=BLOCK), "Give a list")


# -- notebook 04 -----------------------------------------------------------------------------------------------------
def over_link(sent: float, peak_bytes: int) -> Any:
    """A run whose steps take what a slow link takes for so many bytes."""
    store = EventStore()
    store.add(events.steps(0, comm={"all_gather": Traffic(calls=1, link_bytes=int(sent))}))
    entry = {"step_time_s": {"median": sent / 1e7}, "peak_memory_bytes": [peak_bytes, peak_bytes]}
    return SimpleNamespace(state=RunState.FINISHED, events=store, summary=lambda: entry)


def test_faster_over_a_slow_link() -> None:
    base = over_link(8e6, 1000)
    for changes, run, text in (
        ({"sharding": "shard_grad_op"}, over_link(6e6, 1500), "more memory. What stays gathered"),
        ({"forward_prefetch": 2}, over_link(8e6, 1000), "a rank sends 100% of the bytes"),
        (SOLUTIONS.FASTER[0], over_link(4e6, 600), ""),
    ):
        two: Any = SimpleNamespace(specs=[SPEC, SPEC.replace(**changes)], in_order=[base, run])
        check(exercises.faster_and_no_larger(two), text)
    for given, text in (([SPEC], "change something in mine"), ([SPEC, SPEC.replace(link="1 GB/s")], "work: link is")):
        check(exercises.faster_and_no_larger(SimpleNamespace(specs=given, in_order=[])), text)  # type: ignore[arg-type]


# -- notebook 05 -----------------------------------------------------------------------------------------------------
def test_a_rank_is_lost_and_no_step() -> None:
    """That a replica survives is in tests/lab/test_recovery.py."""
    lost = RankLost(rank=1, engine=1, pid=9, host="h", reason="ended", unix_s=1.0)
    incident = Incident(error=lost, step=7, ranks=2, detected_unix_s=1.0, source=BEGINNING, resumed_step=0)
    solved = {"incidents": [replace(incident, source=REPLICA, resumed_step=7)]}
    for changes, text in (
        (solved | {"spec": SPEC.replace(**SOLUTIONS.REPEATS_NOTHING)}, ""),
        ({}, "from the beginning, so .* were trained again: its shards were nowhere else"),
        ({"incidents": []}, "inject a fault"),
        ({"saves": [object()]}, "It wrote 1 checkpoint: leave save out"),
        ({"incidents": [replace(incident, resumed_step=None)]}, "did not go on: .* Give recover=True"),
        ({"spec": SPEC.replace(sharding="zero1")}, "its part of the optimizer's state"),
    ):
        given = {"incidents": [incident], "saves": [], "spec": SPEC, "reason": "", **changes}
        check(exercises.repeats_nothing(SimpleNamespace(**given)), text)  # type: ignore[arg-type]


# -- notebooks 06 and 09 ---------------------------------------------------------------------------------------------
RENTED = Spec(world_size=8).replace(model="llama-1b", precision="bf16", seq_len=2048, micro_batch=8)


def test_it_fits_and_is_fastest() -> None:
    for changes, text in (
        ({}, "change something in mine"),
        ({"recompute": "full"}, r"does not fit: .* Most of it is activations, .*: recompute them, or take fewer"),
        ({"sharding": "no_shard", "recompute": "full", "micro_batch": 1, "accumulate": 8}, "shard over more ranks"),
        ({"micro_batch": 1}, "A step has 8 samples, and 64 were asked for"),
        ({"micro_batch": 1, "accumulate": 8}, r"[\d.]+ times that of the fastest. It is bound by communication"),
        ({"seq_len": 512}, "other work: seq len is 512 and was 2048"),
        (SOLUTIONS.FITS, ""),
    ):
        check(exercises.fits_and_is_fastest(RENTED, RENTED.replace(**changes), Target(hardware="l4")), text)


HOSTS = Spec(world_size=32).replace(model="llama-13b", precision="bf16", seq_len=4096, micro_batch=1, recompute="full")


def test_gathers_stay_inside_hosts() -> None:
    target = Target(hardware="a100-80", hosts=4, network_gbit_per_s=100)
    for changes, text in (
        ({}, "change something in mine"),
        ({"sharding": "shard_grad_op"}, "32 ranks share one copy, and a host has 8: all-gathers cross"),
        ({"sharding": "hybrid_shard", "shard_size": 2}, "does not fit: .* 2 ranks share one copy"),
        ({"sharding": "no_shard"}, "does not fit: .* every rank holds a whole copy"),
        (SOLUTIONS.INSIDE_HOSTS, ""),
    ):
        check(exercises.gathers_inside_hosts(HOSTS, HOSTS.replace(**changes), target), text)
    for given in (..., None, {"sharding": "zero1"}):
        check(exercises.fits_and_is_fastest(RENTED, given, Target(hardware="l4")), "not a Spec yet")
        check(exercises.gathers_inside_hosts(HOSTS, given, target), "not a Spec yet")


# -- notebooks 07 and 08 ---------------------------------------------------------------------------------------------
def test_the_last_block_alone_is_trained(real_lab: Lab) -> None:
    rest = SOLUTIONS.FREEZE
    for changes, text in (
        ({}, "Everything is trained"), ({"freeze": rest[1:]}, r"transformer\.h\.0 is trained as well"),
        ({"freeze": ["transformer.h.*"]}, "it is frozen too"), ({"lora": {"r": 4}}, "These are adapters"),
    ):  # fmt: skip
        refused: Any = SimpleNamespace(spec=SPEC.replace(**changes))
        check(exercises.trains_last_block(refused), text)
    for freeze, text in ((rest[:1], "embeddings .* are trained as well"), (rest, "")):
        check(exercises.trains_last_block(real_lab.run(SPEC, steps=1, freeze=freeze).wait(60)), text)


def watched(flops: int, reductions: int) -> Any:
    """What a loop of these FLOPs and reductions a step has told; notebook 08 runs real ones (tests/notebooks)."""
    comm: Mapping[str, Traffic] = {"all_gather": Traffic(calls=7)}
    if reductions:
        comm = {**comm, "reduce_scatter": Traffic(calls=reductions)}
    store = EventStore()
    store.add(events.steps(0, flops=flops, comm=comm))
    return SimpleNamespace(spec=events.LOOP, events=store)


def test_a_loop_accumulates_and_reduces_once() -> None:
    one: WatchedRun = watched(100, 4)
    for second, text in ((watched(400, 4), ""), (one, "no second loop yet"), (None, "no second loop yet"),
                         (watched(100, 4), "computes as much as one of the loop before, and 4"),
                         (watched(200, 8), "computes 2 times as much"),
                         (watched(400, 16), "Gradients are reduced 16 times a step, and 4 are enough"),
                         (watched(400, 0), "never reduced, so each rank trains on its own")):  # fmt: skip
        check(exercises.accumulates(one, second), text)
    own = SimpleNamespace(spec=SPEC, events=one.events)
    check(exercises.accumulates(one, own), "a run of the lab's own")  # type: ignore[arg-type]


# -- the clinic: ten pains are named by themselves, and their cures change the figure -----------------------------
SMALL = {"model": "gpt2-1m", "micro_batch": 2, "seq_len": 64}
# Runs that nothing is wrong with: accumulation with exchange, adapters that save memory.
HEALTHY: list[dict[str, Any]] = [
    {"backend": "fsdp2", "sharding": "shard_grad_op", "accumulate": 3},
    {"lora": {"r": 4}, "recompute": "full", "micro_batch": 8, "seq_len": 128, "wrap": "every:2"},
]


# The dear ones, whose causes tests/lab/test_diagnosis.py finds on both sides of each limit; a patient below has two of them.
DEAR = (Cause.LOADING, Cause.ADAPTERS, Cause.ACCUMULATION, Cause.COMMUNICATION, Cause.OFFLOAD, Cause.COMPILATION)


@pytest.mark.parametrize(
    "name", [pytest.param(c, marks=pytest.mark.nightly if c in DEAR else pytest.mark.slow, id=c) for c in PAINS]
)
def test_the_cause_is_named_and_the_cure_is_measured(real_lab: Lab, name: str) -> None:
    pain = PAINS[name]
    sick = pain.reproduce(real_lab)
    (named,) = sick.diagnoses
    assert named.cause is pain.cause and named.sentence.endswith(".") and named.cure
    if name == Cause.BATCHES:
        assert isinstance(real_lab.history, History) and real_lab.history.flush(10)
        assert real_lab.runs()[sick.id].diagnoses == sick.diagnoses, "the stored run's are the same"
    cured = pain.cure(real_lab, sick)
    assert cured.state is RunState.FINISHED and pain.cause not in {d.cause for d in cured.diagnoses}, cured
    before, after = map(pain.measure.value, (sick, cured))
    assert after < before if pain.measure.lower_is_better else after > before, (before, after)
    if pain.code:
        with pytest.raises(ClusterError, match="does not have the cause"):
            pain.cure(real_lab, cured)


@pytest.mark.slow
@pytest.mark.parametrize("changes", HEALTHY, ids=str)
def test_nothing_is_named_where_nothing_is_wrong(real_lab: Lab, changes: dict[str, Any]) -> None:
    assert real_lab.run(Spec().replace(**{**SMALL, **changes}), steps=7).wait(90).diagnoses == ()


PATIENT = SPEC.replace(micro_batch=1, seq_len=32, accumulate=2, sync="last", link="0.01 GB/s, 100 us")


@pytest.mark.slow
def test_the_exercise_refuses_half_a_cure(real_lab: Lab) -> None:
    patient = real_lab.run(PATIENT, steps=8).wait(90)
    assert [d.cause for d in patient.diagnoses] == [Cause.ACCUMULATION, Cause.COMMUNICATION]
    check(exercises.heals(patient, patient), "Nothing is changed yet")
    half = {"state": RunState.FINISHED, "events": patient.events}
    for changes, left, text in (
        ({"link": None}, (), "another machine: link is"),
        ({"accumulate": 1}, (), "2 samples a step, and the patient 4"),
        ({"sync": "every"}, patient.diagnoses[1:], "Still there: Computing waits"),
        ({"sharding": "shard_grad_op"}, patient.diagnoses[:1], "Still there: Each rank holds whole gradients"),
    ):
        after: Any = SimpleNamespace(spec=PATIENT.replace(**changes), diagnoses=left, **half)
        check(exercises.heals(patient, after), text)
    check(exercises.heals(patient, real_lab.run(PATIENT.replace(sharding="no_shard"), steps=8).wait(90)), "")


# -- notebook 10, gap by gap: wrong engines and other right ones are in tests/backends/test_yours.py ------------------
NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "10_write_your_own_fsdp.ipynb"
TINY = {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 384, "n_positions": 128}
GAPS = ("DataParallel", "Zero1", "Zero2", "FullyShard", "Overlapped")
NUMBERS = count(100)  # of cells


def checked(lab: Lab, sources: list[str], gap: str, text: str) -> EngineCheck:
    """What the notebook's check says of a class with this text, where all other gaps are filled in."""
    names = cell(f"{SOLUTION.read_text()}\n\n{text}\n", next(NUMBERS))
    (call,) = [s for s in sources if f"lab.check_engine({gap}" in s]
    names |= {"lab": lab, "TINY": TINY}
    # Where times are compared, the model is the notebook's, so that there is as much to compute as to send.
    smaller = "" if "exposed" in call else ", model=TINY, seq_len=64"
    found = eval(f"{call.removesuffix(')')}, steps=5{smaller})", names)
    assert isinstance(found, EngineCheck)
    return found


@pytest.fixture(scope="module")
def sources() -> list[str]:
    import nbformat

    return [c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if c.cell_type == "code"]


def solution_of(gap: str) -> str:
    text = SOLUTION.read_text()
    return re.split(r"\n\n\n(?=class )", text[text.index(f"class {gap}") :])[0]


# Gap -> a plausible wrong class, and the limit that it does not keep. Overlapped's is a share of the time that is sent.
WRONG = {
    "Zero1": (solution_of("Zero1").replace(".clone()", ""), r"keeps parameters of 1.\d+ model sizes, and at most 0\.6"),
    "Zero2": ("class Zero2(Zero1):\n    pass\n",
              r"sends 1\.50 model sizes, and at most 1\.05 .* holds gradients of 1\.5"),
    "Overlapped": ("class Overlapped(FullyShard):\n    pass\n", r"waits for \d+% of its communication, and at most 70"),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("gap", GAPS)
def test_a_gap(real_lab: Lab, sources: list[str], gap: str) -> None:
    solved = checked(real_lab, sources, gap, solution_of(gap))
    assert solved.passed, solved


@pytest.mark.parametrize(
    "gap", [pytest.param(gap, marks=pytest.mark.nightly if gap == "Overlapped" else pytest.mark.slow) for gap in WRONG]
)
def test_a_limit_that_is_not_kept_is_said(real_lab: Lab, sources: list[str], gap: str) -> None:
    text, said = WRONG[gap]
    wrong = checked(real_lab, sources, gap, text)
    assert not wrong and re.search(said, wrong.sentence), wrong


STUCK = """
class Stuck(FullyShard):
    def gather(self, unit):
        while unit.rank:
            pass
        super().gather(unit)
"""


@pytest.mark.slow
def test_a_rank_that_never_comes_back_is_named_and_the_next_check_passes(real_lab: Lab, sources: list[str]) -> None:
    names = cell(f"{SOLUTION.read_text()}\n\n{STUCK}", next(NUMBERS))
    real_lab.run(engine=names["FullyShard"], model=TINY, steps=1).wait(60)
    found = real_lab.check_engine(names["Stuck"], model=TINY, steps=5)
    assert re.search(r"rank 1 .* in Stuck\.gather\(root\) in the forward of step 0", found.sentence), found
    right = checked(real_lab, sources, "Zero2", "")
    assert right and "equal bit for bit" in right.sentence and "gradients, at most" in repr(right)
    assert "<table" in right._repr_html_()
    with pytest.raises(ArgumentError, match="give some of sent"):
        real_lab.check_engine(names["FullyShard"], most={"speed": 1})
    with pytest.raises(ArgumentError, match="5 or more"):
        real_lab.check_engine(names["FullyShard"], steps=3)


def test_the_board_of_a_class_follows_who_has_passed_what(tmp_path, monkeypatch):
    quiet = SimpleNamespace(incidents=(), state=RunState.STOPPED)
    recovered = SimpleNamespace(resumed_step=4, source=REPLICA)
    healed = SimpleNamespace(incidents=(recovered,), saves=(), spec=SPEC, state=RunState.STOPPED)
    with pytest.raises(ValueError, match="give Board"):
        Board()
    exercises.repeats_nothing(quiet)  # no class: noted nowhere
    monkeypatch.setenv("FSDP_LAB_CLASS", str(tmp_path))
    board = Board()
    try:
        assert "Nobody has answered yet" in board.value
        for name, runs in (("ada", (quiet, quiet, healed, quiet)), ("bob", (quiet,))):
            monkeypatch.setenv("LOGNAME", name)
            for run in runs:
                exercises.repeats_nothing(run)
        ada, bob = (learner.answers["05"] for learner in board.learners())
        assert (ada.mark, bob.mark) == ("✔ 3", "✘ 1")
        until(lambda: "✔ 3" in board.value and "✘ 1" in board.value and "of 2" in board.value, 30)
        shutil.rmtree(tmp_path)
        assert not exercises.repeats_nothing(quiet)  # a folder that has gone harms no check
    finally:
        board.close()
