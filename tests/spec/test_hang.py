"""Who is missing, from beats with known answers; and limits that are refused."""

import json
import math
from typing import Any

import pytest

from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.base.hang import Hang, Heartbeat, Issued, LongWork, diagnose, limit


def issued(ordinal: int, kind: str = "all_gather", unit: str = "h.3", group: str = "world", **more: Any) -> Issued:
    of = {"sequence": ordinal, "kind": kind, "group": group, "size": 4, "ordinal": ordinal, "unit": unit}
    return Issued(**{**of, **more})


def beat(rank: int, pending: Issued | None = None, waited_s: float = 9.0, **more: Any) -> Heartbeat:
    """A rank that waits in `pending` with all four, or, without one, one that has issued 16 and is elsewhere."""
    fields: dict[str, Any] = {"rank": rank, "number": 0, "working": True, "stack": f"s{rank}"}
    fields["last"] = pending or issued(15)
    if pending is not None:
        fields |= {"pending": pending, "pending_s": waited_s, "peers": (0, 1, 2, 3)}
    return Heartbeat(**{**fields, "counts": {"world": 16 if pending is None else pending.ordinal + 1}, **more})


def diagnosed(*beats: Heartbeat, limit_s: float = 5.0, **more: Any) -> Hang:
    hang = diagnose({b.rank: b for b in beats}, limit_s, **more)
    assert hang is not None
    return hang


def test_a_beat_crosses_processes_as_plain_values():
    told = beat(1, issued(16), recent=(issued(15), issued(16)))
    assert Heartbeat.from_dict(json.loads(json.dumps(told.to_dict()))) == told


def test_the_rank_that_did_not_come_is_named_with_the_collective_its_unit_and_its_stack():
    hang = diagnosed(beat(0, issued(16), 8), beat(1), beat(2, issued(16), 9), beat(3, issued(16), 2))
    assert hang.ranks == hang.absent == (1,) and hang.waiting == (0, 2, 3) and hang.waited_s == 9
    assert hang.sentence.startswith(
        "rank 1 did not join all_gather of unit h.3 (group world: ranks 0, 1, 2 and 3), for which ranks 0, 2 and 3 have "
        "waited 9.0 s: the last collective of rank 1 is an earlier all_gather of unit h.3"
    )
    assert hang.stacks == {1: "s1"} and "rank 1 is here:\ns1" in hang.text


def test_before_the_limit_nothing_is_said_and_it_is_half_of_the_timeout_unless_it_is_given():
    late = {0: beat(0, issued(16), 4.9), 1: beat(1)}
    assert diagnose(late, 5.0) is None and diagnose(late, 4.8) is not None
    assert diagnose({}, 5.0) is None and diagnose({1: beat(1)}, 5.0) is None
    assert limit(None, 60) == 30 and limit(59, 60) == 59 and limit(0.5, 60) == 0.5


def test_a_rank_never_heard_of_is_missing_of_many_a_few_are_written_out_and_a_silent_one_has_no_state():
    """It said that it came, and waits; but its process is stopped, so its last word is old."""
    hang = diagnosed(beat(0, issued(0)), beat(1, issued(0)), beat(3, issued(0)))
    assert hang.ranks == (2,) and "rank 2 has sent no heartbeat" in hang.sentence and not hang.text
    peers = tuple(range(64))
    hang = diagnosed(beat(0, issued(16), peers=peers), *(beat(r) for r in range(1, 64)))
    assert hang.ranks == peers[1:] and len(hang.stacks) == 3
    assert "ranks 1, 2, 3 and 60 more did not join" in hang.sentence
    hang = diagnosed(*[beat(r, issued(16)) for r in range(4)], silent={3: "its process is stopped"})
    assert hang.absent == (3,) and hang.waiting == (0, 1, 2) and not hang.stacks
    assert "its process is stopped, so its stack cannot be read" in hang.sentence


def test_the_root_is_found_through_other_groups():
    """Rank 3 is away. Rank 2 waits for it in their shard group, and so misses the replicas' reduce that 0 waits in."""
    shard = issued(7, "reduce_scatter", "h.1", "shard", size=2)
    replicas = issued(3, "all_reduce", "h.1", "replicas", size=2)
    hang = diagnosed(beat(0, replicas, 9, peers=(0, 2), counts={"replicas": 4}),
                     beat(2, shard, 8, peers=(2, 3), counts={"replicas": 3, "shard": 8}),
                     beat(3, counts={"replicas": 3, "shard": 7}))  # fmt: skip
    assert hang.ranks == (3,) and hang.collective == shard and hang.waiting == (2,)


def test_a_wait_that_another_rank_has_only_begun_blames_nobody_else():
    """All came to the collective that does not finish; that rank 3 computes has nothing to do with it."""
    world = [beat(r, issued(16), peers=(0, 1)) for r in (0, 1)]
    hang = diagnosed(*world, beat(2, issued(2, group="other"), 0.1, peers=(2, 3)), beat(3))
    assert hang.ranks == () and "the connection between them is stalled" in hang.sentence


def test_ranks_that_wait_for_each_other_are_told_so_and_none_is_absent():
    a, b = issued(4, group="a", size=2), issued(9, "all_reduce", "h.2", "b", size=2)
    zero = beat(0, a, 9, peers=(0, 1), counts={"a": 5, "b": 9})
    hang = diagnosed(zero, beat(1, b, 8, peers=(0, 1), counts={"a": 4, "b": 10}))
    assert hang.ranks == (1,) and hang.absent == () and hang.collective == a
    assert "the last collective of rank 1 is all_reduce of unit h.2; the ranks wait for each other" in hang.sentence


@pytest.mark.parametrize("other", [issued(15, unit="h.4"), issued(15, "all_reduce"), issued(15, payload_bytes=8)])
def test_ranks_that_issued_something_else_are_told_from_the_first_difference_on(other: Issued):
    same, now = [issued(13), issued(14)], issued(16)
    hang = diagnosed(beat(0, now, recent=(*same, issued(15), now)), beat(1, now, 8, recent=(*same, other, now)),
                     beat(2, now, 7, recent=(*same, issued(15), now)))  # fmt: skip
    assert hang.ranks == (1,) and hang.absent == () and set(hang.stacks) == {0, 1}
    assert ("disagree about a collective of group world: ranks 0 and 2 issued all_gather of unit h.3 and rank 1"
            in hang.sentence)  # fmt: skip


def test_what_is_waited_for_a_rank_at_long_work_does_not_count():
    """Nor on the way out of it: the last beat of who waits may be older than that of the rank that it waits for."""
    waits = beat(0, issued(16), 100.0)
    for since_s, found in ((0.0, False), (4.9, False), (5.1, True), (None, True)):
        worked = beat(1, work=LongWork.COMPILE.text if since_s == 0.0 else "", since_work_s=since_s)
        for other in (worked, beat(1, issued(16), 0.1, since_work_s=since_s)):
            assert (diagnose({0: waits, 1: other}, 5.0) is not None) == found
    assert diagnose({0: waits, 1: beat(1), 2: beat(2, work="compiles", since_work_s=0.0)}, 5.0) is None


def test_long_work_excuses_no_rank_of_another_group_none_that_is_stopped_and_none_that_takes_too_long():
    waits, works = beat(0, issued(16), 9.0, peers=(0, 1)), {"work": LongWork.DRAW.text, "since_work_s": 0.0}
    assert diagnose({0: waits, 1: beat(1), 2: beat(2, **works)}, 5.0) is not None
    assert diagnosed(waits, beat(1, **works), silent={1: "its process is stopped"}).absent == (1,)
    draws = beat(1, work=LongWork.DRAW.text, since_work_s=5.1)
    hang = diagnosed(beat(0, issued(16), 1000.0, peers=(0, 1)), draws, limit_s=5.0)
    assert hang.absent == (1,) and "is an earlier all_gather of unit h.3, and it draws initial values" in hang.sentence
    assert beat(1, work="compiles").silent_s > 100 * beat(1).silent_s, "native code may hold the interpreter meanwhile"


def test_payloads_and_numbers_are_compared_where_ranks_have_the_same():
    """Of an all-to-all each rank sends what it has."""
    now = issued(16)
    ranks = [beat(r, now, recent=(issued(15, "all_to_all", payload_bytes=r), now)) for r in (0, 2, 3)]
    assert diagnosed(*ranks, beat(1)).ranks == (1,)
    one, other = issued(-1, "other", ""), issued(-1, "other", "", payload_bytes=4)
    hang = diagnosed(beat(0, one, peers=(0, 1), recent=(one,)), beat(1, recent=(other,)))
    assert hang.ranks == (1,) and "did not join other (group" in hang.sentence


@pytest.mark.parametrize("hang_s", [0, -1, math.nan, math.inf, "3", True, 60, 61.5])
def test_a_limit_that_cannot_be_is_refused(hang_s: Any):
    with pytest.raises(ArgumentError, match=r"^hang_s: .*; give "):
        limit(hang_s, 60)
