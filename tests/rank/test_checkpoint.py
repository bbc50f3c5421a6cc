"""A training that was saved or suspended goes on bit for bit, under any backend and any number of ranks; what is torn is
said to be."""

import itertools
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
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
from fsdp_lab.spec import checkpoint_format
from fsdp_lab.spec.checkpoint_format import MANIFEST, PARTIAL, checkpoints, find, finish, incomplete_checkpoints, prune
from fsdp_lab.spec.spec import Spec
from tests.pool import Place, Pool
from tests.rank.test_generation import RESNET
from tests.rank.test_session import COSINE, DDP, apply, call, fails, play, running, session, spec, train

IMAGES: dict[str, Any] = {**DDP, "model": RESNET, "data": "images"}
HYBRID = {"sharding": "hybrid_shard", "shard_size": 2}
PLAIN = {"dropout": "config", **COSINE}  # masks and rates are those of the steps that follow
KINDS: list[dict[str, Any]] = [
    PLAIN, {"precision": "fp16", "offload": "all", "optimizer": "ASGD", "optimizer_args": {"t0": 1}},
    {"backend": "fsdp2", "offload": "all", "optimizer": "NAdam"}, {"backend": "fsdp1", "precision": "bf16"},
    {"optimizer": "sgd", "sharding": "zero1", "optimizer_args": {"momentum": 0.9}},
    {"optimizer_args": {"fused": True, "amsgrad": True}}, IMAGES,
]  # fmt: skip


def _ended(s: Any, before: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What came of the newest save, on rank 0; `before`: what a chunk of steps has told already."""
    told = s.saves(30.0)
    assert not told["under_way"]
    ended = [*before, *told["ended"]]
    return dict(ended[-1]) if ended else {}


def _undisturbed(place: Place, plan: list[dict[str, Any]], root: str) -> list[Any]:
    """Each saved after the second step, while it goes on to the fourth."""
    s, told = session(place), []
    for i, given in enumerate(plan):
        s.apply(f"run{i}", given, fresh=True)
        s.train(2)
        torch.rand(place.rank + 1)  # user code draws on its rank
        saved = s.save(root)
        drawn = torch.rand(3).tolist()
        assert saved["step"] == 2 and saved["seconds"] > 0 and saved["bytes"] > 0
        chunk = s.train(2, checks=[3])
        told.append((chunk["events"], drawn, _ended(s, chunk["saves"])))
    s.close()
    return told


def _resumed(place: Place, plan: list[tuple[dict[str, Any], str]]) -> list[Any]:
    """Each is suspended once more before it goes on: all of them are in memory then."""
    s, told = session(place), list[Any]()
    for i, (given, path) in enumerate(plan):
        torch.manual_seed(0)
        back = s.restore(f"again {i}", given, path)
        told.append((back, torch.rand(3).tolist()))
        assert s.suspend()["suspended_bytes"] > 0
    for i, (back, drawn) in enumerate(told):
        assert s.resume(f"again {i}") == {"step": 2}
        told[i] = back, s.train(2, checks=[3])["events"], drawn
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


OF_A_STEP = ("step", "samples", "lr", "loss", "grad_norm", "checksum")


def _same(one: list[dict[str, Any]], other: list[dict[str, Any]], names: Sequence[str] = OF_A_STEP) -> None:
    for a, b in zip(one, other, strict=True):
        assert [a[name] for name in names] == [b[name] for name in names]


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit(pool: Pool, undisturbed: list[Any]) -> None:
    again = resumed(pool, list(zip(KINDS, [ended["path"] for _, _, ended in undisturbed[0]], strict=True)))
    for kind in range(len(KINDS)):
        for rank in range(2):
            events, drawn, ended = undisturbed[rank][kind]
            back, resumed_events, redrawn = again[rank][kind]
            assert back["step"] == 2 and back["carried"] and drawn == redrawn
            _same(events, resumed_events)
            assert events[-1]["checksum"] is not None
            assert [e["first_after_switch"] for e in resumed_events] == [True, False]
            assert not any(e["ledger"] for e in resumed_events), "it was not long enough for one"
            assert bool(ended) == (rank == 0), "rank 0 makes it a checkpoint, and says so"
        assert undisturbed[0][kind][2]["error"] == ""
    assert undisturbed[0][0][1] != undisturbed[1][0][1], "each rank has random numbers of its own"


@pytest.mark.slow
def test_it_goes_on_with_other_arguments_of_the_optimizer(pool: Pool, undisturbed: list[Any]) -> None:
    """What both keep is restored; what one keeps alone begins as new, or is left out."""
    plain, momentum, fused = (undisturbed[0][i][2]["path"] for i in (0, 4, 5))
    plan = [({**PLAIN, "optimizer_args": {"fused": True, "amsgrad": True}}, plain), ({}, fused),
            ({"optimizer": "sgd", "optimizer_args": {}}, momentum)]  # fmt: skip
    for rank, told in enumerate(resumed(pool, plan)):
        for kind, (_, events, _) in zip((0, 5, 4), told, strict=True):
            before, _, _ = undisturbed[rank][kind]
            assert events[0]["loss"] == before[0]["loss"], "the parameters are the saved ones"
            alike = [e["loss"] for e in events] == pytest.approx([e["loss"] for e in before], rel=1e-4)
            assert alike == (kind != 4), "the momentum is left out"


@pytest.mark.slow
def test_a_resume_with_other_patterns_is_as_a_switch(pool: Pool, tmp_path: Path) -> None:
    """Of each Spec, two steps; saved, and taken out of memory and back, before the change."""
    early, all_but_biases = (spec(freeze=patterns, backend="fsdp1") for patterns in (["transformer.w?e.*"], ["*.bias"]))
    calls = (apply(early), train(2), call("save", str(tmp_path)), call("saves", 30.0), call("suspend"),
             call("resume", "run"), apply(all_but_biases), train(2, checks=[3]))  # fmt: skip
    switched = play(pool, 2, *calls, reduction="rank_ordered")
    again = call("restore", "again", all_but_biases.to_dict(), str(tmp_path))
    resumed = play(pool, 2, again, train(2, checks=[3]), reduction="rank_ordered")
    for one, other in zip(switched, resumed, strict=True):
        _same(one[-1]["events"], other[-1]["events"], ("mean_loss", "checksum"))


def passed_on(pool: Pool, path: str, root: Path, given: Sequence[Spec]) -> str:
    """A checkpoint that came from this one by restoring and saving under each Spec, without a step between."""
    root.mkdir()
    for one in given:
        restore, save = call("restore", "passed on", one.to_dict(), path), call("save", str(root))
        path = play(pool, one.world_size, restore, save, call("saves", 30.0))[0][2]["ended"][-1]["path"]
    return path


@pytest.mark.slow
def test_through_other_backends_and_other_numbers_of_ranks_no_bit_is_lost(
    pool: Pool, undisturbed: list[Any], tmp_path: Path
) -> None:
    """Nor of a batchnorm's statistics, which are each rank's own, and have another name under each wrapper."""
    way = [spec(3, backend="fsdp2", **PLAIN), spec(1, **DDP, **PLAIN), spec(4, **HYBRID, **PLAIN)]
    path = passed_on(pool, undisturbed[0][0][2]["path"], tmp_path / "plain", way)
    kind = KINDS.index(IMAGES)
    others: list[dict[str, Any]] = [{"backend": "lab"}, {"backend": "fsdp1"}, {"backend": "fsdp2", "recompute": "full"}]
    way = [spec(**{**IMAGES, "sharding": "full_shard", **changes}) for changes in others]
    images = passed_on(pool, undisturbed[0][kind][2]["path"], tmp_path / "images", way)
    again = resumed(pool, [({"backend": "fsdp1", **PLAIN}, path), (IMAGES, images)])
    sums = [0, 0]  # of both ranks: which of them holds what is another backend's choice
    for rank in range(2):
        _same(undisturbed[rank][kind][0], again[rank][1][1])
        events, (back, resumed_events, _) = undisturbed[rank][0][0], again[rank][0]
        _same(events, resumed_events, OF_A_STEP[:4])
        sums = [sums[0] + events[-1]["checksum"], sums[1] + resumed_events[-1]["checksum"]]
        assert any("random numbers" in note for note in back["notes"])
    assert sums[0] % 2**64 == sums[1] % 2**64


@pytest.mark.slow
def test_every_element_is_written_once_and_nothing_is_pickled(undisturbed: list[Any]) -> None:
    for kind, changes in enumerate(KINDS):
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
    one, other = find(undisturbed[0][KINDS.index(IMAGES)][2]["path"]).manifest["files"].values()
    assert abs(one - other) < 0.01 * one, "replicas write together"


# -- what goes wrong --------------------------------------------------------------------------------------------------
def _disk_full(place: Place, given: dict[str, Any], root: str) -> tuple[Any, Any, list[Any]]:
    with running(place, given, steps=1) as s:
        full = OSError(28, "No space left on device")
        with mock.patch.object(checkpointing, "write_shard", side_effect=full) if place.rank == 1 else nullcontext():
            s.save(root)
            failed = _ended(s)
        events = s.train(1)["events"]
        s.save(root)
        well = _ended(s)
    return failed, well, events


def test_a_full_disk_is_said_and_training_goes_on(pool: Pool, tmp_path: Path) -> None:
    failed, well, events = pool.run(_disk_full, 2, spec().to_dict(), str(tmp_path), reduction=None)[0]
    assert failed["error"] == "rank 1: No space left on device" and failed["path"] is None
    assert [e["step"] for e in events] == [1]
    assert [str(c.path) for c in checkpoints(tmp_path)] == [well["path"]] and not incomplete_checkpoints(tmp_path)


@pytest.mark.slow
def test_what_cannot_be_resumed_is_refused_on_all_ranks_alike(pool: Pool, undisturbed: list[Any], tmp_path: Path):
    good = Path(undisturbed[0][0][2]["path"])
    cut = shutil.copytree(good, tmp_path / good.name)
    file = next(cut.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size // 2)
    refused = [(spec(**PLAIN), cut), (spec(**PLAIN, seed=9), good), (spec(**PLAIN), tmp_path / "no")]
    calls = [fails(call("restore", "run", given.to_dict(), str(path))) for given, path in refused]
    save = fails(call("save", f"{tmp_path}/nothing/not/there"))
    one, other = play(pool, 2, *calls, apply(spec()), save, train(1))
    for damaged, another, missing, _, unwritten, after in (one, other):
        assert "is damaged" in damaged and good.name in damaged
        assert "of another training" in another and "no such folder" in missing
        assert "no checkpoint can be written to" in unwritten and len(after["events"]) == 1


@pytest.mark.parametrize(("harm", "said"), [
    (lambda p: (p / MANIFEST).unlink(), f"has no {MANIFEST}"),
    (lambda p: (p / MANIFEST).write_text("{"), "cannot be read"),
    (lambda p: (p / MANIFEST).write_text('{"format": 99}'), "has format 99"),
    (lambda p: next(p.glob("*.safetensors")).unlink(), "lacks its file"),
    (lambda p: os.truncate(next(p.glob("*.safetensors")), 100), "is damaged"),
    (lambda p: _rename(p, "../../etc/passwd"), "does not lie in it"),
    (lambda p: p.rename(p.with_name(p.name + PARTIAL)), "was never finished"),
])  # fmt: skip
def test_what_is_torn_is_recognised_and_the_last_good_one_is_found(tmp_path: Path, harm: Any, said: str) -> None:
    good, broken = (_written(tmp_path, step).path for step in (1, 2))
    harm(broken)
    assert [path.name.removesuffix(PARTIAL) for path in incomplete_checkpoints(tmp_path)] == [broken.name]
    assert said in next(iter(incomplete_checkpoints(tmp_path).values())) and find(tmp_path).path == good
    shutil.rmtree(good)
    with pytest.raises(ArgumentError, match=broken.name):
        find(tmp_path)


def _rename(path: Path, name: str) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][name] = 1
    (path / MANIFEST).write_text(json.dumps(manifest))


def test_the_newest_few_are_kept_and_the_best(tmp_path: Path) -> None:
    kinds = [("step", "run"), ("best", "run"), ("step", "run"), ("step", "other"), ("best", "run"), ("last", "run")]
    made = [_written(tmp_path, step, kind, run).path for step, (kind, run) in enumerate(kinds)]
    assert prune(tmp_path, "run", last=2) == [made[1], made[0]]
    assert [c.path for c in checkpoints(tmp_path)] == made[2:] and not incomplete_checkpoints(tmp_path)


NUMBERS = [Chunk(name=f"parameter.p{i}", start=0, values=torch.full((20_000,), float(i))) for i in range(12)]


def _written(folder: Path, step: int, kind: str = "step", run: str = "run") -> checkpoint_format.Checkpoint:
    """One of a single rank."""
    state = {"run": run, "step": step, "spec": spec().to_dict(), "samples": 0, "optimizer": {"slots": [], "steps": 0},
             "writers": [0], "modules": {}}  # fmt: skip
    partial = checkpoint_format.begin(folder, step)
    file, nbytes = write_shard(partial, 0, NUMBERS)
    return finish(partial, [{"file": file, "bytes": nbytes, "state": state}], kind=kind)


def _killed_at_each_moment(place: Place, root: str) -> list[tuple[int, int, bool]]:
    """A process that writes a checkpoint and removes the third newest is killed before it first changes a file, the next one
    before its second change, and so on until one lives. What a look finds after each."""
    folder, told, killed = Path(root), [], True
    for step in range(2):
        _written(folder, step)
    while killed:
        left = len(told)
        writer = os.fork()
        if writer == 0:

            def count_down(event: str, args: Any) -> None:
                nonlocal left
                opens = event == "open" and "w" in str(args[1])
                writes = opens or event in ("os.mkdir", "os.rename", "shutil.rmtree")
                left -= writes and root in str(args[0])
                if left < 0:
                    signal.raise_signal(signal.SIGKILL)  # which is no audited event itself

            sys.addaudithook(count_down)
            with suppress(BaseException):
                _written(folder, 100 + len(told))
                prune(folder, "run", last=2)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(writer, 0)[1])
        newest = checkpoints(folder)[-1]
        back = [Chunk(name=c.name, start=0, values=torch.empty_like(c.values)) for c in NUMBERS]
        read_shards(newest.path, back, optional=())
        good = all(torch.equal(a.values, b.values) for a, b in zip(NUMBERS, back, strict=True))
        told.append((newest.step, len(incomplete_checkpoints(folder)), good))
    return told


@pytest.mark.slow
def test_killed_at_any_moment_the_last_good_one_is_usable_and_torn_ones_are_named(pool: Pool, tmp_path: Path) -> None:
    (told,) = pool.run(_killed_at_each_moment, 1, str(tmp_path), reduction=None)
    steps = [step for step, _, _ in told]
    assert steps == sorted(steps) and steps[0] == 1 and steps[-1] == 99 + len(told), "what was whole stays"
    assert all(good for _, _, good in told) and len(told) > 4
    assert told[-1][1] > 0, "some were killed in the middle of one"
    assert all(path.name in reason for path, reason in incomplete_checkpoints(tmp_path).items())
    assert find(tmp_path).step == steps[-1]


# -- what is left when ranks are gone ---------------------------------------------------------------------------------
def _layouts(place: Place, given: dict[str, Any], writers: list[list[int]]) -> list[Any]:
    """For each set of writers, the elements of parameters that this rank would write; None: there are not all."""
    told: list[Any] = []
    with running(place, given, steps=1) as s:
        for among in writers:
            told.append(None)
            if place.rank not in among:
                continue
            with suppress(LookupError):
                held = snapshot(s._lifecycle.require().backend, s._checkpointer._layouts, place.rank, among)
                told[-1] = sum(c.values.numel() for c in held if c.name.startswith("parameter."))
    return told


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
    with running(place, spec()) as s:
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
    assert steps == others == [0, 1] and errors == "" and [c.step for c in checkpoints(tmp_path)] == [0, 2]
