"""`FollowedRun`: a history that is read on while it is written, as by a page without a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_lab.core.errors import ArgumentError
from fsdp_lab.history.following import Followed
from fsdp_lab.history.history import History
from fsdp_lab.runs.view import RunState
from tests.lab.events import SPEC, event, steps
from tests.lab.kept import told


def read(followed: Followed) -> list[int]:
    run = followed.read()
    return [] if run is None else [step.number for step in run.events.steps()]


def test_what_is_new_is_read_once_and_a_rewritten_pack_adds_nothing_twice(tmp_path: Path):
    path = tmp_path / "runs.sqlite3"
    history, followed = History(path), Followed(path)
    assert followed.read() is None and not path.exists(), "to look makes no file"
    run = told(SPEC, steps(0, 1), id="one", state=RunState.RUNNING)
    history.record(run)
    history.flush()
    assert read(followed) == [0, 1]
    run.events.add(steps(2, 3))
    history.flush()
    assert read(followed) == [0, 1, 2, 3]
    assert read(followed) == [0, 1, 2, 3] and len(followed.run.events) == len(run.events)
    run.state = RunState.FINISHED
    history.flush()
    assert followed.read().state is RunState.FINISHED


def test_the_newest_run_is_followed_or_the_named_one(tmp_path: Path):
    path = tmp_path / "runs.sqlite3"
    history, newest, named = History(path), Followed(path), Followed(path, "fir")
    for name, began in (("first", 1.0), ("second", 2.0)):
        history.record(told(SPEC, steps(0), id=name, started_unix_s=began))
        history.flush()
        assert newest.read().id == name
        assert named.read().id == "first"
    History(path).delete("first", "second")
    with pytest.raises(ArgumentError, match="was deleted"):
        newest.read()


def test_an_attempt_that_was_abandoned_is_not_drawn(tmp_path: Path):
    path = tmp_path / "runs.sqlite3"
    history, followed = History(path), Followed(path)
    run = told(SPEC, steps(0, 1, 2), id="one", state=RunState.RUNNING)
    history.record(run)
    history.flush()
    assert read(followed) == [0, 1, 2]
    run.events.restart(1)
    run.events.add(event(rank, 1, attempt=1, loss=9.0) for rank in range(SPEC.world_size))
    history.flush()
    assert read(followed) == [0, 1]
    assert followed.run.events.attempt == 1
