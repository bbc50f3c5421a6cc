"""`Recording`: what a watched loop computes in its first steps, for `fsdp_lab.runs.prove`: batch, outputs of modules,
gradients that the optimizer is given, and parameters after it, each as a digest, a sum and some of its elements.

Note: digests and shards. The bits of each element are weighted by its position in the whole tensor, so the digests of the
shards of a tensor add up to that of the whole, modulo 2^64, however it is sharded. The elements that are kept lie at
`SAMPLE` positions of the whole as well.

Note: a perturbed run. To know what rounding does to a training, one run of it has the results of all innermost modules, the
gradients that reach them, and the gradients of the parameters perturbed at random by one unit in the last place."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fsdp_lab.backends.base import original_name
from fsdp_lab.base.tensors import map_tensors, tensors_in
from fsdp_lab.rank.watch.found import PlainModel, can_count

SAMPLE = 4093  # elements that are kept of a tensor: a prime, so that they lie in all columns of a matrix
_CHUNK = 1 << 22
_STRIDE, _SEED = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
_FIELDS = ("phase", "name", "dtype", "digest", "total", "numel", "first", "rank")  # of a piece, in the text of a file
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StepPhase(StrEnum):
    """In the order of a step. BEGIN: parameters before the first one."""

    BEGIN = "initial value"
    OUTPUT = "output"
    GRADIENT = "gradient"
    UPDATE = "value after the update"


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A tensor of one step, or what one rank has of it. `numel` is 0 where there is none, as of a gradient."""

    phase: StepPhase
    name: str
    rank: int = -1  # whose output it is
    dtype: str = ""
    digest: int = 0
    total: float = 0.0  # the sum of its elements
    numel: int = 0
    first: int = 0  # the position of its first element
    kept: Tensor = field(default_factory=lambda: torch.zeros(0))  # [n], fp64, elements of the sample
    at: Tensor = field(default_factory=lambda: torch.zeros(0))  # [n], int64, their positions in the whole tensor

    @property
    def where(self) -> str:
        return f"{self.phase} of {self.name or 'the model'}" + (f" on rank {self.rank}" if self.rank >= 0 else "")

    @property
    def norm(self) -> float:
        return float(self.kept.nan_to_num().norm())

    @property
    def unit(self) -> float:
        """One unit in the last place of each of its elements, together."""
        return torch.finfo(getattr(torch, self.dtype)).eps * self.norm if self.dtype else 0.0

    def distance(self, other: Self) -> float:
        """Infinite where they cannot be compared."""
        if (self.digest, self.numel, self.dtype) == (other.digest, other.numel, other.dtype):
            return 0.0
        if self.numel != other.numel or not torch.equal(self.kept.isfinite(), other.kept.isfinite()):
            return math.inf
        kept = float((self.kept.nan_to_num() - other.kept.nan_to_num()).norm())
        return kept or abs(self.total - other.total) / math.sqrt(self.numel)

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self:
        """The whole tensor. Copies that several ranks have of one part count once."""
        parts = [*{(p.first, p.numel): p for p in reversed(pieces) if p.numel}.values()]
        if not parts:
            return pieces[0]
        order = torch.cat([p.at for p in parts]).argsort()
        return dataclasses.replace(
            parts[0],
            digest=sum(p.digest for p in parts) % (1 << 64),
            total=math.fsum(p.total for p in parts),
            numel=sum(p.numel for p in parts),
            kept=torch.cat([p.kept for p in parts])[order],
        )


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """What one rank computed in a step. `batch`: a digest of its inputs, in any order. `losses`: of its micro-batches."""

    pieces: Sequence[Piece]
    batch: int = 0
    rows: int = 0  # of its inputs
    losses: Sequence[float] = ()

    def write(self, path: Path) -> None:
        """A reader never sees half a file."""
        fields = [{name: getattr(p, name) for name in _FIELDS} | {"at": len(p.at)} for p in self.pieces]
        text = json.dumps({"pieces": fields, "batch": self.batch, "rows": self.rows, "losses": list(self.losses)})
        kept, at = (torch.cat([getattr(p, name) for p in self.pieces]) for name in ("kept", "at"))
        torch.save({"text": text, "kept": kept, "at": at}, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    @classmethod
    def read(cls, path: Path) -> Self:
        content = torch.load(path, weights_only=True)
        said = json.loads(content["text"])
        sizes = [fields["at"] for fields in said["pieces"]]
        parts = zip(said.pop("pieces"), *(torch.split(content[name], sizes) for name in ("kept", "at")), strict=True)
        pieces = [Piece(**{**of, "phase": StepPhase(of["phase"]), "kept": kept, "at": at}) for of, kept, at in parts]
        return cls(pieces=pieces, **said)


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """`folder`: where the files of `write` go. `steps`: so many are recorded. `perturbs`: it is a perturbed run."""

    folder: str
    steps: int
    perturbs: bool = False


class Recording:
    """Of one rank, from before its first step until `steps` are over. Its caller says where a step ends."""

    def __init__(self, found: PlainModel, options: RecordOptions, rank: int, world_size: int) -> None:
        self._options, self._rank, self._world_size = options, rank, world_size
        self._held = [(held, held.positions()) for held in found.held()]
        self._step, self._perturbed = 0, 0  # _perturbed: how many tensors were
        self._pieces: list[Piece] = []
        self._outputs: set[str] = set()  # names of this step
        self._batch = self._rows = 0
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._before_update)]
        root = found._unwrapped()
        modules = [*root.named_modules()] if can_count(found.module) else [("", root)]  # compiled ones are not entered
        for path, module in modules:
            if options.perturbs and (len(modules) == 1 or not [*module.children()]):
                self._handles.append(module.register_forward_hook(self._perturb_output))
            self._handles.append(module.register_forward_hook(self._output_of(original_name(path))))
        self._handles.append(found.module.register_forward_hook(self._after_forward, with_kwargs=True))
        self._pieces = [*self._values(StepPhase.BEGIN)]
        self._write("begin", [])

    def end_step(self, losses: Sequence[float]) -> None:
        """`losses`: of its micro-batches."""
        if self._step >= self._options.steps:
            return
        self._pieces += self._values(StepPhase.UPDATE)
        self._write(f"step-{self._step}", losses)
        self._step += 1
        if self._step == self._options.steps:
            for handle in self._handles:
                handle.remove()

    def _write(self, what: str, losses: Sequence[float]) -> None:
        step = RankStep(pieces=self._pieces, batch=self._batch % (1 << 64), rows=self._rows, losses=losses)
        step.write(Path(self._options.folder) / f"{what}-rank-{self._rank}-of-{self._world_size}.pt")
        self._pieces, self._batch, self._rows, self._outputs = [], 0, 0, set()

    # -- in a step ----------------------------------------------------------------------------------------------------

    def _after_forward(self, _: nn.Module, args: Any, kwargs: Any, __: Any) -> None:
        if not _is_training_forward():
            return
        given = [t for t in tensors_in((kwargs, args)) if t.dim()]
        for t in [t for t in given if not t.is_floating_point()][:1] or given[:1]:
            bits = _bits(t.detach().contiguous().view(-1))
            self._rows += len(t)
            self._batch += int((bits * (bits * _STRIDE + _SEED)).sum())  # in any order

    def _output_of(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            if name not in self._outputs and _is_training_forward():
                self._outputs.add(name)
                for t in [t for t in tensors_in(output) if t.is_floating_point() and type(t) is Tensor][:1]:
                    self._pieces.append(_piece(t, 0, t.numel(), phase=StepPhase.OUTPUT, name=name, rank=self._rank))

        return note

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for number, (held, positions) in enumerate(self._held):
            if own.isdisjoint(held.ids) or not held.values().numel():
                continue
            gradient = held.gradient()
            if gradient is not None and self._options.perturbs:
                generator = torch.Generator(gradient.device).manual_seed(self._step * 100_003 + number)
                gradient.mul_(_units(gradient, generator))
            self._pieces.append(_piece(gradient, positions, held.whole, phase=StepPhase.GRADIENT, name=held.name))

    def _values(self, phase: StepPhase) -> Iterator[Piece]:
        for held, positions in self._held:
            if (values := held.values()).numel():
                yield _piece(values, positions, held.whole, phase=phase, name=held.name)

    def _perturb_output(self, _: nn.Module, __: Any, output: Any) -> Any:
        def perturbed(t: Tensor) -> Tensor:
            if not t.is_floating_point() or not t.requires_grad:
                return t
            self._perturbed += 1
            result: Tensor = _Perturbed.apply(t, self._perturbed * 1_009 + self._rank)  # type: ignore[no-untyped-call]
            return result

        return map_tensors(perturbed, output) if torch.is_grad_enabled() else output


class _Perturbed(torch.autograd.Function):
    """A tensor of which each element, and each of its gradient's, is perturbed by one unit in the last place."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, seed: int) -> Tensor:
        ctx.generator = torch.Generator(t.device).manual_seed(seed)
        return t * _units(t, ctx.generator)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * _units(gradients[0], ctx.generator), None


def _units(t: Tensor, generator: torch.Generator) -> Tensor:
    """Factors by which to multiply: the script's own generators are not touched."""
    signs = torch.randint(0, 2, t.shape, generator=generator, device=t.device).mul_(2).sub_(1)
    return 1 + signs.to(t.dtype) * torch.finfo(t.dtype).eps


def _is_training_forward() -> bool:
    """No evaluation, and no recomputation."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _piece(t: Tensor | None, positions: Tensor | int, whole: int, **named: Any) -> Piece:
    """`positions`: of its elements in a tensor of `whole` elements; an int: of the first, where they follow one another."""
    if t is None:
        return Piece(**named)
    flat, digest, total = t.detach().reshape(-1), 0, 0.0
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        if isinstance(positions, int):
            weights = torch.arange(positions + start, positions + start + part.numel(), device=flat.device)
        else:
            weights = positions[start : start + _CHUNK].to(flat.device)
        digest += int((_bits(part) * weights.mul(_STRIDE).add_(_SEED).bitwise_or_(1)).sum())
        total += float(part.double().sum())
    wanted = torch.arange(min(whole, SAMPLE))
    wanted = wanted if whole <= SAMPLE else (wanted * whole + SAMPLE - 1).div_(SAMPLE, rounding_mode="floor")
    if isinstance(positions, int):
        at = wanted[(wanted >= positions) & (wanted < positions + flat.numel())]
        own, first = at - positions, positions
    else:
        own, first = torch.isin(positions, wanted).nonzero().view(-1), int(positions[0])
        at = positions[own]
    kept, dtype = flat[own.to(flat.device)].double().cpu(), str(t.dtype).removeprefix("torch.")
    sums: dict[str, Any] = {"digest": digest % (1 << 64), "total": total, "numel": flat.numel()}
    return Piece(dtype=dtype, first=first, kept=kept, at=at, **sums, **named)


def _bits(t: Tensor) -> Tensor:
    """[n], int64; -0 is 0."""
    t = t + 0.0 if t.is_floating_point() else t
    return (t.to(torch.uint8) if t.dtype is torch.bool else t).view(_BITS[t.element_size()]).long()
