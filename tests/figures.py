"""`python -m tests.figures`: what the package weighs, as one table. The goals only fall."""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from fsdp_lab.spec.spec import BACKENDS, Strategy, Workload

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "fsdp_lab"

# Feature -> names of the modules that it is made of. Its folders are those that hold one of them.
FEATURES = {
    "watch": r"watch|watched|loops|found|torchrun",
    "yours": r"your\w*|engine_check",
    "checkpoints": r"checkpoint\w*|saving\w*|recovery",
    "what-if": r"what_if\w*|question|page",
    "slow motion": r"slow_motion|holdings",
}
# Strategy fields that the engine alone acts on: what one more of them would touch.
ENGINE_FIELDS = ("limit_reductions", "reshard_size")


def python_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def lines_in(files: list[Path]) -> int:
    return sum(len(p.read_text(encoding="utf-8").splitlines()) for p in files)


def lines_with(pattern: str) -> int:
    """Lines of the package that hold a match."""
    lines = (line for p in python_files(PACKAGE) for line in p.read_text("utf-8").splitlines())
    return sum(bool(re.search(pattern, line)) for line in lines)


def files_with(pattern: str) -> int:
    return sum(bool(re.search(pattern, p.read_text("utf-8"))) for p in python_files(PACKAGE))


def folders_of(feature: str) -> int:
    """Folders at the top of the package with a module of the feature; a module at the top counts as one."""
    of_feature = (p for p in python_files(PACKAGE) if re.fullmatch(FEATURES[feature], p.stem))
    return len({p.relative_to(PACKAGE).parts[0] for p in of_feature})


def literals(tree: ast.AST) -> Iterator[set[str]]:
    """The strings of each written-out list, tuple, set or dict's keys, and of each comparison."""
    for node in ast.walk(tree):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            parts = list(node.elts)
        elif isinstance(node, ast.Dict):
            parts = list(node.keys)
        elif isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        yield {p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)}


def files_that_list(names: set[str], least: int) -> int:
    """Files, the table of fields itself left out, with `least` of the names in one list or comparison."""
    texts = (p.read_text("utf-8") for p in python_files(PACKAGE) if p.stem != "spec")
    return sum(any(len(strings & names) >= least for strings in literals(ast.parse(text))) for text in texts)


def function_lengths() -> list[int]:
    """Lines of code of each function: without its docstring, blank lines and comments."""
    lengths = []
    for path in python_files(PACKAGE):
        source = path.read_text("utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(source))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = node.body[0]
            documented = ast.get_docstring(node) is not None and first.end_lineno
            skip = range(first.lineno, first.end_lineno + 1) if documented and first.end_lineno else range(0)
            numbers = (n for n in range(node.lineno, (node.end_lineno or 0) + 1) if n not in skip)
            texts = (source[n - 1].strip() for n in numbers)
            lengths.append(sum(bool(text) and not text.startswith("#") for text in texts))
    return lengths


def figures() -> dict[str, tuple[float, float]]:
    """Figure -> (what it is, what it may be)."""
    package = python_files(PACKAGE)
    names = {f.name for kind in (Strategy, Workload) for f in fields(kind)}
    return {
        "lines of Python in fsdp_lab/": (lines_in(package), 52_000),
        "files in fsdp_lab/": (len(package), 230),
        "lines of Python in tests/": (lines_in(python_files(REPO / "tests")), 40_000),
        "characters of README.md": (len((REPO / "README.md").read_text("utf-8")), 7_000),
        **{f"folders of {feature}": (folders_of(feature), 3) for feature in FEATURES},
        **{f"files that name {field}": (files_with(rf"\b{field}\b"), 5) for field in ENGINE_FIELDS},
        "files that list or compare backends": (files_that_list(set(BACKENDS), 1), 8),
        "files that list fields": (files_that_list(names, 3), 4),
        "lines with `# fmt: skip`": (lines_with(r"# fmt: skip"), 60),
        "lines with the word `found`": (lines_with(r"\bfound\b"), 200),
        "median function, lines of code (at least)": (statistics.median(function_lengths()), 8),
    }


def main() -> int:
    for name, (value, goal) in figures().items():
        print(f"{name:45}{value:>9,.0f}   goal {goal:,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
