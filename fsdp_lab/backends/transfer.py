"""`StateTransfer`: the parameters, optimizer state and buffers of a training, on their way from one backend to another.

Note: the plan. Every rank has all ranges, before and after, so all compute the same plan without communication. A rank
takes what it holds from itself, and the rest from the next rank (cyclically) that holds it, so that replicas share the
sending. No exchange is larger than a bounded number of elements on any rank.

Note: memory. The new backend has no storage yet. Parameters move in batches, and what shares storage, such as the flat
buffer of a unit, in consecutive ones. A batch first allocates what it fills; a storage of the old backend, with its
optimizer state, is freed once all of its parameters have arrived on every rank. So the peak is that of the larger
layout, and about one unit.

Note: other arguments of the optimizer. All state goes with the parameters, also what the new optimizer does not keep, which
an abort may give back, and that of parameters that are frozen now (`Backend.parked`); `drop_slots` frees it at the end. What
is new, or of a parameter that was frozen before, begins as in a new optimizer. The number of steps goes on.

Note: an abort. The old values are freed only after a barrier behind their batch, so a batch that one rank lacks is on all
ranks in the old backend. Afterwards the ranks compare how many batches each has completed: those that all have are in the
new backend, the rest in the old one (`settle`), and the next transfer takes the state from both. Exchanges use
buffers of the transfer's, so that an operation that ends late writes to no backend."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, distributed as dist

from fsdp_lab.backends import state
from fsdp_lab.backends.base import Backend, drop_slots, free, seed_state, storage_id
from fsdp_lab.base.streams import streams_of
from fsdp_lab.engine import ParamShard

_BATCH_ELEMENTS = 1 << 16, 4 << 20  # of parameters moved at once, at least and at most: 16 MiB of fp32
_BATCHES = 64  # of a model, between these bounds

Parts = Mapping[str, tuple[Tensor, int]]  # parameter -> this rank's part of it, flat, and where the part begins
Busy = Callable[[], Collection[int]]  # addresses of storage that an aborted operation may still use


def transfer_state(old: Backend, new: Backend) -> None:
    """Move parameters, optimizer state and buffers into a new backend, bit for bit; collective."""
    StateTransfer(StateSource.of(old), new).run()
    drop_slots(new)


@dataclass(frozen=True, kw_only=True)
class StateSource:
    """The backends that hold the state of a training: one, or several after an interrupted transfer; alike on all ranks."""

    holders: Mapping[str, Backend]  # by parameter
    buffers: Backend

    @classmethod
    def of(cls, backend: Backend) -> "StateSource":
        return cls(holders={s.name: backend for s in backend.param_shards()}, buffers=backend)

    @property
    def backends(self) -> list[Backend]:
        return list(dict.fromkeys((self.buffers, *self.holders.values())))

    def shards(self) -> list[ParamShard]:
        """The shards of all parameters, where they are."""
        by_backend = {b: {s.name: s for s in b.param_shards()} for b in self.backends}
        return [by_backend[backend][name] for name, backend in self.holders.items()]

    def free_rest(self, busy: Collection[int]) -> None:
        """Free the storage of parameters, in all backends, that holds none of these."""
        held = {storage_id(s.local) for s in self.shards()}
        for backend in self.backends:
            _free_shards(backend, [s for s in backend.param_shards() if storage_id(s.local) not in held], busy)


class StateTransfer:
    """See the module. Collective; all ranks make it and `run` it. `completed`: how many batches this rank has received."""

    def __init__(self, source: StateSource, new: Backend) -> None:
        self._source, self.new = source, new
        self._streams = streams_of(new.device)
        sources = source.shards()
        self._from = {s.name: s for s in sources}
        self._to = {s.name: s for s in new.param_shards()}
        self._slots, self._scalars = state.optimizer_slots(source.backends)
        layouts = state.gather_json((state.layout_of(sources), state.layout_of(self._to.values())))
        self._held, self._wanted = [have for have, _ in layouts], [want for _, want in layouts]
        least, most = _BATCH_ELEMENTS
        self._most = min(most, max(least, sum(s.shape.numel() for s in sources) // _BATCHES))
        self._batches = self._batched()
        self._exchanged: dict[torch.dtype, tuple[Tensor, Tensor]] = {}  # [most] each: what goes out, and what comes in
        self.completed = 0

    def run(self, busy: Busy = frozenset, complete: Callable[[], None] = lambda: None) -> None:
        """Move everything. After an error: `settle`. `complete`: waits for the device's collectives. Raises where they were
        aborted: what they wrote is invalid then, and the batch does not count."""
        old = self._source.buffers
        pairs = zip(state.buffers_in(old.module), state.buffers_in(self.new.module), strict=True)
        for (_, source), (_, target) in pairs:
            target.copy_(source)
        state.set_module_states(self.new, state.module_states(old))
        left = Counter(storage_id(s.local) for s in self._from.values())
        for names in self._batches:
            self._receive(names)
            complete()
            self.completed += 1
            left.subtract(storage_id(self._from[name].local) for name in names)
            done = [s for s in self._from.values() if left.get(storage_id(s.local)) == 0]
            if done:
                self._await_all()
                for backend in self._source.backends:
                    _free_shards(backend, [s for s in done if self._source.holders[s.name] is backend], busy())
                for s in done:
                    left.pop(storage_id(s.local), None)

    def settle(self, completed: int) -> StateSource:
        """Returns where the state is after an error, when all ranks have completed so many batches, and some no more."""
        moved = {name for names in self._batches[:completed] for name in names}
        holders = {n: self.new if n in moved else b for n, b in self._source.holders.items()}
        return StateSource(holders=holders, buffers=self._source.buffers)

    def _batched(self) -> list[list[str]]:
        """Parameters that share storage, before or after, one after the other, in batches of a bounded size. None has
        the end of one unit and the beginning of another."""
        batches: list[list[str]] = [[]]
        size = 0
        for names in _together(self._from, self._to):
            numels = [self._from[name].shape.numel() for name in names]
            begins = size + sum(numels) > self._most
            for name, numel in zip(names, numels, strict=True):
                if begins or size + numel > self._most:
                    batches.append([])
                    size, begins = 0, False
                batches[-1].append(name)
                size += numel
        return [batch for batch in batches if batch]

    def _receive(self, names: Sequence[str]) -> None:
        targets = [self._to[name] for name in names]
        self.new.allocate(targets)
        seed_state(self.new, self._slots, self._scalars, targets)
        stepped = [name for name in names if state.has_slots(self._source.holders[name], self._from[name])]
        state.park(self.new, self._slots, [self._to[name] for name in stepped])
        for slot, moved in ((state.PARAM, names), *((slot, stepped) for slot in self._slots if stepped)):
            plan = plan_transfers(moved, self._held, self._wanted)
            old = {name: self._from[name] for name in moved}
            new = {name: self._to[name] for name in moved if self._to[name].numel}
            given = {n: (state.slot_values(self._source.holders[n], s, slot), s.start) for n, s in old.items()}
            into = {n: (state.slot_target(self.new, s, slot), s.start) for n, s in new.items()}
            for t in plan:
                if t.source == t.target == dist.get_rank():
                    _part(t, into).copy_(_part(t, given))
            for part in exchanges(plan, self._most):
                self._exchange(part, given, into)

    def _exchange(self, plan: "Sequence[Transfer]", given: Parts, into: Parts) -> None:
        """One all-to-all. Its buffers are the same for all parts: Gloo's thread may hold them for a while after it."""
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        sent = sorted((t for t in plan if t.source == rank), key=lambda t: t.target)
        received = sorted((t for t in plan if t.target == rank), key=lambda t: t.source)
        like, _ = next(iter(given.values()))
        if like.dtype not in self._exchanged:
            self._exchanged[like.dtype] = like.new_empty(self._most), like.new_empty(self._most)
        outgoing, incoming = self._exchanged[like.dtype]
        outgoing = outgoing[: sum(t.numel for t in sent)]
        for t, place in zip(sent, torch.split(outgoing, [t.numel for t in sent]), strict=True):
            place.copy_(_part(t, given))
        incoming = incoming[: sum(t.numel for t in received)]
        dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=[sum(t.numel for t in received if t.source == other) for other in ranks],
            input_split_sizes=[sum(t.numel for t in sent if t.target == other) for other in ranks],
        )
        for t, values in zip(received, torch.split(incoming, [t.numel for t in received]), strict=True):
            _part(t, into).copy_(values)

    def _await_all(self) -> None:
        """Wait until every rank has received all batches up to here."""
        if self._streams is not None:
            self._streams.current().synchronize()
        world = dist.group.WORLD
        if world is not None and world.size() > 1:
            world.barrier().wait()


def _free_shards(backend: Backend, shards: Iterable[ParamShard], busy: Collection[int]) -> None:
    """Free the storage of parameters with their optimizer state; its counters of steps stay."""
    for s in shards:
        slots = [t for t in s.slots(backend.optimizer).values() if isinstance(t, Tensor) and t.dim()]
        free([s.local, *slots, *backend.parked.get(s.name, {}).values()], busy)


def _together(*layouts: Mapping[str, ParamShard]) -> Iterator[list[str]]:
    """The names of the parameters, those together that are connected by shared storage; otherwise in order."""
    group = {name: [name] for name in layouts[0]}
    for shards in layouts:
        first: dict[int, str] = {}
        for name, shard in shards.items():
            one, other = group[first.setdefault(storage_id(shard.local), name)], group[name]
            if one is not other:
                one += other
                group.update(dict.fromkeys(other, one))
    order = {name: i for i, name in enumerate(layouts[0])}
    seen: set[int] = set()
    for names in group.values():
        if id(names) not in seen:
            seen.add(id(names))
            yield sorted(names, key=order.__getitem__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """`name[start:stop]`, flat, from rank to rank; both may be the same."""

    name: str
    start: int
    stop: int
    source: int
    target: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def plan_transfers(
    names: Collection[str], held: Sequence[state.Layout], wanted: Sequence[state.Layout]
) -> list[Transfer]:
    """The transfers of all ranks, in order. `held`, `wanted`: by rank. Raises ValueError if no rank holds what one wants."""
    plan: list[Transfer] = []
    for name in names:
        segments = list(_segments([layout[name] for layout in held]))
        for target, layout in enumerate(wanted):
            at, stop = layout[name]
            for left, right, holders in segments:
                if at < stop and left <= at < right:
                    source = min(holders, key=lambda rank: (rank - target) % len(held))
                    plan.append(Transfer(name=name, start=at, stop=min(right, stop), source=source, target=target))
                    at = min(right, stop)
            if at < stop:
                raise ValueError(f"no rank holds {name}[{at}:{stop}]")
    return plan


def _segments(ranges: Sequence[state.Range]) -> Iterator[tuple[int, int, list[int]]]:
    """Yields the intervals between the ends of all ranges, in order, each with the ranks that hold it."""
    for left, right in pairwise(sorted({edge for bounds in ranges for edge in bounds})):
        if holders := [rank for rank, (start, stop) in enumerate(ranges) if start <= left and right <= stop]:
            yield left, right, holders


def _part(t: Transfer, parts: Parts) -> Tensor:
    value, begin = parts[t.name]
    return value[t.start - begin : t.stop - begin]


def exchanges(plan: Sequence[Transfer], most: int) -> Iterator[list[Transfer]]:
    """Yields what goes between ranks, in parts of which no rank sends or receives more than `most` elements."""
    part: list[Transfer] = []
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    between = (t for t in plan if t.source != t.target)
    pieces = (replace(t, start=at, stop=min(at + most, t.stop)) for t in between for at in range(t.start, t.stop, most))
    for t in pieces:
        if max(sent[t.source], received[t.target]) + t.numel > most:
            yield part
            part, sent, received = [], Counter(), Counter()
        part.append(t)
        sent[t.source] += t.numel
        received[t.target] += t.numel
    if part:
        yield part
