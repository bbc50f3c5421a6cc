"""FLOPs against the published formulas, and the peaks they are put in relation to."""

import math
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsdp_lab.backends.wrapping import prepare, recomputed
from fsdp_lab.base.errors import SpecError
from fsdp_lab.base.hardware import gpu_of_device
from fsdp_lab.models import flops
from fsdp_lab.models.build import build_skeleton
from fsdp_lab.models.configs import resolve
from fsdp_lab.models.flops import BestPeak, Peak, count_flops, device_peak, empty_batch, measured_peak
from fsdp_lab.models.presets import facts_of
from fsdp_lab.spec.spec import Strategy
from tests.covering import tiered
from tests.models.small import BART, SIZES, filled


@pytest.mark.parametrize(("name", "seq_len"), [("gpt2-1m", 64), ("llama-10m", 256)])
def test_a_decoder_costs_6n_and_12lhs_a_token(name: str, seq_len: int) -> None:
    config = resolve(name)
    model = build_skeleton(config)
    tables = ("wte", "wpe", "embed_tokens")
    weights = {n: p.numel() for n, p in model.named_parameters() if p.dim() == 2}
    matrices = sum(count for n, count in weights.items() if n.split(".")[-2] not in tables)
    if config.tie_word_embeddings:
        matrices += config.vocab_size * config.hidden_size
    per_token = 6 * matrices + 12 * config.num_hidden_layers * config.hidden_size * seq_len
    assert count_flops(config, seq_len).model == per_token * seq_len


def counted_while_training(name: str, seq_len: int, recompute: str) -> int:
    """FLOPs of a real forward and backward of one sample on the CPU, under the checkpoints that backends put in."""
    model = filled(name)
    prepare(model, Strategy(recompute=recompute))
    batch = {n: t.zero_() for n, t in empty_batch(facts_of(resolve(name)), 2, seq_len, device="cpu").items()}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the counter knows no CPU attention
        model(**batch)["loss"].backward()
    return int(counter.get_total_flops()) // len(batch["labels"])


@pytest.mark.parametrize(("name", "recompute"), tiered(
    [("gpt2-1m", "full"), ("t5-1m", "full"), ("resnet-1m", "full"), ("llama-1m", "every:2")],
    lambda name, _: name == "gpt2-1m",
))  # fmt: skip
def test_recompute_is_counted_as_a_device_does_it(name: str, recompute: str) -> None:
    strategy = Strategy(recompute=recompute)
    found = count_flops(resolve(name), 32, lambda model: recomputed(model, strategy))
    plain = counted_while_training(name, 32, "none")
    assert counted_while_training(name, 32, recompute) - plain == found.recompute > 0
    assert found.model == count_flops(resolve(name), 32).model == plain


@pytest.mark.slow
def test_resnet_50_costs_what_is_published() -> None:
    # 4.1 G multiply-adds forward (arXiv 1512.03385: 3.8 for its variant), twice that backward, 2 FLOPs each.
    assert count_flops(resolve("resnet-26m"), 2).model == pytest.approx(3 * 2 * 4.1e9, rel=0.03)


OF_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 4}
BAMBA = {"model_type": "bamba", **SIZES, "num_key_value_heads": 2, **OF_MAMBA}


@pytest.mark.parametrize("config", [BART, BAMBA], ids=["looks at values", "its cache has no length"])
def test_a_model_that_cannot_be_counted_is_estimated_aloud(config: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="estimated as 6 N"):
        assert count_flops(resolve(config), 32).model > 0


def test_a_cpu_and_a_gpu_that_is_not_in_the_table_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = device_peak("cpu", torch.float32)
    assert peak.flops_per_s is not None and math.isfinite(peak.flops_per_s) and peak.flops_per_s > 1e8
    assert "measured" in peak.source and "float32" in peak.source
    assert measured_peak("cpu", torch.bool).flops_per_s is None, "it has no matrix products"
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce GTX 1080")
    monkeypatch.setattr(flops, "measured_peak", lambda *given: asked.append(given) or Peak(1e12, "measured: here"))
    assert device_peak("cuda:0", torch.float32).source == "measured: here" and len(asked) == 1
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert device_peak("cuda:0", torch.bfloat16) == (989.4e12, "NVIDIA H200 data sheet, dense bf16") and len(asked) == 1


def test_a_step_above_the_peak_raises_it_and_the_source_says_so() -> None:
    peak = BestPeak(Peak(2e12, "a data sheet"))
    assert peak.reach(1.9e12) == Peak(2e12, "a data sheet")
    assert peak.reach(3e12) == peak.reach(2.5e12) == Peak(3e12, "reached in a training step, above a data sheet")
    assert peak.given == Peak(2e12, "a data sheet")
    assert BestPeak(Peak(None, "no figure")).reach(3e12) == Peak(None, "no figure")


def test_a_product_of_experts_that_fp32_lacks_has_its_way_out() -> None:
    config = {"model_type": "mixtral", **SIZES, "num_key_value_heads": 2, "vocab_size": 384, "num_local_experts": 2}
    with pytest.raises(SpecError, match='set its experts_implementation to "eager"'):
        count_flops(resolve({**config, "experts_implementation": "grouped_mm"}), 8)
    with pytest.warns(UserWarning, match="estimated as 6 N"):
        count_flops(resolve(config), 8)


def test_parameters_that_no_batch_uses_are_known_before_ranks_do_anything() -> None:
    """DDP would fail in its second step."""
    dinov2 = {"model_type": "dinov2", "image_size": 32, "num_labels": 4, "patch_size": 8, **SIZES}
    assert count_flops(resolve(dinov2), 1).unused == ("dinov2.embeddings.mask_token",)
    assert count_flops(resolve("gpt2-1m"), 16).unused == ()
    switch = {"model_type": "switch_transformers", "d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48,
              "vocab_size": 384, "pad_token_id": 0, "num_experts": 2, "decoder_start_token_id": 0}  # fmt: skip
    with pytest.warns(UserWarning, match="estimated as 6 N"):
        unused = count_flops(resolve(switch), 16).unused
    assert unused and all(".experts." in name for name in unused), "a batch may use some"


@pytest.mark.parametrize(("name", "column", "tflops"), [
    ("NVIDIA H100 80GB HBM3", "bf16", 989.4), ("NVIDIA H100 PCIe", "bf16", 756), ("Tesla T4", "bf16", None),
    ("NVIDIA A100-SXM4-80GB", "tf32", 156), ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "tf32", None), ("Tesla T4", "fp16", 65),
    ("NVIDIA A10", "fp16", 125), ("NVIDIA GeForce GTX 1080", "fp16", None), ("NVIDIA H200", "", None),
])  # fmt: skip
def test_the_table_knows_a_gpu_by_its_name_or_not_at_all(name: str, column: str, tflops: float | None) -> None:
    gpu = gpu_of_device(name)
    assert (gpu and gpu.flops_per_s(column)) == (tflops and pytest.approx(tflops * 1e12))
