"""What is saved or suspended is copied from a device without waiting for it tensor by tensor, and once for all of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from fsdp_lab.backends import state
from tests.engine.simulated import SimulatedDevice


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    simulated = SimulatedDevice()
    with patch.object(state, "streams_of", lambda _: simulated), simulated:
        yield simulated


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_is_bounded_whatever_is_copied(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A model of 7B parameters pinned 84 GB."""
    monkeypatch.setattr(state, "PINNED_BYTES", 64)
    given, pinned_bytes = device.host_memory, list[int]()

    def allocate(numel: int, dtype: torch.dtype, *, pinned: bool = True) -> torch.Tensor:
        pinned_bytes.append(pinned * numel * dtype.itemsize)
        return given(numel, dtype, pinned=pinned)

    monkeypatch.setattr(device, "host_memory", allocate)
    if not waits:
        monkeypatch.setattr(device, "mark", lambda: SimpleNamespace(synchronize=lambda: None))
    copies = state.HostCopies(torch.device("cpu"))
    values = [torch.arange(40.0), torch.ones(3, dtype=torch.bool), torch.full((), 7), torch.empty(0), torch.arange(9.0)]
    queued = [copies.queue(v) for v in values]
    copies.wait()
    assert sum(pinned_bytes) <= 3 * 64
    assert bool(device.races) is not waits, "a buffer is read before its copies have come"
    assert all(torch.equal(copy, v) for copy, v in zip(queued, values, strict=True))
