"""Fully Sharded Data Parallel in one file: the idea, with nothing around it. Read it first.

A *unit* is a module whose parameters are gathered and freed together: each block of a model, and the root with the rest.
Of F ranks, each keeps one part in F of every unit, the *shard*, with its gradient and its optimizer's state. In a step

    forward of a unit     all-gather its parameters, compute, free them
    backward of a unit    all-gather them again, compute, reduce-scatter the gradients, free both
    update                each rank's optimizer steps its own shards

so that a rank holds the whole parameters of only those units that compute. Computation is that of data parallelism.

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(shards(model))

Read `TinyFSDP` first, which moves the bytes; then `TinyUnit`, which knows when. Shapes: a unit has N elements in all, a
shard n = ceil(N / F), and the flat buffer F * n, of which the last F * n - N are padding.

It gives FSDP2's losses and parameters, bit for bit (tests/engine/test_tiny.py), and is slower: no communication runs beside
computation, which is most of what the engine adds. All parameters of a unit have one dtype. Nothing is refused:

- One flat shard has one gradient. A parameter without a gradient in a step (unused, or frozen) counts as one whose gradient
  is zero, so AdamW still applies weight decay and old moments to it. FSDP2 leaves it alone. If a whole unit has none, then
  nothing is reduced, and its shard is left alone; that must be so on all ranks, or they wait for each other forever.
- A parameter that two modules share must be in one unit: the root's, say, for an embedding tied to the output layer.
- Ranks begin with equal values, and an exception in the middle of a step leaves units gathered: start again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

# torch 2.13 gave them new names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# -- the bytes ---------------------------------------------------------------------------------------------------------


class TinyFSDP:
    """Shards, gathers, frees and reduces one unit. `TinyUnit` calls these methods; the lab calls them too, where the class
    is the engine of backend "yours" (`lab.check_engine(TinyFSDP)`), as in notebook 10."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def shard(self, unit: TinyUnit) -> Tensor:
        """Move the parameters into one buffer, `unit.full`: [F * n]. Returns a copy of this rank's part: [n]."""
        joined = torch.cat([p.detach().reshape(-1) for p in unit.params])  # [N]
        # Zeros at the end make all shards equally long, as the two collectives want them.
        unit.full = functional.pad(joined, (0, -len(joined) % unit.world_size))
        # Modules keep their Parameter objects, so names, ties and hooks stay. `.data =` makes each one a view of the
        # buffer's memory, but not of its version counter: else each all-gather would count as a write to what autograd
        # has saved, and the backward would refuse it.
        for p, view in zip(unit.params, views(unit.full, unit.params), strict=True):
            p.data = view
        # A clone, since a view would be freed with the buffer.
        return unit.full.chunk(unit.world_size)[unit.rank].clone()

    def gather(self, unit: TinyUnit) -> None:
        """Make the parameters whole, from the shards of all ranks. One collective for a whole unit: many small ones would
        cost more than the bytes."""
        # The memory returns to the same storage. A new tensor would not do: between forward and backward autograd holds
        # views of this one (weights, their transposes), which find their values again.
        unit.full.untyped_storage().resize_(unit.full.nbytes)
        all_gather(unit.full, unit.shard.detach(), group=self.group)  # lands where the forward reads; nothing is copied

    def free(self, unit: TinyUnit) -> None:
        """Give the memory of the whole parameters back. The tensors stay, and must not be used."""
        unit.full.untyped_storage().resize_(0)

    def reduce(self, unit: TinyUnit) -> Tensor:
        """Take the gradients from the parameters. Returns this rank's part of their mean over the ranks: [n]."""
        whole = torch.zeros_like(unit.full)  # [F * n]; padding, and what has no gradient, stays zero
        for p, view in zip(unit.params, views(whole, unit.params), strict=True):
            if p.grad is not None:
                view.copy_(p.grad)
                p.grad = None  # each goes as soon as it was copied
        # In place: the sum lands in this rank's own part of what it sends, so that no further memory is needed.
        part = whole.chunk(unit.world_size)[unit.rank]
        reduce_scatter(part, whole, op=dist.ReduceOp.SUM, group=self.group)
        # Every rank has the mean loss of its own batch, and that of all batches is the mean of those. Divided after the
        # sum there are F times fewer elements to divide, and one rounding. (In fp16 the sum could overflow: the engine
        # divides by a part of F before.) The result is a new tensor: `part` would keep all of `whole`.
        return part / unit.world_size


def views(flat: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """flat: [F * n]. Returns the place of each parameter in it, a view with the parameter's shape. The engine begins each
    at a multiple of 16 bytes, which kernels read faster (layout.py)."""
    sizes = [p.numel() for p in params]
    return [part.view(p.shape) for part, p in zip(torch.split(flat[: sum(sizes)], sizes), params, strict=True)]


# -- when they move ----------------------------------------------------------------------------------------------------


class TinyUnit:
    """One module's parameters, and the hooks that gather, free and reduce them in time.

    Attributes:
        params: in the order of the module's definition, each once.
        full: [F * n], of which they are views; it has memory only while the unit is gathered.
        shard: [n], this rank's part, which the optimizer trains; its `grad` is the mean over all ranks."""

    full: Tensor

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.params = list(params)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.engine = TinyFSDP(group)
        self.shard = nn.Parameter(self.engine.shard(self))
        self.engine.free(self)
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward)

    def gather(self) -> None:
        """Gather, unless it is: each of several outputs asks for it."""
        if not self.full.untyped_storage().size():
            self.engine.gather(self)

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather, and let the module see views of its inputs, by which the end of its backward is known."""
        self.gather()
        if not torch.is_grad_enabled():
            return args, kwargs
        seen: list[Tensor] = []

        def view(t: Tensor) -> Tensor:
            if not t.requires_grad:
                return t
            seen.append(t.view_as(t))
            return seen[-1]

        inputs = pytree.tree_map_only(Tensor, view, (args, kwargs))
        if seen:
            # It runs when the gradients of all views are complete: then the backward of everything inside the module is
            # over. The gradient of an input itself also waits for its other users, as the residual connection around a
            # block, or other blocks that read one encoder, and the unit would be held until they were done.
            torch.autograd.graph.register_multi_grad_hook(seen, lambda grads: self.after_backward(), mode="all")
        return inputs

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free, and watch for the first gradient of an output: then the backward begins."""
        # Inside a backward it is an activation checkpoint that computes its forward again. What follows is the backward
        # of the same unit, so its parameters stay.
        if torch._C._current_graph_task_id() == -1:
            # The root too, though its backward comes at once: FSDP2 and the engine keep it, and so must know which unit
            # is the root, and whether the optimizer has stepped since.
            self.engine.free(self)
        for t in pytree.tree_leaves(output):
            if isinstance(t, Tensor) and t.requires_grad:
                t.register_hook(lambda grad: self.before_backward())  # type: ignore[no-untyped-call]

    def before_backward(self) -> None:
        """Gather again, also what was freed after an earlier part of this backward."""
        self.gather()
        # Where no input needs a gradient, as where it is token ids, no view will tell. So whatever is left is done when
        # the whole backward is over. Ranks run the same model, so all queue the same, and their collectives match.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self.after_backward)

    def after_backward(self) -> None:
        """Reduce what has come, and free. Called again, it does nothing."""
        # Autograd accumulates a parameter's gradient before it runs hooks of earlier operations, so by now all are
        # here. If the unit is called several times in a forward, they come with the last backward of these.
        if any(p.grad is not None for p in self.params):
            grad = self.engine.reduce(self)
            if self.shard.grad is None:
                self.shard.grad = grad
            else:
                self.shard.grad += grad  # of a further micro-batch: sums of shards, never of whole gradients
        self.engine.free(self)


# -- the entry ---------------------------------------------------------------------------------------------------------

_UNIT = "_tiny_unit"  # the attribute of a module that holds its TinyUnit


def fully_shard(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make a unit of the parameters that no unit inside the module has: call it on blocks first, and on the root last.

    group: the ranks to shard over; None: all. The parameters have one dtype, and the same values on all ranks. Returns
    the module."""
    taken = {id(p) for unit in units_of(module) for p in unit.params}
    params = [p for p in module.parameters() if id(p) not in taken]
    if params:
        module.__dict__[_UNIT] = TinyUnit(module, params, group)
    return module


def units_of(module: nn.Module) -> list[TinyUnit]:
    """The units of a module and of those inside it."""
    return [m.__dict__[_UNIT] for m in module.modules() if _UNIT in m.__dict__]


def shards(module: nn.Module) -> list[nn.Parameter]:
    """What the optimizer is given: for each unit this rank's shard, [n]. `module.parameters()` are whole ones, which have
    no memory between steps."""
    return [unit.shard for unit in units_of(module)]


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within it every parameter is whole and may be read, as by `torch.save(module.state_dict(), path)`; collective."""
    for unit in units_of(module):
        unit.gather()
    try:
        yield
    finally:
        for unit in units_of(module):
            unit.engine.free(unit)
