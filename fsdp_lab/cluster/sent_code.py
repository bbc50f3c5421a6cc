"""The user's code on its way to the ranks: `code_of` packs it in the kernel, and `unpacked` makes the object of it on a
rank. `code_delivery` sends it, and before it the user's own modules, which `SentModules` imports.

Note: pickle. Whoever can send a pickle can run code. This is the one place that uses it, on the channel of ipyparallel,
which is signed with the cluster's key and runs what the kernel sends anyway. Nothing here reads what came from a rank, a
store, a file or the history: a Spec from there has source and digest alone, and is not run by them.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import io
import linecache
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.source_text import ABSENT, SourceText, importable
from fsdp_lab.core.spec import ENGINE_FIELD, YOURS
from fsdp_lab.core.user_code import UserCode, is_code
from fsdp_lab.core.workload import CODE_FIELDS

MOST_BYTES = 1 << 30  # of one object: it goes to every rank through the kernel's sockets


def with_code(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Spec, with functions, classes and datasets as the field holds them; `engine` alone means backend "yours"
    too. Raises SpecError as `code_of`."""
    data = changes.get("data")
    if hasattr(data, "__iter__") and not (isinstance(data, str) or is_code(data) or _is_object(data)):
        hint = "give a map-style dataset, with __len__ and __getitem__, or a function that returns one"
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
        raise SpecError(field, f"a {type(given).__name__} that is built already is refused",
                        "give the function that builds it, which every rank calls, or its class")  # fmt: skip
    if isinstance(given, (types.FunctionType, type)) and (found := importable(given)) is not None:
        return ":".join(found)
    packed = _packed(field, given)
    text = _source_text(given)
    name = getattr(given, "__name__", type(given).__name__)
    missing = [] if text is None else [*text.missing, *(part.__name__ for part in text.opaque)]
    if not isinstance(given, (types.FunctionType, type)):
        missing.append(f"the state of this {type(given).__name__}")
    source = "" if text is None else text.text
    return UserCode(name, source, _digest(name, given, text), missing, given=given, packed=packed)


def unpacked(field: str, name: str, packed: bytes) -> Any:
    """The object, on a rank. Raises SpecError if a module that it uses cannot be imported there."""
    try:
        return cloudpickle.loads(packed)
    except Exception as e:  # what an import raises is the module's
        said = " ".join(str(e).split()) or type(e).__name__
        raise SpecError(field, f"{name} cannot be used on this rank ({said})",
                        "install what it imports where the ranks are, or define it in the notebook") from e  # fmt: skip


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


def _packed(field: str, given: Any) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(given)
    except Exception as e:  # of many classes
        said = " ".join(str(e).split()) or type(e).__name__
        raise SpecError(field, f"it cannot be sent to the ranks: {said}",
                        "open files and devices inside the function, not around it") from e  # fmt: skip
    if len(packed) > MOST_BYTES:
        raise SpecError(field, f"it is {len(packed) / 2**20:,.0f} MiB, which every rank would be sent",
                        "give a function that reads the data on the rank")  # fmt: skip
    return packed


def _source_text(given: Any) -> SourceText | None:
    """Of the function or class, or of an object's class; None if that can be imported."""
    kind = given if isinstance(given, (types.FunctionType, type)) else type(given)
    return SourceText(kind) if importable(kind) is None else None


def _digest(name: str, given: Any, text: SourceText | None) -> str:
    """Of the text, and of all that it does not express."""
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    rest: list[Any] = [] if isinstance(given, (types.FunctionType, type)) else [given]
    if text is not None:
        digest.update(text.text.encode())
        rest += [(name, None if value is ABSENT else value) for name, value in text.missing.items()]
        rest += [*text.opaque, *(kept for kept in text.defaults if any(kept))]
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
            return (str, (_bytes_of(given),))
        return super().reducer_override(given)


def _bytes_of(tensor: Any) -> str:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    content = hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {content}"
