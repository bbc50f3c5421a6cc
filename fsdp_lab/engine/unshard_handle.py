"""`UnshardHandle`: parameters that a caller asked for, outside of any forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import nn

from fsdp_lab.engine.runtime import Runtime
from fsdp_lab.engine.schedule import Direction, OffloadPolicy
from fsdp_lab.engine.unit import Unit


class UnshardHandle:
    """See `unshard`. Issues the gathers when made; `wait` makes the values visible; as a context it keeps them, and at its
    end copies to the shards what was written."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], runtime: Runtime) -> None:
        self._module, self._units, self._runtime = module, tuple(units), runtime
        self._pinned: list[Unit] = []
        for unit in self._units:
            self._issue(unit)

    def wait(self) -> None:
        """Waits until the parameters may be read."""
        try:
            for unit in self._units:
                self._runtime.make_ready(unit, Direction.FORWARD)
            self._settle()
        except BaseException:
            for unit in self._units:
                with suppress(RuntimeError):  # other gathers fail alike, and the first one is told
                    unit.reshard()
            raise

    def __enter__(self) -> nn.Module:
        try:
            for unit in self._units:
                self._issue(unit)  # it may have been freed since
                self._runtime.make_ready(unit, Direction.FORWARD)
                unit.pins += 1
                self._pinned.append(unit)
            self._settle()
        except BaseException:
            self.__exit__()
            raise
        return self._module

    def __exit__(self, *_: object) -> None:
        pinned, self._pinned = self._pinned, []
        for unit in pinned:
            unit.pins -= 1
            for flat in unit.flats:
                flat.write_back()
            unit.reshard()

    def _settle(self) -> None:
        """Let the caller write to the parameters."""
        for flat in (flat for unit in self._units for flat in unit.flats):
            flat.let_others_read()

    def _issue(self, unit: Unit) -> None:
        if unit.is_sharded and unit.policy.offload != OffloadPolicy.NONE:
            unit.copy_to_device(self._runtime.streams)
        if unit.policy.map_shards and not unit.asked_for:  # the caller is given copies, which he may write to
            pins, unit.pins = unit.pins, 0
            unit.reshard()
            unit.pins = pins
        unit.asked_for = True
        unit.unshard(self._runtime.streams)
