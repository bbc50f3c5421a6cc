"""Our own engine (`fsdp_lab.engine`) as a backend."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_lab import engine
from fsdp_lab.backends.base import Held, Piece, TorchBackend
from fsdp_lab.backends.naming import hub_of, name_lab
from fsdp_lab.backends.wrapping import prepare
from fsdp_lab.engine.flat import FlatBuffer
from fsdp_lab.events import Role
from fsdp_lab.spec import Spec


class Lab(TorchBackend):
    """Each unit is a flat buffer; the optimizer is given flat shards, one for each buffer and weight-decay group."""

    def __init__(self, skeleton: nn.Module, spec: Spec, mesh: DeviceMesh, device: torch.device) -> None:
        inside = engine.units(skeleton, spec.strategy.wrap)
        outer = prepare(skeleton, spec.strategy)
        grid = engine.Grid.of(mesh, spec.strategy)
        options: dict[str, Any] = {"mesh": grid, "strategy": spec.strategy, "group_of": _decays}
        for group in inside:
            engine.fully_shard([outer(m) for m in group], **options)
        engine.fully_shard(skeleton, **options)
        name_lab(skeleton, hub_of(mesh))
        self._offload = spec.strategy.offload
        super().__init__(skeleton, list(map(_piece, engine.shards_of(skeleton))), spec, mesh, device)
        if spec.strategy.dtypes.keep_low_precision_gradients:  # torch's optimizers want them in the dtype of the shards
            self.optimizer.register_step_pre_hook(lambda *_: engine.raise_gradients(skeleton))

    def gradient(self, piece: Piece) -> Tensor | None:
        p = piece.param
        if p is not None and p.grad is not None and p.grad.dtype != p.dtype:
            engine.raise_gradients(self.module)  # clipped or unscaled in a lower precision they would vanish
        return super().gradient(piece)

    def standing_bytes(self) -> int:
        """What offload of the optimizer leaves on the device, and what ZeRO-1 keeps gathered."""
        return sum(flat.standing_bytes for flat in self._flats())

    def passing(self) -> Iterator[Held]:
        near = (
            Role.PARAMETERS if self._offload == "optimizer" else Role.COMMUNICATION
        )  # it stays, or is only to be sent
        for flat in self._flats():
            yield Role.UNSHARDED, flat.full
            held = ((near, flat.near), (Role.UNSHARDED, flat.few), (Role.GRADIENTS, flat.gradient))
            yield from ((role, t) for role, t in held if t is not None)
        for reduction in engine.runtime_of(self.module).reducing:
            yield Role.GRADIENTS, reduction.whole
            yield Role.GRADIENTS, reduction.shard

    def leaves(self) -> Iterator[Tensor]:
        for flat in self._flats():
            yield from flat.parameters if flat.trainable else ()

    def unit_modules(self) -> list[tuple[str, nn.Module]]:
        return [(unit.name, m) for unit in engine.units_of(self.module) for m in unit.modules if m is not self.module]

    @contextmanager
    def micro_batch(self, *, communicate: bool) -> Iterator[None]:
        with nullcontext() if communicate else engine.no_sync(self.module):
            yield

    def _flats(self) -> Iterator[FlatBuffer]:
        return (flat for unit in engine.units_of(self.module) for flat in unit.flats)

    def release(self, busy: Collection[int] = ()) -> None:
        super().release(busy)
        engine.free(self.module, busy=busy)


def _piece(s: engine.Shard) -> Piece:
    return Piece(name=s.name, shape=s.shape, start=s.start, stop=s.stop, local=s.local, param=s.param, offset=s.offset)


def _decays(name: str, parameter: Tensor) -> str:
    return "decays" if parameter.dim() >= 2 else "does not decay"
