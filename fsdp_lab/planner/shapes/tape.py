"""`record`: the allocations and frees of a forward and a backward of a plain model, without any arithmetic.

The model runs on fake tensors, which have shapes and storages but no values, through torch's own autograd, casts and
checkpoints. So torch determines what is saved, when it is freed, and in which order gradients are ready. One run covers all
batch sizes and sequence lengths: samples and tokens are primes that divide no size of the model, so that the factors of a
size show how it grows. So do those of a length with one token more or less. Images have no tokens that vary.

Note: scratch memory inside a kernel is not recorded. On CPUs oneDNN copies a convolution's tensors to layouts of its own, by
which a ResNet's peak is up to 6 % above the plan; that of other models is within 2 % (`bands.MEMORY_ERRORS`)."""

import copy
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import transformers.masking_utils as masking
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_lab.base.tensors import map_tensors, tensors_in, view_inputs
from fsdp_lab.engine.policy import ModuleKind, kind_of
from fsdp_lab.engine.schedule import Direction, Point, PointSide
from fsdp_lab.models.flops import empty_batch
from fsdp_lab.models.own import OwnSource, objective
from fsdp_lab.models.presets import Facts
from fsdp_lab.planner import model_shape
from fsdp_lab.planner.model_shape import Kernels, MatMul, SizeFormula, TapeChange, TapeSegment, merged
from fsdp_lab.spec.workload import Workload

SAMPLES = 37
# An encoder reads half of one, a prime. Both numbers next to the length and to its half have large prime factors.
_LENGTHS = tuple(2 * prime for prime in (509, 457, 443, 467, 409, 229, 173, 103, 83, 61, 43, 59, 53, 29))
NO_LENGTH = 2 * (2**61 - 1)  # twice a prime that divides no size, since no size depends on a length


@dataclass(kw_only=True)
class CallRecord:
    """The work of one call of a unit, with the sizes of the recorded run; products and attention in the forward."""

    # By pass: of each kernel on a GPU, the sizes of what it moves; of products and attention none.
    launched: dict[Direction, list[list[int]]] = field(default_factory=lambda: defaultdict(list))

    products: list[tuple[int, int, int]] = field(default_factory=list)  # with a weight: rows, inputs, outputs
    pair_flops: float = 0.0
    heads: int = 0
    causal: bool = False
    boundary: int = 0  # elements of its inputs

    def matmuls(self, tokens: int) -> Iterator[MatMul]:
        """Its products with weights, with `tokens` per sample of the run."""
        for (rows, inputs, outputs), n in Counter(self.products).items():
            yield MatMul(inputs=inputs, outputs=outputs, count=n, share=rows / (SAMPLES * tokens))


@dataclass(frozen=True, kw_only=True)
class TapeRecording:
    """One run. `calls`: (unit, index of the enclosing call); `records`: one per call."""

    calls: tuple[tuple[int, int | None], ...]
    segments: tuple[TapeSegment, ...]
    records: tuple[CallRecord, ...]
    seq_len: int

    def kernels(self, calls: Sequence[int], direction: Direction) -> Kernels:
        """The kernels of a pass of these calls."""
        launched = [sizes for k in calls for sizes in self.records[k].launched[direction]]
        moved = (size_of(n, self.seq_len) for sizes in launched for n in sizes)
        return Kernels(len(launched), sum(moved, SizeFormula(())))


class ConfigInputs:
    """The batch and the loss of a model of transformers. `image_tokens`: of a sample, whatever the sequence length; None: as
    many as the length. `batch_size`: bytes of a micro-batch."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.image_tokens = None if facts.is_text else facts.tokens_per_sample(0)
        if facts.image_pixels is None:
            self.batch_size = SizeFormula(((1, 1, 16.0 if facts.kind != "seq2seq" else 8.0),))
        else:
            height, width = facts.image_pixels
            self.batch_size = SizeFormula(((1, 0, 4.0 * facts.channels * height * width + 8),))

    def length(self, model: nn.Module) -> int:
        """Twice a prime that divides no size of the model."""
        return _length(model, self._facts) if self._facts.is_text else NO_LENGTH

    def batch(self, seq_len: int) -> Mapping[str, Tensor]:
        return empty_batch(self._facts, SAMPLES, seq_len, device="cpu")

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        return loss


class OwnInputs:
    """The samples and the loss of a Workload of the user's own. Raises SpecError."""

    image_tokens = 1

    def __init__(self, workload: Workload) -> None:
        self._samples, self._loss = OwnSource(workload).first(SAMPLES), objective(workload)
        self.batch_size = SizeFormula(((1, 0, sum(t.nbytes for t in tensors_in(self._samples)) / SAMPLES),))

    def length(self, model: nn.Module) -> int:
        return NO_LENGTH

    def batch(self, seq_len: int) -> Any:
        return map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype), self._samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self._loss(model, batch)


Inputs = ConfigInputs | OwnInputs


def record(
    model: nn.Module,
    inputs: Inputs,
    units: Sequence[Sequence[nn.Module]],  # modules of each unit below the root
    *,
    precision: str,  # "fp32", "half" or "autocast"
    recomputed: Sequence[nn.Module] = (),  # modules under a checkpoint
) -> TapeRecording:
    """Runs a copy of `model`, whose parameters are on meta."""
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model, memo)
    inside = [[memo[id(m)] for m in unit] for unit in units]
    checkpointed = {id(memo[id(m)]) for m in recomputed}
    # Decoders look for several packed texts in a sample, which needs values; here each sample is one text.
    one_text = mock.patch.object(masking, "find_packed_sequence_indices", lambda position_ids: None)
    with FakeTensorMode(allow_non_fake_inputs=True), one_text:
        _make_fake(copied, precision)
        seq_len = inputs.length(model)
        batch = inputs.batch(seq_len)
        run = _Run(copied, inside, checkpointed)
        existing = [*copied.parameters(), *copied.buffers(), *tensors_in(batch)]
        with run.recorder.recording(existing):
            run.run(lambda: inputs.loss(copied, batch), autocast=precision == "autocast")
    calls, records, segments = tuple(run.calls), tuple(run.records), run.recorder.segments(seq_len)
    return TapeRecording(calls=calls, segments=segments, records=records, seq_len=seq_len)


def owners(model: nn.Module, units: Sequence[Sequence[nn.Module]]) -> list[list[tuple[str, nn.Parameter, nn.Module]]]:
    """(name in the model, parameter, module that has it) for the parameters of each unit, the root's first. A parameter
    belongs to the first of `units` that contains it."""
    order = {id(p): (i, n) for i, (n, p) in enumerate(model.named_parameters())}
    assigned: set[int] = set()
    inner: list[list[tuple[str, nn.Parameter, nn.Module]]] = []
    for modules in [*units, [model]]:
        own = []
        for owner in (m for module in modules for m in module.modules()):
            for p in owner._parameters.values():
                if p is not None and id(p) not in assigned:
                    assigned.add(id(p))
                    own.append((order[id(p)][1], p, owner))
        inner.append(sorted(own, key=lambda one: order[id(one[1])]))
    return [inner[-1], *inner[:-1]]


def _make_fake(model: nn.Module, precision: str) -> None:
    """Replaces parameters and buffers by fake CPU tensors; under "half" in the dtype in which a backend gathers them."""
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
        if precision == "half" and not half:  # a batch norm computes in fp32 and returns the others' precision
            module.register_forward_pre_hook(lambda _, args: map_tensors(lambda t: t.float(), args))
            module.register_forward_hook(lambda _, __, out: map_tensors(lambda t: t.to(torch.bfloat16), out))


def _length(model: nn.Module, facts: Facts) -> int:
    """A sequence length that the model supports and that its sizes cannot be taken for: see `size_of`."""
    sizes = {n for p in model.parameters() for n in p.shape if n}
    short = [s for s in _LENGTHS if facts.max_positions is None or s <= facts.max_positions] or _LENGTHS[-1:]

    def is_distinct(length: int) -> bool:
        """Whether the largest prime factors of its half and of the numbers next to both divide none of the sizes."""
        half = length // 2
        factors = {_largest_prime(n) for n in (half, half - 1, half + 1, length - 1, length + 1)}
        return SAMPLES not in factors and not any(n % factor == 0 for n in sizes for factor in factors)

    return next(filter(is_distinct, short), short[0])


def _largest_prime(n: int) -> int:
    factor = 2
    while factor * factor <= n:
        factor, n = (factor, n // factor) if n % factor == 0 else (factor + 1, n)
    return n


class _Run:
    """Hooks on units and parameters that pass the points of the schedule to the recorder."""

    def __init__(self, model: nn.Module, units: Sequence[Sequence[nn.Module]], checkpointed: set[int]) -> None:
        self.recorder = _Recorder(self._current)
        self.calls: list[tuple[int, int | None]] = []
        self.records: list[CallRecord] = []
        self._half = any(p.dtype is torch.bfloat16 for p in model.parameters())
        self._open: list[int] = []
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._backward = False
        self._backward_call = 0
        for unit, parameters in enumerate(owners(model, units)):
            for index, (_, p, _) in enumerate(parameters):
                if p.requires_grad:
                    self._watch_gradient(p, unit, index)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if id(child) in checkpointed:
                    wrapper = checkpoint_wrapper(child, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
                    setattr(module, name, wrapper)
        # By module: its wrapper if it has one, which comes before it in modules().
        outer = {id(getattr(m, "_checkpoint_wrapped_module", m)): m for m in reversed(list(model.modules()))}
        for unit, modules in enumerate([[model], *units]):
            for m in modules:
                self._watch(outer.get(id(m), m), unit)

    def run(self, compute: Callable[[], Tensor], *, autocast: bool) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = compute()
        loss = loss.float()
        self._backward = True
        torch.autograd.backward(loss * 1.0)
        for k in self._begun - self._ended:  # calls whose input needs no gradient; the root's end is last
            if k:
                self._point(Direction.BACKWARD, k, PointSide.AFTER)
        self._point(Direction.BACKWARD, 0, PointSide.AFTER)

    def _watch_gradient(self, p: nn.Parameter, unit: int, index: int) -> None:
        def take_gradient(p: Tensor) -> None:
            assert p.grad is not None
            grad, p.grad = p.grad, None
            self.recorder.gradient_ready(grad, unit, index)

        p.register_post_accumulate_grad_hook(take_gradient)  # type: ignore[no-untyped-call]

    def _watch(self, module: nn.Module, unit: int) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._backward:  # a checkpoint's forward
                return None
            k = len(self.calls)
            self.calls.append((unit, self._open[-1] if self._open else None))
            self.records.append(CallRecord())
            self._open.append(k)
            self._point(Direction.FORWARD, k, PointSide.BEFORE)
            inputs = (args, kwargs)
            if self._half:
                inputs = map_tensors(lambda t: t.to(torch.bfloat16) if t.dtype is torch.float32 else t, inputs)
            if k:
                inputs, views = view_inputs(inputs)
                self.records[k].boundary = sum(v.numel() for v in views)
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

    def _point(self, direction: Direction, k: int, side: PointSide) -> None:
        if direction is Direction.BACKWARD:
            reached = self._begun if side is PointSide.BEFORE else self._ended
            if k in reached:
                return
            reached.add(k)
            self._backward_call = k if side is PointSide.BEFORE else self.calls[k][1] or 0
        self.recorder.point(Point(direction, k, side))

    def _current(self) -> tuple[list[list[int]], CallRecord | None]:
        """The kernels of the innermost call, which is the root's also before and after it, and in the forward its record."""
        call = self._backward_call if self._backward else self._open[-1] if self._open else 0
        if call >= len(self.records):
            return [], None
        record, direction = self.records[call], Direction.BACKWARD if self._backward else Direction.FORWARD
        return record.launched[direction], record if self._open and not self._backward else None


@dataclass(slots=True, weakref_slot=True)
class _Storage:
    """A storage: its bytes, the index of its allocation among the events, and whether it became a parameter's gradient."""

    size: int
    event: int
    is_gradient: bool = False


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records allocations and frees of storages, between the points of the schedule."""

    def __init__(self, current: Callable[[], tuple[list[list[int]], CallRecord | None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._current = current
        self._alive: dict[int, tuple[Any, _Storage | None]] = {}
        self._points: list[tuple[Point, int]] = []  # with the number of earlier events
        self._events: list[tuple[str, int, int | None, int]] = []
        self._open = False

    @contextmanager
    def recording(self, existing: Sequence[Tensor]) -> Iterator[None]:
        """`existing`: tensors that are not counted."""
        for storage in [t.untyped_storage() for t in existing]:
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
        launched, record = self._current()
        launched += _launched(func, args, tensors_in((args, kwargs, result)))
        if record is not None:
            _count(record, func, args, kwargs or {}, result)
        return result

    def point(self, point: Point) -> None:
        self._points.append((point, len(self._events)))

    def gradient_ready(self, grad: Tensor, unit: int, index: int) -> None:
        _, storage = self._alive.get(grad.untyped_storage()._cdata, (None, None))
        size = 0
        if storage is not None and not storage.is_gradient:
            storage.is_gradient, size = True, storage.size
            self._events[storage.event] = (model_shape.MADE, size, unit, index)
        self._events.append((model_shape.ARRIVED, size, unit, index))

    def _see(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return
        seen = _Storage(size, len(self._events))
        self._events.append((model_shape.ALLOCATED, size, None, -1))

        def freed(_: Any) -> None:
            self._alive.pop(key, None)
            if self._open and not seen.is_gradient:
                self._events.append((model_shape.FREED, seen.size, None, -1))

        self._alive[key] = (weakref.ref(storage, freed), seen)

    def segments(self, seq_len: int) -> tuple[TapeSegment, ...]:
        ends = [*(n for _, n in self._points[1:]), len(self._events)]
        segments = []
        for (point, begin), end in zip(self._points, ends, strict=True):
            events = self._events[begin:end]
            changes = [TapeChange(kind, size_of(size, seq_len), unit, index) for kind, size, unit, index in events]
            segments.append(TapeSegment(point, tuple(merged(changes))))
        return tuple(segments)


def size_of(size: int, seq_len: int) -> SizeFormula:
    """Returns how a size grows with samples and tokens, from its factors."""
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


# Kernels of an operator on a GPU, where they are not one: fills before sums into place, sorted indices, and attention's
# and norms' gradients one after the other.
_KERNELS = {
    "aten::native_layer_norm_backward": 3,
    "aten::slice_backward": 2,
    "aten::constant_pad_nd": 2,
    "aten::nll_loss_backward": 2,
    "aten::embedding_dense_backward": 6,
    "aten::convolution_backward": 2,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 4,
}
# How often more than once a kernel reads its inputs where a row does not fit shared memory (SoftMax.cu).
_READ_AGAIN = {"aten::_log_softmax": 2, "aten::_log_softmax_backward_data": 1}
_SHARED_MEMORY = 48 << 10
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::convolution", "aten::_scaled_dot_product")


def _launched(func: Any, args: Any, tensors: Iterable[Tensor]) -> list[list[int]]:
    """An operator's kernels, and what those bound by memory read and write: of an expanded tensor, its memory."""
    name = func.name().partition(".")[0]
    if func.is_view or "empty" in name or name in ("aten::_unsafe_view", "prim::device"):
        return []
    sizes = [min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors]
    if name in _READ_AGAIN and args[0].shape[-1] * args[0].element_size() > _SHARED_MEMORY:
        sizes += _READ_AGAIN[name] * [t.nbytes for t in tensors_in(args)]
    return [[] if name.startswith(_PRODUCTS) else sizes, *[[]] * (_KERNELS.get(name, 1) - 1)]


def _count(record: CallRecord, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Counts a product with a weight, or attention's products of all pairs."""
    name = func.name().partition(".")[0]
    if name in ("aten::mm", "aten::addmm"):
        left, right = args[-2:] if name == "aten::mm" else args[1:3]
        record.products.append((left.shape[0], left.shape[1], right.shape[1]))
    elif name == "aten::convolution":
        weight = args[1]
        rows = result.numel() // weight.shape[0]
        record.products.append((rows, weight[0].numel(), weight.shape[0]))
    elif name == "aten::bmm":
        left, right = args[:2]
        record.pair_flops += 2.0 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]
        record.heads += left.shape[0] // SAMPLES if right.shape[2] > left.shape[2] else 0  # of the scores alone
    elif "scaled_dot_product" in name:
        q, k, v = args[:3]
        record.pair_flops += 2.0 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])
        record.heads += q.shape[1]
        record.causal = record.causal or bool(kwargs.get("is_causal", any(a is True for a in args[3:])))
