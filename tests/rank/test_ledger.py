"""The memory ledger: known bytes of known models, in all four backends, at every unit of a step."""

import contextlib
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from fsdp_lab.backends import Backend
from fsdp_lab.base.events import Memory, Role, RoleBytes, StepEvent
from fsdp_lab.rank import measure
from fsdp_lab.rank.faults import InjectedFault
from fsdp_lab.rank.ledger import MOST_SAMPLES, Ledger, LedgerResult, MemoryBlock, _follow, _Mark, _unknown
from fsdp_lab.rank.measure import GpuGauge, StepMeter
from fsdp_lab.spec.spec import Spec
from fsdp_lab.wire import WireContext
from tests.pool import Place, Pool
from tests.rank.test_session import BACKENDS, apply, call, play, running, session, train, trainer_of

# Every size is a multiple of 4 elements for each of two ranks: no shard and no slot of a flat buffer is padded.
WIDTH, HEADS, LAYERS, VOCABULARY, SEQ, BATCH = 32, 4, 3, 384, 16, 2
MODEL = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY,
         "n_positions": SEQ, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
         "bos_token_id": None, "eos_token_id": None}  # fmt: skip
BLOCK = 12 * WIDTH**2 + 13 * WIDTH  # parameters
ROOT = (VOCABULARY + SEQ) * WIDTH + 2 * WIDTH
ALL = LAYERS * BLOCK + ROOT


def spec(world_size: int = 2, **changes: Any) -> Spec:
    return Spec(world_size=world_size).replace(model=MODEL, seq_len=SEQ, micro_batch=BATCH, **changes)


def ledger_steps(place: Place, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ledger step of each."""
    found = []
    with contextlib.closing(session(place)) as s:
        for given in plan:
            s.apply("run", given, fresh=True)
            found += [e for e in s.train(3)["events"] if e["ledger"]]
    return found


def ledgers(pool: Pool, *plan: Spec) -> list[StepEvent]:
    """Of rank 0, one for each."""
    mine, *_ = pool.run(ledger_steps, plan[0].world_size, [s.to_dict() for s in plan], reduction=None)
    return [StepEvent.from_dict(e) for e in mine]


def at(event: StepEvent, phase: str, unit: str, moment: str = "end") -> RoleBytes:
    (found,) = [s.classes for s in event.memory_curve if (s.phase, s.unit, s.moment) == (phase, unit, moment)]
    return found


def _shared(place: Place) -> tuple[int, int]:
    """The pool, as it is said after some steps, and this process's share of shared memory, by Linux."""
    with running(place, spec()) as s:
        memory = s.train(3)["events"][-1]["memory"]
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        (share,) = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Shmem:")]
        s.train(1)  # until here no rank has gone
    return memory["pool_bytes"], share


def test_memory_that_ranks_share_is_counted_once(pool: Pool) -> None:
    pools, shares = map(sum, zip(*pool.run(_shared, 2, reduction=None), strict=True))
    # Linux counts pages that were touched, and control files of some hundred KiB
    assert 0.5 * pools < shares < pools + (1 << 20)


# -- known bytes -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def events(pool: Pool) -> dict[str, StepEvent]:
    return dict(zip(BACKENDS, ledgers(pool, *(spec(**changes) for changes in BACKENDS.values())), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_every_byte_of_a_step_is_known_under_every_backend(events: dict[str, StepEvent], name: str) -> None:
    event, m = events[name], events[name].memory
    check_what_stays(event, name)
    check_what_is_gathered(event, name)
    assert m.at_peak.total_bytes == m.peak_bytes == max(s.classes.total_bytes for s in event.memory_curve)
    assert m.at_peak.other_bytes < 0.01 * m.peak_bytes
    assert m.limit_bytes is not None and m.peak_bytes < m.limit_bytes
    assert 0 < m.outside_bytes < m.rss_bytes and m.reserved_bytes is None
    check_order(event)


def check_what_stays(event: StepEvent, name: str) -> None:
    mine = 4 * ALL // (1 if name == "ddp" else 2)
    for sample in event.memory_curve:
        assert (sample.classes.parameters_bytes, sample.classes.other_bytes < 4096) == (mine, True)
    begin, reduced, end = (at(event, *where) for where in (
        ("begin", "root", "begin"), ("update", "root", "begin"), ("update", "root", "end")))  # fmt: skip
    assert begin.optimizer_bytes == reduced.optimizer_bytes == end.optimizer_bytes == 2 * mine  # AdamW
    assert reduced.gradients_bytes == mine and reduced.unsharded_bytes == 0
    kept = mine if name in ("fsdp1", "ddp") else 0  # FSDP1 keeps them until the next forward, DDP its buckets
    assert begin.gradients_bytes == end.gradients_bytes == kept
    m = event.memory
    assert m.allocated_bytes == pytest.approx(3 * mine + kept, abs=64)  # the vote's 16 bytes may still be there
    assert (m.parameters_bytes, m.gradients_bytes, m.optimizer_bytes) == (mine, mine, 2 * mine)


def check_what_is_gathered(event: StepEvent, name: str) -> None:
    """In a block's forward the block and the root, and under lab the next block, which is gathered ahead; so it is in every
    backward. DDP gathers nothing."""
    if name == "ddp":
        assert all(s.classes.unsharded_bytes == 0 for s in event.memory_curve)
        return
    for i in range(LAYERS):
        ahead = name == "lab" and i < LAYERS - 1
        for moment in ("begin", "end"):
            held = at(event, "forward", f"transformer.h.{i}", moment)
            assert held.unsharded_bytes == 4 * (ROOT + BLOCK + ahead * BLOCK)
    assert max(s.classes.unsharded_bytes for s in event.memory_curve) <= 4 * (ROOT + 2 * BLOCK)


def check_order(event: StepEvent) -> None:
    """The curve goes through the units one after the other."""
    curve = event.memory_curve
    assert [s.at_s for s in curve] == sorted(s.at_s for s in curve) and curve[0].at_s == 0
    passed = list(dict.fromkeys((s.phase, s.unit) for s in curve if s.unit != "root"))
    blocks = [f"transformer.h.{i}" for i in range(LAYERS)]
    assert passed == [*(("forward", b) for b in blocks), *(("backward", b) for b in blocks[::-1])]
    phases = ["begin", "forward", "backward", "update"]
    assert [s.phase for s in curve] == sorted((s.phase for s in curve), key=phases.index)


def test_a_block_adds_what_its_operators_save(events: dict[str, StepEvent]) -> None:
    """In closed form. By token, in widths: both norms' inputs and outputs 4, queries, keys and values 3, attention's
    result 1, and of the MLP's width of 4: before GELU, its half, tanh, 1 + tanh, and after it, 5. By token, in elements: two
    norms' means and deviations 4, and one log-sum-exp a head."""
    ends = [at(events["lab"], "forward", f"transformer.h.{i}").activations_bytes for i in range(LAYERS)]
    by_hand = 4 * BATCH * SEQ * ((4 + 3 + 1 + 5 * 4) * WIDTH + 4 + HEADS)
    assert [b - a for a, b in itertools.pairwise(ends)] == [pytest.approx(by_hand, abs=64)] * (LAYERS - 1)


# -- strategies: their peaks are the planner's, by class (tests/planner/test_memory.py) ------------------------------
STRATEGIES: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"}, "offload of the optimizer": {"offload": "optimizer"},
    "fsdp2, offload of all": {"backend": "fsdp2", "offload": "all"},
    "fsdp1, bf16": {"backend": "fsdp1", "precision": "bf16"}, "two micro-batches": {"accumulate": 2, "sync": "last"},
    "zero1": {"sharding": "zero1"},
}  # fmt: skip


@pytest.fixture(scope="module")
def by_strategy(pool: Pool) -> dict[str, StepEvent]:
    return dict(zip(STRATEGIES, ledgers(pool, *(spec(**changes) for changes in STRATEGIES.values())), strict=True))


@pytest.mark.slow
def test_every_byte_has_a_class_under_every_strategy_and_what_is_offloaded_is_not_the_device_s(
    by_strategy: dict[str, StepEvent],
) -> None:
    for name, event in by_strategy.items():
        m = event.memory
        assert m.at_peak.total_bytes == m.peak_bytes > 0, name
        assert m.at_peak.other_bytes < 0.01 * m.peak_bytes, name
        assert event.memory_curve[-1].classes.activations_bytes == 0, name
        assert {f"transformer.h.{i}" for i in range(LAYERS)} <= {s.unit for s in event.memory_curve}, name
        assert event.memory_curve[-1].classes.unsharded_bytes == (4 * ALL if name == "zero1" else 0), name
    event = by_strategy["fsdp2, offload of all"]
    assert event.memory.host_bytes == 4 * (4 * ALL // 2)  # parameters, gradients, twice that of state
    assert all(s.classes.parameters_bytes == s.classes.optimizer_bytes == 0 for s in event.memory_curve)
    begin, end = event.memory_curve[0].classes, event.memory_curve[-1].classes
    assert begin.total_bytes == 0 and end.total_bytes < 4096
    # gradients are whole between two micro-batches of which only the last communicates; the second forward finds them
    curve = by_strategy["two micro-batches"].memory_curve
    second = [s for s in curve if (s.phase, s.unit, s.moment) == ("forward", "transformer.h.0", "begin")][1]
    assert 4 * ALL < second.classes.gradients_bytes < 4.01 * ALL  # with the counts of what came
    partly = by_strategy["offload of the optimizer"]  # leaves a copy to gather from
    assert {s.classes.parameters_bytes for s in partly.memory_curve} == {4 * ALL // 2}
    assert partly.memory_curve[-1].classes.optimizer_bytes == partly.memory_curve[-1].classes.gradients_bytes == 0


@pytest.mark.slow
def test_recompute_keeps_the_inputs_of_blocks_alone(events: dict[str, StepEvent], by_strategy: dict[str, StepEvent]):
    plain, again = events["lab"], by_strategy["recompute"]
    kept = 4 * BATCH * SEQ * WIDTH + torch.get_rng_state().nbytes  # so that dropout repeats itself
    ends = [at(again, "forward", f"transformer.h.{i}").activations_bytes for i in range(LAYERS)]
    assert [b - a for a, b in itertools.pairwise(ends)] == [pytest.approx(kept, abs=64)] * (LAYERS - 1)
    assert again.memory.peak_bytes < plain.memory.peak_bytes and again.recompute_flops > 0 == plain.recompute_flops
    assert again.flops == plain.flops


@pytest.mark.slow
def test_ledger_steps_come_when_they_are_asked_for(pool: Pool) -> None:
    early = train(1, ledgers=[0])  # put off to the third
    for _, *answers in play(pool, 2, apply(spec(recompute="full")), early, train(4), train(5, ledgers=[6, 8])):
        events = [StepEvent.from_dict(e) for answer in answers for e in answer["events"]]
        assert [e.step for e in events if e.ledger] == [e.step for e in events if e.memory_curve] == [2, 6, 8]
        assert not any(e.counts for e in events if e.ledger)
        assert [e.memory.peak_bytes > 0 for e in events] == [False, False, *[True] * 8]
        assert events[3].memory.at_peak == events[2].memory.at_peak  # repeated until the next
        assert all(e.memory.parameters_bytes == 4 * ALL // 2 for e in events)


def test_what_a_ledger_step_found_is_kept_and_what_is_dropped_is_gone(pool: Pool) -> None:
    resume, suspend = call("resume", "run"), call("suspend")
    calls = (apply(spec()), train(4), suspend, resume, train(4), suspend, call("discard", ["run", "another"]), resume)
    for *_, after, trained, _, dropped, gone in play(pool, 2, *calls):
        assert after == {"step": 4} and dropped == {"discarded": 1} and gone == {"step": None}
        assert not any(e["ledger"] for e in trained["events"])
        assert all(e["memory"]["peak_bytes"] > 0 for e in trained["events"])  # as before it was suspended


# -- by hand ---------------------------------------------------------------------------------------------------------
def _operations_recorded(place: Place) -> list[list[str]]:
    """The names of Gloo's operations that a profiler recorded: with the ledger's setting of the wire, and without."""
    found = []
    for hidden in (True, False):
        place.context.hide_from_profiler = hidden
        with profile() as recorded:
            place.world.all_gather_single(torch.empty(8), torch.ones(4)).wait()
            torch.ones(3).add_(1)
        names = [e.name() for e in recorded.profiler.kineto_results.events()]
        assert "aten::add_" in names, "what the rank computes is recorded all the same"
        found.append([name for name in names if name.startswith("gloo:")])
    return found


def _hidden_while_recording(place: Place) -> list[Any]:
    """Whether operations are hidden, and how many hooks are left: in a ledger step that is given up, and after it."""
    context, seen = WireContext(), []
    with running(place, spec()) as s:
        backend = trainer_of(s).backend
        before, ledger = hooks_of(backend), Ledger(backend, context, torch.device("cpu"), offloaded=False)
        with contextlib.suppress(InjectedFault), ledger.recording():
            backend.loss(trainer_of(s).batches.batch(0, 0)).backward()
            seen += [context.hide_from_profiler, hooks_of(backend) > before]
            raise InjectedFault("given up")
        return [*seen, context.hide_from_profiler, hooks_of(backend) > before]


def hooks_of(backend: Backend) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backend.module.modules())


def test_a_ledger_step_can_be_given_up_while_operations_run(pool: Pool) -> None:
    """The end of an operation that the profiler records would be written to freed memory: see the note in the wire."""
    for hidden, shown in pool.run(_operations_recorded, 2):
        assert hidden == [] and shown != []
    assert pool.run(_hidden_while_recording, 2, reduction=None) == [[True, True, False, False]] * 2


def test_the_highest_moment_between_two_marks_is_in_the_curve() -> None:
    marks = [(0.0, _Mark("begin", "root", "begin")), (10.0, _Mark("forward", "a", "begin")),
             (15.0, _Mark("forward", "a", "")), (20.0, _Mark("update", "root", "end"))]  # fmt: skip
    blocks = [MemoryBlock(100, Role.PARAMETERS), MemoryBlock(7, None), MemoryBlock(30, Role.ACTIVATIONS, 11.0, 13.0),
              MemoryBlock(20, Role.ACTIVATIONS, 12.0, 17.0), MemoryBlock(5, Role.OTHER, 25.0, 30.0)]  # fmt: skip
    found = _follow(blocks, marks)
    assert [(s.at_s, s.phase, s.unit, s.moment, s.classes.total_bytes) for s in found.curve] == [
        (0, "begin", "root", "begin", 100), (1e-8, "forward", "a", "begin", 100),
        (1.2e-8, "forward", "a", "highest", 150), (2e-8, "update", "root", "end", 100),
    ]  # fmt: skip
    assert found.peak == RoleBytes(parameters_bytes=100, activations_bytes=50)
    assert found.end_bytes == 107  # what is on the host too


@pytest.mark.parametrize("workspace", [0, 7])
def test_what_a_gpu_s_allocator_holds_beyond_known_blocks_is_other(workspace: int) -> None:
    """A workspace before the step, and one of 30 that a thread allocates which the profiler does not see."""
    blocks = [
        MemoryBlock(50, Role.PARAMETERS),
        MemoryBlock(100, Role.ACTIVATIONS, 12, 35),
        MemoryBlock(1, None, 12, 35),  # on the host
    ]
    allocated = {at: known + workspace for at, known in {10: 50, 20: 150, 30: 180, 40: 80}.items()}
    marks = [(float(at), _Mark("forward", f"unit {at}", "begin", nbytes)) for at, nbytes in allocated.items()]
    result = _follow([*blocks, *_unknown(blocks, marks)], marks)
    sampled = {s.unit: s.classes.total_bytes for s in result.curve if s.moment == "begin"}
    assert sampled == {f"unit {at}": nbytes for at, nbytes in allocated.items()}
    others = [s.classes.other_bytes for s in result.curve if s.moment == "begin"]
    assert others == [workspace + unseen for unseen in (0, 0, 30, 30)]
    assert (result.peak.total_bytes, result.peak.other_bytes) == (180 + workspace, 30 + workspace)


def test_a_curve_of_many_units_is_thinned_and_keeps_its_peak() -> None:
    marks = [(float(i), _Mark("forward", f"h.{i}", "begin")) for i in range(5000)]
    blocks = [MemoryBlock(10, Role.PARAMETERS), MemoryBlock(90, Role.ACTIVATIONS, 1234.5, 1234.7)]
    found = _follow(blocks, marks)
    assert len(found.curve) <= MOST_SAMPLES + 2
    assert max(s.classes.total_bytes for s in found.curve) == found.peak.total_bytes == 100
    assert (found.curve[0].at_s, found.curve[-1].at_s) == (0, 4999 / 1e9)


@pytest.mark.parametrize("peak_bytes", [90, 110, 150])
def test_the_classes_add_up_to_the_allocator_s_peak(monkeypatch: pytest.MonkeyPatch, peak_bytes: int) -> None:
    """Of a step that allocates less than the ledger step did, a little more, and much more."""
    for name, value in {"memory_reserved": 200, "max_memory_allocated": peak_bytes, "memory_allocated": 80,
                        "mem_get_info": (100, 400),
                        "memory_stats_as_nested_dict": {"num_alloc_retries": 5, "num_ooms": 2}}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    meter = StepMeter.__new__(StepMeter)
    meter._device, meter._held_bytes, meter._troubles = torch.device("cuda:0"), 30, (3, 2)
    classes = RoleBytes(parameters_bytes=60, activations_bytes=40, other_bytes=5)
    meter.ledger = LedgerResult(peak=classes, end_bytes=0, curve=())
    found = meter._gpu_memory(Memory(parameters_bytes=60))
    assert found.at_peak.total_bytes == found.peak_bytes == peak_bytes and found.allocated_bytes == 50
    assert (found.alloc_retries, found.ooms) == (2, 0), "since the event before"
    assert found.at_peak.parameters_bytes == 60 and found.at_peak.other_bytes == max(0, peak_bytes - 100)


def test_a_gpu_s_use_is_asked_for_in_a_thread_and_a_driver_that_hangs_holds_nothing_up(monkeypatch: pytest.MonkeyPatch):
    def refused(device: torch.device) -> int:
        raise RuntimeError("Not Supported")

    answers = threading.Event()
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: answers.wait(30) and 97)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 612_400)
    monkeypatch.setattr(torch.cuda, "temperature", refused)
    monkeypatch.setattr(measure, "GPU_EVERY_S", 0.0)
    gauge = GpuGauge(torch.device("cuda:0"))
    assert [gauge.look() for _ in range(3)] == [{}] * 3
    (asking,) = (t for t in threading.enumerate() if t.name == "fsdp-lab-gpu-gauge")
    answers.set()
    asking.join(30)
    assert gauge.look() == {"gpu_percent": 97, "gpu_power_w": pytest.approx(612.4)}
    assert GpuGauge(torch.device("cpu")).look() == {}
