"""What a step of a settled training makes: Python objects of tensors cost the host more than the work they stand for."""

from copy import deepcopy
from typing import Any

import pytest
import torch

from fsdp_lab.bench.host import tensors_made
from fsdp_lab.engine import flats_of, full_state, sharded_parameters, units_of
from tests.engine.toys import Net, batch, by_block, make, mean_square, update
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
        update(optimizer)

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


def computed(place: Place, foreach: bool) -> tuple[dict[str, torch.Tensor], list[int], int, int, bool]:
    """Values after three steps, before the last of which somebody holds a moment that was loaded; how many tensors each
    computed first moments with; how many buffers and parameters there are; whether what is held is the moment still."""
    model, x = by_block(make(Net)), batch(0, place.rank)
    parameters, tensors = list(model.parameters()), list[int]()
    optimizer, held = torch.optim.AdamW(parameters, foreach=foreach), parameters[0]
    for i in range(3):
        if i == 2:
            optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
            held = optimizer.state[parameters[0]]["exp_avg"].to_local()
        mean_square(model, x).backward()
        with torch.autograd.profiler.profile() as profiler:
            optimizer.step()
        tensors.append(sum(event.name == "aten::lerp_" for event in profiler.function_events))
        optimizer.zero_grad()
    same = torch.equal(held, optimizer.state[parameters[0]]["exp_avg"].to_local())
    return dict(full_state(model)), tensors, len(flats_of(model)), len(parameters), same


def test_a_list_is_computed_a_run_at_a_time_unless_somebody_holds_a_state_with_the_same_bits(pool: Pool) -> None:
    in_lists, one_by_one = (pool.run(computed, 2, foreach) for foreach in (True, False))
    for (values, tensors, flats, parameters, same), (single, *_) in zip(in_lists, one_by_one, strict=True):
        assert flats <= tensors[0] == tensors[1] < tensors[2] < parameters, "padding ends a run"
        assert same and all(torch.equal(values[name], single[name]) for name in single)
