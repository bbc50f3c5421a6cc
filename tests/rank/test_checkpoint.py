"""A training that was saved goes on bit for bit, under any backend and any number of ranks; what is torn is said to be."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from fsdp_lab.backends.state import Chunk, snapshot
from fsdp_lab.base.errors import ArgumentError
from fsdp_lab.rank import checkpointing
from fsdp_lab.rank.checkpointing import read_shards, write_shard
from fsdp_lab.spec.checkpoint_format import (
    MANIFEST,
    PARTIAL,
    Checkpoint,
    begin,
    checkpoints,
    find,
    finish,
    incomplete_checkpoints,
    prune,
)
from fsdp_lab.spec.spec import Spec
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, apply, call, fails, play, session, spec, train

IMAGES: dict[str, Any] = {"model": "resnet-1m", "data": "images"}
KINDS: list[dict[str, Any]] = [
    {},
    {"precision": "fp16", "offload": "all", "optimizer": "ASGD", "optimizer_args": {"t0": 2}},
    {"backend": "fsdp2", "offload": "all", "optimizer": "NAdam"},
    {"backend": "fsdp1", "precision": "bf16"},
    DDP,
    {"optimizer": "sgd", "sharding": "zero1", "optimizer_args": {"momentum": 0.9}},
    {"optimizer_args": {"fused": True, "amsgrad": True}},
    IMAGES,
]


def _ended(s: Any, before: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What came of the newest save, on rank 0; `before`: what a chunk of steps has told already."""
    told = s.saves(30.0)
    assert not told["under_way"]
    ended = [*before, *told["ended"]]
    return dict(ended[-1]) if ended else {}


def _undisturbed(place: Place, plan: list[dict[str, Any]], root: str) -> list[Any]:
    """Each saved after the fourth step, while it goes on to the eighth."""
    s, told = session(place), []
    for i, given in enumerate(plan):
        s.apply(f"run{i}", given, fresh=True)
        s.train(4)
        torch.rand(place.rank + 1)  # user code draws on its rank
        saved = s.save(root)
        drawn = torch.rand(3).tolist()
        assert saved["step"] == 4 and saved["seconds"] > 0 and saved["bytes"] > 0
        chunk = s.train(4, checks=[7])
        told.append((chunk["events"], drawn, _ended(s, chunk["saves"])))
    s.close()
    return told


def _resumed(place: Place, plan: list[tuple[dict[str, Any], str]]) -> list[Any]:
    s, told = session(place), []
    for given, path in plan:
        torch.manual_seed(0)
        back = s.restore("again", given, path)
        drawn = torch.rand(3).tolist()
        told.append((back, s.train(4, checks=[7])["events"], drawn))
    s.close()
    return told


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, root: Path) -> list[Any]:
    """By rank, then by kind."""
    return pool.run(_undisturbed, 2, [spec(**changes).to_dict() for changes in KINDS], str(root), reduction=None)


def resumed(pool: Pool, plan: Sequence[tuple[dict[str, Any], str]]) -> list[Any]:
    """By rank, then by entry: changes of a Spec, and a checkpoint."""
    return pool.run(_resumed, 2, [(spec(**changes).to_dict(), path) for changes, path in plan], reduction=None)


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a["step"], a["samples"]) == (b["step"], b["samples"])
        assert (a["loss"], a["grad_norm"], a["checksum"]) == (b["loss"], b["grad_norm"], b["checksum"])


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(pool: Pool, undisturbed: list[Any]) -> None:
    saved = [ended["path"] for _, _, ended in undisturbed[0]]
    again = resumed(pool, list(zip(KINDS, saved, strict=True)))
    for kind in range(len(KINDS)):
        for rank in range(2):
            events, drawn, ended = undisturbed[rank][kind]
            back, resumed_events, redrawn = again[rank][kind]
            assert back["step"] == 4 and back["carried"] and drawn == redrawn
            _same(events, resumed_events)
            assert events[-1]["checksum"] is not None
            assert bool(ended) == (rank == 0), "rank 0 makes it a checkpoint, and says so"
        assert undisturbed[0][kind][2]["error"] == ""
    assert undisturbed[0][0][1] != undisturbed[1][0][1], "each rank has random numbers of its own"


@pytest.mark.slow
def test_it_goes_on_with_other_arguments_of_the_optimizer(pool: Pool, undisturbed: list[Any]) -> None:
    """What both keep is restored; what one keeps alone begins as new, or is left out."""
    plain, momentum, fused = (undisturbed[0][i][2]["path"] for i in (0, 5, 6))
    plan = [({"optimizer_args": {"fused": True, "amsgrad": True}}, plain), ({}, fused),
            ({"optimizer": "sgd", "optimizer_args": {}}, momentum)]  # fmt: skip
    for rank, told in enumerate(resumed(pool, plan)):
        for kind, (_, events, _) in zip((0, 6, 5), told, strict=True):
            before, _, _ = undisturbed[rank][kind]
            assert events[0]["loss"] == before[0]["loss"], "the parameters are the saved ones"
            if kind != 5:
                assert [e["loss"] for e in events] == pytest.approx([e["loss"] for e in before], rel=1e-4)
            assert [e["loss"] for e in events] != [e["loss"] for e in before]


def passed_on(pool: Pool, path: str, root: Path, given: Sequence[Spec]) -> str:
    """A checkpoint that came from this one by restoring and saving under each Spec, without a step between."""
    for one in given:
        restore, save = call("restore", "passed on", one.to_dict(), path), call("save", str(root))
        told = play(pool, one.world_size, restore, save, call("saves", 30.0))
        path = told[0][2]["ended"][-1]["path"]
    return path


@pytest.mark.slow
def test_through_other_backends_and_other_numbers_of_ranks_no_bit_is_lost(
    pool: Pool, undisturbed: list[Any], tmp_path: Path
) -> None:
    way = [spec(3, backend="fsdp2"), spec(1, **DDP), spec(4, sharding="hybrid_shard", shard_size=2)]
    path = passed_on(pool, undisturbed[0][0][2]["path"], tmp_path, way)
    again = resumed(pool, [({"backend": "fsdp1"}, path)])
    sums = [0, 0]  # of both ranks: which of them holds what is another backend's choice
    for rank in range(2):
        events, (back, resumed_events, _) = undisturbed[rank][0][0], again[rank][0]
        for one, other in zip(events, resumed_events, strict=True):
            assert (one["step"], one["samples"], one["loss"]) == (other["step"], other["samples"], other["loss"])
        sums = [sums[0] + events[-1]["checksum"], sums[1] + resumed_events[-1]["checksum"]]
        assert any("random numbers" in note for note in back["notes"])
    assert sums[0] % 2**64 == sums[1] % 2**64


@pytest.mark.slow
def test_statistics_of_a_batchnorm_come_through_every_backend(
    pool: Pool, undisturbed: list[Any], tmp_path: Path
) -> None:
    """Each rank has its own, and each wrapper another name for them."""
    kind = KINDS.index(IMAGES)
    others: list[dict[str, Any]] = [DDP, {"backend": "fsdp1"}, {"backend": "fsdp2", "recompute": "full"}]
    way = [spec(**IMAGES, **changes) for changes in others]
    again = resumed(pool, [(IMAGES, passed_on(pool, undisturbed[0][kind][2]["path"], tmp_path, way))])
    for rank in range(2):
        _same(undisturbed[rank][kind][0], again[rank][0][1])


def test_every_element_is_written_once_and_nothing_is_pickled(undisturbed: list[Any]) -> None:
    for kind, changes in enumerate(KINDS):
        _written_once(undisturbed, kind, changes)
    one, other = find(undisturbed[0][KINDS.index(DDP)][2]["path"]).manifest["files"].values()
    assert abs(one - other) < 0.01 * one, "replicas write together"


def _written_once(undisturbed: list[Any], kind: int, changes: dict[str, Any]) -> None:
    saved = find(undisturbed[0][kind][2]["path"])
    found: dict[str, list[tuple[int, int]]] = {}
    for name in saved.manifest["files"]:
        with safe_open(saved.path / name, framework="pt") as f:
            offsets = json.loads(f.metadata()["DCP_SHARDING_INFO"])
            for key in f.keys():  # noqa: SIM118
                start = offsets[key]["saved_offsets"][0]
                found.setdefault(key, []).append((start, start + f.get_slice(key).get_shape()[0]))
    for name, shape in saved.manifest["parameters"].items():
        for slot in ("parameter", *(f"optimizer.{s}" for s in saved.manifest["optimizer"]["slots"])):
            parts = sorted(found.pop(f"{slot}.{name}"))
            assert parts[0][0] == 0 and parts[-1][1] == torch.Size(shape).numel()
            assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert {key.split(".")[0] for key in found} <= {"buffer", "random"}
    assert sorted(p.name for p in saved.path.iterdir()) == sorted([MANIFEST, *saved.manifest["files"]])
    assert saved.spec == spec(**changes) and saved.run == f"run{kind}"


# -- what goes wrong --------------------------------------------------------------------------------------------------


def _disk_full(place: Place, given: dict[str, Any], root: str) -> tuple[Any, Any, list[Any]]:
    s = session(place)
    s.apply("run", given)
    s.train(1)
    full = OSError(28, "No space left on device")
    with mock.patch.object(checkpointing, "write_shard", side_effect=full) if place.rank == 1 else nullcontext():
        s.save(root)
        failed = _ended(s)
    events = s.train(1)["events"]
    s.save(root)
    well = _ended(s)
    s.close()
    return failed, well, events


def test_a_full_disk_is_said_and_training_goes_on(pool: Pool, tmp_path: Path) -> None:
    failed, well, events = pool.run(_disk_full, 2, spec().to_dict(), str(tmp_path), reduction=None)[0]
    assert failed["error"] == "rank 1: No space left on device" and failed["path"] is None
    assert [e["step"] for e in events] == [1]
    assert [str(c.path) for c in checkpoints(tmp_path)] == [well["path"]] and not incomplete_checkpoints(tmp_path)


def test_what_cannot_be_resumed_is_refused_on_all_ranks_alike(
    pool: Pool, undisturbed: list[Any], tmp_path: Path
) -> None:
    good = Path(undisturbed[0][0][2]["path"])
    cut = shutil.copytree(good, tmp_path / good.name)
    file = next(cut.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size // 2)
    refused = [(spec(), cut), (spec(seed=9), good), (spec(), tmp_path / "no")]
    calls = [fails(call("restore", "run", given.to_dict(), str(path))) for given, path in refused]
    save = fails(call("save", f"{tmp_path}/nothing/not/there"))
    one, other = play(pool, 2, *calls, apply(spec()), save, train(1))
    for damaged, another, missing, _, unwritten, after in (one, other):
        assert "is damaged" in damaged and good.name in damaged
        assert "of another training" in another and "no such folder" in missing
        assert "no checkpoint can be written to" in unwritten and len(after["events"]) == 1


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda p: (p / MANIFEST).unlink(), f"has no {MANIFEST}"),
        (lambda p: (p / MANIFEST).write_text("{"), "cannot be read"),
        (lambda p: (p / MANIFEST).write_text('{"format": 99}'), "has format 99"),
        (lambda p: next(p.glob("*.safetensors")).unlink(), "lacks its file"),
        (lambda p: _rename(p, "../../etc/passwd"), "does not lie in it"),
        (lambda p: p.rename(p.with_name(p.name + PARTIAL)), "was never finished"),
    ],
)
def test_what_is_torn_is_recognised_and_the_last_good_one_is_found(
    undisturbed: list[Any], tmp_path: Path, harm: Any, said: str
) -> None:
    older, newer = (Path(undisturbed[0][kind][2]["path"]) for kind in (0, 1))
    good, broken = (shutil.copytree(p, tmp_path / p.name) for p in (older, newer))
    harm(broken)
    assert [t.path.name.removesuffix(PARTIAL) for t in incomplete_checkpoints(tmp_path)] == [broken.name]
    assert said in incomplete_checkpoints(tmp_path)[0].reason
    assert find(tmp_path).path == good
    shutil.rmtree(good)
    with pytest.raises(ArgumentError, match=broken.name):
        find(tmp_path)


def _rename(path: Path, name: str) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][name] = 1
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_the_newest_few_are_kept_and_the_best(undisturbed: list[Any], tmp_path: Path) -> None:
    source = Path(undisturbed[0][0][2]["path"])

    def add(number: int, kind: str, run: str = "run") -> Checkpoint:
        path = shutil.copytree(source, tmp_path / f"step-{number:08d}-00000{number}")
        manifest = json.loads((path / MANIFEST).read_text())
        manifest.update(kind=kind, run=run, saved_unix_s=float(number))
        (path / MANIFEST).write_text(json.dumps(manifest))
        return find(path)

    made = [add(1, "step"), add(2, "best"), add(3, "step"), add(4, "step", run="other"), add(5, "best"), add(6, "last")]
    assert prune(tmp_path, "run", last=2) == [made[1].path, made[0].path]
    assert [c.path for c in checkpoints(tmp_path)] == [made[i].path for i in (2, 3, 4, 5)]
    assert not incomplete_checkpoints(tmp_path)


def _killed_at_many_moments(place: Place, root: str, seed: int) -> list[tuple[int, int, bool]]:
    """A process that writes one checkpoint after another, killed; and again. What a look finds after each."""
    chance, told = random.Random(seed), []
    chunks = [Chunk(name=f"parameter.p{i}", start=0, values=torch.full((20_000,), float(i))) for i in range(12)]
    state = {"run": "run", "spec": spec().to_dict(), "samples": 0, "optimizer": {"slots": [], "steps": 0}, "writers": [0],
             "modules": {}}  # fmt: skip
    folder, number = Path(root), 0
    for _ in range(40):
        number += 100
        writer = os.fork()
        if writer == 0:
            try:
                for step in range(number, number + 100):
                    partial = begin(folder, step)
                    file, nbytes = write_shard(partial, 0, chunks)
                    finish(partial, [{"file": file, "bytes": nbytes, "state": {**state, "step": step}}], kind="step")
                    prune(folder, "run", last=3)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        whole = checkpoints(folder)
        good = True
        for saved in whole[-1:]:
            back = [Chunk(name=c.name, start=0, values=torch.empty_like(c.values)) for c in chunks]
            read_shards(saved.path, back, optional=())
            good = all(torch.equal(a.values, b.values) for a, b in zip(chunks, back, strict=True))
        told.append((whole[-1].step if whole else -1, len(incomplete_checkpoints(folder)), good))
    return told


@pytest.mark.slow
def test_killed_at_any_moment_the_last_good_one_is_usable_and_torn_ones_are_named(pool: Pool, tmp_path: Path) -> None:
    (told,) = pool.run(_killed_at_many_moments, 1, str(tmp_path), 5, reduction=None)
    steps = [step for step, _, _ in told]
    assert steps == sorted(steps) and steps[-1] >= 100, "what was whole stays"
    assert all(good for _, _, good in told)
    assert told[-1][1] > 0, "some were killed in the middle of one"
    assert all(t.reason and t.path.name in t.reason for t in incomplete_checkpoints(tmp_path))
    assert find(tmp_path).step == steps[-1]


# -- what is left when ranks are gone ---------------------------------------------------------------------------------


def _layouts(place: Place, given: dict[str, Any], writers: list[list[int]]) -> list[Any]:
    """For each set of writers, the elements of parameters that this rank would write; None: there are not all."""
    told: list[Any] = []
    with closing(session(place)) as s:
        s.apply("run", given)
        s.train(1)
        for among in writers:
            told.append(None)
            if place.rank not in among:
                continue
            with suppress(LookupError):
                held = snapshot(s._lifecycle.require().backend, s._checkpointer._layouts, place.rank, among)
                told[-1] = sum(c.values.numel() for c in held if c.name.startswith("parameter."))
    return told


HYBRID = {"sharding": "hybrid_shard", "shard_size": 2}


@pytest.mark.parametrize(
    ("changes", "covered", "lost"),
    [(HYBRID, [[0, 1], [1, 2]], [[0, 2]]), (DDP, [[3]], []), ({"backend": "fsdp2"}, [], [[0, 1, 2]])],
    ids=["hybrid", "ddp", "fsdp2"],
)
def test_survivors_hold_all_of_it_or_say_that_they_do_not(
    pool: Pool, changes: dict[str, Any], covered: list[list[int]], lost: list[list[int]]
) -> None:
    every = [0, 1, 2, 3]
    told = pool.run(_layouts, 4, spec(4, **changes).to_dict(), [every, *covered, *lost], reduction=None)
    whole = sum(held[0] for held in told)
    for i, alive in enumerate(covered, start=1):
        assert sum(told[rank][i] for rank in alive) == whole
    for i, alive in enumerate(lost, start=1 + len(covered)):
        assert [told[rank][i] for rank in alive] == [None] * len(alive)


def _lost_part(place: Place, root: str) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    """Rank 1 writes its file, and rank 0 never hears of it; the next save is whole."""
    s = session(place)
    s.apply("run", spec().to_dict())
    s._checkpointer._part_s = 0.5
    store = s._checkpointer._store
    if place.rank == 1:
        s._checkpointer._store = mock.Mock()
    s.save(root)
    chunk = s.train(2)
    lost = _ended(s, chunk["saves"])
    s._checkpointer._store = store
    s.save(root)
    whole = _ended(s)
    s.close()
    return [e["step"] for e in chunk["events"]], lost, whole


def test_a_part_that_never_comes_ends_the_writer_in_its_time(pool: Pool, tmp_path: Path) -> None:
    (steps, lost, whole), (others, *_) = pool.run(_lost_part, 2, str(tmp_path), reduction=None)
    assert steps == others == [0, 1], "training went on"
    assert lost["path"] is None and lost["seconds"] > 0.5
    assert lost["error"].startswith("rank 1 did not report its file within 0.5 s")
    assert whole["error"] == "" and [c.step for c in checkpoints(tmp_path)] == [2]
    assert not incomplete_checkpoints(tmp_path)


def _busy_disk(place: Place, root: str) -> tuple[str, list[int], str]:
    """Rank 1 is still at its file when another checkpoint is due."""
    s, goes_on, write = session(place), threading.Event(), checkpointing._written
    s.apply("run", spec().to_dict())
    s._checkpointer._earlier_s = 0.5

    def written(*args: Any) -> Any:
        if place.rank == 1:
            goes_on.wait(60)
        return write(*args)

    with mock.patch.object(checkpointing, "_written", written):
        s.save(root)
        try:
            s.save(root)
            said = ""
        except ArgumentError as e:
            said = str(e)
        chunk = s.train(2)
        goes_on.set()
        first = _ended(s, chunk["saves"])
        s._checkpointer._earlier_s = 30.0
        s.save(root)
        second = _ended(s)
    s.close()
    return said, [e["step"] for e in chunk["events"]], f"{first.get('error')}{second.get('error')}"


def test_a_save_does_not_wait_for_ever_for_the_one_before(pool: Pool, tmp_path: Path) -> None:
    (said, steps, errors), (too, others, _) = pool.run(_busy_disk, 2, str(tmp_path), reduction=None)
    assert said == too and "save: rank 1 did not finish writing the checkpoint before this one in 0.5 s" in said
    assert steps == others == [0, 1] and errors == ""
    assert [c.step for c in checkpoints(tmp_path)] == [0, 2]
