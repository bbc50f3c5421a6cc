"""What ranks tell each other is never unpickled, which would execute what arrives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from fsdp_lab.backends.state import gather_json
from fsdp_lab.base.errors import ArgumentError, FieldError, SpecError
from tests.pool import Place, Pool
from tests.rank.test_session import DDP, session, spec


def _unpickled(place: Place, call: Callable[..., Any], *args: Any) -> Any:
    """Makes torch's functions for objects raise."""
    refuse = mock.Mock(side_effect=AssertionError("pickled"))
    with mock.patch.object(c10d, "_object_to_tensor", refuse), mock.patch.object(c10d, "_tensor_to_object", refuse):
        return call(place, *args)


def _life(place: Place, folder: str) -> list[int]:
    """Start, all switches, a suspension, a checkpoint and its resume."""
    s = session(place)
    steps = []
    for changes in ({}, {"backend": "fsdp2"}, {"backend": "fsdp1"}, DDP, {"sharding": "zero1", "offload": "all"}):
        s.apply("run", spec(**changes).to_dict())
        steps.append(s.train(1)["step"])
    s.suspend()
    s.resume("run")
    s.save(folder)
    s.saves(30.0)
    path = place.store.get("saved").decode() if place.rank else str(_saved(Path(folder)))
    place.store.set("saved", path)
    s.restore("run", spec(backend="fsdp2").to_dict(), path)
    steps.append(s.train(1)["step"])
    s.close()
    return steps


def _saved(folder: Path) -> Path:
    (path,) = (p for p in folder.iterdir() if p.is_dir())
    return path


def _objects(place: Place) -> None:
    dist.all_gather_object([None] * place.world_size, place.rank)


def test_ranks_start_switch_save_and_resume_without_a_pickle(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_unpickled, 2, _life, str(tmp_path), reduction=None) == [[1, 2, 3, 4, 5, 6]] * 2


def test_a_pickle_would_be_seen(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="AssertionError: pickled"):
        pool.run(_unpickled, 2, _objects)


def _gathered(place: Place) -> list[Any]:
    return gather_json(
        {"rank": place.rank, "pair": (place.rank, None), "exact": 0.1 + place.rank, "text": "é" * place.rank}
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_has_the_values_of_all(pool: Pool, world_size: int) -> None:
    wanted = [{"rank": r, "pair": [r, None], "exact": 0.1 + r, "text": "é" * r} for r in range(world_size)]
    assert pool.run(_gathered, world_size) == [wanted] * world_size


@pytest.mark.parametrize("kind", [FieldError, SpecError, ArgumentError])
def test_a_refusal_is_the_same_on_the_other_rank(kind: type[FieldError]) -> None:
    error = FieldError.from_dict(kind("a", "is wrong", "mend it", {"b": 1}).to_dict())
    assert type(error) is kind and str(error) == "a: is wrong; mend it" and error.fix == {"b": 1}
