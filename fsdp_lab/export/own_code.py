"""`own_code`: the user's own model, loss and data as the part of a script that defines or imports them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.workload import CODE_FIELDS, Workload
from fsdp_lab.export.target import SPEC_INSTEAD


def own_code(workload: Workload) -> str:
    """The code of a Workload, which ends by naming its three parts; what several of its sources contain is there once.
    Raises SpecError for a source that is not whole."""
    imports: dict[str, None] = {}
    parts: dict[str, None] = {}
    names: dict[str, str] = {}
    for field in CODE_FIELDS:
        code = getattr(workload, field)
        if isinstance(code, str):
            module, _, names[field] = code.partition(":")
            source = f"from {module} import {names[field].partition('.')[0]}"
        else:
            names[field], source = code.name, code.source
            if code.missing or not source:
                reason = f"the source of {code.name} does not contain {', '.join(code.missing)}"
                raise SpecError(f"workload.{field}", reason, "define it inside the function, or in a module to import")
        for node in ast.parse(source).body:
            first = min([node.lineno, *(int(d.lineno) for d in getattr(node, "decorator_list", ()))])
            kept = imports if isinstance(node, (ast.Import, ast.ImportFrom)) else parts
            kept["\n".join(source.splitlines()[first - 1 : node.end_lineno])] = None
    named = f"OWN_MODEL, OWN_LOSS, OWN_DATA = {names['model']}, {names['loss']}, {names['data']}"
    return "\n\n\n".join(filter(None, ["\n".join(imports), *parts, named]))


def check_names(script: str) -> None:
    """Raises SpecError if two statements of a script define one name in two ways."""
    meant: dict[str, str] = {}
    for node in ast.parse(script).body:
        for name, meaning in _defined(node):
            if meant.setdefault(name, meaning) != meaning:
                raise SpecError("workload.model", f"{name} has two meanings in a script", f"rename it, {SPEC_INSTEAD}")


def _defined(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """(name, definition) of what a statement defines; for an import, the path that it names."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            top = alias.asname or alias.name.partition(".")[0]
            yield top, home + (alias.name if alias.asname or home else top)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, ast.unparse(node)
    elif isinstance(node, ast.Assign):
        names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        yield from ((name, ast.unparse(node)) for name in names)
