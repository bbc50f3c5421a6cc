"""Scripts that differ in their model: what is tied, frozen, uneven, checkpointed, compiled, cast, or written by others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.engine.scenarios.engines import Engine, Kind, Scenario, drawn, step, tokens
from tests.engine.scenarios.loops import Decoder, next_token_loss
from tests.engine.toys import WIDTH, Block, Net


def _adam(e: Engine, model: Any, steps: int = 3) -> None:
    """The loop that scripts share whose model alone is of interest."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(steps):
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


def _descend(e: Engine, model: Any, steps: int = 3) -> None:
    """The same by plain descent, for bounds of low precision."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    for i in range(steps):
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).float().square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


# -- shapes and ties ---------------------------------------------------------------------------------------------------


def tied_weights(e: Engine) -> None:
    """A language model whose head is its embedding."""
    model = Decoder(tied=True)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    e.record("parameters", sum(p.numel() for p in model.parameters()))
    for i in range(3):
        ids = e.rows(tokens(2, 7, seed=i))
        loss = next_token_loss(model(ids), ids)
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


class Uneven(Block):
    """Beside the layers, parameters of fewer rows than there are ranks, of one element and of none but dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.full((1, WIDTH), 0.5))
        self.three = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))
        self.cube = nn.Parameter(torch.linspace(-1, 1, 5 * 3 * WIDTH).view(5, 3, WIDTH))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * self.one + self.row * self.three.sum()
        return out + torch.einsum(
            "...d,edf->...f", x[..., :3], self.cube.transpose(1, 2)[..., :3].mean(1, True).expand(5, 3, 3)
        ).repeat_interleave(2, -1)


def uneven_shapes(e: Engine) -> None:
    """No number of rows is a multiple of the ranks."""
    model = Net(depth=2, block=Uneven)
    _adam(e, e.shard(model, model.blocks))


def padding_row(e: Engine) -> None:
    """The embedding's row of the padding token has no gradient, and stays zero."""
    model = Decoder(padding=0)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        ids = e.rows(tokens(2, 7, seed=i))
        loss = next_token_loss(model(ids), ids)
        e.record_loss(loss)
        step(optimizer, loss)
    row = e.values(model)["embed.weight"][0]
    e.record("padding", row)
    e.record("padding is zero", not row.any())
    e.record_model(model)


class Counting(Block):
    """Buffers that the forward writes, and a BatchNorm that is always in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.frozen_norm = nn.BatchNorm1d(WIDTH).eval()
        self.frozen_norm.running_mean.fill_(0.25)  # type: ignore[union-attr]
        self.frozen_norm.running_var.fill_(2.0)  # type: ignore[union-attr]

    def train(self, mode: bool = True) -> Counting:
        super().train(mode)
        self.frozen_norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        out: Tensor = self.frozen_norm(super().forward(x).flatten(0, -2)).view_as(x) / (1 + self.calls)
        return out


def buffers(e: Engine) -> None:
    model = Net(depth=2, block=Counting).train()
    _adam(e, e.shard(model, model.blocks))


class Recurrent(Net):
    """One block, called three times in a forward."""

    def __init__(self) -> None:
        super().__init__(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.blocks[0](x)
        out: Tensor = self.last(x)
        return out


def recurrent_block(e: Engine) -> None:
    """A unit is called several times in a forward, as in models that share weights between layers."""
    model = Recurrent()
    _adam(e, e.shard(model, model.blocks))


def modules_as_one_unit(e: Engine) -> None:
    """Several modules given as a list are gathered together, and nothing is resharded after the forward."""
    model = Net()
    _adam(
        e,
        e.shard(
            model, [[model.blocks[0], model.blocks[1]], [model.blocks[2], model.last]], reshard_after_forward=False
        ),
    )


class WeightNormed(Block):
    """A layer whose weight is computed from two parameters, by torch's parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(self.up)


def parametrized_weights(e: Engine) -> None:
    model = Net(depth=2, block=WeightNormed)
    _adam(e, e.shard(model, model.blocks))


# -- what is trained ---------------------------------------------------------------------------------------------------


def gradual_unfreezing(e: Engine) -> None:
    """Only the head learns at first; then block after block from the last one, each with a group of its own."""
    model = Net(depth=2).requires_grad_(False)
    model.last.requires_grad_(True)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(e.inner(model).last.parameters(), lr=1e-2)
    for i in range(6):
        if i in (2, 4):
            block = e.inner(model).blocks[2 - i // 2]
            block.requires_grad_(True)
            model = e.trainable_changed(model)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 5e-3})
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


def freezing_half_way(e: Engine) -> None:
    """From the third step on the first layer and the first block stay as they are, although the optimizer has them."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for i in range(5):
        if i == 2:
            e.inner(model).first.requires_grad_(False)
            e.inner(model).blocks[0].requires_grad_(False)
            model = e.trainable_changed(model)
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


class Adapted(Block):
    """A block whose first layer has a low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.low_a = nn.Parameter(torch.randn(2, WIDTH) / 3)
        self.low_b = nn.Parameter(torch.zeros(7, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.down(torch.tanh(self.up(h) + h @ self.low_a.T @ self.low_b.T))
        return out


def low_rank_adapters(e: Engine) -> None:
    """A frozen base with small trainable parts in the same modules; the optimizer has the trainable ones."""
    model = Net(block=Adapted)
    for name, p in model.named_parameters():
        p.requires_grad_("low_" in name)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for i in range(4):
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


class LowBase(Adapted):
    """A layer of the base in a lower dtype than the adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.up.float()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        up = self.up(h.to(self.up.weight.dtype)).to(x.dtype)
        out: Tensor = x + self.down(torch.tanh(up + h @ self.low_a.T @ self.low_b.T))
        return out


def adapters_over_lower_dtype(e: Engine) -> None:
    """Parameters of two dtypes in one unit, as of a frozen base in bf16 with adapters in fp32; here fp32 and fp64."""
    model = Net(block=LowBase)
    for name, p in model.named_parameters():
        p.requires_grad_("low_" in name)
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-1)
    for i in range(3):
        loss = model(e.rows(drawn(3, WIDTH, seed=i))).square().mean()
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


# -- checkpointing of activations, compilation -------------------------------------------------------------------------


class Recomputing(Net):
    """Each block inside torch's checkpoint."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        out: Tensor = self.last(x)
        return out


def checkpointing(e: Engine) -> None:
    model = Recomputing(use_reentrant=False)
    _adam(e, e.shard(model, model.blocks))


def reentrant_checkpointing(e: Engine) -> None:
    model = Recomputing(use_reentrant=True)
    _adam(e, e.shard(model, model.blocks))


class InnerRecomputing(Block):
    """Its layers inside torch's checkpoint, so that the recomputation is within a unit."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def checkpointing_inside_units(e: Engine) -> None:
    model = Net(block=InnerRecomputing)
    _adam(e, e.shard(model, model.blocks))


def compiled_blocks(e: Engine) -> None:
    """Forward and backward of each block traced ahead; torch's own kernels."""
    model = Net(depth=2)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    _adam(e, e.shard(model, model.blocks))


def inductor_blocks(e: Engine) -> None:
    """Kernels by the compiler."""
    model = Net(depth=2)
    for block in model.blocks:
        block.compile()
    _adam(e, e.shard(model, model.blocks))


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
    sharded = model if e.kind is Kind.DDP else e.shard(model, model.blocks)
    sharded.to_empty(device="cpu")
    with torch.no_grad():
        for module in sharded.modules():
            _reset(module)
    _adam(e, e.shard(model, model.blocks) if e.kind is Kind.DDP else sharded)


_BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def bf16(e: Engine) -> None:
    """Parameters and inputs in bf16, gradients reduced in fp32."""
    model = Net()
    _descend(e, e.shard(model, model.blocks, **e.mixed_precision(**_BF16)))


class CastsItself(Net):
    """It takes fp32 inputs, and casts them where it wants to."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return super().forward((x * 2).to(self.first.weight.dtype))  # type: ignore[no-any-return]


def uncast_inputs(e: Engine) -> None:
    """`cast_forward_inputs=False`: the model is given its inputs as they are."""
    model = CastsItself()
    _descend(e, e.shard(model, model.blocks, **e.mixed_precision(**_BF16, cast_forward_inputs=False)))


class Autocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)  # type: ignore[no-any-return]


def autocast(e: Engine) -> None:
    """Parameters in fp32, products in bf16 by torch's autocast."""
    model = Autocast()
    _descend(e, e.shard(model, model.blocks))


def autocast_around_a_step(e: Engine) -> None:
    """Two micro-batches: the second forward uses casts of the first one's, whose gradients then come late."""
    model = Net()
    model = e.shard(model, model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for k in range(2):
                loss = model(e.rows(drawn(3, WIDTH, seed=10 * i + k))).float().square().mean()
                loss.backward()
                e.record_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    e.record_model(model)


# -- models of others --------------------------------------------------------------------------------------------------

_SMALL = {"vocab_size": 31, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "use_cache": False}
_LLAMA = {**_SMALL, "hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
          "intermediate_size": 29, "max_position_embeddings": 16}  # fmt: skip


def _of_transformers(family: str, head: str, **config: Any) -> Any:
    import transformers  # takes seconds, and the pool's ranks have it already

    made = transformers.AutoConfig.for_model(family, **config)
    return getattr(transformers, head).from_config(made, dtype=torch.get_default_dtype()).train()


def _fine_tune(e: Engine, model: Any, units: Any, *, lr: float = 1e-2) -> None:
    model = e.shard(model, units)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    for i in range(3):
        ids = e.rows(tokens(2, 8, seed=i, vocabulary=31)).flatten(0, 1)
        loss = model(input_ids=ids, labels=ids).loss
        e.record_loss(loss)
        step(optimizer, loss)
    e.record_model(model)


def gpt2(e: Engine) -> None:
    """Its head is its embedding."""
    model = _of_transformers("gpt2", "AutoModelForCausalLM", **_SMALL, n_layer=2, n_embd=18, n_head=2, n_positions=16,
                             resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    _fine_tune(e, model, model.transformer.h)


def gpt2_recomputed(e: Engine) -> None:
    """The same by its own `gradient_checkpointing_enable`."""
    model = _of_transformers("gpt2", "AutoModelForCausalLM", **_SMALL, n_layer=2, n_embd=18, n_head=2, n_positions=16,
                             resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
    model.gradient_checkpointing_enable()
    _fine_tune(e, model, model.transformer.h)


def llama(e: Engine) -> None:
    """Rotary positions, grouped keys, an untied head."""
    model = _of_transformers("llama", "AutoModelForCausalLM", **_LLAMA, tie_word_embeddings=False)
    _fine_tune(e, model, model.model.layers)


def unequal_lengths(e: Engine) -> None:
    """A `generate` that others wrote, and of which each rank wants another length: it calls the model until all are done."""
    model = _of_transformers("llama", "AutoModelForCausalLM", **_LLAMA, tie_word_embeddings=False)
    model = e.shard(model, model.model.layers)
    e.forward_method(e.inner(model), "generate")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for i in range(2):
        ids = e.rows(tokens(2, 8, seed=i, vocabulary=31)).flatten(0, 1)
        loss = model(input_ids=ids, labels=ids).loss
        e.record_loss(loss)
        step(optimizer, loss)
        prompt = tokens(1, 3, seed=300, vocabulary=31)[0]
        grown = e.inner(model).generate(prompt, max_new_tokens=2 + 2 * e.rank, do_sample=False, eos_token_id=None)
        e.record("what all have", grown[:, :5])
    e.record_model(model)


def t5(e: Engine) -> None:
    """Encoder and decoder, whose blocks share the position biases of the first."""
    model = _of_transformers("t5", "AutoModelForSeq2SeqLM", vocab_size=31, d_model=18, num_layers=2, num_decoder_layers=2,
                             num_heads=2, d_kv=7, d_ff=29, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
                             use_cache=False)  # fmt: skip
    _fine_tune(e, model, [*model.encoder.block, *model.decoder.block])


def bert(e: Engine) -> None:
    """Masked language modelling; the decoder's weight and bias are tied."""
    model = _of_transformers("bert", "AutoModelForMaskedLM", vocab_size=31, hidden_size=18, num_hidden_layers=2,
                             num_attention_heads=2, intermediate_size=29, max_position_embeddings=16, pad_token_id=0,
                             hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    _fine_tune(e, model, model.bert.encoder.layer)


def peft_lora(e: Engine) -> None:
    """LoRA by peft over a Llama: the base is frozen."""
    import peft

    base = _of_transformers("llama", "AutoModelForCausalLM", **_LLAMA)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    _fine_tune(e, model, model.base_model.model.model.layers)


_OWN_CAST = {Kind.DDP: "it has no mixed precision of parameters on a CPU; see autocast"}
# Plain descent in low precision, u of the docstring in engines.py: activations and gradients are rounded some tens of times
# on their way, so a step of lr 0.1 differs by 0.1 * 32 u, and three steps by 10 u.
_BF16_BOUND = 10 * 2.0**-8
# transformers computes norms of Llama and T5 in fp32, u = 6e-8: lr 1e-2 and momentum 0.9 make 3 steps add up to 6e-2 of a
# gradient, which is a sum of n = 128 such terms: 6e-2 * 2 * 128 * 6e-8 = 9e-7, and losses are of order 4.
_FP32_INSIDE = 1e-5
SCENARIOS = (
    Scenario(script=tied_weights),
    Scenario(script=uneven_shapes),
    Scenario(script=padding_row),
    Scenario(script=buffers),
    Scenario(script=recurrent_block),
    Scenario(script=modules_as_one_unit),
    Scenario(script=parametrized_weights),
    Scenario(script=gradual_unfreezing, faults=("never unfrozen",)),
    Scenario(script=freezing_half_way),
    Scenario(script=low_rank_adapters),
    Scenario(script=adapters_over_lower_dtype, bound=_FP32_INSIDE),
    Scenario(script=checkpointing),
    Scenario(script=reentrant_checkpointing),
    Scenario(script=checkpointing_inside_units),
    Scenario(script=compiled_blocks),
    Scenario(
        script=inductor_blocks,
        needs="a compiler",
        other_order={Kind.OURS: "the bits of its compiled kernels differed in one run of two"},
    ),
    Scenario(script=meta_init),
    Scenario(script=bf16, dtype=torch.float32, bound=_BF16_BOUND, not_under=_OWN_CAST),
    Scenario(script=uncast_inputs, dtype=torch.float32, bound=_BF16_BOUND, not_under=_OWN_CAST),
    Scenario(script=autocast, dtype=torch.float32, bound=_BF16_BOUND),
    Scenario(
        script=autocast_around_a_step,
        dtype=torch.float32,
        bound=_BF16_BOUND,
        not_under={Kind.FSDP2: "it loses gradients that come late"},
    ),
    Scenario(script=gpt2),
    Scenario(script=gpt2_recomputed),
    Scenario(script=llama, bound=_FP32_INSIDE),
    Scenario(script=unequal_lengths, bound=_FP32_INSIDE),
    Scenario(
        script=t5,
        bound=_FP32_INSIDE,
        other_order={Kind.DDP: "autograd meets the embedding's three uses in another order"},
    ),
    Scenario(script=bert),
    Scenario(script=peft_lora, bound=_FP32_INSIDE, needs="peft"),
)
