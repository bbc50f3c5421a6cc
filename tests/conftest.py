"""Fixtures that several folders share, and how the tests are spread over processes.

A run of the whole tier uses pytest-xdist; one that names files or folders runs in one process (`-n 2` overrides that). Files
that share a lab, a cluster or a browser form one group, and a group stays in one process. Each process has its own pool.
A test that measures time is marked `alone`: while it runs, the other processes wait between two tests.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.pool import Pool
from tests.turns import turn

if TYPE_CHECKING:
    from tests.engine.parity import Outcomes

SHARED = ("tests/browser", "tests/cluster", "tests/lab")  # folders whose files share what takes seconds to start
LONGEST = ("tests/lab", "tests/browser", "tests/cli", "tests/export", "tests/notebooks", "tests/engine", "tests/rank")


def group_of(nodeid: str) -> str:
    """The tests that run in one process, one after the other: those of a folder in SHARED, or of a file."""
    return next((folder for folder in SHARED if nodeid.startswith(folder + "/")), nodeid.partition("::")[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups first: processes take groups in this order."""
    folders = {folder: i for i, folder in enumerate(LONGEST)}
    items.sort(key=lambda item: folders.get(item.nodeid.rpartition("::")[0].rpartition("/")[0], len(folders)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around the time limit of a test: to wait for one's turn is no part of it."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with turn(Path(os.environ["FSDP_LAB_TEST_TURNS"]), alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    slow = config.option.markexpr == "slow"  # these tests wait more than they compute
    return max(2, min(4, (os.cpu_count() or 1) // 2)) + slow  # a test may use four ranks


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """No test writes to the history of whoever runs it; what tests start inherits that."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and so would the ranks
    folder = tempfile.mkdtemp(prefix="fsdp_lab-history-")
    os.environ["FSDP_LAB_HISTORY"] = os.path.join(folder, "history.sqlite3")
    if not hasattr(config, "workerinput"):
        os.environ["FSDP_LAB_TEST_TURNS"] = folder  # of all processes of this run
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    settings.register_profile("patient", deadline=None)  # a busy machine is no fault
    settings.load_profile("patient")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes for the whole test session."""
    ranks = Pool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def outcomes(pool: Pool) -> Outcomes:
    """Runs in the pool, each once for the whole test session."""
    from tests.engine.parity import Outcomes  # imports torch, which many tests do without

    return Outcomes(pool)
