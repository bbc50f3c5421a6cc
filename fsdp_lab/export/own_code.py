"""`OwnCode`: the user's own model, loss and data as the part of a script that defines or imports them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.user_code import UserCode
from fsdp_lab.core.workload import CODE_FIELDS, Workload
from fsdp_lab.export.target import SPEC_INSTEAD


class OwnCode:
    """The code of a Workload. Raises SpecError for code whose source is not whole, or does not fit beside the others'."""

    def __init__(self, workload: Workload) -> None:
        self._imports: dict[str, None] = {}
        self._parts: dict[str, None] = {}
        self._meant: dict[str, str] = {}  # name -> what defines it
        self._names = [self._add(name, getattr(workload, name)) for name in CODE_FIELDS]

    @property
    def values(self) -> dict[str, Any]:
        """What the template needs. `own_names`: of the model, the data and the loss."""
        text = "\n\n\n".join(filter(None, ["\n".join(self._imports), *self._parts]))
        model, data, loss = self._names
        return {
            "own": text,
            "own_names": [model, loss, data],
            "model_name": model,
            "tokens": None,
            "files": (),
            "lora": None,
        }

    def check_names(self, script: str) -> None:
        """Raises SpecError if the rest of the script defines a name of this code."""
        own = {ast.unparse(node) for part in (*self._imports, *self._parts) for node in ast.parse(part).body}
        for node in ast.parse(script).body:
            if ast.unparse(node) not in own:
                for name, meaning in _defined(node):
                    if self._meant.get(name, meaning) != meaning:
                        raise _clash(name, "the script defines it too")

    def _add(self, field: str, code: str | UserCode) -> str:
        """Adds one of them. Returns the expression for it."""
        if isinstance(code, str):
            module, _, name = code.partition(":")
            text = f"from {module} import {name.partition('.')[0]}"
        else:
            name, text = code.name, code.source
            if code.missing or not text:
                raise SpecError(f"workload.{field}", f"the source of {name} does not contain {', '.join(code.missing)}",
                                "define it inside the function, or in a module to import")  # fmt: skip
        for node in ast.parse(text).body:
            for defined, meaning in _defined(node):
                if self._meant.setdefault(defined, meaning) != meaning:
                    raise _clash(defined, "model, loss and data define it in two ways")
            lines = text.splitlines()[_first_line(node) - 1 : node.end_lineno]
            kept = self._imports if isinstance(node, (ast.Import, ast.ImportFrom)) else self._parts
            kept["\n".join(lines)] = None
        return name


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(int(d.lineno) for d in getattr(node, "decorator_list", ()))])


def _defined(node: ast.stmt) -> Iterator[tuple[str, str]]:
    """(name, what it is) of what a statement defines; for an import, the path that it names."""
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


def _clash(name: str, reason: str) -> SpecError:
    return SpecError("workload.model", f"{name} has two meanings in a script: {reason}", f"rename it, {SPEC_INSTEAD}")
