"""`torchrun --nproc-per-node 2 -m fsdp_lab.rank spec.json`: train a Spec without a notebook or a cluster.

Rank 0 prints its event of each step as one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from fsdp_lab.base.errors import FieldError, SpecError
from fsdp_lab.rank import Session
from fsdp_lab.rank.rendezvous import end_process
from fsdp_lab.rank.torchrun import join
from fsdp_lab.spec.spec import Spec


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fsdp_lab.rank", description=__doc__)
    parser.add_argument("spec", type=Path, help="a Spec as JSON")
    parser.add_argument("--steps", type=int, default=10)
    limit = "how long a collective may wait for a rank (default: half a minute)"
    parser.add_argument("--hang-s", type=float, help=limit)
    arguments = parser.parse_args()
    try:
        spec = Spec.from_json(arguments.spec.read_text())
        session = _join(spec, arguments.hang_s)
    except (FieldError, OSError, ConnectionError) as e:
        sys.stderr.write(f"{e}\n")
        return 2
    try:
        session.apply("torchrun", spec.to_dict(), fresh=True)
        stopped = session.train(arguments.steps)["stopped"]
    except FieldError as e:
        sys.stderr.write(f"{e}\n")
        return 2
    finally:
        session.close()
    return 130 if stopped else 0


def _join(spec: Spec, hang_s: float | None) -> Session:
    """This process's rank, from torchrun's environment variables; a single rank without them."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size != spec.world_size:
        reason = f"the Spec needs {spec.world_size} ranks and torchrun started {world_size}"
        raise SpecError("world_size", reason, f"give torchrun --nproc-per-node {spec.world_size}")
    return join(spec.devices, on_event=_print, hang_s=hang_s)


def _print(event: dict[str, object]) -> None:
    if event["rank"] == 0:
        print(json.dumps(event), flush=True)


if __name__ == "__main__":
    end_process(main())
