"""What several tests of the models need: one small config of each family, and a skeleton given its values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_lab.models.build import Initializer, build_skeleton
from fsdp_lab.models.configs import resolve

SMALL: Mapping[str, Any] = {
    "gpt2": "gpt2-1m",
    "llama": "llama-1m",
    "llama tied": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 384,
                   "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 1},
    "bert": "bert-1m",
    "t5": "t5-1m",
    "vit": "vit-1m",
    "resnet": "resnet-1m",
    "convnext": {"model_type": "convnext", "hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2,
                 "image_size": 32, "num_labels": 10},
}  # fmt: skip


def part(values: Any, name: str, start: int, stop: int) -> Tensor:
    """A range of flattened initial values."""
    found = torch.full((stop - start,), torch.nan)
    values.read_into(name, start, found)
    return found


# Of a transformer that is as small as it can be.
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 300,
}  # fmt: skip
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART = {"model_type": "bart", "d_model": 32, "vocab_size": 300, "encoder_layers": 2, "decoder_layers": 2, **HEADS}


def filled(model: str | Mapping[str, Any], seed: int = 0) -> nn.Module:
    """A real model on the CPU with its initial values, ties kept."""
    skeleton = build_skeleton(resolve(model))
    initial = Initializer(skeleton, seed)
    values = {id(p): nn.Parameter(initial(name)) for name, p in skeleton.named_parameters()}
    for module in skeleton.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, values[id(parameter)])
    return skeleton
