"""A switch that fails anywhere, on one rank or by an abort, loses nothing: training continues in the old Spec."""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
from torch import distributed as dist

from fsdp_lab import backends
from fsdp_lab.backends import transfer
from fsdp_lab.backends.transfer import StateTransfer
from fsdp_lab.engine import known_groups
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.rank import checkpointing, lifecycle
from fsdp_lab.rank.checkpointing import Checkpointer
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, SMALL, running, session, spec, trainer_of

FSDP1, FSDP2 = {"backend": "fsdp1"}, {"backend": "fsdp2"}
PLACES = {  # the function that fails on rank 1: whether before it, or behind it
    "when it is built": (lifecycle, "build", "after"),
    "before a batch": (StateTransfer, "_receive", "before"),
    "behind a batch": (StateTransfer, "_receive", "after"),
    "when others free": (StateTransfer, "_await_all", "after"),
    "at the end": (Checkpointer, "register", "before"),
    "when another has finished": (checkpointing, "gather_json", "after"),
}


@contextmanager
def failing(place: str, calls: int, rank: int) -> Iterator[None]:
    """On rank 1 the so many-th call of a function fails."""
    owner, name, when = PLACES[place]
    whole, left = getattr(owner, name), calls

    def called(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= rank == 1
        if left == 0 and when == "before":
            raise ZeroDivisionError(place)
        found = whole(*args, **options)
        if left == 0:
            raise ZeroDivisionError(place)
        return found

    with mock.patch.object(owner, name, called):
        yield


CHAIN: list[tuple[dict[str, Any], list[tuple[str, int]]]] = [  # the next Spec, and where the switch to it fails first
    (DDP, [("behind a batch", 4)]),
    (FSDP1, [("when others free", 2)]),
    ({"wrap": "whole"}, [("at the end", 1)]),
    (FSDP2, [("behind a batch", 5), ("before a batch", 3)]),
    ({}, [("when another has finished", 1)]),  # behind which rank 0 has dropped the old model
    ({"freeze": ["transformer.h.*"], "optimizer_args": {"amsgrad": True, "fused": True}},
     [("before a batch", 5), ("when it is built", 1)]),
]  # fmt: skip


def _failed(place: Place, first: dict[str, Any], chain: list[tuple[dict[str, Any], list[tuple[str, int]]]]) -> Any:
    """A step, and of each switch: it fails, perhaps its recovery too, a step, it succeeds. And a step."""
    told = []
    with (mock.patch.object(transfer, "_BATCH_ELEMENTS", (3000, 3000)),
          closing(session(place, reduction="rank_ordered")) as s):  # fmt: skip
        s.apply("run", first)
        losses = [e["mean_loss"] for e in s.train(1)["events"]]
        for other, failures in chain:
            before, said = trainer_of(s).spec, []
            for where, calls in failures:
                with failing(where, calls, place.rank):
                    try:
                        s.apply("run", other)
                        said.append("nothing")
                    except Exception as e:
                        said.append(type(e).__name__)
            losses += [e["mean_loss"] for e in s.train(1)["events"]]
            told.append((said, trainer_of(s).spec == before))
            s.apply("run", other)
        losses += [e["mean_loss"] for e in s.train(1)["events"]]
    return told, losses


@pytest.mark.slow
def test_nothing_is_lost(pool: Pool, steady: list[float]) -> None:
    chain = [(spec(**changes).to_dict(), failures) for changes, failures in CHAIN]
    for rank, (told, losses) in enumerate(pool.run(_failed, 2, spec().to_dict(), chain, reduction=None)):
        for (said, in_old), (_, failures) in zip(told, CHAIN, strict=True):
            assert said == [["RankAborted", "ZeroDivisionError"][rank]] * len(failures), failures
            assert in_old == (failures[0][0] != "when another has finished"), failures
        assert losses == steady[: len(CHAIN) + 2]


def _aborted(place: Place, given: dict[str, Any]) -> Any:
    """Rank 1 fails while the training is resumed; then it is resumed again."""
    with running(place, given, reduction="rank_ordered") as s:
        losses = [e["mean_loss"] for e in s.train(2)["events"]]
        s.suspend()
        patch = mock.patch.object(lifecycle, "build", side_effect=ZeroDivisionError)
        failing = patch if place.rank == 1 else nullcontext()
        with failing, pytest.raises((ZeroDivisionError, RuntimeError)):
            s.resume("run")
        step = s.resume("run")["step"]
        losses += [e["mean_loss"] for e in s.train(2)["events"]]
        again = s.resume("run")["step"]
    return step, again, losses


@pytest.mark.slow
def test_an_abort_while_it_is_resumed_does_not_lose_it(pool: Pool, steady: list[float]) -> None:
    for step, again, losses in pool.run(_aborted, 2, spec().to_dict(), reduction=None):
        assert (step, again) == (2, None) and losses == steady[:4]


def _busy(place: Place) -> tuple[list[int], list[int]]:
    """After a switch: how large the old storage is that an operation may use, and the rest."""
    with running(place, spec(), steps=1) as s:
        storages = {s.local.untyped_storage().data_ptr(): s.local.untyped_storage()
                    for s in trainer_of(s).backend.param_shards()}  # fmt: skip
        used, *rest = storages
        with mock.patch.object(s.context, "busy_addresses", lambda: {used}):
            s.apply("run", spec(backend="ddp", sharding="no_shard").to_dict())
        s.train(1)
        found = [storages[used].nbytes()], [storages[at].nbytes() for at in rest]
    return found


def test_storage_that_an_aborted_operation_may_use_is_left(pool: Pool) -> None:
    for used, rest in pool.run(_busy, 2, reduction=None):
        assert min(used) > 0 and len(rest) > 1 and max(rest) == 0


def _build_fails(place: Place) -> int:
    def fails(*_: Any) -> Any:
        dist.new_group()
        dist.barrier()  # a rank that fails closes its connections: first they are there
        raise MemoryError

    with mock.patch.dict(backends._BACKENDS, lab=mock.Mock(side_effect=fails)), pytest.raises(MemoryError):
        backends.build(build_skeleton(resolve(SMALL)), spec(), place.info.device)
    return len(known_groups())


def test_groups_of_a_backend_that_cannot_be_built_are_destroyed(pool: Pool) -> None:
    assert pool.run(_build_fails, 2) == [0, 0]
