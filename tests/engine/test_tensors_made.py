"""What a step of a settled training makes: Python objects of tensors cost the host more than the work they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_lab.bench.host import tensors_made
from fsdp_lab.engine import sharded_parameters, units_of
from tests.engine.toys import Net, batch, by_block, make, mean_square
from tests.pool import Place, Pool

STEPS = 6
MOST_OF_A_UNIT = 6  # of flat regions


def made(place: Place, flat: bool, foreach: bool) -> tuple[list[int], int, int, int, int]:
    """DTensors made in each step from the fourth on, and tensors kept; those made in sharding, with parameters and units."""
    model: Any = make(Net)
    (sharding, *_), _ = tensors_made(lambda: by_block(model), 1)
    x, parameters = batch(0, place.rank), list(model.parameters())
    optimizer = torch.optim.AdamW(sharded_parameters(model) if flat else parameters, foreach=foreach)

    def step() -> None:
        mean_square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return *tensors_made(step, STEPS), sharding, len(parameters), len(units_of(model))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_each_step_makes_as_many_tensors_and_keeps_none(flat: bool, foreach: bool, pool: Pool) -> None:
    for counts, kept, sharding, parameters, units in pool.run(made, 2, flat, foreach):
        assert sharding >= parameters, "they are counted"
        assert len(counts) == STEPS and len(set(counts)) == 1
        assert kept < STEPS - 1, "one in each step; a thread of Gloo may still hold those of a collective"
        assert not flat or counts[0] <= MOST_OF_A_UNIT * units


@pytest.mark.parametrize("foreach", [False, True])
def test_a_settled_step_of_single_parameters_makes_only_what_adamw_itself_does(foreach: bool, pool: Pool) -> None:
    """A square root of each second moment, which it also divides where it goes by single tensors; no gradient."""
    for counts, _, _, parameters, _ in pool.run(made, 2, False, foreach):
        assert max(counts) <= (1 if foreach else 2) * parameters
