"""`SourceText`: the source of a function or class, with what it needs, as the text of a module.

The source of a notebook's function is not enough to run it: it uses imports, constants, and other functions and classes
of the notebook. So every name that it uses is followed: modules, and what they define, become imports; constants become
assignments; functions and classes that cannot be imported become their own source, before what uses them. What text cannot
express, such as a tensor, is listed as missing.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import re
import symtable
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

ABSENT = object()  # in place of an object that exists nowhere
MOST_LITERAL = 10_000  # characters and elements of a constant; more is data, which is no part of a source


class SourceText:
    """The text for one function or class.

    Attributes:
        missing: names that the text uses and does not define -> their objects, or `ABSENT`.
        opaque: functions and classes without a source, so that the text is incomplete.
        defaults: of the functions in the text, as they were when these were defined.
    """

    def __init__(self, given: Any) -> None:
        self.missing: dict[str, Any] = {}
        self.opaque: list[Any] = []
        self.defaults: list[Any] = []
        self._imports: dict[str, None] = {}
        self._parts: list[str] = []
        self._seen: dict[str, Any] = {}
        self._add(given.__name__, given)

    @property
    def text(self) -> str:
        """Imports, then definitions, each before what uses it; "" if there is none."""
        imports = sorted(self._imports, key=lambda line: (line.startswith("from"), line))
        return "\n\n\n".join(filter(None, ["\n".join(imports), *self._parts]))

    def _add(self, name: str, value: Any) -> None:
        """What defines a name."""
        if name in self._seen:
            if self._seen[name] is not value:
                self.missing[name] = value  # another object of the same name, in another scope
            return
        self._seen[name] = value
        if (line := import_line(name, value)) is not None:
            self._imports[line] = None
        elif isinstance(value, (types.FunctionType, type)):
            self._add_definition(name, value)
        elif _is_literal(value):
            self._parts.append(f"{name} = {value!r}")
        else:
            self.missing[name] = value

    def _add_definition(self, name: str, value: types.FunctionType | type) -> None:
        text, own = source_of(value), value.__name__
        if not text:
            self.opaque.append(value)
            return
        if name != own:
            self._add(own, value)
            self._parts.append(f"{name} = {own}")
            return
        self.defaults += [(f.__defaults__, f.__kwdefaults__) for f in _functions(value)]
        scope = _scope_of(value)
        for used in _names_used(text):
            if used != own and not (used not in scope and hasattr(builtins, used)):
                self._add(used, scope.get(used, ABSENT))
        self._parts.append(text)


def import_line(name: str, value: Any) -> str | None:
    """The statement that imports `value` as `name`; None if no module has it, or only this program's main one."""
    if isinstance(value, types.ModuleType):
        path = value.__name__
        if path == "__main__" or sys.modules.get(path) is not value:
            return None
        return f"import {path}" if path == name else f"import {path} as {name}"
    if (found := importable(value)) is None:
        return None
    module, own = found
    return f"from {module} import {own}" + (f" as {name}" if own != name else "")


def importable(value: Any) -> tuple[str, str] | None:
    """(module, name) of what can be imported; None else."""
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if type(value).__module__ == "torch" and re.fullmatch(r"torch\.\w+", repr(value)):
        module, own = "torch", repr(value).partition(".")[2]  # a dtype
    home = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    return (module, own) if isinstance(module, str) and getattr(home, str(own), ABSENT) is value else None


def source_of(value: types.FunctionType | type) -> str:
    """The source of a function or class, without the indentation of where it is; "" if there is none.

    `inspect` does not find the classes of a notebook's cells; the lines of their methods are known.
    """
    kind = ast.ClassDef if isinstance(value, type) else (ast.FunctionDef, ast.AsyncFunctionDef)
    for function in _functions(value):
        code = function.__code__
        text = "".join(linecache.getlines(code.co_filename, function.__globals__))
        try:
            nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, kind) and n.name == value.__name__]
        except (SyntaxError, ValueError):  # the file has changed since, or is no Python
            continue
        for node in nodes:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first <= code.co_firstlineno <= (node.end_lineno or 0):
                return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno])).strip()
    return ""


def _functions(value: types.FunctionType | type) -> Iterator[types.FunctionType]:
    """The function, or those that the class defines."""
    members = vars(value).values() if isinstance(value, type) else [value]
    for member in members:
        inner: Any = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        found = inspect.unwrap(inner)
        if isinstance(found, types.FunctionType) and found.__module__ == value.__module__:
            yield found


def _scope_of(value: types.FunctionType | type) -> dict[str, Any]:
    """The names that it can use: those of its module, and of the functions around it."""
    scope = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    for function in _functions(value):
        scope |= function.__globals__
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            if name != "__class__":
                scope[name] = _content(cell)
    return scope


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return ABSENT


def _names_used(text: str) -> list[str]:
    """The names that a definition takes from around it, in order."""
    found: dict[str, None] = {}

    def visit(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            outside = symbol.is_referenced() and (not symbol.is_assigned() if top else symbol.is_global())
            if outside and symbol.get_name() != "__class__":
                found[symbol.get_name()] = None
        for child in table.get_children():
            visit(child, False)

    visit(symtable.symtable(text, "<source>", "exec"), True)
    return list(found)


def _is_literal(value: Any) -> bool:
    """Whether its `repr` is its source, and short enough for one."""
    if not _is_small(value):
        return False
    try:
        return type(value).__module__ == "builtins" and bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _is_small(value: Any) -> bool:
    """Whether it has at most `MOST_LITERAL` characters and elements, itself in itself counted again."""
    left, parts = MOST_LITERAL, [value]
    while parts and left >= 0:
        part = parts.pop()
        left -= len(part) if isinstance(part, (str, bytes)) else 1
        if isinstance(part, (list, tuple, set, frozenset, dict)):
            left -= len(part)
            if left >= 0:
                parts += [*part, *part.values()] if isinstance(part, dict) else part
    return left >= 0
