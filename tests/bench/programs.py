"""`torchrun`, a Spec under torchrun, and `export`, an exported script compared with the lab. For `fsdp-lab bench gpu`."""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.base.formatting import duration
from fsdp_lab.bench.gpu import ALLOWED, run_program, trained
from fsdp_lab.bench.plan import BenchError, place
from fsdp_lab.bench.results import relative_difference
from fsdp_lab.cli.bench import say
from fsdp_lab.spec.spec import Spec

LIMIT_S = 90.0  # of a program


def torchrun(args: argparse.Namespace) -> dict[str, Any]:
    """`torchrun -m fsdp_lab.rank spec.json`. Fails unless it prints three finite losses."""
    devices, losses = place(args.ranks, args.device), list[float]()

    def read(line: str) -> None:
        if line.startswith("{"):
            event = json.loads(line)
            losses.append(event["mean_loss"])
            line = f"step {event['step']}: loss {event['mean_loss']:.6f}, {duration(event['step_time_s'])}"
        say(line)

    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-") as folder:
        file = Path(folder, "spec.json")
        file.write_text(_program_spec(devices).to_json())
        run_program([*_torchrun(devices), "-m", "fsdp_lab.rank", str(file), "--steps", "3"], read, LIMIT_S)
    if len(losses) != 3 or not all(map(math.isfinite, losses)):
        raise BenchError(f"three finite losses were expected, and it printed {losses}")
    return {"losses": losses, "environment": {"devices": devices}}


def export(args: argparse.Namespace) -> dict[str, Any]:
    """`fsdp-lab export` of a Spec, and a run of that script beside the lab's own. Fails where losses differ."""
    devices, losses = place(args.ranks, args.device), list[float]()
    spec = _program_spec(devices).replace(backend="fsdp2")

    def read(line: str) -> None:
        if step := re.match(r"step \d+ loss (\S+)", line):
            losses.append(float(step[1]))
        say(line)

    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-") as folder:
        file, script = Path(folder, "spec.json"), Path(folder, "train.py")
        file.write_text(spec.to_json())
        command = ["-m", "fsdp_lab", "export", str(file), "--to", "script", "--output", str(script)]
        run_program(command, lambda line: None, LIMIT_S)
        run_program([*_torchrun(devices), str(script), "--steps", "3"], read, LIMIT_S)
    (ours,) = trained([spec], 3, devices, LIMIT_S)
    if "error" in ours or len(losses) != 3:
        raise BenchError(f"the lab's: {ours}; the script's losses: {losses}")
    difference = relative_difference(losses, ours["losses"])
    say(f"losses of the script and of the lab {'are equal' if difference == 0 else f'differ by {difference:.1e}'}")
    if difference > ALLOWED["fp32"]:
        raise BenchError(f"losses differ by {difference:.1e}, and {ALLOWED['fp32']:g} is allowed")
    return {"script": losses, "lab": ours["losses"], "environment": {"devices": devices}}


def _program_spec(devices: Sequence[str]) -> Spec:
    spec = Spec(world_size=len(devices), devices=tuple(devices))
    return spec.replace(model="gpt2-1m", seq_len=64, micro_batch=2, lr=0.01)


def _torchrun(devices: Sequence[str]) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(devices))]
