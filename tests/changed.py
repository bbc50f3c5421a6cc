"""`pytest --changed [BASE]`: only the tests of what differs from a commit (default: HEAD), by the graph of imports.

For daily work: a test is chosen if it, or a helper of its, imports a changed module, or one that does. Farther away nearly
every test needs nearly every module. A file that is no module counts for the modules of its folder; a module that is named
in a string counts as imported; a change of pyproject.toml or of the first conftest chooses all."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_lab

REPO = Path(__file__).resolve().parents[1]
ROOTS = ("fsdp_lab", "tests")
MODULE = re.compile(r"(?:fsdp_lab|tests)(?:\.\w+)+")


def changed_files(base: str) -> set[Path]:
    """Files that differ from `base`, and those that git does not know yet."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    told = [subprocess.run(["git", *c], cwd=REPO, check=True, capture_output=True, text=True).stdout for c in commands]
    return {REPO / name for output in told for name in output.split("\n") if name}


def named_modules(path: Path) -> Iterator[str]:
    """Modules that a file imports or names in a string: dotted, perhaps with an attribute behind."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from MODULE.findall(node.value)


class Graph:
    """Which files of the package and of the tests each of them needs."""

    def __init__(self) -> None:
        self.files = {
            ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__"): path
            for root in ROOTS
            for path in (REPO / root).rglob("*.py")
        }
        # of public names their own modules: the table of these names leads to everything
        homes = {f"fsdp_lab.{name}": f"fsdp_lab.{home}" for name, home in fsdp_lab._HOMES.items()}
        self.needs = {p: {self._file(homes.get(m, m)) for m in named_modules(p)} - {None} for p in self.files.values()}

    def _file(self, dotted: str) -> Path | None:
        """The longest part of a dotted name that is a module, but not the whole package."""
        while "." in dotted:
            if dotted in self.files:
                return self.files[dotted]
            dotted = dotted.rpartition(".")[0]
        return None

    def near(self, path: Path) -> set[Path]:
        """A test file with its conftests and helpers, the modules that they import, and those that these import."""
        tests = REPO / "tests"
        conftests = (folder / "conftest.py" for folder in path.parents if folder != tests)
        waiting, helpers = [path, *(c for c in conftests if c in self.needs)], set[Path]()
        while waiting:
            one = waiting.pop()
            if one not in helpers:
                helpers.add(one)
                waiting += [p for p in self.needs[one] if p.is_relative_to(tests) and p.parent != tests]
        direct = helpers.union(*(self.needs[p] for p in helpers))
        return direct.union(*(self.needs[p] for p in direct if not p.is_relative_to(tests)))


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests that no changed file concerns."""
    base = config.getoption("--changed")
    if base is None:
        return
    changed = changed_files(base)
    if REPO / "pyproject.toml" in changed or REPO / "tests" / "conftest.py" in changed:
        return
    graph, concerned = Graph(), dict[Path, bool]()
    for file in {item.path for item in items}:
        near = graph.near(file)
        folders = {path.parent for path in near if path.is_relative_to(REPO / "fsdp_lab")}
        concerned[file] = any(p in near or (p.suffix != ".py" and p.parent in folders) for p in changed)
    config.hook.pytest_deselected(items=[item for item in items if not concerned[item.path]])
    items[:] = [item for item in items if concerned[item.path]]
