"""`YourEngine`: an engine of the user's, called by the lab. `YourUnit`: what its methods are given.

Whatever one of its methods raises is told in the user's terms: the method, the unit, the step and the line.
"""

from __future__ import annotations

import ast
import linecache
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_lab.core.errors import SpecError
from fsdp_lab.core.spec import ENGINE_FIELD, Strategy
from fsdp_lab.core.user_code import UserCode, code_name, loaded
from fsdp_lab.engine.tensors import tensors_in
from fsdp_lab.models.configs import first_line
from fsdp_lab.wire import RankAborted, WireTimeout

METHODS = ("shard", "gather", "free", "reduce")
PREFETCH = "prefetch"  # the method that may be left out
WRAP = "wrap"  # of an engine that wraps a whole module


class YourUnit:
    """The parameters of one unit. An engine may keep attributes of its own on it.

    Attributes:
        name: such as "transformer.h.0"; ROOT of what is in no other unit.
        names: of the parameters. params: the parameters, whole where they are gathered.
        shard: what the engine's `shard` returned; the optimizer updates it in place.
        rank, world_size: of the default process group.
    """

    def __init__(self, name: str, params: Mapping[str, nn.Parameter], rank: int, world_size: int) -> None:
        self.name, self.names, self.params = name, tuple(params), tuple(params.values())
        self.rank, self.world_size = rank, world_size
        self.shard: Any = None

    def __repr__(self) -> str:
        return f"<unit {self.name}: {len(self.params)} parameters, rank {self.rank} of {self.world_size}>"


class _FreedMemory(RuntimeError):
    """An operation would use memory that is not there."""


class AccessGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it no operation runs on a tensor whose storage is smaller than it is: torch would read or write address 0."""

    def __init__(self, unit: YourUnit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {p.untyped_storage()._cdata: name for name, p in zip(unit.names, unit.params, strict=True)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tensors_in((args, kwargs or {})) if not func.is_view else ():
            storage, nbytes = t.untyped_storage(), _extent_bytes(t)
            if storage.nbytes() < nbytes:
                name = self._names.get(storage._cdata, "a tensor")
                raise _FreedMemory(f"uses {name}, whose storage has {storage.nbytes():,} bytes of {nbytes:,}")
        return func(*args, **(kwargs or {}))


def _extent_bytes(t: Tensor) -> int:
    """From the begin of its storage to its last element."""
    if not t.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return int((t.storage_offset() + last + 1) * t.element_size())


class YourEngine:
    """One object of the user's class. `step`: that in progress, for errors. `guards`: whether freed memory is guarded.

    Raises SpecError for what is no engine, or lacks a method that `strategy` needs.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._code = strategy.engine
        self.name = code_name(strategy.engine)
        self.step: int | None = None
        self.guards = True
        self.call_in_progress: tuple[str, float] | None = None  # what it is, and since when, of `time.monotonic`
        kind = loaded(ENGINE_FIELD, strategy.engine)
        self._module = getattr(kind, "__module__", "")
        if not callable(kind):
            raise SpecError(ENGINE_FIELD, f"{self.name} is a {type(kind).__name__}", "give a class with the methods "
                            "shard, gather, free and reduce")  # fmt: skip
        try:
            self._object = kind()
        except (Exception, SystemExit) as e:
            raise SpecError(ENGINE_FIELD, f"{self.name}() raised {type(e).__name__}: {first_line(e)}{self._line(e)}",
                            "it is made without arguments; a unit knows its rank and world_size") from e  # fmt: skip
        self.prefetches = self.has(PREFETCH)
        for method in (WRAP,) if wraps_modules(strategy) else needed(strategy):
            if not self.has(method):
                raise SpecError(ENGINE_FIELD, f"{self.name} has no method {method}, which {strategy.sharding} needs",
                                f"define {method}(self, unit)")  # fmt: skip

    def has(self, method: str) -> bool:
        return callable(getattr(self._object, method, None))

    def call(self, method: str, unit: YourUnit, during: str, *arguments: Any) -> Any:
        """What a method returns, of the unit or of other arguments. Raises SpecError for what it raises, except an abort or
        a timeout."""
        given = arguments or (unit,)
        return self._run(lambda: getattr(self._object, method)(*given), method, unit, during)

    def end(self, reduction: Callable[[], Any], unit: YourUnit) -> Any:
        """What the function returns that `reduce` has returned."""
        return self._run(reduction, "reduce", unit, "backward")

    def _run(self, call: Callable[[], Any], method: str, unit: YourUnit, during: str) -> Any:
        self.call_in_progress = self._title(method, unit, during), time.monotonic()
        try:
            with torch.no_grad(), AccessGuard(unit) if self.guards else nullcontext():
                return call()
        except _FreedMemory as e:
            raise self.mistake(method, unit, during, f"{e}{self._line(e)}", "give a parameter's storage its size before you "
                               "use it: p.untyped_storage().resize_(p.numel() * p.element_size())") from e  # fmt: skip
        except (RankAborted, WireTimeout, SpecError):
            raise
        except (Exception, SystemExit) as e:
            raise self.mistake(method, unit, during, f"raised {type(e).__name__}: {first_line(e)}{self._line(e)}",
                               "correct it") from e  # fmt: skip
        finally:
            self.call_in_progress = None

    def mistake(self, method: str, unit: YourUnit, during: str, what: str, hint: str) -> SpecError:
        """The error of one call."""
        return SpecError(ENGINE_FIELD, f"{self._title(method, unit, during)} {what}", hint)

    def _title(self, method: str, unit: YourUnit, during: str) -> str:
        """`Mine.gather(transformer.h.0) in the forward of step 3`."""
        step = "" if self.step is None else f" of step {self.step}"
        return f"{self.name}.{method}({unit.name})" + (f" in the {during}{step}" if during else "")

    def _line(self, error: BaseException) -> str:
        """The line of the user's code that raised, such as ", in the line x = 1"; "" if it is not known."""
        source = self._code.source if isinstance(self._code, UserCode) else ""
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
        own = next(((f.f_code, n) for f, n in frames if f.f_globals.get("__name__") == self._module), None)
        if own is None:
            return ""
        code, number = own
        lines, at = _lines_of(source, code.co_name), number - code.co_firstlineno
        line = lines[at] if 0 <= at < len(lines) else linecache.getline(code.co_filename, number)
        return f", in the line {line.strip()}" if line.strip() else ""


def wraps_modules(strategy: Strategy) -> bool:
    """Whether the user's class wraps whole modules (your_module.py), and not units (yours.py). Raises SpecError."""
    return callable(getattr(loaded(ENGINE_FIELD, strategy.engine), WRAP, None))


def needed(strategy: Strategy) -> tuple[str, ...]:
    """The methods that the lab calls under a sharding."""
    if strategy.is_replicated:
        return ("shard", "reduce")
    return METHODS if frees_after_backward(strategy) else ("shard", "gather", "reduce")


def frees_after_backward(strategy: Strategy) -> bool:
    """Whether whole parameters go when a unit's backward is over: ZeRO-2 and 3."""
    return not strategy.is_replicated and not strategy.shards_optimizer_only


def tensors_of(returned: Any) -> list[Tensor] | None:
    """The tensors that a method returned: one, or a list or dict of them; None for anything else."""
    found = list(returned.values()) if isinstance(returned, Mapping) else returned
    found = [found] if isinstance(found, Tensor) else found
    is_list = isinstance(found, (list, tuple)) and all(isinstance(t, Tensor) for t in found)
    return [t.detach() for t in found] if is_list else None


def kind_of_value(returned: Any) -> str:
    return "nothing" if returned is None else f"a {type(returned).__name__}"


def _lines_of(source: str, function: str) -> list[str]:
    """The lines of a function in a module's text, from its first decorator on; [] if it has none or several."""
    tree = ast.parse(source or "")
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function]
    if len(found) != 1:
        return []
    first = min([found[0].lineno, *(d.lineno for d in found[0].decorator_list)])
    return textwrap.dedent("\n".join(source.splitlines()[first - 1 : found[0].end_lineno])).splitlines()
