"""One training script, three engines: what a script is given, and how its numbers are compared.

A script is a function of an `Engine`. It differs from a plain script in the names of the engine's methods only; all other
calls (optimizers, clipping, scalers, schedules, state dicts) are torch's own, on `model.parameters()`.

Data has a leading dimension of `PARTS` equal parts. One process trains on all of them; of W ranks each takes PARTS / W.

Note: which numbers must agree. Between FSDP2 and ours a gradient is a sum of the ranks' gradients, divided by their
number. With two ranks a + b = b + a, and a division by two is exact whether before or after it, so all bits agree as long as
a script asks for nothing else that sums over elements (a norm, a factored or matrix-valued optimizer).

One process sums the same products in another order. A sum of n terms computed in two orders differs by at most
2 (n - 1) u S (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), with u the unit roundoff and S the sum of their
absolute values. Scripts compute in float64 (u = 1.1e-16) with n <= 512 and S <= 1, so gradients differ by at most
d = 1.2e-13. Adam moves a parameter by lr g / (|g| + eps), which changes by lr d / eps at most; with lr <= 1e-2, eps >= 1e-8
and at most 8 steps that sums to 8 * 1e-2 * 1.2e-13 / 1e-8 = 9e-7. It is the worst of all optimizers here: for plain descent
the factor 1 / eps is 1. Hence `BOUND` = 1e-6, where one step of lr 1e-2 moves a parameter by 1e-2. A script with a larger
u (fp32 inside a model, bf16, fp16) uses plain descent, and has a bound of its own, by the same rule without 1 / eps."""

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed as dist, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_lab import engine as ours
from tests.engine.toys import WIDTH, Net, update

PARTS = 4
BOUND = 1e-6
Log = Mapping[str, Tensor]


class Kind(enum.Enum):
    ONE = "one"
    FSDP2 = "fsdp2"
    OURS = "ours"


class Engine:
    """One process with the whole batch: nothing is sharded, nothing is sent."""

    kind = Kind.ONE

    def __init__(self, *, rank: int = 0, world_size: int = 1, folder: Path | None = None) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.log: dict[str, Tensor] = {}

    @property
    def saved(self) -> Path:
        """Where checkpoints lie."""
        assert self.folder is not None
        return self.folder

    # -- data and what is seen of a training ---------------------------------------------------------------------------

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's parts. whole: [PARTS, ...]"""
        return whole.chunk(self.world_size)[self.rank]

    def mean(self, value: Tensor) -> Tensor:
        """Over ranks; for the eyes, without gradients."""
        summed = value.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(summed)
        return summed / self.world_size

    def record(self, name: str, value: Any) -> None:
        """A number, or a tensor, that must be the same under every engine."""
        self.log[f"{len(self.log):03} {name}"] = self.whole(torch.as_tensor(value)).detach().clone()

    def record_loss(self, loss: Tensor) -> None:
        self.record("loss", self.mean(loss))

    def record_model(self, model: nn.Module, name: str = "") -> None:
        """All parameters and buffers, whole."""
        for key, value in self.values(model).items():
            self.log[f"{name}{key}"] = value

    def whole(self, value: Tensor) -> Tensor:
        """Of a sharded tensor; collective."""
        return value.full_tensor() if isinstance(value, DTensor) else value

    def values(self, model: nn.Module) -> dict[str, Tensor]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return {n: self.whole(t.detach()).detach().clone() for n, t in named}

    # -- what differs between engines ----------------------------------------------------------------------------------

    def shard(self, model: Any, units: Iterable[Any] = ()) -> Any:
        """Each of `units`, a module or a list of modules, then the rest."""
        for unit in units:
            self.fully_shard(unit)
        return self.fully_shard(model)

    def fully_shard(self, module: Any, **options: Any) -> Any:
        return module

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def end_evaluation(self, model: Any) -> None:
        """Before parameters are read or written after a forward without gradients."""

    def forward_method(self, module: Any, method: str) -> None:
        """Let another method than `forward` gather parameters."""


class FSDP2(Engine):
    kind = Kind.FSDP2

    def __init__(self, **where: Any) -> None:
        super().__init__(**where)
        self.mesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("shard",))

    def fully_shard(self, module: Any, **options: Any) -> Any:
        return fsdp2.fully_shard(module, mesh=self.mesh, **options)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def end_evaluation(self, model: Any) -> None:
        """FSDP2's root stays gathered until the next backward, and `parameters()` are not the sharded ones."""
        model.reshard()

    def forward_method(self, module: Any, method: str) -> None:
        fsdp2.register_fsdp_forward_method(module, method)


class Ours(Engine):
    kind = Kind.OURS

    def fully_shard(self, module: Any, **options: Any) -> Any:
        return ours.fully_shard(module, **options)

    def values(self, model: nn.Module) -> dict[str, Tensor]:
        buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        return {**{n: t.detach().clone() for n, t in ours.full_state(model)}, **buffers}

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        return ours.no_sync(model)

    def forward_method(self, module: Any, method: str) -> None:
        everything: Any = ours
        everything.register_fsdp_forward_method(module, method)


ENGINES = {engine.kind: engine for engine in (Engine, FSDP2, Ours)}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A script, and what is expected of it."""

    script: Callable[[Engine], None]
    bits: bool = True  # whether FSDP2 and ours agree bit for bit with two ranks
    bound: float = BOUND  # of any difference otherwise, relative to the larger of 1 and the values compared
    dtype: torch.dtype = torch.float64
    ranks: int = 2
    not_under: Mapping[Kind, str] = field(default_factory=dict)  # engine -> why the script is not run under it
    quick: bool = False  # whether it is in the quick tier, which has each way in which an engine can go wrong

    @property
    def name(self) -> str:
        return self.script.__name__


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one rank saw."""

    log: dict[str, Tensor]
    peak_bytes: int | None = None  # by the meter, where there is one


Meter = Callable[[], AbstractContextManager[Callable[[], int]]]  # inside it, the peak so far in bytes


def run(scenario: Scenario, kind: Kind, meter: Meter | None = None, **where: Any) -> Run:
    """A script under an engine, on this rank, always from the same seed."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(scenario.dtype)
    torch.manual_seed(0)
    engine = ENGINES[kind](**where)
    try:
        with meter() if meter is not None else nullcontext() as peak:
            scenario.script(engine)
    finally:
        torch.set_default_dtype(usual)
    return Run(log=engine.log, peak_bytes=None if peak is None else peak())


def differences(found: Log, wanted: Log, bound: float | None) -> dict[str, float]:
    """Where two logs differ: by more than `bound`, or, without one, in a bit. A missing entry differs by infinity."""
    differ = dict.fromkeys(found.keys() ^ wanted.keys(), float("inf"))
    for name in found.keys() & wanted.keys():
        a, b = found[name], wanted[name]
        if a.shape != b.shape or (bound is None and a.dtype != b.dtype):
            differ[name] = float("inf")
        elif bound is None:
            if not bool(((a == b) | (a.isnan() & b.isnan())).all()):
                differ[name] = float((a.double() - b.double()).abs().max())
        elif not torch.allclose(a.double(), b.double(), rtol=bound, atol=bound, equal_nan=True):
            differ[name] = float((a.double() - b.double()).abs().max())
    return dict(sorted(differ.items()))


def drawn(*shape: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
    """The same on every rank. [PARTS, *shape]"""
    return torch.randn(PARTS, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tokens(*shape: int, seed: int, vocabulary: int = 11) -> Tensor:
    """The same on every rank. [PARTS, *shape]"""
    return torch.randint(0, vocabulary, (PARTS, *shape), generator=torch.Generator().manual_seed(seed))


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Backward, step, and no gradients."""
    loss.backward()
    update(optimizer)


def net(e: Engine, depth: int = 3) -> Any:
    model = Net(depth)
    return e.shard(model, model.blocks)


def inputs(e: Engine, i: int) -> Tensor:
    """This rank's, in step i. [parts, 3, WIDTH]"""
    return e.rows(drawn(3, WIDTH, seed=i))


def square(e: Engine, model: Any, i: int) -> Tensor:
    out: Tensor = model(inputs(e, i))
    return out.to(torch.promote_types(out.dtype, torch.float32)).square().mean()


def train(e: Engine, model: Any, optimizer: torch.optim.Optimizer | None = None,
          loss: Callable[[Engine, Any, int], Tensor] = square, steps: int = 3) -> None:  # fmt: skip
    """The loop that scripts share of which something else is of interest; by AdamW where no optimizer is given."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(steps):
        value = loss(e, model, i)
        e.record_loss(value)
        step(optimizer, value)
    e.record_model(model)


def agree(runs: Sequence[Run]) -> Run:
    """The first, where all ranks saw the same. Raises AssertionError otherwise."""
    for rank, other in enumerate(runs):
        differ = differences(other.log, runs[0].log, None)
        assert not differ, f"rank {rank} saw other numbers than rank 0: {differ}"
    return runs[0]
