"""`YourEngine`: an engine of the user's, whose methods the lab calls. Whatever they raise is told in the user's terms: the
method, the unit, the step and the line. `YourUnit`: what they are given. `take_shard`: what a rank keeps of it."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.tensors import tensors_in
from fsdp_lab.models.configs import first_line
from fsdp_lab.spec.spec import ENGINE_FIELD, Strategy
from fsdp_lab.spec.user_code import code_name, loaded
from fsdp_lab.wire import RankAborted, WireContext, WireTimeout


class YourUnit:
    """The parameters of one unit. An engine may keep attributes of its own on it.

    Attributes:
        name: such as "transformer.h.0"; ROOT of what is in no other unit.
        names: of the parameters. params: the parameters, whole where they are gathered.
        shard: what the engine's `shard` returned; the optimizer updates it in place.
        rank, world_size: of the default process group."""

    def __init__(self, name: str, params: Mapping[str, nn.Parameter]) -> None:
        self.name, self.names, self.params = name, tuple(params), tuple(params.values())
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.shard: Any = None

    def __repr__(self) -> str:
        return f"<unit {self.name}: {len(self.params)} parameters, rank {self.rank} of {self.world_size}>"


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it no operation runs on a tensor whose storage is smaller than it is: torch would read or write address 0."""

    def __init__(self, unit: YourUnit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {p.untyped_storage()._cdata: name for name, p in zip(unit.names, unit.params, strict=True)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tensors_in((args, kwargs or {})) if not func.is_view else ():
            storage = t.untyped_storage()
            last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
            nbytes = (t.storage_offset() + last + 1) * t.element_size() if t.numel() else 0
            if storage.nbytes() < nbytes:
                name = self._names.get(storage._cdata, "a tensor")
                hint = "give it its size before you use it: p.untyped_storage().resize_(p.numel() * p.element_size())"
                raise RuntimeError(f"{name} has a storage of {storage.nbytes():,} bytes of {nbytes:,}; {hint}")
        return func(*args, **(kwargs or {}))


class YourEngine:
    """One object of the user's class. `step`: the one in progress, for errors. `guards`: whether freed memory is guarded.
    `in_progress`: the call, as text, and since when, of `time.monotonic`. Raises SpecError for what is no engine, or lacks
    one of the methods that are `needed`."""

    def __init__(self, strategy: Strategy, needed: Sequence[str], context: WireContext | None) -> None:
        self.name, self._context = code_name(strategy.engine), context
        self.step: int | None = None
        self.guards = True
        self.in_progress: tuple[str, float] | None = None
        kind = loaded(ENGINE_FIELD, strategy.engine)
        self._module = getattr(kind, "__module__", "")
        try:
            self._object = kind()
        except (Exception, SystemExit) as e:
            reason = f"{self.name}() raised {type(e).__name__}: {first_line(e)}{self._line(e)}"
            hint = "it is made without arguments; a unit knows its rank and world_size"
            raise SpecError(ENGINE_FIELD, reason, hint) from e
        self.prefetches = callable(getattr(self._object, "prefetch", None))
        for method in needed:
            if not callable(getattr(self._object, method, None)):
                reason = f"{self.name} has no method {method}, which {strategy.sharding} needs"
                raise SpecError(ENGINE_FIELD, reason, f"define {method}(self, unit)")

    def call(self, method: str, unit: YourUnit, during: str = "", function: Callable[[], Any] | None = None) -> Any:
        """Returns what the method returns, or what `function` does, which an earlier call returned. What it raises becomes a
        SpecError, but for aborts."""
        self.in_progress = self._title(method, unit, during), time.monotonic()
        try:
            scope = nullcontext() if self._context is None else self._context.unit_scope(unit.name)
            with torch.no_grad(), scope, _Guard(unit) if self.guards else nullcontext():
                return getattr(self._object, method)(unit) if function is None else function()
        except (RankAborted, WireTimeout, SpecError):
            raise
        except (Exception, SystemExit) as e:
            what = f"raised {type(e).__name__}: {first_line(e)}{self._line(e)}"
            raise self.mistake(method, unit, during, what, "correct it") from e
        finally:
            self.in_progress = None

    def mistake(self, method: str, unit: YourUnit, during: str, what: str, hint: str) -> SpecError:
        """The error of one call."""
        return SpecError(ENGINE_FIELD, f"{self._title(method, unit, during)} {what}", hint)

    def _title(self, method: str, unit: YourUnit, during: str) -> str:
        """`Mine.gather(transformer.h.0) in the forward of step 3`."""
        step = "" if self.step is None else f" of step {self.step}"
        return f"{self.name}.{method}({unit.name})" + (f" in the {during}{step}" if during else "")

    def _line(self, error: BaseException) -> str:
        """The line of the user's code that raised, such as ", in line 2 of fill"; "" if none of it did."""
        frames = traceback.walk_tb(error.__traceback__)
        own = [(f.f_code, number) for f, number in frames if f.f_globals.get("__name__") == self._module]
        return "".join(f", in line {number - code.co_firstlineno + 1} of {code.co_name}" for code, number in own[-1:])


def tensors_of(returned: Any) -> list[Tensor] | None:
    """The tensors that a method returned: one, or a list or dict of them; None for anything else."""
    values = list(returned.values()) if isinstance(returned, Mapping) else returned
    values = [values] if isinstance(values, Tensor) else values
    is_list = isinstance(values, (list, tuple)) and all(isinstance(t, Tensor) for t in values)
    return [t.detach() for t in values] if is_list else None


def told(returned: Any) -> str:
    """`nothing`, `a tensor of 1,296 elements`, `12 tensors of 15,984 elements in all`."""
    tensors = tensors_of(returned)
    if tensors is None:
        return "nothing" if returned is None else f"a {type(returned).__name__}"
    elements = f"{sum(t.numel() for t in tensors):,} elements"
    return f"a tensor of {elements}" if len(tensors) == 1 else f"{len(tensors)} tensors of {elements} in all"


def take_shard(engine: YourEngine, unit: YourUnit, *, replicated: bool) -> tuple[list[Tensor], list[list[range]]]:
    """Lets the engine shard a unit whose parameters exist. Returns the tensors, flat, and by tensor the ranges of parameters
    that follow one another in it. Raises SpecError unless it holds what it should: see backends/yours.py."""
    sizes = [p.numel() for p in unit.params]
    counted = torch.arange(sum(sizes), device=unit.params[0].device)
    values = (counted % 2**24 + 1).float()  # by which the parts are known; exact in float32
    for p, own in zip(unit.params, torch.split(values, sizes), strict=True):
        p.detach().copy_(own.view_as(p))
    unit.shard = engine.call("shard", unit)
    tensors = tensors_of(unit.shard) or []
    groups = [sizes] if len(tensors) == 1 else [[n] for n in sizes]
    rank, world_size = (0, 1) if replicated else (unit.rank, unit.world_size)
    wholes = torch.split(values, [sum(group) for group in groups])
    right = [F.pad(whole, (0, -len(whole) % world_size)).chunk(world_size)[rank] for whole in wholes]
    like = [t for t in tensors if t.is_contiguous() and (t.dtype, t.device) == (torch.float32, values.device)]
    flats = [t.view(-1) for t in like]
    is_right = len(flats) == len(right) and all(map(torch.equal, flats, right))
    if not is_right or (replicated and {t.data_ptr() for t in flats} != {p.data_ptr() for p in unit.params}):
        what, hint = "the memory of unit.params, which no_shard never gathers", "return unit.params"
        if not replicated:
            what = f"part {rank} of {world_size} of unit.params in float32 on {values.device}"
            hint = "join them flat, pad with zeros to a multiple of world_size, and return a clone of chunk number rank"
        raise engine.mistake("shard", unit, "", f"returned {told(unit.shard)}, not {what}", hint)
    return flats, [_within(rank * len(t), len(t), group) for t, group in zip(flats, groups, strict=True)]


def _within(left: int, width: int, sizes: Sequence[int]) -> list[range]:
    """The ranges of parameters with these sizes that are in [left, left + width) of all of them joined."""
    begins = [end - n for end, n in zip(accumulate(sizes), sizes, strict=True)]
    places = [(left - begin, n) for begin, n in zip(begins, sizes, strict=True)]
    return [range(min(max(at, 0), n), min(max(at + width, 0), n)) for at, n in places]
