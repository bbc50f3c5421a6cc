"""`python -m tests.bench NAME`: benches for those who develop fsdp_lab. Arguments, `--json` and exit codes are those of
`fsdp-lab bench`."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fsdp_lab.base.errors import SentenceError
from fsdp_lab.cli.bench import DEFAULT, OWN_RANKS, PRECISION, Bench, Options, add_benches, number, run
from fsdp_lab.cli.console import Failed, Refused, signals_raise


def measured_by(module: str, name: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    """A function of a module here, which is imported if it is called: most need torch or Jupyter."""
    return lambda args: getattr(importlib.import_module(f"tests.bench.{module}"), name)(args)


RANKS = {"default": "2,4", "metavar": "N,N", "help": f"numbers of ranks {DEFAULT}"}
METERING: Options = {
    **OWN_RANKS, **PRECISION, "steps": number(100, "counted steps of each form"),
    "launches": number(4, "number of fresh launches"),
    "backend": {"default": "fsdp2", "metavar": "B,B", "help": f"of several, one file with all {DEFAULT}"},
}  # fmt: skip
PLAN: Options = {
    "ranks": number(2), "model": {"default": "gpt2-1m", "help": f"a preset {DEFAULT}"},
    "precision": {"default": "fp32", "help": f"comma-separated list, like --model {DEFAULT}"},
    "seq_len": number(128), "micro_batch": number(4), "rounds": number(3, "calibration rounds"),
}  # fmt: skip
MODELS = "gpt2-1m,llama-1m,bert-1m,t5-1m,vit-1m,resnet-1m"
MEMORY: Options = {"model": {"default": MODELS, "metavar": "M,M", "help": f"presets {DEFAULT}"}, "ranks": RANKS}
PIXEL: Options = {"ranks": number(4), "step_ms": number(0, "without ranks"), "seconds": number(20)}
FAMILIES: Options = {"jobs": number(1, "families at once")}
ATTACH: Options = {
    "ranks": number(1, "several: of DDP"), "launches": number(4, "number of fresh launches"),
    "rounds": number(2, "of a launch"),
}  # fmt: skip
TABLE: tuple[tuple[str, str, str, Options], ...] = (
    ("plan", "labs", "predicted step times, compared with measured ones", PLAN),
    ("memory", "labs", "peak memory of a step, compared with FSDP2's and with the planned one", MEMORY),
    ("metering", "metering", "cost of all that a lab does in a step beyond plain training", METERING),
    ("attach", "attach", "cost of watching a script that knows nothing of it", ATTACH),
    ("pixel", "pixel", "the end of a step to its frame in chromium, by percentiles", PIXEL),
    ("families", "families", "families of transformers, small: which train, which are refused, and why", FAMILIES),
)
BENCHES: tuple[Bench, ...] = tuple((name, measured_by(of, name), text, options) for name, of, text, options in TABLE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", allow_abbrev=False)
    kinds = parser.add_subparsers(metavar="NAME", required=True)
    add_benches(kinds, BENCHES)
    kinds.choices["families"].add_argument("names", nargs="*", metavar="FAMILY", help="model types (default: all)")
    try:
        with signals_raise():
            return run(parser.parse_args(arguments))
    except (Refused, SentenceError, Failed) as e:
        print(e, file=sys.stderr)
        return 1 if isinstance(e, Failed) else 2


if __name__ == "__main__":
    sys.exit(main())
