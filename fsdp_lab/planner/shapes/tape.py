"""`record`: a forward and a backward of a plain model without any arithmetic, and what they allocate and free on the way.

The model runs on fake tensors, which have a shape and a storage's life but no values, through torch's own autograd, casts
and checkpoints. So what is saved, what is freed when, and in which order gradients come is torch's word. One run suffices
for all batch sizes and sequence lengths: samples and tokens are primes that divide no size of the model, so that a size
says by its factors how it grows.

Note: scratch that a kernel takes inside itself is not seen.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers.masking_utils as masking
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_lab.core.model_shape import (
    ALLOCATED,
    ARRIVED,
    FREED,
    MADE,
    MatMul,
    SizeFormula,
    TapeChange,
    TapeSegment,
    merged,
)
from fsdp_lab.core.schedule import Direction, Point, PointSide
from fsdp_lab.engine.policy import ModuleKind, kind_of
from fsdp_lab.engine.tensors import map_tensors, tensors_in, view_inputs
from fsdp_lab.models.flops import empty_batch
from fsdp_lab.models.presets import Facts

SAMPLES = 37
_LENGTHS = tuple(2 * prime for prime in (479, 487, 491, 241, 239, 233, 61, 59, 53))  # an encoder reads half of one


@dataclass(kw_only=True)
class CallRecord:
    """What one call of a unit does in the forward, by the run's own sizes."""

    products: list[tuple[int, int, int]] = field(default_factory=list)  # rows, inputs, outputs of those with a weight
    pair_flops: float = 0.0
    heads: int = 0
    causal: bool = False
    boundary: int = 0  # elements of its inputs


@dataclass(frozen=True, kw_only=True)
class TapeRecording:
    """One run. `calls`: (unit, the call around it); `seen`: of each call."""

    calls: tuple[tuple[int, int | None], ...]
    stretches: tuple[TapeSegment, ...]
    seen: tuple[CallRecord, ...]
    seq_len: int


def record(model: nn.Module, facts: Facts, units: Sequence[Sequence[nn.Module]], *, precision: str,
           recomputed: Sequence[nn.Module] = ()) -> TapeRecording:  # fmt: skip
    """Runs a copy of `model`, whose parameters are on meta.

    Args:
        units: modules of each unit below the root.
        precision: "fp32", "half" or "autocast".
        recomputed: modules whose activations are computed again in the backward.
    """
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model, memo)
    inside = [[memo[id(m)] for m in unit] for unit in units]
    again = {id(memo[id(m)]) for m in recomputed}
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(fake)
        stack.enter_context(_without_values())
        _make_fake(copied, precision)
        seq_len = _length(model, facts)
        batch = empty_batch(facts, SAMPLES, seq_len, device="cpu")
        run = _Run(copied, inside, again)
        known = [*copied.parameters(), *copied.buffers(), *batch.values()]
        with run.recorder.recording(known):
            run.run(batch, autocast=precision == "autocast")
    return TapeRecording(
        calls=tuple(run.calls), stretches=run.recorder.stretches(seq_len), seen=tuple(run.seen), seq_len=seq_len
    )


def owners(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> list[list[tuple[str, nn.Parameter, nn.Module]]]:
    """Parameters of each unit, the root's first, each with its name in the model and a module that holds it: in the first
    unit of `units` that contains it."""
    names = {id(p): n for n, p in model.named_parameters()}
    taken: set[int] = set()
    inner: list[list[tuple[str, nn.Parameter, nn.Module]]] = []
    for modules in [*units, [model]]:
        found = []
        for module in modules:
            for holder in module.modules():
                for p in holder._parameters.values():
                    if p is not None and id(p) not in taken:
                        taken.add(id(p))
                        found.append((names[id(p)], p, holder))
        order = {n: i for i, n in enumerate(names.values())}
        inner.append(sorted(found, key=lambda one: order[one[0]]))
    return [inner[-1], *inner[:-1]]


# -- a model of fake tensors -----------------------------------------------------------------------------------------


@contextmanager
def _without_values() -> Iterator[None]:
    """Decoders look whether several texts were packed into a sample, which takes values; ours have one."""
    original = getattr(masking, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original


def _make_fake(model: nn.Module, precision: str) -> None:
    """Parameters and buffers as fake tensors of the CPU; under "half" as a backend gathers them."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        half = precision == "half" and kind_of(module) is not ModuleKind.BATCH_NORM
        for name, p in module._parameters.items():
            if p is not None:
                dtype = torch.bfloat16 if half and p.is_floating_point() else p.dtype
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=dtype), requires_grad=p.requires_grad)
                module._parameters[name] = made[id(p)]
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype)
        if precision == "half" and not half:
            _cast_around(module)


def _cast_around(module: nn.Module) -> None:
    """A batch norm computes in fp32 and gives back the precision of the others."""
    module.register_forward_pre_hook(lambda _, args: map_tensors(lambda t: t.float(), args))
    module.register_forward_hook(lambda _, __, out: map_tensors(lambda t: t.to(torch.bfloat16), out))


def _length(model: nn.Module, facts: Facts) -> int:
    """A sequence length that the model takes and of which no parameter has the prime as a factor."""
    sizes = {n for p in model.parameters() for n in p.shape if n}
    short = [s for s in _LENGTHS if facts.max_positions is None or s <= facts.max_positions] or _LENGTHS[-1:]
    return next((s for s in short if not any(n % (s // 2) == 0 for n in sizes)), short[0])


# -- running it ------------------------------------------------------------------------------------------------------


class _Run:
    """Hooks on units and parameters; they tell the recorder where the model has arrived."""

    def __init__(self, model: nn.Module, units: Sequence[Sequence[nn.Module]], again: set[int]) -> None:
        self.recorder = _Recorder(self._own)
        self.calls: list[tuple[int, int | None]] = []
        self.seen: list[CallRecord] = []
        self._model, self._half = model, any(p.dtype is torch.bfloat16 for p in model.parameters())
        self._open: list[int] = []
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._backward = False
        owned = owners(model, units)
        for unit, of_unit in enumerate(owned):
            for index, (_, p, _) in enumerate(of_unit):
                if p.requires_grad:
                    self._watch_gradient(p, unit, index)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if id(child) in again:
                    wrapper = checkpoint_wrapper(child, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
                    setattr(module, name, wrapper)
        outer = {id(getattr(m, "_checkpoint_wrapped_module", m)): m for m in model.modules()}
        for m in model.modules():
            if hasattr(m, "_checkpoint_wrapped_module"):
                outer[id(m._checkpoint_wrapped_module)] = m
        for unit, modules in enumerate([[model], *units]):
            for m in modules:
                self._watch(outer.get(id(m), m), unit)

    def run(self, batch: Mapping[str, Tensor], *, autocast: bool) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = self._model(**batch)["loss"]
        loss = loss.float()
        self._backward = True
        torch.autograd.backward(loss * 1.0)
        for k in self._begun - self._ended:  # of what needs no gradient for its input, the root's last
            if k:
                self._point(Direction.BACKWARD, k, PointSide.AFTER)
        self._point(Direction.BACKWARD, 0, PointSide.AFTER)

    def _watch_gradient(self, p: nn.Parameter, unit: int, index: int) -> None:
        def arrived(p: Tensor) -> None:
            assert p.grad is not None
            grad, p.grad = p.grad, None
            self.recorder.arrived(grad, unit, index)

        p.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def _watch(self, module: nn.Module, unit: int) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._backward:  # a checkpoint's forward
                return None
            k = len(self.calls)
            self.calls.append((unit, self._open[-1] if self._open else None))
            self.seen.append(CallRecord())
            self._open.append(k)
            self._point(Direction.FORWARD, k, PointSide.BEFORE)
            inputs = (args, kwargs)
            if self._half:
                inputs = map_tensors(lambda t: t.to(torch.bfloat16) if t.dtype is torch.float32 else t, inputs)
            if k:
                inputs, views = view_inputs(inputs)
                self.seen[k].boundary = sum(v.numel() for v in views)
                if views:
                    after = lambda _: self._point(Direction.BACKWARD, k, PointSide.AFTER)  # noqa: E731
                    torch.autograd.graph.register_multi_grad_hook(views, after, mode="all")
            return inputs

        def after(_: nn.Module, __: Any, output: Any) -> None:
            if self._backward:
                return
            k = self._open.pop()
            self._point(Direction.FORWARD, k, PointSide.AFTER)
            for t in tensors_in(output):
                if t.requires_grad:
                    begins = partial(self._point, Direction.BACKWARD, k, PointSide.BEFORE)
                    t.register_hook(lambda _, begins=begins: begins())  # type: ignore[no-untyped-call]

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _point(self, direction: Direction, k: int, moment: PointSide) -> None:
        if direction is Direction.BACKWARD:
            noted = self._begun if moment is PointSide.BEFORE else self._ended
            if k in noted:
                return
            noted.add(k)
        self.recorder.point(Point(direction, k, moment))

    def _own(self) -> CallRecord | None:
        """The record of the innermost call in the forward."""
        return self.seen[self._open[-1]] if self._open and not self._backward else None


@dataclass(slots=True, weakref_slot=True)
class _Life:
    """The life of a storage: the number of its allocation among the recorder's events."""

    size: int
    number: int
    arrived: bool = False


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, own: Callable[[], CallRecord | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = own
        self._alive: dict[int, tuple[Any, _Life | None]] = {}
        self._points: list[tuple[Point, int]] = []  # with the number of events before it
        self._events: list[tuple[str, int, int | None, int]] = []
        self._open = False

    @contextmanager
    def recording(self, known: Sequence[Tensor]) -> Iterator[None]:
        """`known`: what was there before, and is not counted."""
        held = [t.untyped_storage() for t in known]
        for storage in held:
            self._alive[storage._cdata] = (storage, None)
        self._open = True
        with self:
            yield
        self._open = False
        self._alive.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tensors_in(result) if not isinstance(result, Tensor) else (result,):
            self._see(t)
        own = self._own()
        if own is not None:
            _count(own, func, args, kwargs or {}, result)
        return result

    def point(self, point: Point) -> None:
        self._points.append((point, len(self._events)))

    def arrived(self, grad: Tensor, unit: int, index: int) -> None:
        _, life = self._alive.get(grad.untyped_storage()._cdata, (None, None))
        size = 0
        if life is not None and not life.arrived:
            life.arrived, size = True, life.size
            self._events[life.number] = (MADE, size, unit, index)
        self._events.append((ARRIVED, size, unit, index))

    def _see(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return
        life = _Life(size, len(self._events))
        self._events.append((ALLOCATED, size, None, -1))

        def gone(_: Any) -> None:
            self._alive.pop(key, None)
            if self._open and not life.arrived:
                self._events.append((FREED, life.size, None, -1))

        self._alive[key] = (weakref.ref(storage, gone), life)

    def stretches(self, seq_len: int) -> tuple[TapeSegment, ...]:
        ends = [*(n for _, n in self._points[1:]), len(self._events)]
        found = []
        for (point, begin), end in zip(self._points, ends, strict=True):
            changes = [
                TapeChange(kind, size_of(size, seq_len), unit, index)
                for kind, size, unit, index in self._events[begin:end]
            ]
            found.append(TapeSegment(point, tuple(merged(changes))))
        return tuple(found)


def size_of(size: int, seq_len: int) -> SizeFormula:
    """How a size grows, from its factors."""
    left, samples, tokens = size, 0, 0
    while left % SAMPLES == 0 and samples < 1:
        left, samples = left // SAMPLES, samples + 1
    half = seq_len // 2
    for longer in (1, -1):  # a text with one more token, or one less
        if left % half and left % (seq_len + longer) == 0:
            each = left // (seq_len + longer)
            return SizeFormula(((samples, 0, longer * each), (samples, 1, each)))
        if left % half and left % (half + longer) == 0:
            each = left // (half + longer)
            return SizeFormula(((samples, 0, longer * each), (samples, 1, each / 2)))
    whole = 1
    while left % half == 0 and tokens < 2:
        left, tokens, whole = left // half, tokens + 1, whole * 2
    return SizeFormula(((samples, tokens, left // whole if left % whole == 0 else left / whole),))


def _count(own: CallRecord, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Note a product with a weight, or attention's products of all pairs."""
    name = func.name().partition(".")[0]
    if name in ("aten::mm", "aten::addmm"):
        left, right = args[-2:] if name == "aten::mm" else args[1:3]
        own.products.append((left.shape[0], left.shape[1], right.shape[1]))
    elif name == "aten::convolution":
        weight = args[1]
        rows = result.numel() // weight.shape[0]
        own.products.append((rows, weight[0].numel(), weight.shape[0]))
    elif name == "aten::bmm":
        left, right = args[:2]
        own.pair_flops += 2.0 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]
        own.heads += left.shape[0] // SAMPLES if right.shape[2] > left.shape[2] else 0  # of the scores alone
    elif "scaled_dot_product" in name:
        q, k, v = args[:3]
        own.pair_flops += 2.0 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])
        own.heads += q.shape[1]
        own.causal = own.causal or bool(kwargs.get("is_causal", any(a is True for a in args[3:])))


def products_of(seen: CallRecord, tokens: int) -> tuple[MatMul, ...]:
    """tokens: of one sample of the run."""
    counted: dict[tuple[int, int, int], int] = {}
    for product in seen.products:
        counted[product] = counted.get(product, 0) + 1
    return tuple(
        MatMul(inputs=i, outputs=o, count=n, share=rows / (SAMPLES * tokens)) for (rows, i, o), n in counted.items()
    )
