"""`python -m tests.planner.research validate | batch FILE [--json]`: predicts published measurements, or a table's rows."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.base.errors import FieldError
from fsdp_lab.base.formatting import Table, count
from fsdp_lab.cli.console import Refused, say, say_json
from tests.planner.research.published import Row, case, counted_flops_per_token, peak_in_unit, published
from tests.planner.research.validate import by_constant, grouped, lines, usable, validate


def predict(row: Row) -> dict[str, Any]:
    """Returns `tflops_per_gpu` as the row's `tflops_kind` counts, `peak_mem` in its `peak_mem_unit` and of its
    `peak_mem_kind` (None if the unit is unknown), and what was `assumed`; `_low` and `_high` are the ends of 80 % bands. Or
    `error`, a sentence that names the column."""
    try:
        one = case(row)
        plan = one.plan()
    except FieldError as e:
        return {"id": row.get("id", ""), "error": str(e)}
    ranks, w, is_full = one.spec.world_size, one.spec.workload, one.spec.strategy.recompute == "full"
    tokens_per_s, step_s = plan.tokens_per_s_band(), plan.step_time_band_s()
    per_token = counted_flops_per_token(row, one.shape, w.seq_len, recomputed=is_full)
    peak = peak_in_unit(plan.memory, row)
    peaks = None if peak is None else plan.memory_band_bytes(peak)
    return {
        "id": row.get("id", ""), "tokens_per_s_per_gpu": plan.tokens_per_s / ranks,
        "tokens_per_s_per_gpu_low": tokens_per_s.low / ranks, "tokens_per_s_per_gpu_high": tokens_per_s.high / ranks,
        "tflops_per_gpu": plan.tokens_per_s / ranks * per_token / 1e12,
        "peak_mem": peak, "peak_mem_low": peaks and peaks.low, "peak_mem_high": peaks and peaks.high,
        "fits_probability": plan.fits_probability,
        "step_time_s": plan.step_time_s, "step_time_s_low": step_s.low, "step_time_s_high": step_s.high,
        "assumed": {**plan.assumed, **one.assumed},
    }  # fmt: skip


def read_rows(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header. Raises Refused."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            reader = csv.DictReader(opened)
            rows = [
                {k: v or "" for k, v in row.items() if isinstance(k, str) and not isinstance(v, list)} for row in reader
            ]
    except OSError as e:
        raise Refused(f"cannot read {file} ({e.strerror}); give the path of a CSV file") from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise Refused(f"{file} is no CSV ({e}); give a table with a header, as of fsdp_measurements.csv") from e
    if not {*(reader.fieldnames or ())} & {"model", "n_layers"}:
        raise Refused(f"{file} has no column model or n_layers; its first line is to name the columns")
    return rows


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A dash for what is not predicted."""
    cells = []
    for row in rows:
        speed, peak, why = ("–", "–", "–"), "–", row.get("error")
        if why is None:
            band = f"{count(row['tokens_per_s_per_gpu_low'])} to {count(row['tokens_per_s_per_gpu_high'])}"
            speed = (count(row["tokens_per_s_per_gpu"]), band, f"{row['tflops_per_gpu']:.0f}")
            peak = "–" if row["peak_mem"] is None else f"{row['peak_mem']:.1f}"
            why = ", ".join(row["assumed"])
        cells.append((row["id"], *speed, peak, why))
    columns = ("id", "tokens/s/GPU", "80 % band", "TFLOPS/GPU", "memory", "assumed, or why not")
    return Table(columns=columns, rows=tuple(cells), left=frozenset({columns[0], columns[-1]}))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planner.research", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    every = [
        commands.add_parser("validate", help="predict the published rows, each without its source; takes minutes"),
        commands.add_parser("batch", help="predict every row of a CSV file"),
    ]
    every[1].add_argument("file", type=Path, metavar="FILE")
    for command in every:
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args(arguments)
    try:
        if args.command == "validate":
            rows = published()
            told = validate(rows)
            constant = grouped(by_constant(usable(rows)[0]), lambda row: row.case.source)
            say_json(told) if args.json else say("\n".join(lines(told, constant)))
        else:
            told = {"rows": [predict(row) for row in read_rows(args.file)]}
            say_json(told) if args.json else say(repr(rows_table(told["rows"])))
    except Refused as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
