"""What keeps the house in shape: imports run downhill, types and style are clean, nothing strange lies about.

`ruff check` (with the notebooks) runs from here; `ruff format` and `mypy --strict` are steps of .ci/run."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fsdp_lab
from fsdp_lab.spec.spec import SHARDINGS
from tests.seeded_faults import FAULTS, sources

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "fsdp_lab"
LAZY_NAMES = PACKAGE / "base" / "__init__.py"

# Each module or package of fsdp_lab, from the ground up: (floor, name, third-party packages that it may import).
# It imports only what stands above it in this list, so two of one floor are in order too.
TORCH = frozenset({"torch", "numpy"})
RANKS = TORCH | {"transformers"}
MODELS = RANKS | {"PIL", "safetensors", "platformdirs", "pyarrow", "datasets", "filelock", "huggingface_hub", "peft"}
KERNEL = RANKS | {"psutil", "ipyparallel", "zmq", "IPython", "ipykernel", "tornado", "traitlets", "platformdirs"}
SCREEN = KERNEL | {"bokeh", "ipywidgets", "anywidget", "rich", "jupyter_core", "packaging"}
FLOORS: tuple[tuple[int, str, frozenset[str]], ...] = (
    (0, "base", frozenset({"psutil"})),
    (1, "engine", frozenset({"torch"})),
    (1, "spec", frozenset()),
    (1, "wire", frozenset({"torch"})),
    (1, "models", MODELS),
    (1, "planner", frozenset({"numpy"})),
    (2, "backends", RANKS),
    (3, "rank", RANKS | {"psutil"}),
    (3, "bench", RANKS | {"psutil"}),
    (4, "cluster", KERNEL | {"cloudpickle", "pynvml"}),
    (5, "export", KERNEL | {"jinja2"}),
    (5, "runs", KERNEL),
    (6, "dashboard", SCREEN),
    (6, "report", SCREEN | {"jinja2"}),
    (6, "lab", KERNEL),
    (6, "cli", SCREEN),
    (6, "__main__", frozenset()),
)
PLACE = {name: i for i, (_, name, _) in enumerate(FLOORS)}
FLOOR = {name: floor for floor, name, _ in FLOORS}
ALLOWED = {name: third_party for _, name, third_party in FLOORS}
# Folders and files that may import more than the rest of their package.
ALLOWED_IN = {"planner/shapes": RANKS, "base/streams.py": TORCH, "base/tensors.py": TORCH,
              "rank/checkpointing.py": RANKS | {"safetensors"},
              "runs/pictures.py": KERNEL | {"PIL"},
              "runs/trackers.py": KERNEL | {"mlflow", "trackio", "wandb"}}  # fmt: skip

# Modules that import by a computed name: the packages' public names, what the kernel asks of a rank, a user's own code.
LOADED_BY_NAME = {"base/__init__.py", "cluster/remote.py", "spec/user_code.py"}

# Budgets: they only fall.
MOST_PARTS = 17  # packages and modules at the top of fsdp_lab
MOST_IMPORTS_BETWEEN_PARTS = 70
MOST_FILES = 230
MOST_LINES = 55_226

TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "environment.yml", "fsdp_lab", "notebooks", "tests", "binder"}


# -- the package's modules, each read once ---------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Module:
    """A file of the package, parsed once by whoever asks first."""

    path: Path
    text: str

    @classmethod
    def of(cls, path: Path) -> Module:
        return cls(path=path, text=path.read_text(encoding="utf-8"))

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def file(self) -> str:
        """Of the package: "spec/spec.py"."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def dotted(self) -> str:
        return f"fsdp_lab.{self.file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")

    @property
    def part(self) -> str:
        """The module or package at the top of fsdp_lab: "spec", "wire", ..."""
        return self.path.relative_to(PACKAGE).with_suffix("").parts[0]

    def source_of(self, node: ast.ImportFrom) -> str:
        package = ["fsdp_lab", *self.path.relative_to(PACKAGE).parent.parts]
        base = package[: len(package) - node.level + 1] if node.level else []
        return ".".join([*base, *([node.module] if node.module else [])])


@functools.cache
def modules() -> tuple[Module, ...]:
    """All of the package but its own `__init__`, whose table of lazy names points everywhere."""
    return tuple(Module.of(p) for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py")


# -- imports run downhill --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Import:
    """One import, wherever it is written: at the top, in a function, under TYPE_CHECKING, or by string."""

    module: Module
    line: int
    target: str  # absolute dotted name

    def __str__(self) -> str:
        return f"{self.module.file}:{self.line} imports {self.target}"


def imports(module: Module) -> Iterator[Import]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            source = module.source_of(node)
            for alias in node.names:
                yield Import(module, node.lineno, f"{source}.{alias.name}" if source == "fsdp_lab" else source)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__", "lazy_names"):
            if module.path != LAZY_NAMES:
                yield Import(module, node.lineno, string_argument(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "fsdp_lab." in node.value:
            for name in re.findall(r"^fsdp_lab(?:\.\w+)+$|(?:import|from) (fsdp_lab(?:\.\w+)+)", node.value):
                yield Import(module, node.lineno, name or node.value)


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def string_argument(node: ast.Call) -> str:
    """The name that is imported by string. One that only the running program knows cannot be checked, and fails; but
    `lazy_names(__name__, ...)` stays in the package that calls it."""
    first = node.args[0] if node.args else None
    if called(node) == "lazy_names" and isinstance(first, ast.Name) and first.id == "__name__":
        return "fsdp_lab.__name__"
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "<a computed name>"


def uphill(found: Import) -> bool:
    head, _, rest = found.target.partition(".")
    if head != "fsdp_lab":
        return found.target == "<a computed name>"
    name = rest.partition(".")[0]
    if name in ("__name__", "__version__"):
        return False
    if name not in PLACE:  # a public name through the lazy table: as good as importing its home
        name = fsdp_lab._HOMES.get(name, "?").split(".")[0]
    return name not in PLACE or PLACE[name] > PLACE[found.module.part]


def stranger(found: Import) -> bool:
    file = found.module.file
    special = ALLOWED_IN.get(file) or ALLOWED_IN.get(Path(file).parent.as_posix(), frozenset())
    allowed = ALLOWED[found.module.part] | special
    head = found.target.partition(".")[0]
    return head not in sys.stdlib_module_names | {"fsdp_lab", "<a computed name>"} | allowed


def test_every_module_has_a_floor_and_imports_run_downhill():
    strangers = {m.part for m in modules()} - set(PLACE)
    assert not strangers, f"give these a floor in tests/test_house.py: {sorted(strangers)}"
    found = [i for module in modules() for i in imports(module)]
    wrong = [str(i) for i in found if uphill(i)]
    assert not wrong, "\n".join(["these import from above:", *wrong])
    wrong = [str(i) for i in found if stranger(i)]
    assert not wrong, "\n".join(["these packages are not for that floor:", *wrong])


@functools.cache
def needs() -> dict[str, set[str]]:
    """Module -> those that it imports; from a package the modules that are named, or else its `__init__`."""
    names, found = {m.dotted for m in modules()}, dict[str, set[str]]()
    for module in modules():
        targets = found[module.dotted] = set[str]()
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom):
                source = module.source_of(node)
                targets |= {f"{source}.{a.name}" if f"{source}.{a.name}" in names else source for a in node.names}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        targets &= names
    return found


def test_no_two_files_import_each_other():
    """Directly or through others: typing-only and local imports count."""
    reached = {name: set(targets) for name, targets in needs().items()}
    for through in reached:  # Warshall: whoever reaches `through` reaches all that it does
        for targets in reached.values():
            if through in targets:
                targets |= reached[through]
    together = {tuple(sorted({name, *(t for t in reached[name] if name in reached[t])})) for name in reached}
    assert [circle for circle in sorted(together) if len(circle) > 1] == []


def test_imports_are_absolute_and_not_by_computed_names():
    """`pkgutil.resolve_name`, `import_module` and `__import__` would go around the test of the floors."""
    loaders = {"resolve_name", "import_module", "__import__"}
    wrong = [
        f"{module.file}:{node.lineno}"
        for module in modules()
        for node in module.nodes
        if (isinstance(node, ast.ImportFrom) and node.level)
        or (isinstance(node, ast.Call) and called(node) in loaders and module.file not in LOADED_BY_NAME)
    ]
    assert wrong == []


# -- budgets ---------------------------------------------------------------------------------------------------------
def test_the_package_keeps_its_budgets():
    """`python -m tests.figures` prints these and more."""
    part = {m.dotted: m.part for m in modules()}
    between = {(part[name], part[t]) for name, targets in needs().items() for t in targets if part[name] != part[t]}
    texts = (*(m.text for m in modules()), (PACKAGE / "__init__.py").read_text())
    lines = sum(len(text.splitlines()) for text in texts)
    sizes = (len(set(part.values())), len(between), len(modules()) + 1, lines)
    budgets = (MOST_PARTS, MOST_IMPORTS_BETWEEN_PARTS, MOST_FILES, MOST_LINES)
    assert all(size <= budget for size, budget in zip(sizes, budgets, strict=True)), (sizes, budgets)


def test_no_class_name_is_used_twice():
    places: dict[str, list[str]] = {}
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module.file)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


# -- what an import costs and needs ----------------------------------------------------------------------------------
def python(code: str, timeout_s: float = 120) -> str:
    """Runs code in a fresh interpreter and returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, cwd=REPO)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_light_imports_bring_in_neither_torch_nor_jupyter():
    heavy = {"torch", "numpy", "transformers", "ipyparallel", "bokeh", "ipywidgets", "IPython", "anywidget"}
    code = "import sys, fsdp_lab, fsdp_lab.spec.spec, fsdp_lab.base.events, fsdp_lab.cli.main; print(*sys.modules)"
    assert not heavy & set(python(code).split())


@pytest.mark.slow
def test_public_names_are_lazy_and_all_there():
    assert set(fsdp_lab.__all__) == set(fsdp_lab._HOMES)
    assert all(getattr(fsdp_lab, name) is not None and name in dir(fsdp_lab) for name in fsdp_lab.__all__)


JUPYTER = {"ipyparallel", "bokeh", "ipywidgets", "anywidget", "IPython", "ipykernel", "traitlets", "zmq", "tornado"}
JUPYTER |= {"jupyter_client", "jupyter_core", "jupyter_server", "jupyterlab"}


def without(packages: Iterable[str]) -> str:
    """The beginning of a program in which these top-level packages cannot be imported."""
    return f"""
import importlib, importlib.machinery, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {set(packages)!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
"""


@pytest.mark.slow
def test_ranks_and_a_watched_loop_need_no_jupyter(tmp_path: Path):
    """Floors 0 to 3 on a machine with torch, numpy, transformers and psutil alone; and a loop is watched and stored."""
    names = [m.dotted for m in modules() if FLOOR[m.part] <= 3 and m.path.name != "__main__.py"]
    code = f"""
for name in {names!r}: importlib.import_module(name)
import torch, fsdp_lab
path = {str(tmp_path / "runs.sqlite3")!r}
model = torch.nn.Linear(4, 4)
sgd = torch.optim.SGD(model.parameters())
with fsdp_lab.watch(model, sgd, history=path) as watch:
    for _ in range(4):
        with watch.step():
            model(torch.ones(2, 4)).sum().backward()
            sgd.step()
(run,) = fsdp_lab.History(path).runs()
assert run.step == 4 and run.state.value == "finished" and run.table().rows
"""
    python(without(JUPYTER) + code)


# -- no hidden state -------------------------------------------------------------------------------------------------
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {"list", "dict", "set", "defaultdict", "OrderedDict", "deque", "Counter", "WeakValueDictionary", "WeakSet"}
MUTATORS = {"append", "add", "update", "extend", "insert", "pop", "popitem", "remove", "clear", "setdefault", "discard"}


def hidden_state(module: Module) -> Iterator[str]:
    """Module-level state that changes: `global`, mutable values in lower-case names, constants that are written to."""
    tables: set[str] = set()
    for node in module.tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        targets, value = (node.targets if isinstance(node, ast.Assign) else [node.target]), node.value
        if isinstance(value, MUTABLE) or (isinstance(value, ast.Call) and called(value) in MAKERS):
            for name in (t.id for t in targets if isinstance(t, ast.Name) and t.id != "__all__"):
                tables.add(name)
                if name != name.upper():
                    yield f"{module.file}:{node.lineno}: {name} is mutable and module-wide"
    for node in module.nodes:
        if isinstance(node, ast.Global):
            yield f"{module.file}:{node.lineno}: global {', '.join(node.names)}"
        elif (table := written_to(node)) in tables:
            yield f"{module.file}:{getattr(node, 'lineno', 0)}: {table} is a constant and is changed"


def written_to(node: ast.AST) -> str:
    """The name of the container that `name[x] = y`, `del name[x]` or `name.append(x)` changes, or nothing."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return getattr(node.value, "id", "")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return getattr(node.func.value, "id", "")
    return ""


def test_no_module_keeps_hidden_state():
    wrong = [what for module in modules() for what in hidden_state(module)]
    assert not wrong, "\n".join(wrong)
    code = "cache = {}\nTABLE = {}\n__all__ = []\ndef f():\n    global n\n    TABLE[1] = 2\n    TABLE.update(a=1)"
    assert len(list(hidden_state(Module(path=PACKAGE / "made_up.py", text=code)))) == 4, "this test can fail"


# -- facts about a strategy ------------------------------------------------------------------------------------------
def token_comparisons(module: Module) -> Iterator[int]:
    """Lines where code compares something with a sharding token, which only `Strategy` itself should do."""
    for node in module.nodes:
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            constants = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
            if any(value in SHARDINGS for value in constants):
                yield node.lineno


def test_facts_about_a_strategy_are_asked_for_and_not_derived_again():
    wrong = [f"{m.file}:{line}" for m in modules() if m.file != "spec/spec.py" for line in token_comparisons(m)]
    assert not wrong, f"these test a sharding token; ask Strategy: {wrong}"
    for code in ('s.sharding == "zero1"', 's.sharding in ("full_shard", "x")', "match s:\n case 'no_shard': pass"):
        assert list(token_comparisons(Module(path=PACKAGE / "made_up.py", text=code))), "this test can fail"


# -- tools and layout ------------------------------------------------------------------------------------------------
def test_ruff_finds_nothing():
    """Code and notebooks."""
    command = [sys.executable, "-m", "ruff", "check", "--no-fix", "."]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=REPO)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_strangers_at_the_top_level():
    try:
        done = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=REPO, check=True)
        top = {name.split("/")[0] for name in done.stdout.splitlines()}
    except (OSError, subprocess.CalledProcessError):  # not a clone, or no git here: what lies there
        top = {p for p in os.listdir(REPO) if p not in ("build", "dist") and not p.endswith(".egg-info")}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


@pytest.mark.parametrize("page", ["README.md", "notebooks/reference.md", "fsdp_lab/ARCHITECTURE.md"])
def test_files_that_a_page_names_exist(page: str):
    text = (REPO / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:fsdp_lab|tests|notebooks|binder|\.github)/[\w./-]*)`", text))
    assert len(named) > 4 and not [name for name in named if not (REPO / name).exists()]


def test_the_command_of_the_readme_is_what_ci_runs_first():
    command = "python3 -m venv .venv && .venv/bin/pip install -c .ci/constraints.txt -e '.[test]' && .venv/bin/pytest"
    for page in ("README.md", ".ci/run"):
        assert command in (REPO / page).read_text(encoding="utf-8").splitlines(), page


def test_every_snippet_of_a_seeded_fault_is_in_the_source_once() -> None:
    texts = [p.read_text(encoding="utf-8") for p in sources(REPO)]
    wrong = [f.name for f in FAULTS if sum(text.count(f.old) for text in texts) != 1 or f.old == f.new]
    assert not wrong, f"write these faults anew in tests/seeded_faults.py: {wrong}"
    assert len({f.name for f in FAULTS}) == len(FAULTS) >= 20
    assert not [name for f in FAULTS for name in f.tests if not (REPO / name).exists()]
