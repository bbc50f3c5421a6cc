"""Drills of drills.py once. Forty-two are in tests/results/host_drills.txt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.drills import Stage, drill, prepare, stage

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("drills")) as made:
        prepare(made)
        yield made


# Each way in which hosts fail once; test_ssh.py cuts a cable for good, kills a kernel, and lets another find the ranks.
@pytest.mark.parametrize("name", ["host_killed", "cable_heals", "sshd_killed", "job_cancelled"])
def test_a_drill_ends_well(ready: Stage, name: str) -> None:
    print(drill(ready, name))
