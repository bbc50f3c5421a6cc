"""`attach`: what `fsdp-lab watch` costs a script that knows nothing of it: hooks, audit, events, and the thread that records.

Note: on and off. One process trains one model; by blocks of steps the attachment is on, or its hooks return at once. So both
have the same tensors, and the same process group, whose own cost `metering` tells. A round is a block off, one on, and one
off: the ratio is of the one to the mean of the others, the control of the others. A block has each kind of step in the
same number; while it is on, the pause after it counts as its CPU time, in which the last of it is stored.

Note: clocks. Wall seconds tell all; the CPU seconds of the process are less disturbed by other programs, and have what its
threads do. Parts are CPU seconds of the thread."""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_lab.bench.plan import BenchError
from fsdp_lab.cli.bench import say
from fsdp_lab.cli.console import Refused, at_least, signals_raise
from tests.bench.metering import summarize

BLOCK = 16  # steps: one is traced, and the audit looks at four
WARMUP = 32  # steps: the ledger's, and those in which the audit looks at all parameters
SIZE = {"width": 128, "layers": 12, "vocabulary": 512, "tokens": 64}  # 144 parameters in the layers
CLOCKS: Mapping[str, Callable[[], float]] = {
    "wall": time.perf_counter, "CPU of the process": time.process_time, "CPU of the thread": time.thread_time,
}  # fmt: skip
OF_ATTACHMENT = ("_before_forward", "_after_forward", "_before_update", "_after_update", "_note_loss", "_next_step")
OF_WATCH = ("before_forward", "after_forward", "_begin_backward", "_before_update", "_after_update", "rest")


def attach(args: argparse.Namespace) -> dict[str, Any]:
    """Raises BenchError. Returns {number of ranks: its figures, "environment"}."""
    at_least(args, "launches", 2)
    at_least(args, "rounds", 1)
    if not set(counts := args.ranks.split(",")) <= {"1", "2", "4"}:
        raise Refused(f"--ranks {args.ranks} is refused; give some of 1,2,4")
    figures: dict[str, Any] = {"environment": {**SIZE, "block": BLOCK, "micro_batch": args.micro_batch}}
    for ranks in map(int, counts):
        say(f"{ranks} rank{'s' * (ranks > 1)}, {args.launches} launches of {args.rounds} rounds of 3 blocks of {BLOCK} steps")
        figures[str(ranks)] = told([launched(ranks, args) for _ in range(args.launches)])
    return figures


def launched(ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank measured, in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        script = ["-m", "tests.bench.attach", folder, str(args.rounds), str(args.micro_batch)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [sys.executable, *(torchrun if ranks > 1 else ()), *script]
        watch = [sys.executable, "-m", "fsdp_lab", "watch", "--history", f"{folder}/history", "--", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(watch, env=environment, capture_output=True, text=True)
        files = sorted(Path(folder).glob("rank-*.json"))
        if ended.returncode or len(files) != ranks or "watched" not in ended.stderr:
            raise BenchError(f"the script ended with code {ended.returncode}: {ended.stderr.strip()[-2000:]}")
        return [json.loads(file.read_text()) for file in files]


def told(launches: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Prints what the launches say; of the slowest rank, round by round."""
    figures: dict[str, Any] = {"ratios": {}, "control": {}, "parts_s": {}}
    for clock in CLOCKS:
        costs, controls, steps_s = [], [], []
        for ranks in launches:
            blocks = [max(seconds) for seconds in zip(*(rank["blocks"][clock] for rank in ranks), strict=True)]
            rounds = [blocks[at : at + 3] for at in range(0, len(blocks), 3)]
            costs.append([2 * on / (before + after) for before, on, after in rounds])
            controls.append([after / before for before, _, after in rounds])
            steps_s += [before / BLOCK for before, _, _ in rounds]
        for section, name, of in (("ratios", "watched/bare", costs), ("control", "control bare/bare", controls)):
            figures[section][clock] = known = summarize(of)
            error = f"mean of launches {known['mean']:.4f}, standard error {known['standard_error']:.4f}"
            say(f"{clock}, {name}: {error}; all rounds {known['median']:.4f}, p10 {known['p10']:.4f}, p90 {known['p90']:.4f}")
        figures.setdefault("step_s", statistics.median(steps_s))
    for name in launches[0][0]["parts"]:
        seconds = [max(rank["parts"][name] for rank in ranks) for ranks in launches]
        figures["parts_s"][name] = {"mean": statistics.mean(seconds), "stdev": statistics.stdev(seconds)}
        share = statistics.mean(seconds) / figures["step_s"]
        say(f"  {name}: {1e3 * statistics.mean(seconds):.3f} ms (+- {1e3 * statistics.stdev(seconds):.3f}), {share:.2%} of a step")
    say(f"  a bare step: {1e3 * figures['step_s']:.1f} ms")
    return figures


# -- in the script -------------------------------------------------------------------------------------------------------
class PartTimes:
    """Seconds of each part, without those of a part inside of it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._part, self._since_s = "", 0.0

    def timed(self, part: str, holder: Any, names: Sequence[str]) -> None:
        for name in names:
            setattr(holder, name, self._timing(part, getattr(holder, name)))

    def _timing(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*given: Any, **more: Any) -> Any:
            outer = self._part
            self._enter(part)
            try:
                return function(*given, **more)
            finally:
                self._enter(outer)

        return call

    def _enter(self, part: str) -> None:
        now_s = time.thread_time()
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now_s - self._since_s
        self._part, self._since_s = part, now_s


def script(folder: str, rounds: int, micro_batch: int) -> None:
    """A plain loop; only `switch` and the clocks know of the attachment."""
    import torch
    from torch import distributed as dist, nn

    from fsdp_lab.rank.watch.loop import Watch
    from fsdp_lab.runs.attach import Attachment, attachment
    from fsdp_lab.runs.history.writer import FLUSH_S

    times, is_on = PartTimes(), True
    times.timed("hooks", Attachment, OF_ATTACHMENT)
    times.timed("hooks", Watch, OF_WATCH)
    times.timed("begin of a step", Attachment, ["_begin_step"])
    times.timed("end of a step", Attachment, ["_end_step"])
    times.timed("audit", Watch, ["_audited"])
    width, tokens = SIZE["width"], SIZE["tokens"]
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, SIZE["layers"], enable_nested_tensor=False)
    model: Any = nn.Sequential(nn.Embedding(SIZE["vocabulary"], width), encoder, nn.Linear(width, SIZE["vocabulary"]))
    if several := int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(SIZE["vocabulary"], (micro_batch, tokens))

    def train(steps: int) -> None:
        for _ in range(steps):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def switch(on: bool) -> None:
        nonlocal is_on
        if on != is_on:
            attached, is_on = attachment(), on
            attached._thread = threading.get_ident() if on else 0
            attached._begin_step() if on else attached._end_step()

    train(WARMUP)
    blocks: dict[str, list[float]] = {name: [] for name in CLOCKS}
    background_s = {True: 0.0, False: 0.0}
    times.seconds.clear()
    for at in range(3 * rounds):
        switch(on := at % 3 == 1)
        if several:
            dist.barrier()
        begin_s = [clock() for clock in CLOCKS.values()]
        train(BLOCK)
        seconds = {name: clock() - s for s, (name, clock) in zip(begin_s, CLOCKS.items(), strict=True)}
        time.sleep(1.25 * FLUSH_S)
        seconds["CPU of the process"] = time.process_time() - begin_s[1]
        background_s[on] += seconds["CPU of the process"] - seconds["CPU of the thread"]
        for name, of in seconds.items():
            blocks[name].append(of)
    own = {name: s / BLOCK / rounds for name, s in times.seconds.items() if name}
    own["recorder and other threads, CPU"] = (background_s[True] - background_s[False] / 2) / BLOCK / rounds
    told_of = {"blocks": blocks, "parts": own}
    Path(folder, f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(told_of))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    with signals_raise():
        script(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
