"""`build`: the backend that a Spec names, by name."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_lab.backends.base import Backend, build_mesh
from fsdp_lab.spec import Spec


def build(skeleton: nn.Module, spec: Spec, device: torch.device) -> Backend:
    """Wrap a skeleton; collective. Its values are not set: `fill` or `carry` does that."""
    if not all(p.is_meta for p in skeleton.parameters()):
        raise ValueError("a backend is built from a skeleton: fsdp_lab.models.build_skeleton")
    mesh = build_mesh(spec, device)
    match spec.strategy.backend:
        case "fsdp2":
            from fsdp_lab.backends.fsdp2 import FSDP2

            return FSDP2(skeleton, spec, mesh, device)
        case "fsdp1":
            from fsdp_lab.backends.fsdp1 import FSDP1

            return FSDP1(skeleton, spec, mesh, device)
        case "ddp":
            from fsdp_lab.backends.ddp import DDP

            return DDP(skeleton, spec, mesh, device)
        case name:
            raise NotImplementedError(f"the backend {name} is refused by Spec")
