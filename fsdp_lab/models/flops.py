"""Model FLOPs: what one sample costs in theory, whatever the strategy does to it.

Definition: the matrix products, attention products and convolutions of one forward and one backward pass, 2
FLOPs a multiply-add, as `torch.utils.flop_counter` counts them on a model without memory. Not counted:
embedding look-ups, norms, activations, softmax, the optimizer. What is computed again in the backward
(`Strategy.recompute`) is no model FLOPs and is counted apart: it is the forward of the recomputed modules up to
the last tensor that their backward needs, where torch's checkpoints stop. Causal attention counts its whole
square, masked half included. For a decoder this is the published rule

    FLOPs per token = 6 N + 12 L H S

exactly, where N counts the weights of matrix products (the output head among them, the embedding table not),
L the layers, H their width and S the sequence length (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig

from fsdp_lab.core.errors import SpecError
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import first_line
from fsdp_lab.models.presets import Facts, facts_of

_SAMPLES = 2  # a BatchNorm refuses to normalise a single value


class Flops(NamedTuple):
    """Of one sample: `model` for MFU; with `recompute`, which the device does beside it, for HFU."""

    model: int
    recompute: int


Chosen = Callable[[nn.Module], Sequence[nn.Module]]


def flops_per_sample(config: PreTrainedConfig, seq_len: int) -> int:
    """Model FLOPs of the forward and the backward for one sample of `seq_len` tokens (of one image, for
    vision models). As `count_flops`.
    """
    return count_flops(config, seq_len).model


def count_flops(config: PreTrainedConfig, seq_len: int, recomputed: Chosen = lambda model: ()) -> Flops:
    """FLOPs of the forward and the backward for one sample. `recomputed` names the model's modules that are checkpointed.

    Takes the time of a forward and a backward without any arithmetic: 0.1 s for small models, 1 to 2 s for
    the largest. A model that looks at values to decide what to compute (mixtures of experts, BART's masks)
    cannot be counted so: it is estimated as 6 N a token, with a warning.

    Raises:
        SpecError: the model can be built but its forward does not fit together.
    """
    facts = facts_of(config)
    config = copy.copy(config)
    config.use_cache = True  # else decoders search the positions for packed sequences, which needs values
    model: nn.Module = build_skeleton(config)
    model.to("meta")
    chosen = recomputed(model)
    try:
        with FlopCounterMode(display=False) as counter:
            again = [_Again(module, counter) for module in chosen]
            model(**_batch(facts, seq_len)).loss.backward()
    except Exception as e:  # a model may fail with any error
        if not _wants_values(e):
            reason = f"a {facts.model_type} of this config cannot compute: {first_line(e)}"
            raise SpecError("workload.model", reason, "mend its sizes, or choose a preset") from e
        message = f"FLOPs of {facts.model_type} are estimated as 6 N a token: {first_line(e)}"
        warnings.warn(message, stacklevel=2)
        tokens = facts.tokens_per_sample(seq_len)
        return Flops(6 * _matrix_weights([model]) * tokens, 2 * _matrix_weights(chosen) * tokens)
    return Flops(int(counter.get_total_flops()) // _SAMPLES, sum(a.flops for a in again) // _SAMPLES)


class _Again:
    """Counts what a checkpoint around `module` will compute again.

    It stops when the last tensor that was saved in the forward is there again. An operator's inputs are saved before it is
    computed, so that the last product of a block is often not repeated. Counted in the forward, as to repeat a forward
    takes one that leaves no trace, and decoders leave keys and values in a cache.
    """

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


def _wants_values(error: Exception) -> bool:
    """Whether a forward on meta failed only because it is on meta: PyTorch's sentences for that name the
    device.
    """
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _batch(facts: Facts, seq_len: int) -> dict[str, Tensor]:
    """Tensors without values, shaped as `Batches` makes them for `_SAMPLES` samples."""

    def ids(length: int) -> Tensor:
        return torch.empty(_SAMPLES, length, dtype=torch.int64, device="meta")

    if facts.image_pixels is not None:
        pixels = torch.empty(_SAMPLES, facts.channels, *facts.image_pixels, device="meta")
        return {"pixel_values": pixels, "labels": torch.empty(_SAMPLES, dtype=torch.int64, device="meta")}
    if facts.kind == "seq2seq":
        return {"input_ids": ids(seq_len // 2), "labels": ids(seq_len - seq_len // 2)}
    return {"input_ids": ids(seq_len), "labels": ids(seq_len)}


def _matrix_weights(modules: Iterable[nn.Module]) -> int:
    inner = [m for module in modules for m in module.modules()]
    tables = {id(m.weight) for m in inner if isinstance(m, nn.Embedding)}
    weights = {id(p): p for m in inner for p in m.parameters(recurse=False) if p.dim() > 1 and id(p) not in tables}
    return sum(p.numel() for p in weights.values())
