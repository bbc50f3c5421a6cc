"""Model FLOPs: what one sample costs in theory, whatever the strategy does to it.

Definition: the matrix products, attention products and convolutions of one forward and one backward pass, 2
FLOPs a multiply-add, as `torch.utils.flop_counter` counts them on a model without memory. Not counted:
embedding look-ups, norms, activations, softmax, the optimizer, and activations that are computed again
(`Strategy.recompute`). Causal attention counts its whole square, masked half included. For a decoder this is
the published rule

    FLOPs per token = 6 N + 12 L H S

exactly, where N counts the weights of matrix products (the output head among them, the embedding table not),
L the layers, H their width and S the sequence length (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig

from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import first_line
from fsdp_lab.models.facts import Facts, facts_of
from fsdp_lab.spec import SpecError

_SAMPLES = 2  # a BatchNorm refuses to normalise a single value


def flops_per_sample(config: PreTrainedConfig, seq_len: int) -> int:
    """Model FLOPs of the forward and the backward for one sample of `seq_len` tokens (of one image, for
    vision models).

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
    try:
        with FlopCounterMode(display=False) as counter:
            model(**_batch(facts, seq_len)).loss.backward()
    except Exception as e:  # a model may fail with any error
        if not _wants_values(e):
            reason = f"a {facts.model_type} of this config cannot compute: {first_line(e)}"
            raise SpecError("workload.model", reason, "mend its sizes, or choose a preset") from e
        message = f"FLOPs of {facts.model_type} are estimated as 6 N a token: {first_line(e)}"
        warnings.warn(message, stacklevel=2)
        return 6 * _matrix_weights(model) * facts.tokens_per_sample(seq_len)
    return int(counter.get_total_flops()) // _SAMPLES


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


def _matrix_weights(model: nn.Module) -> int:
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
