"""Choices: accepted, held with a reason and a way out, and tried again."""

from hypothesis import given, strategies as st

from fsdp_lab.dashboard.fields import Choices, ChoiceState
from fsdp_lab.spec.spec import BACKENDS, OFFLOADS, PRECISIONS, SHARDINGS, Spec


@given(
    st.lists(
        st.one_of(st.tuples(st.just("backend"), st.sampled_from(BACKENDS)),
                  st.tuples(st.just("sharding"), st.sampled_from(SHARDINGS)),
                  st.tuples(st.just("precision"), st.sampled_from(sorted(PRECISIONS))),
                  st.tuples(st.just("offload"), st.sampled_from(OFFLOADS)),
                  st.tuples(st.just("shard_size"), st.sampled_from([None, 1, 2, 4])),
                  st.tuples(st.just("forward_prefetch"), st.integers(0, 3))),
        max_size=25,
    ),
    st.sampled_from([1, 2, 4]),
)  # fmt: skip
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
            assert note.state is ChoiceState.REFUSED and note.text
            if note.fix:
                assert choices.wanted.validate(**{name: choices.held[name], **note.fix}) is None
        else:
            assert choices.wanted.flat()[name] == choices.value(name)


def test_devices_given_as_tuple_or_list_are_the_same_and_adopting_another_spec_reviews_what_is_held():
    choices = Choices(Spec(devices=("cpu", "cpu")))
    assert choices.choose(devices=["cpu", "cpu"]) == {} and choices.held == {}
    choices = Choices(Spec())
    choices.choose(backend="ddp")
    choices.adopt(Spec().replace(backend="fsdp1", sharding="no_shard"))
    assert choices.held == {"backend": "ddp"}
    assert choices.choose(sharding="no_shard") != {} or choices.wanted.strategy.backend == "ddp"
