"""Ways to train a model, behind one interface (base.py): our engine ("lab"), FSDP2, FSDP1, DDP, and the user's ("yours")."""

from collections.abc import Collection, Mapping

import torch
from torch import distributed as dist, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab.backends.base import Backend, check_optimizer, destroy
from fsdp_lab.backends.ddp import DDP
from fsdp_lab.backends.flat import FlatBackend
from fsdp_lab.backends.fsdp1 import FSDP1
from fsdp_lab.backends.fsdp2 import FSDP2
from fsdp_lab.backends.state import buffers_in, fill
from fsdp_lab.backends.transfer import transfer_state
from fsdp_lab.backends.yours import Yours
from fsdp_lab.base.errors import SpecError
from fsdp_lab.engine import ParamShard, build_mesh, fully_shard, known_groups, sharded_parameters
from fsdp_lab.models.build import freeze, frozen_names
from fsdp_lab.models.wrapping import units
from fsdp_lab.spec.param_groups import unmatched
from fsdp_lab.spec.spec import YOURS, Spec

__all__ = ["Backend", "ParamShard", "build", "fill", "fully_shard", "sharded_parameters", "transfer_state"]

_Kind = type[FlatBackend] | type[FSDP2] | type[FSDP1] | type[DDP] | type[Yours]
_BACKENDS: Mapping[str, _Kind] = {"lab": FlatBackend, "fsdp2": FSDP2, "fsdp1": FSDP1, "ddp": DDP, YOURS: Yours}


def check(skeleton: nn.Module, spec: Spec, device: torch.device) -> None:
    """Raises SpecError for combinations that depend on the model, the device or torch. Changes nothing; not collective."""
    s = spec.strategy
    frozen_names(skeleton, spec.workload.freeze)
    check_optimizer(spec.workload)
    names = [name for name, _ in skeleton.named_parameters()]
    patterns = [pattern for group in spec.workload.param_groups or () for pattern in group.match]
    if (wrong := unmatched(patterns, names)) is not None:
        hint = f"give a pattern of names such as {names[0]}, {names[-1]}"
        raise SpecError("workload.param_groups", f"{wrong!r} matches no parameter", hint, {"param_groups": None})
    if s.traits.has_units:
        units(skeleton, s.wrap)
    scalar = next((name for name, p in skeleton.named_parameters() if not p.dim()), "")
    if scalar and not s.traits.takes_scalars:
        reason = f"{s.backend} takes no scalar parameters, and {scalar} is one"
        hint = "use backend lab or ddp, or give it one dimension"
        raise SpecError("strategy.backend", reason, hint, {"backend": "lab"})
    _BACKENDS[s.backend].check(spec, device)


def build(skeleton: nn.Module, spec: Spec, device: torch.device, *, mesh: DeviceMesh | None = None) -> Backend:
    """Wraps a skeleton; collective. It holds no parameters yet: use `fill` or `transfer_state`. A failure leaves no groups.
    `mesh`: by default of the default group, the Wire. Benchmarks pass one of a plain torch group."""
    if not all(p.is_meta for p in skeleton.parameters()):
        raise ValueError("a backend is built from a skeleton: fsdp_lab.models.build.build_skeleton")
    check(skeleton, spec, device)
    freeze(skeleton, spec.workload.freeze)
    before = known_groups()
    try:
        mesh = mesh or build_mesh(device.type, shard_size=spec.shard_factor)
        backend = _BACKENDS[spec.strategy.backend](skeleton, spec, mesh, device)
    except BaseException:
        destroy(_groups_since(before))
        raise
    backend.groups = _groups_since(before)
    if spec.workload.is_own:
        buffers = buffers_in(backend.module, persistent=False)
        backend.constants = {name: b.detach().to("cpu", copy=True) for name, b in buffers}
    return backend


def _groups_since(before: Collection[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    return [group for group in known_groups() if group not in before]
