"""What torch says of itself, asked in a process of its own: a broken driver can hang or crash the import."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 90  # a first import from a cold network disk takes this long

# Makes no CUDA context: nothing is taken from a GPU that somebody else uses.
PROBE = """
import json, torch, torch.distributed as dist
facts = {"version": torch.__version__, "cuda_build": torch.version.cuda or "", "threads": torch.get_num_threads()}
facts["gloo"] = dist.is_available() and dist.is_gloo_available()
facts["nccl"] = dist.is_available() and dist.is_nccl_available()
if torch.version.cuda:
    facts["arches"] = (torch._C._cuda_getArchFlags() or "").split()
    facts["devices"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if facts["nccl"]:
        facts["nccl_version"] = list(torch.cuda.nccl.version())
    if not facts["devices"]:
        try:
            torch.cuda.init()
        except Exception as e:
            facts["cuda_error"] = str(e).splitlines()[0]
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class TorchFacts:
    """Empty where torch cannot be imported; `error` then says why."""

    version: str = ""
    cuda_build: str = ""  # "13.0"; empty for a CPU build
    arches: tuple[str, ...] = ()  # "sm_90", "compute_90"
    devices: int = 0  # GPUs that torch can use
    cuda_error: str = ""
    gloo: bool = False
    nccl: bool = False
    nccl_version: tuple[int, ...] = ()
    threads: int = 0
    error: str = ""


def ask_torch() -> TorchFacts:
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"importing torch took longer than {TIMEOUT_S} s")
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return TorchFacts(error=said[-1] if said else f"importing torch ended with exit code {done.returncode}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    tuples: dict[str, Any] = {name: tuple(v) for name, v in facts.items() if isinstance(v, list)}
    return TorchFacts(**{**facts, **tuples})
