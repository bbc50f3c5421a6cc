"""`fsdp-lab drill`: injects faults at random moments into small runs, and checks that each run recovers completely: it does
all its steps with the losses of an undisturbed run, bit for bit, and no additional process is left."""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_lab.base.errors import FieldError
from fsdp_lab.cli.console import Failed, at_least
from fsdp_lab.spec.faults import DRILLS, check_kind
from fsdp_lab.spec.spec import Spec

if TYPE_CHECKING:
    from fsdp_lab.lab import Lab
    from fsdp_lab.runs import Run

COUNT, STEPS, EVERY = 20, 24, 5
HANG_S = 3.0
LIMIT_S = 180.0  # for a run with a fault in it
MODEL = "gpt2-1m"
FORMS: tuple[Mapping[str, str], ...] = (  # backends whose losses are equal bit for bit
    {"backend": "lab"},
    {"backend": "fsdp2"},
    {"backend": "ddp", "sharding": "no_shard"},
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=COUNT, help="number of drills (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--model", default=MODEL, help="a preset (default: %(default)s)")
    parser.add_argument("--kinds", metavar="KIND,KIND", help=f"only these of {', '.join(DRILLS)}")


def run(args: argparse.Namespace) -> int:
    at_least(args, "count", 1)
    at_least(args, "ranks", 2)
    kinds = [k.strip() for k in args.kinds.split(",")] if args.kinds else list(DRILLS)
    for kind in kinds:
        check_kind(kind)
    work = Spec(world_size=args.ranks).replace(model=args.model, micro_batch=2, seq_len=64)

    from fsdp_lab.lab import Lab
    from fsdp_lab.models.check import check

    check(work.workload)

    survived = impossible = 0
    with Lab(args.ranks, reduction="rank_ordered", hang_s=HANG_S, history=False, progress=False) as lab:
        bench = DrillBench(lab, work)
        for number, plan in enumerate(plans(args.seed, args.count, args.ranks, kinds), 1):
            begun_s = time.monotonic()
            try:
                problems = bench.drill(plan)
            except FieldError as e:
                impossible += 1
                result = f"not possible on these ranks: {e}"
            else:
                survived += not problems
                result = "survived" if not problems else f"NOT survived: {'; '.join(problems)}"
            print(f"{number}: {plan}: {result}, {time.monotonic() - begun_s:.1f} s", flush=True)
    for kind, seconds in sorted(bench.seconds.items()):
        middle, most = statistics.median(seconds), max(seconds)
        print(f"{kind}: to the next step {middle:.1f} s in the median of {len(seconds)}, {most:.1f} s at most")
    count = args.count - impossible
    print(f"{survived} of {count} survived (seed {args.seed}, {args.ranks} ranks)")
    if survived < count:
        raise Failed(f"{count - survived} of {count} drills were not survived")
    return 0


@dataclass(frozen=True, kw_only=True)
class DrillPlan:
    """One fault: which, where and when."""

    kind: str
    rank: int
    step: int  # it is injected some time after this step
    delay_s: float
    form: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} after step {self.step} of {self.form['backend']}"


def plans(seed: int, count: int, ranks: int, kinds: list[str]) -> Iterator[DrillPlan]:
    """Random drills, the same for the same seed."""
    chance = random.Random(seed)
    for _ in range(count):
        kind, rank, step = chance.choice(kinds), chance.randrange(ranks), chance.randrange(1, STEPS - 6)
        delay_s, form = chance.uniform(0, 0.05), chance.choice(FORMS)
        yield DrillPlan(kind=kind, rank=rank, step=step, delay_s=delay_s, form=form)


class DrillBench:
    """Runs drills on a lab, and compares each run with an undisturbed one."""

    def __init__(self, lab: "Lab", work: Spec) -> None:
        self._lab, self._work = lab, work
        self.seconds: dict[str, list[float]] = {}  # by kind: from the fault to the next step
        self._losses = losses(lab.run(work, steps=STEPS).wait(LIMIT_S))
        self._processes = len(lab.cluster.processes)

    def drill(self, plan: DrillPlan) -> list[str]:
        """Runs one drill. Returns a sentence for each check that failed. Raises FieldError if the ranks refuse the fault."""
        from fsdp_lab.runs import CheckpointConfig

        with tempfile.TemporaryDirectory(prefix="fsdp_lab-drill-") as folder:
            saving = CheckpointConfig(folder=Path(folder), every=EVERY)
            work = self._work.replace(**plan.form)
            run = self._lab.run(work, steps=STEPS, save=saving, recover=True)
            try:
                deadline_s = time.monotonic() + LIMIT_S
                while run.step < plan.step and not run.done and time.monotonic() < deadline_s:
                    time.sleep(0.002)
                time.sleep(plan.delay_s)
                drill = None if run.done else self._lab.drill(plan.kind, rank=plan.rank)
                run.wait(LIMIT_S)
                for incident in run.incidents:
                    if (seconds := incident.seconds) is not None:
                        self.seconds.setdefault(plan.kind, []).append(seconds)
            except Exception as e:
                run.stop(20)
                return [f"{type(e).__name__}: {e}".partition("\n")[0]]
        if drill is not None and drill.refused is not None:
            raise drill.refused
        return list(self._problems(run, plan))

    def _problems(self, run: "Run", plan: DrillPlan) -> Iterator[str]:
        ours, theirs = losses(run), self._losses
        if differing := [step for step in {*ours, *theirs} if ours.get(step) != theirs.get(step)]:
            yield f"the losses differ from step {min(differing)} on"
        if (count := len(self._lab.cluster.processes)) != self._processes:
            yield f"there are {count} processes instead of {self._processes}"
        if plan.kind != "slow" and not run.incidents and run.step < STEPS:
            yield "no incident was recorded"


def losses(run: "Run") -> dict[int, Any]:
    """Step -> mean loss over ranks, as any of them reports it: one may die before it does."""
    return {step.number: step.mean_loss for step in run.events.steps()}
