"""`fsdp-lab bench`: `step`, `host` and `gpu`, and what they share with tests/bench: refusals, environment, file."""

import argparse
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdp_lab.base import files
from fsdp_lab.bench import plan as bench_plan
from fsdp_lab.bench.plan import BenchError, BenchPlan, option
from fsdp_lab.cli.console import Failed, Refused, add_command, at_least, write_file

Options = dict[str, Mapping[str, Any]]  # name of a value -> arguments of `add_argument`
Bench = tuple[str, Callable[[argparse.Namespace], dict[str, Any]], str, Options]  # name, function, description, options
DEFAULT = "(default: %(default)s)"

say = partial(print, flush=True)


def number(default: int, text: str = "") -> Mapping[str, Any]:
    return {"type": int, "default": default, "help": f"{text} {DEFAULT}".strip()}


SIZES: Mapping[str, str] = {
    "ranks": "rank processes",
    "warmup": "warm-up steps of each form",
    "seq_len": "tokens per sequence",
    "micro_batch": "sequences per rank and step",
}
PRESET = "a causal preset (default: a GPT-2 of 4 layers, 512 wide)"
OWN_RANKS: Options = {
    **{name: number(getattr(BenchPlan, name), text) for name, text in SIZES.items()},
    "model": {"default": "", "metavar": "PRESET", "help": PRESET},
    "device": {"choices": ["cpu", "cuda"], "help": "(default: cuda where there is one for each rank)"},
}
PRECISION: Options = {"precision": {"choices": bench_plan.PRECISIONS, "default": BenchPlan.precision, "help": DEFAULT}}
REHEARSED = f"cpu: a rehearsal of the same list on the CPU with small models {DEFAULT}"
MINUTES = f"skip what is left after so many; 0: no limit {DEFAULT}"
GPU: Options = {
    "device": {"choices": ["cuda", "cpu"], "default": "cuda", "help": REHEARSED},
    "only": {"metavar": "PART,PART", "help": "only the parts whose names begin so, as step,share"},
    "out": {"type": Path, "metavar": "FILE", "help": "results file (default: fsdp_lab-gpu-DATE.txt)"},
    "minutes": {"type": float, "default": 9.0, "metavar": "N", "help": MINUTES},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    add_benches(kinds, BENCHES)
    listed = add_command(kinds, "gpu", "all that only a GPU can show, with one file of results; on a CPU a rehearsal")
    listed.set_defaults(run=gpu)
    for value, settings in GPU.items():
        listed.add_argument(option(value), **settings)


def add_benches(kinds: Any, benches: Sequence[Bench]) -> None:
    for name, measure, help_text, options in benches:
        kind = add_command(kinds, name, help_text)
        kind.set_defaults(measure=measure)
        for value, settings in options.items():
            kind.add_argument(option(value), **settings)
        kind.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")


def run(args: argparse.Namespace) -> int:
    if args.json is not None:
        files.check_file(args.json, field="--json")
    here = environment()
    try:
        figures: dict[str, Any] = args.measure(args)
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


def planned(args: argparse.Namespace, plan: type[BenchPlan] = BenchPlan, **more: Any) -> BenchPlan:
    """The plan of the options. Raises ArgumentError, which names an option."""
    sizes = {name: getattr(args, name) for name in ("steps", *SIZES) if hasattr(args, name)}
    sizes |= {"preset": getattr(args, "model", ""), **more}
    plan(**sizes)  # refuses before a device is looked for
    return plan(**sizes, devices=bench_plan.place(args.ranks, args.device))


def step(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.bench import results

    forms = bench_plan.STEP if args.only is None else bench_plan.forms_named(args.only)
    return results.step(planned(args, forms=forms, precision=args.precision, sharding=args.sharding), say)


def host(args: argparse.Namespace) -> dict[str, Any]:
    for name in ("rounds", "blocks", "layers"):
        at_least(args, name, 1)
    from fsdp_lab.bench import host as bench_host, results

    forms = bench_plan.forms_named(args.only, bench_host.FORMS, ())
    counts, same = (args.ranks,) if args.ranks else (1, 2), {"steps": args.rounds, "precision": args.precision}
    plans = [BenchPlan(ranks=n, devices=bench_plan.place(n, args.device), **same) for n in counts]
    return results.host(plans, {"forms": forms, "blocks": args.blocks, "layers": args.layers}, say)


def gpu(args: argparse.Namespace) -> int:
    """A list of parts, which go on if one fails. Raises Failed at the end, if one has."""
    from fsdp_lab.bench import gpu as gpu_list

    if not 0 <= args.minutes < math.inf:
        raise Refused(f"--minutes {args.minutes:g} is refused; give 0 or more, as 8.5")
    at = gpu_list.Place.here(args.device)
    parts = gpu_list.chosen(gpu_list.listed(at), args.only)
    file = files.check_file(args.out or time.strftime("fsdp_lab-gpu-%Y-%m-%d-%H%M%S.txt"), field="--out")
    gpu_list.Record(facts=dict(gpu_list.facts(at)), file=file, parts=parts).run(60.0 * args.minutes)
    print(f"written: {file}")
    if failed := [part.name for part in parts if part.outcome == gpu_list.FAILED]:
        raise Failed(f"{len(failed)} of {len(parts)} parts failed: {', '.join(failed)}; see {file}")
    return 0


ONLY = f"only these forms, or all of {bench_plan.LAB}, fsdp2 or ddp: {', '.join(bench_plan.FORMS)}"
STEP_OPTIONS: Options = {
    **OWN_RANKS,
    "steps": number(BenchPlan.steps, "counted steps of each form"),
    **PRECISION,
    "sharding": {"choices": bench_plan.SHARDINGS, "default": BenchPlan.sharding, "help": f"of lab and fsdp2 {DEFAULT}"},
    "only": {"metavar": "FORM,FORM", "help": ONLY},
}
HOST_OPTIONS: Options = {
    "ranks": {"type": int, "choices": (1, 2), "help": "rank processes (default: one, then two)"},
    **{"rounds": number(20), "blocks": number(48, "units"), "layers": number(6, "linear layers of a unit")},
    "device": OWN_RANKS["device"],
    **PRECISION,
    "only": {"default": "ddp,fsdp1,fsdp2,lab,lab-flat", "metavar": "FORM,FORM", "help": f"forms, as lab-raw {DEFAULT}"},
}
BENCHES: tuple[Bench, ...] = (
    ("step", step, "step time of the backends, interleaved, as ratios", STEP_OPTIONS),
    ("host", host, "what a backend costs on the host, in microseconds a unit", HOST_OPTIONS),
)
