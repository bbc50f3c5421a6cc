"""A comparison to write reports of: plausible steps with spans, a switch, a fault, an offload, and a refusal."""

import dataclasses

from fsdp_lab.base.events import StepEvent
from fsdp_lab.runs import Refusal, Switch
from fsdp_lab.spec.spec import Spec
from tests.dashboard.fake_lab import event
from tests.lab.kept import RecordedRun, told

BASE = Spec().replace(model="gpt2-10m", sharding="no_shard")
FULL = BASE.replace(sharding="full_shard")
CPU = "CPU and Gloo: the shapes are right, the times are not a GPU's."
HOSTILE = "</script><img src=x onerror='window.hacked = 1'><b>bold</b>"
FAULT = 17  # the step from which the third run computes something else


def run_of(place: int, spec: Spec, *, rounds: int = 3, each: int = 12, fault: float = 0, **more: object) -> RecordedRun:
    """The `place`-th of a sweep, in turns of `each` steps."""
    name = f"{place:08x}"
    events: list[StepEvent] = []
    for step in range(rounds * each):
        turn, at = divmod(step, each)
        when = 1.7e9 + 100 * turn + 10 * place + 0.1 * at
        for rank in range(spec.world_size):
            e = event(spec, name, rank, step, first=not at)
            loss = e.mean_loss + (fault if step >= FAULT else 0.0)
            events.append(dataclasses.replace(e, end_unix_s=when, mean_loss=loss))
    environment = {"machine": "Linux, 2 cores", "torch": "2.13.0+cpu", "devices": ["cpu", "cpu"]}
    return told(spec, events, **{"id": name, "notes": (CPU,), "environment": environment, **more})


def sweep() -> list[RecordedRun | Refusal]:
    switched = run_of(3, FULL.replace(offload="optimizer"))
    switched.switches.append(Switch(step=24, before=FULL, after=switched.spec, seconds=0.31, carried=True))
    return [
        run_of(0, BASE), run_of(1, FULL), run_of(2, FULL.replace(backend="fsdp2"), fault=0.5), switched,
        Refusal({"strategy": {"backend": "fsdp2", "sharding": "zero1"}}, "FSDP2 always shards the gradients"),
    ]  # fmt: skip
