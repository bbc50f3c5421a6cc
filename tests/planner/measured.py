"""Ledgers of real ranks beside the planner's memory: the cases, how they are measured and how they are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_lab.core.events import Role, RoleBytes, StepEvent
from fsdp_lab.core.spec import BACKENDS, OFFLOADS, SHARDINGS, Spec
from fsdp_lab.planner.memory import MemoryPlan, memory
from fsdp_lab.planner.shapes import shape_for
from tests.pool import Pool, RankError
from tests.rank.test_ledger import ledger_steps

WITHIN = 0.02
PRECISIONS = ("fp32", "bf16", "bf16-pure")
SMALL = {"seq_len": 16, "micro_batch": 1}  # model state decides
USUAL = {"seq_len": 128, "micro_batch": 4}  # activations decide

# What is toggled one at a time, for each backend that takes it.
TOGGLES: Mapping[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"}, "half recomputed": {"recompute": "every:2"},
    "prefetch": {"forward_prefetch": 1}, "deep prefetch": {"forward_prefetch": 2, "backward_prefetch": 2},
    "backward prefetch": {"backward_prefetch": 2}, "no prefetch": {"forward_prefetch": 0, "backward_prefetch": 0},
    "prefetch after": {"backward_prefetch_point": "after"}, "no limit": {"backward_prefetch": 3, "limit_all_gathers": 0},
    "limit 1": {"backward_prefetch": 2, "limit_all_gathers": 1}, "whole": {"wrap": "whole"}, "pairs": {"wrap": "every:2"},
    "fine": {"wrap": "min_params:20000"}, "accumulate": {"accumulate": 2},
    "accumulate, last": {"accumulate": 3, "sync": "last"}, "accumulate, second": {"accumulate": 4, "sync": 2},
    "two reductions": {"limit_reductions": 2}, "sgd": {"optimizer": "sgd"}, "to two": {"reshard_size": 2},
}  # fmt: skip
MODELS = ("llama-1m", "bert-1m", "t5-1m", "vit-1m", "resnet-1m")


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A case as it was measured and as it was predicted."""

    name: str
    measured: RoleBytes
    planned: MemoryPlan

    @property
    def error(self) -> float:
        """Of the peak, relative."""
        return self.planned.peak_bytes / self.measured.total_bytes - 1

    def errors(self) -> Iterator[tuple[Role, float]]:
        """Of each class that is 2 % of the peak or more, here or there, relative to the larger of the two."""
        least = WITHIN * self.measured.total_bytes
        for role in Role:
            here, there = self.planned.at_peak.of_role(role), self.measured.of_role(role)
            if max(here, there) >= least:
                yield role, (here - there) / max(here, there)

    @property
    def agrees(self) -> bool:
        return abs(self.error) <= WITHIN and all(abs(e) <= WITHIN for _, e in self.errors())


def strategies(world_size: int, **changes: Any) -> dict[str, Spec]:
    """Every backend, sharding, precision and offload that there is together."""
    found = {}
    for names in itertools.product(BACKENDS, SHARDINGS, PRECISIONS, OFFLOADS):
        fields = dict(zip(("backend", "sharding", "precision", "offload"), names, strict=True))
        add(found, ", ".join(names), world_size, {"model": "gpt2-1m", **fields, **changes})
    return found


def toggles(world_size: int, **changes: Any) -> dict[str, Spec]:
    """Every toggle, by backend."""
    found: dict[str, Spec] = {}
    for backend, (name, fields) in itertools.product(BACKENDS, TOGGLES.items()):
        sharding = "no_shard" if backend == "ddp" else "full_shard"
        add(found, f"{backend}, {name}", world_size,
            {"model": "gpt2-1m", "backend": backend, "sharding": sharding, **fields, **changes})  # fmt: skip
    return found


def models(world_size: int, **changes: Any) -> dict[str, Spec]:
    """Every kind of model, by backend and precision."""
    found: dict[str, Spec] = {}
    for model, backend, precision in itertools.product(MODELS, BACKENDS, ("fp32", "bf16")):
        sharding = "no_shard" if backend == "ddp" else "full_shard"
        data = {"data": "images"} if model.startswith(("vit", "resnet")) else {}
        fields = {"model": model, "backend": backend, "sharding": sharding, "precision": precision, **data, **changes}
        add(found, f"{model}, {backend}, {precision}", world_size, fields)
    return found


def add(found: dict[str, Spec], name: str, world_size: int, fields: Mapping[str, Any]) -> None:
    spec = Spec(world_size=world_size)
    if spec.validate(**fields) is None and not _is_refused_on_cpu(fields):
        found[name] = spec.replace(**fields)


def _is_refused_on_cpu(fields: Mapping[str, Any]) -> bool:
    return fields.get("backend") == "fsdp1" and fields.get("offload") == "all"


def measured(pool: Pool, specs: Mapping[str, Spec]) -> dict[str, StepEvent]:
    """Rank 0's ledger step of each."""
    world_size = next(iter(specs.values())).world_size
    mine, *_ = pool.run(ledger_steps, world_size, [s.to_dict() for s in specs.values()], reduction=None, timeout_s=600)
    return {name: StepEvent.from_dict(e) for name, e in zip(specs, mine, strict=True) if e is not None}


def one_by_one(pool: Pool, specs: Mapping[str, Spec]) -> Iterator[tuple[str, StepEvent | str]]:
    """In batches; of one that fails each by itself, with what was said."""
    names = list(specs)
    for i in range(0, len(names), 16):
        batch = {name: specs[name] for name in names[i : i + 16]}
        try:
            yield from measured(pool, batch).items()
        except RankError:
            for name, spec in batch.items():
                try:
                    yield from measured(pool, {name: spec}).items()
                except RankError as e:
                    yield name, str(e).strip().splitlines()[-1]


def beside(specs: Mapping[str, Spec], events: Iterable[tuple[str, StepEvent]]) -> list[Beside]:
    return [
        Beside(name=name, measured=event.memory.at_peak, planned=planned(specs[name])) for name, event in events
    ]  # fmt: skip


def planned(spec: Spec) -> MemoryPlan:
    shape = shape_for(spec.workload.model, spec.strategy.wrap if spec.strategy.backend != "ddp" else "block",
                      spec.workload.freeze, spec.workload.adapters, spec.workload.dropout)  # fmt: skip
    return memory(spec, shape, device="cpu")
