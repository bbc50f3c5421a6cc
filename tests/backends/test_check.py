"""What is refused before a backend is built, since this torch, the device or the model cannot have it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from fsdp_lab.backends import check
from fsdp_lab.base.errors import SpecError
from fsdp_lab.models import build_skeleton, resolve
from fsdp_lab.spec.spec import Spec

SMALL = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16, "n_positions": 8}


def test_a_limit_of_reductions_is_refused_where_fsdp2_has_none_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton, device = build_skeleton(resolve(SMALL)), torch.device("cpu")
    spec = Spec().replace(model=SMALL, backend="fsdp2", limit_reductions=2)
    monkeypatch.setattr(FSDPModule, "set_reduce_scatter_max_input_buffers", None, raising=False)
    check(skeleton, spec, device)
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_max_input_buffers")
    with pytest.raises(SpecError, match="has no limit to set") as refused:
        check(skeleton, spec, device)
    assert refused.value.fix == {"limit_reductions": 1}
    check(skeleton, spec.replace(**refused.value.fix), device)
