"""Scripts that differ in their model: what is frozen, uneven, cast, or written by others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.engine.scenarios.engines import Engine, Kind, Scenario, square, step, tokens, train
from tests.engine.toys import Block, Net, update


class WeightNormed(Block):
    """A layer whose weight is computed from two parameters, by torch's parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(self.up)


def parametrized_weights(e: Engine) -> None:
    model = Net(depth=2, block=WeightNormed)
    train(e, e.shard(model, model.blocks))


# -- what is trained ---------------------------------------------------------------------------------------------------
def gradual_unfreezing(e: Engine) -> None:
    """First the head learns, then block after block from the last one, each with a group; at last the head is frozen."""
    model = Net(depth=2).requires_grad_(False)
    model.last.requires_grad_(True)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.last.parameters(), lr=1e-2, weight_decay=0.1)
    for i in range(7):
        if i in (2, 4):
            block = model.blocks[2 - i // 2]
            block.requires_grad_(True)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 5e-3})
        if i == 6:
            model.last.requires_grad_(False)
        step(optimizer, square(e, model, i))
    e.record_model(model)


# -- initialisation and precision --------------------------------------------------------------------------------------
def _reset(module: nn.Module) -> None:
    """Values that do not depend on how a tensor is cut."""
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 1 / module.in_features)
        nn.init.constant_(module.bias, 0.1 / module.out_features)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()


def meta_init(e: Engine) -> None:
    """Built on meta, sharded, given memory by `to_empty`, then initialised module by module, where it lies."""
    with torch.device("meta"):
        model = Net()
    model = e.shard(model, model.blocks)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for module in model.modules():
            _reset(module)
    train(e, model)


def autocast_around_a_step(e: Engine) -> None:
    """Two micro-batches: the second forward uses casts of the first one's, whose gradients then come late."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for k in range(2):
                loss = square(e, model, 10 * i + k)
                loss.backward()
                e.record_loss(loss)
        update(optimizer)
    e.record_model(model)


# -- models of others --------------------------------------------------------------------------------------------------
_SMALL = {"vocab_size": 31, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "use_cache": False}
_LLAMA = {**_SMALL, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
          "intermediate_size": 29, "max_position_embeddings": 16}  # fmt: skip


def _of_transformers(family: str, head: str, **config: Any) -> Any:
    import transformers  # takes seconds, and the pool's ranks have it already

    made = transformers.AutoConfig.for_model(family, **config)
    return getattr(transformers, head).from_config(made, dtype=torch.get_default_dtype()).train()


def _labelled(e: Engine, model: Any, i: int) -> Tensor:
    ids = e.rows(tokens(2, 8, seed=i, vocabulary=31)).flatten(0, 1)
    return model(input_ids=ids, labels=ids).loss


def _fine_tune(e: Engine, model: Any, units: Any) -> None:
    model = e.shard(model, units)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)
    train(e, model, optimizer, _labelled)


def unequal_lengths(e: Engine) -> None:
    """A `generate` that others wrote, and of which each rank wants another length: it calls the model until all are done."""
    model = _of_transformers("llama", "AutoModelForCausalLM", **_LLAMA, tie_word_embeddings=False)
    model = e.shard(model, model.model.layers)
    e.forward_method(model, "generate")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for i in range(2):
        step(optimizer, _labelled(e, model, i))
        prompt = tokens(1, 3, seed=300, vocabulary=31)[0]
        grown = model.generate(prompt, max_new_tokens=2 + 2 * e.rank, do_sample=False, eos_token_id=None)
        e.record("what all have", grown[:, :5])
    e.record_model(model)


def peft_lora(e: Engine) -> None:
    """LoRA by peft over a Llama: the base is frozen."""
    peft = pytest.importorskip("peft")

    base = _of_transformers("llama", "AutoModelForCausalLM", **_LLAMA)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    _fine_tune(e, model, model.base_model.model.model.layers)


# Plain descent in low precision, u of the docstring in engines.py: activations and gradients are rounded some tens of times
# on their way, so a step of lr 0.1 differs by 0.1 * 32 u, and three steps by 10 u.
_BF16_BOUND = 10 * 2.0**-8
# transformers computes Llama's norms in fp32, u = 6e-8: lr 1e-2 and momentum 0.9 make 3 steps add up to 6e-2 of a
# gradient, which is a sum of n = 128 such terms: 6e-2 * 2 * 128 * 6e-8 = 9e-7, and losses are of order 4.
_FP32_INSIDE = 1e-5
_LATE = {Kind.FSDP2: "it loses gradients that come late"}
SCENARIOS = (
    Scenario(script=parametrized_weights), Scenario(script=gradual_unfreezing, quick=True), Scenario(script=meta_init),
    Scenario(script=autocast_around_a_step, quick=True, dtype=torch.float32, bound=_BF16_BOUND, not_under=_LATE),
    Scenario(script=unequal_lengths, bound=_FP32_INSIDE), Scenario(script=peft_lora, bound=_FP32_INSIDE),
)  # fmt: skip
