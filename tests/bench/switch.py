"""`switch`: live switches near the memory limit of a GPU. Fails where one takes more than the larger layout and a unit.

Note: the limit. With AdamW a step takes more than what is held between steps: gradients, and the temporaries of the update.
So a model that fills a GPU between steps cannot be trained on it, and this lowers the process's limit for the time of each
switch instead: to `held / FILLED`, where `held` is 16 bytes a parameter (fp32 values, two moments, and the gradients that
DDP keeps in its buckets), the most that any of the layouts holds. A switch that held two models would need 24 bytes a
parameter, and the allocator refuses more than 20."""

import argparse
import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from fsdp_lab.base.formatting import Table, duration, size
from fsdp_lab.bench.gpu import STRATEGIES
from fsdp_lab.bench.plan import BenchError, BenchPlan, place
from fsdp_lab.bench.tasks import BenchRank
from fsdp_lab.cli.bench import say
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.presets import PRESETS
from fsdp_lab.models.wrapping import units
from fsdp_lab.rank.trainer import checksum
from fsdp_lab.spec.spec import Spec
from tests.bench.ranks import launch_here

SWITCHED = ("lab", "ddp", "fsdp2", "fsdp1", "lab")
ROUNDED = 1.02  # by the allocator: of the bytes of a bound
FILLED = 0.8  # of the memory that a process may take, by what it holds between steps
HELD_BYTES, STEP_BYTES = 16, 28  # per parameter: between steps, and the most within one


def llama(width: int, layers: int, vocab: int) -> dict[str, Any]:
    """A model of units of about one size."""
    heads, sizes = width // 64, {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 4 * width}
    more = {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocab}
    return {**PRESETS["llama-1m"].config, **sizes, **more, "max_position_embeddings": 1024, "tie_word_embeddings": True}


def switch(args: argparse.Namespace) -> dict[str, Any]:
    """Raises BenchError."""
    base = Spec(world_size=1).replace(model=llama(args.width, args.layers, args.vocab), seq_len=64, micro_batch=1)
    plan = BenchPlan(ranks=1, devices=place(1, args.device))
    (told,) = launch_here(plan, "switch", specs=[base.replace(**STRATEGIES[name]).to_dict() for name in SWITCHED])
    unit, limit = size(told["unit_bytes"]), size(told["limit_bytes"])
    of = f"{told['layers']} layers, {told['parameters']:,} parameters, the largest unit {unit}"
    say(f"{of}; allocator's limit {limit} on a GPU")
    rows, wrong = [], []
    for (one, other), made in zip(pairwise(SWITCHED), told["switches"], strict=True):
        name, on_gpu = f"{one} to {other}", made["peak_bytes"] is not None
        # The larger layout, and one unit with its two moments.
        bound = max(made["before_bytes"], made["after_bytes"]) + 3.0 * told["unit_bytes"] if on_gpu else None
        equal = made["before_checksum"] == made["after_checksum"]
        within = bound is None or made["peak_bytes"] <= bound * ROUNDED
        wrong += [f"{name} changes parameters"] * (not equal) + [f"{name} takes too much"] * (not within)
        sizes = map(size, (made["before_bytes"], made["after_bytes"], made["peak_bytes"], bound))
        rows.append((name, duration(made["seconds"]), *sizes, "equal" if equal else "DIFFERENT"))
    columns = ("switch", "time", "before", "after", "peak", "bound", "checksums")
    say(repr(Table(columns=columns, rows=tuple(rows), left=frozenset({"switch", "checksums"}))))
    if plan.devices == ("cpu",):
        say("memory is not measured on a CPU")
    if wrong:
        raise BenchError("; ".join(wrong))
    return {**told, "environment": {"devices": plan.devices}}


def on_rank(rank: BenchRank, job: Mapping[str, Any]) -> dict[str, Any]:
    """Trains a step under each Spec and switches to the next.

    Returns {"layers", "parameters", "unit_bytes", "limit_bytes", "switches": [{"before_bytes", "after_bytes",
    "peak_bytes", "seconds", "before_checksum", "after_checksum"}, ...]}; bytes of the device are None on a CPU."""
    specs = [Spec.from_dict(spec) for spec in job["specs"]]
    with rank.session() as session:
        device, made = session.info.device, list[dict[str, Any]]()
        config, parameters, unit_bytes = deepest(dict(specs[0].workload.model), device)
        limit_bytes = int(HELD_BYTES * parameters / FILLED)

        def state(when: str) -> dict[str, Any]:
            held = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
            return {f"{when}_bytes": held, f"{when}_checksum": checksum(session.trainer.backend)}

        session.apply("bench", specs[0].replace(model=config).to_dict(), fresh=True)
        for spec in specs[1:]:
            session.train(1)
            gc.collect()
            before = state("before")
            with limited(device, limit_bytes):
                applied = session.apply("bench", spec.replace(model=config).to_dict())
                peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
            assert applied["carried"], "a switch keeps the training"
            made.append({**before, **state("after"), "peak_bytes": peak, "seconds": applied["seconds"]})
        session.train(1)  # under the last one
    figures = {"layers": config["num_hidden_layers"], "parameters": parameters, "unit_bytes": unit_bytes}
    return {**figures, "limit_bytes": limit_bytes, "switches": made}


def deepest(config: dict[str, Any], device: torch.device) -> tuple[dict[str, Any], int, int]:
    """The config with as many layers as the device's free memory takes, at most its own; parameters, and bytes of the
    largest unit."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    for layers in range(config["num_hidden_layers"], 0, -1):
        skeleton = build_skeleton(resolve(config := {**config, "num_hidden_layers": layers}))
        parameters = sum(p.numel() for p in skeleton.parameters())
        if STEP_BYTES * parameters <= 0.9 * free_bytes:
            break
    inside = [sum(p.numel() for m in group for p in m.parameters()) for group in units(skeleton, "block")]
    return config, parameters, 4 * max(parameters - sum(inside), *inside)


@contextmanager
def limited(device: torch.device, limit_bytes: int) -> Iterator[None]:
    """Within it the allocator refuses this process more than so many bytes of a GPU, and counts the peak anew."""
    if device.type != "cuda":
        yield
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
