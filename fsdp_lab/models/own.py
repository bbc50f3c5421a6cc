"""`OwnModel`: a module, a loss and a dataset of the user's own, as a Workload with code describes them.

Note: initial values. `build` is called once more for them, on the CPU, with the random generators of torch, numpy and
Python set from the Spec's seed, and each rank takes its ranges from the result. So the user's own initialisation is
honoured, and is equal for all backends and world sizes; each rank holds a whole model while it loads. The skeleton is
built with its parameters on meta; but a module with buffers, which may be random or computed from parameters, is built.

Note: random numbers. What a dataset draws in `__getitem__` depends on (seed, number of the sample), and what the module
and the loss draw, as dropout does, on (seed, first sample of the micro-batch; in an evaluation, of the held-out batch). So
both are equal for all backends, and for all world sizes at the same micro-batch."""

import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from fsdp_lab.base.errors import ArgumentError, Cause, SpecError
from fsdp_lab.base.tensors import map_tensors, tensors_in
from fsdp_lab.models.build import freeze, parameters_on_meta, seed_of
from fsdp_lab.models.check import model_facts
from fsdp_lab.models.configs import first_line, resolve
from fsdp_lab.models.flops import Flops, Recomputed, counted_flops
from fsdp_lab.models.lora import adapted
from fsdp_lab.models.sources import IGNORED, Batch, CausalTokens, Indices, Source
from fsdp_lab.spec.user_code import METRICS, code_name, loaded
from fsdp_lab.spec.workload import Workload

_MODEL, _LOSS, _DATA = "workload.model", "workload.loss", "workload.data"
_RAISED = (Exception, SystemExit)  # by the user's code, of which no rank may end
_PACKED = "find_packed_sequence_indices"
_BUILD_HINT = "correct it; it is called without arguments, and returns an nn.Module"


@contextmanager
def seeded(*of: int | str, device: torch.device | None = None) -> Iterator[None]:
    """A context in which all generators of random numbers on the host, and that of a GPU, start from `of`; afterwards
    they go on as if nothing had been drawn."""
    digest = hashlib.blake2b(repr(of).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    try:
        with _torch_seeded(seed, device):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextmanager
def _torch_seeded(seed: int, device: torch.device | None) -> Iterator[None]:
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus, device_type="cuda"):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


def drawing(seed: int, first_sample: int, device: torch.device) -> AbstractContextManager[None]:
    """The context of one forward and backward, with masks of dropout that are the same under every backend. Afterwards the
    generators of the CPU and of `device` are as before, so that a user's own draws are not disturbed.

    Masks depend on (seed, global number of the micro-batch's first sample, shape of the micro-batch) alone: equal at any
    number of ranks, after a resume, and in a step that is computed again. A forward that is recomputed has the masks of the
    first one, since torch's checkpoints restore the generators' states."""
    return _torch_seeded(seed_of(seed, f"dropout/{first_sample}"), device)


class OwnModel:
    """The code of a Workload, on a process that has it. Raises SpecError if it has not."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._build, self._loss = loaded(_MODEL, workload.model), objective(workload)

    def skeleton(self) -> nn.Module:
        """The module in train mode: parameters on meta, real buffers. Raises SpecError for a module that cannot be trained
        here, or that `build` does not return."""
        try:
            with seeded(self._workload.seed), parameters_on_meta():
                module = self._build()
        except _RAISED:  # it may need values
            module = None
        if not isinstance(module, nn.Module) or next(module.buffers(), None) is not None:
            module = _on_meta(self.built())
        parameters = list(module.named_parameters())
        if not parameters:
            raise SpecError(_MODEL, f"a {type(module).__name__} has no parameters to train", "return one that has")
        for name, p in parameters:
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise SpecError(_MODEL, f"{name} has no shape before the first forward", "use layers that are not lazy")
            if p.dtype != torch.float32:
                reason = f"{name} is {str(p.dtype).removeprefix('torch.')}, and masters are float32"
                raise SpecError(_MODEL, reason, "build it in float32, and choose a precision")
        return module.train()

    def built(self) -> nn.Module:
        """The module with its initial values. Raises SpecError."""
        name = code_name(self._workload.model)
        try:
            with seeded(self._workload.seed), torch.device("cpu"):
                module = self._build()
        except _RAISED as e:  # whatever the user's code raises
            # Its host allocator has no exception of its own.
            short = isinstance(e, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(e)
            reason, cause = f"{name}() raised {type(e).__name__}: {first_line(e)}", Cause.LOADING if short else None
            raise SpecError(_MODEL, reason, _BUILD_HINT, cause=cause) from e
        if not isinstance(module, nn.Module):
            raise SpecError(_MODEL, f"{name}() returned a {type(module).__name__}", "return an nn.Module")
        return module

    def initial(self, skeleton: nn.Module) -> "BuiltValues":
        """Returns its initial values. Raises SpecError if `build` does not make the module of the skeleton again."""
        return BuiltValues(self.built(), skeleton, code_name(self._workload.model))

    def cost(self, source: "OwnSource", recomputed: Recomputed) -> "OwnCost":
        """FLOPs of one micro-batch, counted in a forward and backward on meta, or on the CPU where that needs values.
        Raises SpecError if it fails there, with what was raised."""
        batch = source.first(self._workload.micro_batch)
        try:
            return self._count(self.skeleton().to("meta"), map_tensors(lambda t: t.to("meta"), batch), recomputed)
        except SpecError:
            raise
        except _RAISED:  # it needs values, or is wrong: the CPU tells
            model = self.built()
        try:
            with seeded(self._workload.seed):
                return self._count(model, batch, recomputed)
        except SpecError:
            raise
        except _RAISED as e:
            reason = f"{code_name(self._workload.loss)}(model, batch) raised {type(e).__name__}: {first_line(e)}"
            raise SpecError(_LOSS, reason, f"correct the loss or the model; a batch is {described(batch)}") from e

    def _count(self, model: nn.Module, batch: Batch, recomputed: Recomputed) -> "OwnCost":
        freeze(model, self._workload.freeze)
        flops = counted_flops(lambda: self._loss(model, batch), recomputed(model))
        unused = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        return OwnCost(flops=flops, unused=tuple(unused))


def skeleton_of(workload: Workload) -> nn.Module:
    """The model of a Workload, also of transformers, with its parameters on meta. Raises SpecError."""
    if workload.is_own:
        return OwnModel(workload).skeleton()
    return adapted(resolve(workload.model, dropout=workload.dropout), workload.adapters)


@dataclass(frozen=True, kw_only=True)
class OwnCost:
    """`flops` of a micro-batch; `unused`: names of parameters that its loss gives no gradient."""

    flops: Flops
    unused: tuple[str, ...]


class BuiltValues:
    """The parameters and persistent buffers of a module that is built, to be read as those of an `Initializer`."""

    def __init__(self, built: nn.Module, skeleton: nn.Module, name: str) -> None:
        if signature(built) != signature(skeleton):
            reason = f"{name}() returns other parameters each time it is called"
            raise SpecError(_MODEL, reason, "make their names and shapes depend on nothing random")
        persistent = built.state_dict().keys()
        buffers = {n: b for n, b in built.named_buffers() if n in persistent}
        self.buffers: Sequence[str] = tuple(buffers)
        self._values = {n: t.detach().reshape(-1) for n, t in (*built.named_parameters(), *buffers.items())}

    def read_into(self, name: str, start: int, target: Tensor) -> None:
        target.copy_(self._values[name][start : start + target.numel()])


def signature(module: nn.Module) -> str:
    """A digest of name, shape, and whether it is trained, of each parameter."""
    shapes = [(n, tuple(p.shape), p.requires_grad) for n, p in module.named_parameters()]
    return hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()


def _on_meta(module: nn.Module) -> nn.Module:
    """The same module with its parameters on meta, tied as they are."""
    made: dict[int, nn.Parameter] = {}
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None and not isinstance(p, nn.parameter.UninitializedParameter):
                m._parameters[name] = made.setdefault(id(p), nn.Parameter(p.detach().to("meta"), p.requires_grad))
    return module


def objective(workload: Workload) -> Callable[[nn.Module, Any], Tensor]:
    """Returns (model, batch on its device) -> loss, a scalar with a graph: the user's, or that which a model of
    transformers returns. Raises SpecError if its code is not here."""
    if not workload.is_own:
        return _of_transformers()
    loss, name = loaded(_LOSS, workload.loss), code_name(workload.loss)

    def scalar(model: nn.Module, batch: Any) -> Tensor:
        try:
            value = loss(model, batch)
        except SystemExit as e:  # it would end the rank
            reason = f"{name}(model, batch) raised SystemExit: {first_line(e)}"
            raise SpecError(_LOSS, reason, "raise an error") from None
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            what = f"a tensor, {described(value)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            hint = "return a scalar tensor of floats, such as a mean"
            raise SpecError(_LOSS, f"{name}(model, batch) returned {what}", hint)
        if torch.is_grad_enabled() and not value.requires_grad:
            reason = f"{name}(model, batch) does not depend on any parameter"
            raise SpecError(_LOSS, reason, "compute it from what model(...) returns, without detach")
        return value.reshape(())

    return scalar


def _of_transformers() -> Callable[[nn.Module, Any], Tensor]:
    """The loss that a model of transformers returns. In every forward its masks ask the device whether sequences are packed,
    by their positions. A batch here has none, and the model counts them, each time alike: so the first no stands."""
    asks: Any = None
    found: Any = ...  # its last answer

    def answer(position_ids: Tensor) -> Any:
        nonlocal found
        found = None if found is None else asks(position_ids)
        return found

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal asks
        masks: Any = sys.modules.get("transformers.masking_utils")
        if (asks := getattr(masks, _PACKED, None)) is None:
            return model(**batch)["loss"]
        setattr(masks, _PACKED, answer)
        try:
            return model(**batch)["loss"]
        finally:
            setattr(masks, _PACKED, asks)

    return loss


class OwnSource(Source):
    """The samples of a map-style dataset, collated by its `collate`, if it has one, else as torch's DataLoader does."""

    def __init__(self, workload: Workload) -> None:
        self._given = given = loaded(_DATA, workload.data)
        self._seed, self._name = workload.seed, code_name(workload.data)
        self._dataset: Any = given
        if callable(given) and (isinstance(given, type) or not hasattr(given, "__getitem__")):
            try:
                with seeded(self._seed):
                    self._dataset = given()
            except _RAISED as e:
                reason = f"{self._name}() raised {type(e).__name__}: {first_line(e)}"
                hint = "correct it; it is called without arguments, and returns a dataset"
                raise SpecError(_DATA, reason, hint) from e
        try:
            self.count = len(self._dataset)
            self._dataset.__getitem__  # noqa: B018
        except _RAISED as e:
            hint = "give one with __len__ and __getitem__, or a function that returns one"
            raise SpecError(_DATA, f"{self._name} is no dataset ({first_line(e)})", hint) from None
        if self.count < 1:
            raise SpecError(_DATA, f"{self._name} has no samples", "give a dataset of one sample or more")
        self._collate = getattr(self._dataset, "collate", None) or default_collate
        self.description = f"{self._name}, {self.count:,} samples"
        digest = hashlib.blake2b(repr(self.count).encode(), digest_size=8)
        for t in tensors_in(self.first(1)):
            content = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(f"{t.dtype}{tuple(t.shape)}".encode() + content.numpy().tobytes())
        self.fingerprint = digest.hexdigest()

    def is_of(self, workload: Workload) -> bool:
        """Returns whether a Workload has the same dataset, which may be another one under the same name."""
        return self._seed == workload.seed and self._given is loaded(_DATA, workload.data)

    def first(self, count: int) -> Batch:
        """A batch of the first samples."""
        positions = np.arange(count, dtype=np.int64) % self.count
        return self.collate(positions, positions)

    def collate(self, positions: Indices, samples: Indices) -> Batch:
        """Raises SpecError if a sample cannot be read, or a batch is not of tensors."""
        try:
            items = [self._sample(int(p), int(s)) for p, s in zip(positions, samples, strict=True)]
            with seeded(self._seed, int(samples[0])):
                batch = self._collate(items)
        except _RAISED as e:
            reason = f"{self._name} raised {type(e).__name__}: {first_line(e)}"
            raise SpecError(_DATA, reason, "correct its __getitem__, or how samples are collated") from e
        if not _is_of_tensors(batch):
            reason = f"a batch of {self._name} is {described(batch)}"
            raise SpecError(_DATA, reason, "return a tensor, or a tuple or dict of tensors, for a sample")
        return batch

    def held_out_batch(self, positions: Indices, counted: int) -> Batch:
        """Returns a batch without the samples that do not count, but with one at least."""
        kept = positions[: max(1, counted)]
        return self.collate(kept, kept)

    def _sample(self, position: int, sample: int) -> Any:
        with seeded(self._seed, sample):
            return self._dataset[position]


def _is_of_tensors(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return bool(batch) and all(map(_is_of_tensors, batch.values()))
    if isinstance(batch, (tuple, list)):
        return bool(batch) and all(map(_is_of_tensors, batch))
    return isinstance(batch, Tensor)


def described(batch: Any) -> str:
    """`a tuple of a float32 (4, 16) and an int64 (4,)`."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {described(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        return f"{type(batch).__name__}(" + ", ".join(map(described, batch[:8])) + ")"
    return f"a {type(batch).__name__}"


Loss = Callable[[Batch], Tensor]
Metrics = Mapping[str, Callable[[Any, Any], Any]]  # the user's, by name: see `EvalConfig`


def measured(own: Metrics, source: Source, loss: Loss, module: nn.Module, batch: Batch) -> tuple[Tensor, list[float]]:
    """The loss of a batch, and what each metric makes of it. Raises ArgumentError, which names the metric."""
    if not own:
        return loss(batch), []
    returned: list[Any] = []
    with module.register_forward_hook(lambda module, given, outputs: returned.append(outputs)):
        found = loss(batch)
    outputs, told = returned.pop(), list[float]()
    if not isinstance(source, OwnSource):
        kept = (batch["labels"] != IGNORED).reshape(len(batch["labels"]), -1).any(1)  # the others are padding
        outputs, batch = outputs["logits"][kept].float(), batch["labels"][kept]
        if isinstance(source, CausalTokens):
            outputs, batch = outputs[:, :-1], batch[:, 1:]
    for name, metric in own.items():
        try:
            told.append(float(metric(outputs, batch)))
            if not math.isfinite(told[-1]):
                raise ValueError(f"it returned {told[-1]}")
        except _RAISED as e:
            hint = f"it gets {described(outputs)} and {described(batch)}, and returns one finite number, a mean over samples"
            raise ArgumentError(METRICS, f"{name} failed ({type(e).__name__}: {first_line(e)})", hint) from e
    return found, told


def try_metrics(metrics: Metrics, workload: Workload, source: Source) -> None:
    """Calls them once, on a CPU: with the outputs of the user's module, or with random logits. Raises as `measured`."""
    places = np.arange(min(2, workload.micro_batch), dtype=np.int64) % source.count
    batch, loss = source.collate(places, places), objective(workload)
    with seeded(workload.seed), torch.no_grad(), suppress(RuntimeError):  # of a module that needs a GPU
        if workload.is_own:
            module = OwnModel(workload).built().eval()
        else:
            facts, module, loss = model_facts(workload.model), nn.Identity(), nn.Module.__call__
            batch["logits"] = torch.randn(*batch["labels"].shape, facts.vocab_size or facts.classes)
        measured(metrics, source, partial(loss, module), module, batch)
