"""Ours against FSDP2 in bf16 and fp16: casts stand at the same places and sums go in the same order, so bits are equal.

What differs, and why: DDP computes in low precision by autocast, which leaves normalisation, softmax and loss in fp32: it
can only be near (tests/backends/test_parity.py). FSDP2 casts no buffers, so Llama's rotary frequencies stay fp32 under it;
where a strategy asks for bf16 buffers ours has the bits of FSDP1.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_lab.spec.spec import Precision
from tests.covering import tiered
from tests.engine.parity import Outcomes, Plan, assert_equal, plan, spec

STEPS = 2
PRECISIONS = {
    "bf16": "bf16",
    "bf16 sums": Precision(param="bf16", reduce="bf16"),
    "fp16": "fp16",
    "fp32 sums of fp16": Precision(param="fp16", reduce="fp32"),
    "bf16 sums of fp32": Precision(param="fp32", reduce="bf16"),
    "fp32 output": Precision(param="bf16", output="fp32"),
}


def steady(model: str, world_size: int, **changes: Any) -> Plan:
    return plan((spec(model, world_size, **changes), STEPS))


def compare(outcomes: Outcomes, model: str, world_size: int, *strategies: dict[str, Any], **common: Any) -> None:
    """FSDP2 with `common`, and ours with `common` and each of the strategies."""
    lab = [steady(model, world_size, backend="lab", **{**common, **s}) for s in strategies or ({},)]
    wanted, *found = outcomes.of(steady(model, world_size, **common), *lab)
    for got in found:
        assert_equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "t5"])
def test_every_kind_of_model(outcomes: Outcomes, model: str) -> None:
    """In bf16, whose sums are in fp32 or in bf16, and in fp16."""
    for precision in ("bf16" if model == "gpt2" else "bf16 sums", "fp16"):
        compare(outcomes, model, 3, precision=PRECISIONS[precision], optimizer="sgd")


@pytest.mark.parametrize("precision", tiered(PRECISIONS, lambda precision: precision in ("bf16 sums", "fp16")))
def test_every_precision(outcomes: Outcomes, precision: str) -> None:
    """In fp16 the sum of W summands is divided in two parts, before and after, the same for ours and FSDP2."""
    compare(outcomes, "llama", 2, precision=PRECISIONS[precision], optimizer="adamw")


@pytest.mark.slow
def test_hybrid_and_smaller_groups(outcomes: Outcomes) -> None:
    common = {"precision": PRECISIONS["bf16 sums"], "optimizer": "sgd"}
    compare(outcomes, "gpt2", 4, {"offload": "all"}, sharding="hybrid_shard", **common)
    compare(outcomes, "gpt2", 4, reshard_size=2, **common)


@pytest.mark.parametrize(
    ("precision", "sync"), tiered([("bf16", "every"), ("fp16", "last")], lambda precision, sync: sync == "last")
)
def test_accumulation(outcomes: Outcomes, precision: str, sync: str) -> None:
    """Gradients are summed in fp32 where the sum is fp32, over micro-batches as over ranks."""
    common = {"precision": PRECISIONS[precision], "optimizer": "sgd", "accumulate": 3, "sync": sync}
    compare(outcomes, "gpt2", 2, {"sharding": "zero1"}, {"offload": "optimizer"}, **common)


def test_low_gradients_until_the_step(outcomes: Outcomes) -> None:
    """They are brought to fp32 later than otherwise, which changes no bit as long as nothing is added to them."""
    low = Precision(param="bf16", reduce="bf16", keep_low_precision_gradients=True)
    common = {"optimizer": "sgd", "backend": "lab"}
    one, two, offloaded = outcomes.of(
        steady("gpt2", 3, precision=PRECISIONS["bf16 sums"], **common),
        steady("gpt2", 3, precision=low, **common),
        steady("gpt2", 3, precision=low, offload="all", **common),
    )
    assert_equal(two, one)
    assert_equal(offloaded, one)


def test_buffers_in_bf16_are_as_fsdp1_has_them(outcomes: Outcomes) -> None:
    """FSDP2 and DDP have no dtype for them, so the backend casts them."""
    options = {"optimizer": "sgd"}
    ours, fsdp1, fsdp2, ddp, low_sums = outcomes.of(
        *(steady("llama", 2, backend=b, precision="bf16-pure", **options) for b in ("lab", "fsdp1", "fsdp2", "ddp")),
        steady("llama", 2, precision=PRECISIONS["bf16 sums"], **options),
    )
    assert_equal(fsdp1, ours)
    assert_equal(fsdp2, ours)
    assert ddp.buffers == ours.buffers != low_sums.buffers


@pytest.mark.slow
def test_batchnorm_stays_in_fp32(outcomes: Outcomes) -> None:
    """Torch wants it in the dtype of its running statistics, and FSDP1 leaves it so by itself."""
    options = {"precision": "bf16", "optimizer": "sgd"}
    fsdp1, *others = outcomes.of(
        *(steady("resnet", 2, backend=b, **options) for b in ("fsdp1", "fsdp2", "lab")),
        steady("resnet", 2, backend="lab", offload="all", **options),
        steady("resnet", 2, backend="lab", precision=Precision(param="bf16", buffer="bf16"), optimizer="sgd"),
    )
    for other in others:
        assert_equal(other, fsdp1)
