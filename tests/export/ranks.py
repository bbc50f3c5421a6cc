"""Losses of a Spec, from the lab's ranks and from its exported script under torchrun."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fsdp_lab.export import export_script
from fsdp_lab.spec.spec import Spec
from tests.pool import Place, Pool
from tests.ports import free_ports
from tests.rank.test_session import session

SEVERAL = Path(__file__).with_name("several.py")
SMALL = {"model_type": "gpt2", "n_layer": 3, "n_embd": 36, "n_head": 4, "vocab_size": 384, "n_positions": 64,
         "bos_token_id": None, "eos_token_id": 1}  # fmt: skip


def spec(world_size: int = 2, **changes: Any) -> Spec:
    small = {"model": SMALL, "seq_len": 32, "micro_batch": 2, "lr": 0.01, "data": __file__}
    return Spec(world_size=world_size).replace(**{**small, **changes})


def _train(place: Place, specs: list[dict[str, Any]], steps: int) -> list[list[float]]:
    losses, threads = [], max(1, len(os.sched_getaffinity(0)) // place.world_size)
    with closing(session(place, threads=threads, timeout_s=60)) as s:
        for given in specs:
            s.apply("run", given, fresh=True)
            losses.append([event["mean_loss"] for event in s.train(steps)["events"]])
    return losses


def in_the_lab(pool: Pool, specs: Mapping[str, Spec], steps: int) -> dict[str, list[float]]:
    """By the name of the Spec; all of one world size."""
    (world_size,) = {s.world_size for s in specs.values()}
    told = pool.run(_train, world_size, [s.to_dict() for s in specs.values()], steps, reduction=None, timeout_s=300)
    return dict(zip(specs, told[0], strict=True))


def torchrun(world_size: int, *arguments: str | Path, timeout_s: float = 480) -> str:
    """What the ranks printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    command += map(str, arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=SEVERAL.parents[2])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def losses_of(printed: str) -> list[float]:
    return [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step ")]


def exported(folder: Path, specs: Mapping[str, Spec], steps: int) -> dict[str, list[float]]:
    """By the name of the Spec, each from its own script; all under one torchrun."""
    (world_size,) = {s.world_size for s in specs.values()}
    scripts = [export_script(s, folder / f"{name}.py") for name, s in specs.items()]
    words = [f"{script}={port}" for script, port in zip(scripts, free_ports(len(scripts)), strict=True)]
    parts = torchrun(world_size, SEVERAL, str(steps), *words).split("script ")[1:]
    return {Path(part.splitlines()[0]).stem: losses_of(part) for part in parts}
