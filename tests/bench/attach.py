"""`attach`: what `fsdp-lab watch` costs a script that knows nothing of it: hooks, audit, events, and threads that record.

Note: on and off. One process trains one model; by blocks of steps the attachment is on, or its hooks return at once. So both
have the same tensors, and the same process group, whose own cost `metering` tells. A round has several times a block off,
one on, and one off: the ratio is of the blocks on to the mean of the others, the control of these. The pause after a block
counts as its CPU time, in which the last of it is stored. Parts are CPU seconds of the script's thread, and of others."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist, nn

from fsdp_lab.bench.plan import BenchError
from fsdp_lab.bench.results import slowest
from fsdp_lab.cli.bench import say
from fsdp_lab.cli.console import at_least
from fsdp_lab.rank.watch.audit import UpdateAudit
from fsdp_lab.rank.watch.loop import Watch
from fsdp_lab.runs.attach import Attachment, attachment
from fsdp_lab.runs.history.writer import FLUSH_S
from tests.bench.metering import summarize

BLOCK, BLOCKS = 16, 4  # steps, in one of which the audit looks; of a round that are on, so that one step is traced
WARMUP = 128  # steps: the ledger's, and those in which more is looked at and traced
WIDTH, LAYERS, VOCABULARY, TOKENS = 128, 12, 512, 64  # 144 parameters in the layers
CLOCKS: Mapping[str, Callable[[], float]] = {
    "wall": time.perf_counter, "CPU of the process": time.process_time, "CPU of the thread": time.thread_time,
}  # fmt: skip
PARTS = (
    ("hooks", Attachment, "_before_forward", "_after_forward", "_after_update", "_note_loss"),
    ("hooks", Watch, "_begin_backward", "_before_update", "_after_update"),
    ("begin of a step", Attachment, "_begin_step"), ("end of a step", Attachment, "_end_step"),
    ("audit", UpdateAudit, "before", "after", "_judge"),
)  # fmt: skip


def attach(args: argparse.Namespace) -> dict[str, Any]:
    """Raises BenchError."""
    at_least(args, "launches", 2)
    rounds = f"{args.rounds} rounds of {BLOCKS} x (off, on, off) of {BLOCK} steps"
    say(f"{args.ranks} ranks, {args.launches} launches, {rounds}")
    launches = [launched(args.ranks, args.rounds) for _ in range(args.launches)]
    figures: dict[str, Any] = {"environment": {"ranks": args.ranks}, "ratios": {}, "control": {}, "parts_s": {}}
    for clock in CLOCKS:
        by_launch = [slowest([rank["blocks"][clock] for rank in ranks]) for ranks in launches]
        cuts = range(0, 3 * BLOCKS * args.rounds, 3 * BLOCKS)
        rounds = [[[sum(of[cut + i : cut + 3 * BLOCKS : 3]) for i in range(3)] for cut in cuts] for of in by_launch]
        figures["ratios"][clock] = summarize([[2 * on / (before + after) for before, on, after in of] for of in rounds])
        figures["control"][clock] = summarize([[after / before for before, _, after in of] for of in rounds])
        step_s = statistics.median(before / BLOCK / BLOCKS for of in rounds for before, _, _ in of)
        for section, name in (("ratios", "watched/bare"), ("control", "control bare/bare")):
            known = figures[section][clock]
            say(f"{clock}, {name}: mean of launches {known['mean']:.4f}, standard error {known['standard_error']:.4f}")
        say(f"  a bare step: {1e3 * step_s:.1f} ms")
    for name in launches[0][0]["parts"]:
        seconds = [max(rank["parts"][name] for rank in ranks) for ranks in launches]
        figures["parts_s"][name] = mean = statistics.mean(seconds)
        say(f"  {name}: {1e3 * mean:.3f} ms (+- {1e3 * statistics.stdev(seconds):.3f}), {mean / step_s:.2%} of a step")
    return figures


def launched(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """What each rank measured, in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, "-m", "tests.bench.attach", folder, str(rounds)]
        watch = [sys.executable, "-m", "fsdp_lab", "watch", "--history", f"{folder}/history", "--", *command]
        ended = subprocess.run(watch, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        files = sorted(Path(folder).glob("rank-*.json"))
        if ended.returncode or len(files) != ranks or "watched" not in ended.stderr:
            raise BenchError(f"the script ended with code {ended.returncode}: {ended.stderr.strip()[-2000:]}")
        return [json.loads(file.read_text()) for file in files]


# -- in the script -------------------------------------------------------------------------------------------------------
def timed(part: str, function: Callable[..., Any], seconds: dict[str, float]) -> Callable[..., Any]:
    """Adds its CPU seconds to those of a part, without those of parts inside of it."""

    def call(*given: Any, **more: Any) -> Any:
        begin_s, beside_s, seconds["inside"] = time.thread_time(), seconds["inside"], 0.0
        try:
            return function(*given, **more)
        finally:
            own_s = time.thread_time() - begin_s
            seconds[part] = seconds.get(part, 0.0) + own_s - seconds["inside"]
            seconds["inside"] = beside_s + own_s

    return call


def script(folder: str, rounds: int) -> None:
    """A plain loop; only what is between two blocks knows of the attachment."""
    parts: dict[str, float] = {"inside": 0.0}
    for part, holder, *names in PARTS:
        for name in names:
            setattr(holder, name, timed(part, getattr(holder, name), parts))
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    model: Any = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), encoder, nn.Linear(WIDTH, VOCABULARY))
    if several := int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    blocks: dict[str, list[float]] = {name: [] for name in CLOCKS}
    others_s = 0.0  # CPU of other threads: beyond what they take without the attachment
    for at in range(-1, 3 * BLOCKS * rounds):
        if at == 0:
            parts.update(dict.fromkeys(parts, 0.0))
        if (on := at < 0 or at % 3 == 1) != bool(attachment()._thread):
            attachment()._thread = threading.get_ident() if on else 0
            attachment()._begin_step() if on else attachment()._end_step()
        if several:
            dist.barrier()
        begin_s = {name: clock() for name, clock in CLOCKS.items()}
        for _ in range(BLOCK if at >= 0 else WARMUP):
            ids = torch.randint(VOCABULARY, (1, TOKENS))
            nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds = {name: clock() - begin_s[name] for name, clock in CLOCKS.items()}
        time.sleep(1.25 * FLUSH_S)
        seconds["CPU of the process"] = time.process_time() - begin_s["CPU of the process"]
        if at >= 0:
            others_s += (seconds["CPU of the process"] - seconds["CPU of the thread"]) * (1.0 if on else -0.5)
            for name, of in seconds.items():
                blocks[name].append(of)
    told = {**parts, "recorder": others_s}
    means = {name: s / BLOCK / BLOCKS / rounds for name, s in told.items() if name != "inside"}
    Path(folder, f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps({"blocks": blocks, "parts": means}))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    script(sys.argv[1], int(sys.argv[2]))
