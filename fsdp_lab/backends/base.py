"""`Backend`: a model under a Strategy, as something that trains. Read this first, then fsdp2.py, fsdp1.py, ddp.py.

A backend is made from a skeleton (parameters on meta, buffers real) and filled through its `pieces`: each parameter by
its original name, with the flat range of it that this rank holds as fp32 master. Everything that must know where a
value lies goes through pieces: initial values, the move from one backend to another, gradient norms, byte counts. They
name where torch keeps the master shard in every state of a module, so that a step that was given up loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.events import Role
from fsdp_lab.spec import Spec, Workload

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Held = tuple[Role, Tensor]  # a tensor, and what its storage is for


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What this rank holds of one parameter."""

    name: str  # the original name
    shape: torch.Size  # the whole parameter's
    start: int  # range of the flattened parameter, [start, stop)
    stop: int
    local: Tensor  # [stop - start], a view of the master shard
    param: nn.Parameter | None  # what the optimizer was given; None where it is frozen
    offset: int = 0  # where the range begins in `param`, flat

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Backend(Protocol):
    """Four of them; a trainer knows no more than this. Not to be shared between threads."""

    module: nn.Module  # what is called, and what a user sees as `model`
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    replicas: int  # ranks that hold the same gradient shard
    groups: list[dist.ProcessGroup]  # made for it: `release` ends them

    def pieces(self) -> list[Piece]:
        """By original name, in the order of the model's parameters; the same names on every rank."""
        ...

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward; a scalar with a graph."""
        ...

    def micro_batch(self, *, communicate: bool) -> AbstractContextManager[None]:
        """Around one forward and backward; without communication gradients are kept for a later one."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Around forwards that nothing is learned from, between steps: no gradients, modules in eval mode. Afterwards all is
        as it was, for training to go on bit for bit."""
        ...

    def gradient(self, piece: Piece) -> Tensor | None:
        """This rank's shard of the reduced gradient, as the optimizer will see it; None where there is none."""
        ...

    def standing_bytes(self) -> int:
        """On the device between steps, beside shards and optimizer state: DDP's buckets, ZeRO-1's gathered parameters."""
        ...

    def kept(self) -> Iterator[Held]:
        """What stays between steps, or under offload lies on the host: shards, their gradients, optimizer state."""
        ...

    def passing(self) -> Iterator[Held]:
        """What is held on the device just now to compute with: gathered parameters, gradients not yet reduced.

        A storage may be named more than once, and by `kept` too, which then is right.
        """
        ...

    def leaves(self) -> Iterator[Tensor]:
        """What autograd gives the gradients of parameters to, as of now."""
        ...

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules that are gathered by themselves, by original name, where the backend's own hooks are around them;
        under DDP those that `Strategy.wrap` names. The root is not among them."""
        ...

    def release(self, busy: Collection[int] = ()) -> None:
        """Give up all storage, and its groups, now; torch's wrappers may outlive their last reference (see `free`).

        `busy`: addresses of storage that a given-up operation may still use; those go with their last reference.
        """
        ...


class TorchBackend:
    """What torch's own three have in common: the original parameters, as the optimizer sees them, hold the gradients."""

    def __init__(
        self, module: nn.Module, pieces: list[Piece], spec: Spec, mesh: DeviceMesh, device: torch.device
    ) -> None:
        self.module, self.mesh, self.device = module, mesh, device
        self.replicas = spec.world_size // spec.shard_factor
        self.optimizer = make_optimizer(pieces, spec.workload)
        self.groups: list[dist.ProcessGroup] = []
        self._pieces = pieces

    def pieces(self) -> list[Piece]:
        return self._pieces

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = self.module(**to_device(batch, self.device))["loss"]
        return loss

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        training = [m for m in self.module.modules() if m.training]
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for m in training:
                m.training = True

    def gradient(self, piece: Piece) -> Tensor | None:
        if piece.param is None or piece.param.grad is None:
            return None
        return _range(piece, local_tensor(piece.param.grad))

    def standing_bytes(self) -> int:
        return 0

    def kept(self) -> Iterator[Held]:
        for piece in self.pieces():
            yield Role.PARAMETERS, piece.local
        for p in (p for group in self.optimizer.param_groups for p in group["params"]):
            if p.grad is not None:
                yield Role.GRADIENTS, p.grad
        for state in self.optimizer.state.values():
            yield from ((Role.OPTIMIZER, t) for t in state.values() if isinstance(t, Tensor) and t.dim())

    def passing(self) -> Iterator[Held]:
        return iter(())

    def leaves(self) -> Iterator[Tensor]:
        return self.module.parameters()

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        raise NotImplementedError

    def release(self, busy: Collection[int] = ()) -> None:
        free_backend(self, busy)
        end_groups(self.groups)


# -- what they share -------------------------------------------------------------------------------------------------


def make_optimizer(pieces: list[Piece], workload: Workload) -> torch.optim.Optimizer:
    """The workload's optimizer over what the backend holds, with weight decay on matrices only.

    foreach, not fused: fused AdamW's bits depend on where an element lies.
    """
    decayed = dict.fromkeys(p.param for p in pieces if p.param is not None and len(p.shape) >= 2)
    others = dict.fromkeys(p.param for p in pieces if p.param is not None and len(p.shape) < 2)
    groups: list[dict[str, Any]] = [
        {"params": list(decayed), "weight_decay": workload.weight_decay, "decays": True},
        {"params": list(others), "weight_decay": 0.0, "decays": False},
    ]
    groups = [g for g in groups if g["params"]]
    if workload.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=workload.lr, foreach=True)
    return torch.optim.AdamW(groups, lr=workload.lr, foreach=True)


def retune(optimizer: torch.optim.Optimizer, workload: Workload) -> None:
    """Take over learning rate and weight decay without touching state."""
    for group in optimizer.param_groups:
        group["lr"] = workload.lr
        if group["decays"]:
            group["weight_decay"] = workload.weight_decay


def local_tensor(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself; the same storage."""
    inner: Tensor = getattr(t, "_local_tensor", t)
    return inner.detach()


def local_part(t: Tensor) -> Tensor:
    """The same, flat. Raises RuntimeError where that would be a copy."""
    return local_tensor(t).view(-1)


def _range(piece: Piece, t: Tensor) -> Tensor:
    """A piece's part of a tensor that is laid out as the optimizer's parameter; that tensor where it is all of it."""
    return t if t.numel() == piece.numel else t.view(-1)[piece.offset : piece.offset + piece.numel]


def state_slots(optimizer: torch.optim.Optimizer, piece: Piece) -> dict[str, Tensor]:
    """The optimizer's tensors for a piece, by slot, flat: {"exp_avg": [n], "exp_avg_sq": [n]} for AdamW."""
    state = {} if piece.param is None else optimizer.state.get(piece.param, {})
    return {slot: _range(piece, local_part(t)) for slot, t in state.items() if isinstance(t, Tensor) and t.dim() > 0}


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """How often the optimizer stepped; 0 for one without state.

    The most that a parameter says: one of which this rank holds nothing has no gradient and is passed over.
    """
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


def seed_state(optimizer: torch.optim.Optimizer, slots: tuple[str, ...], steps: int) -> None:
    """Make the optimizer's state as it is after `steps`, with zeros to be filled in."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            state: dict[str, Any] = {"step": torch.tensor(float(steps))}
            state.update({slot: torch.zeros_like(p, memory_format=torch.preserve_format) for slot in slots})
            optimizer.state[p] = state


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}


def materialiser(device: torch.device) -> Callable[[nn.Module], None]:
    """Called for each module, it gives the module's own parameters storage on `device`, uninitialised.

    Buffers keep their values; ties stay ties, which `nn.Module.to_empty` does not promise.
    """
    made: dict[int, nn.Parameter] = {}

    def make(module: nn.Module) -> None:
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
                module._parameters[name] = made[id(p)]

    return make


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for b in model.buffers():
        b.data = b.data.to(device)


def free(tensors: list[Tensor], busy: Collection[int]) -> None:
    """Return storage to the allocator at once, whoever still refers to it, unless its address is in `busy`.

    Dropping a wrapped model does not free it: FSDP1 keeps about 18 MiB for each build of a 3.3M-parameter GPT-2.
    """
    for t in tensors:
        inner = getattr(t, "_local_tensor", t)
        if not inner.is_meta and inner.untyped_storage().size() and inner.untyped_storage().data_ptr() not in busy:
            inner.untyped_storage().resize_(0)


def free_backend(backend: TorchBackend, busy: Collection[int]) -> None:
    """What every `release` does: parameters, gradients, buffers, optimizer state."""
    held: list[Tensor] = []
    for p in backend.module.parameters():
        held += [p] + ([p.grad] if p.grad is not None else [])
    held += [p.local for p in backend.pieces()]
    held += list(backend.module.buffers())
    for state in backend.optimizer.state.values():
        held += [t for t in state.values() if isinstance(t, Tensor)]
    backend.optimizer.zero_grad(set_to_none=True)
    backend.optimizer.state.clear()
    backend.optimizer.param_groups.clear()
    free(held, busy)


def original_name(name: str) -> str:
    """A parameter's or a module's name without what wrappers put into it."""
    for part in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        name = name.removesuffix(f".{part}").replace(f"{part}.", "")
    return name


def known_groups() -> list[dist.ProcessGroup]:
    """All groups that torch knows in this process, but the default one."""
    return [group for group in c10d._world.pg_map if group is not dist.group.WORLD]


def end_groups(groups: list[dist.ProcessGroup]) -> None:
    """Give groups up, each with its threads and connections; those that an abort ended already are passed over."""
    for group in groups:
        if group in c10d._world.pg_map:
            dist.destroy_process_group(group)
