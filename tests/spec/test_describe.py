"""A Spec as text."""

from __future__ import annotations

import pytest

from fsdp_lab.spec.describe import describe_changes, describe_field, describe_fields, differing_fields, flat_fields
from fsdp_lab.spec.spec import Precision, Spec


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("offload", "all", "offload all"),
        ("sync", 2, "sync every 2"),
        ("compile", True, "compile"),
        ("compile", False, "no compile"),
        ("link", None, "real link"),
        ("forward_prefetch", None, "forward prefetch auto"),
        ("forward_prefetch", 0, "forward prefetch 0"),
        ("precision", {"param": "bf16", "reduce": "fp32"}, "bf16/fp32"),
        ("model", {"code": "build", "source": "", "digest": "0", "missing": []}, "build"),
        ("loss", "package.module:loss", "loss package.module:loss"),
        ("optimizer_args", {"fused": True, "betas": [0.9, 0.95]}, "fused betas=[0.9, 0.95]"),
        ("devices", ["cuda:0", "cuda:1"], "devices cuda:0, cuda:1"),
    ],
)
def test_a_field_as_text(name: str, value: object, text: str):
    assert describe_field(name, value) == text


def test_fields_that_are_off_are_left_out_unless_all_are():
    flat = Spec().replace(offload="all").flat()
    assert describe_fields(flat, ("compile", "offload", "clip_norm")) == "offload all"
    assert describe_fields(flat, ("compile", "clip_norm")) == "no compile no clip norm"
    assert describe_fields({**flat, "forward_prefetch": 0}, ("offload", "forward_prefetch")) == (
        "offload all forward prefetch 0"
    )


def test_changes_as_text():
    before = Spec(link="0.25 GB/s")
    after = before.replace(sharding="shard_grad_op", compile=True, link=None, precision=Precision(param="bf16"))
    assert describe_changes(before.difference(after)) == (
        "sharding full_shard → shard_grad_op, precision fp32 → bf16/fp32, compile off → on, link 0.25 GB/s → off"
    )


def test_a_dict_that_is_no_spec_has_all_fields():
    flat = flat_fields({"strategy": {"backend": "ddp", "sharding": "full_shard"}, "world_size": 3})
    assert flat == Spec().flat() | {"backend": "ddp", "world_size": 3}
    assert differing_fields([flat, Spec().flat()]) == ("backend", "world_size")
