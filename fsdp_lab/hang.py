"""`Hang`: which rank the others wait for, from what all of them say of themselves (`fsdp_lab.beats`).

Floor 0: the kernel diagnoses with it, and where there is none (torchrun), a rank that has waited for too long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from fsdp_lab.beats import Beat, Issued
from fsdp_lab.spec import SpecError

_STACKS = 3  # at most so many are shown: the others' are alike
_SAME_PAYLOAD = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "control")  # on every rank of the group


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A collective that does not finish, and for whose sake.

    `sentence` says it all but the stacks.
    """

    sentence: str
    ranks: tuple[
        int, ...
    ]  # that did not come; or issued another than the others; empty where the link itself stands still
    absent: tuple[int, ...]  # those of them that wait for nobody: they are somewhere else than in a collective
    collective: Issued
    waiting: tuple[int, ...]  # ranks that wait in it
    waited_s: float  # the longest of them
    stacks: Mapping[int, str] = field(default_factory=dict)  # by rank, where they can be read

    @property
    def text(self) -> str:
        """The stacks, one after the other; "" where none can be read."""
        return "\n".join(f"rank {rank} is here:\n{stack}" for rank, stack in self.stacks.items())


def limit(hang_s: float | None, timeout_s: float) -> float:
    """Seconds that a collective may wait for a rank. None: half of `timeout_s`, by which the wire itself gives up.

    Raises SpecError.
    """
    if hang_s is None:
        return timeout_s / 2
    if isinstance(hang_s, bool) or not isinstance(hang_s, (int, float)) or not hang_s > 0:
        raise SpecError("hang_s", f"{hang_s!r} is refused", "give seconds, more than 0, or None for half of timeout_s")
    if hang_s >= timeout_s:
        raise SpecError("hang_s", f"{hang_s:g} s is no less than timeout_s ({timeout_s:g} s), when the wire itself gives up",
                        "give less, or a larger timeout_s")  # fmt: skip
    return float(hang_s)


def diagnose(beats: Mapping[int, Beat], limit_s: float, fates: Mapping[int, str] | None = None) -> Hang | None:
    """What keeps ranks waiting that have waited for longer than `limit_s`; None where none has.

    `beats` is the last of each rank. `fates` has a word on each rank that cannot speak, such as "its process is stopped":
    what it said before is not taken for its state.
    """
    fates = fates or {}
    waiting = {rank: beat for rank, beat in beats.items() if beat.pending is not None and rank not in fates}
    late = [beat for beat in waiting.values() if beat.pending_s > limit_s]
    if not late:
        return None
    first = max(late, key=lambda beat: beat.pending_s)
    return _disagreement(first, beats, waiting) or _absence(first, beats, waiting, fates)


# -- somebody is not there -------------------------------------------------------------------------------------------


def _absence(first: Beat, beats: Mapping[int, Beat], waiting: Mapping[int, Beat], fates: Mapping[int, str]) -> Hang:
    wait, absent = _missed(first, beats, waiting)
    if not absent:  # all have issued it, as far as they could say
        wait, absent = first, [rank for rank in first.peers if rank in fates]
    elsewhere = [] if absent else _missing(wait, beats)
    assert wait.pending is not None
    mates = _mates(wait.pending, waiting)
    what = f"{wait.pending.name} (group {wait.pending.group}: {_ranks(wait.peers)})"
    has = f"{_ranks(mates)} {'has' if len(mates) == 1 else 'have'} waited {wait.pending_s:.1f} s"
    if absent:
        words = "; ".join([_where(rank, beats.get(rank), fates.get(rank)) for rank in absent[:_STACKS]])
        sentence = f"{_ranks(absent)} did not come to {what}, for which {has}: {words}"
    elif elsewhere:
        words = "; ".join(f"rank {rank} waits in {_pending(waiting[rank])} itself" for rank in elsewhere[:_STACKS])
        sentence = (
            f"{_ranks(elsewhere)} did not come to {what}, for which {has}: {words}; the ranks wait for each other"
        )
    else:
        sentence = f"all ranks came to {what} and it does not finish; {has}: the connection between them stands still"
    named = absent or elsewhere
    return Hang(
        sentence=sentence,
        ranks=tuple(named),
        absent=tuple(absent),
        collective=wait.pending,
        waiting=mates,
        waited_s=wait.pending_s,
        stacks=_stacks(named, beats, fates),
    )


def _missed(first: Beat, beats: Mapping[int, Beat], waiting: Mapping[int, Beat]) -> tuple[Beat, list[int]]:
    """Who is missing and waits for nobody, and the wait in which it is missed.

    With several groups a rank that is missing may itself wait in another one, and so on.
    """
    queue, seen = [first], {first.rank}
    for wait in queue:
        missing = _missing(wait, beats)
        if absent := [rank for rank in missing if rank not in waiting]:
            return wait, absent
        queue += [waiting[rank] for rank in missing if rank not in seen]
        seen.update(missing)
    return first, []


def _missing(wait: Beat, beats: Mapping[int, Beat]) -> list[int]:
    """Ranks that have not issued what this one waits for."""
    assert wait.pending is not None
    group, ordinal = wait.pending.group, wait.pending.ordinal
    if ordinal < 0:  # between two ranks: nobody counts these
        return [rank for rank in wait.peers if rank != wait.rank]
    return [rank for rank in wait.peers if rank not in beats or beats[rank].counts.get(group, 0) <= ordinal]


def _mates(collective: Issued, waiting: Mapping[int, Beat]) -> tuple[int, ...]:
    """Ranks that wait in the same collective."""
    key = (collective.group, collective.ordinal)
    return tuple(sorted(r for r, b in waiting.items() if b.pending and (b.pending.group, b.pending.ordinal) == key))


def _where(rank: int, beat: Beat | None, fate: str | None) -> str:
    """What is known of a rank that did not come."""
    if beat is None:
        return f"nothing was heard of rank {rank}"
    name = beat.last.name if beat.last else "no collective yet"
    if fate:
        return f"rank {rank} was last heard of after {name}; {fate}, so its stack cannot be read"
    came = f"the last that rank {rank} came to is {name}"
    return came if beat.working else f"{came}, and it is not in the step: it has not begun, or is busy with a cell"


def _pending(beat: Beat) -> str:
    return beat.pending.name if beat.pending else "nothing"


# -- somebody does something else ------------------------------------------------------------------------------------


def _disagreement(first: Beat, beats: Mapping[int, Beat], waiting: Mapping[int, Beat]) -> Hang | None:
    """Under one number, ranks of a group have issued collectives that differ: one was left out, or the order changed."""
    assert first.pending is not None
    group, peers = first.pending.group, [beats[rank] for rank in first.peers if rank in beats]
    by_ordinal: dict[int, dict[int, Issued]] = {}
    for beat in peers:
        for one in beat.recent:
            if one.group == group and one.ordinal >= 0:
                by_ordinal.setdefault(one.ordinal, {})[beat.rank] = one
    for ordinal, issued in sorted(by_ordinal.items()):
        parties = _parties(issued)
        if len(parties) > 1:
            return _dispute(first, ordinal, issued, parties, beats, waiting)
    return None


def _parties(issued: Mapping[int, Issued]) -> list[list[int]]:
    """Ranks that have issued the same; the most first, and among equals that of the lowest rank."""
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, one in sorted(issued.items()):
        payload = one.payload_bytes if one.kind in _SAME_PAYLOAD else 0
        found.setdefault((one.kind, one.unit, payload), []).append(rank)
    return sorted(found.values(), key=lambda ranks: (-len(ranks), ranks[0]))


def _dispute(
    first: Beat,
    ordinal: int,
    issued: Mapping[int, Issued],
    parties: list[list[int]],
    beats: Mapping[int, Beat],
    waiting: Mapping[int, Beat],
) -> Hang:
    assert first.pending is not None
    said = " and ".join([f"{_ranks(ranks)} issued {_of_bytes(issued[ranks[0]])}" for ranks in parties[:_STACKS]])
    named = [rank for ranks in parties[1:] for rank in ranks]
    return Hang(
        sentence=f"the ranks disagree about collective {ordinal} of group {first.pending.group}: {said}; one was left out, "
        f"or their order differs. Rank {first.rank} has waited {first.pending_s:.1f} s in {first.pending.name}",
        ranks=tuple(named),
        absent=tuple(rank for rank in named if rank not in waiting),
        collective=issued[parties[0][0]],
        waiting=_mates(first.pending, waiting),
        waited_s=first.pending_s,
        stacks=_stacks([named[0], parties[0][0]], beats, {}),
    )


def _of_bytes(one: Issued) -> str:
    return f"{one.whose}, {one.payload_bytes:,} bytes" if one.payload_bytes else one.whose


# -- words -----------------------------------------------------------------------------------------------------------


def _ranks(ranks: Collection[int]) -> str:
    """ "rank 1", "ranks 1 and 3", "ranks 1, 2, 3 and 60 more"."""
    names = [str(rank) for rank in ranks]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _stacks(ranks: Iterable[int], beats: Mapping[int, Beat], fates: Mapping[int, str]) -> dict[int, str]:
    can = [rank for rank in ranks if rank in beats and rank not in fates and beats[rank].stack]
    return {rank: beats[rank].stack for rank in can[:_STACKS]}
