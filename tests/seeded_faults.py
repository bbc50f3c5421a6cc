"""Which tests catch which fault: seed known faults into a copy of the tree, one at a time, and run the tests of their area.

    python -m tests.seeded_faults [--only NAME,...] [--tier quick --tier whole] [--tree PATH]

A fault replaces a snippet of the package's source by another one. The snippet must occur exactly once in `fsdp_lab/`, in
whatever file, so a fault survives a move of its file; where it is not found, the command says so and exits with 2, and the
fault must be written anew. The exit code is 1 where the whole tier misses a fault. Times are not part of the report."""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[1]
COPIED = ("fsdp_lab", "tests", "notebooks", "binder", "pyproject.toml", "README.md")
TIERS = {"quick": "not slow and not nightly", "whole": "not nightly"}  # name -> pytest -m
LIMIT_S = 1200


class NotFound(Exception):
    """A snippet is not in the source exactly once."""


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new`; `tests`: the files or folders that are responsible for it."""

    name: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = (
    Fault("missing division", "engine: gradients are summed over ranks and not divided",
          old="        by = ranks if self._rest is None else self._rest if is_last else 1",
          new="        by = 1", tests=("tests/engine/test_parity.py",)),
    Fault("missing all-reduce", "engine: hybrid sharding does not reduce across replicas",
          old="            (has_replicas, self._all_reduce),",
          new="            (self._mesh.shard_group is None, self._all_reduce),",
          tests=("tests/engine/test_parity.py",)),
    Fault("stale shard", "engine: under offload the device's copy of the shard is made once and not again",
          old="        self.device_shard.copy_(self.master, non_blocking=True)",
          new="        if not self.device_shard.any():\n            self.device_shard.copy_(self.master, non_blocking=True)",
          tests=("tests/engine/test_parity.py",)),
    Fault("early optimizer", "engine: a rank writes to shards that others map and still read in a forward",
          old='        self._let_shards_change("end of the forward")', new="        pass",
          tests=("tests/engine/test_mapped_shards.py",)),
    Fault("early word", "wire: a rank says that its bytes are in a GPU's memory before they are",
          old="            if places:\n                self.arena.synchronize()",
          new="            if not places:\n                self.arena.synchronize()",
          tests=("tests/wire/test_gpu_memory.py",)),
    Fault("early acknowledgement", "wire: a rank says that it has read a GPU's memory before it has",
          old="                    self._group.arena.synchronize()",
          new="                    pass",
          tests=("tests/wire/test_gpu_memory.py",)),
    Fault("skipped wait", "engine: a unit computes before its all-gather has landed",
          old="            self._wait()\n            for flat in self.flats:\n                flat.use_unsharded_views()",
          new="            self._handles = []\n            for flat in self.flats:\n"
          "                flat.use_unsharded_views()",
          tests=("tests/engine/test_features.py", "tests/engine/test_parity.py")),
    Fault("shard range off by one", "engine: the optimizer does not see the last element of a rank's part of a region",
          old="        return self._in_shard(self.regions[group], rank, rank * self.shard_numel)",
          new="        start, stop = self._in_shard(self.regions[group], rank, rank * self.shard_numel)\n"
          "        return start, stop - (stop - start > 1)",
          tests=("tests/engine/test_layout.py", "tests/engine/test_parity.py")),
    Fault("swapped reduce dtype", "engine: gradients are reduced in the dtype of the parameters",
          old="reduce_dtype=None if d.reduce == \"fp32\" and param is None else DTYPES[d.reduce]",
          new="reduce_dtype=param", tests=("tests/engine/test_parity.py",)),
    Fault("absence counted", "engine: a parameter without a gradient counts as one that has one, so AdamW decays it",
          old="        if absent and self.chunks.counts:", new="        if absent is None:",
          tests=("tests/engine/scenarios", "tests/engine/test_features.py")),
    Fault("torch's norm of one rank", "engine: the norm of a sharded tensor is that of this rank's range",
          old="            dist.all_reduce(each.pow_(power), op=op, group=group)", new="            each.pow_(power)",
          tests=("tests/engine/scenarios",)),
    Fault("frozen for ever", "engine: requires_grad that is changed after sharding has no effect",
          old="                p.requires_grad_(sharded.requires_grad)\n", new="                pass\n",
          tests=("tests/engine/scenarios",)),
    Fault("overflow of one rank", "engine: GradScaler skips a step on the rank alone that saw an overflow",
          old="        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)", new="        pass",
          tests=("tests/engine/scenarios",)),
    Fault("writes that are lost", "engine: a backward reads parameters as they were gathered before somebody wrote to them",
          old="        return not self.is_view_of_master and self._gathered_version != self.master._version",
          new="        return False", tests=("tests/engine/test_loops.py",)),
    Fault("rate limiter ignored", "schedule: units are gathered ahead however many are gathered already",
          old="        room = self.rules.limit + 1 - counted if self.rules.limit else depth", new="        room = depth",
          tests=("tests/engine/test_schedule.py",)),
    Fault("stale optimizer state", "backends: a switch carries the parameters and not the optimizer's moments",
          old="in ((state.PARAM, names), *((slot, stepped) for slot in self._slots if stepped)):",
          new="in ((state.PARAM, names),):", tests=("tests/backends", "tests/engine/test_parity.py")),
    Fault("mean over the wrong ranks", "rank: the mean loss is taken over the shard group's size",
          old="        mean_loss = vote[0] / self.info.world_size",
          new="        mean_loss = vote[0] / self.spec.shard_factor",
          tests=("tests/rank/test_session.py", "tests/engine/test_parity_session.py")),
    Fault("replicas counted twice", "rank: the squared norm is summed over replicas",
          old="vote[1] / self.backend.replicas)", new="vote[1])",
          tests=("tests/rank/test_session.py", "tests/engine/test_parity_session.py")),
    Fault("checksum leaves one out", "rank: the checksum does not cover the last parameter",
          old="    for shard in backend.param_shards():\n        seed = ",
          new="    for shard in backend.param_shards()[:-1]:\n        seed = ", tests=("tests/rank/test_checksum.py",)),
    Fault("torn checkpoint", "checkpoints: a file that was cut off counts as whole", old="    if length != nbytes:",
          new="    if length == 0:", tests=("tests/rank/test_checkpoint.py", "tests/cli")),
    Fault("order of the sum", "wire: summands are added from the last rank to the first",
          old="    flat, total, last = output.view(-1), summands[0]",
          new="    summands = summands[::-1]\n    flat, total, last = output.view(-1), summands[0]",
          tests=("tests/wire", "tests/engine/test_parity.py")),
    Fault("link shared by none", "wire: collectives in flight do not share the emulated link",
          old="            start_s = max(now_s, *(self._free_s[d] for d in directions))",
          new="            start_s = now_s", tests=("tests/wire", "tests/rank/test_link.py")),
    Fault("exposed twice", "wire: an instant in which two collectives are waited for counts twice",
          old="            apart.append((max(start, covered), end, c))", new="            apart.append((start, end, c))",
          tests=("tests/wire",)),
    Fault("lost step event", "runs: the event store drops the step that comes next in order",
          old="        if step < self.floor or step in self.above:",
          new="        if step <= self.floor and step % 8 == 7 or step < self.floor or step in self.above:",
          tests=("tests/lab/test_timeline.py", "tests/lab/test_lab.py")),
    Fault("parity without checksums", "runs: parameters that differ are taken for equal where losses are",
          old="    if a.checksum is not None and b.checksum is not None and a.checksum != b.checksum:",
          new="    if a.checksum is not None and b.checksum is None:", tests=("tests/lab/test_parity.py",)),
    Fault("history loses an event", "history: the first event after each write is left out",
          old="        new, cursor = self.run.events.since(self._cursor)",
          new="        new, cursor = self.run.events.since(self._cursor + bool(self._cursor))",
          tests=("tests/lab/test_history.py",)),
    Fault("leaked process", "cluster: the guardian leaves the ranks of a kernel that was killed",
          old="    if watch(owner_pid) or handed_over(token, folder):",
          new="    if watch(owner_pid) or handed_over(token, folder) or folder:", tests=("tests/cluster",)),
    Fault("same samples on every rank", "models: ranks read the samples of rank 0",
          old="        first = samples_before + (micro * self._world_size + self._rank) * self._size",
          new="        first = samples_before + (micro * self._world_size) * self._size",
          tests=("tests/models/test_batches.py", "tests/rank/test_session.py")),
    Fault("spec rule dropped", "spec: any shard size is accepted",
          old="    if s.is_hybrid and size is not None and size not in factors:",
          new="    if s.is_hybrid and size is not None and size < 0:", tests=("tests/spec",)),
    Fault("planner forgets state", "planner: the optimizer's state is counted once, whatever the optimizer",
          old="        return sum(u.state for u in self.units) * len(self.optimizer.slots)",
          new="        return sum(u.state for u in self.units)", tests=("tests/planner",)),
    Fault("plot without its last steps", "dashboard: steps that still wait for a rank at the end of a run are not drawn",
          old="        return self._return(assemble(self._open))", new="        return []", tests=("tests/dashboard",)),
    Fault("script that does not average", "export: the script sums the gradients of micro-batches",
          old='{{ "scale" if is_fp16 else "1" }} / ACCUMULATE', new='{{ "scale" if is_fp16 else "1" }} / 1',
          tests=("tests/export",)),
)  # fmt: skip


def sources(tree: Path) -> list[Path]:
    """Files of the package that a fault may be in: code and templates."""
    return sorted(p for p in (tree / "fsdp_lab").rglob("*") if p.suffix in (".py", ".jinja"))


def seed(tree: Path, fault: Fault) -> Path:
    """Write the fault into a tree; returns the file. Raises NotFound."""
    holders = [(p, p.read_text(encoding="utf-8")) for p in sources(tree)]
    counts = [(path, code, code.count(fault.old)) for path, code in holders if fault.old in code]
    if sum(n for *_, n in counts) != 1:
        where = ", ".join(f"{n} in {path.relative_to(tree)}" for path, _, n in counts) or "none"
        raise NotFound(f"{fault.name}: its snippet must occur once, and there are: {where}\n{fault.old}")
    path, code, _ = counts[0]
    path.write_text(code.replace(fault.old, fault.new), encoding="utf-8")
    return path


def copy(tree: Path, to: Path) -> None:
    for name in COPIED:
        source = tree / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
        elif source.exists():
            shutil.copy(source, to / name)


def caught_by(tree: Path, tests: Sequence[str], marks: str) -> str:
    """The first test that fails, or why none could; "" where all pass."""
    there = [name for name in tests if (tree / name).exists()]
    if not there:
        return "(no such tests)"
    command = [sys.executable, "-m", "pytest", *there, "-x", "-q", "-o", "addopts=-ra --strict-markers",
               "-m", marks]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"(not over in {LIMIT_S} s)"
    if done.returncode == 0:
        return ""
    found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != 1 or not found:
        return f"(pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]})"
    return str(found[0])


def table(tree: Path, faults: Sequence[Fault], tiers: Sequence[str]) -> Iterator[tuple[Fault, dict[str, str]]]:
    """For each fault the test that catches it, by tier; in the whole tier that of the quick one, where there is one."""
    for fault in faults:
        with tempfile.TemporaryDirectory(prefix="fsdp_lab_fault_") as folder:
            copy(tree, Path(folder))
            seed(Path(folder), fault)
            found: dict[str, str] = {}
            for tier in tiers:
                found[tier] = found.get("quick") or caught_by(Path(folder), fault.tests, TIERS[tier])
            for process in psutil.process_iter():  # that a fault kept alive: those of `caught_by`, by their environment
                with contextlib.suppress(psutil.Error):
                    if process.environ().get("PYTHONPATH") == folder:
                        process.kill()
            yield fault, found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seeded_faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", help="names of faults, with commas")
    parser.add_argument("--tier", action="append", choices=list(TIERS), help="default: quick, then whole")
    parser.add_argument("--tree", type=Path, default=REPO, help="another tree, with its own tests")
    given = parser.parse_args(arguments)
    wanted = given.only.split(",") if given.only else [f.name for f in FAULTS]
    if unknown := set(wanted) - {f.name for f in FAULTS}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    tiers = given.tier or list(TIERS)
    missed = 0
    try:
        for fault, found in table(given.tree.resolve(), [f for f in FAULTS if f.name in wanted], tiers):
            print(f"{fault.name}\n    {fault.what}")
            for tier, test in found.items():
                print(f"    {tier}: {test or 'NOT CAUGHT'}", flush=True)
            missed += not found[tiers[-1]] or found[tiers[-1]].startswith("(")
    except NotFound as e:
        print(e, file=sys.stderr)
        return 2
    print(f"{len(wanted)} faults, {len(wanted) - missed} caught, {missed} not")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
