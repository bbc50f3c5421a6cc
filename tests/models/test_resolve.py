"""`resolve`: presets, folders, files, dicts and objects become configs; what cannot be says why."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, BertConfig, GPT2Config

from fsdp_lab.base.errors import SpecError
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.presets import PRESETS, facts_of

TINY = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 300}
FEW = [name for name in PRESETS if name.endswith(("-1m", "-124m", "-7b"))]


def test_a_folder_a_file_a_dict_and_an_object_give_the_same_config(tmp_path: Path) -> None:
    GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300).save_pretrained(tmp_path)
    given = [str(tmp_path), str(tmp_path / "config.json"), TINY, AutoConfig.from_pretrained(tmp_path)]
    shapes = {(c.model_type, c.n_embd, c.n_layer, c.n_head, c.vocab_size) for c in map(resolve, given)}
    assert shapes == {("gpt2", 32, 1, 2, 300)}


def test_dropout_is_zero_and_the_config_given_is_left_alone() -> None:
    given = GPT2Config()
    resolved = resolve(given)
    assert given.resid_pdrop == given.attn_pdrop == 0.1
    assert resolved.resid_pdrop == resolved.attn_pdrop == resolved.embd_pdrop == 0
    bert = resolve(BertConfig())
    assert bert.hidden_dropout_prob == bert.attention_probs_dropout_prob == 0 and resolve("t5-1m").dropout_rate == 0
    # noise of routers, stochastic depth, and dropouts of several stages
    mixtral = {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2, "router_jitter_noise": 0.1}
    assert resolve(mixtral).router_jitter_noise == 0 and resolve(mixtral, dropout="config").router_jitter_noise == 0.1
    assert resolve("switch_transformers").router_jitter_noise == 0
    cvt = resolve("cvt")
    assert [*cvt.drop_rate, *cvt.attention_drop_rate, *cvt.drop_path_rate] == [0.0] * 9


SMALL_TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
              "intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
              "num_experts_per_tok": 2, "vocab_size": 300, "layer_types": ["full_attention"], "max_position_embeddings": 64,
              "pad_token_id": 0}  # fmt: skip


@pytest.mark.parametrize(("model_type", "text"), [("qwen3_5_moe", "qwen3_5_moe_text"), ("gemma3", "gemma3_text")])
def test_the_text_of_a_family_that_sees_as_well_is_read_as_a_text_models(model_type: str, text: str) -> None:
    """The head of the first takes the text's part alone, that of the other all."""
    small = {**SMALL_TEXT, "model_type": text}
    config = resolve({"model_type": model_type, "text_config": small, "vision_config": {"num_hidden_layers": 1}})
    part = config.text_config
    assert (part.use_cache, part._experts_implementation) == (False, "eager")
    facts = facts_of(config)
    assert (facts.kind, facts.vocab_size, facts.max_positions) == ("causal", 300, 64)
    assert build_skeleton(config).get_input_embeddings().weight.shape == (300, 32)


def test_padding_and_the_start_of_a_decoder_are_what_the_family_takes() -> None:
    """A byte that would be padding is learned all the same; a family that takes no None keeps its padding. RoBERTa's 34
    positions, which begin behind the padding's id, hold 32 tokens."""
    roberta = {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 34, "vocab_size": 300}
    assert facts_of(roberta).max_positions == 32 and facts_of({**roberta, "model_type": "bert"}).max_positions == 34
    assert resolve({"model_type": "bloom", "pad_token_id": 100}).pad_token_id is None
    assert resolve({"model_type": "modernbert-decoder", "pad_token_id": 0}).pad_token_id == 0
    assert resolve({"model_type": "t5"}).decoder_start_token_id == 0


@pytest.mark.parametrize(("model", "words"), [
    ({"model_type": "gpt3"}, "has no type 'gpt3'.*gpt2"), ({"n_embd": 4}, "no model_type"),
    ({**TINY, "n_embd": "wide"}, "gpt2 refuses the config"),
    ({**TINY, "quantization_config": {"quant_method": "awq"}}, "quantized"),
    ({"model_type": "qwen2_audio"}, "no language model or image classifier of type 'qwen2_audio'"),
    ("/no/such/folder", "neither a preset, nor a file or folder"), ("GPT2-1M", "gpt2-1m"), ("resnet50", "resnet-60m"),
])  # fmt: skip
def test_a_refusal_says_why(model: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        resolve(model)
    assert caught.value.field == "workload.model" and caught.value.hint


def test_an_unusable_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"contains no config\.json"):
        resolve(str(tmp_path))
    bad = tmp_path / "config.json"
    for text, words in (("{", "cannot be read as JSON"), (json.dumps([1]), "not a JSON object")):
        bad.write_text(text)
        with pytest.raises(SpecError, match=words):
            resolve(str(tmp_path))


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(n, marks=pytest.mark.nightly) for n in PRESETS if n not in FEW)])
def test_a_preset_has_the_parameters_it_says(name: str) -> None:
    model = build_skeleton(resolve(name))
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters
    assert all(p.is_meta for p in model.parameters())


def test_presets_and_check_need_neither_torch_nor_transformers() -> None:
    code = ("import sys; from fsdp_lab.models.check import check;" "from fsdp_lab.spec.workload import Workload;"
            "check(Workload()); check(Workload(model='vit-1m', data='images'));"
            "assert not {'torch', 'transformers'} & set(sys.modules)")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
