"""Step events to feed to stores and summaries."""

from typing import Any

from fsdp_lab.base.events import Memory, StepEvent, Traffic
from fsdp_lab.spec.describe import WatchedLoop
from fsdp_lab.spec.spec import Spec

SPEC = Spec()
LOOP = WatchedLoop(model="Net", backend="fsdp2", sharding="full_shard", shard_size=2, parameters=1000, units=3,
                   optimizer="AdamW", precision="fp32", offload="none", world_size=2, device="cpu")  # fmt: skip


def event(rank: int, step: int, spec: Spec = SPEC, **more: Any) -> StepEvent:
    fields: dict[str, Any] = {
        "run": "r", "spec_id": spec.id, "rank": rank, "world_size": spec.world_size, "step": step, "samples": 8 * step + 8,
        "end_unix_s": 1e9 + step, "step_time_s": 0.1, "tokens": 100, "loss": 5.0, "mean_loss": 5.0 - step, "grad_norm": 1.0,
        "flops": 10**9, "memory": Memory(peak_bytes=1000 + rank, rss_bytes=5000 + step),
        "comm": {"all_gather": Traffic(calls=1, link_bytes=64 * (rank + 1), seconds=0.01 * (rank + 1))},
    }  # fmt: skip
    return StepEvent(**{**fields, **more})


def steps(*numbers: int, spec: Spec = SPEC, **more: Any) -> list[StepEvent]:
    return [event(rank, step, spec, **more) for step in numbers for rank in range(spec.world_size)]


def losses(run: Any) -> dict[int, float]:
    """By step. All ranks report the same, and one may die before it does."""
    return {step.number: step.mean_loss for step in run.events.steps()}
