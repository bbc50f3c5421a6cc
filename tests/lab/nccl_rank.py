"""Ranks whose NCCL is simulated (see `tests.wire.simulated_nccl`), for a Lab: the interface of `fsdp_lab.rank`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

from fsdp_lab import rank
from fsdp_lab.rank import host_store, rendezvous
from tests.wire.simulated_nccl import SimulatedNccl

__all__ = ["Session", "host_store"]


class Session(rank.Session):
    """The simulation lasts as long as the session, in the engine's main thread, where all calls run. One thread computes:
    on a busy machine several would wait for each other in every operator."""

    def __init__(self, **arguments: Any) -> None:
        device, arguments = SimulatedNccl(), arguments | {"threads": 1}
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(rendezvous, "nccl_of", lambda info: device))
            stack.enter_context(device.running())
            super().__init__(**arguments)
            self._simulation = stack.pop_all()

    def close(self) -> None:
        super().close()
        self._simulation.close()
