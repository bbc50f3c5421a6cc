"""Where ranks share a GPU, collectives go through the host: what is copied, and that results are the same; simulated."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_lab.wire.group import stage
from tests.engine.simulated import SimulatedDevice
from tests.pool import Place, Pool
from tests.wire.test_collectives import OPERATIONS, _expected, _sums


class Copies(TorchDispatchMode):
    """Counts bytes that are copied from one tensor to another."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy" in str(function):
            self.nbytes += args[0].nbytes
        return function(*args, **(kwargs or {}))


def test_an_output_that_is_no_input_is_not_copied_to_the_host() -> None:
    shard, whole = torch.arange(4.0), torch.full((8,), torch.nan)
    with Copies() as copies:
        (sent,), (received,), unstage = stage(SimulatedDevice(), [shard], [whole])
    assert copies.nbytes == shard.nbytes and torch.equal(sent, shard) and received.shape == whole.shape
    received.copy_(torch.arange(8.0))
    with Copies() as copies:
        unstage()
    assert copies.nbytes == whole.nbytes and torch.equal(whole, torch.arange(8.0))


def test_one_that_is_both_is_one_tensor_on_the_host_and_is_copied_once_in_each_direction() -> None:
    t = torch.arange(4.0).requires_grad_()
    with Copies() as copies:
        (sent,), (received,), unstage = stage(SimulatedDevice(), [t], [t])
    assert sent is received and copies.nbytes == t.nbytes and not sent.requires_grad
    received.mul_(2)
    with torch.no_grad():
        unstage()
    assert t.tolist() == [0, 2, 4, 6]


def _staged_sums(place: Place, n: int) -> Any:
    """As if all tensors were on a GPU."""
    wire, route = place.world, type(place.world)._route

    def staged(inputs: Any, outputs: Any, whole_group: bool) -> Any:
        group, *_, unstage = route(wire, inputs, outputs, whole_group)
        assert unstage is None
        return group, *stage(SimulatedDevice(), inputs, outputs)

    with mock.patch.object(wire, "_route", staged):
        return _sums(place, n, OPERATIONS)


@pytest.mark.parametrize("reduction", ["native", "auto"])
def test_sums_are_the_same_through_the_host(pool: Pool, reduction: str) -> None:
    for rank, sums in enumerate(pool.run(_staged_sums, 2, 500, reduction=reduction)):
        for op, (whole, part) in sums.items():
            torch.testing.assert_close(whole, _expected(2, 500, op), rtol=0, atol=1e-6)
            start = rank * 500
            torch.testing.assert_close(part, _expected(2, 1000, op)[start : start + 500], rtol=0, atol=1e-6)
