"""`Delivery`: the user's code, and the user's own modules, sent to the ranks that lack them.

The ranks use a module as the kernel has imported it, whatever its file has become: a run that goes on, a rank that replaces
another, and a machine without the file have the same code. So only a reload in the kernel brings a change."""

import contextlib
import importlib.util
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_lab.base.errors import SpecError
from fsdp_lab.cluster.calls import Dispatcher
from fsdp_lab.spec.spec import ENGINE_FIELD, Spec, part_of
from fsdp_lab.spec.user_code import METRICS, UserCode, loaded
from fsdp_lab.spec.workload import CODE_FIELDS

_NOT_OWN = frozenset({"__main__", "fsdp_lab", "torch", "transformers", *sys.stdlib_module_names})  # wherever they are
_PYTHON = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
KEPT = 12  # functions, classes, datasets and metrics: those of three runs


class Delivery:
    """Sends code to the ranks before the Spec that needs it. It remembers the newest of what it has sent, for ranks that
    come later and for Specs that come back from a file; the ranks drop the rest."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._packed: dict[str, bytes] = {}  # by digest
        self._texts: dict[str, tuple[Any, str]] = {}  # of modules, with their __spec__, which a reload replaces

    def check(self, spec: Spec, metrics: UserCode | None = None) -> dict[str, UserCode]:
        """Returns the code by its field. Raises SpecError for code that is neither here nor on all ranks."""
        codes = {f"{part_of(n)}.{n}": c for n, c in spec.sent_code().items()} | ({METRICS: metrics} if metrics else {})
        for field, code in codes.items():
            if packed := code.packed or self._packed.get(code.digest):
                self._packed.pop(code.digest, None)
                self._packed[code.digest] = packed  # as the newest
                for oldest in list(self._packed)[:-KEPT]:
                    del self._packed[oldest]
            elif self._lacking(code):
                loaded(field, code)
        return codes

    def provide(self, spec: Spec, metrics: UserCode | None = None) -> None:
        """Sends what ranks lack. Raises SpecError as `check`, and of ranks that cannot use it; else as a call to them."""
        codes = self.check(spec, metrics)
        self._send_modules(spec, always=metrics is not None)
        kept = {*self._packed, *(code.digest for code in codes.values())}
        for field, code in codes.items():
            if ranks := self._lacking(code):
                packed = {"name": code.name, "digest": code.digest, "packed": self._packed[code.digest]}
                arguments = {"field": field, **packed, "kept": sorted(kept)}
                self._dispatcher.send("receive", dict.fromkeys(ranks, arguments)).results()
                for member in (self._dispatcher.membership.members[rank] for rank in ranks):
                    member.code = (member.code & kept) | {code.digest}

    def _send_modules(self, spec: Spec, *, always: bool) -> None:
        """Has the ranks use the user's own modules as this kernel does, where the Spec has code, or `always`."""
        codes = {f"workload.{name}": getattr(spec.workload, name) for name in CODE_FIELDS if spec.workload.is_own}
        codes |= {ENGINE_FIELD: spec.strategy.engine} if spec.strategy.is_yours else {}
        for field, code in codes.items():
            with contextlib.suppress(SpecError):  # the ranks alone may have it
                loaded(field, code)
        modules = own_modules() if codes or always else ()
        sent = {m.__name__: [str(file), self._text(m, file), folders] for m, file, folders in modules}
        if not sent:
            return
        members = self._dispatcher.membership.members
        changed = self._dispatcher.send("receive_modules", {m.rank: {"sent": sent} for m in members}).results()
        for member in (m for m, names in zip(members, changed, strict=True) if names):
            member.code = set()

    def _text(self, module: types.ModuleType, file: Path) -> str:
        """Returns that which the kernel has imported, as far as known: the file's when it was first seen."""
        spec, text = self._texts.get(module.__name__, (None, ""))
        if spec is None or spec is not module.__spec__:
            text = importlib.util.decode_source(file.read_bytes()) if file.exists() else ""
            self._texts[module.__name__] = (module.__spec__, text)
        return text

    def _lacking(self, code: UserCode) -> list[int]:
        return [m.rank for m in self._dispatcher.membership.members if code.digest not in m.code]


def own_modules() -> Iterator[tuple[types.ModuleType, Path, list[str] | None]]:
    """(module, its file, its folders if it is a package) of modules that are neither installed nor a part of Python."""
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] not in _NOT_OWN and getattr(module, "__spec__", None) is not None:
            folders, named = [*getattr(module, "__path__", ())] or None, getattr(module, "__file__", None)
            file = Path(named or (f"{folders[0]}/__init__.py" if folders else ""))
            installed = {"site-packages", "dist-packages"} & {*file.parts} or str(file).startswith(_PYTHON)
            if file.suffix == ".py" and not installed and (file.exists() or not named):
                yield module, file, folders
