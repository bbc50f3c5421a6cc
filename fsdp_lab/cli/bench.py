"""`fsdp-lab bench`: the options of all benches, and what they share: refusals, the environment, the file.

step, metering and checkpoint (bench/benches.py) and gpu (bench/gpu.py) need neither Jupyter nor rich; the others run on a
lab (lab_benches.py).
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdp_lab.bench.plan import (
    LAB,
    METERED_PEERS,
    METERING,
    NAMED,
    PRECISIONS,
    REFERENCE,
    SHARDINGS,
    STEP,
    WARM_UP,
    WINDOW,
    BenchError,
    BenchPlan,
    PlanError,
    forms_named,
    option,
)
from fsdp_lab.cli.console import Failed, Refused, add_command, at_least, check_file, write_file
from fsdp_lab.core import files
from fsdp_lab.core.spec import BACKENDS

Options = dict[str, Mapping[str, Any]]  # name of a value -> arguments of `add_argument`
Bench = tuple[str, Callable[[argparse.Namespace], dict[str, Any]], str, Options]  # name, function, description, options
DEFAULT = "(default: %(default)s)"


def number(default: int, text: str = "") -> Mapping[str, Any]:
    return {"type": int, "default": default, "help": f"{text} {DEFAULT}".strip()}


SIZES: Options = {
    name: number(getattr(BenchPlan, name), text)
    for name, text in {
        "ranks": "rank processes",
        "warmup": "warm-up steps of each form",
        "layers": "layers of the GPT-2 model",
        "width": "embedding width",
        "heads": "attention heads",
        "vocab": "vocabulary size",
        "seq_len": "tokens per sequence",
        "micro_batch": "sequences per rank and step",
    }.items()
}
OWN_RANKS: Options = {
    **SIZES,
    "model": {
        "default": "",
        "metavar": "PRESET",
        "help": "a causal preset, in place of --layers, --width, --heads and --vocab",
    },
    "device": {"choices": ["cpu", "cuda"], "help": "(default: cuda where there is one for each rank)"},
}
PRECISION: Options = {"precision": {"choices": PRECISIONS, "default": BenchPlan.precision, "help": DEFAULT}}


GPU: Options = {
    "device": {
        "choices": ["cuda", "cpu"],
        "default": "cuda",
        "help": f"cpu: a rehearsal of the same list on the CPU with small models {DEFAULT}",
    },
    "only": {"metavar": "PART,PART", "help": "only the parts whose names begin so, as step,switch"},
    "list": {"action": "store_true", "help": "list the parts, and run none"},
    "out": {"type": Path, "metavar": "FILE", "help": "results file (default: fsdp_lab-gpu-DATE.txt)"},
    "minutes": {
        "type": float,
        "default": 9.0,
        "metavar": "N",
        "help": f"skip what is left after so many; 0: no limit {DEFAULT}",
    },
}


def on_lab(model: str) -> Options:
    return {"ranks": number(2), "model": {"default": model, "help": f"a preset {DEFAULT}"}}


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


say = partial(print, flush=True)


# -- without a lab ---------------------------------------------------------------------------------------------------


def step(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.bench import benches

    forms = STEP if args.only is None else forms_named(args.only)
    return benches.step(planned(args, forms, precision=args.precision, sharding=args.sharding), say)


def metering(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.bench import benches

    at_least(args, "launches", 2, ": one does not show how far it is off")
    plan = planned(args, METERING[args.backend], precision=args.precision)
    return benches.metering(plan, args.backend, args.launches, say)


def checkpoint(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.bench import benches
    from fsdp_lab.core.checkpoint_format import check_folder

    at_least(args, "rounds", 1)
    plan = planned(args, (LAB, REFERENCE), steps=args.rounds)
    parent = None if args.folder is None else check_folder(args.folder, field="--folder")
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-", dir=parent) as folder:
        return benches.checkpoint(plan, Path(folder), say)


def load(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.bench import benches
    from fsdp_lab.core.checkpoint_format import check_folder

    at_least(args, "rounds", 1)
    plan = planned(args, (LAB,))
    parent = None if args.folder is None else check_folder(args.folder, field="--folder")
    with tempfile.TemporaryDirectory(prefix="fsdp_lab-bench-", dir=parent) as folder:
        return benches.load(plan, args.rounds, Path(folder), say)


def wire(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.bench import benches

    at_least(args, "rounds", 2)
    return benches.wire(planned(args, (LAB,), steps=args.rounds), say)


def numbers(text: str, least: int) -> list[int]:
    """Of a comma-separated list for --ranks. Raises Refused."""
    found = [int(n) if n.strip().isdigit() else 0 for n in text.split(",")]
    if min(found) < least:
        raise Refused(f"--ranks {text} is refused; give numbers of {least} or more, as 2,4")
    return found


def planned(args: argparse.Namespace, forms: Sequence[str], **more: Any) -> BenchPlan:
    """The plan of the options. Raises PlanError, which names an option."""
    from fsdp_lab.bench.launch import place

    sizes = {name: getattr(args, name) for name in ("steps", *SIZES) if hasattr(args, name)}
    plan = BenchPlan(**{**sizes, "preset": getattr(args, "model", ""), **more}, forms=tuple(forms))
    return BenchPlan.from_dict({**plan.to_dict(), "devices": place(plan.ranks, args.device)})


def gpu(args: argparse.Namespace) -> int:
    """A list of parts, which go on if one fails. Raises Failed at the end, if one has."""
    from fsdp_lab.bench import gpu as gpu_list
    from fsdp_lab.bench.record import Record

    if not 0 <= args.minutes < math.inf:
        raise Refused(f"--minutes {args.minutes:g} is refused; give 0 or more, as 8.5")
    try:
        at = gpu_list.Place.here(args.device, listing=args.list)
        parts = gpu_list.chosen(gpu_list.listed(at), args.only)
    except PlanError as e:
        raise Refused(str(e)) from e
    if args.list:
        for part in parts:
            say(f"{part.name:18} {part.title}{f' (skipped: {part.skipped})' if part.skipped else ''}")
        return 0
    file = files.check_file(args.out or time.strftime("fsdp_lab-gpu-%Y-%m-%d-%H%M%S.txt"), field="--out")
    record = Record(facts=dict(gpu_list.facts(at)), file=file, say=say)
    for name, value in record.facts.items():
        say(f"{name}: {value}")
    record.run(parts, 60.0 * args.minutes)
    say(f"written: {file}")
    if record.failed:
        raise Failed(f"{len(record.failed)} of {len(parts)} parts failed: {', '.join(record.failed)}; see {file}")
    return 0


# -- on a lab --------------------------------------------------------------------------------------------------------


def live(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.cli import lab_benches

    return lab_benches.live(args.model, args.ranks, args.rounds, say)


def toggle(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.cli import lab_benches

    at_least(args, "pairs", 2)
    at_least(args, "relaunches", 1)
    return lab_benches.toggle(args.model, args.ranks, args.pairs, args.relaunches, say)


def soak(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.cli import lab_benches

    at_least(args, "toggles", WARM_UP + WINDOW, f": the first {WARM_UP} are warm-up")
    backends = [name.strip() for name in args.backend.split(",")]
    if unknown := next((name for name in backends if name not in BACKENDS), None):
        raise Refused(f"--backend {unknown!r} is refused; give some of {', '.join(BACKENDS)}")
    return lab_benches.soak(args.model, args.ranks, args.toggles, backends, say)


def plan(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.cli import lab_benches
    from fsdp_lab.core.spec import Spec
    from fsdp_lab.planner.shapes import shape_for

    at_least(args, "rounds", 1)
    models = args.model.split(",")
    for model in models:
        shape_for(model)  # an unknown one is refused before ranks start
    base = Spec(world_size=args.ranks).replace(seq_len=args.seq_len, micro_batch=args.micro_batch)
    bases = [base.replace(model=m, precision=p) for m in models for p in args.precision.split(",")]
    return lab_benches.plan(bases, args.rounds, say)


def memory(args: argparse.Namespace) -> dict[str, Any]:
    from fsdp_lab.cli import lab_benches
    from fsdp_lab.planner.shapes import shape_for

    models = args.model.split(",")
    for model in models:
        shape_for(model)  # an unknown one is refused before ranks start
    return lab_benches.memory(models, numbers(args.ranks, 2), say)


BENCHES: tuple[Bench, ...] = (
    ("live", live, "latency of start, switch and stop, as a user sees it",
     on_lab("gpt2-10m") | {"rounds": number(2, "passes over all switches")}),
    ("step", step, "step time of the backends, interleaved, as ratios",
     OWN_RANKS | {"steps": number(BenchPlan.steps, "counted steps of each form")} | PRECISION | {
         "sharding": {"choices": SHARDINGS, "default": BenchPlan.sharding, "help": f"of lab and fsdp2 {DEFAULT}"},
         "only": {"metavar": "FORM,FORM",
                  "help": f"only these forms, or all of {LAB}, fsdp2 or ddp: {', '.join(NAMED)}"}}),
    ("toggle", toggle, "time of a strategy switch, compared with a relaunch by torchrun",
     on_lab("gpt2-10m") | {
         "pairs": {"type": int, "help": "number of random switches (default: each pair of strategies, twice)"},
         "relaunches": number(5, "number of torchrun relaunches")}),
    ("soak", soak, "memory growth of kernel and ranks over many strategy switches",
     on_lab("gpt2-1m") | {
         "toggles": number(1000, f"switches of each backend, the first {WARM_UP} to warm up"),
         "backend": {"default": ",".join(BACKENDS), "metavar": "B,B", "help": "(default: all four)"}}),
    ("checkpoint", checkpoint,
     "save and load time, compared with plain Distributed Checkpoint, and the cost of a save to training",
     OWN_RANKS | {"rounds": number(15, "number of saves and loads"),
                  "folder": {"type": Path, "help": "folder on the disk to measure (default: a temporary one)"}}),
    ("load", load, "a folder of weights until the first step, compared with from_pretrained and FSDP2",
     {"ranks": number(4, "rank processes"), "model": {"default": "gpt2-355m", "help": f"a causal preset {DEFAULT}"},
      "seq_len": number(64, "tokens per sequence"), "micro_batch": number(1, "sequences per rank"),
      "rounds": number(3, "number of times that each loads"), "device": {"choices": ["cpu"], "default": "cpu"},
      "folder": {"type": Path, "help": "folder on the disk to measure (default: a temporary one)"}}),
    ("wire", wire, "collectives over shared memory, compared with Gloo",
     {"ranks": number(2, "rank processes"), "rounds": number(30, "counted rounds"),
      "device": {"choices": ["cpu"], "default": "cpu"}}),
    ("metering", metering,
     "overhead of all that a lab does in a step (vote, norm, measuring, events), compared with plain training",
     OWN_RANKS | {
         "steps": number(100, "counted steps of each form"), "launches": number(4, "number of fresh launches"),
         "backend": {"choices": METERED_PEERS, "default": "fsdp2", "help": f"backend {DEFAULT}"}} | PRECISION),
    ("plan", plan, "predicted step times, compared with measured ones",
     on_lab("gpt2-1m") | {
         "precision": {"default": "fp32", "help": f"comma-separated list, like --model {DEFAULT}"},
         "seq_len": number(128), "micro_batch": number(4), "rounds": number(3, "calibration rounds")}),
    ("memory", memory, "peak memory of a step, compared with FSDP2's and with the planned one",
     {"model": {"default": "gpt2-1m,llama-1m,bert-1m,t5-1m,vit-1m,resnet-1m", "metavar": "M,M",
                "help": f"presets {DEFAULT}"},
      "ranks": {"default": "2,4", "metavar": "N,N", "help": f"numbers of ranks {DEFAULT}"}}),
)  # fmt: skip
