"""`YourEngine`: an engine of the user's, whose methods the lab calls. Whatever they raise is told in the user's terms: the
method, the unit, the step and the line. `YourUnit`: what they are given. `take_shard`: what is where in what a rank
keeps."""

from __future__ import annotations

import linecache
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed as dist, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.tensors import tensors_in
from fsdp_lab.models.configs import first_line
from fsdp_lab.spec.spec import ENGINE_FIELD, Strategy
from fsdp_lab.spec.user_code import UserCode, code_name, loaded
from fsdp_lab.wire import RankAborted, WireTimeout

PREFETCH = "prefetch"  # the method that may be left out


class YourUnit:
    """The parameters of one unit. An engine may keep attributes of its own on it.

    Attributes:
        name: such as "transformer.h.0"; ROOT of what is in no other unit.
        names: of the parameters. params: the parameters, whole where they are gathered.
        shard: what the engine's `shard` returned; the optimizer updates it in place.
        rank, world_size: of the default process group.
    """

    def __init__(self, name: str, params: Mapping[str, nn.Parameter]) -> None:
        self.name, self.names, self.params = name, tuple(params), tuple(params.values())
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.shard: Any = None

    def __repr__(self) -> str:
        return f"<unit {self.name}: {len(self.params)} parameters, rank {self.rank} of {self.world_size}>"


class _FreedMemory(RuntimeError):
    """An operation would use memory that is not there."""


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
                raise _FreedMemory(f"uses {name}, whose storage has {storage.nbytes():,} bytes of {nbytes:,}")
        return func(*args, **(kwargs or {}))


class YourEngine:
    """One object of the user's class. `step`: the one in progress, for errors. `guards`: whether freed memory is guarded.
    `in_progress`: the call, as text, and since when, of `time.monotonic`. Raises SpecError for what is no engine, or lacks
    one of the methods that are `needed`."""

    def __init__(self, strategy: Strategy, needed: Sequence[str]) -> None:
        self._code, self.name = strategy.engine, code_name(strategy.engine)
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
        self.prefetches = callable(getattr(self._object, PREFETCH, None))
        for method in needed:
            if not callable(getattr(self._object, method, None)):
                reason = f"{self.name} has no method {method}, which {strategy.sharding} needs"
                raise SpecError(ENGINE_FIELD, reason, f"define {method}(self, unit)")

    def call(self, method: str, unit: YourUnit, during: str = "", function: Callable[[], Any] | None = None) -> Any:
        """Returns what the method returns, or what `function` does, which an earlier call returned. What it raises becomes a
        SpecError, but for aborts."""
        self.in_progress = self._title(method, unit, during), time.monotonic()
        try:
            with torch.no_grad(), _Guard(unit) if self.guards else nullcontext():
                return getattr(self._object, method)(unit) if function is None else function()
        except (RankAborted, WireTimeout, SpecError):
            raise
        except _FreedMemory as e:
            size = "p.untyped_storage().resize_(p.numel() * p.element_size())"
            hint = f"give its storage its size before you use it: {size}"
            raise self.mistake(method, unit, during, f"{e}{self._line(e)}", hint) from e
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
        """The line of the user's code that raised, such as ", in the line x = 1"; "" if it is not known."""
        frames = traceback.walk_tb(error.__traceback__)
        own = [(f.f_code, n) for f, n in frames if f.f_globals.get("__name__") == self._module]
        if not own:
            return ""
        code, number = own[-1]
        lines = self._code.source.splitlines() if isinstance(self._code, UserCode) else []
        begins = [i for i, line in enumerate(lines) if line.strip().startswith(f"def {code.co_name}(")]
        at = begins[0] + number - code.co_firstlineno if len(begins) == 1 else len(lines)
        line = lines[at] if at < len(lines) else linecache.getline(code.co_filename, number)
        return f", in the line {line.strip()}" if line.strip() else ""


class KeptPart(NamedTuple):
    """The part of a parameter that a rank keeps: elements [start, stop), at `offset` in tensor `tensor` of its tensors."""

    start: int = 0
    stop: int = 0
    tensor: int = 0
    offset: int = 0

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """[stop - start], a view of these, which are laid out as the tensors that are kept."""
        return tensors[self.tensor].view(-1)[self.offset : self.offset + self.stop - self.start]


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


def take_shard(engine: YourEngine, unit: YourUnit) -> tuple[list[Tensor], list[KeptPart]]:
    """Lets the engine shard a unit whose parameters exist. Returns the tensors, flat, and what is in them of each parameter.
    Raises SpecError. The parameters hold the numbers of their elements, as bits, from 1 on, and the tensors are searched for
    these. So an engine may lay its part out as it likes, with one range of each parameter; 0 is what it pads with."""
    wrong = partial(engine.mistake, "shard", unit, "")
    firsts = [1]
    for p in unit.params:
        firsts.append(firsts[-1] + p.numel())
        numbers = torch.arange(firsts[-2], firsts[-1], dtype=torch.int32, device=p.device)
        p.detach().view(-1).view(torch.int32).copy_(numbers)
    unit.shard = engine.call("shard", unit)
    tensors = tensors_of(unit.shard)
    if tensors is None:
        hint = "return the tensor that this rank keeps and trains, or a list of them"
        raise wrong(f"returned {told(unit.shard)}", hint)
    for t in tensors:
        if t.dtype != torch.float32 or not t.is_contiguous():
            what = "a tensor that is not contiguous" if t.dtype == torch.float32 else f"a tensor of {t.dtype}"
            raise wrong(f"returned {what}", "keep float32 values in contiguous tensors")
    flats = [t.view(-1) for t in tensors]
    parts: list[KeptPart] = []
    for name, first, end in zip(unit.names, firsts, firsts[1:], strict=False):
        part = KeptPart()
        for i, bits in enumerate(t.view(torch.int32) for t in flats):
            at = torch.nonzero((bits >= first) & (bits < end)).view(-1)
            if not at.numel():
                continue
            offset, n = int(at[0]), at.numel()
            start = int(bits[offset])
            if part.stop or not torch.equal(bits[offset : offset + n], torch.arange(start, start + n).to(bits)):
                raise wrong(f"keeps several pieces of {name}", "keep one range of its elements, in their order")
            part = KeptPart(start - first, start - first + n, i, offset)
        parts.append(part)
    if sum(int(torch.count_nonzero(t.view(torch.int32))) for t in flats) != sum(p.stop - p.start for p in parts):
        hint = "keep elements of the parameters as they are, and zeros as padding"
        raise wrong("returned values that are not those of the parameters", hint)
    return flats, parts


def layout_of_ranks(
    engine: YourEngine, unit: YourUnit, by_rank: Sequence[Any], *, replicated: bool
) -> list[list[KeptPart]]:
    """Returns what the ranks keep of each parameter, by rank. `by_rank`: how many tensors each keeps, and its parts,
    as JSON. Raises SpecError, the same on every rank, unless each element is on one rank, or, if `replicated`, on
    all. What is empty on a rank lies in the tensor that it has on another one: a transfer goes through storages in
    one order on all ranks."""
    wrong = partial(engine.mistake, "shard", unit, "")
    counts = [count for count, _ in by_rank]
    if other := next((rank for rank, count in enumerate(counts) if count != counts[0]), None):
        what = f"returned {counts[0]} tensors on rank 0 and {counts[other]} on rank {other}"
        raise wrong(what, "return as many on every rank; they may be empty")
    layout = [[KeptPart(*row) for row in rows] for rows in zip(*(parts for _, parts in by_rank), strict=True)]
    for name, p, parts in zip(unit.names, unit.params, layout, strict=True):
        for at in sorted({0, *(edge for part in parts for edge in part[:2])} - {p.numel()}):
            ranks = [rank for rank, part in enumerate(parts) if part.start <= at < part.stop]
            if len(ranks) != (unit.world_size if replicated else 1):
                where = " and ".join(f"on rank {rank}" for rank in ranks) or "on no rank"
                hint = "return unit.params, or choose another sharding"
                if not replicated:
                    hint = "divide all elements among the ranks, each for one; where they do not divide evenly, pad"
                raise wrong(f"keeps element {at:,} of {name} {where}", hint)
        tensor = next((part.tensor for part in parts if part.start < part.stop), 0)
        parts[:] = [part if part.start < part.stop else KeptPart(tensor=tensor) for part in parts]
    return layout
