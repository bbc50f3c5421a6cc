"""`Wire`: the process group that all collectives of all backends cross.

It takes the place of torch's `ProcessGroup` and passes each collective to Gloo or NCCL, by the tensor's device. It
numbers and meters each one, and decides the order of sums (`ReductionOrder`). Read context.py first.

Names: torch 2.13 renamed the tensor collectives; C++ and Python callers of 2.11 to 2.13 use either spelling, so both are
defined, as one function. torch's stubs and trampolines differ in their signatures; these follow the trampolines."""

# mypy: disable-error-code="override,attr-defined,assignment"

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
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
_InnerCall = Callable[[Any, list[Tensor], list[Tensor], Any], Any]  # of an inner group, with inputs, outputs, options
_RANK_ORDERED_OPS = (_Op.SUM, _Op.AVG, _Op.PREMUL_SUM)
_NOT_PLAIN = """\
a collective was given a DTensor, such as a sharded parameter or its gradient, and takes plain tensors; gradients are \
the mean over the ranks already, and else give it to_local() or full_tensor()"""  # of which ranks hold different parts


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
        opts, inner = opts or c10d.AllreduceOptions(), self._inner(tensor)
        if self._ordered("all_reduce", opts, tensor, inner):
            return self._ordered_all_reduce(tensor, opts, inner)
        opts, then = self._natively(opts, tensor, inner)
        return self._send("all_reduce", tensor.nbytes, tensors, tensors, _all_reduce, opts, inner, then)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> WireWork:
        """One all-reduce for several tensors of one dtype, in place."""
        flat, of_one = torch.cat([t.reshape(-1) for t in tensors]), c10d.AllreduceOptions()
        of_one.reduceOp = _Op.SUM if opts is None else opts.reduceOp
        work = self.allreduce([flat], of_one)

        def scatter_back() -> None:
            for t, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                t.copy_(part.view_as(t))

        return work.followed_by(scatter_back, tensors)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> WireWork:
        """output: [n], input: [W * n]; rank r gets the reduced r-th part. In place, where the output is that part of the
        input: what the rest of it holds afterwards is undefined."""
        opts, inner = opts or c10d.ReduceScatterOptions(), self._inner(input)
        if self._ordered("reduce_scatter", opts, input, inner):
            return self._ordered_reduce_scatter(output, input, opts, inner)
        opts, then = self._natively(opts, output, inner)
        call: _InnerCall = lambda g, i, o, opts: g._reduce_scatter_base(o[0], i[0], opts)  # noqa: E731
        return self._send("reduce_scatter", input.nbytes, [input], [output], call, opts, inner, then)

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
        # Also where nothing is left to be done: so that the stream that waits is known to use what was joined here.
        return work.followed_by(lambda: flat is output or output.copy_(flat.view_as(output)), [output])

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> WireWork:
        given, inner = opts, self._inner(tensors[0])
        opts, then = self._natively(opts, tensors[0], inner)
        opts.rootRank, opts.rootTensor = given.rootRank, given.rootTensor
        then, nbytes = then if self._rank == opts.rootRank else None, tensors[0].nbytes
        return self._send("other", nbytes, tensors, tensors, lambda g, i, o, opts: g.reduce(o, opts), opts, inner, then)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> WireWork:
        """output: [W * n], input: [n]. Gloo's own would receive into a copy of the output, and copy from there."""
        opts, inner, outputs, sent = opts or c10d.AllgatherOptions(), self._inner(output), [output], None
        call: _InnerCall = _all_gather
        if inner is self._gloo:
            call = _gather(self._rank, self._size, self._piece_bytes, ring=self._ring)
        elif self._shared is not None and self._shared.mapped(output, input) is not None:  # it has no memory of its own
            outputs, sent = [], 0
            call = lambda g, i, _, opts: g._allgather_base(output, i[0], opts)  # noqa: E731
        return self._send("all_gather", output.nbytes, [input], outputs, call, opts, inner, bytes_=sent)

    _allgather_base = all_gather_single
    allgather_into_tensor = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return _last([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> WireWork:
        """outputs: [[t_0 .. t_{W-1}]], inputs: [t]."""
        (parts,), (input,) = outputs, inputs
        payload, opts = sum(p.nbytes for p in parts), opts or c10d.AllgatherOptions()
        return self._send("all_gather", payload, [input], parts, lambda g, i, o, opts: g.allgather([o], i, opts), opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> WireWork:
        call: _InnerCall = lambda g, i, o, opts: g.alltoall_base(o[0], i[0], output_splits, input_splits, opts)  # noqa: E731
        sent = None  # the default, for equal parts
        if rows := sum(input_splits):
            sent = input.nbytes - input.nbytes * input_splits[self._rank] // rows
        opts = opts or c10d.AllToAllOptions()
        return self._send("all_to_all", input.nbytes, [input], [output], call, opts, bytes_=sent)

    alltoall_base = all_to_all_single

    def _refused(self, *_: Any, **__: Any) -> WireWork:
        instead = "give tensors to all_gather_single or all_to_all_single"
        raise NotImplementedError(f"a group of fsdp_lab has no such collective of lists; {instead}")

    alltoall = allgather_coalesced = _refused

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> WireWork:
        nbytes = tensors[0].nbytes
        return self._send("broadcast", nbytes, tensors, tensors, lambda g, i, o, opts: g.broadcast(o, opts), opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> WireWork:
        call: _InnerCall = lambda g, i, o, opts: g.scatter(o, [i] if i else [], opts)  # noqa: E731
        flat = inputs[0] if inputs else []
        return self._send("other", outputs[0].nbytes * self._size, flat, outputs, call, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> WireWork:
        call: _InnerCall = lambda g, i, o, opts: g.gather([o] if o else [], i, opts)  # noqa: E731
        return self._send("other", inputs[0].nbytes * self._size, inputs, outputs[0] if outputs else [], call, opts)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> WireWork:
        return self._transfer(tensors, tensors, LinkDirection.OUT, lambda g, i, o, _: g.send(i, dst, tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> WireWork:
        return self._transfer([], tensors, LinkDirection.IN, lambda g, i, o, _: g.recv(o, src, tag))

    def _transfer(self, ins: list[Tensor], outs: list[Tensor], direction: LinkDirection, call: _InnerCall) -> WireWork:
        """Between two ranks, over the host: NCCL runs the sends and receives of a pair one after the other, and two ranks
        that both begin with a send would wait for ever."""
        nbytes, host = outs[0].nbytes, self._host
        return self._send("other", nbytes, ins, outs, call, None, host, bytes_=nbytes, direction=direction)

    @property
    def _host(self) -> Any:
        return self._gloo if self._shared is None else self._shared

    def barrier(self, opts: Any = None) -> WireWork:
        opts = c10d.BarrierOptions()
        return self._send("barrier", 0, [], [], lambda g, i, o, opts: g.barrier(opts), opts, self._host)

    def control(self, values: Tensor) -> None:
        """Sum a few float64 over the ranks, in place: on the host blocking, on a device for its current stream. It is
        metered as "control", apart from the backends' collectives: the lab's own traffic, such as a step's vote."""
        if self._size > 1:
            opts = c10d.AllreduceOptions()
            with self.context.unit_scope(""):
                self._send("control", values.nbytes, [values], [values], _all_reduce, opts).wait()

    def sums_on_device(self, tensor: Tensor) -> bool:
        """Whether `control` needs no host: on a device alone, or if NCCL has a communicator. The same on all ranks."""
        nccl = self._nccl
        has_met = nccl is not None and nccl.met and self._inner(tensor) is nccl.inner
        return self._is_on_device(tensor) and (self._size == 1 or has_met)

    # -- sums in rank order ---------------------------------------------------------------------------------------

    def _ordered(self, kind: str, opts: Any, tensor: Tensor, inner: Any) -> bool:
        order = self.context.reduction
        if self._size == 1 or order is ReductionOrder.NATIVE or isinstance(inner, SharedGroup):
            return False  # ranks that share memory always add in their order
        if order is ReductionOrder.AUTO and (kind != "reduce_scatter" or inner is not self._gloo):
            return False
        return opts.reduceOp.op in _RANK_ORDERED_OPS and tensor.is_floating_point()

    def _natively(self, opts: Any, output: Tensor, inner: Any) -> tuple[Any, Callable[[], None] | None]:
        """The options for an inner group, and what remains to be done after it. Except over NCCL, a mean is a sum and a
        division: Gloo's own AVG only summed in reduce-scatter before 2.13."""
        op, over_nccl = opts.reduceOp, self._nccl is not None and inner is self._nccl.inner
        if over_nccl or op == dist.ReduceOp.SUM or op.op not in _RANK_ORDERED_OPS:
            return opts, None
        summing = type(opts)()
        summing.reduceOp = _Op.SUM
        return summing, partial(_scale, output, opts, self._size)

    def _is_on_device(self, tensor: Tensor) -> bool:
        return self.context.streams is not None and self.context.streams.holds(tensor)

    def _ordered_reduce_scatter(self, output: Tensor, input: Tensor, opts: Any, inner: Any) -> WireWork:
        input = input.contiguous()
        in_place = output.data_ptr() == _part(input, self._rank, self._size).data_ptr()
        if in_place and inner is self._gloo and not self._is_on_device(input):
            return self._ordered_reduce_scatter_in_place(output, input, opts)
        summands = torch.empty_like(input)  # [W * n]: every rank's r-th part, in the order of ranks
        rank, size = self._rank, self._size  # do not capture self: see the note on abort
        piece_bytes = self._piece_bytes
        in_pieces = inner is self._gloo and piece_bytes > 0

        def call(group: Any, ins: list[Tensor], outs: list[Tensor], opts: Any) -> Any:
            if not in_pieces:
                return group.alltoall_base(outs[0], ins[0], [], [], opts)
            rounds: list[Any] = []
            for to, source in _partners(rank, size):
                sent, place = _part(ins[0], to, size), _part(outs[0], source, size)
                rounds += _round(group, size, sent, to, place, source, piece_bytes)
            _part(outs[0], rank, size).copy_(_part(ins[0], rank, size))
            return in_order(rounds)

        def add() -> None:
            _sum_in_order(summands.view(size, -1).unbind(), output, opts)

        options = c10d.AllToAllOptions()
        return self._send("reduce_scatter", input.nbytes, [input], [summands], call, options, inner, add, [output])

    def _ordered_reduce_scatter_in_place(self, output: Tensor, input: Tensor, opts: Any) -> WireWork:
        """The first part to come has a place of its own, each later one that of the part sent before."""
        rank, size, summands, piece_bytes = self._rank, self._size, dict[int, Tensor](), self._piece_bytes
        spare = torch.empty_like(output)  # [n]

        def call(group: Any, ins: list[Tensor], outs: list[Tensor], opts: Any) -> Any:
            place, rounds = outs[0].view(-1), []
            for to, source in _partners(rank, size):
                sent, summands[source] = _part(ins[0], to, size), place
                rounds += _round(group, size, sent, to, place, source, piece_bytes)
                place = sent
            return in_order(rounds)

        def add() -> None:
            summands[rank] = output.view(-1)
            _sum_in_order([summands[r] for r in range(size)], output, opts)

        return self._send("reduce_scatter", input.nbytes, [input], [spare], call, None, self._gloo, add, [output])

    def _ordered_all_reduce(self, tensor: Tensor, opts: Any, inner: Any) -> WireWork:
        """Every rank gets all summands in one exchange and adds them itself, so that no collective is issued from a
        callback, where ranks could differ in order. For that bit parity it sends W/2 times the bytes of a ring."""
        flat = tensor.reshape(-1).clone()  # [n]
        summands = flat.new_empty(self._size * flat.numel())  # [W * n]

        size = self._size

        def add() -> None:
            _sum_in_order(summands.view(size, -1).unbind(), flat, opts)
            tensor.copy_(flat.view_as(tensor))

        call, options = _all_gather, c10d.AllgatherOptions()
        if inner is self._gloo:
            call = _gather(self._rank, self._size, self._piece_bytes, ring=self._ring)
        sent = tensor.nbytes * (size - 1)
        return self._send("all_reduce", tensor.nbytes, [flat], [summands], call, options, inner, add, [tensor], sent)

    def _send(
        self,
        kind: str,
        payload_bytes: int,
        inputs: list[Tensor],
        outputs: list[Tensor],
        call: _InnerCall,
        opts: Any,
        group: Any = None,
        then: Callable[[], None] | None = None,
        results: list[Tensor] | None = None,
        bytes_: int | None = None,
        direction: LinkDirection = LinkDirection.BOTH,
    ) -> WireWork:
        """Number, meter and issue one collective. `then` runs when its outputs have arrived. A `direction` other than BOTH
        is of a transfer between two ranks. FSDP issues three for each unit of a step, so nothing here may take long."""
        context, size, tensors = self.context, self._size, [*inputs, *outputs]
        for t in tensors:
            if isinstance(t, DTensor):
                raise TypeError(_NOT_PLAIN)
        group = self._inner(tensors[0]) if group is None else group
        nccl = self._nccl if self._nccl is not None and group is self._nccl.inner else None
        if nccl is not None and not nccl.met and size > 1:
            nccl.met = True  # to make its communicator waits for all ranks, and cannot be aborted: a barrier can
            self.barrier().wait()
        sent = link_bytes(kind, payload_bytes, size) if bytes_ is None else bytes_
        dtype, whole_group = (tensors[0].dtype if tensors else None), direction is LinkDirection.BOTH
        issued = context.record_issue(self._name_, whole_group, kind, size, payload_bytes, sent, dtype)
        if context.link is not None:
            context.reserve_link(issued, direction)
        if context.on_issue is not None:
            context.on_issue([*tensors, *(results or ())])
        if opts is not None:
            opts.asyncOp = True  # else NCCL returns no work, so that nobody could time it or see that it hangs
        inner: Any = context.dropped if size > 1 else None
        blocking, is_shared = nccl is None or inner is not None, isinstance(group, SharedGroup)
        finish, timed = then, None
        if not blocking:
            timed = context.time_nccl(issued)
            try:
                inner = call(group, inputs, outputs, opts)
            except RuntimeError:  # it may have been aborted just now
                context.check()
                raise
            context.track(issued, (), NcclOutcome(inner))  # NCCL's work would keep its outputs
        else:
            ins, outs, streams = inputs, outputs, context.streams
            if streams is not None and tensors and group is self._host and streams.holds(tensors[0]):
                ins, outs, finish = stage(streams, inputs, outputs, then)
            if inner is None:
                issue_s = time.perf_counter()
                if is_shared:
                    group.unit = issued.unit
                given = group, ins, outs, opts
                inner = _hidden(call, *given) if context.hide_from_profiler else call(*given)
                if is_shared:  # what others are to read was copied
                    issued.put = issue_s, time.perf_counter()
            if inner is not None:
                context.track(issued, [t.untyped_storage() for t in (*ins, *outs)], inner)
        results = outputs if results is None else results
        uses = tensors + results if nccl is not None or then is not None else ()
        work = WireWork(context, issued, inner, results, finish, blocking, timed, uses)
        self._issued += 1
        if self._together is not None:
            self._together.append(work)
        return work

    def _inner(self, tensor: Tensor) -> Any:
        """The group that carries a collective of such a tensor: of GPUs NCCL's, or in memory that ranks share; else the
        host's."""
        if isinstance(tensor, DTensor):
            raise TypeError(_NOT_PLAIN)
        nccl = self.context.nccl
        if self._nccl is not None and nccl is not None and nccl.carries(tensor):
            return self._nccl.inner
        return self._on_gpu if self._on_gpu is not None and self._is_on_device(tensor) else self._host


def stage(
    streams: Streams, inputs: list[Tensor], outputs: list[Tensor], then: Callable[[], None] | None
) -> tuple[list[Tensor], list[Tensor], Callable[[], None]]:
    """GPU tensors on the host, for Gloo, and what copies outputs back before `then`. A tensor that is both stays one; an
    output that is no input gets memory and no copy. Memory is pinned, so that a copy is one transfer. Both copies wait:
    Gloo's threads read inputs at once, and the time of a wait has the copy back in it."""
    hosts = {id(t): streams.host_memory(t.numel(), t.dtype).view(t.shape) for t in [*inputs, *outputs]}
    for t in {id(t): t for t in inputs}.values():
        hosts[id(t)].copy_(t.detach())

    def unstage() -> None:
        for t in outputs:
            t.copy_(hosts[id(t)])
        if then is not None:
            then()

    return [hosts[id(t)] for t in inputs], [hosts[id(t)] for t in outputs], unstage


def _all_gather(group: Any, ins: list[Tensor], outs: list[Tensor], opts: Any) -> Any:
    return group._allgather_base(outs[0], ins[0], opts)


def _all_reduce(group: Any, ins: list[Tensor], outs: list[Tensor], opts: Any) -> Any:
    return group.allreduce(outs, opts)


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

    def call(group: Any, ins: list[Tensor], outs: list[Tensor], opts: Any) -> Any:
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


def _hidden(call: _InnerCall, *arguments: Any) -> Any:
    """Issue an operation out of a profiler's sight."""
    torch._C._autograd._enable_record_function(False)  # in this thread, and where the operation runs
    try:
        return call(*arguments)
    finally:
        torch._C._autograd._enable_record_function(True)


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


def _sum_in_order(summands: Sequence[Tensor], output: Tensor, opts: Any) -> None:
    """output = summands[0] + summands[1] + ... in this order, then the scale of the operation. summands: W of [n],
    overwritten; output: [n], which may be one of them."""
    flat, total, last = output.view(-1), summands[0], len(summands) - 1
    for r in range(1, len(summands)):
        becomes = flat if r == last or summands[r].data_ptr() == flat.data_ptr() else total
        total = torch.add(total, summands[r], out=becomes)
    _scale(flat, opts, len(summands))


def _scale(output: Tensor, opts: Any, size: int) -> None:
    op = opts.reduceOp.op
    if op == _Op.AVG:
        output.div_(size)
    elif op == _Op.PREMUL_SUM:
        output.mul_(opts.reduceOp.factor)


def _last(works: list[WireWork]) -> WireWork:
    """One work that represents several: the others are waited for here."""
    for earlier in works[:-1]:
        earlier.wait()
    return works[-1]
