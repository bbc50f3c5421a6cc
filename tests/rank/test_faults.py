"""Injected faults, without a kernel: what each rank says, that none is left blocked, and that they go on.

Those that end or stop a process are in tests/lab/test_faults.py."""

import re
from typing import Any

import pytest

from fsdp_lab.base.events import StepEvent
from fsdp_lab.cluster.remote import memory_short
from fsdp_lab.rank.faults import slower
from fsdp_lab.spec.faults import Fault, FaultKind
from fsdp_lab.wire import Link
from tests.pool import Place, Pool
from tests.rank.test_not_finite import said_by
from tests.rank.test_session import DDP, apply, call, fails, play, running, session, spec, train

LIMIT_S = 1.5


Said = tuple[dict[str, Any], str, str]  # a fault of rank 1, and what ranks 0 and 1 say of it
CUT = "RankAborted: all ranks joined {} .*the connection between them is stalled"
RAISE = {"kind": "raise", "at_step": 2}
RAISED, ELSEWHERE = "InjectedFault: injected in the {} of step 2$", "RankAborted: rank 1 failed: "
OF_LAB: list[Said] = [
    ({**RAISE, "phase": "backward"}, ELSEWHERE + RAISED.format("backward"), RAISED.format("backward")),
    ({"kind": "oom", "phase": "backward"}, f"{ELSEWHERE}RuntimeError: ", "RuntimeError: "),
    ({"kind": "cut"}, CUT.format("all_gather"), CUT.format("all_gather")),
]
STALLED = "RankAborted: rank 1 did not join all_reduce .*, in _stall\n"  # also when the rank comes to itself
OF_DDP: list[Said] = [  # what the others had applied is applied on all, and the third step has no event
    ({**RAISE, "phase": "update"}, ELSEWHERE + RAISED.format("update"), RAISED.format("update")),
    ({"kind": "stall", "for_s": LIMIT_S + 1.5}, STALLED, STALLED),
    ({"kind": "cut"}, CUT.format("all_reduce"), CUT.format("all_reduce")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "faults", "steps"), [({}, OF_LAB, [0, 1, 2, 3, 4]), (DDP, OF_DDP, [0, 1, 3, 4, 5])], ids=["lab", "ddp"]
)
def test_each_fault_is_said_and_training_goes_on_from_the_last_good_step(
    pool: Pool, steady: list[float], changes: dict[str, Any], faults: list[Said], steps: list[int]
) -> None:
    calls = [apply(spec(**changes)), train(2)]
    for fault, *_ in faults:
        calls += [call("arm", {**fault, "ranks": [1]}), fails(train(2)), train(1)]
    by_rank = play(pool, 2, *calls, call("disarm"), reduction="rank_ordered", hang_s=LIMIT_S)
    for rank, (_, before, *told, disarmed) in enumerate(by_rank):
        assert disarmed == {"disarmed": 0}, "it is armed no longer"
        for (fault, *sentences), armed, said in zip(faults, told[::3], told[1::3], strict=True):
            assert armed == {"armed": rank == 1}
            assert re.match(sentences[rank], said, re.DOTALL), said
            if fault["kind"] == "oom" and rank == 1:
                sentence = "MiB more could not be allocated; give a smaller micro_batch"
                assert sentence in memory_short(RuntimeError(said))
        losses = {e["step"]: e["mean_loss"] for answer in (before, *told[2::3]) for e in answer["events"]}
        assert losses == {step: steady[step] for step in steps}


def _cut_for_good(place: Place) -> Any:
    s = session(place, hang_s=LIMIT_S, timeout_s=5)  # which new groups take that cannot be opened
    s.apply("run", spec().to_dict())
    s.train(1)  # a rank may take a minute for the first step
    s.arm({"kind": "cut", "ranks": [0], "heals": False, "phase": "backward"})
    said = [said_by(s), said_by(s)]
    s.disarm()
    steps = [e["step"] for e in s.train(2)["events"]]
    assert not s.context.busy_addresses(), "nothing is kept for operations that never were"
    s.close()
    return said, steps


@pytest.mark.slow
def test_a_link_can_be_cut_for_good(pool: Pool) -> None:
    """New groups are of no use then."""
    for said, steps in pool.run(_cut_for_good, 2, reduction=None):
        assert "stalled" in said[0] and said[1].startswith("RankAborted: ") and steps == [1, 2], said


@pytest.mark.slow
def test_a_slow_link_holds_all_ranks_up_and_changes_no_bit(pool: Pool, steady: list[float]) -> None:
    """From chunk to chunk, until it is taken back. A busy machine may let one rank begin a step late: not the slowest."""
    slow, held_up = call("arm", {"kind": "slow", "ranks": [1], "link": "1 MB/s"}), []
    calls = (apply(spec()), train(2), slow, train(1), train(2), call("disarm"), train(2))
    for _, *answers in play(pool, 2, *calls, reduction="rank_ordered"):
        chunks = [[StepEvent.from_dict(e) for e in a["events"]] for a in answers if "events" in a]
        assert [e.mean_loss for chunk in chunks for e in chunk] == steady[:7]
        held_up.append(chunks[2])
    for of_ranks in zip(*held_up, strict=True):
        sent = max(sum(t.link_bytes for kind, t in e.comm.items() if kind != "control") for e in of_ranks)
        assert max(e.step_time_s for e in of_ranks) > 0.9 * sent / 1e6 > 0.1


def _slower_than_the_wire(place: Place) -> float | None:
    with running(place, spec()) as s:
        s.arm({"kind": "slow", "ranks": [1], "factor": 50})
        s.train(1)
        return s._faults.link.bytes_per_s if s._faults.link else None


def test_where_no_link_is_emulated_the_real_one_is_measured(pool: Pool) -> None:
    zero, one = pool.run(_slower_than_the_wire, 2, reduction=None)
    assert zero is None and one is not None and one > 0
    fault = Fault(kind=FaultKind.SLOW, ranks=(1,), factor=50)
    for now, rate_and_latency in ((None, (2.0, 0.0)), (Link(bytes_per_s=50.0, latency_s=1.0), (1.0, 50.0))):
        link = slower(fault, now, lambda: 100.0)
        assert (link.bytes_per_s, link.latency_s) == rate_and_latency


def test_what_cannot_be_is_refused_on_all_ranks_and_what_is_armed_can_be_taken_back(pool: Pool) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"ranks": [2]}, {"ranks": [1], "at_step": 1}, {"ranks": [1], "kind": "bang"})
    refused = [fails(call("arm", {"kind": "raise", **fault})) for fault in wrong]
    armed = [call("arm", {"kind": "raise", "ranks": [1], "at_step": step}) for step in (3, 4)]
    by_rank = play(pool, 2, apply(spec()), train(2), *refused, *armed, call("disarm"), train(3))
    for rank, (_, _, *said, _, _, taken_back, after) in enumerate(by_rank):
        assert [text.split(":")[1] for text in said] == [" fault.ranks", " fault.at_step", " fault.kind"]
        assert taken_back == {"disarmed": 2 * rank} and [e["step"] for e in after["events"]] == [2, 3, 4]
