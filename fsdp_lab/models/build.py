"""`build_skeleton`: a model whose parameters have shapes and no memory, and whose buffers are real."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from fsdp_lab.core.errors import SpecError
from fsdp_lab.models.configs import first_line
from fsdp_lab.models.facts import facts_of
from fsdp_lab.models.presets import Kind

_HEADS: dict[Kind, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that this thread builds inside get their parameters on the meta device; buffers stay real.

    Building under `torch.device("meta")` would lose the buffers that a constructor computes (rotary
    frequencies, position ids, BatchNorm statistics), and no later call brings all of them back. So every
    parameter is replaced at the one door that it enters by, `nn.Module.register_parameter`. A parameter that
    is on meta already passes unchanged, so that one tensor registered under two names (a tie) stays one
    tensor.
    """
    register = nn.Module.register_parameter
    builder = threading.get_ident()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and threading.get_ident() == builder:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `config` with its head, in train mode: fp32 parameters on meta, ties kept, buffers real.

    Attention is PyTorch's scaled_dot_product_attention where the model has it. `config` is copied, not kept;
    give it as `resolve` makes it, with dropout at 0. Values come from `Initializer`.

    Raises:
        SpecError: no model can be built from it (widths that do not divide, ...), in the model's own words.
    """
    config = copy.deepcopy(config)
    kind = facts_of(config).kind
    named = getattr(modeling_auto, _HEADS[kind])[type(config)]
    model_class: type[PreTrainedModel] = named[0] if isinstance(named, tuple) else named
    attention = "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"
    try:
        with parameters_on_meta():
            model = model_class._from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=attention, dtype=torch.float32
            )
    except Exception as e:  # constructors fail with errors of any class
        raise SpecError(
            "workload.model",
            f"no {config.model_type} can be built from this config: {first_line(e)}",
            "mend the config, or choose a preset",
        ) from e
    if kind == "causal" and getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # as transformers decides too, with a warning
    return cast(PreTrainedModel, model.train())
