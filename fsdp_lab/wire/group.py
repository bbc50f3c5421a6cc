"""`Wire`: the process group that all collectives of all backends cross.

It takes the place of torch's `ProcessGroup` and passes each collective to Gloo or NCCL, by the tensor's device. It
numbers and meters each one, and decides the order of sums (`ReductionOrder`). Read context.py first.

Names: torch 2.13 renamed the tensor collectives; C++ and Python callers of 2.11 to 2.13 use either spelling, so both are
defined, as one function. torch's stubs and trampolines differ in their signatures; these follow the trampolines."""

# mypy: disable-error-code="override,attr-defined,assignment"

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from fsdp_lab.base.streams import Streams
from fsdp_lab.wire.channels import SEVERAL_HOSTS
from fsdp_lab.wire.context import GPU_MEMORY, SHARED_MEMORY, ReductionOrder, WireContext
from fsdp_lab.wire.gpu_memory import DeviceMemory
from fsdp_lab.wire.host_group import HostGroup
from fsdp_lab.wire.link import LinkDirection
from fsdp_lab.wire.meter import link_bytes
from fsdp_lab.wire.nccl import Nccl, NcclGroup, NcclOutcome
from fsdp_lab.wire.shared_memory import SharedGroup
from fsdp_lab.wire.work import WireWork, in_order

BACKEND = "fsdp_lab_wire"
_PIECE_BYTES = 128 << 10  # fits into the buffers of a connection
_TRIED_BYTES = 1 << 20
_Op = dist.ReduceOp.RedOpType
_InnerCall = Callable[[Any, list[Tensor], list[Tensor]], Any]  # of an inner group, with its inputs and outputs
_RANK_ORDERED_OPS = (_Op.SUM, _Op.AVG, _Op.PREMUL_SUM)


def register(
    context: WireContext,
    *,
    streams: Streams | None = None,
    nccl: Nccl | None = None,
    device_memory: DeviceMemory | None = None,
) -> str:
    """Register `Wire` as a backend that reports to `context`; returns its name for `init_process_group`. `streams`: of
    the rank's GPU. With `nccl`, its tensors go over NCCL, and with `device_memory` through memory of the GPU that ranks
    share; otherwise they are staged through the host's."""

    context.streams, context.nccl, context.device_memory = streams, nccl, device_memory
    context.alive = streams and streams.host_memory(1, torch.float64).fill_(1.0)

    def create(options: Any, _: Any) -> Wire:
        return Wire(options, context)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    return f"cpu:{BACKEND},cuda:{BACKEND}" if torch.cuda.is_available() else f"cpu:{BACKEND}"


class Wire(dist.ProcessGroup):
    """See above. `options` is torch's `_DistributedBackendOptions`: store, rank, size, group."""

    def __init__(self, options: Any, context: WireContext) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub names a store; the trampoline takes none
        self.context = context
        self._rank, self._size = int(rank), int(size)
        self._name_, self._desc = str(options.group_id), ""
        store = dist.PrefixStore("memory", options.store)
        ranks = options.global_ranks_in_group or range(self._size)  # torch passes none for the world
        self.ranks = frozenset(ranks)  # by their number in the world
        self._shared = context.open_shared(store, self._rank, self.ranks, self._name_)
        self._gloo: Any = None
        if self._shared is None:
            store = dist.PrefixStore("gloo", options.store)
            self._gloo = _open_gloo(store, self._rank, self._size, context.timeout, context.address)
        hosts = {context.hosts[rank] for rank in ranks if rank < len(context.hosts)}
        self._ring = len(hosts) > 1 or context.not_shared.get(self._name_) == SEVERAL_HOSTS
        self._piece_bytes = 0  # that a rank sends another at once over Gloo; 0: all
        if self._ring:
            if context.piece_bytes is None:  # the first group, which is that of all ranks
                context.piece_bytes = self._fastest_pieces()
            self._piece_bytes = context.piece_bytes
        store = dist.PrefixStore("gpu", options.store)
        self._on_gpu = context.open_on_gpu(store, self._rank, self.ranks, self._name_)
        store = dist.PrefixStore("nccl", options.store)
        self._nccl: NcclGroup | None = context.open_nccl(store, self._rank, self._size)
        self._issued = 0
        self._together: list[WireWork] | None = None  # issued inside torch's coalescing manager
        context.add_group(self, self._name_, ranks)

    # -- torch's interface of a group -----------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def getBackendName(self) -> str:
        return BACKEND

    name = getBackendName

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _set_group_name(self, name: str) -> None:
        self._name_ = name

    @property
    def group_name(self) -> str:
        return self._name_

    pg_name = group_name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def carrier(self) -> str:
        """The carrier of the tensors of a training: of GPUs, where there is NCCL."""
        if self._nccl is not None:
            return "NCCL"
        if self._on_gpu is not None:
            return GPU_MEMORY
        return "Gloo" if self._shared is None else SHARED_MEMORY

    def _fastest_pieces(self) -> int:
        """Whether to send in pieces that fit into the buffers of a connection, by trying; collective. While Gloo sends more
        at once, its message that it is ready to receive waits behind, and the two directions of a cable are used one after
        the other. An exchange of 2 MiB over a cable of 100 Mbit/s took twice as long. But each piece waits for the other
        rank, which on a fast network takes longer than its bytes."""
        there = self._size // 2
        to, source = (self._rank + there) % self._size, (self._rank - there) % self._size
        sent, received = torch.zeros(2, _TRIED_BYTES // 4).unbind()
        seconds, options = torch.zeros(2, dtype=torch.float64), c10d.AllreduceOptions()
        self._gloo.allreduce([seconds], options).wait()  # all ranks are here
        for i, piece_bytes in 2 * list(enumerate((_PIECE_BYTES, 0))):
            begin_s = time.perf_counter()
            in_order(_round(self._gloo, self._size, sent, to, received, source, piece_bytes)).wait()
            seconds[i] += time.perf_counter() - begin_s
        self._gloo.allreduce([seconds], options).wait()
        return (_PIECE_BYTES, 0)[int(seconds.argmin())]

    # -- memory for what is sent ----------------------------------------------------------------------------------

    @property
    def buffer_pool(self) -> HostGroup | None:
        """Memory from which host tensors are sent without a copy, if the ranks share any."""
        return self._shared

    def _get_backend(self, device: torch.device) -> Any:
        """Returns what torch's FSDP2 asks for such memory, and what torch's functions ask for a timeout."""
        if device.type == "cuda" and self._nccl is not None:
            return self._nccl.inner
        return self._gloo if self._shared is None else self

    supports_splitting = supports_coalescing = supports_time_estimate = False  # what torch asks of a backend

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self._shared is not None and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[size], with any content. Nobody must write to it after it was sent, or after an all-gather into it."""
        assert self._shared is not None
        return self._shared.empty(size, dtype)

    def _set_timeout(self, timeout: timedelta) -> None:
        for inner in (self._gloo, None if self._nccl is None else self._nccl.inner):
            if inner is not None:
                inner._set_default_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def _set_sequence_number_for_group(self) -> None:
        pass  # it counts from zero on every rank

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> WireWork | None:
        """They were issued one by one, as the meter counts them; each was on its way before any is waited for."""
        works, self._together = self._together, None
        return _last(works) if works else None

    def abort(self) -> None:
        """Abort this rank's collectives, in all its groups."""
        self.context.abort(f"the group {self._name_} was aborted")

    def shutdown(self) -> None:
        """Release the inner groups, with their threads and connections: torch's caches may keep this object forever. After
        an abort they are destroyed in a thread, since an operation may still be running."""
        self.context.remove_group(self._name_)
        nccl, inner = self._nccl, [self._gloo, self._nccl]
        for shared in (self._shared, self._on_gpu):
            if shared is not None:
                self.context.close_shared(shared, self.ranks)
        self._gloo = self._nccl = self._shared = self._on_gpu = None
        if nccl is not None:
            self.context.close_nccl(nccl, self._name_)
        if self.context.aborted is not None:
            self.context.destroy_async(inner)

    def allreduce(self, tensors: list[Tensor], opts: Any = None, **_: Any) -> WireWork:
        """All-reduce in place. tensors: [t], any shape."""
        (tensor,) = tensors
        op = _op(opts)
        if self._ordered("all_reduce", op, tensor):
            return self._ordered_all_reduce(tensor, op, opts)
        inner = c10d.AllreduceOptions()
        then = _sum_natively(inner, op, opts, [tensor], self._size)
        return self._send("all_reduce", tensor.nbytes, [tensor], [tensor], _in_place("allreduce", inner), then=then)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> WireWork:
        """One all-reduce for several tensors of one dtype, in place."""
        flat = torch.cat([t.reshape(-1) for t in tensors])
        work = self.allreduce([flat], opts)

        def scatter_back() -> None:
            for t, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                t.copy_(part.view_as(t))

        return work.followed_by(scatter_back, tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> WireWork:
        """output: [n], input: [W * n]; rank r gets the reduced r-th part. In place, where the output is that part of the
        input: what the rest of it holds afterwards is undefined."""
        op = _op(opts)
        if self._ordered("reduce_scatter", op, input):
            return self._ordered_reduce_scatter(output, input, op, opts)
        inner = c10d.ReduceScatterOptions()
        then = _sum_natively(inner, op, opts, [output], self._size)
        call = _call("_reduce_scatter_base", inner)
        return self._send("reduce_scatter", input.nbytes, [input], [output], call, then=then)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _last(works)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> WireWork:
        """outputs: [t], inputs: [[t_0 .. t_{W-1}]] of equal sizes."""
        (output,), (parts,) = outputs, inputs
        flat = output if output.is_contiguous() else output.reshape(-1)
        work = self.reduce_scatter_single(flat, torch.cat([p.reshape(-1) for p in parts]), opts)
        return work if flat is output else work.followed_by(lambda: output.copy_(flat.view_as(output)), [output])

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> WireWork:
        inner = c10d.ReduceOptions()
        inner.rootRank, inner.rootTensor = opts.rootRank, opts.rootTensor
        then = _sum_natively(inner, _op(opts), opts, tensors, self._size)
        then = then if self._rank == opts.rootRank else None
        return self._send("other", tensors[0].nbytes, tensors, tensors, _in_place("reduce", inner), then=then)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> WireWork:
        """output: [W * n], input: [n]. Gloo's own would receive into a copy of the output, and copy from there."""
        call = _call("_allgather_base", opts or c10d.AllgatherOptions())
        if self._shared is not None and self._shared.mapped(output, input) is not None:  # it has no memory of its own
            return self._send("all_gather", output.nbytes, [input], [], lambda g, i, _: call(g, i, [output]), bytes_=0)
        if self._is_over_gloo(output):
            call = _gather(self._rank, self._size, self._piece_bytes, ring=self._ring)
        return self._send("all_gather", output.nbytes, [input], [output], call)

    _allgather_base = all_gather_single
    allgather_into_tensor = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return _last([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> WireWork:
        """outputs: [[t_0 .. t_{W-1}]], inputs: [t]."""
        (parts,), (input,) = outputs, inputs
        payload = sum(p.nbytes for p in parts)

        def call(group: Any, ins: list[Tensor], outs: list[Tensor]) -> Any:
            return group.allgather([outs], ins, _asynchronous(opts or c10d.AllgatherOptions()))

        return self._send("all_gather", payload, [input], parts, call)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> WireWork:
        def call(group: Any, ins: list[Tensor], outs: list[Tensor]) -> Any:
            options = _asynchronous(opts or c10d.AllToAllOptions())
            return group.alltoall_base(outs[0], ins[0], output_splits, input_splits, options)

        sent = None  # the default, for equal parts
        if rows := sum(input_splits):
            sent = input.nbytes - input.nbytes * input_splits[self._rank] // rows
        return self._send("all_to_all", input.nbytes, [input], [output], call, bytes_=sent)

    alltoall_base = all_to_all_single

    def _refused(self, *_: Any, **__: Any) -> WireWork:
        instead = "give tensors to all_gather_single or all_to_all_single"
        raise NotImplementedError(f"a group of fsdp_lab has no such collective of lists; {instead}")

    alltoall = allgather_coalesced = _refused

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> WireWork:
        return self._send("broadcast", tensors[0].nbytes, tensors, tensors, _in_place("broadcast", opts))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> WireWork:
        def call(group: Any, ins: list[Tensor], outs: list[Tensor]) -> Any:
            return group.scatter(outs, [ins] if ins else [], _asynchronous(opts))

        flat = inputs[0] if inputs else []
        return self._send("other", outputs[0].nbytes * self._size, flat, outputs, call)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> WireWork:
        def call(group: Any, ins: list[Tensor], outs: list[Tensor]) -> Any:
            return group.gather([outs] if outs else [], ins, _asynchronous(opts))

        return self._send("other", inputs[0].nbytes * self._size, inputs, outputs[0] if outputs else [], call)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> WireWork:
        return self._transfer([tensors[0]], LinkDirection.OUT, lambda g, i, o: g.send(i, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> WireWork:
        return self._transfer([tensors[0]], LinkDirection.IN, lambda g, i, o: g.recv(o, src, tag))

    def _transfer(self, tensors: list[Tensor], direction: LinkDirection, call: _InnerCall) -> WireWork:
        """Between two ranks, over Gloo."""
        if self._shared is not None:
            instead = "use broadcast in a group of the two, from torch.distributed.new_group"
            raise NotImplementedError(f"ranks that share memory have no send and recv; {instead}")
        nbytes, ins = tensors[0].nbytes, tensors if direction is LinkDirection.OUT else []
        return self._send("other", nbytes, ins, tensors, call, bytes_=nbytes, direction=direction)

    def barrier(self, opts: Any = None) -> WireWork:
        return self._send("barrier", 0, [], [], lambda g, i, o: g.barrier(c10d.BarrierOptions()))

    def control(self, values: Tensor) -> None:
        """Sum a few float64 over the ranks, in place: on the host blocking, on a device for its current stream. It is
        metered as "control", apart from the backends' collectives: the lab's own traffic, such as a step's vote."""
        if self._size > 1:
            opts = c10d.AllreduceOptions()
            with self.context.unit_scope(""):
                self._send("control", values.nbytes, [values], [values], _in_place("allreduce", opts)).wait()

    def sums_on_device(self, tensor: Tensor) -> bool:
        """Whether `control` needs no host: on a device alone, or if NCCL has a communicator. The same on all ranks."""
        nccl = self._carrier([tensor])
        return self._is_on_device(tensor) and (self._size == 1 or (nccl is not None and nccl.met))

    # -- sums in rank order ---------------------------------------------------------------------------------------

    def _ordered(self, kind: str, op: Any, tensor: Tensor) -> bool:
        _check_plain([tensor])
        if self._size == 1 or op not in _RANK_ORDERED_OPS or not tensor.is_floating_point():
            return False
        if isinstance(self._inner([tensor]), SharedGroup):
            return False  # it always adds in the order of ranks
        if self.context.reduction is ReductionOrder.AUTO:
            return kind == "reduce_scatter" and self._is_over_gloo(tensor)
        return self.context.reduction is ReductionOrder.RANK_ORDERED

    def _is_over_gloo(self, tensor: Tensor) -> bool:
        return self._inner([tensor]) is self._gloo

    def _is_on_device(self, tensor: Tensor) -> bool:
        return self.context.streams is not None and self.context.streams.holds(tensor)

    def _carrier(self, tensors: Sequence[Tensor]) -> NcclGroup | None:
        """The group of NCCL's that these tensors go over, or None: Gloo."""
        nccl = self.context.nccl
        return self._nccl if nccl is not None and any(map(nccl.carries, tensors)) else None

    def _ordered_reduce_scatter(self, output: Tensor, input: Tensor, op: Any, opts: Any) -> WireWork:
        input = input.contiguous()
        in_place = output.data_ptr() == _part(input, self._rank, self._size).data_ptr()
        if in_place and self._is_over_gloo(input) and not self._is_on_device(input):
            return self._ordered_reduce_scatter_in_place(output, input, op, opts)
        summands = torch.empty_like(input)  # [W * n]: every rank's r-th part, in the order of ranks
        rank, size = self._rank, self._size  # do not capture self: see the note on abort
        piece_bytes = self._piece_bytes
        in_pieces = self._is_over_gloo(input) and piece_bytes > 0

        def call(group: Any, ins: list[Tensor], outs: list[Tensor]) -> Any:
            if not in_pieces:
                return group.alltoall_base(outs[0], ins[0], [], [], c10d.AllToAllOptions())
            rounds: list[Any] = []
            for to, source in _partners(rank, size):
                sent, place = _part(ins[0], to, size), _part(outs[0], source, size)
                rounds += _round(group, size, sent, to, place, source, piece_bytes)
            _part(outs[0], rank, size).copy_(_part(ins[0], rank, size))
            return in_order(rounds)

        def add() -> None:
            _sum_in_order(summands.view(size, -1).unbind(), output, op, opts)

        return self._send("reduce_scatter", input.nbytes, [input], [summands], call, then=add, results=[output])

    def _ordered_reduce_scatter_in_place(self, output: Tensor, input: Tensor, op: Any, opts: Any) -> WireWork:
        """The first part to come has a place of its own, each later one that of the part sent before."""
        rank, size, summands, piece_bytes = self._rank, self._size, dict[int, Tensor](), self._piece_bytes
        spare = torch.empty_like(output)  # [n]

        def call(group: Any, ins: list[Tensor], outs: list[Tensor]) -> Any:
            place, rounds = outs[0].view(-1), []
            for to, source in _partners(rank, size):
                sent, summands[source] = _part(ins[0], to, size), place
                rounds += _round(group, size, sent, to, place, source, piece_bytes)
                place = sent
            return in_order(rounds)

        def add() -> None:
            summands[rank] = output.view(-1)
            _sum_in_order([summands[r] for r in range(size)], output, op, opts)

        return self._send("reduce_scatter", input.nbytes, [input], [spare], call, then=add, results=[output])

    def _ordered_all_reduce(self, tensor: Tensor, op: Any, opts: Any) -> WireWork:
        """Every rank gets all summands in one exchange and adds them itself, so that no collective is issued from a
        callback, where ranks could differ in order. For that bit parity it sends W/2 times the bytes of a ring."""
        flat = tensor.reshape(-1).clone()  # [n]
        summands = flat.new_empty(self._size * flat.numel())  # [W * n]

        size = self._size

        def add() -> None:
            _sum_in_order(summands.view(size, -1).unbind(), flat, op, opts)
            tensor.copy_(flat.view_as(tensor))

        call = _gather(self._rank, self._size, self._piece_bytes, ring=self._ring)
        if not self._is_over_gloo(tensor):
            call = _call("_allgather_base", c10d.AllgatherOptions())
        sent = tensor.nbytes * (size - 1)
        return self._send(
            "all_reduce", tensor.nbytes, [flat], [summands], call, then=add, results=[tensor], bytes_=sent
        )

    def _send(
        self,
        kind: str,
        payload_bytes: int,
        inputs: list[Tensor],
        outputs: list[Tensor],
        call: _InnerCall,
        *,
        then: Callable[[], None] | None = None,
        results: list[Tensor] | None = None,
        bytes_: int | None = None,
        direction: LinkDirection = LinkDirection.BOTH,
    ) -> WireWork:
        """Number, meter and issue one collective. `then` runs when its outputs have arrived. A `direction` other than BOTH
        is of a transfer between two ranks."""
        tensors, whole_group, streams = [*inputs, *outputs], direction is LinkDirection.BOTH, self.context.streams
        _check_plain(tensors)
        self._meet(whole_group, tensors)
        issued = self.context.record_issue(
            self._name_,
            whole_group=whole_group,
            kind=kind,
            size=self._size,
            payload_bytes=payload_bytes,
            link_bytes=link_bytes(kind, payload_bytes, self._size) if bytes_ is None else bytes_,
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        )
        self.context.reserve_link(issued, direction)
        if self.context.on_issue is not None:
            self.context.on_issue([*tensors, *(results or ())])
        group, ins, outs = self._inner(tensors, whole_group), inputs, outputs
        unstage: Callable[[], None] | None = None
        is_on_host = group is self._gloo or group is self._shared
        if is_on_host and streams is not None and any(map(streams.holds, tensors)):
            ins, outs, unstage = stage(streams, inputs, outputs)
        over_nccl = self._nccl is not None and group is self._nccl.inner
        dropped = self.context.dropped_work(self._size)
        blocking = dropped is not None or not over_nccl
        timed = self.context.time_nccl(issued) if over_nccl else None
        issue_s = time.perf_counter()
        inner: Any = dropped or self._issue(call, group, ins, outs)
        if isinstance(group, SharedGroup) and dropped is None:  # what others are to read was copied
            issued.put = issue_s, time.perf_counter()
        if inner is not None and blocking:
            self.context.track(issued, [*ins, *outs], inner)
        elif inner is not None:
            self.context.track(issued, (), NcclOutcome(inner))  # NCCL's work would keep its outputs

        def finish() -> None:
            if unstage is not None:
                unstage()
            if then is not None:
                then()

        results = results or outputs
        end = finish if unstage or then else None
        uses = [*tensors, *results] if over_nccl or then is not None else []
        work = WireWork(
            self.context,
            issued,
            inner,
            results,
            finish=end,
            blocking=blocking,
            sliced=whole_group,
            timed=timed,
            uses=uses,
        )
        self._issued += 1
        if self._together is not None:
            self._together.append(work)
        return work

    def _meet(self, whole_group: bool, tensors: list[Tensor]) -> None:
        """Before the first collective over NCCL, which makes the communicator, all ranks come to a barrier over Gloo: making
        it waits for all ranks, and cannot be aborted."""
        nccl = self._carrier(tensors)
        if nccl is not None and not nccl.met and whole_group and self._size > 1:
            nccl.met = True
            self.barrier().wait()

    def _issue(self, call: _InnerCall, group: Any, inputs: list[Tensor], outputs: list[Tensor]) -> Any:
        """Issue an operation of an inner group, out of a profiler's sight where the context says so."""
        if self._nccl is not None and group is self._nccl.inner:
            try:
                return call(group, inputs, outputs)
            except RuntimeError:  # it may have been aborted just now
                self.context.check()
                raise
        if not self.context.hide_from_profiler:
            return call(group, inputs, outputs)
        torch._C._autograd._enable_record_function(False)  # in this thread, and where the operation runs
        try:
            return call(group, inputs, outputs)
        finally:
            torch._C._autograd._enable_record_function(True)

    def _inner(self, tensors: Sequence[Tensor], whole_group: bool = True) -> Any:
        """The group that carries these: of GPUs NCCL's, or in memory that ranks share; else the host's. `whole_group`: not
        between two ranks. Those go over the host: NCCL runs the sends and receives of a pair one after the other, and two
        ranks that both begin with a send would wait for ever."""
        if whole_group and (nccl := self._carrier(tensors)) is not None:
            return nccl.inner
        if self._on_gpu is not None and whole_group and tensors and all(map(self._is_on_device, tensors)):
            return self._on_gpu
        return self._gloo if self._shared is None else self._shared


def stage(
    streams: Streams, inputs: list[Tensor], outputs: list[Tensor]
) -> tuple[list[Tensor], list[Tensor], Callable[[], None]]:
    """GPU tensors on the host, for Gloo, and what copies outputs back. A tensor that is both stays one tensor; an
    output that is no input gets memory and no copy. Memory is pinned, so that a copy is one transfer. Both copies wait:
    Gloo's threads read inputs at once, and the time of a wait has the copy back in it."""
    hosts = {id(t): streams.host_memory(t.numel(), t.dtype).view(t.shape) for t in [*inputs, *outputs]}
    for t in {id(t): t for t in inputs}.values():
        hosts[id(t)].copy_(t.detach())

    def unstage() -> None:
        for t in outputs:
            t.copy_(hosts[id(t)])

    return [hosts[id(t)] for t in inputs], [hosts[id(t)] for t in outputs], unstage


def _op(opts: Any) -> Any:
    return _Op.SUM if opts is None else opts.reduceOp.op


def _asynchronous(opts: Any) -> Any:
    """For a synchronous collective NCCL returns no work, so that nobody could time it or see that it hangs."""
    if opts is not None:
        opts.asyncOp = True
    return opts


def _call(name: str, opts: Any) -> _InnerCall:
    """A collective of one output and one input."""
    return lambda group, ins, outs: getattr(group, name)(outs[0], ins[0], _asynchronous(opts))


def _part(whole: Tensor, r: int, size: int) -> Tensor:
    """Rank r's part. whole: [W * n] -> [n]"""
    n = whole.numel() // size
    return whole.view(-1)[r * n : (r + 1) * n]


def _partners(rank: int, size: int) -> list[tuple[int, int]]:
    """In W - 1 rounds, to which rank this one sends, and from which it receives."""
    return [((rank + i) % size, (rank - i) % size) for i in range(1, size)]


def _round(group: Any, size: int, sent: Tensor, to: int, received: Tensor, source: int, piece_bytes: int) -> list[Any]:
    """A part goes to a rank and another comes from one, from place to place, in pieces: see `Wire._fastest_pieces`.
    sent, received: [n]"""
    whole, works = max(1, sent.numel()), []
    n = piece_bytes // sent.element_size() if piece_bytes else whole
    for piece, place in ((sent[i : i + n], received[i : i + n]) for i in range(0, whole, n)):
        outs, ins = [0] * size, [0] * size
        outs[source] = ins[to] = piece.numel()
        works.append(group.alltoall_base(place, piece, outs, ins, c10d.AllToAllOptions()))
    return works


def _gather(rank: int, size: int, piece_bytes: int, *, ring: bool) -> _InnerCall:
    """An all-gather over Gloo, from place to place: each rank with all others; or in a ring, in the order of
    ranks, so that between hosts a part is sent once, not once for each rank there."""

    def call(group: Any, ins: list[Tensor], outs: list[Tensor]) -> Any:
        shard, parts, rounds = ins[0].reshape(-1), [_part(outs[0], r, size) for r in range(size)], list[Any]()
        copies = parts[rank].data_ptr() != shard.data_ptr()
        if copies and ring:
            parts[rank].copy_(shard)
        for i, (to, source) in enumerate(_partners(rank, size)):
            if ring:  # what came in the round before is sent in this one
                to, source = (rank + 1) % size, (rank - 1) % size
                sent, received = parts[(rank - i) % size], parts[(rank - i - 1) % size]
            else:
                sent, received = shard, parts[source]
            rounds += _round(group, size, sent, to, received, source, piece_bytes)
        if copies and not ring:
            parts[rank].copy_(shard)
        return in_order(rounds)

    return call


def _check_plain(tensors: Sequence[Tensor]) -> None:
    """A DTensor has no memory of its own, and what a rank holds of it differs from rank to rank."""
    if any(isinstance(t, DTensor) for t in tensors):
        given = "a DTensor, such as a sharded parameter or its gradient, and takes plain tensors"
        instead = "gradients are the mean over the ranks already, and else give it to_local() or full_tensor()"
        raise TypeError(f"a collective was given {given}; {instead}")


def _open_gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str = "") -> Any:
    """One thread, so that operations run in the order in which they are issued: see `in_order`. It listens at the interfaces
    in GLOO_SOCKET_IFNAME if these are several; else at the address; else where torch's own constructor would, which has two
    threads for each. Raises ConnectionError."""
    gloo: Any = dist.ProcessGroupGloo
    options: Any = gloo._Options()
    options._timeout, options._threads = timeout, 1
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        if address and len(names) < 2:
            options._devices = [gloo.create_device(hostname=address)]
        else:
            devices = [gloo.create_device(interface=name) for name in names]
            options._devices = devices or [gloo.create_default_device()]
        return gloo(store, rank, size, options)
    except RuntimeError as e:
        if "timeout" in str(e).lower():
            raise
        raise ConnectionError(f"Gloo could not connect the ranks ({str(e).splitlines()[0][:200]})") from None


def _in_place(name: str, opts: Any) -> _InnerCall:
    """A collective that works on a list of tensors in place."""
    return lambda group, ins, outs: getattr(group, name)(outs, _asynchronous(opts))


def _sum_natively(inner_opts: Any, op: Any, opts: Any, outputs: list[Tensor], size: int) -> Callable[[], None] | None:
    """Set the inner operation; returns what remains to be done after it. A mean is a sum and a division: Gloo's own AVG
    only summed in reduce-scatter before 2.13."""
    inner_opts.reduceOp = _Op.SUM if op in _RANK_ORDERED_OPS else opts.reduceOp
    return lambda: _scale(outputs[0], op, opts, size)


def _sum_in_order(summands: Sequence[Tensor], output: Tensor, op: Any, opts: Any) -> None:
    """output = summands[0] + summands[1] + ... in this order, then the scale of `op`. summands: W of [n], overwritten;
    output: [n], which may be one of them."""
    flat, total, last = output.view(-1), summands[0], len(summands) - 1
    for r in range(1, len(summands)):
        becomes = flat if r == last or summands[r].data_ptr() == flat.data_ptr() else total
        total = torch.add(total, summands[r], out=becomes)
    _scale(flat, op, opts, len(summands))


def _scale(output: Tensor, op: Any, opts: Any, size: int) -> None:
    if op == _Op.AVG:
        output.div_(size)
    elif op == _Op.PREMUL_SUM:
        output.mul_(opts.reduceOp.factor)


def _last(works: list[WireWork]) -> WireWork:
    """One work that represents several: the others are waited for here."""
    for earlier in works[:-1]:
        earlier.wait()
    return works[-1]
