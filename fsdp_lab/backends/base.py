"""`Backend`: a model under a Strategy, ready to train. Read this first, then fsdp2.py, fsdp1.py, ddp.py, yours.py.

A backend is made from a skeleton (parameters on meta, buffers real) and filled through its `param_shards`: each
parameter by its original name, with the flat range of it that this rank holds as fp32 master. They locate values for
everything else: initial values, the transfer from one backend to another, gradient norms, byte counts. They refer to
torch's master shard, which exists in every state of a module, so that an aborted step loses nothing.

A new backend holds no parameters yet: their storage is allocated when it is filled (`DeferredStorage`)."""

import ctypes
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.events import Role
from fsdp_lab.base.tensors import move
from fsdp_lab.engine import ParamShard
from fsdp_lab.engine.policy import ModuleKind, kind_of
from fsdp_lab.models.own import objective
from fsdp_lab.models.sources import Batch
from fsdp_lab.spec.optimizer import ELSEWHERE, FIELD, TorchOptimizer
from fsdp_lab.spec.param_groups import GroupKey, key_of
from fsdp_lab.spec.spec import Precision, Spec
from fsdp_lab.spec.workload import Workload

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RoleTensor = tuple[Role, Tensor]  # a tensor, and what its storage is used for


class Measured(ABC):
    """A model whose steps are measured: a `Backend`'s, or one that a user has set up (rank/watch/found.py). `module`:
    the one that is called, and that a user sees as `model`."""

    module: nn.Module

    @abstractmethod
    def parameter_bytes(self) -> int:
        """Returns the bytes of this rank's shards, without padding, as do the next two."""

    @abstractmethod
    def gradient_bytes(self) -> int:
        """Returns those of its reduced gradients; 0 where there are none now."""

    @abstractmethod
    def optimizer_bytes(self) -> int:
        """Returns those of the optimizer's state; 0 before its first step."""

    @abstractmethod
    def persistent_tensors(self) -> Iterator[RoleTensor]:
        """Yields what exists between steps (on the host under offload): shards, their gradients, optimizer state."""

    @abstractmethod
    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules that are units, by original name, with the backend's own hooks around them; under DDP those that
        `Strategy.wrap` selects. Without the root."""

    def resident_bytes(self) -> int:
        """Bytes on the device between steps besides shards and optimizer state: DDP's buckets, whole parameters."""
        return 0

    def transient_tensors(self) -> Iterator[RoleTensor]:
        """Yields what is on the device now to compute with: gathered parameters, unreduced gradients. A storage may
        come several times; `persistent_tensors` takes precedence."""
        return iter(())

    def leaves(self) -> Iterator[Tensor]:
        """The tensors that currently receive the gradients of parameters from autograd."""
        return self.module.parameters()


class Backend(Measured):
    """The interface of all backends to a trainer. Not thread-safe.

    Attributes:
        optimizer: its parameters hold the gradients. kept: the state that it keeps.
        replicas: how many ranks hold the same gradient shard.
        constants: of a user's module: copies on the host of its buffers that are not persistent, as they were built.
        groups: process groups created for this backend, which `release` destroys.
        parked: optimizer state that came with a transfer, of parameters that are frozen here, by name and slot."""

    has_user_code = False  # its sharding is the user's, and may hang or fail

    @classmethod
    def check(cls, spec: Spec, device: torch.device) -> None:
        """Raises SpecError for what this backend cannot do on a device, or with this torch."""

    def __init__(self, module: nn.Module, shards: list[ParamShard], deferred: "DeferredStorage", spec: Spec,
                 mesh: DeviceMesh, device: torch.device) -> None:  # fmt: skip
        """`deferred`: the storage of `shards`, until values come."""
        self.module, self.mesh, self.device = module, mesh, device
        self._deferred = deferred
        self.replicas = spec.world_size // spec.shard_factor
        self.kept = kept_state(spec.workload.torch_optimizer, device.type)
        self.optimizer = make_optimizer(shards, spec.workload)
        self.parked: dict[str, dict[str, Tensor]] = {}
        self.constants: Mapping[str, Tensor] | None = None
        self.groups: list[dist.ProcessGroup] = []
        self._param_shards = shards
        self._objective = objective(spec.workload)

    def param_shards(self) -> list[ParamShard]:
        """The shards in the order of the model's parameters, with the same names on every rank."""
        return self._param_shards

    def allocate(self, shards: Iterable[ParamShard] | None = None) -> None:
        """Allocate the parameters in the storage of these shards, of all by default; not what is allocated already."""
        self._deferred.allocate(None if shards is None else [shard.local for shard in shards])

    def loss(self, batch: Batch) -> Tensor:
        """Forward; a scalar with a graph."""
        return self._objective(self.module, move(batch, self.device))

    def outputs(self, arguments: Mapping[str, Any]) -> Any:
        """Returns the model's outputs, a mapping. Tensors of `arguments` are on the device."""
        return self.module(**arguments)

    def begin_step(self, step: int) -> bool:
        """Called before each step, with its number. Returns whether it is slower than others, and does not count."""
        return False

    @property
    def user_call(self) -> tuple[str, float] | None:
        """The user's code that it is in, as text, and since when, of `time.monotonic`. Called from any thread."""
        return None

    @abstractmethod
    def micro_batch(self, *, communicate: bool) -> AbstractContextManager[None]:
        """The context of one forward and backward; without communication, gradients are accumulated for a later one."""

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The context of forwards without training, between steps: no gradients, modules in eval mode. Afterwards all
        state is restored, so that training continues bit for bit."""
        training = [m for m in self.module.modules() if m.training]
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for m in training:
                m.training = True

    def gradient(self, shard: ParamShard) -> Tensor | None:
        """This rank's shard of the reduced gradient, as the optimizer will see it, or None."""
        if shard.param is None or shard.param.grad is None:
            return None
        return _range(shard, local_tensor(shard.param.grad))

    def gradients(self) -> list[Tensor]:
        """This rank's reduced gradients, as the optimizer will see them, in few tensors; any padding is zero."""
        shards = map(self.gradient, self.param_shards())
        return [g for g in shards if g is not None and g.numel()]

    def parameter_bytes(self) -> int:
        return sum(shard.local.nbytes for shard in self.param_shards())

    def gradient_bytes(self) -> int:
        shards = map(self.gradient, self.param_shards())
        return sum(g.nbytes for g in shards if g is not None)

    def optimizer_bytes(self) -> int:
        slots = (state_slots(self.optimizer, shard) for shard in self.param_shards())
        return sum(t.nbytes for of_shard in slots for t in of_shard.values())

    def persistent_tensors(self) -> Iterator[RoleTensor]:
        for shard in self.param_shards():
            yield Role.PARAMETERS, shard.local
        yield from ((Role.GRADIENTS, gradient) for gradient in self._gradients())
        for state in self.optimizer.state.values():
            yield from ((Role.OPTIMIZER, local_tensor(t)) for t in state.values() if isinstance(t, Tensor) and t.dim())

    def retire(self, busy: Collection[int] = ()) -> None:
        """Free all that is no state: gradients, and what is there to compute with. It cannot train afterwards; its state
        can be transferred. `busy`: as of `release`."""
        state = {storage_id(t) for role, t in self.persistent_tensors() if role is not Role.GRADIENTS}
        held = [*self._gradients(), *(t for _, t in self.transient_tensors())]
        self.optimizer.zero_grad(set_to_none=True)
        free([t for t in held if storage_id(t) not in state], busy)

    def release(self, busy: Collection[int] = ()) -> None:
        """Free all storage and destroy the groups now; torch's wrappers may outlive their last reference (see `free`).
        `busy`: addresses of storage that an aborted operation may still use; it is freed with its last reference."""
        held: list[Tensor] = [*self.module.parameters(), *self.module.buffers(), *self._gradients()]
        held += [shard.local for shard in self.param_shards()]
        held += [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.parked.clear()
        self.optimizer.param_groups.clear()
        free(held, busy)
        destroy(self.groups)

    def _gradients(self) -> Iterator[Tensor]:
        return (p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)


_INSTEAD: Mapping[str, Any] = {"optimizer": "adamw", FIELD: {}}
_NOT_BY_ELEMENTS: Mapping[str, str] = {
    "LBFGS": "computes the loss several times in a step",
    "Adafactor": "keeps sums over the rows and columns of whole matrices",
    "Muon": "orthogonalises whole matrices",
    "SparseAdam": "takes sparse gradients, which cannot be reduced",
}


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """The state that an optimizer keeps of each parameter, once it has stepped. A rank updates ranges of parameters, cut
    anywhere, and a switch cuts them elsewhere: so only classes are taken whose state is slots, by the value that all
    elements begin with, and scalars that are equal for all parameters, by (dtype, whether it is on the parameter's
    device)."""

    slots: Mapping[str, float]
    scalars: Mapping[str, tuple[torch.dtype, bool]]


def torch_class(optimizer: TorchOptimizer) -> type[torch.optim.Optimizer]:
    """Raises SpecError for a class that torch.optim has not, or that updates no elements by themselves."""
    kind = getattr(torch.optim, optimizer.class_name, None)
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
        hint = "give adamw, sgd, or another class of torch.optim such as RMSprop"
        raise SpecError("workload.optimizer", f"torch.optim has no optimizer {optimizer.class_name!r}", hint, _INSTEAD)
    if why := _NOT_BY_ELEMENTS.get(optimizer.class_name):
        raise _by_elements(optimizer, why)
    return kind


def check_optimizer(workload: Workload) -> None:
    """Raises SpecError for a class or an argument that torch refuses, and for a class that cannot be applied to shards."""
    optimizer = workload.torch_optimizer
    known = inspect.signature(torch_class(optimizer)).parameters
    if (other := next((name for name in optimizer.args if name not in known), None)) is not None:
        named = ", ".join(name for name in known if name not in ELSEWHERE)
        reason = f"{optimizer.class_name} has no argument {other!r}"
        raise SpecError(f"workload.{FIELD}", reason, f"its arguments are {named}", optimizer.without(other))
    try:
        kept_state(optimizer, "cpu")
    except SpecError:
        raise
    except Exception as e:  # of many classes; the message names the argument
        reason = f"{optimizer.class_name} refuses its arguments: {' '.join(str(e).split())}"
        raise SpecError(f"workload.{FIELD}", reason, "correct that one, or leave it out", {FIELD: {}}) from None


@lru_cache(maxsize=64)
def kept_state(optimizer: TorchOptimizer, device: str) -> KeptState:
    """Returns what a step on a tiny parameter shows. Raises SpecError, and what torch raises for arguments."""
    p = nn.Parameter(torch.zeros(2, 3, device=device))
    p.grad = torch.zeros_like(p)
    made = torch_class(optimizer)([p], lr=1e-3, **optimizer.keywords)  # type: ignore[call-arg]
    made.step()
    state = {name: t for name, t in made.state[p].items() if t is not None}
    if other := next((n for n, t in state.items() if not isinstance(t, Tensor) or t.shape not in ((), p.shape)), None):
        raise _by_elements(optimizer, f"keeps {other!r}, which is neither of the parameter's shape nor one number")
    first = {name: float(t.flatten()[0]) for name, t in state.items() if t.dim()}
    slots = {name: value if math.isfinite(value) else 0.0 for name, value in first.items()}
    scalars = {name: (t.dtype, t.device.type != "cpu") for name, t in state.items() if not t.dim()}
    return KeptState(slots=slots, scalars=scalars)


def _by_elements(optimizer: TorchOptimizer, why: str) -> SpecError:
    reason = f"{optimizer.class_name} {why}, and a rank has parts of them, cut anywhere"
    hint = "use adamw, or a class that updates each element by itself"
    return SpecError("workload.optimizer", reason, hint, _INSTEAD)


def make_optimizer(shards: list[ParamShard], workload: Workload) -> torch.optim.Optimizer:
    """The workload's optimizer over the backend's shards, in the workload's groups, matrices and others apart."""
    by_key: dict[GroupKey, dict[nn.Parameter, None]] = {}
    for s in shards:
        if s.param is not None:
            by_key.setdefault(key_of(workload.param_groups, s.name, len(s.shape)), {})[s.param] = None
    groups: list[dict[str, Any]] = []
    for key, params in sorted(by_key.items(), key=lambda one: (one[0][0], not one[0][1])):
        lr, decay = workload.rates_of(key)
        groups.append({"params": list(params), "weight_decay": decay, "lr": lr, "initial_lr": lr, "key": key})
    kind = torch_class(workload.torch_optimizer)
    made = kind(groups, lr=workload.lr, **workload.torch_optimizer.keywords)  # type: ignore[call-arg]
    made.state.clear()  # of Adagrad, which makes it at once: see `begin_state`
    if workload.torch_optimizer.class_name == "Adagrad":
        made.register_step_pre_hook(begin_state)
    return made


def shard_at(name: str, param: nn.Parameter, shape: torch.Size, start: int, local: Tensor) -> ParamShard:
    """The shard of a parameter that begins at element `start`. A frozen one has no `ParamShard.param`."""
    trained, stop = param if param.requires_grad else None, start + local.numel()
    return ParamShard(name=name, shape=shape, start=start, stop=stop, local=local, param=trained)


def update_hyperparameters(optimizer: torch.optim.Optimizer, workload: Workload) -> None:
    """Set learning rate and weight decay; the state is not touched."""
    for group in optimizer.param_groups:
        group["initial_lr"], group["weight_decay"] = workload.rates_of(group["key"])
        group["lr"] = group["initial_lr"]


def scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to this share of its full one."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def local_tensor(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself; the same storage."""
    inner: Tensor = getattr(t, "_local_tensor", t)
    return inner.detach()


def _range(shard: ParamShard, t: Tensor) -> Tensor:
    """A shard's part of a tensor that is laid out like the optimizer's parameter."""
    return t if t.numel() == shard.numel else t.view(-1)[shard.offset : shard.offset + shard.numel]


def state_slots(optimizer: torch.optim.Optimizer, shard: ParamShard) -> dict[str, Tensor]:
    """The optimizer's tensors for a shard, by slot, flat: {"exp_avg": [n], "exp_avg_sq": [n]} for AdamW."""
    state = shard.slots(optimizer)
    local = {slot: local_tensor(t).view(-1) for slot, t in state.items() if isinstance(t, Tensor) and t.dim() > 0}
    return {slot: _range(shard, t) for slot, t in local.items()}


def begin_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """The state of Adagrad's parameters that have none; other classes make it in their first step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p not in optimizer.state:
                begun = torch.full_like(p, group["initial_accumulator_value"], memory_format=torch.preserve_format)
                step = torch.zeros((), device=p.device if group["fused"] else "cpu")
                optimizer.state[p] = {"step": step, "sum": begun}


def scalars_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers that the optimizer keeps for each parameter, as its number of steps; empty without state. Those of the
    parameter with the most steps, since it skips parameters without a gradient."""
    states = optimizer.state.values()
    scalars = ({n: float(t) for n, t in state.items() if isinstance(t, Tensor) and not t.dim()} for state in states)
    return max(scalars, key=lambda one: one.get("step", 0.0), default={})


def seed_state(
    backend: Backend, slots: Collection[str], scalars: Mapping[str, float], shards: Iterable[ParamShard]
) -> None:
    """Creates the optimizer's state of these shards, where there is none. Without slots it begins as a new one."""
    optimizer, kept = backend.optimizer, backend.kept
    params = dict.fromkeys(s.param for s in shards if s.param is not None and s.param not in optimizer.state)
    for p in params if slots else ():
        state: dict[str, Any] = {}
        for name, (dtype, on_device) in kept.scalars.items():
            if name in scalars:
                state[name] = torch.tensor(scalars[name], dtype=dtype, device=p.device if on_device else "cpu")
        for slot in {*slots, *kept.slots}:
            state[slot] = torch.full_like(p, kept.slots.get(slot, 0.0), memory_format=torch.preserve_format)
        optimizer.state[p] = state


def drop_slots(backend: Backend) -> None:
    """Free what came with a transfer and the optimizer does not keep."""
    backend.parked.clear()
    for state in backend.optimizer.state.values():
        for slot in state.keys() - {*backend.kept.scalars, *backend.kept.slots}:
            del state[slot]


def destroy(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy process groups that an abort has not destroyed already."""
    for group in groups:
        if group in c10d._world.pg_map:
            dist.destroy_process_group(group)


def materialiser(
    device: torch.device, then: Callable[[nn.Parameter], None] = lambda p: None
) -> Callable[[nn.Module], None]:
    """Returns a function that gives a module's own parameters uninitialised storage on `device`, and calls `then` with each.
    Buffers keep their values, and ties stay tied, which `nn.Module.to_empty` does not guarantee."""
    made: dict[int, nn.Parameter] = {}

    def make(module: nn.Module) -> None:
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad)
                    then(made[id(p)])
                module._parameters[name] = made[id(p)]

    return make


def place_buffers(model: nn.Module, device: torch.device, precision: Precision) -> None:
    """Moves them, and casts those of floating point as `precision` says; BatchNorm's stay as they are."""
    buffer_dtype = None if precision.buffer is None else DTYPES[precision.buffer]
    for module in model.modules():
        dtype = None if kind_of(module) is ModuleKind.BATCH_NORM else buffer_dtype
        for b in module.buffers(recurse=False):
            b.data = b.data.to(device=device, dtype=dtype if b.is_floating_point() else None)


def original_name(name: str) -> str:
    """A parameter's or module's name without the prefixes of wrappers."""
    for part in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"):
        name = name.removesuffix(f".{part}").replace(f"{part}.", "")
    return name


class DeferredStorage:
    """What a new backend will hold, not yet allocated: a backend is built unit by unit, and the storage of each is freed as
    soon as the unit exists (`defer`). It is allocated again, with zeros, when values come: all of it (`fill`), or a few
    parameters at a time (transfer.py). A tensor whose storage is freed keeps its shape, and what views it later sees the new
    allocation. But torch makes no new slice of it, so slices are made before; and reading it reads address 0.

    Shards that other ranks map (`gather="mapped"`) are not torch's to free: a switch from or to them holds both."""

    def __init__(self) -> None:
        # By the identity of the first storage: sizes.
        self._owed: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}

    def defer(self, tensor: Tensor, *others: Tensor) -> None:
        """Free a tensor's storage until it is allocated; that of `others` together with it."""
        storages = [_storage(t) for t in (tensor, *others)]
        owed = [(s, s.nbytes()) for s in storages if s.nbytes() and s.resizable()]  # torch's pinned memory is not
        if owed:
            self._owed.setdefault(storages[0]._cdata, []).extend(owed)
        for storage, _ in owed:
            storage.resize_(0)

    def allocate(self, tensors: Iterable[Tensor] | None) -> None:
        """Allocates the storage of these, or of all, where it is deferred."""
        keys = list(self._owed) if tensors is None else [_storage(t)._cdata for t in tensors]
        for storage, nbytes in (owed for key in keys for owed in self._owed.pop(key, ())):
            storage.resize_(nbytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()  # padding must be zero


def return_memory(device: torch.device) -> None:
    """Make the allocators return cached memory to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):  # of pinned memory
            torch._C._host_emptyCache()
    with suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def free(tensors: Iterable[Tensor], busy: Collection[int] = ()) -> None:
    """Return storage to the allocator now, even if it is still referenced, unless its address is in `busy`: dropping a
    wrapped model does not free it (FSDP1 leaks about 18 MiB for each build of a 3.3M-parameter GPT-2)."""
    for t in tensors:
        storage = _storage(t)
        if storage.nbytes() and storage.resizable() and storage.data_ptr() not in busy:
            storage.resize_(0)


def storage_id(t: Tensor) -> int:
    """Equal for tensors that share storage, also for what is freed."""
    return int(_storage(t)._cdata)


def _storage(t: Tensor) -> torch.UntypedStorage:
    inner: Tensor = getattr(t, "_local_tensor", t)
    return inner.untyped_storage()
