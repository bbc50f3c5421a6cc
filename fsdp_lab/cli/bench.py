"""`fsdp-lab bench`: the options of all benches, and what they share: refusals, the environment, the file.

step, metering and checkpoint (bench/benches.py) need neither Jupyter nor rich; the others run on a lab
(lab_benches.py).
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdp_lab.bench.plan import (
    LAB,
    METERED_PEERS,
    METERING,
    PRECISIONS,
    REFERENCE,
    SHARDINGS,
    STEP,
    WARM_UP,
    WINDOW,
    BenchError,
    BenchPlan,
    PlanError,
    named,
    option,
)
from fsdp_lab.cli.console import Failed, Refused, at_least, check_file, write_file
from fsdp_lab.core.spec import BACKENDS

Add = Callable[..., Any]  # `add_argument` of a parser

SIZES = {
    "ranks": "rank processes",
    "warmup": "warm-up steps of each form",
    "layers": "layers of the GPT-2 model",
    "width": "embedding width",
    "heads": "attention heads",
    "vocab": "vocabulary size",
    "seq_len": "tokens per sequence",
    "micro_batch": "sequences per rank and step",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for name, options, measure, says in (
        ("live", _live_options, _live, "latency of start, switch and stop, as a user sees it"),
        ("step", _step_options, _step, "step time of the backends, interleaved, as ratios"),
        ("toggle", _toggle_options, _toggle, "time of a strategy switch, compared with a relaunch by torchrun"),
        ("soak", _soak_options, _soak, "memory growth of kernel and ranks over many strategy switches"),
        ("checkpoint", _checkpoint_options, _checkpoint,
         "save and load time, compared with plain Distributed Checkpoint, and the cost of a save to training"),
        ("metering", _metering_options, _metering,
         "overhead of measuring and publishing, compared with torch's own process group"),
        ("plan", _plan_options, _plan, "predicted step times, compared with measured ones"),
    ):  # fmt: skip
        kind = kinds.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.", allow_abbrev=False)
        kind.set_defaults(measure=measure)
        options(kind.add_argument)
        kind.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    here = environment()
    try:
        figures: dict[str, Any] = args.measure(args)
    except PlanError as e:
        raise Refused(str(e)) from e
    except BenchError as e:
        raise Failed(str(e)) from e
    if args.json is not None:
        figures["environment"] |= here
        write_file(args.json, figures)
        print(f"written: {args.json}")
    return 0


def environment() -> dict[str, Any]:
    """This machine and this Python: part of every bench file."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def say(line: str) -> None:
    print(line, flush=True)


# -- without a lab ---------------------------------------------------------------------------------------------------


def _size_options(add: Add) -> None:
    for name, says in SIZES.items():
        add(option(name), type=int, default=getattr(BenchPlan, name), help=f"{says} (default: %(default)s)")
    add("--device", choices=["cpu", "cuda"], help="(default: cuda where there is one for each rank)")


def _step_options(add: Add) -> None:
    _size_options(add)
    add("--steps", type=int, default=BenchPlan.steps, help="counted steps of each form (default: %(default)s)")
    add("--precision", choices=PRECISIONS, default=BenchPlan.precision, help="(default: %(default)s)")
    add("--sharding", choices=SHARDINGS, default=BenchPlan.sharding, help="of lab and fsdp2 (default: %(default)s)")
    add("--only", metavar="FORM,FORM", help=f"only these forms, or all of {LAB}, fsdp2 or ddp: {', '.join(STEP)}")


def _step(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.bench import benches

    forms = STEP if args.only is None else named(args.only)
    return benches.step(_planned(args, forms, precision=args.precision, sharding=args.sharding), say)


def _metering_options(add: Add) -> None:
    _size_options(add)
    add("--steps", type=int, default=100, help="counted steps of each form (default: %(default)s)")
    add("--launches", type=int, default=4, help="number of fresh launches (default: %(default)s)")
    add("--backend", choices=METERED_PEERS, default="fsdp2", help="backend (default: %(default)s)")
    add("--precision", choices=PRECISIONS, default=BenchPlan.precision, help="(default: %(default)s)")


def _metering(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.bench import benches

    at_least(args, "launches", 2, ": one does not show how far it is off")
    plan = _planned(args, METERING[args.backend], precision=args.precision)
    return benches.metering(plan, args.backend, args.launches, say)


def _checkpoint_options(add: Add) -> None:
    _size_options(add)
    add("--rounds", type=int, default=15, help="number of saves and loads (default: %(default)s)")
    add("--folder", type=Path, help="folder on the disk to measure (default: a temporary one)")


def _checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.bench import benches
    from fsdp_lab.core.checkpoint_format import check_folder

    at_least(args, "rounds", 1)
    plan = _planned(args, (LAB, REFERENCE), steps=args.rounds)
    parent = None if args.folder is None else check_folder(args.folder, field="--folder")
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-", dir=parent) as folder:
        return benches.checkpoint(plan, Path(folder), say)


def _planned(args: argparse.Namespace, forms: Sequence[str], **more: Any) -> BenchPlan:
    """The plan of the options. Raises PlanError, which names an option."""
    from fsdp_lab.bench.launch import place

    sizes = {name: getattr(args, name) for name in ("steps", *SIZES) if hasattr(args, name)}
    plan = BenchPlan(**{**sizes, **more}, forms=tuple(forms))
    return BenchPlan.from_dict({**plan.to_dict(), "devices": place(plan.ranks, args.device)})


# -- on a lab --------------------------------------------------------------------------------------------------------


def _lab_options(add: Add, model: str) -> None:
    add("--ranks", type=int, default=2, help="(default: %(default)s)")
    add("--model", default=model, help="a preset (default: %(default)s)")


def _live_options(add: Add) -> None:
    _lab_options(add, "gpt2-10m")
    add("--rounds", type=int, default=2, help="passes over all switches (default: %(default)s)")


def _live(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.cli import lab_benches

    return lab_benches.live(args.model, args.ranks, args.rounds, say)


def _toggle_options(add: Add) -> None:
    _lab_options(add, "gpt2-10m")
    add("--pairs", type=int, help="number of random switches (default: each pair of strategies, twice)")
    add("--relaunches", type=int, default=5, help="number of torchrun relaunches (default: %(default)s)")


def _toggle(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.cli import lab_benches

    at_least(args, "pairs", 2)
    at_least(args, "relaunches", 1)
    return lab_benches.toggle(args.model, args.ranks, args.pairs, args.relaunches, say)


def _soak_options(add: Add) -> None:
    _lab_options(add, "gpt2-1m")
    add(
        "--toggles",
        type=int,
        default=1000,
        help=f"switches of each backend, the first {WARM_UP} to warm up (default: %(default)s)",
    )
    add("--backend", default=",".join(BACKENDS), metavar="B,B", help="(default: all four)")


def _soak(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.cli import lab_benches

    at_least(args, "toggles", WARM_UP + WINDOW, f": the first {WARM_UP} are warm-up")
    backends = [name.strip() for name in args.backend.split(",")]
    if unknown := next((name for name in backends if name not in BACKENDS), None):
        raise Refused(f"--backend {unknown!r} is refused; give some of {', '.join(BACKENDS)}")
    return lab_benches.soak(args.model, args.ranks, args.toggles, backends, say)


def _plan_options(add: Add) -> None:
    _lab_options(add, "gpt2-1m")
    add("--precision", default="fp32", help="comma-separated list, like --model (default: %(default)s)")
    add("--seq-len", type=int, default=128, help="(default: %(default)s)")
    add("--micro-batch", type=int, default=4, help="(default: %(default)s)")
    add("--rounds", type=int, default=3, help="calibration rounds (default: %(default)s)")


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.cli import lab_benches
    from fsdp_lab.core.spec import Spec
    from fsdp_lab.planner.shapes import shape_for

    at_least(args, "rounds", 1)
    models = args.model.split(",")
    for model in models:
        shape_for(model)  # an unknown one is refused before ranks start
    bases = [
        Spec(world_size=args.ranks).replace(
            model=model, precision=precision, seq_len=args.seq_len, micro_batch=args.micro_batch
        )
        for model in models
        for precision in args.precision.split(",")
    ]
    return lab_benches.plan(bases, args.rounds, say)
