"""Fixtures that several folders share, and how the tests are spread over processes.

A run of the whole tier uses pytest-xdist; one that names files or folders runs in one process (`-n 2` overrides that). Files
that share a lab, a cluster or a browser form a group, which stays in one process. Each process has its own pool."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests import changed
from tests.pool import Pool
from tests.pretrained import minilm_folder

if TYPE_CHECKING:
    from tests.engine.parity import Outcomes

# Folders whose files share what takes seconds to start.
SHARED = ("tests/browser", "tests/cluster", "tests/hosts", "tests/lab")
LONGEST = ("tests/browser", "tests/lab", "tests/cli", "tests/export", "tests/notebooks", "tests/engine",
           "tests/engine/scenarios", "tests/rank", "tests/hosts")  # fmt: skip


def group_of(nodeid: str) -> str:
    """The tests that run in one process, one after the other: those of a folder in SHARED, or of a file."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in SHARED if file.startswith(folder + "/")), file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed", nargs="?", const="HEAD", metavar="BASE", help="only tests of what differs from BASE")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest groups first: processes take groups in this order."""
    folders = {folder: i for i, folder in enumerate(LONGEST)}
    files = {file: i for i, file in enumerate(dict.fromkeys(item.path for item in items))}

    def place(item: pytest.Item) -> tuple[int, int]:
        folder = item.nodeid.partition("::")[0].rpartition("/")[0]
        return folders.get(folder, len(folders)), files[item.path]

    items.sort(key=place)
    changed.select(config, items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return max(3, min(4, (os.cpu_count() or 1) // 2))  # a test may use four ranks, and waits for half of its time


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


class FailuresAtOnce:
    """Says each failure when it happens: a run that is ended for its time never comes to its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(report.longrepr if crash is None else crash.message).strip().partition("\n")[0]
            terminal.write_line(f"\nFAILED {report.nodeid} in {report.when} after {report.duration:.0f} s: {why[:300]}")


def pytest_configure(config: pytest.Config) -> None:
    """No test writes to the history or the cache of whoever runs it; what tests start inherits that."""
    # a shell's background job ignores it, and so would the ranks
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = tempfile.mkdtemp(prefix="fsdp_lab-history-")
    os.environ["FSDP_LAB_HISTORY"] = os.path.join(folder, "history.sqlite3")
    os.environ["FSDP_LAB_CACHE"] = os.path.join(folder, "cache")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailuresAtOnce(config))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # Threads of OpenMP spin where several processes share the cores: one test took 70 s of CPU in place of 13.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch's TCPStore asks the name server who each client is; where none answers that would cost 5 s now and then
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    settings.register_profile("patient", deadline=None)  # a busy machine is no fault
    settings.load_profile("patient")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes for the whole test session."""
    ranks = Pool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def ran(pool: Pool) -> Callable[..., list[Any]]:
    """`pool.run`, once for the same arguments: tests of a module share its results."""
    return functools.cache(pool.run)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of a trained BERT of 22M parameters."""
    return minilm_folder()


@pytest.fixture(scope="session")
def outcomes(pool: Pool) -> Outcomes:
    """Runs in the pool, each once for the whole test session."""
    from tests.engine.parity import Outcomes  # imports torch, which many tests do without

    return Outcomes(pool)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own in place of the system's temporary folder, for this process and those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path
