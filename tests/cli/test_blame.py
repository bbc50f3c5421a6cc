"""Who is blamed for the time of steps, and how much: faults of known seconds on four ranks, one after the other, in a script
that is watched as it is; over Gloo, where no rank tells when it comes; and in simulated steps."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, median_high
from typing import Any

import pytest

from fsdp_lab.base.events import Span, Track, Traffic
from fsdp_lab.runs.blame import Blame, Part
from fsdp_lab.runs.steps import Step, assemble
from tests.cli.test_scripts import STRANGERS, stored, watched
from tests.lab.events import event

RANKS, CLEAN, ALL = 4, 20, -1
Fault = dict[str, dict[int, float]]  # what takes longer -> rank -> ms of a mean step; of "link": of a collective
GLOO: tuple[Fault, ...] = ({"compute": {1: 30}, "input": {2: 22}}, {"compute": {0: 36, 2: 18}})
FAULTS: tuple[Fault, ...] = (
    {"link": {ALL: 25}}, *GLOO, {"compute": {1: 30}}, {"compute": {3: 12}}, {"input": {0: 30}}, {"input": {ALL: 30}},
    {"checkpoint": {0: 30}}, {"checkpoint": {ALL: 30}}, {"evaluation": {2: 20}}, {"host": {2: 30}}, {"host": {ALL: 20}},
    {"compute": {0: 22}, "checkpoint": {3: 30}}, {"compute": {3: 30}, "host": {1: 22}},
    {"compute": {1: 30}, "link": {ALL: 8}}, {"input": {3: 30}, "link": {ALL: 8}},
    {"input": {ALL: 22}, "compute": {2: 30}}, {"input": {0: 36}, "host": {2: 18}},
    {"checkpoint": {0: 30}, "link": {ALL: 8}}, {"input": {1: 12}, "compute": {1: 24}},
)  # fmt: skip
Came = list[tuple[float, Any, bool]]  # of steps: seconds, what the ranks told, whether it says who is late


def truth(fault: Fault, came: Came) -> dict[int, tuple[str, list[float], list[float]]]:
    """Rank -> in what it takes longer, and bounds of the share of the time in which others wait for it, and of the gain
    without it, by when each came to the gather and the reduction. The lower bound is by what it comes later than the median
    of the others where it has its fault: after computing to the reduction, after the rest to the next gather."""
    found: dict[int, tuple[str, list[float], list[float]]] = {}
    for rank in {rank for by_rank in fault.values() for rank in by_rank} - {ALL}:
        own = {part: by_rank[rank] for part, by_rank in fault.items() if rank in by_rank}
        waits = {other: 0.0 for other in range(RANKS) if other != rank}
        for at in ([told[meeting] for told in step] for _, step, tells in came if tells for meeting in (2, 3)):
            for other in waits if at[rank] == max(at) else ():
                waits[other] += (at[rank] - at[other]) / sum(step_s for step_s, _, tells in came if tells)
        meetings = {3 if part in ("compute", "evaluation") else 2 for part in own}
        later_s = [step[rank][m] - median(step[other][m] for other in waits) for _, step, _ in came for m in meetings]
        share, gain = median_high(waits.values()), min(waits.values())
        least = min(share, sum(later_s) / sum(step_s for step_s, _, _ in came))
        found[rank] = max(own, key=lambda part: own[part]), [least, share], [max(0.0, least - share + gain), gain]
    return found


def blamed(faults: Sequence[Fault], count: int, wire: str, folder: Path) -> list[tuple[Blame, Came]]:
    """Of each fault, which has so many steps, of which the first two are left out."""
    by_rank = [{w: [ms.get(r, ms.get(ALL, 0)) / 1e3 for r in range(RANKS)] for w, ms in f.items()} for f in faults]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
    command += [str(STRANGERS), "late", str(folder / "account"), json.dumps(by_rank), str(count), wire]
    ended = watched(command, folder / "history", "--no-ledger", "--no-audit")
    assert ended.returncode == 0, ended.stderr[-3000:]
    steps = stored(folder / "history").events.steps()
    told = list(zip(*(json.loads((folder / f"account-{rank}").read_text()) for rank in range(RANKS)), strict=True))
    found = []
    for begin in range(2, count * len(faults), count):
        own = steps[begin : begin + count - 2]
        tells = (wire != "gloo" or bool(step.events[0].spans) for step in own)
        came = [(s.step_time_s, told[s.number], says) for s, says in zip(own, tells, strict=True)]
        found.append((blame := Blame.of(own), came))
        for rank, parts in blame.seconds.items():
            assert sum(parts.values()) == pytest.approx(fmean(s.events[rank].step_time_s for s in own), rel=0.01)
    return found


def check(faults: Sequence[Fault], found: Sequence[tuple[Blame, Came]], most: float) -> None:
    """most: by which shares may differ, and gains by five points more. One of twenty may be wrong: other work of the machine
    makes other ranks late, too."""
    says = []
    for fault, (blame, came) in zip(faults, found, strict=True):
        known, told = truth(fault, came), {c.rank: (c.part.value, c.share, c.gain) for c in blame.culprits}
        off = [rank not in known or one[0] != known[rank][0] for rank, one in told.items()]
        off += [max(known, key=lambda rank: known[rank][1]) not in told] if known else []
        for rank, (_, *between) in known.items():
            values = zip(between, told.get(rank, ("", 0.0, 0.0))[1:], (most, most + 0.05), strict=True)
            off += [not low - may <= value <= high + may for (low, high), value, may in values]
        for i, what in ((1, "input"), (0, "checkpoint")):
            taken = fmean(at[i + 1] - at[i] for _, step, _ in came for at in step) / fmean(one[0] for one in came)
            off.append(abs(blame.share(Part(what)) - taken) > 0.05)
        says += [f"{fault}: {known} is told as\n{blame}"] if any(off) else []
    assert len(says) <= len(faults) // 20, "\n".join(says)


@pytest.mark.slow
def test_each_fault_is_named_with_its_share_and_clean_runs_blame_nobody(tmp_path: Path) -> None:
    faults = [*FAULTS, *[{}] * CLEAN]
    found = blamed(faults, 27, "shared", tmp_path)
    check(faults, found, 0.05)
    link, *clean = (blame for blame, _ in (found[0], *found[len(FAULTS) :]))
    took_s = [fmean(parts[Part.TRANSFER] for parts in blame.seconds.values()) for blame in (link, *clean)]
    step_s = fmean(sum(parts.values()) for parts in link.seconds.values())
    assert (took_s[0] - median(took_s[1:])) / step_s == pytest.approx(2 * 0.025 / step_s, abs=0.1)
    assert "No rank makes the others wait" in link.sentence and "2 collectives a step, of 36.6 KiB" in link.sentence


@pytest.mark.slow
def test_over_gloo_traced_steps_tell_who_is_late(tmp_path: Path) -> None:
    check(GLOO, blamed(GLOO, 62, "gloo", tmp_path), 0.08)


# -- simulated steps --------------------------------------------------------------------------------------------------
Work = dict[str, tuple[float, ...]]  # of a step, by part: milliseconds of each rank


def simulated(work: Work, wire: str = "shared") -> list[Step]:
    """Steps of ranks that meet after each part, for a transfer of 1 ms. wire: "shared" memory tells who is late; over "gloo"
    every fourth step is traced, over "nccl" also, and waits are not seen; "strange clocks" were not compared."""
    events, size = [], len(next(iter(work.values())))
    for step in range(8):
        at_s, late, spans = 0.0, [dict[int, float]() for _ in range(size)], [list[Span]() for _ in range(size)]
        for ordinal, part in enumerate(work):
            came = [at_s + ms / 1e3 for ms in work[part]]
            last_s, at_s = max(came), max(came) + 0.001
            for rank, own_s in enumerate(came):
                late[rank][came.index(last_s)] = late[rank].get(came.index(last_s), 0.0) + last_s - own_s
                where: dict[str, Any] = {"unit": "", "start_s": own_s, "end_s": at_s, "size": size, "group": "all"}
                tracks = (Track.ALL_GATHER, *([Track.WAIT] if wire != "nccl" else []))
                spans[rank] += [Span(track=t, name="all_gather", ordinal=ordinal, **where) for t in tracks]
        for rank in range(size):
            part_s = {part: ms[rank] / 1e3 for part, ms in work.items()}
            exposed_s = math.nan if wire == "nccl" else at_s - sum(part_s.values())
            told: dict[str, Any] = {"clock_error_s": None if wire == "strange clocks" else 1e-5, "begin_s": 10.0 + step}
            told["late"] = tuple(late[rank].items()) if wire == "shared" else ()
            told["spans"] = spans[rank] if wire != "shared" and step % 4 == 3 else ()
            comm = {"all_gather": Traffic(calls=2, link_bytes=64, exposed_seconds=exposed_s)}
            events.append(event(rank, step, world_size=size, step_time_s=at_s, part_s=part_s, comm=comm, **told))
    return assemble(events)


# What ranks do; rank -> what it does in the part for which it is blamed, if it is as fast as the median of the others.
LATE: dict[str, tuple[Work, dict[int, tuple[str, float]]]] = {
    "one": ({"input": (2, 2, 2, 2), "forward": (40, 70, 40, 40)}, {1: ("forward", 40)}),
    "two at once": ({"input": (2, 2, 2, 2), "forward": (70, 40, 60, 40)}, {0: ("forward", 40)}),
    "in turn": ({"input": (2, 32, 2, 2), "forward": (70, 40, 40, 40)}, {0: ("forward", 40), 1: ("input", 2)}),
    "two ranks": ({"input": (20, 2), "forward": (40, 70)}, {0: ("input", 2), 1: ("forward", 40)}),
    "nobody": ({"input": (20, 20, 20), "forward": (40, 40, 40)}, {}),
}


@pytest.mark.parametrize("wire", ["shared", "gloo", "nccl"])
@pytest.mark.parametrize("name", LATE)
def test_the_gain_is_that_of_the_steps_without_it(name: str, wire: str) -> None:
    work, cured = LATE[name]
    before = Blame.of(simulated(work, wire))
    assert {c.rank for c in before.culprits} == set(cured)
    for c in before.culprits:
        part, ms = cured[c.rank]
        without = {**work, part: tuple(ms if r == c.rank else own for r, own in enumerate(work[part]))}
        step_s, after_s = (simulated(w)[0].step_time_s for w in (work, without))
        assert c.gain == pytest.approx(1 - after_s / step_s, abs=0.001) and c.part.value in (part, "compute")
    if name == "two at once":
        assert "all wait for rank 0" in (said := before.sentence) and "be 14% shorter, as rank 2 comes" in said


def test_clocks_that_were_not_compared_blame_nobody() -> None:
    blame = Blame.of(simulated(LATE["one"][0], "strange clocks"))
    assert not blame.culprits and blame.share(Part.TRANSFER) > 0.3 and blame.share(Part.LATE) == 0
