"""The shape of the package: no circle between files, few parts with few imports between them, no class name twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_house import PACKAGE, Import, imports

MOST_PARTS = 18  # packages and modules at the top of fsdp_lab
MOST_IMPORTS_BETWEEN_PARTS = 70
MOST_FILES = 314
# Modules that import by a computed name: the packages' public names, what the kernel asks of a rank, a user's own code.
LOADED_BY_NAME = {"core/lazy_names.py", "cluster/remote.py", "core/user_code.py"}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module and package."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ["fsdp_lab", *path.relative_to(PACKAGE).with_suffix("").parts]
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def import_graph(known: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules it imports, wherever the import is written: typing-only and function-local ones count."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        if name == "fsdp_lab":
            continue  # the lazy table of public names
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                whole = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                targets = [dotted if dotted in known else node.module for dotted in whole.values()]
            else:
                continue
            graph[name].update(target for target in targets if target in known and target != name)
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (Tarjan's strongly connected components, those of more than one)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def part_of(module: str) -> str:
    return module.split(".")[1]


def test_no_two_files_import_each_other():
    assert circles(import_graph(modules())) == []


def test_imports_are_absolute():
    relative = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_the_package_has_few_parts(capsys: pytest.CaptureFixture[str]):
    known = modules()
    parts = {part_of(name) for name in known if name != "fsdp_lab"}
    between = {
        (part_of(name), part_of(target))
        for name, targets in import_graph(known).items()
        for target in targets
        if target != "fsdp_lab" and part_of(name) != part_of(target)
    }
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in known.values())
    with capsys.disabled():
        print(f"\n{len(parts)} parts, {len(between)} imports between them, {len(known)} files, {lines:,} lines")
    assert len(parts) <= MOST_PARTS and len(between) <= MOST_IMPORTS_BETWEEN_PARTS and len(known) <= MOST_FILES


def classes() -> Iterator[tuple[str, str]]:
    for path in modules().values():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, str(path.relative_to(PACKAGE))


def test_no_class_name_is_used_twice():
    places = defaultdict(list)
    for name, path in classes():
        places[name].append(path)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_modules_are_not_imported_by_computed_names():
    """`pkgutil.resolve_name`, `import_module` and `__import__` would go around the test of the floors."""
    loaders = {"resolve_name", "import_module", "__import__"}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in modules().values()
        if path.relative_to(PACKAGE).as_posix() not in LOADED_BY_NAME
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in loaders
    ]
    assert found == []


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}}, [["a", "b", "c"]]),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]),
    ],
)
def test_circles_are_found(graph: dict[str, set[str]], found: list[list[str]]):
    assert circles(graph) == found


def test_an_import_in_a_function_counts():
    (one,) = imports(PACKAGE / "wire" / "made_up.py", "def f():\n    from fsdp_lab.lab import Lab")
    assert isinstance(one, Import) and one.target == "fsdp_lab.lab"
