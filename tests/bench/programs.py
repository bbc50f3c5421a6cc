"""`torchrun`, a Spec under torchrun, and `export`, an exported script compared with the lab."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.base.process import MARK, sweep
from fsdp_lab.bench.gpu import ALLOWED, trained
from fsdp_lab.bench.plan import BenchError, place
from fsdp_lab.bench.results import relative_difference
from fsdp_lab.cli.bench import say
from fsdp_lab.spec.spec import Spec

LIMIT_S = 90.0  # of a program


def torchrun(args: argparse.Namespace) -> dict[str, Any]:
    """`torchrun -m fsdp_lab.rank spec.json`. Fails unless it prints three finite losses."""
    devices = place(args.ranks, args.device)
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-") as folder:
        file = Path(folder, "spec.json")
        file.write_text(_program_spec(devices).to_json())
        lines = run_program(*_torchrun(devices), "-m", "fsdp_lab.rank", str(file), "--steps", "3")
    losses = [json.loads(line)["mean_loss"] for line in lines if line.startswith("{")]
    say(f"losses under torchrun: {losses}")
    if len(losses) != 3 or not all(map(math.isfinite, losses)):
        raise BenchError(f"three finite losses were expected, and it printed {losses}")
    return {"losses": losses, "environment": {"devices": devices}}


def export(args: argparse.Namespace) -> dict[str, Any]:
    """`fsdp-lab export` of a Spec, and a run of that script beside the lab's own. Fails where losses differ."""
    devices = place(args.ranks, args.device)
    spec = _program_spec(devices).replace(backend="fsdp2")
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-") as folder:
        file, script = Path(folder, "spec.json"), Path(folder, "train.py")
        file.write_text(spec.to_json())
        run_program("-m", "fsdp_lab", "export", str(file), "--to", "script", "--output", str(script))
        lines = run_program(*_torchrun(devices), str(script), "--steps", "3")
    losses = [float(step[1]) for line in lines if (step := re.match(r"step \d+ loss (\S+)", line))]
    (ours,) = trained([spec], 3, devices, LIMIT_S)
    if "error" in ours or len(losses) != 3:
        raise BenchError(f"the lab's: {ours}; the script's losses: {losses}")
    difference = relative_difference(losses, ours["losses"])
    say(f"losses of the script and of the lab {'are equal' if difference == 0 else f'differ by {difference:.1e}'}")
    if difference > ALLOWED["fp32"]:
        raise BenchError(f"losses differ by {difference:.1e}, and {ALLOWED['fp32']:g} is allowed")
    return {"script": losses, "lab": ours["losses"], "environment": {"devices": devices}}


def run_program(*arguments: str) -> list[str]:
    """Lines that `python ARGUMENTS` prints. Raises BenchError if it fails or does not end in time. What it has started is
    ended, by the token in its environment."""
    env = {"OMP_NUM_THREADS": "1", **os.environ, MARK: (token := uuid.uuid4().hex)}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run([sys.executable, *arguments], env=env, timeout=LIMIT_S, text=True, **pipes)
    except subprocess.TimeoutExpired:
        raise BenchError(f"it did not end within {LIMIT_S:.0f} s") from None
    finally:
        sweep(token)
    if done.returncode:
        raise BenchError(f"it ended with code {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout.splitlines()


def _program_spec(devices: Sequence[str]) -> Spec:
    spec = Spec(world_size=len(devices), devices=tuple(devices))
    return spec.replace(model="gpt2-1m", seq_len=64, micro_batch=2, lr=0.01)


def _torchrun(devices: Sequence[str]) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(devices))]
