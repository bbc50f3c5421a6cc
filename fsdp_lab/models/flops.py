"""FLOPs: what one sample costs (`count_flops`), and what a device can reach (`device_peak`); together they give MFU.

Model FLOPs are the matrix products, attention products and convolutions of one forward and one backward pass, 2 FLOPs per
multiply-add, as `torch.utils.flop_counter` counts them on meta tensors. Not counted: embedding look-ups, norms, activations,
softmax, the optimizer. Recomputation in the backward (`Strategy.recompute`) is counted apart: the forward of the recomputed
modules up to the last tensor that their backward needs, where torch's checkpoints stop. Causal attention counts its whole
square, masked half included. For a decoder this is exactly the published rule

    FLOPs per token = 6 N + 12 L H S

where N counts the weights of matrix products (the output head among them, the embedding table not), L the layers, H their
width and S the sequence length (PaLM, arXiv 2204.02311, appendix B)."""

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig

from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.hardware import gpu_of_device
from fsdp_lab.models.build import freeze
from fsdp_lab.models.configs import first_line
from fsdp_lab.models.lora import adapted
from fsdp_lab.models.presets import Facts, facts_of
from fsdp_lab.spec.workload import Lora

Recomputed = Callable[[nn.Module], Sequence[nn.Module]]  # a model -> the modules in it that are checkpointed
_SAMPLES = 2  # a BatchNorm refuses to normalise a single value


class Flops(NamedTuple):
    """FLOPs of one sample: `model` counts for MFU, `model + recompute` for HFU."""

    model: int
    recompute: int
    unused: tuple[str, ...] = ()  # parameters that the loss gives no gradient, or not in every batch


def count_flops(
    config: PreTrainedConfig,
    seq_len: int,
    recomputed: Recomputed = lambda model: (),
    frozen: Sequence[str] | None = None,
    lora: Lora | None = None,
) -> Flops:
    """FLOPs of the forward and the backward of one sample. `recomputed`: gives the modules that are checkpointed; `frozen`:
    `Workload.freeze`, for which the backward has fewer; `lora`: adapters in the model.

    Takes 0.1 s for small models, 1 to 2 s for the largest. A model whose computation depends on values (mixtures of
    experts, BART's masks) cannot run on meta tensors: it is estimated as 6 N per token, with a warning.

    Raises SpecError: the model can be built but its forward fails."""
    facts = facts_of(config)
    config = copy.copy(config)
    config.use_cache = True  # otherwise decoders look for packed sequences in the positions, which needs values
    model: nn.Module = adapted(config, lora)
    freeze(model, frozen)
    model.to("meta")
    chosen = recomputed(model)
    try:
        batch = empty_batch(facts, _SAMPLES, seq_len, device="meta")
        flops = counted_flops(lambda: model(**batch).loss, chosen)
    except Exception as e:  # a model may fail with any error
        # What meta tensors cannot do for want of values: PyTorch's messages name the device. Or the cache is to blame, which
        # training does not have: one without attention knows no length.
        if not (isinstance(e, NotImplementedError) or "meta" in str(e).lower() or "Cache" in str(e)):
            reason = f"a {facts.model_type} of this config cannot compute: {first_line(e)}"
            grouped = "mat_a" in str(e)  # the grouped product of experts, which takes bf16 alone
            hint = 'set its experts_implementation to "eager"' if grouped else "correct its sizes, or choose a preset"
            raise SpecError("workload.model", reason, hint) from e
        message = f"FLOPs of {facts.model_type} are estimated as 6 N per token: {first_line(e)}"
        warnings.warn(message, stacklevel=2)
        tokens = facts.tokens_per_sample(seq_len)
        weights = 4 * _matrix_weights([model]) + 2 * _matrix_weights([model], trained=True)
        # A batch may use some of the experts that are modules of their own.
        kinds = (nn.ModuleDict, nn.ModuleList)
        lists = [(name, m) for name, m in model.named_modules() if name.endswith("experts") and isinstance(m, kinds)]
        unused = tuple(f"{name}.{n}" for name, m in lists for n, p in m.named_parameters() if p.requires_grad)
        return Flops(weights * tokens, 2 * _matrix_weights(chosen) * tokens, unused)
    unused = tuple(n for n, p in model.named_parameters() if p.requires_grad and p.grad is None)
    return Flops(flops.model // _SAMPLES, flops.recompute // _SAMPLES, unused)


def counted_flops(loss: Callable[[], Tensor], recomputed: Sequence[nn.Module]) -> Flops:
    """FLOPs of a loss, once forward and backward; `recomputed` are the modules in it that are checkpointed."""
    with FlopCounterMode(display=False) as counter:
        recomputing = [_RecomputeCounter(module, counter) for module in recomputed]
        loss().backward()  # type: ignore[no-untyped-call]
    return Flops(int(counter.get_total_flops()), sum(counted.flops for counted in recomputing))


class _RecomputeCounter:
    """Counts in the forward what a checkpoint around `module` will recompute in the backward.

    Recomputation stops at the last tensor that the forward saved. An operator's inputs are saved before it is computed, so
    the last product of a block is often not repeated. (A second forward is no count: decoders cache keys and values.)"""

    def __init__(self, module: nn.Module, counter: FlopCounterMode) -> None:
        self.flops = 0
        self._counter = counter
        self._begun = self._saved = 0
        self._hooks: list[Any] = []
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self._begun = self._saved = self._counter.get_total_flops()
        self._hooks.append(torch.autograd.graph.saved_tensors_hooks(self._save, lambda t: t))
        self._hooks[-1].__enter__()

    def _save(self, t: Tensor) -> Tensor:
        self._saved = self._counter.get_total_flops()
        return t

    def _end(self, *_: Any) -> None:
        self._hooks.pop().__exit__()
        self.flops += self._saved - self._begun


def empty_batch(facts: Facts, samples: int, seq_len: int, *, device: str) -> dict[str, Tensor]:
    """Uninitialised tensors of the names, shapes and dtypes that `Batches` makes."""

    def ids(*shape: int) -> Tensor:
        return torch.empty(samples, *shape, dtype=torch.int64, device=device)

    if facts.image_pixels is not None:
        pixels = torch.empty(samples, facts.channels, *facts.image_pixels, device=device)
        return {"pixel_values": pixels, "labels": ids()}
    if facts.kind == "seq2seq":
        return {"input_ids": ids(seq_len // 2), "labels": ids(seq_len - seq_len // 2)}
    return {"input_ids": ids(seq_len), "labels": ids(seq_len)}


def _matrix_weights(modules: Iterable[nn.Module], *, trained: bool = False) -> int:
    """Elements of all weights of matrix products, or of those that are trained."""
    inner = [m for module in modules for m in module.modules()]
    tables = {id(m.weight) for m in inner if isinstance(m, nn.Embedding)}
    weights = {id(p): p for m in inner for p in m.parameters(recurse=False) if p.dim() > 1 and id(p) not in tables}
    return sum(p.numel() for p in weights.values() if p.requires_grad or not trained)


_SLOT_S = 0.02  # for the products of one size and layout
_EDGES: Mapping[str, tuple[int, ...]] = {"cpu": (128, 256, 512, 1024), "cuda": (2048, 4096, 8192)}
# Which factors are transposed views, as in a Linear: gradient of the input, forward, gradient of the weight.
_LAYOUTS: Mapping[str, tuple[bool, bool]] = {"A B": (False, False), "A B^T": (False, True), "A^T B": (True, False)}


class Peak(NamedTuple):
    """`flops_per_s` is None if it is unknown; `source` is a sentence about where the figure is from."""

    flops_per_s: float | None
    source: str


class BestPeak:
    """A device's peak in one dtype, raised to what its steps reach, so that a utilisation is never above 100 %.

    A step can be faster than the measured matrix products: other work used the cores meanwhile, or the dtype's speed
    depends on shapes that were not tried. A step above a data sheet shows that the sheet is not this device's."""

    def __init__(self, given: Peak) -> None:
        self.given = self._best = given

    def reach(self, flops_per_s: float) -> Peak:
        """The peak after a step that reached `flops_per_s`; an unknown peak stays unknown."""
        best = self._best.flops_per_s
        if best is not None and flops_per_s > best:
            self._best = Peak(flops_per_s, f"reached in a training step, above {self.given.source}")
        return self._best


def device_peak(device: torch.device | str, dtype: torch.dtype) -> Peak:
    """The best FLOP/s of matrix products in `dtype` on `device`: from its data sheet if there is one, otherwise measured.

    Measuring takes about 0.3 s and uses torch's current number of threads; ranks that measure at the same time share the
    cores. fp32 on a GPU means without TF32, unless torch is set to use it. A slice of a GPU (MIG) and a GPU that is not in
    the table are measured."""
    device = torch.device(device)
    if device.type == "cuda":
        column = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "")
        if column == "fp32" and torch.get_float32_matmul_precision() != "highest":
            column = "tf32"
        gpu = gpu_of_device(torch.cuda.get_device_name(device))
        if gpu is not None and (rate := gpu.flops_per_s(column)) is not None:
            return Peak(rate, f"{gpu.source}, dense {column}")
    return measured_peak(device, dtype)


def measured_peak(device: torch.device | str, dtype: torch.dtype) -> Peak:
    """The best of matrix products of several sizes in the three layouts of training, measured now, beside any other work.

    One layout is not enough: without bf16 units a CPU multiplies A^T B twenty times as fast as A B."""
    device = torch.device(device)
    best, kind, count = 0.0, "", 0
    try:
        for layout, transposed in _LAYOUTS.items():
            for edge in _EDGES.get(device.type, _EDGES["cpu"]):
                times = _product_times(device, dtype, edge, transposed)
                count += len(times)
                if (rate := 2 * edge**3 / min(times)) > best:
                    best, kind = rate, f"{layout} of {edge} x {edge}"
                if 8 * min(times) > _SLOT_S:  # the next edge is twice this one
                    break
    except RuntimeError as e:  # a dtype that this device has no matrix product for
        return Peak(None, f"no figure: {str(e).splitlines()[0]}")
    threads = torch.get_num_threads()
    where = f"{threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else str(device)
    dtype_name = str(dtype).removeprefix("torch.")
    return Peak(best, f"measured: best of {count} matrix products, {kind} in {dtype_name}, {where}")


def _product_times(device: torch.device, dtype: torch.dtype, edge: int, transposed: tuple[bool, bool]) -> list[float]:
    """Seconds of each product within a slot, at least one; the first, a warm-up, is not counted."""
    made = [torch.full((edge, edge), 0.5, dtype=dtype, device=device) for _ in range(2)]
    a, b = (factor.t() if flip else factor for factor, flip in zip(made, transposed, strict=True))
    out = torch.empty(edge, edge, dtype=dtype, device=device)
    torch.mm(a, b, out=out)
    _finish(device)
    times: list[float] = []
    while sum(times) < _SLOT_S:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        _finish(device)
        times.append(max(time.perf_counter() - start, 1e-9))
    return times


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
