"""Runs that are over, made of events: what a comparison reads, without ranks."""

import random
from typing import Any

from fsdp_lab.base.events import Memory, RoleBytes, StepEvent, Traffic
from fsdp_lab.spec.spec import Spec
from tests.lab.events import SPEC, event
from tests.lab.kept import RecordedRun, told

MIB = 1 << 20
ENVIRONMENT = {"torch": "2.13.0", "machine": {"cpus": 2}, "gpus": []}


def past(run: str = "r", spec: Spec = SPEC, *, steps: int = 30, step_s: float = 0.1, noise: float = 0.04,
         peak_mib: int = 100, begin_unix_s: float = 1e9, rounds: int = 1, every_s: float = 100.0, loss_off: float = 0.0,
         seed: int = 0, drift: float = 0.0, **more: Any) -> RecordedRun:  # fmt: skip
    """A run of `steps` steps of about `step_s`, in `rounds` turns that begin `every_s` apart, each `drift` slower than the
    one before. The first step of a turn is six times as long. `more` are fields of `RecordedRun`."""
    chance = random.Random(f"{run} {seed}")
    events, peak = list[StepEvent](), peak_mib * MIB
    each = -(-steps // rounds)
    for step in range(steps):
        turn, place = divmod(step, each)
        took = step_s * (1 + noise * chance.uniform(-1, 1)) * (1 + drift * turn) * (6 if not place else 1)
        at = begin_unix_s + turn * every_s + (place + 1) * step_s
        loss = dict.fromkeys(("loss", "mean_loss"), 5.0 - 0.05 * step + loss_off)
        gathers = Traffic(calls=4, link_bytes=1000, seconds=0.2 * took, exposed_seconds=0.05 * took)
        for rank in range(spec.world_size):
            held = peak + rank * MIB
            at_peak = RoleBytes(parameters_bytes=peak // 2, activations_bytes=held - peak // 2)
            memory = Memory(peak_bytes=held, outside_bytes=7 * MIB, limit_bytes=1000 * MIB, at_peak=at_peak)
            events.append(event(
                rank, step, spec, run=run, end_unix_s=at, step_time_s=took * (1 - 0.1 * rank), peak_flops_per_s=1e11,
                peak_source="measured", notes=("CPU and Gloo: not a GPU's.",), first_after_switch=not place,
                comm={"all_gather": gathers}, memory=memory, **loss,
            ))  # fmt: skip
    return told(spec, events, **{"id": run, "environment": ENVIRONMENT, **more})
