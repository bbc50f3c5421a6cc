"""`tour`: the notebooks' steps that need no Jupyter, on one rank. Fails where losses are not those that they must equal."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_lab.bench.gpu import ALLOWED, STRATEGIES
from fsdp_lab.bench.plan import BenchError, BenchPlan, place
from fsdp_lab.bench.results import relative_difference
from fsdp_lab.bench.tasks import BenchRank
from fsdp_lab.cli.bench import say
from fsdp_lab.engine import fully_shard
from fsdp_lab.spec.checkpoint_format import find
from fsdp_lab.spec.spec import Spec
from tests.bench.ranks import launch_here

STEPS, SAVE_S = 3, 60.0
DTYPES = ("fp32", "bf16")


def tour(args: argparse.Namespace) -> dict[str, Any]:
    """Raises BenchError."""
    spec = Spec(world_size=1).replace(model="gpt2-1m", seq_len=64, micro_batch=2, lr=0.01)
    plan = BenchPlan(ranks=1, devices=place(1, args.device))
    (told,) = launch_here(plan, "tour", spec=spec.to_dict())
    pairs = {
        "continued from a checkpoint": (told["resumed"], told["undisturbed"]),
        "continued from it under ddp": (told["resumed elsewhere"], told["undisturbed"]),
        "the engine's loop beside a plain one": (told["engine"]["sharded"], told["engine"]["plain"]),
    }
    differences = {name: relative_difference(*pair) for name, pair in pairs.items()}
    for name, difference in differences.items():
        say(f"{name}: losses {'are equal' if difference == 0 else f'differ by {difference:.1e}'}")
    say(f"slow motion: {len(told['frames'])} phases: {' '.join(told['frames'])}")
    for dtype, rate in told["product_flops_per_s"].items():
        say(f"matrix products in {dtype}: {rate / 1e12:.3g} TFLOPS at most")
    if wrong := [name for name, difference in differences.items() if difference > ALLOWED["fp32"]]:
        raise BenchError(f"losses differ: {', '.join(wrong)}")
    return {**told, "differences": differences, "environment": {"devices": plan.devices}}


def on_rank(rank: BenchRank, job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns figures of each step; what fails raises."""
    spec, phases = Spec.from_dict(job["spec"]), list[str]()
    with rank.session() as session, tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-") as folder:

        def losses(steps: int) -> list[float]:
            return [event["mean_loss"] for event in session.train(steps)["events"]]

        session.apply("bench", spec.to_dict(), fresh=True)
        told: dict[str, Any] = {"undisturbed": losses(2 * STEPS)}
        session.apply("bench", spec.to_dict(), fresh=True)
        first = losses(STEPS)
        session.save(folder)
        session.saves(wait_s=SAVE_S)
        saved = str(find(folder).path)
        for name, changes in {"resumed": {}, "resumed elsewhere": STRATEGIES["ddp"]}.items():
            session.restore("bench", spec.replace(**changes).to_dict(), saved)
            told[name] = [*first, *losses(STEPS)]
        session.apply("bench", spec.to_dict(), fresh=True)
        while (said := session.slow_next())["frame"] is not None:  # stops at each phase of one step
            phases.append(said["frame"]["phase"])
        session.train(1)
        products = session.calibrate([spec.to_dict()], list(DTYPES), 1)["products"]
        rates = {dtype: max(flops / s for flops, s in rows) for dtype, rows in products.items()}
        engine = {name: engine_loop(session.info.device, sharded=name == "sharded") for name in ("sharded", "plain")}
    return {**told, "frames": phases, "product_flops_per_s": rates, "engine": engine}


def engine_loop(device: torch.device, *, sharded: bool) -> list[float]:
    """The README's loop: losses of a model that `fully_shard` sharded, or of the same one without."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(device)
    for module in (*model, model) if sharded else ():
        fully_shard(module)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(3):
        loss = model(torch.randn(8, 32).to(device)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
