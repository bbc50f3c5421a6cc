"""One call on many ranks, without engines: who is freed, and what the one exception says."""

import json
import time
from collections.abc import Sequence

import pytest

from fsdp_lab.base.errors import Cause, SpecError
from fsdp_lab.base.hang import Hang, Issued
from fsdp_lab.cluster import Interrupted, RankError, RankHung, RankLost, RankStuck, calls as module
from fsdp_lab.cluster.calls import Call, Outcome
from fsdp_lab.cluster.remote import described, memory_short


class Ladder:
    """Ranks that answer an interrupt, or nothing."""

    def __init__(self, *, deaf: bool = False, owned: bool = True):
        self.call: Call | None = None
        self.deaf, self.owned = deaf, owned
        self.rungs: list[str] = []
        self.last_words: Outcome | None = None  # what a rank answers while it is ended

    def signal(self, ranks: Sequence[int]) -> None:
        self.rungs.append(f"signal {list(ranks)}")
        if not self.deaf:
            for rank in ranks:
                self.call.finish(rank, error("RankAborted", "freed"))

    def end_rank(self, rank: int, fate: str) -> bool:
        self.rungs.append(f"end {rank}")
        if self.last_words is not None:
            self.call.finish(rank, self.last_words)
            self.call.lose(rank, lost(rank))
        return self.owned

    def may_be_dying(self, ranks: object) -> bool:
        return False


def error(kind: str, reason: str, **more) -> Outcome:
    return Outcome(error={"kind": kind, "reason": reason, "trace": "", "unix_s": time.time(), **more})


def lost(rank: int) -> RankLost:
    return RankLost(rank=rank, engine=rank, pid=9, host="h", reason="ended", unix_s=time.time())


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    monkeypatch.setattr(module, "ESCALATION_S", 0.02)

    def make(ranks: int = 3, **how) -> tuple[Call, Ladder]:
        steps = Ladder(**how)
        steps.call = Call("train", range(ranks), steps)
        return steps.call, steps

    return make


def test_an_error_on_one_rank_frees_the_others_and_is_the_one_that_is_raised(ladder):
    call, steps = ladder()
    call.finish(1, error("ValueError", "bad"))
    with pytest.raises(RankError, match="rank 1 failed in train at .*: ValueError: bad") as e:
        call.results(1)
    assert steps.rungs == ["signal [0, 2]"] and e.value.rank == 1 and set(e.value.others) == {0, 2}


def test_a_refusal_stays_a_spec_error_and_a_lost_rank_is_the_cause_whatever_its_peers_said_first(ladder):
    call, _ = ladder(1)
    refused = SpecError("workload.data", "is short", "give more", {"data": "stdlib"}, Cause.LOADING)
    call.finish(0, error("SpecError", "x", refusal=json.loads(json.dumps(refused.to_dict()))))
    with pytest.raises(SpecError, match="workload.data: is short; give more") as e:
        call.results(1)
    assert e.value.fix == {"data": "stdlib"} and e.value.cause is Cause.LOADING
    call, _ = ladder(2)
    call.finish(0, error("RuntimeError", "connection closed by peer"))
    call.lose(1, lost(1))
    with pytest.raises(RankLost, match="rank 1 is gone: its process 9 on h ended"):
        call.results(1)


def test_the_ladder_ends_a_rank_that_answers_nothing(ladder):
    call, steps = ladder(2, deaf=True)
    call.finish(0, Outcome(value=1))
    with pytest.raises(RankStuck, match="rank 1 did not answer .* its process was ended"):
        call.results(0.01)
    assert steps.rungs == ["signal [1]", "signal [1]", "end 1"]
    call, _ = ladder(1, deaf=True, owned=False)
    with pytest.raises(RankStuck, match="not ours to end"):
        call.results(0.01)


def test_a_rank_that_answers_while_it_is_ended_is_not_waited_for_again(ladder):
    """Its death is no longer among the outcomes then, since it has answered."""
    call, steps = ladder(2, deaf=True)
    steps.last_words = Outcome(interrupted=True)
    collective = Issued(sequence=1, kind="all_gather", group="0", size=2, ordinal=1)
    hang = Hang(sentence="hangs", ranks=(1,), absent=(1,), collective=collective, waiting=(0,), waited_s=3.0)
    call.hang(RankHung(hang))
    with pytest.raises(RankHung):
        call.results(1)
    assert steps.rungs == ["signal [0, 1]", "end 1"]


def test_ranks_that_say_they_were_interrupted_did_not_fail(ladder):
    call, _ = ladder(2)
    for rank in (0, 1):
        call.finish(rank, error("RankAborted", "rank 1 was interrupted"))
    with pytest.raises(Interrupted):
        call.results(1)


# -- an allocator's error becomes a sentence with a way out
class OutOfMemoryError(RuntimeError):
    """torch's for a GPU, as far as it is read."""


WHY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 134217728 bytes"
HOST = RuntimeError(f"[enforce fail at alloc_cpu.cpp:127] err == 0. {WHY}. Error code 12 (Cannot allocate memory)")
GPU = OutOfMemoryError("CUDA out of memory. Tried to allocate 2.34 GiB. GPU 0 has a total capacity of 79.10 GiB.")


@pytest.mark.parametrize(
    ("error", "size"), [(HOST, "128.0 MiB"), (GPU, "2.34 GiB"), (MemoryError(), "what it asked for")], ids=type
)
def test_what_could_not_be_had_is_said(error: Exception, size: str) -> None:
    told = described(error)
    assert told["kind"] == "OutOfMemory"
    assert told["reason"].startswith(f"{size} more could not be allocated; give a smaller micro_batch")


def test_other_errors_keep_their_words() -> None:
    """What another rank could not have is not this one's."""
    aborted = type("RankAborted", (RuntimeError,), {})
    assert described(aborted(f"rank 1 failed: RuntimeError: {HOST}"))["kind"] == "RankAborted"
    told = described(ValueError("a  memory\nof it"))
    assert (told["kind"], told["reason"], memory_short(ValueError("x"))) == ("ValueError", "a memory of it", "")
