"""The state of a backend (parameters, optimizer state, persistent buffers, and `module_states`), to and from other places:
initial values (`fill`), host memory (`suspend_state`, `resume_state`), and the flat chunks of a checkpoint (`snapshot`,
`targets`). To the next backend: transfer.py. Values are copied bit for bit.

Note: shares of a checkpoint. Ranks that hold the same range of a parameter divide it evenly, so that nothing is written
twice. Every rank has all layouts, gathered when the backend is built, so each computes its share without communication, also
when some ranks are lost."""

import copy
import io
import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_lab.backends.base import Backend, original_name, scalars_of, seed_state, state_slots
from fsdp_lab.base.errors import ArgumentError, FieldError
from fsdp_lab.base.tensors import map_tensors
from fsdp_lab.engine import ParamShard
from fsdp_lab.engine.extras.refusals import gather_texts
from fsdp_lab.models.build import Values

PARAM = "param"
MODULE = "module."  # names of a checkpoint's chunks that have what `module_states` returns begin so
_EXTRA = "_extra_state"  # as in `Module.state_dict`
T = TypeVar("T")

Range = Sequence[int]  # start, stop
Layout = Mapping[str, Range]  # of one rank: parameter -> its range of the flat parameter, possibly empty


def fill(backend: Backend, values: Values) -> None:
    """Set every parameter, and buffers that there are values for; each rank reads only its own ranges. Not collective."""
    backend.allocate()
    for shard in backend.param_shards():
        if shard.numel:
            values.read_into(shard.name, shard.start, shard.local)
    for name, buffer in buffers_in(backend.module):
        if name in values.buffers:
            flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
            values.read_into(name, 0, flat)
            buffer.copy_(flat.view(buffer.shape))


@dataclass(frozen=True, kw_only=True)
class SuspendedState:
    """This rank's part of a training, in host memory; it fits a backend of the same Spec and rank."""

    values: Mapping[tuple[str, str], Tensor]  # (parameter, slot or PARAM) -> this rank's range of it, flat
    slots: tuple[str, ...]
    scalars: Mapping[str, float]  # of the optimizer, such as its number of steps
    buffers: tuple[Tensor, ...]
    modules: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.values.values(), *self.buffers))


def suspend_state(backend: Backend) -> SuspendedState:
    """Copy parameters, optimizer state and buffers to the host; collective. The backend may be released afterwards."""
    slots, scalars = optimizer_slots([backend])
    kept = [(s, slot) for s in backend.param_shards() for slot in _kept(backend, s, slots)]
    values = {(s.name, slot): _on_host(slot_values(backend, s, slot)) for s, slot in kept}
    buffers = tuple(_on_host(b) for _, b in buffers_in(backend.module))
    modules = module_states(backend)
    return SuspendedState(values=values, slots=slots, scalars=scalars, buffers=buffers, modules=modules)


def _on_host(values: Tensor) -> Tensor:
    """A copy."""
    return values.detach().to("cpu", copy=True)


def resume_state(state: SuspendedState, backend: Backend) -> None:
    """Copy back into a new backend of the same Spec. Not collective."""
    backend.allocate()
    seed_state(backend, state.slots, state.scalars, backend.param_shards())
    for shard in backend.param_shards():
        for slot in _kept(backend, shard, state.slots):
            value = state.values[shard.name, slot]
            if value.numel():
                slot_target(backend, shard, slot).copy_(value)
    for (_, target), source in zip(buffers_in(backend.module), state.buffers, strict=True):
        target.copy_(source)
    set_module_states(backend, state.modules)


def buffers_in(module: nn.Module, *, persistent: bool = True) -> list[tuple[str, Tensor]]:
    """The buffers that are state, such as BatchNorm's statistics, or the others, with their names in the model, in order."""
    return sorted(
        (path + name, b)
        for path, m in _modules(module).items()
        for name, b in m._buffers.items()
        if b is not None and (name in m._non_persistent_buffers_set) != persistent
    )


def _modules(module: nn.Module) -> dict[str, nn.Module]:
    """All modules by what the names of their buffers begin with: "", or "layers.0."."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    return {original_name(f"{path}.x".lstrip("."))[:-1]: m for path, m in inner.named_modules()}


def module_states(backend: Backend) -> dict[str, Any]:
    """Copies of the state of modules that is neither a parameter nor a persistent buffer, by name: what `get_extra_state`
    returns, the states of random generators that are attributes, and those buffers of a user's module that are not
    persistent and have changed. (Others, such as rotary frequencies, are constants, which a new model has already.)"""
    states = _beside_tensors(_modules(backend.module))
    if backend.constants is not None:
        for name, b in buffers_in(backend.module, persistent=False):
            was = backend.constants.get(name)
            # A cast, as `Precision.buffer` says, is no change.
            if was is None or not torch.equal(was.to(b.dtype), b.cpu()):
                states[name] = b.detach().clone()
    return states


def set_module_states(backend: Backend, states: Mapping[str, Any]) -> None:
    """Give a new backend what `module_states` returned."""
    modules = _modules(backend.module)
    for full, value in states.items():
        path, dot, name = full.rpartition(".")
        m = modules[path + dot]
        if _set_beside_tensors(m, name, value):
            continue
        if (b := m._buffers.get(name)) is not None and b.shape == value.shape:
            b.copy_(value)
        else:  # as a cache that grows
            m.register_buffer(name, value.to(backend.device), persistent=False)


_Random = tuple[Callable[[Any], Any], Callable[[Any, Any], object]]
_RANDOM: Mapping[type, _Random] = {  # how to take and to set the state of a generator; numpy's as lists and numbers
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (lambda r: _listed(r.bit_generator.state), lambda r, s: setattr(r.bit_generator, "state", s)),
    np.random.RandomState: (lambda r: _listed(r.get_state(legacy=False)), np.random.RandomState.set_state),
}


def _listed(state: Any) -> Any:
    return json.loads(json.dumps(state, default=np.ndarray.tolist))


def _beside_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Copies, by name, what `get_extra_state` of these modules returns, and the states of generators that are attributes."""
    states: dict[str, Any] = {}
    for path, m in modules.items():
        if type(m).get_extra_state is not nn.Module.get_extra_state:
            states[path + _EXTRA] = copy.deepcopy(map_tensors(torch.detach, m.get_extra_state()))
        states |= {path + name: _RANDOM[type(v)][0](v) for name, v in vars(m).items() if type(v) in _RANDOM}
    return states


def _set_beside_tensors(m: nn.Module, name: str, value: Any) -> bool:
    """Set it, if the name is that of such a state."""
    if name == _EXTRA:
        m.set_extra_state(value)
    elif (kind := type(vars(m).get(name))) in _RANDOM:
        _RANDOM[kind][1](vars(m)[name], value)
    else:
        return False
    return True


class ForwardState:
    """Copies what a forward may change of a backend's modules before a step, and gives it back when the step is discarded:
    buffers, what `get_extra_state` returns, and random generators. It does so in place, as the step is computed again with
    the same modules, and leaves out modules whose buffers are all constants (see `module_states`)."""

    def __init__(self, backend: Backend) -> None:
        own, modules = backend.constants is not None, _modules(backend.module)
        self._buffered = [m for m in modules.values() if own or m._buffers.keys() - m._non_persistent_buffers_set]
        self._others = {path: m for path, m in modules.items() if _beside_tensors({path: m})}

    def copy(self) -> None:
        """Waits for the device only where `get_extra_state` does."""
        self._before = [dict(m._buffers) for m in self._buffered]  # a forward may put others in their place
        all_buffers = (b for before in self._before for b in before.values() if b is not None)
        # Nobody writes to an expanded one.
        self._changing = [b.detach() for b in all_buffers if b.layout is torch.strided and 0 not in b.stride()]
        self._copies = [torch.empty_like(b) for b in self._changing]
        _copy_all(self._changing, self._copies)
        self._states = _beside_tensors(self._others)

    def give_back(self) -> None:
        """Restores the last `copy`; may be called again."""
        for m, before in zip(self._buffered, self._before, strict=True):
            m._buffers.clear()
            m._buffers.update(before)
        _copy_all(self._copies, self._changing)
        for full, value in copy.deepcopy(self._states).items():
            path, dot, name = full.rpartition(".")
            _set_beside_tensors(self._others[path + dot], name, value)


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copies in a few launches on a GPU, where they are of one dtype."""
    for dtype in {t.dtype for t in sources}:
        of = [i for i, t in enumerate(sources) if t.dtype == dtype]
        torch._foreach_copy_([targets[i] for i in of], [sources[i] for i in of])


def layout_of(shards: Iterable[ParamShard]) -> Layout:
    return {s.name: (s.start, s.stop) for s in shards}


def slot_values(backend: Backend, shard: ParamShard, slot: str) -> Tensor:
    """This rank's values of a slot, flat; zeros if the optimizer has no state because there was no gradient."""
    if slot == PARAM:
        return shard.local
    parked = backend.parked.get(shard.name)
    values = (state_slots(backend.optimizer, shard) if parked is None else parked).get(slot)
    return torch.zeros_like(shard.local) if values is None else values


def slot_target(backend: Backend, shard: ParamShard, slot: str) -> Tensor:
    """The tensor to write a slot's values to; of optimizer slots after `seed_state`."""
    if slot == PARAM:
        return shard.local
    parked = backend.parked.get(shard.name)
    return (state_slots(backend.optimizer, shard) if parked is None else parked)[slot]


def has_slots(backend: Backend, shard: ParamShard) -> bool:
    """Returns whether the optimizer keeps state for a parameter: it is not frozen, or its state is parked."""
    return shard.param is not None or shard.name in backend.parked


def park(backend: Backend, slots: Collection[str], shards: Iterable[ParamShard]) -> None:
    """Make room for the optimizer state of frozen parameters."""
    for s in shards:
        if s.param is None:
            backend.parked[s.name] = {slot: torch.zeros_like(s.local) for slot in slots}


def _kept(backend: Backend, shard: ParamShard, slots: Sequence[str]) -> Sequence[str]:
    """PARAM, and the slots of a parameter that is not frozen."""
    return (PARAM, *slots) if has_slots(backend, shard) else (PARAM,)


def gather_json(mine: Any) -> list[Any]:
    """A value of each rank, by rank, as JSON gives it back: tuples become lists; collective. torch's functions for objects
    would unpickle, and so execute, whatever arrives."""
    text, world = json.dumps(mine), dist.group.WORLD
    assert world is not None
    texts = [text] if world.size() == 1 else gather_texts(text, world, torch.device("cpu"))
    return [json.loads(text) for text in texts]


def together(make: Callable[[], T]) -> T:
    """Returns what `make` returns; collective. If it raises a FieldError on one rank, all ranks raise that."""
    error, made = None, None
    try:
        made = make()
    except FieldError as e:
        error = e
    if first := next((e for e in gather_json(error and error.to_dict()) if e is not None), None):
        raise FieldError.from_dict(first)
    return cast(T, made)


def optimizer_slots(backends: Sequence[Backend]) -> tuple[tuple[str, ...], dict[str, float]]:
    """The slots and the scalars of the optimizers, the same on every rank, even if a rank's first shard is empty."""
    mine: set[str] = set().union(*(_own_slots(b) for b in backends))
    by_rank = gather_json((sorted(mine), most_steps([scalars_of(b.optimizer) for b in backends])))
    return tuple(sorted(set().union(*(slots for slots, _ in by_rank)))), most_steps([scalars for _, scalars in by_rank])


def most_steps(scalars: Sequence[dict[str, float]]) -> dict[str, float]:
    return max(scalars, key=lambda one: one.get("step", 0.0))


def _own_slots(backend: Backend) -> set[str]:
    """Returns slots of all parameters, also of those whose storage is freed, of which there are no parts."""
    of_shards = (shard.slots(backend.optimizer) for shard in backend.param_shards())
    states = (*of_shards, *backend.parked.values())
    return {slot for state in states for slot, t in state.items() if isinstance(t, Tensor) and t.dim()}


# -- the chunks of a checkpoint ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`name[start : start + len(values)]` of a flat tensor."""

    name: str
    start: int
    values: Tensor  # [n]; in a snapshot on the CPU; in a target the tensor to fill

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def shapes_of(backend: Backend) -> dict[str, list[int]]:
    return {p.name: list(p.shape) for p in backend.param_shards()}


def slots_of(backend: Backend) -> dict[str, object]:
    """The optimizer's slots on this rank, its number of steps and its other scalars."""
    scalars = scalars_of(backend.optimizer)
    return {"slots": sorted(_own_slots(backend)), "steps": int(scalars.get("step", 0)), "scalars": scalars}


def snapshot(backend: Backend, layouts: Sequence[Layout], rank: int, writers: Collection[int]) -> list[Chunk]:
    """A CPU copy of the share that this rank writes with the ranks `writers`. Raises LookupError, on each of them, if they
    do not hold all of the model."""
    ranges = dict(_shares(layouts, rank, sorted(writers), shapes_of(backend)))
    slots = sorted(_own_slots(backend))
    chunks = []
    for shard in backend.param_shards():
        start, stop = ranges[shard.name]
        if start < stop:
            for slot in _kept(backend, shard, slots):
                values = slot_values(backend, shard, slot)[start - shard.start : stop - shard.start]
                chunks.append(Chunk(name=key(shard.name, slot), start=start, values=_on_host(values)))
    for path, buffer in buffers_in(backend.module):
        chunks.append(Chunk(name=buffer_key(rank, path), start=0, values=_on_host(buffer.reshape(-1))))
    for name, value in module_states(backend).items():
        chunks.append(Chunk(name=f"{MODULE}{rank}.{name}", start=0, values=_encoded(name, value)))
    return chunks


def targets(
    backend: Backend, slots: Sequence[str], scalars: Mapping[str, float], buffers_of: int, modules: Mapping[str, int]
) -> list[Chunk]:
    """Allocates a new backend's parameters and optimizer state, and returns what a checkpoint is to fill. Not collective.
    `slots`, `scalars`: of the saved optimizer; those that the new one does not keep are left out. `buffers_of`: the rank
    whose saved buffers this one takes. `modules`: the names of its other chunks, for `set_modules`, and their sizes."""
    backend.allocate()
    slots = [slot for slot in slots if slot in backend.kept.slots]
    seed_state(backend, slots, scalars, backend.param_shards())
    kept = [(p, slot) for p in backend.param_shards() if p.numel for slot in _kept(backend, p, slots)]
    wanted = [Chunk(name=key(p.name, slot), start=p.start, values=slot_target(backend, p, slot)) for p, slot in kept]
    buffers = ((buffer_key(buffers_of, path), b) for path, b in buffers_in(backend.module))
    states = [Chunk(name=name, start=0, values=torch.empty(n, dtype=torch.uint8)) for name, n in modules.items()]
    return [*wanted, *(Chunk(name=name, start=0, values=b.view(-1)) for name, b in buffers), *states]


def set_modules(backend: Backend, filled: Sequence[Chunk]) -> None:
    """Give a new backend the module states among filled targets."""
    states = {c.name.split(".", 2)[2]: c.values for c in filled if c.name.startswith(MODULE)}
    set_module_states(backend, {name: _decoded(content) for name, content in states.items()})


def _encoded(name: str, value: Any) -> Tensor:
    """Returns the value as bytes that are read without running anything. Raises ArgumentError."""
    file = io.BytesIO()
    try:
        torch.save(map_tensors(lambda t: t.cpu().clone(), value), file)
        content = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        _decoded(content)
    except Exception as e:  # of many classes
        reason = f"{name} has things of classes that a checkpoint does not hold"
        raise ArgumentError("save", reason, "return numbers, text, tensors, and lists and dicts of these") from e
    return content


def _decoded(content: Tensor) -> Any:
    return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)


def key(name: str, slot: str) -> str:
    """The name of a flat tensor in a checkpoint."""
    return f"parameter.{name}" if slot == PARAM else f"optimizer.{slot}.{name}"


def buffer_key(rank: int, path: str) -> str:
    """Each rank has its own: BatchNorm's statistics are of the samples of one rank."""
    return f"buffer.{rank}.{path}"


def _shares(
    layouts: Sequence[Layout], rank: int, writers: Sequence[int], shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields (parameter, the range of it that `rank` writes); see the note on shares."""
    for name, shape in shapes.items():
        holders: dict[tuple[int, int], list[int]] = {}
        for writer in writers:
            start, stop = layouts[writer][name]
            if start < stop:
                holders.setdefault((start, stop), []).append(writer)
        held = sum(stop - start for start, stop in holders)  # two ranges are equal or disjoint
        if held != math.prod(shape):
            raise LookupError(f"ranks {list(writers)} do not hold all of {name}")
        (start, stop), among = next(((r, h) for r, h in holders.items() if rank in h), ((0, 0), [rank]))
        i, n = among.index(rank), len(among)
        yield name, (start + (stop - start) * i // n, start + (stop - start) * (i + 1) // n)
