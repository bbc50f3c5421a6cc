"""What Binder and conda would install exists: each name of the two files has a release in its range, for Binder's Python.

Asked of the package index that pip is configured for here; where none answers, these tests are skipped. That is PyPI or a
mirror of it, not conda-forge: whether that has a build of such a release is not seen here, nor whether all can be solved.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.test_dependencies import ranges
from tests.test_house import REPO

FILES = ("environment.yml", "binder/environment.yml")
ON_PYPI = {"pytorch-cpu": "torch", "pytorch-gpu": "torch"}  # name at conda-forge -> distribution, if not the same
NOT_PACKAGES = {"python", "pip"}  # what conda brings; pip's own index has them by other ways
UNREACHABLE = re.compile(r"connection|retrying|timed out|name resolution|SSLError|not find an activated", re.IGNORECASE)

pytestmark = pytest.mark.slow


def listed(file: str) -> dict[str, str]:
    """Distribution -> range of versions, of a conda file."""
    lines = yaml.safe_load((REPO / file).read_text(encoding="utf-8"))["dependencies"]
    found = ranges(line for line in lines if isinstance(line, str))
    return {ON_PYPI.get(name, name): versions for name, versions in found.items()}


def releases(name: str, python: str) -> tuple[list[Version], str]:
    """The releases of a distribution that have a wheel for that Python, and what pip said of it."""
    command = [sys.executable, "-m", "pip", "index", "versions", name, "--disable-pip-version-check", "--retries", "1",
               "--timeout", "20", "--python-version", python, "--only-binary", ":all:"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    return [Version(v) for v in told[1].split(", ")] if told and done.returncode == 0 else [], done.stderr


def lacking(wanted: Mapping[str, str], python: str) -> list[str]:
    """What cannot be installed, a sentence each. Skips the test where the index does not answer."""
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda name: releases(name, python), wanted))
    wrong = []
    for (name, versions), (found, said) in zip(wanted.items(), answers, strict=True):
        if not found and UNREACHABLE.search(said):
            pytest.skip(f"the package index does not answer: {said.strip().splitlines()[-1]}")
        if not found:
            wrong.append(f"{name}: the index has no release with a wheel for Python {python}")
        elif not any(SpecifierSet(versions).contains(version) for version in found):
            wrong.append(f"{name}: no release is in {versions}; the newest is {max(found)}")
    return wrong


@pytest.fixture(scope="module")
def python() -> str:
    """Binder's. Skips where no index answers."""
    version = listed("binder/environment.yml")["python"].strip("=")
    found, said = releases("packaging", version)
    if not found:
        pytest.skip(f"no package index answers here: {(said.strip() or 'pip said nothing').splitlines()[-1]}")
    return version


@pytest.mark.timeout(300)
def test_every_name_has_a_release_in_its_range(python: str):
    wanted = [listed(file) for file in FILES]
    both = {name: f"{wanted[0].get(name, '')},{wanted[1].get(name, '')}".strip(",") for name in wanted[0] | wanted[1]}
    for name in NOT_PACKAGES:
        del both[name]
    assert len(both) >= 20
    assert lacking(both, python) == []
