"""`fsdp-lab bench live`: how long a user waits: for the first step, for a switch, for a stop."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fsdp_lab.cli.bench.environment import environment
from fsdp_lab.cli.console import Failed
from fsdp_lab.cli.results import check_file, write_file
from fsdp_lab.spec import Spec

if TYPE_CHECKING:
    from fsdp_lab.lab import Lab
    from fsdp_lab.runs import Run

LONGEST_S = 120.0

# A way through the backends and the knobs on which every neighbour differs; the last differs from the first, too.
WAY: Sequence[dict[str, Any]] = (
    {"sharding": "shard_grad_op"},
    {"precision": "bf16"},
    {"offload": "all"},
    {"backend": "ddp", "sharding": "no_shard"},
    {"backend": "fsdp1"},
    {"wrap": "whole"},
    {},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="gpt2-10m", help="a preset (default: gpt2-10m)")
    parser.add_argument("--rounds", type=int, default=2, help="how often the switches are gone through (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    spec = Spec(world_size=args.ranks).replace(model=args.model, micro_batch=1, seq_len=64)

    from fsdp_lab.cli import session

    console = session.console()
    begun_s = time.perf_counter()
    with session.lab(console, args.ranks, None, history=False) as lab:
        ready_s = time.perf_counter() - begun_s
        started = lab.run(spec)
        await_step(started, spec.id)
        waits: dict[str, list[float]] = {"start to ranks ready": [ready_s]}
        waits["start to first step"] = [time.perf_counter() - begun_s]
        waits["switch to first step"] = list(_switches(started, spec, args.rounds))
        waits["stop"] = list(_stops(lab, started, spec))
    for what, seconds in waits.items():
        console.print(f"{what}: {_words(seconds)}", markup=False, highlight=False)
    if args.json is not None:
        what_for = {"model": args.model, "ranks": args.ranks}
        write_file(args.json, {"seconds": waits, "environment": {**what_for, **environment()}})
    return 0


def _switches(run: Run, spec: Spec, rounds: int) -> Iterator[float]:
    """Seconds from each `apply` to the first step that every rank has done with it."""
    for _ in range(rounds):
        for changes in WAY:
            wanted = spec.replace(**changes)
            begun_s = time.perf_counter()
            run.apply(wanted)
            await_step(run, wanted.id)
            yield time.perf_counter() - begun_s


def _stops(lab: Lab, run: Run, spec: Spec) -> Iterator[float]:
    """Seconds from `stop` until the ranks are free, for each backend, in the middle of a step."""
    for changes in ({}, {"backend": "ddp", "sharding": "no_shard"}, {"backend": "fsdp1"}):
        wanted = spec.replace(**changes)
        run = lab.run(wanted)
        await_step(run, wanted.id)
        begun_s = time.perf_counter()
        run.stop()
        run.wait(LONGEST_S)
        yield time.perf_counter() - begun_s


def await_step(run: Run, spec_id: str) -> None:
    """Until every rank has said a step under the Spec. Raises Failed where the run ends or does not come to it."""

    def told() -> bool:
        latest = run.events.latest().values()
        return len(latest) == run.spec.world_size and all(e.spec_id == spec_id for e in latest)

    _await(run, "step", told)


def await_ledger(run: Run, spec_id: str) -> None:
    """The same of a ledger step."""
    _await(run, "ledger step", lambda: any(e.ledger and e.spec_id == spec_id for e in run.events.since()[0]))


def _await(run: Run, what: str, there: Callable[[], bool]) -> None:
    limit_s = time.perf_counter() + LONGEST_S
    while time.perf_counter() < limit_s and not run.done:
        if there():
            return
        time.sleep(0.005)
    raise Failed(f"no {what} came within {LONGEST_S:.0f} s: {run.reason or run.state.value}")


def _words(seconds: Sequence[float]) -> str:
    if len(seconds) == 1:
        return f"{seconds[0]:.2f} s"
    return f"median {median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s, {len(seconds)} times"
