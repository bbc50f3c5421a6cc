"""The feed: run to panels, tick by tick."""

import re
from types import SimpleNamespace

import pytest

from fsdp_lab.base.errors import SpecError


def test_steps_arrive_once_and_in_order_and_other_ranks_begin_new_plots(show):
    assert show.reading("") == "gpt2-10m · lab full_shard fp32 · 2 ranks"
    show.lab.run(steps=40)
    show.until(lambda: len(show.steps()) == 40)
    assert show.steps() == list(range(40))
    show.lab.run(world_size=3, steps=4)
    show.until(lambda: show.steps() == list(range(4)))
    assert show.live._scene.ranks == 3


def test_a_switch_is_marked_in_the_plots_and_the_curve_goes_on(show):
    run = show.lab.run()
    show.until(lambda: len(show.steps()) > 10)
    run.apply(sharding="shard_grad_op", offload="all")
    show.until(lambda: len(show.table("frame.markers")) == 1)
    marks = show.table("frame.markers").all()
    assert marks.texts["label"] == ["shard_grad_op, offload all"]
    assert marks.texts["detail"][0].endswith("(parameters and optimizer carried over, 0.41 s)")
    show.until(lambda: show.steps()[-1] > marks.numbers[0, 0] + 5)
    assert show.steps() == list(range(int(show.steps()[-1]) + 1))


def test_another_model_begins_new_plots_at_step_0(show):
    run = show.lab.run()
    show.until(lambda: len(show.steps()) > 30)
    scene = show.live._scene
    run.apply(model="gpt2-1m")
    show.until(lambda: show.live._scene is not scene and len(show.steps()) > 3)
    assert show.steps() == list(range(len(show.steps()))) and len(show.table("frame.markers")) == 0
    assert "gpt2-1m" in show.live._scene.captions()[""]["reading"]


def test_what_the_times_are_worth_is_said_once_for_all_cards(show):
    said = "CPU and Gloo: the shapes are right, the times are not a GPU's."
    assert show.live._scene.captions()[""]["note"] == ""
    show.lab.run(steps=12)
    show.until(lambda: len(show.steps()) == 12)
    show.board.pin()
    show.until(lambda: not show.live._scene.captions()["comparison"]["hidden"])
    captions = show.live._scene.captions()
    assert captions[""]["note"] == said
    assert [card for card, words in captions.items() if "a GPU's" in str(words)] == [""]
    show.lab.run(steps=5).notes += ("Emulated link: 50 MB/s.",)  # of one run in the comparison alone
    show.until(lambda: "Emulated link: 50 MB/s. (" in show.live._scene.captions()["comparison"]["note"])
    assert "not a GPU's" not in show.live._scene.captions()["comparison"]["note"]


def test_what_is_chosen_is_predicted_before_it_lands_and_held_against_what_is_measured(all_panels, show):
    show.until(lambda: "predicted" in show.reading("memory"))  # of what would be started
    assert show.table("memory.predicted").column("peak").size == 2
    run = show.lab.run()
    show.until(lambda: re.search(r"predicted [\d.]+ MiB, measured [\d.]+ MiB", show.reading("memory")) is not None)
    before = show.table("memory.predicted").column("peak").tolist()
    run.pause()
    run.apply(sharding="no_shard")
    show.until(lambda: show.table("memory.predicted").column("peak").tolist() != before)
    assert show.reading("memory").endswith("with the chosen settings")
    assert show.table("memory.predicted").column("peak")[0] > before[0]


def test_where_the_machine_is_calibrated_a_step_is_predicted_too(show):
    asked = []
    show.lab.plan = lambda spec: asked.append(spec) or SimpleNamespace(step_time_s=0.125)
    run = show.lab.run()
    show.until(lambda: "predicted 125 ms a step" in show.reading("throughput"))
    assert asked[0].id == run.spec.id
    tokens = run.spec.global_batch * run.spec.workload.seq_len
    assert show.live._scene.patches()["throughput.predicted"] == {"visible": True, "location": tokens / 0.125}


def test_a_model_of_which_nothing_can_be_predicted_is_trained_all_the_same(all_panels, show, monkeypatch):
    def broken(spec, *, device):
        raise SpecError("workload.model", "nothing is known of it", "use another")

    monkeypatch.setattr("fsdp_lab.dashboard.feed.planned_memory", broken)
    show.lab.run(steps=20)
    show.until(lambda: len(show.steps()) == 20)
    assert "predicted" not in show.reading("memory")


@pytest.mark.parametrize("ranks", ["fewer", "same"])
def test_a_run_that_went_on_is_drawn_with_its_ranks(show, ranks):
    """With fewer in plots of their own; with the same its curve goes on, and a marker says it."""
    run = show.lab.run(recover="ask")
    show.until(lambda: len(show.steps()) > 5)
    show.lab.lose(1)
    show.until(lambda: run.state.name == "BROKEN")
    show.lab.recover(ranks)
    if ranks == "fewer":
        show.until(lambda: show.live._scene.ranks == 1 and len(show.steps()) > 3)
        assert show.steps()[0] == run.switches[1].step
    else:
        show.until(lambda: len(show.table("frame.markers")) == 1 and show.steps()[-1] > run.switches[1].step)
        marks = show.table("frame.markers").all()
        assert marks.texts["label"] == ["resumed"] and "training resumed after a failure" in marks.texts["detail"][0]
        assert show.steps()[0] == 0
