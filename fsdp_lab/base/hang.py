"""`Heartbeat`: the state of a rank, sent by a thread of its own. `Hang`: the ranks that a collective waits for.

A heartbeat crosses processes as a dict of plain values. Heartbeats serve only status and hang detection; plots and history
come from step events. `diagnose` runs in the kernel or, without one (torchrun), on a rank that has waited for too long.

Note: long work. Ranks wait for one that compiles or draws initial values, and it is not hung. Such work is named in its
heartbeats (`LongWork`), and what others wait for it meanwhile does not count: a wait is measured from the last moment at
which a rank of the group was at long work. Each kind has its own limit, after which it counts like any other time."""

import dataclasses
import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from fsdp_lab.base.errors import ArgumentError, Cause, is_number

OWN_ENGINE_S = 3.0  # how long a collective may wait for a rank while an engine of the user's trains
WORKING_S, IDLE_S = 1.0, 2.0  # the longest interval between two heartbeats
_GRACE_S = 1.5  # on a busy machine


class LongWork(enum.Enum):
    """What a rank does by itself and what may take longer than others wait for it: a sentence about the rank, and the
    seconds after which it counts as a hang."""

    READ = "reads its data", 900.0
    TOKENISE = "makes its data into tokens", 900.0  # without progress: see `LongWorkLog.renew`
    AWAIT_TOKENS = "waits for another rank to make their data into tokens", 900.0
    BUILD = "builds the model", 900.0
    DRAW = "draws initial values", 900.0
    LOAD = "loads values", 900.0
    COMPILE = "compiles", 900.0
    FIRST_STEP = "makes its first step, in which libraries load and memory is first used", 60.0
    EARLIER_CHECKPOINT = "waits for an earlier checkpoint to be written", 600.0

    @property
    def text(self) -> str:
        return self.value[0]

    @property
    def limit_s(self) -> float:
        return self.value[1]


LONGEST_WORK_S = max(work.limit_s for work in LongWork)


class LoopPlace(enum.StrEnum):
    """The place of a rank in a loop of the user's that is watched."""

    NONE = ""
    STEP = "in a step"
    BETWEEN = "between two steps"
    FORWARD = "in the model's forward, between two steps"  # and alone, if other ranks are elsewhere
    OVER = "left"

    @property
    def inside(self) -> bool:
        """Whether it is in the loop."""
        return self not in (LoopPlace.NONE, LoopPlace.OVER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Issued:
    """A collective that a rank has issued."""

    sequence: int  # the rank's own count
    kind: str
    group: str
    size: int  # ranks in the group
    ordinal: int  # the group's count: the same number is the same collective on all its ranks; -1 between two ranks
    unit: str = ""
    payload_bytes: int = 0

    @property
    def label(self) -> str:
        """Its kind and its unit, as in "all_gather of unit transformer.h.3"."""
        return f"{self.kind} of unit {self.unit}" if self.unit else self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """One heartbeat of one rank. `recent` and `stack` are set only if it has issued no collective for a while."""

    rank: int
    number: int  # 0, 1, 2, ...
    working: bool  # in a call that all ranks make
    step: int | None = None  # in progress; None if it holds no model
    last: Issued | None = None
    pending: Issued | None = None  # the oldest that has not finished
    pending_s: float = 0.0  # since it was issued
    peers: tuple[int, ...] = ()  # the ranks of its group
    counts: Mapping[str, int] = field(default_factory=dict)  # issued so far, by group
    recent: tuple[Issued, ...] = ()  # the last ones, oldest first
    stack: str = ""  # of the rank's main thread, newest call last
    work: str = ""  # the text of the `LongWork` that it does
    since_work_s: float | None = None  # since it last did long work within its limit; None: never
    hang_s: float | None = None  # how long its training lets a collective wait; None: as long as any other
    user_call: str = ""  # the user's code that it is in, such as "Mine.gather(root) in the forward of step 0"
    user_call_s: float = 0.0  # for so long
    loop: str = LoopPlace.NONE  # a `LoopPlace`
    loop_steps: int = 0  # that it has begun in its newest watched loop

    @property
    def loops(self) -> bool:
        """Whether it is in a watched loop."""
        return LoopPlace(self.loop).inside

    @property
    def next_s(self) -> float:
        """Seconds until the next one is due, at most."""
        return WORKING_S if self.working else IDLE_S

    @property
    def silent_s(self) -> float:
        """Seconds without another one after which its rank is silent: stopped, or native code long holds the GIL."""
        return LONGEST_WORK_S if self.work else self.next_s + _GRACE_S

    def to_dict(self) -> dict[str, Any]:
        d = dataclasses.asdict(self)
        return {**d, "recent": list(d["recent"]), "peers": list(d["peers"]), "counts": dict(d["counts"])}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        fields = dict(d)
        for name in ("last", "pending"):
            fields[name] = None if fields[name] is None else Issued(**fields[name])
        fields["recent"] = tuple(Issued(**one) for one in fields["recent"])
        fields["peers"] = tuple(fields["peers"])
        return cls(**fields)


_NONE_ISSUED = Issued(sequence=-1, kind="no collective", group="", size=0, ordinal=-1)
_MAX_STACKS = 3  # the stacks of further ranks are alike
_SAME_PAYLOAD = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "control")  # on every rank of the group

Heartbeats = Mapping[int, Heartbeat]  # the last one of each rank


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A collective that does not finish, and the ranks that cause it. `sentence` says everything except the stacks."""

    sentence: str
    ranks: tuple[int, ...]  # that did not join, or issued a different collective; empty if the link itself is stalled
    absent: tuple[int, ...]  # those of them that wait for no collective
    collective: Issued
    waiting: tuple[int, ...]  # ranks that wait in it
    waited_s: float  # the longest of them
    stacks: Mapping[int, str] = field(default_factory=dict)  # by rank, if they can be read
    cause: Cause | None = None  # where it is a known one

    @property
    def text(self) -> str:
        """The stacks, one after the other; "" if none can be read."""
        return "\n".join(f"rank {rank} is here:\n{stack}" for rank, stack in self.stacks.items())


def limit(hang_s: float | None, timeout_s: float) -> float:
    """Seconds that a collective may wait for a rank. None: half of `timeout_s`, the wire's own. Raises ArgumentError."""
    if hang_s is None:
        return timeout_s / 2
    if not is_number(hang_s) or not hang_s > 0:
        hint = "give seconds, more than 0, or None for half of timeout_s"
        raise ArgumentError("hang_s", f"{hang_s!r} is refused", hint)
    if hang_s >= timeout_s:
        reason = f"{hang_s:g} s is not less than timeout_s ({timeout_s:g} s), the wire's own timeout"
        raise ArgumentError("hang_s", reason, "give less, or a larger timeout_s")
    return float(hang_s)


def shortest_limit(limit_s: float, heartbeats: Iterable[Heartbeat]) -> float:
    """The least of it and what the trainings of these ranks ask for."""
    return min([limit_s, *(h.hang_s for h in heartbeats if h.hang_s is not None)])


def diagnose(heartbeats: Heartbeats, limit_s: float, silent: Mapping[int, str] | None = None) -> Hang | None:
    """The hang of ranks that have waited for longer than `limit_s`; None if there are none. `silent`: why a rank sends
    no heartbeats, such as "its process is stopped"; its last one does not count as its state."""
    mute = silent or {}
    waiting = {rank: h for rank, h in heartbeats.items() if h.pending is not None and rank not in mute}

    def counted_s(wait: Heartbeat) -> float:
        """Seconds for which it has waited while no rank of the group was at long work."""
        peers = (heartbeats[rank] for rank in wait.peers if rank in heartbeats and rank not in mute)
        return min([wait.pending_s, *(peer.since_work_s for peer in peers if peer.since_work_s is not None)])

    late = [h for h in waiting.values() if counted_s(h) > limit_s]
    if not late:
        return _endless(heartbeats, waiting, limit_s)
    longest = max(late, key=lambda h: h.pending_s)
    hang = _mismatch(longest, heartbeats, waiting) or _absence(longest, heartbeats, waiting, mute)
    cause, why = cause_in_loop({rank: LoopRank.of(h) for rank, h in heartbeats.items() if h.loop})
    return dataclasses.replace(hang, cause=cause, sentence=f"{why}; {hang.sentence}") if cause else hang


def _endless(heartbeats: Heartbeats, waiting: Heartbeats, limit_s: float) -> Hang | None:
    """Ranks in the user's own code that wait for no collective, and for which none waits."""
    late = [h for r, h in heartbeats.items() if r not in waiting and h.user_call and h.user_call_s > limit_s]
    if not late:
        return None
    ranks, longest = [h.rank for h in late], max(late, key=lambda h: h.user_call_s)
    has = "has" if len(ranks) == 1 else "have"
    return Hang(
        sentence=f"{_ranks(ranks)} {has} been in {longest.user_call} for {longest.user_call_s:.1f} s, without a collective",
        ranks=tuple(ranks),
        absent=tuple(ranks),
        collective=longest.last or _NONE_ISSUED,
        waiting=(),
        waited_s=longest.user_call_s,
        stacks=_stacks(ranks, heartbeats, {}),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopRank:
    """A rank of a watched loop whose ranks do not meet."""

    place: LoopPlace
    steps: int  # begun
    generates: bool = False  # a function of that name calls the model

    @classmethod
    def of(cls, h: Heartbeat) -> Self:
        return cls(place=LoopPlace(h.loop), steps=h.loop_steps, generates="in generate\n" in f"{h.stack}\n")


def cause_in_loop(ranks: Mapping[int, LoopRank]) -> tuple[Cause | None, str]:
    """Why the ranks of a loop do not meet, from where each is, and as text; (None, "") if it is no known cause."""
    alone = [rank for rank, r in ranks.items() if r.place is LoopPlace.FORWARD]
    if alone and len(alone) < len(ranks):
        generates = " in generate" if any(ranks[rank].generates for rank in alone) else ""
        said = "ran the model outside of the loop's steps, and not all ranks did"
        return Cause.GENERATION, f"{_ranks(alone)} {said}{generates}"
    inside = [rank for rank, r in ranks.items() if r.place is LoopPlace.STEP]
    left = [rank for rank, r in ranks.items() if r.place is LoopPlace.OVER]
    if not inside or not left or ranks[left[0]].steps >= ranks[inside[0]].steps:
        return None, ""
    made, begun = ranks[left[0]].steps, ranks[inside[0]].steps
    after = f"{made} step{'s' * (made != 1)}"
    who = f"{_ranks(left)} left the loop after {after}, {_ranks(inside)} began step {begun}"
    return Cause.BATCHES, f"the ranks have unequal numbers of batches: {who}"


# -- a rank is missing -----------------------------------------------------------------------------------------------


def _absence(longest: Heartbeat, heartbeats: Heartbeats, waiting: Heartbeats, silent: Mapping[int, str]) -> Hang:
    wait, absent = _find_absent(longest, heartbeats, waiting)
    if not absent:  # all have issued it, according to their last heartbeats
        wait, absent = longest, [rank for rank in longest.peers if rank in silent]
    blocked = [] if absent else _missing(wait, heartbeats)
    assert wait.pending is not None
    waiters = _waiting_in(wait.pending, waiting)
    what = f"{wait.pending.label} (group {wait.pending.group}: {_ranks(wait.peers)})"
    waited = f"{_ranks(waiters)} {'has' if len(waiters) == 1 else 'have'} waited {wait.pending_s:.1f} s"
    named, awaited = absent or blocked, wait.pending.label
    details = [_last_seen(r, heartbeats.get(r), silent.get(r), awaited) for r in named[:_MAX_STACKS]]
    if blocked:
        details.append("the ranks wait for each other")
    if named:
        sentence = f"{_ranks(named)} did not join {what}, for which {waited}: {'; '.join(details)}"
    else:
        sentence = f"all ranks joined {what} and it does not finish; {waited}: the connection between them is stalled"
    return Hang(
        sentence=sentence,
        ranks=tuple(named),
        absent=tuple(absent),
        collective=wait.pending,
        waiting=waiters,
        waited_s=wait.pending_s,
        stacks=_stacks(named, heartbeats, silent),
    )


def _find_absent(longest: Heartbeat, heartbeats: Heartbeats, waiting: Heartbeats) -> tuple[Heartbeat, list[int]]:
    """The ranks that are missing and wait for nothing, and the wait in which they are missing. With several groups, a
    missing rank may itself wait in another group, and so on."""
    queue, seen = [longest], {longest.rank}
    for wait in queue:
        missing = _missing(wait, heartbeats)
        if absent := [rank for rank in missing if rank not in waiting]:
            return wait, absent
        queue += [waiting[rank] for rank in missing if rank not in seen]
        seen.update(missing)
    return longest, []


def _missing(wait: Heartbeat, heartbeats: Heartbeats) -> list[int]:
    """Ranks that have not issued the collective that this one waits for."""
    assert wait.pending is not None
    group, ordinal = wait.pending.group, wait.pending.ordinal
    if ordinal < 0:  # between two ranks: not counted
        return [rank for rank in wait.peers if rank != wait.rank]
    return [rank for rank in wait.peers if rank not in heartbeats or heartbeats[rank].counts.get(group, 0) <= ordinal]


def _waiting_in(collective: Issued, waiting: Heartbeats) -> tuple[int, ...]:
    """Ranks that wait in the same collective."""
    key = (collective.group, collective.ordinal)
    return tuple(sorted(r for r, h in waiting.items() if h.pending and (h.pending.group, h.pending.ordinal) == key))


def _last_seen(rank: int, heartbeat: Heartbeat | None, silence: str | None, awaited: str) -> str:
    """Says what is known about a rank that did not join what is awaited."""
    if heartbeat is None:
        return f"rank {rank} has sent no heartbeat"
    name = heartbeat.last.label if heartbeat.last else "no collective"
    name = f"an earlier {name}" if name == awaited else name
    if silence:
        return f"the last heartbeat of rank {rank} was after {name}; {silence}, so its stack cannot be read"
    doing = heartbeat.work or (f"is in {heartbeat.user_call}" if heartbeat.user_call else "")
    last = f"the last collective of rank {rank} is {name}" + (f", and it {doing}" if doing else "")
    return last if heartbeat.working else f"{last}, and it is not in the step: it has not begun, or is busy with a cell"


# -- ranks issue different collectives -------------------------------------------------------------------------------


def _mismatch(longest: Heartbeat, heartbeats: Heartbeats, waiting: Heartbeats) -> Hang | None:
    """Ranks of a group have issued different collectives under the same number: one was skipped, or the order differs."""
    assert longest.pending is not None
    group = longest.pending.group
    by_ordinal: dict[int, dict[int, Issued]] = {}
    for heartbeat in (heartbeats[rank] for rank in longest.peers if rank in heartbeats):
        for one in heartbeat.recent:
            if one.group == group and one.ordinal >= 0:
                by_ordinal.setdefault(one.ordinal, {})[heartbeat.rank] = one
    issued = next((by_rank for _, by_rank in sorted(by_ordinal.items()) if len(_parties(by_rank)) > 1), None)
    if issued is None:
        return None
    parties, issues = _parties(issued), []
    for ranks in parties[:_MAX_STACKS]:
        one = issued[ranks[0]]
        nbytes = f", {one.payload_bytes:,} bytes" if one.payload_bytes else ""
        issues.append(f"{_ranks(ranks)} issued {one.label}{nbytes}")
    named = [rank for ranks in parties[1:] for rank in ranks]
    differs = f"{' and '.join(issues)}; one was skipped, or their order differs"
    waits = f"Rank {longest.rank} has waited {longest.pending_s:.1f} s in {longest.pending.label}"
    return Hang(
        sentence=f"the ranks disagree about a collective of group {group}: {differs}. {waits}",
        ranks=tuple(named),
        absent=tuple(rank for rank in named if rank not in waiting),
        collective=issued[parties[0][0]],
        waiting=_waiting_in(longest.pending, waiting),
        waited_s=longest.pending_s,
        stacks=_stacks([named[0], parties[0][0]], heartbeats, {}),
    )


def _parties(issued: Mapping[int, Issued]) -> list[list[int]]:
    """Returns the ranks that have issued the same collective, the largest party first."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, one in sorted(issued.items()):
        payload = one.payload_bytes if one.kind in _SAME_PAYLOAD else 0
        alike.setdefault((one.kind, one.unit, payload), []).append(rank)
    return sorted(alike.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _ranks(ranks: Collection[int]) -> str:
    """ "rank 1", "ranks 1 and 3", "ranks 1, 2, 3 and 60 more"."""
    names = [str(rank) for rank in ranks]
    names = [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _stacks(ranks: Iterable[int], heartbeats: Heartbeats, silent: Mapping[int, str]) -> dict[int, str]:
    readable = [rank for rank in ranks if rank in heartbeats and rank not in silent and heartbeats[rank].stack]
    return {rank: heartbeats[rank].stack for rank in readable[:_MAX_STACKS]}
