"""Choices: accepted, held with a reason and a way out, and tried again."""

from __future__ import annotations

from hypothesis import given, strategies as st

from fsdp_lab.base.errors import SpecError
from fsdp_lab.dashboard.fields import Choices, ChoiceState
from fsdp_lab.spec.spec import BACKENDS, OFFLOADS, PRECISIONS, SHARDINGS, Spec

FSDP2 = Spec().replace(backend="fsdp2")


def test_a_choice_is_wanted_or_held_with_its_reason_until_it_is_taken_back():
    choices = Choices(FSDP2)
    assert choices.choose(sharding="shard_grad_op") == {"sharding": "shard_grad_op"}
    assert choices.wanted.strategy.sharding == "shard_grad_op" and choices.held == {}
    choices = Choices(FSDP2)
    assert choices.choose(sharding="zero1") == {} and choices.wanted == FSDP2
    assert choices.value("sharding") == "zero1"
    assert choices.notes["sharding"].state is ChoiceState.REFUSED
    assert "FSDP2 always shards the gradients" in choices.notes["sharding"].text
    assert choices.choose(micro_batch=8) == {"micro_batch": 8}, "an unrelated choice passes a held one"
    assert choices.held == {"sharding": "zero1"}
    assert choices.choose(sharding="full_shard") == {} and choices.held == {}
    assert choices.notes["sharding"].state is ChoiceState.IDLE


def test_a_combination_can_be_made_in_any_order_and_the_way_out_is_offered():
    values = {"backend": "ddp", "sharding": "no_shard"}
    for first, second in (("backend", "sharding"), ("sharding", "backend")):
        choices = Choices(FSDP2)
        assert choices.choose(**{first: values[first]}) == {}
        assert choices.choose(**{second: values[second]}) == values
        assert choices.held == {} and choices.wanted.strategy.backend == "ddp"
    choices = Choices(Spec())
    choices.choose(backend="ddp")
    fix = choices.notes["backend"].fix
    assert fix == {"sharding": "no_shard"}
    assert choices.choose(backend="ddp", **fix) == values


def test_a_refusal_by_the_ranks_is_held_too():
    choices = Choices(Spec())
    accepted = choices.choose(offload="all")
    choices.revert(accepted, Spec(), SpecError("strategy.offload", "no room on the host", "use none"))
    assert choices.wanted == Spec()
    assert choices.held == {"offload": "all"}
    assert "no room on the host" in choices.notes["offload"].text


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("backend"), st.sampled_from(BACKENDS)),
            st.tuples(st.just("sharding"), st.sampled_from(SHARDINGS)),
            st.tuples(st.just("precision"), st.sampled_from(sorted(PRECISIONS))),
            st.tuples(st.just("offload"), st.sampled_from(OFFLOADS)),
            st.tuples(st.just("shard_size"), st.sampled_from([None, 1, 2, 4])),
            st.tuples(st.just("forward_prefetch"), st.integers(0, 3)),
        ),
        max_size=25,
    ),
    st.sampled_from([1, 2, 4]),
)
def test_whatever_is_chosen_the_wanted_spec_is_valid_and_nothing_is_lost(chosen, world_size):
    """The last word on each field is either in the wanted Spec or held with a reason; a way out leads out."""
    choices = Choices(Spec(world_size=world_size))
    last = {}
    for name, value in chosen:
        choices.choose(**{name: value})
        last[name] = value
        assert choices.value(name) == value
    for name in last:
        if name in choices.held:
            note = choices.notes[name]
            assert note.state is ChoiceState.REFUSED
            assert note.text
            if note.fix:
                assert choices.wanted.validate(**{name: choices.held[name], **note.fix}) is None
        else:
            assert choices.wanted.flat()[name] == choices.value(name)


def test_devices_given_as_tuple_or_list_are_the_same():
    choices = Choices(Spec(devices=("cpu", "cpu")))
    assert choices.choose(devices=["cpu", "cpu"]) == {}
    assert choices.held == {}


def test_adopting_another_spec_reviews_what_is_held():
    choices = Choices(Spec())
    choices.choose(backend="ddp")
    choices.adopt(Spec().replace(backend="fsdp1", sharding="no_shard"))
    assert choices.held == {"backend": "ddp"}
    assert choices.choose(sharding="no_shard") != {} or choices.wanted.strategy.backend == "ddp"
