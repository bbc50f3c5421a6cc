"""What is saved or suspended is copied from a device without waiting for it tensor by tensor, and once for all of it."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from fsdp_lab.backends import state
from tests.engine.simulated import SimulatedDevice


@pytest.mark.parametrize("waits", [True, False])
def test_all_copies_are_waited_for_once(waits: bool) -> None:
    device = SimulatedDevice()
    with patch.object(state, "streams_of", lambda _: device), device:
        values = [torch.full((3, 2), float(i)) for i in range(4)]
        copies = state.HostCopies(torch.device("cpu"))
        queued = [copies.queue(v) for v in values]
        assert device.counts["copies"] == 4 and device.counts["synchronisations"] == 0
        if waits:
            copies.wait()
        total = sum(copy.sum() for copy in queued)
    assert total == 36 and all(copy.shape == (3, 2) for copy in queued)
    assert bool(device.races) is not waits, "read before it has come"
    assert device.counts["synchronisations"] == waits
