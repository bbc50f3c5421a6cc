"""The user's code on its way to the ranks: `code_of` packs it in the kernel, and `unpacked` makes the object of it on a
rank. A Spec holds its source (`SourceText`). `code_delivery` sends it, and before it the user's own modules, which
`SentModules` imports.

Note: pickle. Whoever can send a pickle can run code. This is the one place that uses it, on the channel of ipyparallel,
which is signed with the cluster's key and runs what the kernel sends anyway. Nothing here reads what came from a rank, a
store, a file or the history: a Spec from there has source and digest alone, and is not run by them."""

import ast
import builtins
import contextlib
import hashlib
import importlib.abc
import importlib.util
import inspect
import io
import linecache
import re
import symtable
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from fsdp_lab.base.errors import SpecError
from fsdp_lab.spec.spec import ENGINE_FIELD, YOURS
from fsdp_lab.spec.user_code import UserCode, is_code
from fsdp_lab.spec.workload import CODE_FIELDS

ABSENT = object()  # in place of an object that exists nowhere
MOST_LITERAL = 10_000  # characters of a constant; more is data, which is no part of a source


def with_code(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Spec, with functions, classes and datasets as the field holds them; `engine` alone means backend "yours"
    too. Raises SpecError as `code_of`."""
    data = changes.get("data")
    if hasattr(data, "__iter__") and not (isinstance(data, str) or is_code(data) or _is_object(data)):
        hint = "give a map-style dataset, such as list(data), or a function that returns one"
        raise SpecError("workload.data", f"a {type(data).__name__} is refused: samples are read by their number", hint)
    if changes.get("engine") is not None:
        changes = {"backend": YOURS, **changes}
    fields = {**{name: f"workload.{name}" for name in CODE_FIELDS}, "engine": ENGINE_FIELD}
    return {
        name: code_of(fields[name], value) if name in fields and _is_object(value) else value
        for name, value in changes.items()
    }


def _is_object(value: Any) -> bool:
    is_data = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return (callable(value) or is_data) and not isinstance(value, (str, bytes, Mapping))


def code_of(field: str, given: Any) -> str | UserCode:
    """What a Spec's field holds for a function, a class or a dataset: "package.module:name" if it can be imported, else
    its source and what is sent. Raises SpecError for what cannot be sent."""
    if field == "workload.model" and hasattr(given, "named_parameters") and not isinstance(given, type):
        hint = "give the function that builds it, which every rank calls, or its class"
        raise SpecError(field, f"a {type(given).__name__} that is built already is refused", hint)
    defined = isinstance(given, (types.FunctionType, type))
    if defined and (home := importable(given)) is not None:
        return ":".join(home)
    packed = _packed(field, given)
    kind = given if defined else type(given)
    text = SourceText(kind) if importable(kind) is None else None
    name = getattr(given, "__name__", type(given).__name__)
    missing = [] if text is None else [*text.missing]
    if not defined:
        missing.append(f"the state of this {type(given).__name__}")
    source = "" if text is None else text.text
    return UserCode(name, source, _digest(name, given, text), missing, given=given, packed=packed)


def unpacked(field: str, name: str, packed: bytes) -> Any:
    """The object, on a rank. Raises SpecError if a module that it uses cannot be imported there."""
    try:
        return cloudpickle.loads(packed)
    except Exception as e:  # what an import raises is the module's
        said = " ".join(str(e).split()) or type(e).__name__
        hint = "install what it imports where the ranks are, or define it in the notebook"
        raise SpecError(field, f"{name} cannot be used on this rank ({said})", hint) from e


def _packed(field: str, given: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(given))
    except Exception as e:  # of many classes
        said = " ".join(str(e).split()) or type(e).__name__
        hint = "open files and devices inside the function, not around it"
        raise SpecError(field, f"it cannot be sent to the ranks: {said}", hint) from e


def _digest(name: str, given: Any, text: "SourceText | None") -> str:
    """Returns the digest of the text, and of all that it does not express."""
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    rest: list[Any] = [] if isinstance(given, (types.FunctionType, type)) else [given]
    if text is not None:
        digest.update(text.text.encode())
        rest += [(name, None if value is ABSENT else value) for name, value in text.missing.items()]
    stream = io.BytesIO()
    _Hashing(stream).dump(rest)
    digest.update(stream.getvalue())
    return digest.hexdigest()


class _Hashing(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes what is equal for equal values in any process: tensors by their bytes, code by its text."""

    def reducer_override(self, given: Any) -> Any:
        if isinstance(given, (types.FunctionType, type)) and importable(given) is None:
            text = SourceText(given)
            if text.text and not text.missing:
                return (str, (text.text,))
        if type(given).__module__ == "torch" and type(given).__name__ in ("Tensor", "Parameter"):
            content = given.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy().tobytes()
            return (tuple, ((str(given.dtype), tuple(given.shape), content),))
        return super().reducer_override(given)


# -- sources ---------------------------------------------------------------------------------------------------------


class SourceText:
    """The source of a function or class with what it needs, as the text of a module.

    Modules that it uses, and what they define, become imports; constants become assignments; functions and classes that
    cannot be imported become their own source, before what uses them. What text cannot express is missing.

    Attributes:
        missing: names that the text uses and does not define -> their objects, or `ABSENT`; also functions and classes
            without a source."""

    def __init__(self, given: Any) -> None:
        self.missing: dict[str, Any] = {}
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
        """Adds what defines a name."""
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
            self.missing[own] = value
            return
        if name != own:
            self._add(own, value)
            self._parts.append(f"{name} = {own}")
            return
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
    if (home := importable(value)) is None:
        return None
    module, own = home
    return f"from {module} import {own}" + (f" as {name}" if own != name else "")


def importable(value: Any) -> tuple[str, str] | None:
    """(module, name) of what can be imported; None else."""
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if type(value).__module__ == "torch" and re.fullmatch(r"torch\.\w+", repr(value)):
        module, own = "torch", repr(value).partition(".")[2]  # a dtype
    home = sys.modules.get(module) if isinstance(module, str) and module != "__main__" else None
    return (module, own) if isinstance(module, str) and getattr(home, str(own), ABSENT) is value else None


def source_of(value: types.FunctionType | type) -> str:
    """Returns the source of a function or class, without the indentation of where it is; "" if there is none. `inspect` does
    not find the classes of a notebook's cells; the lines of their methods are known."""
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
        function = inspect.unwrap(inner)
        if isinstance(function, types.FunctionType) and function.__module__ == value.__module__:
            yield function


def _scope_of(value: types.FunctionType | type) -> dict[str, Any]:
    """The names that it can use: those of its module, and of the functions around it."""
    scope = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    for function in _functions(value):
        scope |= function.__globals__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                scope[name] = ABSENT
                with contextlib.suppress(ValueError):  # not set yet
                    scope[name] = cell.cell_contents
    return scope


def _names_used(text: str) -> list[str]:
    """The names that a definition takes from around it, in order."""
    names: dict[str, None] = {}

    def visit(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            outside = symbol.is_referenced() and (not symbol.is_assigned() if top else symbol.is_global())
            if outside and symbol.get_name() != "__class__":
                names[symbol.get_name()] = None
        for child in table.get_children():
            visit(child, False)

    visit(symtable.symtable(text, "<source>", "exec"), True)
    return list(names)


def _is_literal(value: Any) -> bool:
    """Returns whether its `repr` is its source, and short enough for one."""
    if type(value).__module__ != "builtins" or (hasattr(value, "__len__") and len(value) > MOST_LITERAL):
        return False
    try:
        return len(text := repr(value)) <= MOST_LITERAL and bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


# -- modules, on a rank ------------------------------------------------------------------------------------------------


class _SentFile(SourceFileLoader):
    """A module's file, with the text that the kernel sent in place of its own."""

    def __init__(self, name: str, file: str, text: str) -> None:
        super().__init__(name, file)
        self.text = text

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self.text, self.path, "exec", dont_inherit=True)


class SentModules(importlib.abc.MetaPathFinder):
    """On a rank: imports modules from the text that the kernel sent. A reload on the rank reads the rank's own file."""

    def __init__(self) -> None:
        self._sent: Mapping[str, Sequence[Any]] = {}

    def take(self, sent: Mapping[str, Sequence[Any]]) -> list[str]:
        """`sent`: name -> (file, text, folders of a package or None). Returns the modules that were imported from another
        text; then all are imported anew, because they may use each other."""
        imported = {name: module.__loader__ for name in sent if (module := sys.modules.get(name)) is not None}
        changed = [name for name, loader in imported.items() if getattr(loader, "text", None) != sent[name][1]]
        self._sent = {**self._sent, **sent}
        for file, text, _ in sent.values():  # what tracebacks show
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        for name in self._sent if changed else ():
            sys.modules.pop(name, None)
        return changed

    def find_spec(self, name: str, path: Any, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if target is not None or name not in self._sent:
            return None
        file, text, folders = self._sent[name]
        loader = _SentFile(name, file, text)
        return importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)
